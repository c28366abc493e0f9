"""The whole layer against a dense one: outputs and every gradient."""

from __future__ import annotations

import functools

import cases
import harness
import jax
import jax.numpy as jnp
import layers
import moe_layers
import numpy as np
import oracle
import pytest
from jax import lax
from moe_layers import assert_layer

import jax_ep

RANKS = harness.few_ranks()
NATIVE = harness.BACKENDS[0]
# Cases whose programs plain JAX compiles; the first 14 share one.
XLA_CASES = (*cases.CASES[:14], *(c for c in cases.CASES if c.capacity is not None))


@pytest.fixture(autouse=True)
def exact_products():
    """GPUs would round the factors of float32 products otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


def _combinations():
    """Every case; on GPUs, and where cases share a program, with every alignment."""
    for number, case in enumerate(cases.CASES):
        every = harness.ON_GPU or case.program == cases.CASES[0].program
        for alignment in (1, 8, 128) if every else (8, (1, 128)[number % 2]):
            yield pytest.param(case, alignment, id=f"{case}-{alignment}")


@pytest.mark.parametrize(("case", "alignment"), list(_combinations()))
def test_every_case(case, alignment):
    routing = case.routing(RANKS)
    assert_layer(
        NATIVE, routing.topk_idx, routing.num_experts, routing.capacity, alignment
    )


@pytest.mark.parametrize("case", XLA_CASES, ids=str)
def test_every_case_in_plain_jax(case):
    routing = case.routing(RANKS)
    assert_layer("xla", routing.topk_idx, routing.num_experts, routing.capacity, 8)


@pytest.mark.parametrize("ranks", [r for r in cases.RANKS if r != RANKS])
def test_every_number_of_ranks(ranks):
    if ranks > harness.most_ranks():
        pytest.skip(f"needs {ranks} devices; this machine has {jax.device_count()}")
    routing = cases.CASES[0].routing(ranks)
    assert_layer(NATIVE, routing.topk_idx, routing.num_experts, routing.capacity, 4)


@harness.on_each_backend
def test_weight_gradients_differ_from_choice_to_choice(backend):
    """Each (token, k) has a gradient of its own, also where experts repeat."""
    ids = cases.duplicates(RANKS, 13, 3, 4 * RANKS).astype(np.int32)
    dweights, kept = assert_layer(backend, ids, 4 * RANKS, RANKS * 13, 8)
    assert kept.all()
    first, second = ids[..., 0], ids[..., 1]
    assert (first == second).all()
    # The same expert twice: the same gradient twice, and only then.
    np.testing.assert_array_equal(dweights[..., 0], dweights[..., 1])
    distinct = {float(v) for v in dweights[..., 0].ravel()}
    assert len(distinct) == dweights[..., 0].size


@pytest.mark.parametrize("part", (0.3, 0.7), ids=str)
@harness.on_each_backend
def test_overflow_at_both_capacities(backend, part):
    routing = next(c for c in cases.CASES if c.name == "half_capacity").routing(RANKS)
    plan = oracle.plan(routing.topk_idx, routing.num_experts, routing.capacity, 4)
    demand = plan.fields["group_sizes"].sum(-1).max()
    _, kept = assert_layer(
        backend,
        routing.topk_idx,
        routing.num_experts,
        routing.capacity,
        4,
        expert_capacity=max(4, int(part * demand) // 4 * 4),
    )
    assert kept.any()
    assert not kept.all()


def test_hidden_size_of_gpt_oss():
    """2880 columns: no multiple of 128, a short last block of everything."""
    ids = cases.uniform(RANKS, 5, 4, 32).astype(np.int32)
    assert_layer(NATIVE, ids, 32, RANKS * 5, 8, hidden=2880, inner=16)


@pytest.mark.parametrize(("experts", "top_k"), [(60, 4), (896, 16), (512, 22)], ids=str)
def test_experts_of_published_models(experts, top_k):
    """E = 60 does not divide by 8, K = 22 is past 16 bits."""
    ranks = harness.most_ranks()
    ids = cases.uniform(ranks, 6, top_k, experts).astype(np.int32)
    assert_layer(NATIVE, ids, experts, ranks * 6, 8)


@harness.on_each_backend
def test_layers_under_scan_and_remat(backend):
    """Three layers with a routing and experts each, differentiated at once."""
    depth, tokens, top_k, experts = 3, 7, 2, 2 * RANKS + 1
    ids = np.stack(
        [
            cases.uniform_at(seed)(RANKS, tokens, top_k, experts)
            for seed in range(depth)
        ],
        axis=1,
    ).astype(np.int32)
    made = [moe_layers.inputs(ids[:, i], experts) for i in range(depth)]
    x, gy = made[0][0], made[0][3]
    weights = np.stack([m[1] * (1 + i) for i, m in enumerate(made)], axis=1)
    params = jax.tree.map(lambda *a: np.stack(a, axis=1), *[m[2] for m in made])

    def stack(layer, ids, x, weights, params):
        def step(x, leaves):
            return x + layer(x, *leaves), None

        return lax.scan(jax.checkpoint(step), x, (ids, weights, params))[0]

    def body(comm, ids, x, weights, params, gy):
        def layer(x, ids, weights, params):
            return jax_ep.moe(
                x,
                ids,
                weights,
                lambda rows, sizes: moe_layers.expert_mlp(rows, sizes, params),
                comm=comm,
                num_experts=experts,
                expert_alignment=8,
            )

        out, pull = jax.vjp(functools.partial(stack, layer, ids), x, weights, params)
        return out, pull(gy)

    comm = harness.communicator(backend, RANKS)
    found = harness.run(body, comm, ids, x, weights, params, gy)

    def dense(x, weights, params):
        for i in range(depth):
            flat = jax.tree.map(
                lambda a, i=i: a[:, i].reshape(-1, *a.shape[3:]), (weights, params)
            )
            rows = x.reshape(-1, moe_layers.HIDDEN)
            out = layers.dense_moe(
                rows, ids[:, i].reshape(-1, top_k), flat[0], flat[1], True
            )
            x = x + out.reshape(x.shape)
        return x

    out, pull = jax.vjp(dense, *map(jnp.asarray, (x, weights)), params)
    for got, right in zip(
        jax.tree.leaves(found), jax.tree.leaves((out, pull(gy))), strict=True
    ):
        right = np.asarray(right)
        scale = np.abs(right).max()
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=5e-5 * scale)


@harness.on_each_backend
def test_trees_and_other_shapes(backend):
    """x a pytree, experts that return a pytree of other shapes and dtypes."""
    ids = cases.holes(RANKS, 9, 3, 2 * RANKS).astype(np.int32)
    x = {"a": moe_layers.normal(1, RANKS, 9, 4), "b": moe_layers.normal(2, RANKS, 9)}
    weights = moe_layers.normal(3, *ids.shape)

    def body(comm, ids, x, weights):
        def experts(rows, group_sizes):
            assert group_sizes.shape == (2,)
            return [rows["a"].sum(-1), {"wide": jnp.stack([rows["b"]] * 3, -1)}]

        return jax_ep.moe(x, ids, weights, experts, comm=comm, num_experts=2 * RANKS)

    found = harness.run(body, harness.communicator(backend, RANKS), ids, x, weights)
    gate = np.where(ids >= 0, weights, 0).sum(-1)
    np.testing.assert_allclose(found[0], gate * x["a"].sum(-1), rtol=1e-4, atol=1e-5)
    want = np.repeat((gate * x["b"])[..., None], 3, -1)
    np.testing.assert_allclose(found[1]["wide"], want, rtol=1e-4, atol=1e-5)


@harness.on_each_backend
def test_plan_at_hand(backend):
    """moe_with_plan is moe, and its plan tells what was dropped."""
    ids = cases.one_expert(RANKS, 8, 2, 4 * RANKS).astype(np.int32)
    x, weights, experts, _ = moe_layers.inputs(ids, 4 * RANKS)

    def body(comm, ids, x, weights, experts):
        expert_fn = functools.partial(moe_layers.expert_mlp, experts=experts)
        sizes = {"comm": comm, "num_experts": 4 * RANKS, "capacity_factor": 0.5}
        plan = jax_ep.make_plan(ids, **sizes)
        return (
            jax_ep.moe_with_plan(x, weights, expert_fn, plan),
            jax_ep.moe(x, ids, weights, expert_fn, **sizes),
            (plan.overflow, plan.num_demand, plan.expert_demand),
        )

    comm = harness.communicator(backend, RANKS)
    first, second, (overflow, demand, expert_demand) = harness.run(
        body, comm, ids, x, weights, experts
    )
    np.testing.assert_array_equal(first, second)
    hot = (4 * RANKS // 2) // 4
    here = np.arange(RANKS) == hot
    np.testing.assert_array_equal(demand, np.where(here, RANKS * 8, 0))
    np.testing.assert_array_equal(overflow, here & (RANKS * 8 > 8))
    kept = min(RANKS * 8, 8)  # capacity: half of 2 choices of 8 tokens
    np.testing.assert_array_equal(expert_demand, np.where(here, kept, 0))


def _trace(x, weights, **kwargs):
    mesh = layers.mesh({"ep": RANKS})
    comm = layers.communicator(mesh, "ep", NATIVE)

    def body(x, ids, weights):
        return jax_ep.moe(
            x, ids, weights, lambda rows, _: rows, comm=comm, num_experts=8, **kwargs
        )

    ids = jnp.zeros((RANKS * 4, 2), jnp.int32)
    jax.eval_shape(layers.sharded(body, mesh), x, ids, weights)


@pytest.mark.parametrize(
    ("x", "weights", "error", "message"),
    [
        (
            jnp.ones((RANKS * 4, 3)),
            jnp.ones((RANKS * 4, 3)),
            ValueError,
            "jax_ep.moe: weights must be [T, K] = [4, 2] as in the plan, found "
            "float32[4,3]",
        ),
        (
            jnp.ones((RANKS * 4, 3)),
            jnp.ones((RANKS * 4, 2), jnp.int32),
            TypeError,
            "jax_ep.moe: weights must be floating, found int32[4,2]",
        ),
        (
            jnp.ones((RANKS * 5, 3)),
            jnp.ones((RANKS * 4, 2)),
            ValueError,
            "jax_ep.dispatch: leaves must be [T, ...] with T = 4 as in the plan, "
            "found float32[5,3]",
        ),
    ],
    ids=("shape", "dtype", "tokens"),
)
def test_bad_arguments(x, weights, error, message):
    with pytest.raises(error) as info:
        _trace(x, weights)
    assert str(info.value) == message
