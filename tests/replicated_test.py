"""Tokens that every rank has: against NumPy and a dense layer, forward and backward."""

from __future__ import annotations

import dataclasses
import functools

import expert_oracle
import harness
import jax
import jax.numpy as jnp
import layers
import moe_layers
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ep

NATIVE = harness.BACKENDS[0]
TOKENS, TOP_K, HIDDEN = 12, 3, 6

on_two_and_four = pytest.mark.parametrize("ranks", (2, 4))
with_and_without_vma = pytest.mark.parametrize(
    "check_vma", (True, False), ids=("vma", "no_vma")
)


@dataclasses.dataclass(frozen=True)
class Replicated:
    """T tokens that all ranks have, and experts that are split over them."""

    ranks: int
    backend: str
    check_vma: bool = True

    @property
    def experts(self):
        return 2 * self.ranks + 1

    @functools.cached_property
    def mesh(self):
        return layers.mesh({"ep": self.ranks})

    @functools.cached_property
    def comm(self):
        return layers.communicator(self.mesh, "ep", self.backend)

    @functools.cached_property
    def ids(self):
        return layers.random_routing(4, TOKENS, TOP_K, self.experts)

    @functools.cached_property
    def inputs(self):
        """x, weights, experts."""
        params = layers.expert_weights(
            2, num_ranks=self.ranks, num_experts=self.experts, hidden=HIDDEN, inner=5
        )
        params = jax.tree.map(lambda a: jnp.asarray(a) / 2, params)
        x, weights = normal(0, TOKENS, HIDDEN), normal(1, TOKENS, TOP_K)
        return jnp.asarray(x), jnp.asarray(weights), params

    @property
    def local_ids(self):
        """[R, T, K] as each rank has them."""
        local = -(-self.experts // self.ranks)
        valid = (self.ids >= 0) & (self.ids < self.experts)
        rank = np.where(valid, self.ids // local, -1)
        mine = rank == np.arange(self.ranks)[:, None, None]
        return np.where(mine, self.ids % local, -1)

    def plan(self, ids, **sizes):
        return jax_ep.make_plan(
            ids,
            comm=self.comm,
            num_experts=self.experts,
            tokens="replicated",
            **sizes,
        )

    def moe(self, x, weights, params, ids, **sizes):
        """The layer on one rank, NaN where no expert row stands."""

        def experts(rows, group_sizes):
            hidden = jnp.tanh(jax_ep.ragged_dot(rows, params[0], group_sizes))
            y = jax_ep.ragged_dot(hidden, params[1], group_sizes)
            inside = jnp.arange(len(y)) < group_sizes.sum()
            return jnp.where(inside[:, None], y, jnp.nan)

        return jax_ep.moe(
            x,
            ids,
            weights,
            experts,
            comm=self.comm,
            num_experts=self.experts,
            expert_alignment=1,
            tokens="replicated",
            **sizes,
        )

    def mapped(self, body, out_specs=P(), experts=P("ep")):
        """`body` of x, weights and ids that all have, and of each rank's experts."""
        return layers.sharded(
            body,
            self.mesh,
            in_specs=(P(), P(), experts, P()),
            out_specs=out_specs,
            check_vma=self.check_vma,
        )

    def layer(self, **sizes):
        """The layer, of all arguments but the ids."""
        mapped = self.mapped(functools.partial(self.moe, **sizes))
        return lambda *args: mapped(*args, self.ids)

    def dense(self, kept=None):
        kept = self.ids < self.experts if kept is None else kept
        return lambda x, weights, params: layers.dense_moe(
            x, self.ids, weights, params, kept
        )


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_close(found, want, tolerance=2e-4):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance),
        found,
        want,
    )


def value_and_gradients(f):
    def loss(*args):
        return (jnp.sin(f(*args)) * jnp.arange(1.0, HIDDEN + 1)[None]).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


