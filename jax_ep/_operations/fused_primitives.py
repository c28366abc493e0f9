"""The JAX primitive ep_dispatch_permute: dispatch and permute in one launch.

Some leaves go on to the experts, the others stop where they arrive:

    grouped:  permute(dispatch(x))   [T, ...] -> [S, ...]
    others:   dispatch(x)            [T, ...] -> [C, ...]

What arrives of a grouped leaf is not kept: nothing but its expert rows needs it,
neither forward nor backward, and rows that stay on their rank then go to their
experts without being written in between. The rules are made of those of
ep_dispatch and ep_permute: the transpose is unpermute, then combine.

Like primitives.py, the only file that knows this target.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.interpreters import ad, batching, mlir

from jax_ep._data import native
from jax_ep._operations import expert_primitives, primitives
from jax_ep._operations.primitive_rules import (
    MAX_LEAVES,
    batch_rows,
    define,
    launches,
    make_varying,
    rank_axes,
    varying,
    without_travel,
    zero_tangent,
)

if TYPE_CHECKING:
    from jax_ep._data.plan import Plan

# Backends on which jax_ep.moe takes it: where it was measured to be faster than
# its two steps. See docs/performance.md.
BACKENDS = frozenset({"cuda"})

# Backends with native code; on the others the primitive is lowered to two steps.
_NATIVE_BACKENDS = frozenset({"cuda"})

# Routing operands: those of ep_dispatch, then recv_counts, then those of
# ep_permute.
_DISPATCH = slice(0, 3)
_RECV_COUNTS = 3
_PERMUTE = slice(4, 6)
_NUM_ROUTING = 6
# One address of the handshake is the workspace's.
_MAX_LEAVES = MAX_LEAVES - 1


def dispatch_permute(
    grouped: Sequence[jax.Array], others: Sequence[jax.Array], plan: Plan
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Binds ep_dispatch_permute: (expert rows of `grouped`, rows of `others`)."""
    routing = (
        *(plan._routes, plan.num_recv, plan.recv_src, plan.recv_counts),
        *expert_primitives.expert_rows(plan),
    )
    axes = rank_axes(plan.comm).union(*map(varying, routing))
    routing = tuple(make_varying(a, axes) for a in routing)
    sizes = primitives.sizes(plan) | {"expert_capacity": plan.expert_capacity}
    # As bind_rows does, but a call holds leaves of two kinds, grouped ones first.
    leaves = [make_varying(x, axes | varying(x)) for x in (*grouped, *others)]
    heights = [plan.expert_capacity] * len(grouped) + [plan.capacity] * len(others)
    results = list(map(without_travel, leaves, heights))
    for launch in launches(leaves, _MAX_LEAVES):
        moved = _bind(
            routing,
            [leaves[i] for i in launch],
            num_grouped=sum(i < len(grouped) for i in launch),
            **sizes,
        )
        for i, result in zip(launch, moved, strict=True):
            results[i] = result
    return results[: len(grouped)], results[len(grouped) :]


def _bind(routing, leaves, *, num_grouped, expert_capacity, **params) -> list[Any]:
    if num_grouped == 0:
        return primitives.dispatch_p.bind(*routing[_DISPATCH], *leaves, **params)
    return dispatch_permute_p.bind(
        *routing,
        *leaves,
        num_grouped=num_grouped,
        expert_capacity=expert_capacity,
        **params,
    )


def _abstract_eval(*avals, num_grouped, capacity, expert_capacity, **_):
    return [
        leaf.update(
            shape=(expert_capacity if i < num_grouped else capacity, *leaf.shape[1:]),
            weak_type=False,
        )
        for i, leaf in enumerate(avals[_NUM_ROUTING:])
    ]


def _in_two_steps(*operands, num_grouped, expert_capacity, **params):
    """The same by ep_dispatch and ep_permute."""
    leaves = operands[_NUM_ROUTING:]
    rows = primitives.dispatch_p.bind(*operands[_DISPATCH], *leaves, **params)
    grouped = expert_primitives.permute_p.bind(
        *operands[_PERMUTE],
        *rows[:num_grouped],
        backend=params["comm"].backend,
        expert_capacity=expert_capacity,
        weighted=False,
    )
    return [*grouped, *rows[num_grouped:]]


