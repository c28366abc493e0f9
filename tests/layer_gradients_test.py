"""Gradients of whole layers, with the router and with several layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from twins import (
    CAPACITY,
    EXPERTS,
    HIDDEN,
    NATIVE,
    RANKS,
    TOKENS,
    TOP_K,
    assert_close,
    normal,
    routing,
    variants,
)


class TestLayer:
    """Gradients of whole layers: data, router weights and expert weights."""

    def layer(self, backend, check_vma, capacity=None):
        mesh = layers.mesh({"ep": RANKS})
        comm = layers.communicator(mesh, "ep", backend)
        capacity = RANKS * TOKENS if capacity is None else capacity

        def body(x, topk_idx, topk_weights, experts):
            return layers.moe_layer(
                x,
                topk_idx,
                topk_weights,
                experts,
                comm=comm,
                num_experts=EXPERTS,
                capacity=capacity,
            )

        def dense(x, topk_idx, topk_weights, experts):
            kept = layers.kept_pairs(
                topk_idx, num_ranks=RANKS, num_experts=EXPERTS, capacity=capacity
            )
            return layers.dense_moe(x, topk_idx, topk_weights, experts, kept)

        return layers.sharded(body, mesh, check_vma=check_vma), dense

    def arguments(self, seed=0):
        x = normal(seed, RANKS * TOKENS, HIDDEN)
        weights = normal(seed + 1, RANKS * TOKENS, TOP_K)
        experts = layers.expert_weights(
            seed + 2, num_ranks=RANKS, num_experts=EXPERTS, hidden=HIDDEN, inner=4
        )
        return x, routing(seed + 3), weights, experts

    @pytest.mark.parametrize(
        ("backend", "check_vma", "capacity"),
        (
            (NATIVE, True, None),
            (NATIVE, True, CAPACITY),
            (NATIVE, False, CAPACITY),
            ("xla", True, CAPACITY),
        ),
    )
    def test_every_gradient(self, backend, check_vma, capacity):
        sharded, dense = self.layer(backend, check_vma, capacity)
        x, topk_idx, weights, experts = self.arguments()

        def loss(layer):
            def of(x, weights, experts):
                return jnp.sum(jnp.sin(layer(x, topk_idx, weights, experts)))

            return jax.value_and_grad(of, argnums=(0, 1, 2))

        actual = jax.jit(loss(sharded))(x, weights, experts)
        assert_close(actual, loss(dense)(x, weights, experts), 1e-4)
        # The gradient of each (token, k) weight is its own, and exactly 0
        # where no row travelled.
        weight_grad = np.asarray(actual[1][1])
        kept = layers.kept_pairs(
            topk_idx,
            num_ranks=RANKS,
            num_experts=EXPERTS,
            capacity=capacity or RANKS * TOKENS,
        )
        assert 0 < kept.sum() < kept.size
        assert not weight_grad[~kept].any()
        # A duplicate id shares its twin's gradient: look at distinct ones.
        pairs = np.argwhere(kept)
        distinct = {(t, topk_idx[t, k]): weight_grad[t, k] for t, k in pairs}
        assert 0 not in distinct.values()
        assert len(set(distinct.values())) == len(distinct)

    @pytest.mark.parametrize(
        ("backend", "form"),
        (
            (NATIVE, "unrolled"),
            (NATIVE, "scan"),
            (NATIVE, "checkpoint"),
            ("xla", "scan"),
        ),
    )
    def test_layers_with_different_plans(self, backend, form):
        """Three layers in one program keep their routing apart."""
        sharded, dense = self.layer(backend, check_vma=True)
        x = normal(0, RANKS * TOKENS, HIDDEN)
        per_layer = [self.arguments(10 * i)[1:] for i in range(3)]

        def loss(layer, form):
            def of(x, weights, experts):
                def step(x, args):
                    return x + layer(x, *args), ()

                args = ([a[0] for a in per_layer], weights, experts)
                if form == "scan":
                    stacked = [stack(a) for a in args]
                    x = lax.scan(step, x, tuple(stacked))[0]
                else:
                    if form == "checkpoint":
                        step = jax.checkpoint(step)
                    for i in range(3):
                        x = step(x, tuple(a[i] for a in args))[0]
                return jnp.sum(jnp.sin(x))

            return jax.value_and_grad(of, argnums=(0, 1, 2))

        def stack(trees):
            return jax.tree.map(lambda *a: jnp.stack(a), *trees)

        weights = [a[1] for a in per_layer]
        experts = [a[2] for a in per_layer]
        actual = jax.jit(loss(sharded, form))(x, weights, experts)
        expected = loss(dense, "unrolled")(x, weights, experts)
        assert_close(actual, expected, 1e-3)


class TestRouter:
    """The router inside: real top-k choices, weights that have a gradient."""

    @variants
    def test_every_derivative(self, backend, check_vma):
        mesh = layers.mesh({"ep": RANKS})
        comm = layers.communicator(mesh, "ep", backend)
        args = (
            normal(1, RANKS * TOKENS, HIDDEN),
            normal(2, HIDDEN, EXPERTS),
            *layers.expert_weights(
                3, num_ranks=RANKS, num_experts=EXPERTS, hidden=HIDDEN, inner=4
            ),
        )
        tangents = jax.tree.map(jnp.sin, args)

        def route(x, router):
            weights, topk_idx = lax.top_k(jax.nn.softmax(x @ router), TOP_K)
            return weights / weights.sum(axis=1, keepdims=True), topk_idx

        def body(x, router, *experts):
            weights, topk_idx = route(x, router)
            return layers.moe_layer(
                x, topk_idx, weights, experts, comm=comm, num_experts=EXPERTS
            )

        def dense(x, router, *experts):
            weights, topk_idx = route(x, router)
            return layers.dense_moe(x, topk_idx, weights, experts, True)

        sharded = layers.sharded(
            body,
            mesh,
            in_specs=(P("ep"), P(), P("ep"), P("ep")),
            check_vma=check_vma,
        )

        def derivatives(layer):
            def loss(args):
                return jnp.sum(jnp.sin(layer(*args)))

            def all_of_them(args):
                grad = jax.grad(loss)
                return jax.jvp(loss, (args,), (tangents,)), jax.jvp(
                    grad, (args,), (tangents,)
                )

            return jax.jit(all_of_them)

        assert_close(derivatives(sharded)(args), derivatives(dense)(args), 1e-3)
