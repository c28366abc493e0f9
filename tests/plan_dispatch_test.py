"""plan_dispatch against the oracle, and against make_plan followed by dispatch.

On backends without native code for it the primitive takes those two steps, so
that it is tested everywhere. Its transformations: plan_dispatch_transforms_test.
"""

from __future__ import annotations

import dataclasses
import functools

import cases
import harness
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import payloads
import pytest
from jax import lax

import jax_ep

RANKS = harness.few_ranks()
# Rows that move in 16-byte units, in words and in bytes.
ROWS = {
    "bfloat16[136]": ((136,), ml_dtypes.bfloat16),
    "float32[]": ((), np.float32),
    "uint8[3,7]": ((3, 7), np.uint8),
}


def leaves_of(table, ranks, tokens):
    return {
        name: payloads.payload((ranks, tokens, *shape), dtype)
        for name, (shape, dtype) in table.items()
    }


def arrays(plan):
    """All of a plan's arrays by name, private ones too."""
    return {
        field.name: getattr(plan, field.name)
        for field in dataclasses.fields(plan)
        if not field.metadata.get("static") and field.name != "_crossing"
    }


def both(x, topk_idx, **sizes):
    """((plan, rows) in one step, the same in two steps)."""
    plan, rows = jax_ep.plan_dispatch(x, topk_idx, **sizes)
    right = jax_ep.make_plan(topk_idx, **sizes)
    return (arrays(plan), rows), (arrays(right), jax_ep.dispatch(x, right))


@functools.cache
def program(comm, num_experts, capacity, alignment):
    """(topk_idx, x, number) -> what `both` returns, number."""

    def body(comm, topk_idx, x, number):
        return both(
            x,
            topk_idx,
            comm=comm,
            num_experts=num_experts,
            capacity=capacity,
            expert_alignment=alignment,
        ), number

    return harness.Program(body, comm)


def assert_right(comm, routing, x):
    ranks = len(routing.topk_idx)
    sizes = (routing.num_experts, routing.capacity, routing.expert_alignment)
    # Without tokens XLA would be left with no operand, and fail.
    number = np.zeros((ranks, 1), np.float32)
    found, _ = program(comm, *sizes)(routing.topk_idx, x, number)
    right = oracle.plan(routing.topk_idx, *sizes)
    (plan, rows), (two_plan, two_rows) = found
    payloads.assert_same_trees(plan, two_plan, "plan in two steps")
    fields = {name: plan[name] for name in harness.PLAN_FIELDS}
    payloads.assert_same_trees(fields, right.fields, "plan")
    for name, sent in x.items():
        payloads.assert_same_rows(rows[name], right.dispatch(sent), name, sent)
        payloads.assert_same_rows(two_rows[name], rows[name], name)


@harness.on_each_combination_of_one_launch(cases.CASES + cases.MANY_EXPERTS)
def test_every_case(backend, case, ranks):
    comm = harness.communicator(backend, ranks)
    routing = case.routing(ranks)
    tokens = routing.topk_idx.shape[1]
    assert_right(comm, routing, leaves_of(ROWS, ranks, tokens))


def routing_of(ranks, tokens, top_k, capacity, rule=cases.holes):
    experts = 3 * ranks + 1
    ids = rule(ranks, tokens, top_k, experts).astype(np.int32)
    return cases.Routing(ids, experts, capacity, 4)


# (T, K, bytes of a row): one of each that one launch does, up to the most that
# it can; then what takes two.
SIZES = (
    *((1, 8, 14336), (33, 1, 64), (127, 8, 2064), (128, 8, 14336), (129, 3, 5120)),
    *((256, 8, 14336), (130, 22, 514), (256, 31, 48), (767, 2, 16), (768, 4, 5104)),
    *((257, 8, 14336), (769, 2, 16)),
)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size):
    """Every token has as many rows as it can have, some slots are empty."""
    tokens, top_k, row_bytes = size
    comm = harness.communicator(harness.BACKENDS[0], RANKS)
    x = {"x": payloads.payload((RANKS, tokens, row_bytes), np.uint8)}
    routing = routing_of(RANKS, tokens, top_k, RANKS * tokens)
    assert_right(comm, routing, x)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 2.0], ids=str)
@harness.on_each_backend
def test_capacities(backend, part):
    """Rows dropped at their senders; slots that nothing comes to."""
    comm = harness.communicator(backend, RANKS)
    capacity = max(1, int(part * RANKS * 50))
    routing = routing_of(RANKS, 50, 4, capacity, cases.duplicates)
    assert_right(comm, routing, leaves_of(ROWS, RANKS, 50))


DTYPES = (
    *("bool", "int4", "uint2", "int8", "int16", "int32", "uint32"),
    *("float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn"),
    *("bfloat16", "float16", "float32", "complex64"),
)
ROW_BYTES = (1, 3, 8, 15, 16, 17, 48, 255, 256, 257, 528)


@harness.on_each_backend
def test_every_dtype_and_row_size_in_one_call(backend):
    """More leaves than a launch takes, some without elements, nested."""
    comm = harness.communicator(backend, RANKS)
    tokens = 11
    tree = {n: payloads.payload((RANKS, tokens, 5), jnp.dtype(n)) for n in DTYPES}
    tree |= {
        f"{size} bytes": payloads.payload((RANKS, tokens, size), np.uint8, size)
        for size in ROW_BYTES
    }
    tree["no elements"] = np.zeros((RANKS, tokens, 3, 0), np.float32)
    routing = routing_of(RANKS, tokens, 3, RANKS * tokens)
    assert_right(comm, routing, tree)


