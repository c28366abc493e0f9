"""The JAX primitives between rows and experts.

ep_expert_rows numbers the (row, k) pairs, integers only. ep_permute and
ep_unpermute move rows by these numbers, ep_row_dots multiplies them. Each is
linear in its leaves, and in its weights where it has any; together they are
closed under differentiation:

    permute(x, w)[place of (c, k)] = w[c, k] * x[c]
    unpermute(f, w)[c] = sum over k of w[c, k] * f[place of (c, k)]
    row_dots(x, f)[c, k] = <x[c], f[place of (c, k)]>

As in primitives.py, only this file knows these targets and their rules. All
are local to a device: no communicator, no channel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_ep._data import native
from jax_ep._operations import xla_backend
from jax_ep._operations.primitive_rules import (
    SUMMABLE,
    batch_rows,
    bind_rows,
    define,
    each_element,
    ffi_call,
    has_elements,
    integers_jvp,
    make_varying,
    rank_axes,
    sum_dtype,
    varying,
    zero_tangent,
)

if TYPE_CHECKING:
    from jax_ep._data.plan import Plan

# Routing operands that stand before weights and leaves: expert_rows and
# empty_ranges. Only permute reads the ranges, but its transposes are permutes.
_NUM_ROUTING = 2

# Backends with native kernels; the others take plain JAX, which XLA compiles for
# any device.
_NATIVE_BACKENDS = frozenset({"cpu", "cuda"})


def expert_rows(plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Binds ep_expert_rows: (i32[C, K] places or -1, i32[L + 1, 2] empty ranges).

    permute and unpermute of one plan each bind it; XLA merges equal calls.
    """
    axes = varying(plan.recv_topk_idx) | rank_axes(plan.comm)
    places, ranges = expert_rows_p.bind(
        make_varying(plan.recv_topk_idx, axes),
        backend=plan.comm.backend,
        local_experts=plan.group_sizes.shape[0],
        expert_alignment=plan.expert_alignment,
        expert_capacity=plan.expert_capacity,
    )
    return checkpoint_name((places, ranges), "ep_plan")


def permute(
    leaves: Sequence[jax.Array], plan: Plan, weights: jax.Array | None = None
) -> list[jax.Array]:
    """Binds ep_permute: leaves [C, ...] -> [S, ...]; weights [C, K] or None.

    Weights, where there are any, come in the dtype in which the leaves are summed.
    """
    return _bind_leaves(permute_p, leaves, plan, plan.expert_capacity, weights)


def unpermute(
    leaves: Sequence[jax.Array], plan: Plan, weights: jax.Array | None
) -> list[jax.Array]:
    """Binds ep_unpermute: leaves [S, ...] -> [C, ...]; weights [C, K] or None."""
    if weights is None:
        return _bind_leaves(unpermute_p, leaves, plan, plan.capacity, None)
    results: list[Any] = [None] * len(leaves)
    # Weights come in the dtype of the sums, which one call has one of.
    for wide in sorted({sum_dtype(leaf.dtype) for leaf in leaves}, key=str):
        chosen = [i for i, leaf in enumerate(leaves) if sum_dtype(leaf.dtype) == wide]
        sums = _bind_leaves(
            unpermute_p,
            [leaves[i] for i in chosen],
            plan,
            plan.capacity,
            weights.astype(wide),
        )
        for i, total in zip(chosen, sums, strict=True):
            results[i] = total
    return results


def _bind_leaves(primitive, leaves, plan, rows, weights) -> list[jax.Array]:
    moving = [leaf for leaf in leaves if has_elements(leaf)]
    routing = expert_rows(plan) if moving else ()
    axes = frozenset().union(*map(varying, routing))
    if weights is not None:
        # The gradient of the weights varies as all of the leaves do.
        axes |= varying(weights).union(*map(varying, moving))
        weights = make_varying(weights, axes)
    routing = tuple(make_varying(a, axes) for a in routing)
    return bind_rows(
        leaves,
        rows,
        lambda batch: _bind(
            primitive,
            routing,
            weights,
            [make_varying(leaf, axes | varying(leaf)) for leaf in batch],
            backend=plan.comm.backend,
            expert_capacity=plan.expert_capacity,
        ),
    )


def _bind(primitive, routing, weights, leaves, **params) -> list[Any]:
    weighted = weights is not None
    operands = (*routing, weights, *leaves) if weighted else (*routing, *leaves)
    return primitive.bind(*operands, **params | {"weighted": weighted})


def _split(operands, weighted: bool):
    """(routing, weights or None, leaves) of permute's and unpermute's operands."""
    routing, rest = operands[:_NUM_ROUTING], operands[_NUM_ROUTING:]
    return (routing, rest[0], rest[1:]) if weighted else (routing, None, rest)


# Abstract evaluation ---------------------------------------------------------


