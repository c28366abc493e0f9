"""Transformations of permute and unpermute, and what their programs become."""

from __future__ import annotations

import harness
import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from permute_layer import EXPERTS, RANKS, TOKENS, TOP_K, Layer

import jax_ep

NATIVE = harness.BACKENDS[0]

variants = pytest.mark.parametrize(
    ("backend", "check_vma"),
    [(NATIVE, True), (NATIVE, False), ("xla", True)],
    ids=["native-vma", "native-no_vma", "xla-vma"],
)


def assert_close(actual, expected, tolerance=3e-5):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(
            np.asarray(a), np.asarray(e), rtol=tolerance, atol=tolerance
        ),
        actual,
        expected,
    )


@variants
def test_value_gradient_and_tangent(backend, check_vma):
    layer = Layer(backend, check_vma)
    args = layer.x, layer.weights
    f = layer.function()
    assert_close(jax.jit(f)(*args), layer.dense(*args))
    for transform in (
        lambda g: jax.grad(lambda *a: (g(*a) ** 2).sum(), argnums=(0, 1)),
        lambda g: lambda *a: jax.jvp(g, a, a)[1],
        lambda g: lambda *a: jax.linearize(g, *a)[1](*a),
        # Hessian-vector products, forward over reverse and the other way.
        lambda g: (
            lambda *a: jax.jvp(
                jax.grad(lambda *b: (g(*b) ** 2).sum(), argnums=(0, 1)), a, a
            )[1]
        ),
        lambda g: jax.grad(lambda *a: (jax.jvp(g, a, a)[1] ** 2).sum(), argnums=(0, 1)),
    ):
        assert_close(jax.jit(transform(f))(*args), transform(layer.dense)(*args), 2e-4)


@variants
def test_check_grads(backend, check_vma):
    layer = Layer(backend, check_vma)
    f = jax.jit(layer.function())
    check_grads(f, (layer.x, layer.weights), order=2, atol=2e-2, rtol=2e-2, eps=1e-2)


@variants
def test_vmap(backend, check_vma):
    """Over rows, over weights, over the routing."""
    layer = Layer(backend, check_vma)
    f, dense = layer.function(), layer.dense
    xs = jnp.stack([layer.x, 2 * layer.x, -layer.x])
    ws = jnp.stack([layer.weights, -layer.weights, layer.weights + 1])
    assert_close(
        jax.jit(jax.vmap(f, (0, None)))(xs, layer.weights),
        jax.vmap(dense, (0, None))(xs, layer.weights),
    )
    assert_close(
        jax.jit(jax.vmap(f, (None, 0), 1))(layer.x, ws),
        jax.vmap(dense, (None, 0), 1)(layer.x, ws),
    )
    ids = jnp.stack(
        [layers.random_routing(s, RANKS * TOKENS, TOP_K, EXPERTS) for s in (4, 5, 6)]
    )
    mapped = layers.sharded(layer.body, layer.mesh, check_vma=check_vma)
    assert_close(
        jax.jit(jax.vmap(mapped))(xs, ws, ids),
        jax.vmap(dense)(xs, ws, ids),
    )
    gradient = lambda g: jax.vmap(  # noqa: E731
        jax.grad(lambda *a: (g(*a) ** 2).sum(), argnums=(0, 1)), (0, None)
    )
    assert_close(
        jax.jit(gradient(f))(xs, layer.weights),
        gradient(dense)(xs, layer.weights),
        2e-4,
    )


@harness.on_each_backend
def test_scan_under_remat_with_a_plan_a_layer(backend):
    layer = Layer(backend)
    ids = np.stack(
        [layers.random_routing(s, RANKS * TOKENS, TOP_K, EXPERTS) for s in (8, 9, 10)],
        axis=1,
    )

    def body(x, weights, ids):
        @jax.checkpoint
        def step(x, idx):
            return x + layer.body(x, weights, idx), None

        return lax.scan(step, x, jnp.swapaxes(ids, 0, 1))[0]

    def dense(x, weights):
        for i in range(ids.shape[1]):
            x = x + layer.dense(x, weights, ids[:, i])
        return x

    f = layer.function(body, ids)
    transform = lambda g: jax.value_and_grad(  # noqa: E731
        lambda *a: (g(*a) ** 2).sum(), argnums=(0, 1)
    )
    args = layer.x, layer.weights
    assert_close(jax.jit(transform(f))(*args), transform(dense)(*args), 5e-4)


@harness.on_each_backend
def test_weights_of_another_type(backend):
    """bfloat16 weights get bfloat16 gradients; replicated ones a sum of all."""
    layer = Layer(backend)

    def body(x, scale, topk_idx):
        plan = layer.plan(topk_idx)
        rows = jax_ep.permute(jax_ep.dispatch(x, plan), plan)
        weights = jnp.broadcast_to(scale, (plan.capacity, TOP_K))
        return jax_ep.combine(jax_ep.unpermute(rows, plan, weights), plan)

    mapped = layers.sharded(body, layer.mesh, in_specs=(P("ep"), P(), P("ep")))
    valid = (layer.topk_idx >= 0) & (layer.topk_idx < EXPERTS)
    scale = jnp.asarray([0.5, -1.0, 2.0], jnp.bfloat16)

    def loss(scale):
        return (mapped(layer.x, scale, layer.topk_idx) * layer.x).sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(scale)
    per_k = valid.T @ np.asarray(layer.x**2).sum(1)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(value, per_k @ np.float32(scale), rtol=1e-4)
    np.testing.assert_allclose(np.float32(gradient), per_k, rtol=2e-2)


# What the program becomes ----------------------------------------------------


def test_places_are_numbered_once_and_only_where_they_are_used():
    layer = Layer(NATIVE)
    args = (layer.x, layer.weights, layer.topk_idx)

    def count(body):
        mapped = jax.jit(layers.sharded(body, layer.mesh))
        text = mapped.lower(*args).compile().as_text()
        return text.count('custom_call_target="jax_ep_expert_rows"')

    def without(x, weights, topk_idx):
        plan = layer.plan(topk_idx)
        return jax_ep.combine(jax_ep.dispatch(x, plan), plan)

    assert count(layer.body) == 1
    assert count(without) == 0


def test_lowering_for_cuda():
    """Local calls: no channel, no collective around them."""
    layer = Layer(NATIVE)

    def loss(x, weights):
        return layer.function()(x, weights).sum()

    f = jax.jit(jax.grad(loss, argnums=(0, 1)))
    text = f.trace(layer.x, layer.weights).lower(lowering_platforms=("cuda",)).as_text()
    lines = [
        line
        for line in text.splitlines()
        for name in ("expert_rows", "permute", "unpermute", "row_dots")
        if f"@jax_ep_{name}(" in line
    ]
    assert {line.split("@jax_ep_")[1].split("(")[0] for line in lines} == {
        "expert_rows",
        "permute",
        "unpermute",
        "row_dots",
    }
    assert not any("channel" in line for line in lines)
