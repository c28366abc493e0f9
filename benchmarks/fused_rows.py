"""The table fused: dispatch and permute in two steps, and in one kernel."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from expert_rows import aligned_plan, fitting_places
from inputs import Inputs, as_bits, check_rows
from layer_tables import Tables
from operations import expected_us
from report import FAILURES
from timing import Chain, fence, first, link
from workloads import Workload, workload_a, workload_cpu

import jax_ep
from jax_ep._operations import fused


def table(run: Tables, comm: jax_ep.Communicator) -> None:
    """Measures and prints it, with few tokens too unless a number was asked for."""
    w = run.workload(workload_a if run.on_gpu else workload_cpu)
    _one_workload(run, comm, w, with_weights=True)
    if not run.options.T:
        fewer = dataclasses.replace(w, num_tokens=max(1, w.num_tokens // 4))
        _one_workload(run, comm, fewer, with_weights=False)


def _one_workload(
    run: Tables, comm: jax_ep.Communicator, w: Workload, with_weights: bool
) -> None:
    alignment = run.options.alignment
    fused = Fused(run.mesh, w, comm, alignment)
    run.report.say(
        f"\nfused: {w}, alignment {alignment}, S = {fused.places}; both sides "
        "number the expert rows"
    )
    try:
        fused.check()
    except FAILURES as e:
        run.failure("dispatch_permute", e)
        return
    run.report.head({"operation": 44, "us": 10, "p95": 10, "of two steps": 12})
    lines = fused.lines(with_weights)
    chains = {name: chain for name, (chain, _) in lines.items()}
    two_steps: dict[bool, float] = {}
    for name, stats in run.measured(chains, lambda name: expected_us(w)):
        weighted = lines[name][1]
        if name.startswith("dispatch, "):
            two_steps[weighted] = stats.median
        base = two_steps.get(weighted)
        share = None if base is None else stats.median / base
        run.report.row(
            [
                name,
                f"{stats.median:.1f}",
                f"{stats.p95:.1f}",
                "" if share is None else f"{share:.3f}",
            ]
        )
        run.record(
            "fused",
            w,
            stats,
            operation=name,
            share_of_two_steps=share and round(share, 4),
        )


class Fused:
    """dispatch, expert_rows and permute, and dispatch_permute, as chains.

    All chains are linked in the same way, through both arrays that decide where
    rows go: a plan's routes, and recv_topk_idx, without which XLA would number
    the expert rows once for all repetitions.
    """

    def __init__(self, mesh, w: Workload, comm: jax_ep.Communicator, alignment: int):
        self.comm = comm
        self.w = w
        self.alignment = alignment
        self.places = fitting_places(w, alignment)
        self.inputs = Inputs(mesh, w)
        weights = np.random.default_rng(1).random((w.num_ranks * w.num_tokens, w.top_k))
        self.weights = self.inputs.put(weights.astype(np.float32))

    def _plan(self, topk_idx):
        return aligned_plan(topk_idx, self.comm, self.w, self.alignment, self.places)

    @staticmethod
    def _two_steps(plan, x, *others):
        rows, *received = jax_ep.dispatch((x, *others), plan)
        return jax_ep.permute(rows, plan), *received

    @staticmethod
    def _one_step(plan, x, *others):
        rows, received = fused.dispatch_permute([x], others, plan)
        return *rows, *received

    def check(self) -> None:
        """What dispatch brings against NumPy; then both ways, bit for bit."""

        def wrong(topk_idx, x, weights):
            plan = self._plan(topk_idx)
            both = self._two_steps(plan, x, weights), self._one_step(plan, x, weights)
            pairs = zip(*(map(as_bits, way) for way in both), strict=True)
            return sum((a != b).any(1).sum() for a, b in pairs)

        x, topk_idx = self.inputs.tokens, self.inputs.topk_idx
        check_rows(
            self.inputs,
            lambda x, topk_idx: jax_ep.dispatch(x, self._plan(topk_idx)),
            x,
            topk_idx,
        ).run()
        self.inputs.count_wrong(
            "dispatched and permuted", wrong, topk_idx, x, self.weights
        ).run()

    def _chain(self, name, move, *leaves) -> Chain:
        def start(topk_idx, *leaves):
            plan = fence(self._plan(topk_idx))
            carried = plan._routes, plan.recv_topk_idx
            return (plan, leaves, tuple(map(first, carried))), carried

        def moved(context, carried):
            plan, leaves, _ = context
            routes, recv_topk_idx = carried
            plan = dataclasses.replace(
                plan, _routes=routes, recv_topk_idx=recv_topk_idx
            )
            return move(plan, *leaves)

        def relink(context, carried, result):
            sources = jax.tree.leaves(result)
            return tuple(
                link(array, value, *sources)
                for array, value in zip(carried, context[2], strict=True)
            )

        return Chain(
            name,
            (self.inputs.topk_idx, *leaves),
            start,
            moved,
            relink,
            linked=self.inputs.routes,
            links=2,
        )

    def lines(self, with_weights: bool) -> dict[str, tuple[Chain, bool]]:
        """(chain, whether the router's weights travel along) by name."""
        x, rows, weights = self.inputs.tokens, self.inputs.rows, self.weights
        dispatch = lambda plan, x: jax_ep.dispatch(x, plan)  # noqa: E731
        permute = lambda plan, rows: jax_ep.permute(rows, plan)  # noqa: E731
        lines = {
            "dispatch": (self._chain("dispatch", dispatch, x), False),
            "expert_rows, permute": (self._chain("permute", permute, rows), False),
        }
        for more, leaves in (("", (x,)), (" with weights", (x, weights))):
            for name, move in (
                ("dispatch, expert_rows, permute", self._two_steps),
                ("expert_rows, dispatch_permute", self._one_step),
            ):
                lines[name + more] = self._chain(name, move, *leaves), bool(more)
            if not with_weights:
                break
        return lines
