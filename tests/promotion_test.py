"""Every operation gives the same bits whether or not JAX may promote operands.

The whole suite runs without promotion of ranks and dtypes (conftest.py); here the
results are compared with those of JAX's defaults.
"""

from __future__ import annotations

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_ep

RANKS = min(4, harness.most_ranks())
TOKENS, TOP_K, HIDDEN, EXPERTS = 12, 3, 256, 2 * RANKS


def layer(comm, ids, x, weights):
    """What the operations for large batches return, and a gradient of them."""
    plan, rows = jax_ep.plan_dispatch(
        {"x": x, "half": x.astype(jnp.bfloat16)},
        ids,
        comm=comm,
        num_experts=EXPERTS,
        capacity_factor=0.75,
        expert_alignment=4,
        node_capacity=5,
    )

    def loss(x, weights):
        flight = jax_ep.dispatch_start((x, weights), plan)
        flight, _ = jax_ep.overlap(flight, jnp.negative, x)
        rows, row_weights = jax_ep.dispatch_done(flight)
        y = jax_ep.unpermute(jax_ep.permute(rows, plan), plan, row_weights)
        out = jax_ep.combine_done(jax_ep.combine_start(y, plan))
        return (out**2).sum() + jax_ep.dispatch_fp8(x, plan, scale="ue8m0").sum()

    return {
        "plan": harness.plan_fields(plan),
        "rows": rows,
        "gradient": jax.grad(loss, (0, 1))(x, weights),
        "fp8": jax_ep.dispatch_fp8(x, plan, dequantize=False),
        "moe": jax_ep.moe(
            x, ids, weights, lambda rows, _: 2 * rows, comm=comm, num_experts=EXPERTS
        ),
    }


def few_tokens(comm, ids, x, weights):
    """What the low-latency operations return."""
    results = []
    buffer = jax_ep.LowLatencyBuffer(
        comm, max_tokens=TOKENS, hidden=HIDDEN, num_experts=EXPERTS, dtype=x.dtype
    )
    for layout in ("expert", "rank"):
        by_expert = layout == "expert"
        rows, who, handle = jax_ep.low_latency_dispatch(
            x,
            ids,
            buffer=buffer,
            layout=layout,
            quantize="fp8",
            topk_weights=None if by_expert else weights,
        )
        # What nothing came to holds anything.
        y = jax_ep.dequantize_fp8(*rows, dtype=x.dtype)
        out = jax_ep.low_latency_combine(y, weights if by_expert else None, handle)
        results += [who, out]
    return results


def bits(comm, body):
    ids = cases.mix(1, *cases.grid(RANKS, TOKENS, TOP_K)) % np.uint64(EXPERTS + 1)
    x = 4 * cases.unit(2, *cases.grid(RANKS, TOKENS, HIDDEN)) - 2
    weights = cases.unit(3, *cases.grid(RANKS, TOKENS, TOP_K))
    # Wide ids where x64 has them.
    ids = ids.astype(jax.dtypes.canonicalize_dtype(np.int64)) - 1
    results = harness.run(
        body, comm, ids, x.astype(np.float32), weights.astype(np.float32)
    )
    return {
        jax.tree_util.keystr(path): (leaf.dtype, leaf.shape, leaf.tobytes())
        for path, leaf in jax.tree.leaves_with_path(results)
    }


def check(backend, body, node_size=None, x64=False):
    with (
        jax_ep.Communicator(
            harness.mesh(RANKS), "ep", backend=backend, node_size=node_size
        ) as comm,
        jax.enable_x64(x64),
    ):
        strict = bits(comm, body)
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            assert strict == bits(comm, body)


on_both_widths = pytest.mark.parametrize("x64", (False, True), ids=("x32", "x64"))


def test_settings_of_the_suite():
    assert jax.config.jax_numpy_rank_promotion == "raise"
    assert jax.config.jax_numpy_dtype_promotion == "strict"


@on_both_widths
@harness.on_each_backend
def test_layer(backend, x64):
    check(backend, layer, x64=x64)


@on_both_widths
@pytest.mark.skipif(
    RANKS < 4 or harness.ON_GPU or oracle.NODE_SIZE is not None,
    reason="for four virtual devices, which this test cuts into nodes",
)
def test_layer_between_nodes(x64):
    check("cpu", layer, node_size=2, x64=x64)


@on_both_widths
@harness.on_each_backend
def test_few_tokens(backend, x64):
    check(backend, few_tokens, x64=x64)