def _expert_rows_abstract_eval(recv_topk_idx, *, local_experts, **_):
    return [
        recv_topk_idx.update(weak_type=False),
        recv_topk_idx.update(shape=(local_experts + 1, 2), weak_type=False),
    ]


def _permute_abstract_eval(*avals, weighted, expert_capacity, **_):
    _, _, leaves = _split(avals, weighted)
    return [
        leaf.update(shape=(expert_capacity, *leaf.shape[1:]), weak_type=False)
        for leaf in leaves
    ]


def _unpermute_abstract_eval(*avals, weighted, **_):
    routing, _, leaves = _split(avals, weighted)
    return [
        leaf.update(shape=(routing[0].shape[0], *leaf.shape[1:]), weak_type=False)
        for leaf in leaves
    ]


def _row_dots_abstract_eval(places, ranges, *leaves, **_):
    del ranges
    return [places.update(dtype=sum_dtype(leaves[0].dtype), weak_type=False)]


# Lowering --------------------------------------------------------------------


def _lower_plain(ctx, function, operands):
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def _expert_rows_lowering(ctx, recv_topk_idx, *, backend, **sizes):
    if backend not in _NATIVE_BACKENDS:
        plain = functools.partial(xla_backend.expert_rows, **sizes)
        return _lower_plain(ctx, plain, [recv_topk_idx])
    local_experts = sizes.pop("local_experts")
    workspace = jax.core.ShapedArray(
        (
            native.expert_rows_workspace_size(
                num_pairs=math.prod(ctx.avals_in[0].shape),
                local_experts=local_experts,
            ),
        ),
        np.dtype(np.int32),
    )
    results = ffi_call(
        ctx,
        "jax_ep_expert_rows",
        backend,
        [recv_topk_idx],
        ctx.avals_in,
        [*ctx.avals_out, workspace],
        **sizes,
    )
    return results[:2]


def _permute_lowering(ctx, *operands, backend, weighted, expert_capacity):
    if backend not in _NATIVE_BACKENDS:

        def plain(*operands):
            (places, _), weights, leaves = _split(operands, weighted)
            return xla_backend.permute(
                places, weights, *leaves, expert_capacity=expert_capacity
            )

        return _lower_plain(ctx, plain, operands)
    return ffi_call(
        ctx, "jax_ep_permute", backend, operands, ctx.avals_in, ctx.avals_out
    )


def _unpermute_lowering(ctx, *operands, backend, weighted, **_):
    if backend not in _NATIVE_BACKENDS:

        def plain(*operands):
            (places, _), weights, leaves = _split(operands, weighted)
            return xla_backend.unpermute(places, weights, *leaves)

        return _lower_plain(ctx, plain, operands)
    return _without_ranges(ctx, "jax_ep_unpermute", backend, operands)


def _row_dots_lowering(ctx, *operands, backend, **_):
    if backend not in _NATIVE_BACKENDS:
        dtype = ctx.avals_out[0].dtype

        def plain(places, ranges, *leaves):
            del ranges
            return xla_backend.row_dots(places, *leaves, dtype=dtype)

        return _lower_plain(ctx, plain, operands)
    return _without_ranges(ctx, "jax_ep_row_dots", backend, operands)


def _without_ranges(ctx, target, backend, operands):
    """Calls a target that reads every place that has a row, and no other."""
    operands = [operands[0], *operands[_NUM_ROUTING:]]
    avals = [ctx.avals_in[0], *ctx.avals_in[_NUM_ROUTING:]]
    return ffi_call(ctx, target, backend, operands, avals, ctx.avals_out)


# Differentiation -------------------------------------------------------------


def _live(tangents) -> list[int]:
    return [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]


def _add_to(totals: list[Any], index: int, term: Any) -> None:
    old = totals[index]
    totals[index] = term if type(old) is ad.Zero else ad.add_jaxvals(old, term)


def _rows_jvp(primitive: Primitive, primals, tangents, *, weighted, **params):
    routing, weights, leaves = _split(primals, weighted)
    _, weights_dot, leaf_dots = _split(tangents, weighted)
    outputs = _bind(primitive, routing, weights, leaves, **params)
    result: list[Any] = [zero_tangent(out) for out in outputs]
    live = _live(leaf_dots)
    if live:
        moved = _bind(
            primitive, routing, weights, [leaf_dots[i] for i in live], **params
        )
        for i, tangent in zip(live, moved, strict=True):
            result[i] = tangent
    if weighted and type(weights_dot) is not ad.Zero:
        moved = _bind(primitive, routing, weights_dot, leaves, **params)
        for i, tangent in enumerate(moved):
            _add_to(result, i, tangent)
    return outputs, result


