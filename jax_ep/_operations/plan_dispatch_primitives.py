"""The JAX primitive ep_plan_dispatch: a plan and its dispatch in one launch.

Its results are those of ep_plan, then the rows of ep_dispatch. Only rows are
linear in leaves; the rules are made of those two and of ep_combine.

Like primitives.py, the only file that knows this target.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir

from jax_ep._data import native
from jax_ep._data.ranks import Ranks
from jax_ep._data.sizes import row_bytes
from jax_ep._operations import primitives
from jax_ep._operations.primitive_rules import (
    bind_rows,
    define,
    each_element,
    folded,
    make_varying,
    rank_axes,
    varying,
    zero_tangent,
)

# Backends with native code; on the others the primitive is lowered to two steps.
_NATIVE_BACKENDS = frozenset({"cuda"})

_FIELDS = primitives.PLAN_FIELDS
_NUM_FIELDS = len(_FIELDS)


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

    def bind(batch):
        # The first launch plans; those that follow it have a plan.
        if fields:
            return primitives.dispatch_p.bind(
                *_routing(fields), *batch, **_sizes(topk_idx, params)
            )
        outputs = plan_dispatch_p.bind(topk_idx, *batch, **params)
        fields.extend(outputs[:_NUM_FIELDS])
        return outputs[_NUM_FIELDS:]

    rows = bind_rows(leaves, capacity, bind)
    if not fields:  # no leaf has anything to move
        return primitives.plan(topk_idx, **params), rows
    return dict(zip(_FIELDS, fields, strict=True)), rows


def _routing(outputs: Sequence[Any]) -> list[Any]:
    """The routing operands of ep_dispatch, among results of ep_plan."""
    return [outputs[_FIELDS.index(name)] for name in primitives.ROUTING_FIELDS]


def _sizes(topk_idx: Any, params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of ep_dispatch and ep_combine."""
    return {
        "comm": params["comm"],
        "num_tokens": topk_idx.shape[0],
        "capacity": params["capacity"],
    }


def _abstract_eval(topk_idx, *leaves, **params):
    rows = [
        leaf.update(shape=(params["capacity"], *leaf.shape[1:]), weak_type=False)
        for leaf in leaves
    ]
    return [*primitives.plan_abstract_eval(topk_idx, **params), *rows]


def _in_two_steps(topk_idx, *leaves, **params):
    """The same by ep_plan and ep_dispatch."""
    fields = primitives.plan_p.bind(topk_idx, **params)
    rows = primitives.dispatch_p.bind(
        *_routing(fields), *leaves, **_sizes(topk_idx, params)
    )
    return [*fields, *rows]


def _fits(topk_idx, *leaves, comm, num_experts, **_) -> bool:
    """Whether one launch does it: a matter of sizes, on which all ranks agree."""
    num_tokens, top_k = topk_idx.shape
    return comm.backend in _NATIVE_BACKENDS and native.plan_dispatch_fits(
        num_ranks=comm.num_ranks,
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=num_experts,
        row_bytes=list(map(row_bytes, leaves)),
    )


def _lowering(ctx, *operands, **params):
    if not _fits(*ctx.avals_in, **params):
        plain = functools.partial(_in_two_steps, **params)
        return mlir.lower_fun(plain, multiple_results=True)(ctx, *operands)
    comm, num_experts = params["comm"], params["num_experts"]
    results = primitives.communicator_call(
        ctx,
        "jax_ep_plan_dispatch",
        operands,
        ctx.avals_in,
        [*ctx.avals_out, primitives.plan_workspace(comm, num_experts)],
        comm,
        slot="plan",
        num_experts=num_experts,
        expert_alignment=params["expert_alignment"],
    )
    return results[:-1]


def _jvp(primals, tangents, **params):
    outputs = plan_dispatch_p.bind(*primals, **params)
    result: list[Any] = [zero_tangent(out) for out in outputs]
    dots = tangents[1:]
    live = [i for i, t in enumerate(dots) if type(t) is not ad.Zero]
    if live:
        moved = primitives.dispatch_p.bind(
            *_routing(outputs), *(dots[i] for i in live), **_sizes(primals[0], params)
        )
        for i, tangent in zip(live, moved, strict=True):
            result[_NUM_FIELDS + i] = tangent
    return outputs, result


def _transpose(cotangents, topk_idx, *leaves, **params):
    linear = [ad.is_undefined_primal(leaf) for leaf in leaves]
    result: list[Any] = [
        ad.Zero(leaf.aval) if undefined else None
        for leaf, undefined in zip(leaves, linear, strict=True)
    ]
    rows = cotangents[_NUM_FIELDS:]
    live = [i for i, ct in enumerate(rows) if linear[i] and type(ct) is not ad.Zero]
    for i in live:
        primitives.check_gradient(rows[i])
    if live:
        fields = primitives.plan_p.bind(topk_idx, **params)
        home = primitives.combine_p.bind(
            *_routing(fields), *(rows[i] for i in live), **_sizes(topk_idx, params)
        )
        for i, cotangent in zip(live, home, strict=True):
            result[i] = cotangent
    return [None, *result]


def _batch(args, dims, **params):
    if dims[0] is not None:
        return each_element(plan_dispatch_p, args, dims, **params)
    # One routing for the whole batch, which becomes part of the rows.
    outputs = plan_dispatch_p.bind(args[0], *map(folded, args[1:], dims[1:]), **params)
    rows = [None if dim is None else 1 for dim in dims[1:]]
    return outputs, [None] * _NUM_FIELDS + rows


# Not cacheable: every call gets a channel of its own.
plan_dispatch_p = define("ep_plan_dispatch", _abstract_eval, _lowering, cacheable=False)
ad.primitive_jvps[plan_dispatch_p] = _jvp
ad.primitive_transposes[plan_dispatch_p] = _transpose
batching.primitive_batchers[plan_dispatch_p] = _batch
