"""permute_weights and combine_choices: against NumPy, and in layers."""

from __future__ import annotations

import dataclasses
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
from jax.sharding import PartitionSpec as P

import jax_ep

NATIVE = harness.BACKENDS[0]
TOKENS, TOP_K, HIDDEN, ALIGNMENT = 7, 3, 5, 4
# How many rows, and expert rows, there is room for: all, or not all.
ROOMS = {"all": (None, None), "few": (9, 16)}

on_two_and_four = pytest.mark.parametrize("ranks", (2, 4))
with_each_room = pytest.mark.parametrize("room", ROOMS)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One routing, with duplicates, holes and ids that are too large."""

    ranks: int
    room: str

    @property
    def experts(self):
        return 2 * self.ranks + 1

    @functools.cached_property
    def ids(self):
        shape = (self.ranks * TOKENS, TOP_K)
        ids = layers.random_routing(5, *shape, self.experts)
        return ids.reshape(self.ranks, TOKENS, TOP_K)

    @property
    def sizes(self):
        capacity, expert_capacity = ROOMS[self.room]
        return {
            "num_experts": self.experts,
            "capacity": capacity,
            "expert_alignment": ALIGNMENT,
            "expert_capacity": expert_capacity,
        }

    @functools.cached_property
    def right(self):
        """(oracle's plan, its places)."""
        capacity, expert_capacity = ROOMS[self.room]
        capacity = capacity or self.ranks * TOKENS
        plan = oracle.plan(self.ids, self.experts, capacity, ALIGNMENT)
        local = -(-self.experts // self.ranks)
        expert_capacity = expert_capacity or expert_oracle.worst_case(
            capacity, TOP_K, local, ALIGNMENT
        )
        found = plan.fields["recv_topk_idx"]
        return plan, expert_oracle.expert_plan(found, local, ALIGNMENT, expert_capacity)

    @functools.cached_property
    def places_at_home(self):
        """(rank, place) of each (source, token, k), [R, T, K] each; -1 for none."""
        plan, right = self.right
        rank, place = np.full((2, *self.ids.shape), -1)
        for r, sources in enumerate(plan.sources):
            for slot, (source, token) in enumerate(sources):
                has = right.places[r, slot] >= 0
                rank[source, token, has] = r
                place[source, token, has] = right.places[r, slot, has]
        return rank, place

    def taken_home(self, y):
        """combine_choices of y [R, S, ...]."""
        rank, place = self.places_at_home
        mask = (rank >= 0).reshape(*rank.shape, *(1,) * (y.ndim - 2))
        return np.where(mask, y[rank, place], y.dtype.type(0))

    def taken_out(self, gradient):
        """Its transpose, of [R, T, K, ...]."""
        rank, place = self.places_at_home
        out = np.zeros(
            (self.ranks, self.right[1].capacity, *gradient.shape[3:]), gradient.dtype
        )
        for s, t, k in np.argwhere(rank >= 0):
            out[rank[s, t, k], place[s, t, k]] = gradient[s, t, k]
        return out


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@harness.on_each_backend
@on_two_and_four
@with_each_room
def test_weights_of_expert_rows(backend, ranks, room):
    setting = Setting(ranks, room)
    plan, right = setting.right
    weights = normal(1, *right.places.shape)
    # Where there is no place nothing is read.
    weights = np.where(right.places >= 0, weights, np.float32(np.nan))
    gradient = right.poison_empty(normal(2, ranks, right.capacity))
    as_rows = right.permute_weighted(
        np.ones(right.places.shape[:2], np.float32), weights
    )
    as_weights = np.where(
        right.places >= 0,
        gradient[np.arange(ranks)[:, None, None], right.places],
        np.float32(0),
    )

    def body(comm, ids, weights, gradient):
        plan = jax_ep.make_plan(ids, comm=comm, **setting.sizes)
        permuted = functools.partial(jax_ep.permute_weights, plan=plan)
        out, pull = jax.vjp(permuted, weights)
        half = permuted(weights.astype(jnp.bfloat16))
        return out, pull(gradient)[0], jax.jvp(permuted, (weights,), (weights,)), half

    found = harness.run(
        body, harness.communicator(backend, ranks), setting.ids, weights, gradient
    )
    out, pulled, (again, tangent), half = found
    for got, want in (
        (out, as_rows),
        (pulled, as_weights),
        (again, as_rows),
        (tangent, as_rows),
        (half, as_rows.astype(half.dtype)),
    ):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    assert (
        setting.room == "all" or right.overflow.any() or plan.fields["overflow"].any()
    )


@harness.on_each_backend
@on_two_and_four
@with_each_room
def test_outputs_of_choices(backend, ranks, room):
    setting = Setting(ranks, room)
    _, right = setting.right
    tree = {
        "wide": right.poison_empty(normal(3, ranks, right.capacity, HIDDEN)),
        "one": right.poison_empty(normal(4, ranks, right.capacity)),
    }
    gradient = {
        "wide": normal(5, ranks, TOKENS, TOP_K, HIDDEN),
        "one": normal(6, ranks, TOKENS, TOP_K),
    }
    batch = np.stack([tree["wide"], 2 * tree["wide"]], axis=2)

    def body(comm, ids, tree, gradient, batch):
        plan = jax_ep.make_plan(ids, comm=comm, **setting.sizes)
        home = functools.partial(jax_ep.combine_choices, plan=plan)
        out, pull = jax.vjp(home, tree)
        return out, pull(gradient)[0], jax.vmap(home, 1, 1)(batch)

    comm = harness.communicator(backend, ranks)
    out, pulled, batched = harness.run(body, comm, setting.ids, tree, gradient, batch)
    for name, y in tree.items():
        np.testing.assert_array_equal(out[name], setting.taken_home(y))
        np.testing.assert_array_equal(pulled[name], setting.taken_out(gradient[name]))
    for i in (0, 1):
        want = setting.taken_home((1 + i) * tree["wide"])
        np.testing.assert_array_equal(batched[:, :, i], want)


@harness.on_each_backend
def test_each_element_of_a_batch_of_plans(backend):
    """vmap over ids: routing of its own, with everything else batched too."""
    one, ranks = Setting(2, "all"), 2
    ids = np.stack([one.ids, np.roll(one.ids, 1, axis=1)], axis=1)
    _, right = one.right
    y = normal(7, ranks, 2, right.capacity, HIDDEN)
    weights = normal(8, *right.places.shape[:1], 2, *right.places.shape[1:])

    def body(comm, ids, y, weights):
        def element(ids, y, weights):
            plan = jax_ep.make_plan(ids, comm=comm, **one.sizes)
            return (
                jax_ep.combine_choices(y, plan),
                jax_ep.permute_weights(weights, plan),
            )

        each = [element(*(a[i] for a in (ids, y, weights))) for i in (0, 1)]
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *each)
        return jax.vmap(element)(ids, y, weights), stacked

    comm = harness.communicator(backend, ranks)
    batched, each = harness.run(body, comm, ids, y, weights)
    jax.tree.map(np.testing.assert_array_equal, batched, each)


@pytest.mark.parametrize("check_vma", (True, False), ids=("vma", "no_vma"))
@harness.on_each_backend
def test_layers_that_weight_elsewhere(backend, check_vma):
    """Inputs scaled at the experts; outputs scaled at home: and all gradients."""
    ranks, experts = 4, 8
    ids = cases.duplicates(ranks, TOKENS, TOP_K, experts).astype(np.int32)
    ids = jnp.asarray(ids.reshape(-1, TOP_K)).at[::3, 2].set(-1)
    x, weights = normal(9, len(ids), HIDDEN), normal(10, len(ids), TOP_K)
    matrices = normal(11, experts, HIDDEN, HIDDEN)
    mesh = layers.mesh({"ep": ranks})
    comm = layers.communicator(mesh, "ep", backend)

    def products(rows, plan, matrices):
        return jnp.tanh(jax.lax.ragged_dot(rows, matrices, plan.group_sizes))

    def scaled_inputs(x, weights, matrices, ids):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=experts)
        rows, weights = jax_ep.dispatch((x, weights), plan)
        scale = jax_ep.permute_weights(weights, plan)
        rows = scale[:, None] * jax_ep.permute(rows, plan)
        y = jax_ep.unpermute(products(rows, plan, matrices), plan)
        return jax_ep.combine(y, plan)

    def scaled_at_home(x, weights, matrices, ids):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=experts)
        rows = jax_ep.permute(jax_ep.dispatch(x, plan), plan)
        y = jax_ep.combine_choices(products(rows, plan, matrices), plan)
        return (weights[..., None] * y).sum(1)

    def dense(x, weights, matrices, inputs):
        named = (ids >= 0)[..., None]
        rows = jnp.where(named, x[:, None], 0) * (weights[..., None] if inputs else 1)
        y = jnp.tanh(jnp.einsum("tkh,tkhg->tkg", rows, matrices[ids]))
        return (y if inputs else y * weights[..., None]).sum(1)

    def with_gradients(f):
        loss = lambda *a: (jnp.sin(f(*a)) ** 2).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, weights, matrices)

    with jax.default_matmul_precision("highest"):
        for layer, inputs in ((scaled_inputs, True), (scaled_at_home, False)):
            mapped = layers.sharded(layer, mesh, check_vma=check_vma)
            found = with_gradients(lambda *a, f=mapped: f(*a, ids))
            want = with_gradients(functools.partial(dense, inputs=inputs))
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4),
                found,
                want,
            )


