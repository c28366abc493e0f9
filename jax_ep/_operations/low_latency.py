"""Dispatch and combine of few tokens, in a buffer of their own.

They have no derivative. Operands that a call only has to come after
stand behind all others: real operands, so that XLA keeps the order wherever it
runs independent calls side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_ep._data.ranks import collective_axes
from jax_ep._operations import fp8, xla_backend
from jax_ep._operations.arrays import make_varying, rank_axes, varying
from jax_ep._operations.operation import bind

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
    return bind(
        "ep_low_latency_dispatch",
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
    (out,) = bind(
        "ep_low_latency_combine",
        *_varying((*small, places, y, *after), buffer),
        buffer=buffer,
        by_expert=by_expert,
        weighted=weights is not None,
    )
    return out


def _varying(operands, buffer):
    axes = rank_axes(buffer.comm).union(*map(varying, operands))
    return [make_varying(a, axes) for a in operands]


# For the table ---------------------------------------------------------------


def _shaped(aval, shape, dtype=None):
    return aval.update(
        shape=shape,
        dtype=np.dtype(dtype or aval.dtype),
        weak_type=False,
        # Every axis is manual here: only the number of dimensions differs.
        sharding=aval.sharding.update(spec=P(*(None for _ in shape))),
    )


def dispatch_results(
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


def combine_results(topk_idx, *rest, weighted, **_):
    y = rest[weighted + 1]
    return [_shaped(y, (topk_idx.shape[0], y.shape[-1]))]


def attributes(avals, params) -> dict[str, int]:
    del avals
    buffer = params["buffer"]
    return {
        "num_experts": buffer.num_experts,
        "max_tokens": buffer.max_tokens,
        "by_expert": params["by_expert"],
        "quantize": params.get("quantize", 0),
        "weighted": params["weighted"],
        "num_leaves": params.get("num_leaves", 1),
    }


def _sizes(buffer):
    return {
        "axis_name": collective_axes(buffer.comm),
        "num_ranks": buffer.comm.num_ranks,
        "num_experts": buffer.num_experts,
        "max_tokens": buffer.max_tokens,
    }


def dispatch_reference(
    topk_idx, *rest, buffer, by_expert, quantize, weighted, num_leaves
):
    leaves = rest[weighted : weighted + num_leaves]
    if quantize:
        (x,) = leaves
        leaves = fp8.quantize_fp8(x)
    return xla_backend.low_latency_dispatch(
        topk_idx,
        rest[0] if weighted else None,
        *leaves,
        by_expert=by_expert,
        **_sizes(buffer),
    )


def combine_reference(topk_idx, *rest, buffer, by_expert, weighted):
    return xla_backend.low_latency_combine(
        topk_idx,
        rest[0] if weighted else None,
        rest[weighted],
        rest[weighted + 1],
        by_expert=by_expert,
        **_sizes(buffer),
    )
