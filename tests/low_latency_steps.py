"""A low-latency dispatch and combine whose result every rank can check for itself.

Ids and tokens follow from the step, and all sums are exact: a token comes back as
itself times the ranks that it went to, or times the weights of its experts.
"""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_ep

TOP_K = 4


def inputs(ranks: int, tokens: int, hidden: int) -> tuple[np.ndarray, np.ndarray]:
    """(x [R, T, H], weights [R, T, K]): small numbers, so that sums are exact.

    And so are x and 2 * x in FP8: each block has a 7, and its scale is a power of 2.
    """
    x = cases.mix(2, *cases.grid(ranks, tokens, hidden)) % np.uint64(15)
    x = x.astype(np.float32) - 7
    x[..., ::128] = 7
    weights = cases.mix(3, *cases.grid(ranks, tokens, TOP_K)) % np.uint64(3)
    return x.astype(ml_dtypes.bfloat16), weights.astype(np.float32)


def in_fp8(q: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x, q, scales), of which quantize_fp8(x) makes q and scales, bit for bit.

    Args:
      q: uint8[..., H], what rows carry. The first number of each block is made the
        largest of float8_e4m3fn, and NaN 0.
      seed: of the scales, which are powers of 2.
    """
    q = np.where(q & 0x7F == 0x7F, 0, q).astype(np.uint8)
    q[..., ::128] = 0x7E | q[..., ::128] & 0x80
    blocks = q[..., ::128].shape
    index = np.arange(int(np.prod(blocks))).reshape(blocks)
    power = (cases.mix(seed, index) % np.uint64(13)).astype(int) - 6
    scales = np.ldexp(np.float32(1), power).astype(np.float32)
    q = q.view(ml_dtypes.float8_e4m3fn)
    wide = np.repeat(scales, 128, axis=-1)[..., : q.shape[-1]]
    return (q.astype(np.float32) * wide).astype(ml_dtypes.bfloat16), q, scales


def ids_of(over, step, tokens, idle):
    """i32[T, K]: this rank's experts in a step.

    With `idle`, in every other step all ranks but one have none.
    """
    me = jax.lax.axis_index(over.comm.axis_name)
    token = jnp.arange(tokens)[:, None]
    first = (step * 7919 + me * 104729 + token * 31) % over.num_experts
    choice = jnp.arange(TOP_K)[None] * (1 + step % 3)
    ids = (first + choice) % over.num_experts
    if idle:
        gone = (step % 2 == 0) & (me != step // 2 % over.comm.num_ranks)
        ids = jnp.where(gone, -1, ids)
    return ids.astype(jnp.int32)


def wrong_rows(
    over, layout, step, x, weights, *, idle=False, quantize=None, delay=lambda x: x
):
    """i32[]: tokens that come back as something else."""
    ids = ids_of(over, step, len(x), idle)
    sent = jnp.roll(x * jnp.where(step % 2 == 0, 1, 2).astype(x.dtype), step, axis=0)
    sent = delay(sent)
    rows, _, handle = jax_ep.low_latency_dispatch(
        sent, ids, buffer=over, layout=layout, quantize=quantize
    )
    if quantize:
        rows = jax_ep.dequantize_fp8(*rows, dtype=x.dtype)
    out = jax_ep.low_latency_combine(
        rows, weights if layout == "expert" else None, handle
    )
    if layout == "expert":
        factor = jnp.where(ids >= 0, weights, 0).sum(1)
    else:
        to = jnp.where(ids >= 0, ids // over.num_local_experts, -1)[:, :, None]
        ranks = jnp.arange(over.comm.num_ranks)[None, None]
        factor = (to == ranks).any(1).sum(1).astype(jnp.float32)
    want = sent.astype(jnp.float32) * factor[:, None]
    return (out.astype(jnp.float32) != want).any(1).sum(dtype=jnp.int32)


def chained(
    over,
    layout,
    steps,
    x,
    weights,
    *,
    idle=False,
    quantize=None,
    delay=lambda x, _: x,
):
    """i32[]: the wrong rows of `steps` steps, each after the one before."""

    def one(wrong, step):
        # Tokens that wait for the step before.
        tokens = jnp.where(wrong < 0, jnp.zeros_like(x), x)
        more = wrong_rows(
            over,
            layout,
            step,
            tokens,
            weights,
            idle=idle,
            quantize=quantize,
            delay=lambda sent: delay(sent, step),
        )
        return wrong + more, None

    me = jax.lax.axis_index(over.comm.axis_name)
    start = 0 * me.astype(jnp.int32)  # varies as what is added
    return jax.lax.scan(one, start, jnp.arange(steps, dtype=jnp.int32))[0]


def without_the_last(over, layout, op, x, weights):
    """Three pairs that are right; the last rank does not come to `op` of the fourth.

    What the others wait for has been there: two pairs ago.
    """
    wrong = chained(over, layout, 3, x, weights)
    sent = jnp.where(wrong == 0, x, jnp.nan)
    ids = ids_of(over, 3, len(x), False)

    def dispatch(sent):
        rows, _, handle = jax_ep.low_latency_dispatch(
            sent, ids, buffer=over, layout=layout
        )
        return rows, handle

    def combine(rows, handle):
        return jax_ep.low_latency_combine(
            rows, weights if layout == "expert" else None, handle
        )

    absent = jax.lax.axis_index(over.comm.axis_name) == over.comm.num_ranks - 1
    if op == "low_latency_dispatch":
        return jax.lax.cond(
            absent, lambda sent: sent, lambda sent: dispatch(sent)[0][0, : len(x)], sent
        )
    rows, handle = dispatch(sent)
    return jax.lax.cond(
        absent, lambda *_: sent, lambda *given: combine(*given), rows, handle
    )
