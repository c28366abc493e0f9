"""Which pairs are dropped, in which order, and what a plan tells about it."""

from __future__ import annotations

import dataclasses

import harness
import jax
import jax.numpy as jnp
import layers
import moe_layers
import numpy as np
import oracle
import pytest

import jax_ep
from jax_ep._api import buffer_sizes, plan_options, planning
from jax_ep._data import checks

NATIVE = harness.BACKENDS[0]
TOKENS, TOP_K = 9, 3


@dataclasses.dataclass(frozen=True)
class Right:
    """What a rule leaves, from ids [R, T, K] alone.

    Attributes:
      kept: bool[R, T, K].
      counts: int[R, L], kept pairs of each local expert.
      demand: int[R, L], pairs of each local expert before any drop.
    """

    kept: np.ndarray
    counts: np.ndarray
    demand: np.ndarray

    @property
    def dropped(self):
        return self.demand.sum(1) - self.counts.sum(1)


def right(ids, experts, by_source, limits, capacity):
    """The first limits[r] pairs of each rank r, of the rows that have a slot."""
    ranks = len(ids)
    local = -(-experts // ranks)
    plan = oracle.plan(ids, experts, capacity)
    kept = np.zeros(ids.shape, bool)
    counts, demand = np.zeros((2, ranks, local), int)
    for rank, sources in enumerate(plan.sources):
        pairs = [
            (int(source), int(ids[source, token, k]), int(token), k)
            for source, token in sources
            for k in range(ids.shape[2])
            if 0 <= ids[source, token, k] < experts
            and ids[source, token, k] // local == rank
        ]
        order = pairs if by_source else [(e, s, t, k) for s, e, t, k in pairs]
        for pair in sorted(order)[: limits[rank]]:
            source, expert, token, k = (
                pair if by_source else (pair[1], pair[0], *pair[2:])
            )
            kept[source, token, k] = True
            counts[rank, expert % local] += 1
        here = ids[(ids >= 0) & (ids < experts) & (ids // local == rank)]
        demand[rank] = np.bincount(here % local, minlength=local)
    return Right(kept, counts, demand)


def routing(ranks, experts):
    ids = layers.random_routing(6, ranks * TOKENS, TOP_K, experts)
    return ids.reshape(ranks, TOKENS, TOP_K)


def told(plan):
    return {
        "group_sizes": plan.group_sizes,
        "dropped_pairs": plan.dropped_pairs,
        "expert_demand_counts": plan.expert_demand_counts,
        "expert_overflow": plan.expert_overflow,
    }


def padded(counts, alignment):
    return -(-counts // alignment) * alignment


RULES = {
    # drop_order, alignment, capacity, whether the limit is traced
    "source": ("source", 1, None, False),
    "source aligned": ("source", 4, None, False),
    "source few slots": ("source", 2, 13, False),
    "source traced": ("source", 1, None, True),
    "expert": ("expert", 1, None, False),
    "expert traced": ("expert", 4, None, True),
    "expert few slots": ("expert", 1, 13, True),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ranks", (2, 4))
@harness.on_each_backend
def test_order_and_counts(backend, ranks, rule):
    """Kept pairs, exactly; what the products leave behind the groups is not read."""
    order, alignment, capacity, traced = RULES[rule]
    experts = 2 * ranks + 1
    ids = routing(ranks, experts)
    # A limit inside a group of a source; a rank without room, and one with too much.
    limits = np.array([10, 0, 7, 1000][:ranks], np.int32) if traced else [11] * ranks
    want = right(ids, experts, order == "source", limits, capacity or ranks * TOKENS)
    assert want.dropped.any()
    weights = np.arange(1, ids.size + 1, dtype=np.float32).reshape(ids.shape)

    def body(comm, ids, weights, limit):
        plan = jax_ep.make_plan(
            ids,
            comm=comm,
            num_experts=experts,
            capacity=capacity,
            expert_alignment=alignment,
            drop_order=order,
            expert_limit=limit if traced else 11,
        )

        def layer(weights):
            # Each expert row is 1; whatever is in no group is NaN.
            inside = jnp.arange(plan.expert_capacity) < plan.group_sizes.sum()
            y = jnp.where(inside, 1.0, jnp.nan)
            rows = jax_ep.dispatch(weights, plan)
            return jax_ep.combine(jax_ep.unpermute(y, plan, rows), plan)

        out, pull = jax.vjp(layer, weights)
        return out, pull(jnp.ones_like(out))[0], told(plan)

    comm = harness.communicator(backend, ranks)
    out, gradient, found = harness.run(body, comm, ids, weights, np.array(limits))
    np.testing.assert_array_equal(gradient, want.kept)
    np.testing.assert_array_equal(out, (weights * want.kept).sum(-1))
    np.testing.assert_array_equal(found["group_sizes"], padded(want.counts, alignment))
    np.testing.assert_array_equal(found["dropped_pairs"], want.dropped)
    np.testing.assert_array_equal(found["expert_demand_counts"], want.demand)
    with_slot = right(ids, experts, True, [ids.size] * ranks, capacity or ids.size)
    np.testing.assert_array_equal(
        found["expert_overflow"], want.counts.sum(1) < with_slot.counts.sum(1)
    )


@harness.on_each_backend
@pytest.mark.parametrize("ranks", (2, 4))
def test_what_the_ordinary_capacities_drop(backend, ranks):
    """C and S, in the order of expert rows: pairs that are lost at either."""
    experts, alignment, capacity, expert_capacity = 2 * ranks + 1, 4, 10, 12
    ids = routing(ranks, experts)
    kept = moe_layers.kept_pairs(ids, experts, capacity, alignment, expert_capacity)
    local = -(-experts // ranks)
    demand = right(ids, experts, True, [0] * ranks, capacity).demand

    def body(comm, ids):
        plan = jax_ep.make_plan(
            ids,
            comm=comm,
            num_experts=experts,
            capacity=capacity,
            expert_alignment=alignment,
            expert_capacity=expert_capacity,
        )
        return told(plan)

    found = harness.run(body, harness.communicator(backend, ranks), ids)
    here = np.array([(kept & (ids // local == rank)).sum() for rank in range(ranks)])
    assert (here < demand.sum(1)).any()
    np.testing.assert_array_equal(found["dropped_pairs"], demand.sum(1) - here)
    np.testing.assert_array_equal(found["expert_demand_counts"], demand)


def test_demand_of_pairs_that_never_crossed_between_nodes():
    """node_capacity drops rows that no field of their receivers counts but these."""
    if harness.PROCESSES > 1 or harness.ON_GPU:
        pytest.skip("cuts the ranks of one process on CPUs into nodes")
    ranks, experts = 4, 9
    ids = routing(ranks, experts)
    demand = right(ids, experts, True, [0] * ranks, ids.size).demand
    comm = jax_ep.Communicator(harness.mesh(ranks), "ep", node_size=2)

    def body(comm, ids):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=experts, node_capacity=2)
        return told(plan), plan.expert_counts

    found, counts = harness.run(body, comm, ids)
    comm.close()
    np.testing.assert_array_equal(found["expert_demand_counts"], demand)
    np.testing.assert_array_equal(found["dropped_pairs"], (demand - counts).sum(1))
    assert found["dropped_pairs"].any()


@harness.on_each_backend
def test_a_layer_with_a_limit_that_is_counted_in_the_run(backend):
    """Levanter's: factor times the valid tokens' pairs, over the ranks; gradients."""
    ranks, experts = 4, 8
    ids = layers.random_routing(8, ranks * TOKENS, TOP_K, experts)
    ids = np.where(ids >= 0, ids % experts, 0).reshape(ranks, TOKENS, TOP_K)
    ids[1, 2:] = -1  # padding
    limit = int((ids >= 0).sum()) // (2 * ranks)
    want = right(ids, experts, False, [limit] * ranks, ranks * TOKENS)
    x, weights, params, gy = moe_layers.inputs(ids, experts)

    def body(comm, ids, x, weights, params, gy):
        valid = jax.lax.psum((ids >= 0).sum(dtype=jnp.int32), comm.axis_name)
        limit = valid // (2 * comm.num_ranks)

        def experts_of(params):
            def run(rows, sizes):
                y = moe_layers.expert_mlp(rows, sizes, params)
                inside = jnp.arange(len(y)) < sizes.sum()
                return jnp.where(inside[:, None], y, jnp.nan)

            return run

        def layer(x, weights, params):
            return jax_ep.moe(
                x,
                ids,
                weights,
                experts_of(params),
                comm=comm,
                num_experts=experts,
                expert_limit=limit,
                expert_alignment=1,
            )

        out, pull = jax.vjp(layer, x, weights, params)
        return out, pull(gy)

    comm = harness.communicator(backend, ranks)
    found = harness.run(body, comm, ids, x, weights, params, gy)
    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (x, weights, params, gy))
    kept = want.kept.reshape(-1, TOP_K)

    def dense(x, weights, params):
        return layers.dense_moe(x, ids.reshape(-1, TOP_K), weights, params, kept)

    out, pull = jax.vjp(dense, *flat[:3])
    for got, have in zip(
        jax.tree.leaves(found), jax.tree.leaves((out, pull(flat[3]))), strict=True
    ):
        np.testing.assert_allclose(
            got.reshape(have.shape), have, rtol=1e-4, atol=1e-4 * np.abs(have).max()
        )


@harness.on_each_backend
def test_plans_of_one_launch_drop_alike(backend):
    """plan_dispatch is make_plan and dispatch, also with these rules and vmap."""
    ranks, experts = 2, 5
    ids = routing(ranks, experts)
    ids = np.stack([ids, np.roll(ids, 1, axis=1)], axis=1)
    x = np.ones((ranks, 2, TOKENS, 4), np.float32)

    def body(comm, ids, x, limit):
        rules = {
            "comm": comm,
            "num_experts": experts,
            "drop_order": "source",
            "expert_limit": limit,
        }

        def one(ids, x):
            plan, rows = jax_ep.plan_dispatch(x, ids, **rules)
            return plan, jax_ep.permute(rows, plan)

        def two(ids, x):
            plan = jax_ep.make_plan(ids, **rules)
            return plan, jax_ep.permute(jax_ep.dispatch(x, plan), plan)

        each = [two(ids[i], x[i]) for i in (0, 1)]
        return jax.vmap(one)(ids, x), jax.tree.map(lambda *a: jnp.stack(a), *each)

    comm = harness.communicator(backend, ranks)
    limits = np.array([8, 5], np.int32)
    one, two = harness.run(body, comm, ids, x, limits)
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_what_nobody_reads_costs_nothing():
    """No reduce-scatter, and pairs numbered once, where no rule asks for more."""
    mesh = layers.mesh({"ep": 4})
    comm = layers.communicator(mesh, "ep", NATIVE)

    def count(names, **rules):
        def body(ids, x):
            plan = jax_ep.make_plan(ids, comm=comm, num_experts=8, capacity=5, **rules)
            rows = jax_ep.permute(jax_ep.dispatch(x, plan), plan)
            return rows, *(getattr(plan, name).reshape(-1) for name in names)

        mapped = jax.jit(layers.sharded(body, mesh))
        ids, x = jnp.zeros((4 * TOKENS, TOP_K), jnp.int32), jnp.zeros((4 * TOKENS, 8))
        text = mapped.lower(ids, x).compile().as_text()
        return (
            text.count('custom_call_target="jax_ep_expert_rows"'),
            text.count(" reduce-scatter(") + text.count(" all-reduce("),
        )

    assert count(()) == (1, 0)
    assert count(("dropped_pairs",)) == (1, 1)
    assert count(("dropped_pairs", "expert_demand_counts")) == (1, 1)
    assert count((), expert_limit=jnp.int32(3)) == (2, 0)
    assert count((), drop_order="source", expert_limit=3) == (2, 0)


@pytest.mark.parametrize(
    ("sizes", "want"),
    [
        # S is that many pairs, and the pads.
        ({"expert_limit": 20}, (20, 20)),
        ({"expert_limit": 20, "expert_alignment": 8}, (32, 20)),
        ({"expert_capacity": 20, "drop_order": "source"}, (20, 20)),
        (
            {"expert_capacity": 32, "expert_alignment": 8, "drop_order": "source"},
            (32, 25),
        ),
        ({"expert_capacity": 8, "expert_alignment": 8, "drop_order": "source"}, (8, 1)),
        ({"capacity_factor": 0.5, "drop_order": "source"}, (27, 27)),
        (
            {"expert_capacity": 128, "expert_alignment": None, "drop_order": "source"},
            None,
        ),
        ({"drop_order": "source"}, None),
        ({"expert_limit": 10**6}, None),
        ({"capacity_factor": 0.5}, (27, None)),
    ],
    ids=str,
)
def test_sizes_and_limits(sizes, want):
    """What S follows from a limit, and what limit from S: two experts a rank."""
    mesh = layers.mesh({"ep": 2})
    comm = layers.communicator(mesh, "ep", NATIVE)
    found = []
    options = jax_ep.PlanOptions(**{"expert_alignment": 1} | sizes)

    def body(ids):
        request = planning.check_request(ids, comm, 4, options)
        found.append((request.expert_capacity, request.limit, request.expert_alignment))
        return ids

    ids = jnp.zeros((2 * 18, 3), jnp.int32)
    jax.eval_shape(layers.sharded(body, mesh), ids)
    expert_capacity, limit, alignment = found[0]
    if want is None:
        assert limit is None
        assert alignment == 1
    else:
        assert (expert_capacity, limit) == want


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        (
            {"drop_order": "token"},
            ValueError,
            "jax_ep.make_plan: drop_order must be 'expert' or 'source', found 'token'",
        ),
        (
            {"expert_limit": -1},
            ValueError,
            "jax_ep.make_plan: expert_limit must be >= 0, found -1",
        ),
        (
            {"expert_limit": 1.5},
            TypeError,
            "jax_ep.make_plan: expert_limit must be an integer, an integer array of "
            "shape [], or a function that returns one, found float",
        ),
        (
            {"expert_limit": np.zeros((2,), np.int32)},
            TypeError,
            "jax_ep.make_plan: expert_limit must be an integer, an integer array of "
            "shape [], or a function that returns one, found int32[2]",
        ),
    ],
    ids=("order", "negative", "float", "shape"),
)
def test_bad_arguments(sizes, error, message):
    mesh = layers.mesh({"ep": 2})
    comm = layers.communicator(mesh, "ep", NATIVE)

    def body(ids):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=4, **sizes)
        return plan.recv_src

    with pytest.raises(error) as info:
        jax.eval_shape(layers.sharded(body, mesh), jnp.zeros((8, 2), jnp.int32))
    assert str(info.value) == message


def test_limits_of_every_integer_dtype():
    """Wide and unsigned limits do not wrap; narrow ones are taken as they are."""
    for dtype, value, want in (
        (np.uint32, 2**32 - 1, checks.INT32_MAX),
        (np.int8, 5, 5),
        (np.int32, -3, -3),
    ):
        traced = jax.jit(lambda a: buffer_sizes._limit_array(a))
        limit = traced(jnp.asarray(value, dtype))
        assert (int(limit), limit.dtype) == (want, np.int32)


def test_options_as_one_value():
    """They are the keywords, in every function that takes them."""
    mesh = layers.mesh({"ep": 2})
    comm = layers.communicator(mesh, "ep", NATIVE)
    given = {"capacity_factor": 0.5, "expert_alignment": 4, "drop_order": "source"}
    options = jax_ep.PlanOptions(**given)
    fields = [field.name for field in dataclasses.fields(options)]
    assert fields == list(plan_options.PlanKeywords.__annotations__)
    ids = np.random.default_rng(0).integers(0, 4, (2 * 9, 3), np.int32)
    x = np.ones((2 * 9, 5), np.float32)
    weights = np.ones(ids.shape, np.float32)

    def outputs(**given):
        sizes = {"comm": comm, "num_experts": 4} | given

        def body(ids, x, weights):
            plan = jax_ep.make_plan(ids, **sizes)
            other, rows = jax_ep.plan_dispatch(x, ids, **sizes)
            y = jax_ep.moe(x, ids, weights, lambda rows, sizes: 2 * rows, **sizes)
            return plan.recv_topk_idx, other.recv_topk_idx, rows, y

        return jax.jit(layers.sharded(body, mesh))(ids, x, weights)

    one, many = outputs(options=options), outputs(**given)
    for a, b in zip(one, many, strict=True):
        np.testing.assert_array_equal(a, b)
    # Something is dropped.
    assert not (np.asarray(one[3]) == 6).all()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"options": jax_ep.PlanOptions(), "capacity": 3},
            "give options or keywords, found options and ['capacity']; "
            "dataclasses.replace changes options",
        ),
        ({"options": 3}, "options must be a jax_ep.PlanOptions, found int"),
        (
            {"capasity": 3},
            "keywords must be attributes of PlanOptions, ['capacity', "
            "'capacity_factor', 'expert_alignment', 'expert_capacity', "
            "'node_capacity', 'drop_order', 'expert_limit', 'tokens'], found "
            "['capasity']",
        ),
    ],
)
@pytest.mark.parametrize("op", ["make_plan", "plan_dispatch", "moe", "sharded_moe"])
def test_bad_options(op, keywords, message):
    args = {"make_plan": 1, "plan_dispatch": 2, "moe": 4, "sharded_moe": 5}[op]
    with pytest.raises(TypeError) as info:
        getattr(jax_ep, op)(*[None] * args, comm=None, num_experts=4, **keywords)
    assert str(info.value) == f"jax_ep.{op}: {message}"
