"""sharded_moe on global arrays against the dense layer: outputs, gradients, stats."""

from __future__ import annotations

import contextlib

import harness
import jax
import jax.numpy as jnp
import layers
import moe_layers
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

BATCH, SEQUENCE, TOP_K, EXPERTS, HIDDEN, INNER = 4, 6, 3, 6, 5, 4
MESHES = {
    "4": ({"ep": 4}, None),
    "2x2": ({"data": 2, "ep": 2}, None),
    "2x2-sequence": ({"data": 2, "ep": 2}, P("data", "ep")),
    # Both coordinates of "data" do the same.
    "2x2-copies": ({"data": 2, "ep": 2}, P(None, "ep")),
}


def expert_fn(params, rows, group_sizes):
    return moe_layers.expert_mlp(rows, group_sizes, params)


def inputs(ranks):
    """Of all tokens: ids with holes and duplicates, x, weights, experts, valid."""
    tokens = BATCH * SEQUENCE
    ids = layers.random_routing(3, tokens, TOP_K, EXPERTS)
    x, weights = (
        moe_layers.normal(n, BATCH, SEQUENCE, w) for n, w in ((1, HIDDEN), (2, TOP_K))
    )
    experts = layers.expert_weights(
        4, num_ranks=ranks, num_experts=EXPERTS, hidden=HIDDEN, inner=INNER
    )
    valid = np.random.default_rng(5).random((BATCH, SEQUENCE)) < 0.8
    return ids.reshape(BATCH, SEQUENCE, TOP_K), x, weights, experts, valid


def on_ranks(a, mesh, spec):
    """[B, S, ...] -> [groups, R * T, ...]: the tokens as groups of ranks see them."""
    index = np.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE)
    shape = NamedSharding(mesh, spec).devices_indices_map(index.shape)
    order = [index[shape[d]].ravel() for d in mesh.devices.flat]
    groups = np.stack(order).reshape(-1, mesh.shape["ep"], len(order[0]))
    flat = a.reshape(-1, *a.shape[2:])
    return flat[groups.reshape(len(groups), -1)], groups.reshape(len(groups), -1)


def kept(ids, mesh, spec, capacity):
    """bool[B, S, K]: choices whose row travels, whatever group they are in."""
    by_group, index = on_ranks(ids, mesh, spec)
    result = np.zeros((BATCH * SEQUENCE, TOP_K), bool)
    for ids_of_group, tokens in zip(by_group, index, strict=True):
        result[tokens] = layers.kept_pairs(
            ids_of_group,
            num_ranks=mesh.shape["ep"],
            num_experts=EXPERTS,
            capacity=capacity,
        )
    return result.reshape(ids.shape)


def dense(ids, used, x, weights, experts):
    flat = [a.reshape(-1, a.shape[-1]) for a in (x, ids, weights, used)]
    return layers.dense_moe(*flat[:3], experts, flat[3]).reshape(x.shape)


@harness.on_each_backend
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("capacity", [None, 4], ids=["room", "drops"])
def test_is_the_dense_layer(backend, axis_type, shape, capacity):
    axes, spec = MESHES[shape]
    mesh = layers.mesh(axes, axis_type)
    comm = layers.communicator(mesh, "ep", backend)
    ids, x, weights, experts, valid = inputs(comm.num_ranks)
    # What padding holds is not looked at.
    x[~valid] = np.nan
    gy = moe_layers.normal(6, *x.shape)

    def loss(x, weights, experts):
        y, stats = jax_ep.sharded_moe(
            x,
            ids,
            weights,
            experts,
            expert_fn,
            comm=comm,
            num_experts=EXPERTS,
            token_spec=spec,
            valid=valid,
            capacity=capacity,
        )
        return (y * gy).sum(), (y, stats)

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    explicit = axis_type == AxisType.Explicit
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        (_, (y, stats)), grads = run(x, weights, experts)

    chosen = np.where(valid[..., None], ids, -1)
    real = (chosen >= 0) & (chosen < EXPERTS)
    split = P(mesh.axis_names) if spec is None else spec
    used = real if capacity is None else kept(chosen, mesh, split, capacity)
    x = np.where(valid[..., None], x, 0)
    want, pull = jax.vjp(lambda *a: dense(chosen, used, *a), x, weights, experts)
    for got, right in zip(
        jax.tree.leaves((y, grads)),
        jax.tree.leaves((want, pull(jnp.asarray(gy)))),
        strict=True,
    ):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)
    counts = np.bincount(chosen[real], minlength=EXPERTS)
    np.testing.assert_array_equal(stats.expert_counts, counts)
    assert int(stats.dropped_pairs) == (real & ~used).sum()
    assert bool(stats.overflow) == (capacity is not None)
    assert not np.asarray(y)[~valid].any()
    # Exactly 0 where nothing was chosen, dropped, or is padding.
    assert not np.asarray(grads[1])[~used].any()
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, split), y.ndim)


