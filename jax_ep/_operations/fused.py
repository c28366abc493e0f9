"""Two operations in one launch: ep_plan_dispatch and ep_dispatch_permute.

ep_plan_dispatch: a plan's fields, then rows: [T, ...] -> [C, ...].

ep_dispatch_permute: some leaves go on to the experts, the others stop where they
arrive:

    grouped:  permute(dispatch(x))   [T, ...] -> [S, ...]
    others:   dispatch(x)            [T, ...] -> [C, ...]

What arrives of a grouped leaf is not kept: nothing but its expert rows needs it,
neither forward nor backward, and rows that stay on their rank then go to their
experts without being written in between.

Rules are those of the operations that they are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jax_ep._data import native
from jax_ep._data.limits import MAX_LEAVES
from jax_ep._data.sizes import row_bytes
from jax_ep._operations import exchanges, experts
from jax_ep._operations.arrays import (
    bind_rows,
    launches,
    make_varying,
    rank_axes,
    varying,
    without_travel,
)
from jax_ep._operations.operation import bind

if TYPE_CHECKING:
    from jax_ep._data.plan import Plan
    from jax_ep._data.ranks import Ranks

# Backends on which jax_ep.moe takes dispatch_permute: where it was measured to be
# faster than its two steps. See docs/performance.md.
BACKENDS = frozenset({"cuda"})

_FIELDS = exchanges.PLAN_FIELDS

# Plan and dispatch -----------------------------------------------------------


def plan_dispatch(
    topk_idx: jax.Array,
    leaves: Sequence[jax.Array],
    *,
    comm: Ranks,
    num_experts: int,
    capacity: int,
    expert_alignment: int,
) -> tuple[dict[str, jax.Array], list[jax.Array]]:
    """Binds ep_plan_dispatch: (Plan's array fields by name, leaves [C, ...])."""
    params = {
        "comm": comm,
        "num_experts": num_experts,
        "capacity": capacity,
        "expert_alignment": expert_alignment,
    }
    axes = varying(topk_idx) | rank_axes(comm)
    topk_idx = make_varying(topk_idx, axes)
    leaves = [make_varying(leaf, axes | varying(leaf)) for leaf in leaves]
    fields: list[jax.Array] = []

    def launch(batch):
        # The first launch plans; those that follow it have a plan.
        if fields:
            return _by_plan("ep_dispatch", fields, batch, topk_idx, params)
        outputs = bind("ep_plan_dispatch", topk_idx, *batch, **params)
        fields.extend(outputs[: len(_FIELDS)])
        return outputs[len(_FIELDS) :]

    rows = bind_rows(leaves, capacity, launch)
    if not fields:  # no leaf has anything to move
        return exchanges.plan(topk_idx, **params), rows
    return dict(zip(_FIELDS, fields, strict=True)), rows


def _by_plan(name, fields, leaves, topk_idx, params) -> list[Any]:
    """ep_dispatch or ep_combine by results of ep_plan."""
    return bind(
        name,
        *(fields[_FIELDS.index(field)] for field in exchanges.ROUTING),
        *leaves,
        comm=params["comm"],
        num_tokens=topk_idx.shape[0],
        capacity=params["capacity"],
    )


def plan_dispatch_results(topk_idx, *leaves, **params):
    rows = exchanges.rows_of("capacity", 0)(*leaves, **params)
    return [*exchanges.plan_results(topk_idx, **params), *rows]


def plan_dispatch_reference(topk_idx, *leaves, **params):
    fields = bind("ep_plan", topk_idx, **params)
    return [*fields, *_by_plan("ep_dispatch", fields, leaves, topk_idx, params)]


def plan_dispatch_fits(avals, params) -> bool:
    """A matter of sizes, on which all ranks agree."""
    topk_idx, *leaves = avals
    num_tokens, top_k = topk_idx.shape
    return native.plan_dispatch_fits(
        num_ranks=params["comm"].num_ranks,
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=params["num_experts"],
        row_bytes=list(map(row_bytes, leaves)),
    )


def plan_dispatch_move(before, outputs, leaves, live, **params):
    del live
    return _by_plan("ep_dispatch", outputs, leaves, before[0], params)


def plan_dispatch_back(before, cotangents, live, **params):
    del live
    fields = bind("ep_plan", *before, **params)
    return _by_plan("ep_combine", fields, cotangents, before[0], params)


# Dispatch and permute --------------------------------------------------------

DISPATCH_PERMUTE_ROUTING = (*exchanges.ROUTING, "recv_counts", *experts.ROUTING)
_DISPATCH, _PERMUTE = slice(0, 3), slice(4, 6)
# One address of the handshake is the workspace's.
_MAX_LEAVES = MAX_LEAVES - 1


def dispatch_permute(
    grouped: Sequence[jax.Array], others: Sequence[jax.Array], plan: Plan
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Binds ep_dispatch_permute: (expert rows of `grouped`, rows of `others`)."""
    routing = (
        *(plan._routes, plan.num_recv, plan.recv_src, plan.recv_counts),
        *experts.expert_rows(plan),
    )
    axes = rank_axes(plan.comm).union(*map(varying, routing))
    routing = tuple(make_varying(a, axes) for a in routing)
    sizes = exchanges.sizes(plan) | {"expert_capacity": plan.expert_capacity}
    # As bind_rows does, but a call holds leaves of two kinds, grouped ones first.
    leaves = [make_varying(x, axes | varying(x)) for x in (*grouped, *others)]
    heights = [plan.expert_capacity] * len(grouped) + [plan.capacity] * len(others)
    results = list(map(without_travel, leaves, heights))
    for launch in launches(leaves, _MAX_LEAVES):
        moved = dispatch_permute_move(
            *(routing, (), [leaves[i] for i in launch], launch),
            num_grouped=len(grouped),
            **sizes,
        )
        for i, result in zip(launch, moved, strict=True):
            results[i] = result
    return results[: len(grouped)], results[len(grouped) :]


def dispatch_permute_move(
    before, outputs, leaves, live, *, num_grouped, expert_capacity, **params
):
    del outputs
    num_grouped = sum(i < num_grouped for i in live)
    if num_grouped == 0:
        return bind("ep_dispatch", *before[_DISPATCH], *leaves, **params)
    return bind(
        "ep_dispatch_permute",
        *before,
        *leaves,
        num_grouped=num_grouped,
        expert_capacity=expert_capacity,
        **params,
    )


def dispatch_permute_back(
    before, cotangents, live, *, num_grouped, expert_capacity, **params
):
    num_grouped = sum(i < num_grouped for i in live)
    rows = cotangents[:num_grouped]
    if rows:
        sizes = _permute_sizes(params, expert_capacity)
        rows = bind("ep_unpermute", *before[_PERMUTE], *rows, **sizes)
    leaves = *rows, *cotangents[num_grouped:]
    return bind("ep_combine", *before[_DISPATCH], *leaves, **params)


def _permute_sizes(params, expert_capacity) -> dict[str, Any]:
    return {
        "backend": params["comm"].backend,
        "expert_capacity": expert_capacity,
        "weighted": False,
    }


def dispatch_permute_results(*avals, num_grouped, capacity, expert_capacity, **_):
    return [
        leaf.update(
            shape=(expert_capacity if i < num_grouped else capacity, *leaf.shape[1:]),
            weak_type=False,
        )
        for i, leaf in enumerate(avals[len(DISPATCH_PERMUTE_ROUTING) :])
    ]


def dispatch_permute_reference(*operands, num_grouped, expert_capacity, **params):
    leaves = operands[len(DISPATCH_PERMUTE_ROUTING) :]
    rows = bind("ep_dispatch", *operands[_DISPATCH], *leaves, **params)
    sizes = _permute_sizes(params, expert_capacity)
    grouped = bind("ep_permute", *operands[_PERMUTE], *rows[:num_grouped], **sizes)
    return [*grouped, *rows[num_grouped:]]


def dispatch_permute_fits(avals, params) -> bool:
    # Buffers of other processes may be out of reach, and their rows staged.
    one_process = len(params["comm"].processes) == 1
    return one_process and exchanges.has_tokens(avals, params)


def dispatch_permute_scratch(avals, params) -> list[Any]:
    """Where rows of grouped leaves land, and the workspace."""
    leaves = avals[len(DISPATCH_PERMUTE_ROUTING) :]
    num_words = native.dispatch_permute_workspace_size(
        num_ranks=params["comm"].num_ranks
    )
    return [
        *(
            jax.core.ShapedArray((params["capacity"], *leaf.shape[1:]), leaf.dtype)
            for leaf in leaves[: params["num_grouped"]]
        ),
        jax.core.ShapedArray((num_words,), np.dtype(np.int32)),
    ]
