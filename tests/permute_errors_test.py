"""Bad input of permute and unpermute, and of the plan's sizes for them."""

from __future__ import annotations

import expert_oracle
import harness
import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest
from permute_layer import EXPERTS, RANKS, TOKENS, TOP_K, Layer

import jax_ep

NATIVE = harness.BACKENDS[0]


def _trace(body, **plan_args):
    layer = Layer(NATIVE)

    def mapped(x, weights, topk_idx):
        plan = jax_ep.make_plan(
            topk_idx,
            **{"comm": layer.comm, "num_experts": EXPERTS, "capacity": 9} | plan_args,
        )
        return body(plan)

    jax.eval_shape(
        layers.sharded(mapped, layer.mesh), layer.x, layer.weights, layer.topk_idx
    )


S = expert_oracle.worst_case(min(9, RANKS * TOKENS), TOP_K, -(-EXPERTS // RANKS), 1)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (
            lambda plan: jax_ep.permute(jnp.ones((8, 2)), plan),
            ValueError,
            "jax_ep.permute: leaves must be [C, ...] with C = 9 as in the plan, "
            "found float32[8,2]",
        ),
        (
            lambda plan: jax_ep.unpermute(jnp.ones((9, 2)), plan),
            ValueError,
            f"jax_ep.unpermute: leaves must be [S, ...] with S = {S} as in the plan, "
            "found float32[9,2]",
        ),
        (
            lambda plan: jax_ep.unpermute(jnp.ones((S, 2), jnp.int32), plan),
            TypeError,
            "jax_ep.unpermute: leaves must be bfloat16, float16, float32, float64 or "
            f"complex, found int32[{S},2]",
        ),
        (
            lambda plan: jax_ep.unpermute(
                jnp.ones((S, 2), jnp.complex64), plan, jnp.ones((9, TOP_K))
            ),
            TypeError,
            f"jax_ep.unpermute: weights apply to real leaves, found complex64[{S},2]",
        ),
        (
            lambda plan: jax_ep.unpermute(
                jnp.ones((S, 2)), plan, jnp.ones((9, TOP_K), jnp.int32)
            ),
            TypeError,
            f"jax_ep.unpermute: weights must be floating, found int32[9,{TOP_K}]",
        ),
        (
            lambda plan: jax_ep.unpermute(jnp.ones((S, 2)), plan, jnp.ones((9, 1))),
            ValueError,
            f"jax_ep.unpermute: weights must be [C, K] = [9, {TOP_K}] as in the plan, "
            "found float32[9,1]",
        ),
        (
            lambda plan: jax_ep.permute(jnp.ones((9, 2)), 3),
            TypeError,
            "jax_ep.permute: plan must be a jax_ep.Plan, found int",
        ),
        (
            lambda plan: jax.grad(
                lambda x: jax_ep.permute(x, plan).astype(jnp.float32).sum()
            )(jnp.ones((9, 2), jnp.float8_e5m2)),
            TypeError,
            "jax_ep.permute: a leaf of dtype float8_e5m2 has no gradient: unpermute "
            "cannot sum it; permute a wider dtype, or say with jax.custom_vjp what "
            "the gradient is",
        ),
    ],
)
def test_bad_rows(body, error, message):
    with pytest.raises(error) as info:
        _trace(body)
    assert str(info.value) == message


@pytest.mark.parametrize(
    ("plan_args", "error", "message"),
    [
        (
            {"expert_capacity": 0},
            ValueError,
            "expert_capacity must be >= 1, found 0",
        ),
        (
            {"expert_capacity": 12, "expert_alignment": 8},
            ValueError,
            "expert_capacity must be a multiple of expert_alignment 8, found 12",
        ),
        (
            {"expert_capacity": 2.0},
            TypeError,
            "expert_capacity must be a Python integer, found float",
        ),
        (
            {"capacity_factor": 0},
            ValueError,
            "capacity_factor must be finite and above 0, found 0",
        ),
        (
            {"capacity_factor": float("nan")},
            ValueError,
            "capacity_factor must be finite and above 0, found nan",
        ),
        (
            {"capacity_factor": float("inf")},
            ValueError,
            "capacity_factor must be finite and above 0, found inf",
        ),
        (
            {"capacity_factor": "1"},
            TypeError,
            "capacity_factor must be a Python number or None, found str",
        ),
    ],
    ids=str,
)
def test_bad_capacity(plan_args, error, message):
    with pytest.raises(error) as info:
        _trace(lambda plan: plan.recv_src, **plan_args)
    assert str(info.value) == f"jax_ep.make_plan: {message}"


def test_too_many_experts_on_a_rank():
    with pytest.raises(ValueError, match=r"at most 2048 experts, found 2049"):
        _trace(
            lambda plan: jax_ep.permute(jnp.ones((9, 2)), plan),
            num_experts=2049 * RANKS,
        )


@pytest.mark.parametrize(
    ("plan_args", "capacity", "expert_capacity"),
    [
        # (token, k) pairs of a rank that is as busy as the others:
        # RANKS * TOKENS * TOP_K * local / EXPERTS.
        ({"capacity_factor": 1.0}, None, None),
        ({"capacity_factor": 1.25, "expert_alignment": 8}, None, None),
        ({"capacity_factor": np.float32(1.25)}, None, None),
        ({"capacity_factor": np.int64(1)}, None, None),
        ({"capacity_factor": 100.0}, None, None),
        ({"capacity_factor": 0.5, "capacity": 7}, 7, None),
        ({"capacity_factor": 0.5, "expert_capacity": 5}, None, 5),
        ({}, RANKS * TOKENS, None),
    ],
    ids=str,
)
def test_sizes_from_a_capacity_factor(plan_args, capacity, expert_capacity):
    local = -(-EXPERTS // RANKS)
    pairs = RANKS * TOKENS * TOP_K
    factor = plan_args.get("capacity_factor")
    if factor is not None:
        pairs = min(pairs, int(np.ceil(factor * pairs * local / EXPERTS)))
    if capacity is None:
        capacity = min(RANKS * TOKENS, pairs)
    align = plan_args.get("expert_alignment", 1)
    if expert_capacity is None:
        most = min(capacity * TOP_K, pairs)
        most = max(1, most)
        expert_capacity = (most + min(local, most) * (align - 1)) // align * align
    seen = []

    def body(plan):
        seen.append((plan.capacity, plan.expert_capacity))
        return plan.recv_src

    _trace(body, **{"capacity": None} | plan_args)
    assert seen == [(capacity, expert_capacity)]
