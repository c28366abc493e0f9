"""The whole layer against a dense one: outputs and every gradient."""

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
import pytest
from jax import lax

import jax_ep

RANKS = harness.few_ranks()
NATIVE = harness.BACKENDS[0]
HIDDEN, INNER = 6, 5
# Cases whose programs plain JAX compiles; the first 14 share one.
XLA_CASES = (*cases.CASES[:14], *(c for c in cases.CASES if c.capacity is not None))


@pytest.fixture(autouse=True)
def exact_products():
    """GPUs would round the factors of float32 products otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


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


@pytest.mark.parametrize("alignment", (1, 8, 128))
@pytest.mark.parametrize("case", cases.CASES, ids=str)
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
    made = [inputs(ids[:, i], experts) for i in range(depth)]
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
                lambda rows, sizes: expert_mlp(rows, sizes, params),
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
            rows = x.reshape(-1, HIDDEN)
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
    x = {"a": normal(1, RANKS, 9, 4), "b": normal(2, RANKS, 9)}
    weights = normal(3, *ids.shape)

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
    x, weights, experts, _ = inputs(ids, 4 * RANKS)

    def body(comm, ids, x, weights, experts):
        expert_fn = functools.partial(expert_mlp, experts=experts)
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