@harness.on_each_backend
@on_two_and_four
def test_plan_dispatch_and_combine(backend, ranks):
    here = Replicated(ranks, backend)
    local = here.local_ids
    named = np.any(local >= 0, axis=-1)
    tree = {"x": normal(3, TOKENS, HIDDEN), "id": np.arange(TOKENS, dtype=np.int8)}
    y = np.where(named[..., None], normal(5, ranks, TOKENS, HIDDEN), np.float32(np.nan))

    def body(tree, _, y, ids):
        plan = here.plan(ids, expert_alignment=4)
        fields = harness.plan_fields(plan) | {
            "expert_demand_counts": plan.expert_demand_counts,
            "dropped_pairs": plan.dropped_pairs,
        }
        rows = jax_ep.dispatch(tree, plan)
        sums = jax_ep.combine(y[0], plan)
        parts = jax_ep.combine(y[0], plan, unreduced=True)
        return jax.tree.map(lambda a: a[None], (fields, rows, parts)), sums

    mapped = jax.jit(here.mapped(body, out_specs=(P("ep"), P())))
    (fields, rows, parts), sums = mapped(tree, (), y, here.ids)
    counts = [np.bincount(ids[ids >= 0], minlength=3) for ids in local]
    counts = np.array(counts)[:, : -(-here.experts // ranks)]
    token = np.arange(ranks)[:, None] * TOKENS + np.arange(TOKENS)
    want = {
        "num_recv": named.sum(1),
        "num_demand": named.sum(1),
        "overflow": np.zeros(ranks, bool),
        "recv_counts": np.diag(named.sum(1)),
        "recv_topk_idx": local,
        "recv_src": np.where(named, token, -1),
        "expert_counts": counts,
        "group_sizes": -(-counts // 4) * 4,
        "expert_demand_counts": counts,
        "dropped_pairs": np.zeros(ranks, int),
    }
    jax.tree.map(np.testing.assert_array_equal, fields, want)
    mask = named.reshape(ranks, TOKENS, 1)
    np.testing.assert_array_equal(rows["x"], np.where(mask, tree["x"], 0))
    np.testing.assert_array_equal(rows["id"], np.where(named, tree["id"], 0))
    terms = np.where(mask, y, 0)
    np.testing.assert_array_equal(parts, terms)
    np.testing.assert_allclose(sums, terms.sum(0), rtol=1e-6, atol=1e-6)


@harness.on_each_backend
@on_two_and_four
@with_and_without_vma
def test_layer_and_gradients(backend, ranks, check_vma):
    here = Replicated(ranks, backend, check_vma)
    with jax.default_matmul_precision("highest"):
        found = value_and_gradients(here.layer())(*here.inputs)
        want = value_and_gradients(here.dense())(*here.inputs)
    assert_close(found, want)


@harness.on_each_backend
@with_and_without_vma
@pytest.mark.parametrize("order", ("expert", "source"))
def test_layer_that_drops(backend, check_vma, order):
    """Expert rows past S, in an order that has one source: two names for one order."""
    here = Replicated(4, backend, check_vma)
    local = here.local_ids
    places = expert_oracle.expert_plan(local, 3, 1, 5).places
    kept = (places >= 0).any(0)
    assert 0 < kept.sum() < (local >= 0).sum()
    layer = here.layer(expert_capacity=5, drop_order=order)
    with jax.default_matmul_precision("highest"):
        found = value_and_gradients(layer)(*here.inputs)
        want = value_and_gradients(here.dense(kept))(*here.inputs)
    assert_close(found, want)
    assert not np.asarray(found[1][1])[~kept].any()


@harness.on_each_backend
@with_and_without_vma
def test_terms_for_a_scatter_of_the_callers(backend, check_vma):
    here = Replicated(4, backend, check_vma)

    def body(x, weights, params, ids):
        terms = here.moe(x, weights, params, ids, unreduced=True)
        return lax.psum_scatter(terms, "ep", scatter_dimension=0, tiled=True)

    mapped = here.mapped(body, out_specs=P("ep"))
    with jax.default_matmul_precision("highest"):
        found = value_and_gradients(lambda *a: mapped(*a, here.ids))(*here.inputs)
        want = value_and_gradients(here.dense())(*here.inputs)
    assert_close(found, want)


@harness.on_each_backend
def test_transformations(backend):
    """jvp, vmap over tokens and over everything, scan under remat."""
    here = Replicated(2, backend)
    layer, dense = here.layer(), here.dense()
    x, weights, params = here.inputs
    tangents = jax.tree.map(jnp.cos, here.inputs)
    xs, ws = jnp.stack([x, -x]), jnp.stack([weights, weights + 1])
    ids = jnp.stack([here.ids, jnp.roll(here.ids, 1, axis=0)])
    mapped = here.mapped(here.moe)

    def one(x, weights, ids):
        return layers.dense_moe(x, ids, weights, params, ids < here.experts)

    def deep(layer):
        def step(x, weights):
            return x + layer(x, weights, params), None

        def loss(x, ws):
            return (lax.scan(jax.checkpoint(step), x, ws)[0] ** 2).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1)))

    with jax.default_matmul_precision("highest"):
        found = jax.jit(lambda *a: jax.jvp(layer, *a))(here.inputs, tangents)
        assert_close(found, jax.jvp(dense, here.inputs, tangents))
        batch = jax.jit(jax.vmap(layer, (0, None, None)))(xs, weights, params)
        assert_close(batch, jax.vmap(dense, (0, None, None))(xs, weights, params))
        batch = jax.jit(jax.vmap(mapped, (0, 0, None, 0)))(xs, ws, params, ids)
        assert_close(batch, jnp.stack(list(map(one, xs, ws, ids))))
        assert_close(deep(layer)(x, ws), deep(dense)(x, ws), 1e-3)


