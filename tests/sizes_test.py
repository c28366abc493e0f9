"""Sizes in bytes: what Plan.describe tells, and defaults that make large buffers."""

from __future__ import annotations

import functools
import warnings

import harness
import jax
import jax.numpy as jnp
import layers
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._data import sizes

RANKS, TOKENS, TOP_K, HIDDEN = harness.most_ranks(), 4096, 8, 7168
EXPERTS = 4 * RANKS
ROW = 2 * HIDDEN  # bytes
# As many tokens as make R * T those of 64 ranks.
MANY = 64 * TOKENS // RANKS


@pytest.fixture(autouse=True)
def unwarned():
    """Every test meets the warnings as a new process does."""
    sizes._warn.cache_clear()


def communicator(**options):
    return jax_ep.Communicator(layers.mesh({"ep": RANKS}), "ep", **options)


def trace(body, tokens=MANY, hidden=HIDDEN, dtype=jnp.bfloat16):
    """Traces body(x, topk_idx, weights): no array is made."""
    shapes = ((tokens, hidden), dtype), ((tokens, TOP_K), "int32")
    shapes += (((tokens, TOP_K), "float32"),)
    mapped = layers.sharded(body, layers.mesh({"ep": RANKS}), in_specs=P("ep"))
    return jax.eval_shape(
        mapped,
        *(
            jax.ShapeDtypeStruct((RANKS * shape[0], *shape[1:]), dtype)
            for shape, dtype in shapes
        ),
    )


def large(op, rows, argument, instead, row_bytes=ROW):
    what = {
        "capacity": "receive buffer",
        "expert_capacity": "buffer of expert rows",
        "node_capacity": "buffer of rows between nodes",
    }[argument]
    return (
        f"jax_ep.{op}: the {what} of a leaf takes {rows * row_bytes / 2**30:.1f} GiB "
        f"on each rank, {rows} rows of {row_bytes} bytes, because the default of "
        f"{argument} has room for the worst case; give {instead} where the plan is "
        "made; the same number, given, is not warned of"
    )