@harness.on_each_backend
def test_nothing_to_send(backend):
    """No leaves, or none with elements: a plan all the same."""
    comm = harness.communicator(backend, RANKS)

    def body(comm, topk_idx):
        empty = jnp.zeros((topk_idx.shape[0], 0), jnp.bfloat16)
        sizes = {"comm": comm, "num_experts": 3 * RANKS}
        plan, rows = jax_ep.plan_dispatch({"a": [], "b": None}, topk_idx, **sizes)
        assert rows == {"a": [], "b": None}
        again, rows = jax_ep.plan_dispatch(empty, topk_idx, **sizes)
        assert rows.shape == (plan.capacity, 0)
        return harness.plan_fields(plan), harness.plan_fields(again)

    ids = cases.holes(RANKS, 9, 2, 3 * RANKS).astype(np.int32)
    right = oracle.plan(ids, 3 * RANKS, 9 * RANKS).fields
    for plan in harness.run(body, comm, ids):
        payloads.assert_same_trees(plan, right, "plan")


def differences(found, want):
    """How many arrays of two trees differ in a bit."""
    return sum(
        (payload_bits(found[name]) != payload_bits(want[name])).any().astype(jnp.int32)
        for name in want
    )


def payload_bits(x):
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.uint16)
    return x


def test_many_steps():
    """200 one after the other, ids and rows changing, alone and between others."""
    comm = harness.communicator(harness.BACKENDS[0], RANKS)
    tokens = 70
    experts = 4 * RANKS

    def body(comm, topk_idx, x):
        sizes = {"comm": comm, "num_experts": experts, "capacity": RANKS * 40}

        def step(carry, i):
            ids = (topk_idx * (i + 1) + i) % (experts + 3)
            rows = x + i.astype(x.dtype)
            plan, got = jax_ep.plan_dispatch(rows, ids, **sizes)
            again, more = jax_ep.plan_dispatch(rows * 2, jnp.flip(ids, 0), **sizes)
            right = jax_ep.make_plan(ids, **sizes)
            want = jax_ep.dispatch(rows, right)
            home = jax_ep.combine(got, plan)
            wrong = differences(
                arrays(plan) | {"rows": got, "home": home},
                arrays(right) | {"rows": want, "home": jax_ep.combine(want, right)},
            )
            flipped = jax_ep.make_plan(jnp.flip(ids, 0), **sizes)
            wrong += differences(
                arrays(again) | {"rows": more},
                arrays(flipped) | {"rows": jax_ep.dispatch(rows * 2, flipped)},
            )
            return carry + wrong, None

        start = lax.pcast(jnp.int32(0), "ep", to="varying")
        return lax.scan(step, start, jnp.arange(100))[0]

    ids = cases.mix(*cases.grid(RANKS, tokens, 4)) % np.uint64(experts)
    x = payloads.numbers((RANKS, tokens, 264), ml_dtypes.bfloat16)
    wrong = harness.run(body, comm, ids.astype(np.int32), x)
    assert not wrong.any()


def test_late_ranks():
    """One rank comes late, each in turn; on GPUs the others wait in the kernel."""
    comm = harness.communicator(harness.BACKENDS[0], RANKS)
    rounds = 400 if harness.ON_GPU else 20

    def body(comm, topk_idx, x, late, zero):
        def step(carry, late):
            rows = harness.delayed(x, late, zero)
            found, want = both(rows, topk_idx, comm=comm, num_experts=4 * RANKS)
            wrong = differences(
                found[0] | {"rows": found[1]}, want[0] | {"rows": want[1]}
            )
            return carry + wrong, None

        start = lax.pcast(jnp.int32(0), "ep", to="varying")
        return lax.scan(step, start, late)[0]

    late = np.array(
        [[rounds * (s % RANKS == r) for s in range(3 * RANKS)] for r in range(RANKS)],
        np.int32,
    )
    ids = cases.holes(RANKS, 60, 4, 4 * RANKS).astype(np.int32)
    x = payloads.numbers((RANKS, 60, 136), ml_dtypes.bfloat16)
    wrong = harness.run(body, comm, ids, x, late, np.zeros(RANKS, np.int32))
    assert not wrong.any()


@pytest.mark.gpu(count=2)
@pytest.mark.skipif(harness.PROCESSES > 1, reason="one process is enough")
@pytest.mark.parametrize("sms", [1, 2, 24, 3000])
def test_any_number_of_multiprocessors(sms):
    mesh = harness.mesh(RANKS)
    with jax_ep.Communicator(mesh, "ep", backend="cuda", num_sms=sms) as comm:
        for tokens, top_k, row_bytes in ((128, 8, 14336), (300, 9, 130), (5, 2, 48)):
            x = {"x": payloads.payload((RANKS, tokens, row_bytes), np.uint8)}
            routing = routing_of(RANKS, tokens, top_k, RANKS * tokens // 2)
            assert_right(comm, routing, x)
