"""moe with two-layer experts against a dense layer: outputs and every gradient."""

from __future__ import annotations

import functools

import cases
import expert_oracle
import harness
import jax
import jax.numpy as jnp
import layers
import numpy as np
import oracle
from jax import lax

import jax_ep

HIDDEN, INNER = 6, 5


def expert_mlp(rows, group_sizes, experts):
    """w_out(tanh(w_in(row))) of each row's expert, as grouped products."""
    w_in, w_out = experts
    # XLA for CPUs multiplies every row with every expert: a minute for most of both.
    much = len(rows) * len(group_sizes) > 2**22 and not harness.ON_GPU
    product = _row_by_row if much else lax.ragged_dot
    inner = jnp.tanh(product(rows, w_in, group_sizes))
    return product(inner, w_out, group_sizes)


def _row_by_row(rows, matrices, group_sizes):
    """ragged_dot: rows behind the last group become 0."""
    ends = jnp.cumsum(group_sizes)
    group = jnp.searchsorted(ends, jnp.arange(len(rows)), side="right")
    matrices = matrices.at[group].get(mode="fill", fill_value=0)
    return jnp.einsum("nh,nhf->nf", rows, matrices)


@functools.cache
def program(comm, num_experts, capacity, alignment, expert_capacity):
    """(topk_idx, x, weights, experts, gy) -> output and gradients."""

    def body(comm, topk_idx, x, weights, experts, gy):
        def layer(x, weights, experts):
            return jax_ep.moe(
                x,
                topk_idx,
                weights,
                lambda rows, sizes: expert_mlp(rows, sizes, experts),
                comm=comm,
                num_experts=num_experts,
                capacity=capacity,
                expert_alignment=alignment,
                expert_capacity=expert_capacity,
            )

        out, pull = jax.vjp(layer, x, weights, experts)
        return out, pull(gy)

    return harness.Program(body, comm)


def normal(seed, *shape):
    """[...] of about normal numbers, the same on every host."""
    return (
        (cases.unit(seed, *cases.grid(*shape, 12)).sum(-1) - 6).astype(np.float32)
        if shape
        else None
    )


def inputs(topk_idx, num_experts, hidden=HIDDEN, inner=INNER):
    """x, weights, experts and a cotangent, stacked over ranks."""
    ranks, tokens, top_k = topk_idx.shape
    local = -(-num_experts // ranks)
    return (
        normal(11, ranks, tokens, hidden),
        normal(12, ranks, tokens, top_k),
        (
            normal(13, ranks, local, hidden, inner) / np.float32(hidden**0.5),
            normal(14, ranks, local, inner, hidden) / np.float32(inner**0.5),
        ),
        normal(15, ranks, tokens, hidden),
    )


def kept_pairs(topk_idx, num_experts, capacity, alignment, expert_capacity):
    """bool[R, T, K]: the choices that found room on the rank and with the expert."""
    plan = oracle.plan(topk_idx, num_experts, capacity, alignment)
    local = -(-num_experts // len(topk_idx))
    right = expert_oracle.expert_plan(
        plan.fields["recv_topk_idx"], local, alignment, expert_capacity
    )
    kept = np.zeros(topk_idx.shape, bool)
    for rank, sources in enumerate(plan.sources):
        here = right.places[rank, : len(sources)] >= 0
        kept[sources[:, 0], sources[:, 1]] |= here
    return kept


@functools.cache
def _dense(shape):
    del shape  # one compilation each; jit would find that out by itself

    def run(topk_idx, kept, x, weights, experts, gy):
        flat = jax.tree.map(
            lambda a: a.reshape(-1, *a.shape[2:]), (x, weights, experts)
        )
        ids, used = (a.reshape(-1, a.shape[-1]) for a in (topk_idx, kept))

        def layer(x, weights, experts):
            # Not one_hot: ids may be anything.
            return layers.dense_moe(x, ids, weights, experts, used)

        out, pull = jax.vjp(layer, *flat)
        grads = pull(gy.reshape(out.shape))
        like = (x, weights, experts)
        return out.reshape(gy.shape), jax.tree.map(
            lambda g, a: g.reshape(a.shape), grads, like
        )

    return jax.jit(run)


def assert_layer(backend, topk_idx, num_experts, capacity, alignment, **sizes):
    """moe against the dense layer. `sizes`: expert_capacity, hidden, inner."""
    ranks, tokens, top_k = topk_idx.shape
    local = -(-num_experts // ranks)
    expert_capacity = sizes.pop("expert_capacity", None)
    places = expert_capacity or expert_oracle.worst_case(
        min(capacity, ranks * tokens), top_k, local, alignment
    )
    args = inputs(topk_idx, num_experts, **sizes)
    kept = kept_pairs(topk_idx, num_experts, capacity, alignment, places)
    run = program(
        harness.communicator(backend, ranks),
        num_experts,
        capacity,
        alignment,
        expert_capacity,
    )
    found = run(topk_idx, *args)
    want = jax.tree.map(
        np.asarray, _dense((topk_idx.shape, num_experts))(topk_idx, kept, *args)
    )
    names = ("output", "dx", "dweights", "dw_in", "dw_out")
    for name, got, right in zip(
        names, jax.tree.leaves(found), jax.tree.leaves(want), strict=True
    ):
        scale = np.abs(right).max(initial=1.0)
        np.testing.assert_allclose(
            got, right, rtol=1e-4, atol=2e-5 * scale, err_msg=name
        )
    # Exactly 0, and not -0, where a choice names no expert or was dropped.
    dweights = found[1][1]
    assert not dweights[~kept].view(np.int32).any()
    return dweights, kept