def warned(body, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace(body, **options)
    assert all(w.category is UserWarning for w in caught)
    return [str(w.message) for w in caught]


def make(comm, op, x, topk_idx, weights, **given):
    """The rows of `op`."""
    given = {"comm": comm, "num_experts": EXPERTS} | given
    if op == "moe":
        return jax_ep.moe(x, topk_idx, weights, lambda rows, _: rows, **given)
    if op == "plan_dispatch":
        return jax_ep.plan_dispatch(x, topk_idx, **given)[1]
    plan = jax_ep.make_plan(topk_idx, **given)
    if op == "dispatch_start":
        return jax_ep.dispatch_done(jax_ep.dispatch_start(x, plan))
    if op == "dispatch_fp8":
        return jax_ep.dispatch_fp8(x, plan)
    return jax_ep.dispatch(x, plan)


CAPACITY = "capacity or capacity_factor"
EXPERT_CAPACITY = "expert_capacity or capacity_factor"


@pytest.mark.parametrize("op", ("dispatch", "plan_dispatch", "dispatch_start"))
def test_large_receive_buffer(op):
    with communicator() as comm:
        body = functools.partial(make, comm, op)
        message = large(op, 64 * TOKENS, "capacity", CAPACITY)
        assert warned(body) == [message]
        assert not warned(body)  # once
        assert warned(body, hidden=2 * HIDDEN) == [
            large(op, 64 * TOKENS, "capacity", CAPACITY, 2 * ROW)
        ]
        # 2**30 bytes and no more.
        assert not warned(body, hidden=2**30 // (2 * 64 * TOKENS))
        for given in (
            {"capacity": 64 * TOKENS},
            {"capacity_factor": 100.0},
            {"capacity": 7},
        ):
            assert not warned(functools.partial(body, **given), hidden=3 * HIDDEN)


def with_pads(rows):
    """Expert rows of the worst case, in groups as moe aligns them."""
    alignment = 128 if harness.ON_GPU else 1
    return (rows + EXPERTS // RANKS * (alignment - 1)) // alignment * alignment


def test_moe_with_64_ranks_worth_of_rows():
    """30 GB of expert rows."""
    with communicator() as comm:
        body = functools.partial(make, comm, "moe")
        rows = 64 * TOKENS * TOP_K
        assert rows * ROW == 30_064_771_072
        assert warned(body) == [
            large("dispatch", 64 * TOKENS, "capacity", CAPACITY),
            large("permute", with_pads(rows), "expert_capacity", EXPERT_CAPACITY),
        ]
        sizes._warn.cache_clear()
        # What is left of the default when C is given.
        few = functools.partial(body, capacity=1 << 15)
        rows = with_pads(TOP_K << 15)
        assert warned(few) == [
            large("permute", rows, "expert_capacity", EXPERT_CAPACITY)
        ]
        assert not warned(functools.partial(body, capacity_factor=1.25))
        assert not warned(
            functools.partial(body, capacity=1 << 15, expert_capacity=1 << 20)
        )


def test_rows_quantised_on_the_wire():
    """Half the bytes travel, and rows come out as wide as they were."""
    with communicator() as comm:
        body = functools.partial(make, comm, "dispatch_fp8")
        message = large("dispatch", 64 * TOKENS, "capacity", CAPACITY, HIDDEN)
        assert warned(body) == [message]


@pytest.mark.skipif(
    harness.ON_GPU or RANKS < 4, reason="cuts the virtual devices into nodes"
)
def test_large_buffers_between_nodes():
    with communicator(backend="cpu", node_size=RANKS // 2) as comm:
        body = functools.partial(make, comm, "dispatch", capacity=9)
        assert warned(body, tokens=1 << 16) == [
            large("dispatch", 2 << 16, "node_capacity", "node_capacity")
        ]
        assert not warned(functools.partial(body, node_capacity=1 << 16))
        seen = []

        def describe(x, topk_idx, _):
            plan = jax_ep.make_plan(
                topk_idx, comm=comm, num_experts=EXPERTS, node_capacity=5
            )
            seen.append(plan.describe(x))
            return plan.recv_src

        trace(describe, tokens=16)
        assert seen[0]["leaves"][""]["wire_bytes"] == (16 + 5) * ROW
        assert seen[0]["defaults"] == ["capacity", "expert_capacity"]


@harness.on_each_backend
def test_describe(backend):
    seen = []
    with communicator(backend=backend) as comm:

        def body(x, topk_idx, weights):
            plan = jax_ep.make_plan(
                topk_idx,
                comm=comm,
                num_experts=EXPERTS,
                expert_alignment=16,
                capacity=100,
            )
            tree = {"x": x, "more": (weights, topk_idx[:, 0])}
            seen.append((plan.describe(tree), plan.describe(), f"{plan}"))
            return jax_ep.dispatch(x, plan)

        trace(body, tokens=32)
    about, nothing, text = seen[0]
    places = (min(100, 32 * RANKS) * TOP_K + 4 * 15) // 16 * 16
    assert about == {
        "num_ranks": RANKS,
        "num_tokens": 32,
        "top_k": TOP_K,
        "num_experts": EXPERTS,
        "num_local_experts": 4,
        "capacity": 100,
        "expert_capacity": places,
        "expert_alignment": 16,
        "node_capacity": 32,
        "defaults": ["expert_capacity"],
        "leaves": {
            path: {
                "row_bytes": size,
                "receive_bytes": 100 * size,
                "expert_bytes": places * size,
            }
            for path, size in (
                ("['x']", ROW),
                ("['more'][0]", 4 * TOP_K),
                ("['more'][1]", 4),
            )
        },
    }
    assert nothing == about | {"leaves": {}}
    assert text == (
        f"Plan(num_tokens=32, top_k={TOP_K}, num_experts={EXPERTS}, capacity=100, "
        f"expert_alignment=16, expert_capacity={places}, node_capacity=32, "
        f"comm=Communicator(mesh={{'ep': {RANKS}}}, axis_name='ep', "
        f"backend={backend!r}))"
    )


def test_described_bytes_are_those_of_the_buffers():
    seen = []
    with communicator() as comm:

        def body(x, topk_idx, _):
            plan = jax_ep.make_plan(
                topk_idx, comm=comm, num_experts=EXPERTS, capacity_factor=1.25
            )
            (about,) = plan.describe(x)["leaves"].values()
            rows = jax_ep.dispatch(x, plan)
            expert_rows = jax_ep.permute(rows, plan)
            seen.append((about, rows.nbytes, expert_rows.nbytes))
            return rows

        trace(body, tokens=100)
    about, receive_bytes, expert_bytes = seen[0]
    assert about["receive_bytes"] == receive_bytes
    assert about["expert_bytes"] == expert_bytes


def test_plans_of_equal_sizes_have_one_structure():
    """Whoever chose the sizes: plans may be the two branches of a cond."""
    with communicator() as comm:

        def body(x, topk_idx, _):
            chosen = jax_ep.make_plan(topk_idx, comm=comm, num_experts=EXPERTS)
            given = jax_ep.make_plan(
                topk_idx,
                comm=comm,
                num_experts=EXPERTS,
                capacity=chosen.capacity,
                expert_capacity=chosen.expert_capacity,
            )
            assert jax.tree.structure(chosen) == jax.tree.structure(given)
            plan = jax.lax.cond(topk_idx[0, 0] > 0, lambda: chosen, lambda: given)
            return jax_ep.dispatch(x, plan)

        trace(body, tokens=100)