def _lowering(ctx, *operands, num_grouped, **params):
    comm = params["comm"]
    if (
        comm.backend not in _NATIVE_BACKENDS
        # Buffers of other processes may be out of reach, and their rows staged.
        or len(comm.processes) > 1
        # As in the lowering of ep_dispatch.
        or params["num_tokens"] == 0
    ):
        plain = functools.partial(_in_two_steps, num_grouped=num_grouped, **params)
        return mlir.lower_fun(plain, multiple_results=True)(ctx, *operands)
    # num_recv serves the transpose only.
    keep = [0, _RECV_COUNTS, 2, *range(_NUM_ROUTING)[_PERMUTE]]
    keep += range(_NUM_ROUTING, len(operands))
    leaves = ctx.avals_in[_NUM_ROUTING:]
    landing = [
        jax.core.ShapedArray((params["capacity"], *leaf.shape[1:]), leaf.dtype)
        for leaf in leaves[:num_grouped]
    ]
    workspace = jax.core.ShapedArray(
        (native.dispatch_permute_workspace_size(num_ranks=comm.num_ranks),),
        np.dtype(np.int32),
    )
    results = primitives.communicator_call(
        ctx,
        "jax_ep_dispatch_permute",
        [operands[i] for i in keep],
        [ctx.avals_in[i] for i in keep],
        [*ctx.avals_out, *landing, workspace],
        comm,
        slot="rows",
    )
    return results[: len(leaves)]


def _jvp(primals, tangents, *, num_grouped, **params):
    outputs = dispatch_permute_p.bind(*primals, num_grouped=num_grouped, **params)
    dots = tangents[_NUM_ROUTING:]
    live = [i for i, t in enumerate(dots) if type(t) is not ad.Zero]
    result: list[Any] = [zero_tangent(out) for out in outputs]
    if live:
        moved = _bind(
            primals[:_NUM_ROUTING],
            [dots[i] for i in live],
            num_grouped=sum(i < num_grouped for i in live),
            **params,
        )
        for i, tangent in zip(live, moved, strict=True):
            result[i] = tangent
    return outputs, result


def _transpose(cotangents, *operands, num_grouped, expert_capacity, **params):
    leaves = operands[_NUM_ROUTING:]
    linear = [ad.is_undefined_primal(leaf) for leaf in leaves]
    result: list[Any] = [
        ad.Zero(leaf.aval) if undefined else None
        for leaf, undefined in zip(leaves, linear, strict=True)
    ]
    live = [
        i for i, ct in enumerate(cotangents) if linear[i] and type(ct) is not ad.Zero
    ]
    for i in live:
        primitives.check_gradient(cotangents[i])
    rows = {i: cotangents[i] for i in live}
    grouped = [i for i in live if i < num_grouped]
    if grouped:
        sums = expert_primitives.unpermute_p.bind(
            *operands[_PERMUTE],
            *(cotangents[i] for i in grouped),
            backend=params["comm"].backend,
            expert_capacity=expert_capacity,
            weighted=False,
        )
        rows |= zip(grouped, sums, strict=True)
    if live:
        home = primitives.combine_p.bind(
            *operands[_DISPATCH], *(rows[i] for i in live), **params
        )
        for i, cotangent in zip(live, home, strict=True):
            result[i] = cotangent
    return [None] * _NUM_ROUTING + result


# Not cacheable: every call gets a channel of its own.
dispatch_permute_p = define(
    "ep_dispatch_permute", _abstract_eval, _lowering, cacheable=False
)
ad.primitive_jvps[dispatch_permute_p] = _jvp
ad.primitive_transposes[dispatch_permute_p] = _transpose
batching.primitive_batchers[dispatch_permute_p] = functools.partial(
    batch_rows, dispatch_permute_p, _NUM_ROUTING
)
