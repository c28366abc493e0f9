"""Our operations as chains, over a communicator of any backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from inputs import Check, Inputs, check_plan, check_rows, check_sums
from timing import Chain, fence, first, link
from workloads import SUMMABLE, Workload

import jax_ep


@dataclasses.dataclass(frozen=True)
class Operation:
    """One line of the table.

    Attributes:
      name: what it is, without the backend.
      chain: how it is repeated.
      check: runs it once and raises AssertionError if the result is wrong; None
        where its parts were checked.
      moves: the ceilings whose bytes it moves, "dispatch" and "combine"; none
        for a plan.
      slow: expected to be far from the others: fewer repetitions.
      counts_first: no row can go before all ranks have told their counts.
    """

    name: str
    chain: Chain
    check: Check | Callable[[], None] | None
    moves: tuple[str, ...] = ()
    slow: bool = False
    counts_first: bool = False

    @property
    def single(self) -> bool:
        """One operation, not a sequence."""
        return "+" not in self.name


def expected_us(w: Workload) -> float:
    """About what dispatch or combine takes on GPUs: chooses lengths of chains."""
    return 15 + max(w.wire_bytes, w.local_bytes) / 300e3


def jax_ep_operations(inputs: Inputs, comm: jax_ep.Communicator) -> list[Operation]:
    """Plan, dispatch, combine and their sequences on `comm`'s backend."""
    w = inputs.workload

    def plan_of(topk_idx):
        return jax_ep.make_plan(
            topk_idx, comm=comm, num_experts=w.num_experts, capacity=w.num_slots
        )

    # Along a chain the plan is linked and rows stay as they are, because XLA
    # updates integers in place on every platform. The reference's dispatch
    # gathers all tokens whatever the plan says, so there the rows are linked,
    # as integers.
    reference = comm.backend == "xla"
    route = "recv_src" if reference else "_routes"

    def relink(context, carried, result):
        # A native call ends with all of its results, so one of them will do.
        leaves = jax.tree.leaves(result)
        return link(carried, context[-1], *(leaves if reference else leaves[:1]))

    def plan_start(topk_idx):
        return (first(topk_idx),), topk_idx

    def start_with_rows(rows, topk_idx):
        return (plan_of(topk_idx), first(rows)), rows

    def start_with_plan(rows, topk_idx):
        plan = fence(plan_of(topk_idx))
        return (plan, rows, first(getattr(plan, route))), getattr(plan, route)

    def move_by(operation):
        def move(context, carried):
            plan, rows, _ = context
            return operation(rows, dataclasses.replace(plan, **{route: carried}))

        return move

    def combine_chain():
        return Chain(
            "combine",
            (inputs.rows, inputs.topk_idx),
            start_with_plan,
            move_by(jax_ep.combine),
            relink,
            linked=inputs.routes,
            opaque=not reference,
        )

    def dispatch_chain():
        if not reference:
            return dataclasses.replace(
                combine_chain(),
                name="dispatch",
                args=(inputs.tokens, inputs.topk_idx),
                move=move_by(jax_ep.dispatch),
            )
        bits = inputs.bits(inputs.tokens)
        return Chain(
            "dispatch",
            (bits, inputs.topk_idx),
            start_with_rows,
            lambda context, rows: jax_ep.dispatch(rows, context[0]),
            relink,
            linked=bits,
            opaque=False,
        )

    topk_idx, x, y = inputs.topk_idx, inputs.tokens, inputs.rows

    def check_dispatch():
        dispatched = lambda x, topk_idx: jax_ep.dispatch(x, plan_of(topk_idx))  # noqa: E731
        return check_rows(inputs, dispatched, x, topk_idx)

    def check_combine():
        combined = lambda y, topk_idx: jax_ep.combine(y, plan_of(topk_idx))  # noqa: E731
        return check_sums(inputs, combined, y, topk_idx)

    def plan_dispatch_of(x, topk_idx):
        return jax_ep.plan_dispatch(
            x, topk_idx, comm=comm, num_experts=w.num_experts, capacity=w.num_slots
        )

    def check_plan_dispatch():
        rows = lambda x, topk_idx: plan_dispatch_of(x, topk_idx)[1]  # noqa: E731
        # As rows it moves the ids themselves.
        plan = lambda topk_idx: plan_dispatch_of(topk_idx, topk_idx)[0]  # noqa: E731
        check_rows(inputs, rows, x, topk_idx).run()
        check_plan(inputs, plan).run()

    dispatch_is_right = check_dispatch()
    operations = [
        Operation(
            "plan",
            Chain(
                "plan",
                (topk_idx,),
                plan_start,
                lambda _, topk_idx: plan_of(topk_idx),
                relink,
                linked=topk_idx,
                opaque=not reference,
            ),
            check_plan(inputs, plan_of),
        ),
        Operation(
            "dispatch",
            dispatch_chain(),
            dispatch_is_right,
            ("dispatch",),
        ),
        Operation(
            "plan + dispatch",
            Chain(
                "plan + dispatch",
                (topk_idx, x),
                lambda topk_idx, x: ((x, first(topk_idx)), topk_idx),
                lambda context, topk_idx: jax_ep.dispatch(
                    context[0], plan_of(topk_idx)
                ),
                relink,
                linked=topk_idx,
            ),
            dispatch_is_right,
            ("dispatch",),
        ),
    ]
    if not reference:
        operations.append(
            Operation(
                "plan_dispatch",
                Chain(
                    "plan_dispatch",
                    (topk_idx, x),
                    lambda topk_idx, x: ((x, first(topk_idx)), topk_idx),
                    lambda context, topk_idx: plan_dispatch_of(context[0], topk_idx)[1],
                    relink,
                    linked=topk_idx,
                ),
                check_plan_dispatch,
                ("dispatch",),
                counts_first=True,
            )
        )
    if w.dtype in SUMMABLE:
        operations += [
            Operation(
                "combine",
                combine_chain(),
                check_combine(),
                ("combine",),
            ),
            Operation(
                "dispatch + combine",
                Chain(
                    "dispatch + combine",
                    (x, topk_idx),
                    lambda x, topk_idx: (plan_of(topk_idx), x),
                    lambda plan, x: jax_ep.combine(jax_ep.dispatch(x, plan), plan),
                    lambda plan, x, result: result,
                    max_length=_growing_length(w),
                ),
                None,
                ("dispatch", "combine"),
            ),
        ]
    return operations


def _growing_length(w: Workload) -> int:
    """How often rows can be summed over R ranks and stay finite."""
    digits = 4.0 if w.dtype == "f16" else 36.0
    return min(128, int(digits / max(np.log10(w.num_ranks), 0.01)))