@harness.on_each_backend
def test_groups_and_a_batch_that_is_split_over_another_axis(backend):
    """Each group has tokens of its own, which its ranks share; results say so."""
    mesh = layers.mesh({"data": 2, "ep": 2})
    comm = layers.communicator(mesh, "ep", backend)
    here = Replicated(2, backend)
    x, weights, params = here.inputs
    tokens = P("data")

    @jax.jit
    @functools.partial(
        layers.sharded,
        mesh=mesh,
        in_specs=(tokens, tokens, P("ep"), tokens),
        out_specs=tokens,
    )
    def layer(x, weights, params, ids):
        return jax_ep.moe(
            x,
            ids,
            weights,
            lambda rows, sizes: moe_layers.expert_mlp(rows, sizes, params),
            comm=comm,
            num_experts=here.experts,
            tokens="replicated",
        )

    with jax.default_matmul_precision("highest"):
        found = layer(x, weights, params, here.ids)
        assert_close(found, here.dense()(x, weights, params))


def test_cotangents_are_summed_in_float32():
    """One rounding of the sum over ranks, as of `combine`'s transpose elsewhere."""
    here = Replicated(4, NATIVE)
    scale = jnp.array([1.0, 2**-8, 2**-8, 1.0], jnp.bfloat16)
    x = jnp.zeros((1, 1), jnp.bfloat16)
    ids = jnp.array([[0, 3, 6]], jnp.int32)  # experts of the first three ranks

    def body(x, _, scale, ids):
        rows = jax_ep.dispatch(x, here.plan(ids))
        return scale[0] * rows

    mapped = here.mapped(body, out_specs=P("ep"))
    gradient = jax.jit(jax.grad(lambda x: mapped(x, (), scale, ids).sum()))(x)
    assert gradient.dtype == jnp.bfloat16
    # Added up in bfloat16 each of the small ones would be lost: a tie that goes to 1.
    assert float(gradient[0, 0]) == 1 + 2**-7


@harness.on_each_backend
@with_and_without_vma
def test_rows_in_fp8(backend, check_vma):
    """As where the same tokens are split, forward and straight through."""
    here = Replicated(4, backend, check_vma)
    x, weights, params = here.inputs
    split = P("ep")

    def body(x, weights, params, ids, tokens):
        return jax_ep.moe(
            x,
            ids,
            weights,
            lambda rows, sizes: moe_layers.expert_mlp(
                rows.dequantize().astype(jnp.float32), sizes, params
            ),
            comm=here.comm,
            num_experts=here.experts,
            tokens=tokens,
            quantize="fp8",
        )

    ours = here.mapped(functools.partial(body, tokens="replicated"))
    theirs = layers.sharded(
        functools.partial(body, tokens="split"),
        here.mesh,
        in_specs=split,
        out_specs=split,
        check_vma=check_vma,
    )
    with jax.default_matmul_precision("highest"):
        found, want = (
            value_and_gradients(lambda *a, f=f: f(*a, here.ids))(x, weights, params)
            for f in (ours, theirs)
        )
    # Cotangents of rows travel in bfloat16, split or not.
    assert_close(found, want, 0.03)
    assert_close(found[0], want[0], 1e-3)


