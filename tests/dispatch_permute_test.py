"""dispatch_permute against the oracle, and against dispatch followed by permute.

On backends without native code for it the primitive takes those two steps, so
that its rules are tested everywhere.
"""

from __future__ import annotations

import functools

import cases
import expert_oracle
import harness
import jax
import jax.numpy as jnp
import layers
import ml_dtypes
import moe_layers
import numpy as np
import oracle
import payloads
import pytest
from jax import lax

import jax_ep
from jax_ep._api import ops
from jax_ep._operations import fused as launches
from jax_ep._operations import table

RANKS = harness.few_ranks()
NATIVE = harness.BACKENDS[0]
ALIGNMENT = 8
# Rows that move in 16-byte units by bulk copies, in such units, and in others.
GROUPED = {
    "bfloat16[136]": ((136,), ml_dtypes.bfloat16),
    "bfloat16[9]": ((9,), ml_dtypes.bfloat16),
    "uint8[3,7]": ((3, 7), np.uint8),
}
OTHERS = {"float32[]": ((), np.float32), "float32[4,20]": ((4, 20), np.float32)}


@pytest.fixture
def fused(monkeypatch):
    """jax_ep.moe takes the primitive, whatever the backend."""
    everywhere = frozenset({"cuda", "cpu", "xla"})
    monkeypatch.setattr(launches, "BACKENDS", everywhere)


def both(grouped, others, plan):
    """(fused, in two steps) of dicts of leaves."""
    moved = launches.dispatch_permute(
        list(grouped.values()), list(others.values()), plan
    )
    rows, received = jax_ep.dispatch((grouped, others), plan)
    return (
        (dict(zip(grouped, moved[0])), dict(zip(others, moved[1]))),
        (jax_ep.permute(rows, plan), received),
    )


@functools.cache
def program(comm, num_experts, capacity, alignment, expert_capacity=None):
    """(topk_idx, grouped, others, number) -> (fused, in two steps), number."""

    def body(comm, topk_idx, grouped, others, number):
        plan = jax_ep.make_plan(
            topk_idx,
            comm=comm,
            num_experts=num_experts,
            capacity=capacity,
            expert_alignment=alignment,
            expert_capacity=expert_capacity,
        )
        return both(grouped, others, plan), number

    return harness.Program(body, comm)


def leaves_of(table, ranks, tokens):
    return {
        name: payloads.payload((ranks, tokens, *shape), dtype)
        for name, (shape, dtype) in table.items()
    }