def test_stats_count_what_finds_no_place():
    """Choices that have a slot but no expert row, pads among the places."""
    mesh = layers.mesh({"ep": 4})
    comm = layers.communicator(mesh, "ep", "xla")
    ids, x, weights, experts, _ = inputs(4)
    sizes = {"capacity": 9, "expert_capacity": 12, "expert_alignment": 4}
    run = jax.jit(
        lambda *a: jax_ep.sharded_moe(
            *a,
            ids,
            weights,
            experts,
            expert_fn,
            comm=comm,
            num_experts=EXPERTS,
            **sizes,
        )
    )
    y, stats = run(x)
    by_rank = ids.reshape(4, -1, TOP_K)
    used = moe_layers.kept_pairs(by_rank, EXPERTS, 9, 4, 12).reshape(ids.shape)
    np.testing.assert_allclose(
        y, dense(ids, used, x, weights, experts), rtol=1e-4, atol=1e-4
    )
    real = (ids >= 0) & (ids < EXPERTS)
    assert 0 < int(stats.dropped_pairs) == (real & ~used).sum()


@harness.on_each_backend
@pytest.mark.parametrize("order", ["expert", "source"])
@pytest.mark.parametrize("how", ["fixed", "traced", "of the choices"])
def test_limit(backend, order, how):
    """Groups of two ranks, each with a limit of its own where it is of the choices."""
    axes, spec = MESHES["2x2-sequence"]
    mesh = layers.mesh(axes)
    comm = layers.communicator(mesh, "ep", backend)
    ids, x, weights, experts, valid = inputs(2)
    chosen = np.where(valid[..., None], ids, -1)
    real = (chosen >= 0) & (chosen < EXPERTS)
    by_group, _ = on_ranks(real, mesh, spec)
    if how == "of the choices":
        limits = [int(group.sum()) * 3 // 8 for group in by_group]
        limit = lambda choices: choices * 3 // 8  # noqa: E731
    else:
        limits, limit = [11, 11], 11

    def run(limit):
        return jax_ep.sharded_moe(
            *(x, ids, weights, experts, expert_fn),
            comm=comm,
            num_experts=EXPERTS,
            token_spec=spec,
            valid=valid,
            expert_limit=limit,
            drop_order=order,
        )

    if how == "traced":
        y, stats = jax.jit(run)(jnp.int32(limit))
    else:
        y, stats = jax.jit(lambda: run(limit))()
    used = np.zeros((BATCH * SEQUENCE, TOP_K), bool)
    for ids_of_group, tokens, most in zip(*on_ranks(chosen, mesh, spec), limits):
        used[tokens] = first_pairs(ids_of_group, most, order)
    used = used.reshape(ids.shape)
    assert 0 < used.sum() < real.sum()
    want = dense(chosen, used, x, weights, experts)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    assert int(stats.dropped_pairs) == (real & ~used).sum()


@pytest.mark.parametrize("limit", [11, np.int64(11), np.array(11)], ids=repr)
def test_sizes_follow_from_a_limit_that_is_an_integer(limit):
    comm = layers.communicator(layers.mesh({"ep": 4}), "ep", "xla")
    ids, x, weights, experts, _ = inputs(4)
    heights = []

    def seen(params, rows, group_sizes):
        heights.append(len(rows))
        return expert_fn(params, rows, group_sizes)

    jax_ep.sharded_moe(
        *(x, ids, weights, experts, seen),
        comm=comm,
        num_experts=EXPERTS,
        expert_limit=limit,
        expert_alignment=1,
    )
    assert set(heights) == {11}


def first_pairs(ids, most, order):
    """bool[R * T, K]: what each of two ranks keeps of the pairs of both."""
    used = np.zeros(ids.shape, bool)
    half, local_experts = len(ids) // 2, EXPERTS // 2
    for rank in range(2):
        pairs = [
            (e, t, k)
            for (t, k), e in np.ndenumerate(ids)
            if 0 <= e < EXPERTS and e // local_experts == rank
        ]
        if order == "source":
            pairs.sort(key=lambda pair: (pair[1] // half, *pair))
        else:
            pairs.sort()
        for _, t, k in pairs[:most]:
            used[t, k] = True
    return used


@pytest.mark.parametrize("axis", ["ep", ("data", "ep")], ids=str)
def test_replicated_tokens_and_the_communicator_of_the_context(axis):
    mesh = layers.mesh({"data": 2, "ep": 2})
    ranks = 2 if axis == "ep" else 4
    ids, x, weights, experts, valid = inputs(ranks)
    chosen = np.where(valid[..., None], ids, -1)
    used = (chosen >= 0) & (chosen < EXPERTS)

    def run(x, weights, experts):
        y, stats = jax_ep.sharded_moe(
            *(x, ids, weights, experts, expert_fn),
            expert_axis=axis,
            num_experts=EXPERTS,
            valid=valid,
            tokens="replicated",
        )
        return (y**2).sum(), (y, stats)

    args = x, weights, experts
    grad = jax.jit(jax.value_and_grad(run, (0, 1, 2), has_aux=True))
    with jax.set_mesh(mesh):
        comm = jax_ep.communicator(axis)
        assert comm.num_ranks == ranks
        (_, (y, stats)), grads = grad(*args)
    want, pull = jax.vjp(lambda *a: dense(chosen, used, *a), *args)
    for got, right in zip(
        jax.tree.leaves((y, grads)),
        jax.tree.leaves((want, pull(2 * want))),
        strict=True,
    ):
        np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-3)
    counts = np.bincount(chosen[used], minlength=EXPERTS)
    np.testing.assert_array_equal(stats.expert_counts, counts)
    assert int(stats.dropped_pairs) == 0


@harness.on_each_backend
def test_experts_split_over_a_further_axis(backend):
    """Each coordinate of "tensor" has a part of every expert's inner width."""
    mesh = layers.mesh({"ep": 2, "tensor": 2}, AxisType.Explicit)
    comm = layers.communicator(mesh, "ep", backend)
    ids, x, weights, experts, _ = inputs(2)

    def part(params, rows, group_sizes):
        return jax.lax.psum(expert_fn(params, rows, group_sizes), "tensor")

    def loss(x, weights, experts):
        y, _ = jax_ep.sharded_moe(
            x,
            ids,
            weights,
            experts,
            part,
            comm=comm,
            num_experts=EXPERTS,
            token_spec=P("ep"),
            param_specs=(P("ep", None, "tensor"), P("ep", "tensor")),
        )
        return (y**2).sum()

    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(loss, (0, 1, 2)))(x, weights, experts)
    used = (ids >= 0) & (ids < EXPERTS)
    want = jax.grad(lambda *a: (dense(ids, used, *a) ** 2).sum(), (0, 1, 2))(
        x, weights, experts
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_stats_that_nobody_reads_cost_nothing():
    mesh = layers.mesh({"ep": 4})
    comm = layers.communicator(mesh, "ep", "cpu")
    ids, x, weights, experts, _ = inputs(4)

    def sums(count):
        def run(x):
            return jax_ep.sharded_moe(
                x, ids, weights, experts, expert_fn, comm=comm, num_experts=EXPERTS
            )[:count]

        return jax.jit(run).lower(x).compile().as_text().count("all-reduce(")

    assert (sums(1), sums(2)) == (0, 1)


class TestBadInput:
    """Each message, with what was found."""

    @pytest.fixture
    def call(self, platform):
        comm = layers.communicator(layers.mesh({"ep": 4}), "ep", "xla")
        ids, x, weights, experts, valid = inputs(4)

        def call(**changed):
            args = {
                "x": x,
                "topk_idx": ids,
                "topk_weights": weights,
                "params": experts,
                "expert_fn": expert_fn,
                "comm": comm,
                "num_experts": EXPERTS,
                "valid": valid,
            }
            return jax_ep.sharded_moe(**(args | changed))

        return call

    @pytest.mark.parametrize(
        ("changed", "error", "message"),
        [
            (
                {"comm": "ep"},
                TypeError,
                "comm must be a jax_ep.Communicator, found str",
            ),
            (
                {"comm": None},
                TypeError,
                "give comm or expert_axis, found neither",
            ),
            (
                {"tokens": "replicated", "token_spec": P("ep")},
                ValueError,
                "leave the communicator's axis 'ep' out where tokens are replicated, "
                "found P('ep',)",
            ),
            (
                {"token_spec": "ep"},
                TypeError,
                "a jax.sharding.PartitionSpec, found str",
            ),
            (
                {"token_spec": P(None)},
                ValueError,
                "split tokens over the communicator's axis 'ep', found P(None,)",
            ),
            (
                {"token_spec": P(None, None, "ep")},
                ValueError,
                "an axis of tokens for each entry of token_spec P(None, None, 'ep'), "
                "found shape (4, 6, 3)",
            ),
            (
                {"token_spec": P(None, "ep")},
                ValueError,
                "found 6 over 4 devices; pad them and say with valid=",
            ),
            (
                {"x": np.zeros((24, HIDDEN), np.float32)},
                ValueError,
                "begin with the axes of tokens [4, 6] of topk_idx, found "
                "float32[24, 5] at ['x']",
            ),
            (
                {"valid": np.ones((4, 6), np.int32)},
                ValueError,
                "valid must be bool[4, 6], one for each token of topk_idx, found int32",
            ),
            (
                {"params": [np.zeros((6, 2), np.float32)]},
                ValueError,
                "must be [8, ...], R * ceil(num_experts / R) experts, found [6, 2] at "
                "[0]",
            ),
        ],
    )
    def test_message(self, call, changed, error, message):
        with pytest.raises(error) as raised:
            call(**changed)
        assert str(raised.value).startswith("jax_ep.sharded_moe: ")
        assert message in str(raised.value)

    def test_ids_that_are_no_integers(self, call):
        with pytest.raises(TypeError, match=r"jax_ep.make_plan: .*integer dtype"):
            call(topk_idx=np.zeros((4, 6, TOP_K), np.float32))

    def test_inside_shard_map(self, call):
        mesh = layers.mesh({"ep": 4})
        inside = jax.shard_map(
            lambda a: a * call()[0].sum(),
            mesh=mesh,
            in_specs=P("ep"),
            out_specs=P("ep"),
        )
        with pytest.raises(ValueError, match=r"inside jax.shard_map over \['ep'\]"):
            inside(jnp.ones(4))