def _rows_transpose(primitive, cotangents, *operands, weighted, **params):
    routing, weights, leaves = _split(operands, weighted)
    none = [None] * _NUM_ROUTING
    if weights is not None and ad.is_undefined_primal(weights):
        live = _live(cotangents)
        if not live:
            return [*none, ad.Zero(weights.aval), *[None] * len(leaves)]
        rows, places = [cotangents[i] for i in live], [leaves[i] for i in live]
        if primitive is permute_p:
            rows, places = places, rows
        (dots,) = row_dots_p.bind(*routing, *rows, *places, **params)
        return [*none, dots, *[None] * len(leaves)]
    result: list[Any] = [
        ad.Zero(leaf.aval) if ad.is_undefined_primal(leaf) else None for leaf in leaves
    ]
    live = [i for i in _live(cotangents) if ad.is_undefined_primal(leaves[i])]
    for i in live:
        if cotangents[i].dtype not in SUMMABLE:
            raise TypeError(
                f"jax_ep.permute: a leaf of dtype {cotangents[i].dtype} has no "
                "gradient: unpermute cannot sum it; permute a wider dtype, or say "
                "with jax.custom_vjp what the gradient is"
            )
    if live:
        to = unpermute_p if primitive is permute_p else permute_p
        moved = _bind(to, routing, weights, [cotangents[i] for i in live], **params)
        for i, cotangent in zip(live, moved, strict=True):
            result[i] = cotangent
    return [*none, *[None] * weighted, *result]


def _row_dots_jvp(primals, tangents, **params):
    routing, leaves = primals[:_NUM_ROUTING], primals[_NUM_ROUTING:]
    dots = tangents[_NUM_ROUTING:]
    half = len(leaves) // 2
    outputs = row_dots_p.bind(*primals, **params)
    result: list[Any] = [zero_tangent(outputs[0])]
    for moving in (range(half), range(half, 2 * half)):
        live = [i for i in moving if type(dots[i]) is not ad.Zero]
        if not live:
            continue
        # Each live tangent beside the other factor of its pair.
        first = [dots[i] if i < half else leaves[i - half] for i in live]
        second = [leaves[i + half] if i < half else dots[i] for i in live]
        (tangent,) = row_dots_p.bind(*routing, *first, *second, **params)
        _add_to(result, 0, tangent)
    return outputs, result


def _row_dots_transpose(cotangents, *operands, **params):
    routing, leaves = operands[:_NUM_ROUTING], operands[_NUM_ROUTING:]
    half = len(leaves) // 2
    linear = [i for i, leaf in enumerate(leaves) if ad.is_undefined_primal(leaf)]
    result: list[Any] = [None] * len(leaves)
    for i in linear:
        result[i] = ad.Zero(leaves[i].aval)
    if type(cotangents[0]) is not ad.Zero:
        for to, indices in (
            (unpermute_p, [i for i in linear if i < half]),
            (permute_p, [i for i in linear if i >= half]),
        ):
            if not indices:
                continue
            factors = [leaves[(i + half) % (2 * half)] for i in indices]
            moved = _bind(to, routing, cotangents[0], factors, **params)
            for i, cotangent in zip(indices, moved, strict=True):
                result[i] = cotangent
    return [None] * _NUM_ROUTING + result


# Batching --------------------------------------------------------------------


def _rows_batch(primitive: Primitive, args, dims, *, weighted, **params):
    before = _NUM_ROUTING + weighted
    return batch_rows(primitive, before, args, dims, weighted=weighted, **params)


# Definitions -----------------------------------------------------------------


def _define_rows(name: str, abstract_eval, lowering) -> Primitive:
    primitive = define(name, abstract_eval, lowering, cacheable=True)
    ad.primitive_jvps[primitive] = functools.partial(_rows_jvp, primitive)
    ad.primitive_transposes[primitive] = functools.partial(_rows_transpose, primitive)
    batching.primitive_batchers[primitive] = functools.partial(_rows_batch, primitive)
    return primitive


expert_rows_p = define(
    "ep_expert_rows",
    _expert_rows_abstract_eval,
    _expert_rows_lowering,
    cacheable=True,
)
ad.primitive_jvps[expert_rows_p] = functools.partial(integers_jvp, expert_rows_p)
batching.primitive_batchers[expert_rows_p] = functools.partial(
    each_element, expert_rows_p
)
permute_p = _define_rows("ep_permute", _permute_abstract_eval, _permute_lowering)
unpermute_p = _define_rows(
    "ep_unpermute", _unpermute_abstract_eval, _unpermute_lowering
)
row_dots_p = define(
    "ep_row_dots", _row_dots_abstract_eval, _row_dots_lowering, cacheable=True
)
ad.primitive_jvps[row_dots_p] = _row_dots_jvp
ad.primitive_transposes[row_dots_p] = _row_dots_transpose
batching.primitive_batchers[row_dots_p] = functools.partial(each_element, row_dots_p)
