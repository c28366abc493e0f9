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
    """(x [R, T, H], weights [R, T, K]): small numbers, so that sums are exact."""
    x = cases.mix(2, *cases.grid(ranks, tokens, hidden)) % np.uint64(15)
    weights = cases.mix(3, *cases.grid(ranks, tokens, TOP_K)) % np.uint64(3)
    return (
        (x.astype(np.float32) - 7).astype(ml_dtypes.bfloat16),
        weights.astype(np.float32),
    )


def ids_of(over, step, tokens, idle):
    """i32[T, K]: this rank's experts in a step.

    With `idle`, in every other step all ranks but one have none.
    """
    me = jax.lax.axis_index(over.comm.axis_name)
    token = jnp.arange(tokens)[:, None]
    first = (step * 7919 + me * 104729 + token * 31) % over.num_experts
    ids = (first + jnp.arange(TOP_K) * (1 + step % 3)) % over.num_experts
    if idle:
        gone = (step % 2 == 0) & (me != step // 2 % over.comm.num_ranks)
        ids = jnp.where(gone, -1, ids)
    return ids.astype(jnp.int32)


def wrong_rows(over, layout, step, x, weights, *, idle=False, delay=lambda x: x):
    """i32[]: tokens that come back as something else."""
    ids = ids_of(over, step, len(x), idle)
    sent = jnp.roll(x * jnp.where(step % 2 == 0, 1, 2).astype(x.dtype), step, axis=0)
    sent = delay(sent)
    rows, _, handle = jax_ep.low_latency_dispatch(sent, ids, buffer=over, layout=layout)
    out = jax_ep.low_latency_combine(
        rows, weights if layout == "expert" else None, handle
    )
    if layout == "expert":
        factor = jnp.where(ids >= 0, weights, 0).sum(1)
    else:
        to = jnp.where(ids >= 0, ids // over.num_local_experts, -1)[:, :, None]
        factor = (to == jnp.arange(over.comm.num_ranks)).any(1).sum(1)
    want = sent.astype(jnp.float32) * factor[:, None]
    return (out.astype(jnp.float32) != want).any(1).sum(dtype=jnp.int32)


def chained(over, layout, steps, x, weights, *, idle=False, delay=lambda x, _: x):
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
            delay=lambda sent: delay(sent, step),
        )
        return wrong + more, None

    me = jax.lax.axis_index(over.comm.axis_name)
    start = 0 * me.astype(jnp.int32)  # varies as what is added
    return jax.lax.scan(one, start, jnp.arange(steps, dtype=jnp.int32))[0]
