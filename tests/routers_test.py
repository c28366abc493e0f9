"""Routers of published models, alone and in front of jax_ep.moe."""

from __future__ import annotations

import functools
import pathlib
import sys

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_ep

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import routers  # noqa: E402

RANKS = harness.most_ranks()
NATIVE = harness.BACKENDS[0]


@pytest.fixture(autouse=True)
def exact_products():
    """GPUs would round the factors of float32 products otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


def logits_of(*shape, seed=0):
    return (4 * cases.unit(seed, *cases.grid(*shape)) - 2).astype(np.float32)


# Alone, against NumPy --------------------------------------------------------


def best(scores, k):
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]


def sigmoid(x):
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def take(a, idx):
    return np.take_along_axis(a, idx, -1)


def test_softmax_top_k():
    logits = logits_of(16, 60)
    p = softmax(logits)
    for normalize in (False, True):
        idx, weights = routers.softmax_top_k(logits, 4, normalize=normalize, scale=2.0)
        want = take(p, best(p, 4))
        want = 2 * want / (want.sum(-1, keepdims=True) if normalize else 1)
        np.testing.assert_array_equal(idx, best(p, 4))
        np.testing.assert_allclose(weights, want, rtol=1e-5)


def test_top_k_softmax_is_a_normalized_softmax_top_k():
    logits = logits_of(16, 128)
    idx, weights = routers.top_k_softmax(logits, 4)
    other_idx, other = routers.softmax_top_k(logits, 4)
    np.testing.assert_array_equal(idx, other_idx)
    np.testing.assert_allclose(weights, other, rtol=1e-5)


def test_sigmoid_top_1():
    logits = logits_of(16, 16)
    idx, weights = routers.sigmoid_top_1(logits)
    np.testing.assert_array_equal(idx, best(logits, 1))
    np.testing.assert_allclose(weights, take(sigmoid(logits), best(logits, 1)), 1e-5)


def test_sigmoid_with_bias():
    """The bias chooses; the weights know nothing of it."""
    logits, bias = logits_of(16, 64), logits_of(64, seed=1)
    scores = sigmoid(logits)
    idx, weights = routers.sigmoid_with_bias(logits, bias, 8, scale=2.827)
    want = take(scores, best(scores + bias, 8))
    np.testing.assert_array_equal(idx, best(scores + bias, 8))
    np.testing.assert_allclose(
        weights, 2.827 * want / want.sum(-1, keepdims=True), rtol=1e-5
    )
    gradient = jax.grad(
        lambda b: routers.sigmoid_with_bias(logits, b, 8)[1][:, 0].sum()
    )(bias)
    assert not gradient.any()


def test_deepseek_v3():
    """Only experts of the 4 best of 8 groups, by the sum of each group's 2 best."""
    logits, bias = logits_of(32, 256), logits_of(256, seed=1) / 8
    scores = sigmoid(logits)
    choice = (scores + bias).reshape(32, 8, 32)
    worth = np.sort(choice, -1)[..., -2:].sum(-1)
    inside = (np.arange(8) == best(worth, 4)[..., None]).any(1)
    limited = np.where(inside[..., None], choice, -np.inf).reshape(32, 256)
    idx, weights = routers.deepseek_v3(logits, bias)
    np.testing.assert_array_equal(idx, best(limited, 8))
    np.testing.assert_allclose(weights.sum(-1), 2.5, rtol=1e-5)
    assert len({int(i) // 32 for i in idx[0]}) <= 4


# In front of a layer ---------------------------------------------------------

# (model, experts, top k, hidden size, router); from the released configurations.
# Full sizes need GPUs; elsewhere the hidden size is a 64th.
MODELS = (
    ("DeepSeek-V3", 256, 8, 7168, "deepseek_v3"),
    ("Kimi-K2", 384, 8, 7168, "sigmoid_with_bias"),
    ("Kimi-K3", 896, 16, 3584, "sigmoid_with_bias"),
    ("Qwen3-235B", 128, 8, 4096, "softmax_top_k"),
    ("Qwen3-Next-80B", 512, 10, 2048, "softmax_top_k"),
    ("Qwen1.5-MoE-A2.7B", 60, 4, 2048, "softmax_top_k"),
    ("Mixtral-8x7B", 8, 2, 4096, "top_k_softmax"),
    ("gpt-oss-120b", 128, 4, 2880, "top_k_softmax"),
    ("Llama-4-Maverick", 128, 1, 5120, "sigmoid_top_1"),
    ("Nemotron-3-Super", 512, 22, 1024, "sigmoid_with_bias"),
)


def router(name, top_k):
    if name == "sigmoid_top_1":
        return lambda logits, bias: routers.sigmoid_top_1(logits)
    function = getattr(routers, name)
    if name in ("deepseek_v3", "sigmoid_with_bias"):
        return lambda logits, bias: function(logits, bias, top_k)
    return lambda logits, bias: function(logits, top_k)


def layer_inputs(experts, hidden, tokens, inner):
    local = -(-experts // RANKS)

    def normal(seed, *shape):
        return (cases.unit(seed, *cases.grid(*shape)) * 4 - 2).astype(np.float32)

    return {
        "x": normal(1, RANKS, tokens, hidden),
        "router": normal(2, hidden, experts) / np.float32(hidden**0.5),
        "bias": normal(3, experts) / 16,
        "w_in": normal(4, RANKS, local, hidden, inner) / np.float32(hidden**0.5),
        "w_out": normal(5, RANKS, local, inner, hidden) / np.float32(inner**0.5),
        "gy": normal(6, RANKS, tokens, hidden),
    }


def parallel(comm, a, route, experts, alignment):
    """Output, and gradients of x, the router and the experts, rank by rank."""

    def body(comm, a):
        def layer(x, w_router, w_in, w_out):
            idx, weights = route(x @ w_router, a["bias"])

            def mlp(rows, sizes):
                inner = jax.nn.silu(lax.ragged_dot(rows, w_in, sizes))
                return lax.ragged_dot(inner, w_out, sizes)

            return jax_ep.moe(
                x,
                idx,
                weights,
                mlp,
                comm=comm,
                num_experts=experts,
                expert_alignment=alignment,
            )

        args = a["x"], a["router"], a["w_in"], a["w_out"]
        out, pull = jax.vjp(layer, *args)
        return out, pull(a["gy"])

    stacked = {
        k: np.broadcast_to(v, (RANKS, *v.shape)) if k in ("router", "bias") else v
        for k, v in a.items()
    }
    return harness.run(body, comm, stacked)


@functools.partial(jax.jit, static_argnums=1)
def dense(a, route):
    """The same with every expert's weights gathered token by token."""
    x, gy = (a[k].reshape(-1, a[k].shape[-1]) for k in ("x", "gy"))
    w_in, w_out = (a[k].reshape(-1, *a[k].shape[2:]) for k in ("w_in", "w_out"))

    def layer(x, w_router, w_in, w_out):
        idx, weights = route(x @ w_router, a["bias"])

        def choice(total, k):
            e = idx[:, k]
            inner = jax.nn.silu(jnp.einsum("th,thf->tf", x, w_in[e]))
            y = jnp.einsum("tf,tfh->th", inner, w_out[e])
            return total + weights[:, k, None] * y, None

        return lax.scan(choice, jnp.zeros_like(x), jnp.arange(idx.shape[1]))[0]

    out, pull = jax.vjp(layer, x, a["router"], w_in, w_out)
    return out, pull(gy)


def assert_model(experts, top_k, hidden, name, tokens, inner, alignment=8):
    a = layer_inputs(experts, hidden, tokens, inner)
    route = router(name, top_k)
    found = parallel(harness.communicator(NATIVE, RANKS), a, route, experts, alignment)
    out, (dx, drouter, dw_in, dw_out) = jax.tree.map(np.asarray, dense(a, route))
    got_out, (got_dx, got_drouter, got_in, got_w_out) = found
    for what, got, right in (
        ("output", got_out, out),
        ("dx", got_dx, dx),
        ("router", got_drouter.sum(0), drouter),
        ("w_in", got_in, dw_in),
        ("w_out", got_w_out, dw_out),
    ):
        scale = np.abs(right).max()
        np.testing.assert_allclose(
            got.reshape(right.shape), right, rtol=1e-3, atol=1e-4 * scale, err_msg=what
        )


@pytest.mark.parametrize(("model", "experts", "top_k", "hidden", "name"), MODELS)
def test_published_models(model, experts, top_k, hidden, name):
    """Experts and choices are real, the hidden size is a 64th."""
    assert_model(experts, top_k, hidden // 64, name, tokens=5, inner=8)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize(("model", "experts", "top_k", "hidden", "name"), MODELS)
def test_published_models_at_full_size(model, experts, top_k, hidden, name):
    """The whole hidden size; few tokens, narrow experts and no pads, because
    ragged_dot may keep S rows for each of the experts."""
    assert_model(experts, top_k, hidden, name, tokens=16, inner=16, alignment=1)