def assert_right(backend, routing, alignment, grouped, others, expert_capacity=None):
    ranks, tokens, top_k = routing.topk_idx.shape
    run = program(
        harness.communicator(backend, ranks),
        routing.num_experts,
        routing.capacity,
        alignment,
        expert_capacity,
    )
    # Without tokens XLA would be left with no operand, and fail.
    number = np.zeros((ranks, 1), np.float32)
    (fused, in_two_steps), _ = run(routing.topk_idx, grouped, others, number)
    right = oracle.plan(
        routing.topk_idx, routing.num_experts, routing.capacity, alignment
    )
    local = -(-routing.num_experts // ranks)
    if expert_capacity is None:
        rows = min(routing.capacity, ranks * tokens)
        expert_capacity = expert_oracle.worst_case(rows, top_k, local, alignment)
    places = expert_oracle.expert_plan(
        right.fields["recv_topk_idx"], local, alignment, expert_capacity
    )
    for name, x in grouped.items():
        want = places.permute(right.dispatch(x))
        payloads.assert_same_rows(fused[0][name], want, name, x)
        payloads.assert_same_rows(in_two_steps[0][name], want, name, x)
    for name, x in others.items():
        want = right.dispatch(x)
        payloads.assert_same_rows(fused[1][name], want, name, x)
        payloads.assert_same_rows(in_two_steps[1][name], want, name, x)


@harness.on_each_combination_of_one_launch(cases.CASES)
def test_every_case(backend, case, ranks):
    harness.mesh(ranks)  # skips before it makes arrays
    routing = case.routing(ranks)
    tokens = routing.topk_idx.shape[1]
    assert_right(
        backend,
        routing,
        ALIGNMENT,
        leaves_of(GROUPED, ranks, tokens),
        leaves_of(OTHERS, ranks, tokens),
    )


@pytest.mark.parametrize("part", [0.0, 0.3, 1.0], ids=str)
@harness.on_each_backend
def test_dropped_expert_rows(backend, part):
    """Both capacities too small: rows are dropped at the sender and here."""
    case = next(c for c in cases.CASES if c.name == "half_capacity")
    routing = case.routing(RANKS)
    tokens = routing.topk_idx.shape[1]
    plan = oracle.plan(routing.topk_idx, routing.num_experts, routing.capacity, 4)
    demand = int(plan.fields["group_sizes"].sum(-1).max())
    assert_right(
        backend,
        routing,
        4,
        leaves_of(GROUPED, RANKS, tokens),
        leaves_of(OTHERS, RANKS, tokens),
        max(4, int(part * demand) // 4 * 4),
    )


@harness.on_each_backend
def test_many_tokens_of_wide_rows(backend):
    """Rings of pieces go round, movers tell more than once; a row of 3 pieces."""
    ids = cases.log_normal(RANKS, 1500, 4, 8 * RANKS).astype(np.int32)
    routing = cases.Routing(ids, 8 * RANKS, RANKS * 1500, 1)
    shapes = {"wide": ((1032,), np.float32), "wider": ((10000,), ml_dtypes.bfloat16)}
    grouped = leaves_of({"wide": shapes["wide"]}, RANKS, 1500)
    assert_right(backend, routing, 1, grouped, leaves_of(OTHERS, RANKS, 1500))
    few = cases.Routing(ids[:, :40], 8 * RANKS, RANKS * 40, 1)
    assert_right(backend, few, 1, leaves_of(shapes, RANKS, 40), {})


@harness.on_each_backend
def test_late_ranks(backend):
    """One rank's rows come late: on GPUs blocks that wait for them give up."""
    ids = cases.log_normal(RANKS, 300, 4, 8 * RANKS).astype(np.int32)
    grouped = leaves_of(GROUPED, RANKS, 300)
    others = leaves_of(OTHERS, RANKS, 300)
    rounds = 400 if harness.ON_GPU else 20
    zero = np.zeros(RANKS, np.int32)

    def body(comm, topk_idx, grouped, others, late, zero):
        def step(_, late):
            plan = jax_ep.make_plan(topk_idx, comm=comm, num_experts=8 * RANKS)
            x = harness.delayed(grouped["bfloat16[136]"], late, zero)
            return None, both(grouped | {"bfloat16[136]": x}, others, plan)

        return lax.scan(step, None, late)[1]

    late = np.array(
        [
            [rounds * (step % RANKS == rank) for step in range(2 * RANKS)]
            for rank in range(RANKS)
        ],
        np.int32,
    )
    comm = harness.communicator(backend, RANKS)
    fused, in_two_steps = harness.run(body, comm, ids, grouped, others, late, zero)
    jax.tree.map(
        lambda got, want: payloads.assert_same_rows(got, want, "fused"),
        fused,
        in_two_steps,
    )


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("sms", [1, 2, 24, 3000])
def test_any_number_of_multiprocessors(sms):
    """From one mover to the most that there are."""
    ids = cases.log_normal(RANKS, 700, 4, 8 * RANKS).astype(np.int32)
    table = {"wide": ((2056,), ml_dtypes.bfloat16), "odd": ((33,), np.uint8)}
    grouped = leaves_of(table, RANKS, 700)
    mesh = harness.mesh(RANKS)
    with jax_ep.Communicator(mesh, "ep", backend="cuda", num_sms=sms) as comm:
        run = program(comm, 8 * RANKS, 500 * RANKS, 8)
        number = np.zeros((RANKS, 1), np.float32)
        for others in (leaves_of(OTHERS, RANKS, 700), {}):
            (fused, in_two_steps), _ = run(ids, grouped, others, number)
            for got, want in zip(fused, in_two_steps, strict=True):
                for name in want:
                    payloads.assert_same_rows(got[name], want[name], name)


DTYPES = (
    *("bool", "int4", "uint4", "int8", "int16", "int32", "uint8", "uint32"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn"),
    *("bfloat16", "float16", "float32", "complex64"),
)
ROW_BYTES = (1, 2, 3, 8, 15, 16, 17, 48, 255, 256, 257, 272, 512, 4096, 5760, 8208)


@harness.on_each_backend
def test_every_dtype_and_row_size_in_one_call(backend, fused):
    """More leaves than a launch takes, of both kinds, some without elements."""
    del fused
    case = next(c for c in cases.CASES if c.name == "duplicates")
    routing = case.routing(RANKS)
    ranks, tokens, _ = routing.topk_idx.shape
    tree = {
        name: payloads.payload((ranks, tokens, 5), jnp.dtype(name)) for name in DTYPES
    }
    tree |= {
        f"{size} bytes": payloads.payload((ranks, tokens, size), np.uint8, size)
        for size in ROW_BYTES
    }
    tree["no elements"] = np.zeros((ranks, tokens, 3, 0), np.float32)
    other = {f"other {name}": x for name, x in tree.items()}

    def body(comm, topk_idx, tree, other):
        plan = jax_ep.make_plan(
            topk_idx,
            comm=comm,
            num_experts=routing.num_experts,
            expert_alignment=4,
        )
        rows, received = jax_ep.dispatch((tree, other), plan)
        return (
            ops._dispatch_permute(tree, other, plan),
            (jax_ep.permute(rows, plan), received),
        )

    comm = harness.communicator(backend, RANKS)
    found, want = harness.run(body, comm, routing.topk_idx, tree, other)
    for got, right in zip(found, want, strict=True):
        assert got.keys() == right.keys()
        for name in right:
            payloads.assert_same_rows(got[name], right[name], name)


# Transformations: the same bits as of the two steps --------------------------

TOKENS, TOP_K, EXPERTS = 6, 3, 2 * RANKS + 1


def in_two_steps(x, others, plan):
    rows, received = jax_ep.dispatch((x, others), plan)
    return jax_ep.permute(rows, plan), received


def inputs():
    rng = np.random.default_rng(3)
    draw = lambda *shape: rng.normal(size=(RANKS, *shape)).astype(np.float32)  # noqa: E731
    ids = np.asarray(layers.random_routing(3, RANKS * TOKENS, TOP_K, EXPERTS))
    return (
        ids.reshape(RANKS, TOKENS, TOP_K),
        {"a": draw(TOKENS, 5), "b": draw(TOKENS, 64)},
        {"w": draw(TOKENS, TOP_K)},
    )


def _value_and_gradients(move, plan, x, others):
    out, pull = jax.vjp(lambda x, others: move(x, others, plan), x, others)
    return out, pull(jax.tree.map(jnp.sin, out))


def _tangents(move, plan, x, others):
    def f(x):
        return move(x, others, plan)

    return jax.jvp(f, (x,), (jax.tree.map(jnp.cos, x),))


def _one_kind_of_cotangent(move, plan, x, others):
    """Of the grouped leaves, of the others, of one leaf of both."""

    def loss(pick):
        return lambda x, others: sum(
            (leaf**2).sum() for leaf in pick(move(x, others, plan))
        )

    picks = (
        lambda out: jax.tree.leaves(out[0]),
        lambda out: jax.tree.leaves(out[1]),
        lambda out: [out[0]["b"]],
    )
    return [jax.grad(loss(pick), argnums=(0, 1))(x, others) for pick in picks]


def _second_order(move, plan, x, others):
    def loss(x):
        rows, _ = move(jax.tree.map(jnp.sin, x), others, plan)
        return sum((leaf**3).sum() for leaf in jax.tree.leaves(rows))

    return jax.jvp(jax.grad(loss), (x,), (x,))


def _batched(move, plan, x, others):
    """Over some rows; the others are shared by the batch."""
    xs = {"a": jnp.stack([x["a"], -x["a"]], 1), "b": x["b"]}
    f = lambda x, others: move(x, others, plan)  # noqa: E731
    return jax.vmap(f, in_axes=({"a": 1, "b": None}, None))(xs, others)


def _remat(move, plan, x, others):
    def loss(x):
        f = jax.checkpoint(lambda x: move(x, others, plan)[0])
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(f(x)))

    return jax.grad(loss)(x)


@pytest.mark.parametrize(
    "transform",
    (
        _value_and_gradients,
        _tangents,
        _one_kind_of_cotangent,
        _second_order,
        _batched,
        _remat,
    ),
    ids=lambda f: f.__name__.strip("_"),
)
@harness.on_each_backend
def test_transformations(backend, transform, fused):
    del fused

    def body(comm, topk_idx, x, others):
        plan = jax_ep.make_plan(
            topk_idx, comm=comm, num_experts=EXPERTS, expert_alignment=4
        )
        return (
            transform(ops._dispatch_permute, plan, x, others),
            transform(in_two_steps, plan, x, others),
        )

    comm = harness.communicator(backend, RANKS)
    found, want = harness.run(body, comm, *inputs())
    jax.tree.map(np.testing.assert_array_equal, found, want)


@harness.on_each_backend
def test_batch_of_routings(backend, fused):
    """One call for each element of a batch of plans; and in a loop."""
    del fused
    ids, x, others = inputs()
    ids = np.stack([ids, ids[:, ::-1], np.full_like(ids, -1)], 1)

    def body(comm, ids, x, others):
        def run(move, idx):
            plan = jax_ep.make_plan(idx, comm=comm, num_experts=EXPERTS)
            return move(x, others, plan)

        def scanned(_, idx):
            return None, run(ops._dispatch_permute, idx)

        return (
            jax.vmap(functools.partial(run, ops._dispatch_permute))(ids),
            lax.scan(scanned, None, ids)[1],
            jax.vmap(functools.partial(run, in_two_steps))(ids),
        )

    comm = harness.communicator(backend, RANKS)
    batched, scanned, want = harness.run(body, comm, ids, x, others)
    jax.tree.map(np.testing.assert_array_equal, batched, want)
    jax.tree.map(np.testing.assert_array_equal, scanned, want)


@harness.on_each_backend
def test_dtypes_without_a_gradient(backend, fused):
    del fused
    comm = harness.communicator(backend, RANKS)

    def body(comm, topk_idx, x):
        plan = jax_ep.make_plan(topk_idx, comm=comm, num_experts=EXPERTS)
        return jax.grad(
            lambda x: ops._dispatch_permute(x, [], plan)[0].astype(jnp.float32).sum()
        )(x)

    x = np.zeros((RANKS, TOKENS, 2), jnp.dtype("float8_e5m2"))
    with pytest.raises(TypeError) as info:
        harness.run(body, comm, inputs()[0], x)
    assert str(info.value) == (
        "jax_ep.dispatch: a leaf of dtype float8_e5m2 has no gradient: combine "
        "cannot sum it; dispatch a wider dtype, or say with jax.custom_vjp what the "
        "gradient is"
    )


# The layer -------------------------------------------------------------------


@pytest.fixture
def fused_layers(fused):
    """moe_layers' programs are kept; those with the primitive are others."""
    del fused
    moe_layers.program.cache_clear()
    with jax.default_matmul_precision("highest"):  # as in moe_test
        yield
    moe_layers.program.cache_clear()


MOE_CASES = (
    *("uniform", "one_rank", "holes", "duplicates", "no_tokens", "experts_5"),
    "half_capacity",
)


@pytest.mark.parametrize(
    "case", [c for c in cases.CASES if c.name in MOE_CASES], ids=str
)
def test_moe(case, fused_layers):
    """Outputs and all gradients of the layer, against the dense one."""
    del fused_layers
    routing = case.routing(RANKS)
    moe_layers.assert_layer(
        NATIVE, routing.topk_idx, routing.num_experts, routing.capacity, 8
    )


# What it becomes -------------------------------------------------------------


def test_one_call_for_cuda(fused, monkeypatch):
    """Results, scratch and routing of the custom call, lowered without a GPU."""
    del fused
    native = table.DISPATCH_PERMUTE.native
    monkeypatch.setitem(vars(native), "backends", frozenset({NATIVE}))
    mesh = layers.mesh({"ep": RANKS})
    comm = layers.communicator(mesh, "ep", NATIVE)
    ids, x, others = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), inputs())

    def body(ids, x, others):
        def loss(x):
            plan = jax_ep.make_plan(ids, comm=comm, num_experts=EXPERTS)
            rows, received = ops._dispatch_permute(x, others, plan)
            return sum((leaf**2).sum() for leaf in jax.tree.leaves((rows, received)))

        return jax.grad(loss)(x)

    f = jax.jit(layers.sharded(body, mesh))
    text = f.trace(ids, x, others).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @jax_ep_" in line]
    names = [line.split("@jax_ep_")[1].split("(")[0] for line in calls]
    assert sorted(names) == [
        "combine",
        "dispatch_permute",
        "expert_rows",
        "plan",
        "unpermute",
    ]
    (call,) = (line for line in calls if "@jax_ep_dispatch_permute(" in line)
    operands, results = call.split(" : ")[-1].split(" -> ")
    # Position, 5 of routing, 3 leaves; 3 results, 2 landing places, the workspace.
    assert operands.count("tensor<") == 9
    assert results.count("tensor<") == 6
    assert "channel" in call