@harness.on_each_backend
def test_halves_and_choices(backend):
    """A flight that goes nowhere; outputs of choices; weights of expert rows."""
    here = Replicated(4, backend)
    x, weights, _ = here.inputs

    def body(x, weights, _, ids):
        plan = here.plan(ids)
        whole = jax_ep.dispatch(x, plan)
        flight = jax_ep.dispatch_start(x, plan)
        flight, _ = jax_ep.overlap(flight, jnp.sin, x)
        rows = jax_ep.dispatch_done(flight)
        scale = jax_ep.permute_weights(jnp.where(ids >= 0, weights, jnp.nan), plan)
        y = jax_ep.permute(rows, plan) * scale[:, None]
        choices = jax_ep.combine_choices(y, plan)
        flight = jax_ep.combine_start(jax_ep.unpermute(y, plan), plan)
        return whole[None], rows[None], choices, jax_ep.combine_done(flight)

    mapped = here.mapped(body, out_specs=(P("ep"), P("ep"), P(), P()))
    whole, rows, choices, sums = jax.jit(mapped)(x, weights, (), here.ids)
    valid = (here.ids >= 0) & (here.ids < here.experts)
    want = jnp.where(valid, weights, 0)[..., None] * x[:, None]
    np.testing.assert_array_equal(whole, rows)
    assert_close((choices, sums), (want, want.sum(1)), 1e-5)


@pytest.mark.parametrize("tokens", (0,), ids=("no_tokens",))
@harness.on_each_backend
def test_without(backend, tokens):
    here = Replicated(2, backend)
    x, weights, params = here.inputs
    f = jax.jit(here.mapped(here.moe))
    empty = f(x[:tokens], weights[:tokens], params, here.ids[:tokens])
    assert empty.shape == (0, HIDDEN)


def test_one_permute_and_one_sum():
    """Nothing of ours crosses; forward one all-reduce, backward one of each input."""
    here = Replicated(4, NATIVE)
    targets = (
        "plan",
        "dispatch",
        "combine",
        "permute",
        "unpermute",
        "dispatch_permute",
    )

    def count(f):
        text = jax.jit(f).lower(*here.inputs).compile().as_text()
        calls = [text.count(f'custom_call_target="jax_ep_{t}"') for t in targets]
        return calls, text.count(" all-reduce(")

    calls, sums = count(here.layer())
    assert (calls, sums) == ([0, 0, 0, 1, 1, 0], 1)


@pytest.mark.parametrize(
    ("sizes", "want"),
    [
        ({}, (TOKENS, TOKENS * TOP_K)),
        ({"expert_alignment": 4}, (TOKENS, TOKENS * TOP_K + 2 * 4)),
        # A third of the experts is here, so a third of all pairs.
        ({"capacity_factor": 0.5}, (TOKENS, TOKENS * TOP_K // 6)),
    ],
    ids=str,
)
def test_sizes_are_those_of_one_batch(sizes, want):
    here = Replicated(4, NATIVE)
    found = []

    def body(x, weights, params, ids):
        about = here.plan(ids, **sizes).describe()
        found.append((about["capacity"], about["expert_capacity"]))
        return x

    jax.eval_shape(here.mapped(body), *here.inputs, here.ids)
    assert found == [want]


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        (
            {"tokens": "all"},
            ValueError,
            "jax_ep.make_plan: tokens must be 'split' or 'replicated', found 'all'",
        ),
        (
            {"tokens": "replicated", "capacity": 7},
            ValueError,
            "jax_ep.make_plan: with tokens='replicated' no row travels and capacity "
            "must be None, found 7; expert_capacity, capacity_factor and expert_limit "
            "bound expert rows",
        ),
        (
            {"unreduced": True},
            ValueError,
            "jax_ep.combine: unreduced terms are those of a plan of "
            "tokens='replicated', found a plan of tokens='split'",
        ),
    ],
    ids=("tokens", "capacity", "unreduced"),
)
def test_bad_arguments(sizes, error, message):
    here = Replicated(2, NATIVE)

    def body(x, weights, params, ids):
        return jax_ep.moe(
            x,
            ids,
            weights,
            lambda rows, _: rows,
            comm=here.comm,
            num_experts=4,
            **sizes,
        )

    with pytest.raises(error) as info:
        jax.eval_shape(here.mapped(body), *here.inputs, here.ids)
    assert str(info.value) == message
