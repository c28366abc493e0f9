"""A layer made of permute and unpermute, with its dense twin."""

from __future__ import annotations

import harness
import jax.numpy as jnp
import layers
import numpy as np
from jax import lax

import jax_ep

RANKS = harness.few_ranks()
TOKENS, TOP_K, HIDDEN, EXPERTS, ALIGNMENT = 6, 3, 5, 2 * RANKS + 1, 4


class Layer:
    """x [T, H] and weights [T, K] of all ranks through permute and unpermute."""

    def __init__(self, backend, check_vma=True, expert_capacity=None):
        self.mesh = layers.mesh({"ep": RANKS})
        self.comm = layers.communicator(self.mesh, "ep", backend)
        self.check_vma = check_vma
        self.expert_capacity = expert_capacity
        rng = np.random.default_rng(7)
        self.topk_idx = layers.random_routing(3, RANKS * TOKENS, TOP_K, EXPERTS)
        self.x = jnp.asarray(rng.normal(size=(RANKS * TOKENS, HIDDEN)), jnp.float32)
        self.weights = jnp.asarray(
            rng.normal(size=(RANKS * TOKENS, TOP_K)), jnp.float32
        )

    def plan(self, topk_idx):
        return jax_ep.make_plan(
            topk_idx,
            comm=self.comm,
            num_experts=EXPERTS,
            expert_alignment=ALIGNMENT,
            expert_capacity=self.expert_capacity,
        )

    def body(self, x, weights, topk_idx):
        plan = self.plan(topk_idx)
        rows, row_weights = jax_ep.dispatch((jnp.sin(x), jnp.cos(weights)), plan)
        expert_rows = jax_ep.permute(rows, plan)
        # Experts that differ, pads included: what stands there is not read.
        ends = jnp.cumsum(plan.group_sizes)
        expert = jnp.searchsorted(ends, jnp.arange(len(expert_rows)), side="right")
        scale = (expert + 2 + lax.axis_index("ep")).astype(jnp.float32)
        y = jnp.tanh(expert_rows * scale[:, None])
        return jax_ep.combine(jax_ep.unpermute(y, plan, row_weights), plan)

    def function(self, body=None, topk_idx=None):
        topk_idx = self.topk_idx if topk_idx is None else topk_idx
        mapped = layers.sharded(body or self.body, self.mesh, check_vma=self.check_vma)
        return lambda x, weights: mapped(x, weights, topk_idx)

    def dense(self, x, weights, topk_idx=None):
        topk_idx = self.topk_idx if topk_idx is None else topk_idx
        local = -(-EXPERTS // RANKS)
        rank, expert = topk_idx // local, topk_idx % local
        valid = (topk_idx >= 0) & (topk_idx < EXPERTS)
        scale = jnp.where(valid, expert + 2 + rank, 0).astype(jnp.float32)
        y = jnp.tanh(jnp.sin(x)[:, None, :] * scale[..., None])
        gate = jnp.where(valid, jnp.cos(weights), 0)
        return (gate[..., None] * y).sum(1)
