"""The JAX primitives ep_low_latency_dispatch and ep_low_latency_combine.

As in primitives.py, only this file knows their targets, attributes, result shapes
and rules. They have no derivative. Operands that a call only has to come after
stand behind all others: real operands, so that XLA keeps the order wherever it
runs independent calls side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

from jax_ep._data.ranks import collective_axes
from jax_ep._operations import primitives, xla_backend
from jax_ep._operations.primitive_rules import (
    define,
    make_varying,
    rank_axes,
    varying,
    zero_tangent,
)

if TYPE_CHECKING:
    from jax_ep._data.ranks import Buffer

_SCALE_BLOCK = 128


def dispatch(
    topk_idx: jax.Array,
    weights: jax.Array | None,
    leaves: Sequence[jax.Array],
    after: Sequence[jax.Array],
    *,
    buffer: Buffer,
    by_expert: bool,
    quantize: bool,
) -> list[jax.Array]:
    """Binds ep_low_latency_dispatch.

    Returns:
      The received rows of each leaf, scales where it quantises; counts [L] by
      expert; places by expert [R, T, K] or local ids by rank [R, max_tokens, K];
      the received weights where there are any.
    """
    small = [topk_idx] if weights is None else [topk_idx, weights]
    return dispatch_p.bind(
        *_varying((*small, *leaves, *after), buffer),
        buffer=buffer,
        by_expert=by_expert,
        quantize=quantize,
        weighted=weights is not None,
        num_leaves=len(leaves),
    )


def combine(
    topk_idx: jax.Array,
    weights: jax.Array | None,
    places: jax.Array,
    y: jax.Array,
    after: Sequence[jax.Array],
    *,
    buffer: Buffer,
    by_expert: bool,
) -> jax.Array:
    """Binds ep_low_latency_combine: [T, H]."""
    small = [topk_idx] if weights is None else [topk_idx, weights]
    (out,) = combine_p.bind(
        *_varying((*small, places, y, *after), buffer),
        buffer=buffer,
        by_expert=by_expert,
        weighted=weights is not None,
    )
    return out


def _varying(operands, buffer):
    axes = rank_axes(buffer.comm).union(*map(varying, operands))
    return [make_varying(a, axes) for a in operands]


# Abstract evaluation ---------------------------------------------------------


def _shaped(aval, shape, dtype=None):
    return aval.update(
        shape=shape,
        dtype=np.dtype(dtype or aval.dtype),
        weak_type=False,
        # Every axis is manual here: only the number of dimensions differs.
        sharding=aval.sharding.update(spec=P(*(None for _ in shape))),
    )


def _dispatch_abstract_eval(
    topk_idx, *rest, buffer, by_expert, quantize, weighted, num_leaves
):
    tokens, top_k = topk_idx.shape
    ranks, most = buffer.comm.num_ranks, buffer.max_tokens
    local = buffer.num_local_experts
    rows = (local, ranks * most) if by_expert else (ranks, most)
    results = []
    for leaf in rest[weighted : weighted + num_leaves]:
        if quantize:
            scales = -(-leaf.shape[1] // _SCALE_BLOCK)
            results += [
                _shaped(leaf, (*rows, leaf.shape[1]), jnp.float8_e4m3fn),
                _shaped(leaf, (*rows, scales), np.float32),
            ]
        else:
            results.append(_shaped(leaf, (*rows, *leaf.shape[1:])))
    if by_expert:
        results.append(_shaped(topk_idx, (local,), np.int32))
    places = (ranks, tokens if by_expert else most, top_k)
    results.append(_shaped(topk_idx, places, np.int32))
    if weighted:
        results.append(_shaped(topk_idx, places, np.float32))
    return results


def _combine_abstract_eval(topk_idx, *rest, weighted, **_):
    y = rest[weighted + 1]
    return [_shaped(y, (topk_idx.shape[0], y.shape[-1]))]


# Lowering --------------------------------------------------------------------


def _is_plain(buffer, topk_idx):
    # As in primitives.py: where no rank has a token there is nothing to ask.
    return buffer.comm.backend == "xla" or topk_idx.shape[0] == 0


def _call(ctx, target, operands, buffer, **attributes):
    return primitives.communicator_call(
        ctx,
        target,
        operands,
        ctx.avals_in,
        ctx.avals_out,
        buffer,
        num_experts=buffer.num_experts,
        max_tokens=buffer.max_tokens,
        **attributes,
    )


def _sizes(buffer):
    return {
        "axis_name": collective_axes(buffer.comm),
        "num_ranks": buffer.comm.num_ranks,
        "num_experts": buffer.num_experts,
        "max_tokens": buffer.max_tokens,
    }


def _dispatch_lowering(
    ctx, *operands, buffer, by_expert, quantize, weighted, num_leaves
):
    if _is_plain(buffer, ctx.avals_in[0]):

        def plain(topk_idx, *rest):
            leaves = rest[weighted : weighted + num_leaves]
            if quantize:
                from jax_ep._operations import fp8

                (x,) = leaves
                leaves = fp8.quantize_fp8(x)
            return xla_backend.low_latency_dispatch(
                topk_idx,
                rest[0] if weighted else None,
                *leaves,
                by_expert=by_expert,
                **_sizes(buffer),
            )

        return mlir.lower_fun(plain, multiple_results=True)(ctx, *operands)
    return _call(
        ctx,
        "jax_ep_low_latency_dispatch",
        operands,
        buffer,
        by_expert=by_expert,
        quantize=quantize,
        weighted=weighted,
        num_leaves=num_leaves,
    )


def _combine_lowering(ctx, *operands, buffer, by_expert, weighted):
    if _is_plain(buffer, ctx.avals_in[0]):

        def plain(topk_idx, *rest):
            return xla_backend.low_latency_combine(
                topk_idx,
                rest[0] if weighted else None,
                rest[weighted],
                rest[weighted + 1],
                by_expert=by_expert,
                **_sizes(buffer),
            )

        return mlir.lower_fun(plain, multiple_results=True)(ctx, *operands)
    return _call(
        ctx,
        "jax_ep_low_latency_combine",
        operands,
        buffer,
        by_expert=by_expert,
        quantize=0,
        weighted=weighted,
        num_leaves=1,
    )


# Rules -----------------------------------------------------------------------


def _no_derivative(primitive, name, other, primals, tangents, **params):
    if any(type(t) is not ad.Zero for t in tangents):
        raise TypeError(
            f"jax_ep.{name}: it has no derivative; use make_plan and jax_ep.{other}, "
            "which has one, or jax.lax.stop_gradient"
        )
    outputs = primitive.bind(*primals, **params)
    return outputs, [zero_tangent(out) for out in outputs]


def _one_by_one(primitive, args, dims, **params):
    """Batching rule: one call after the other, as they share the buffer."""
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    elements: list[Any] = []
    for i in range(size):
        operands = [
            a if d is None else lax.index_in_dim(a, i, d, keepdims=False)
            for a, d in zip(args, dims, strict=True)
        ]
        after = elements[-1][:1] if elements else []
        elements.append(primitive.bind(*operands, *after, **params))
    if not elements:
        avals = [
            jax.core.ShapedArray(
                a.shape if d is None else (*a.shape[:d], *a.shape[d + 1 :]), a.dtype
            )
            for a, d in zip(args, dims, strict=True)
        ]
        abstract, _ = primitive.abstract_eval(*avals, **params)
        return [jnp.zeros((0, *out.shape), out.dtype) for out in abstract], [0] * len(
            abstract
        )
    return [jnp.stack(e) for e in zip(*elements, strict=True)], [0] * len(elements[0])


def _define(name, abstract_eval, lowering, other):
    # Not cacheable: every call gets a channel of its own.
    primitive = define(f"ep_{name}", abstract_eval, lowering, cacheable=False)
    ad.primitive_jvps[primitive] = functools.partial(
        _no_derivative, primitive, name, other
    )
    batching.primitive_batchers[primitive] = functools.partial(_one_by_one, primitive)
    return primitive


dispatch_p = _define(
    "low_latency_dispatch", _dispatch_abstract_eval, _dispatch_lowering, "dispatch"
)
combine_p = _define(
    "low_latency_combine", _combine_abstract_eval, _combine_lowering, "combine"
)