def test_rows_go_home_once_for_each_choice():
    """What crosses: rows by choices, and 12 * K bytes a row to say where they stand."""
    if layers.between_nodes():
        pytest.skip("between nodes rows have room for all choices")
    setting = Setting(4, "all")
    mesh = layers.mesh({"ep": 4})
    comm = layers.communicator(mesh, "ep", NATIVE)

    def body(ids, y):
        plan = jax_ep.make_plan(ids, comm=comm, **setting.sizes)
        return jax_ep.combine_choices(y, plan)

    ids = jnp.zeros((4 * TOKENS, TOP_K), jnp.int32)
    y = jnp.zeros((4 * setting.right[1].capacity, HIDDEN), jnp.bfloat16)
    text = str(jax.make_jaxpr(layers.sharded(body, mesh))(ids, y))
    combines = [line for line in text.splitlines() if "= ep_combine[" in line]
    assert len(combines) == 2
    assert f"f32[{TOKENS},{TOP_K},3]" in combines[0]
    assert f"bf16[{TOKENS * TOP_K},{HIDDEN}]" in combines[1]


@pytest.mark.parametrize(
    ("function", "operand", "error", "message"),
    [
        (
            jax_ep.permute_weights,
            jnp.ones((8, 3)),
            ValueError,
            "jax_ep.permute_weights: weights must be [C, K] = [8, 2] as in the plan, "
            "found float32[8,3]",
        ),
        (
            jax_ep.permute_weights,
            jnp.ones((8, 2), jnp.int32),
            TypeError,
            "jax_ep.permute_weights: weights must be floating, found int32[8,2]",
        ),
        (
            jax_ep.combine_choices,
            jnp.ones((8, 2)),
            ValueError,
            "jax_ep.combine_choices: leaves must be [S, ...] with S = 16 as in the "
            "plan, found float32[8,2]",
        ),
        (
            jax_ep.combine_choices,
            jnp.ones((16, 2), jnp.int32),
            TypeError,
            "jax_ep.combine_choices: leaves must be bfloat16, float16, float32, "
            "float64 or complex, found int32[16,2]",
        ),
    ],
    ids=("shape", "dtype", "rows", "integers"),
)
def test_bad_arguments(function, operand, error, message):
    mesh = layers.mesh({"ep": 2})
    comm = layers.communicator(mesh, "ep", NATIVE)

    def body(ids):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=4)
        return function(operand, plan)

    ids = jnp.zeros((8, 2), jnp.int32)
    with pytest.raises(error) as info:
        jax.eval_shape(layers.sharded(body, mesh, out_specs=P("ep")), ids)
    assert str(info.value) == message
