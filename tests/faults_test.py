"""Faults that users of other libraries reported in public, tried on this one.

Each test names the thread, builds the smallest routing that shows the fault
and checks right values that were worked out apart from the library.
"""

import functools
import zlib

import cases
import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import payloads
import pytest
from jax import lax

import jax_ep

# A layer whose sums are exact in float32: small integers all through, so that
# gradients can be compared with ==.


def layer(comm, ids, x, weights, scale, *, capacity=None, plans=None):
    """sum over k of weights * scale[expert] * x: expert e multiplies by scale[e].

    ids and weights are [T, K], x is [T, H], scale is this rank's [L].
    """
    plan = jax_ep.make_plan(
        ids,
        comm=comm,
        num_experts=len(scale) * comm.num_ranks,
        capacity=capacity,
    )
    if plans is not None:
        plans.append(plan)
    rows, row_weights = jax_ep.dispatch((x, weights), plan)
    here = plan.recv_topk_idx
    gain = row_weights * scale[jnp.maximum(here, 0)]
    gain = jnp.where(here >= 0, gain, 0).sum(-1, keepdims=True)
    return jax_ep.combine(rows * gain, plan)


def layer_and_gradients(comm, ids, x, weights, scale, gradient, capacity=None):
    """(y, dx, dweights, dscale) of one layer, and its plan's public fields."""
    plans = []

    def apply(x, weights, scale):
        return layer(comm, ids, x, weights, scale, capacity=capacity, plans=plans)

    y, transpose = jax.vjp(apply, x, weights, scale)
    return (y, *transpose(gradient)), harness.plan_fields(plans[0])


def dense(ids, x, weights, scale, kept=None):
    """The same layer in NumPy: y and a function from dy to all gradients."""
    ranks, local = scale.shape
    valid = (ids >= 0) & (ids < ranks * local)
    every = scale.ravel()[np.where(valid, ids, 0)]
    valid = valid if kept is None else valid & kept
    gain = np.where(valid, weights * every, 0).sum(-1)[..., None]

    def transpose(dy):
        along = (dy * x).sum(-1)[..., None]
        dscale = np.zeros(ranks * local)
        np.add.at(dscale, ids[valid], (weights * along)[valid])
        dweights = np.where(valid, every * along, 0)
        return dy * gain, dweights, dscale.reshape(scale.shape)

    return x * gain, transpose


def integers(shape, low, high, seed, dtype=np.float32):
    """Whole numbers in [low, high], never all the same."""
    span = np.uint64(high - low + 1)
    index = np.arange(int(np.prod(shape))).reshape(shape)
    return ((cases.mix(seed, index) % span).astype(int) + low).astype(dtype)


def assert_equal(got, want, what):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.array_equal(got, want), f"{what}: want {want}, got {got}"


def _assert_layer(backend, ids, local, columns, capacity=None, dtype=np.float32):
    """Runs one layer on both sides; returns y, the gradients and plan fields."""
    ids = np.asarray(ids, np.int32)
    ranks, tokens, top_k = ids.shape
    x, dy = (integers((ranks, tokens, columns), -2, 2, s, dtype) for s in (1, 2))
    weights = integers((ranks, tokens, top_k), 1, 2, 3, dtype)
    scale = integers((ranks, local), 1, 2, 4, dtype)
    right = oracle.plan(ids, ranks * local, capacity or ranks * tokens)
    kept = np.zeros((ranks, tokens, ranks), bool)
    for rank, sources in enumerate(right.sources):
        kept[sources[:, 0], sources[:, 1], rank] = True
    owner = np.where((ids >= 0) & (ids < ranks * local), ids // local, 0)
    kept = np.take_along_axis(kept, owner, axis=-1)
    comm = harness.communicator(backend, ranks)
    body = functools.partial(layer_and_gradients, capacity=capacity)
    found, plan = harness.run(body, comm, ids, x, weights, scale, dy)
    payloads.assert_same_trees(plan, right.fields, "plan")
    y, transpose = dense(
        ids, *(a.astype(np.float32) for a in (x, weights, scale)), kept
    )
    want = y, *transpose(dy.astype(np.float32))
    names = ("y", "dx", "dweights", "dscale")
    for name, got, value in zip(names, found, want):
        assert_equal(got, value, name)
    return dict(zip(names, found)), plan, {"x": x, "weights": weights, "scale": scale}


@harness.on_each_backend
def test_rows_dropped_in_a_short_buffer_add_nothing(backend):
    """Holes of a truncated buffer met full router weights: garbage, NaN.

    https://github.com/AI-Hypercomputer/maxtext/pull/4905
    """
    ids = np.full((2, 8, 2), 2)
    ids[..., 1] = 3
    out, plan, given = _assert_layer(
        backend, ids, 2, 128, capacity=6, dtype=ml_dtypes.bfloat16
    )
    assert plan["num_demand"].tolist() == [0, 16]
    assert plan["num_recv"].tolist() == [0, 6]
    assert plan["overflow"].tolist() == [False, True]
    for name in ("y", "dx", "dweights"):
        assert out[name][0, :6].astype(bool).any(), name
        assert not out[name][0, 6:].astype(bool).any(), name
        assert not out[name][1].astype(bool).any(), name
    gain = (given["weights"][0, :6] * given["scale"][1]).sum(-1, keepdims=True)
    assert_equal(out["y"][0, :6], given["x"][0, :6] * gain, "kept rows")


@harness.on_each_backend
def test_empty_slots_leave_weight_gradients_finite(backend):
    """dW = rows.T @ dy over all C slots: empty ones must hold 0 on both sides.

    https://github.com/NVIDIA/TransformerEngine/pull/3116
    """
    ids = cases.holes(2, 6, 2, 4).astype(np.int32)
    x = integers((2, 6, 8), -2, 2, 1)
    matrix = integers((2, 8, 8), -1, 1, 2)

    def body(comm, ids, x, matrix):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=4)

        def loss(matrix):
            rows = jax_ep.dispatch(x, plan)
            return (jax_ep.combine(rows @ matrix, plan) ** 2).sum() / 2

        return jax.grad(loss)(matrix)

    found = harness.run(body, harness.communicator(backend, 2), ids, x, matrix)
    owner = np.where(ids >= 0, ids // 2, -1)
    goes = np.stack([(owner == rank).any(-1) for rank in range(2)], -1)
    y = np.einsum("sth,rhj,str->stj", x, matrix, goes)
    assert_equal(found, np.einsum("sth,stj,str->rhj", x, y, goes), "dW")


@harness.on_each_backend
def test_a_hot_rank_tells_its_demand(backend):
    """Capacity below the worst case: the demand before drops is what to know.

    https://github.com/NVIDIA/TransformerEngine/pull/3277
    """
    ids = np.tile(np.int32([13, 14]), (4, 32, 1))
    out, plan, _ = _assert_layer(backend, ids, 4, 16, capacity=64)
    assert plan["num_demand"].tolist() == [0, 0, 0, 128]
    assert plan["num_recv"].tolist() == [0, 0, 0, 64]
    assert plan["overflow"].tolist() == [False, False, False, True]
    assert plan["recv_src"][3].tolist() == list(range(64))
    assert plan["expert_counts"][3].tolist() == [0, 64, 64, 0]
    for name in ("y", "dx", "dweights"):
        nonzero = out[name].astype(bool).any((1, 2))
        assert nonzero.tolist() == [True, True, False, False], name


@harness.on_each_backend
def test_ranks_without_tokens_take_part(backend):
    """Empty ranks returned early and their peers waited for ever.

    https://github.com/uccl-project/uccl/pull/940
    """
    ids = cases.strided(4, 5, 2, 16).astype(np.int32)
    ids[1:3] = -1
    ids[3, 2:] = -1
    x = payloads.numbers((4, 5, 256), ml_dtypes.bfloat16)
    program = harness.case_program(harness.communicator(backend, 4), 16, 20)
    right = oracle.plan(ids, 16, 20)
    y = payloads.poison_tail(
        payloads.numbers((4, 20, 256), ml_dtypes.bfloat16, 1),
        right.fields["num_recv"],
    )
    for _ in range(10):
        plan, received, combined = program(ids, x, y)
        payloads.assert_same_trees(plan, right.fields, "plan")
        payloads.assert_same_rows(received, right.dispatch(x), "dispatch", x)
        payloads.assert_same_rows(combined, right.combine(y), "combine")


@harness.on_each_backend
def test_minus_one_is_no_expert(backend):
    """-1 as an unsigned number indexed out of bounds.

    https://github.com/vllm-project/vllm/pull/20166
    """
    ids = [[[1, -1], [-1, 6], [-1, -1], [3, 4]], [[-1, 7], [0, -1], [5, 2], [-1, -1]]]
    out, plan, given = _assert_layer(backend, ids, 4, 8)
    assert plan["recv_counts"].tolist() == [[2, 2], [2, 2]]
    assert plan["expert_counts"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    missing = np.array(ids) < 0
    assert not out["dweights"][missing].any()
    assert not out["y"][[0, 1], [2, 3]].any()
    assert not out["dx"][[0, 1], [2, 3]].any()
    gain = given["weights"][0, 0, 0] * given["scale"][0, 1]
    assert_equal(out["y"][0, 0], given["x"][0, 0] * gain, "y[0, 0]")


@harness.on_each_backend
def test_a_duplicate_expert_counts_each_time(backend):
    """Duplicates stopped one library on the device, others gave odd results.

    https://github.com/vllm-project/vllm/pull/48740
    """
    expert = (np.arange(32).reshape(2, 16) * 5) % 8
    ids = np.stack([expert, expert], axis=-1)
    out, plan, given = _assert_layer(backend, ids, 4, 8)
    # One row a token; both of its choices count.
    assert plan["num_recv"].tolist() == [16, 16]
    assert plan["expert_counts"].tolist() == [[8] * 4, [8] * 4]
    scale = given["scale"].ravel()[expert][..., None]
    total = given["weights"].sum(-1, keepdims=True)
    assert_equal(out["y"], given["x"] * total * scale, "y")
    assert_equal(out["dweights"][..., 0], out["dweights"][..., 1], "dweights")


@pytest.mark.parametrize("experts", [32, 128])
@harness.on_each_backend
def test_width_2880(backend, experts):
    """A width in no template: padded by users, and unpadded wrongly.

    https://github.com/deepseek-ai/DeepEP/pull/458
    """
    ids = cases.strided(4, 17, 4, experts).astype(np.int32)
    x = cases.lattice(4, 17, 2880).astype(ml_dtypes.bfloat16)

    def body(comm, ids, x):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=experts)
        rows = jax_ep.dispatch(x, plan)
        return plan.num_recv, rows, jax_ep.combine(rows, plan)

    comm = harness.communicator(backend, 4)
    num_recv, rows, out = harness.run(body, comm, ids, x)
    assert rows.shape == (4, 68, 2880)
    right = oracle.plan(ids, experts, 68)
    payloads.assert_same_rows(rows, right.dispatch(x), "dispatch", x)
    payloads.assert_same_rows(out, right.combine(right.dispatch(x)), "combine")
    if experts == 32:
        assert num_recv.tolist() == [43, 38, 43, 46]
        received = [_crc(rows[rank, : num_recv[rank]]) for rank in range(2)]
        assert received == [3293783782, 2512224491]
        assert _crc(out[0]) == 1807184358


def _crc(rows):
    return zlib.crc32(np.ascontiguousarray(rows, np.float32).tobytes())


@harness.on_each_backend
def test_slices_start_where_earlier_ranks_end(backend):
    """Offsets of the receiver, not of the sender, put slices in wrong slots.

    https://github.com/marin-community/marin/pull/4867
    """
    sizes = np.array([[(i * 3 + j * 2) % 5 for j in range(4)] for i in range(4)])
    tokens = int(sizes.sum(1).max())
    ids = np.full((4, tokens, 1), -1, np.int32)
    for rank, row in enumerate(sizes):
        # Descending, so that the order is not the destinations' order.
        ids[rank, : row.sum(), 0] = np.repeat(np.arange(4), row)[::-1]
    x = payloads.payload((4, tokens, 3), np.int32)
    program = harness.case_program(harness.communicator(backend, 4), 4, 4 * tokens)
    y = np.zeros((4, 4 * tokens, 3), np.float32)
    plan, received, _ = program(ids, x, y)
    assert plan["recv_counts"].tolist() == sizes.T.tolist()
    for source, rank in np.ndindex(4, 4):
        start = sizes[:source, rank].sum()
        mine = x[source][ids[source, :, 0] == rank]
        got = received[rank, start : start + len(mine)]
        assert np.array_equal(got, mine), f"from rank {source} to {rank}"


@pytest.mark.parametrize("style", ["unrolled", "scan", "checkpoint"])
@harness.on_each_backend
def test_layers_keep_their_own_routing(backend, style):
    """A handle cached by call site made all layers share one routing.

    https://github.com/NVIDIA/TransformerEngine/pull/3036
    """
    ranks, layers, tokens, top_k, columns, local = 2, 4, 10, 2, 6, 4
    rules = (cases.uniform, cases.duplicates, cases.holes, cases.log_normal)
    ids = np.stack(
        [rule(ranks, tokens, top_k, ranks * local) for rule in rules], axis=1
    ).astype(np.int32)
    x, dy = (integers((ranks, tokens, columns), -1, 1, s) for s in (5, 6))
    weights = integers((ranks, layers, tokens, top_k), 1, 2, 7)
    scale = integers((ranks, layers, local), 1, 2, 8)

    def body(comm, ids, x, weights, scale, dy):
        def one(x, args):
            ids, weights, scale = args
            return layer(comm, ids, x, weights, scale), None

        def network(x, weights, scale):
            if style == "scan":
                return lax.scan(one, x, (ids, weights, scale))[0]
            step = jax.checkpoint(one) if style == "checkpoint" else one
            for number in range(layers):
                x, _ = step(x, (ids[number], weights[number], scale[number]))
            return x

        y, transpose = jax.vjp(network, x, weights, scale)
        return (y, *transpose(dy))

    comm = harness.communicator(backend, ranks)
    found = harness.run(body, comm, ids, x, weights, scale, dy)
    y, transposes = x, []
    for number in range(layers):
        y, transpose = dense(ids[:, number], y, weights[:, number], scale[:, number])
        transposes.append(transpose)
    dx, dweights, dscale = dy, [], []
    for transpose in reversed(transposes):
        dx, dw, ds = transpose(dx)
        dweights.insert(0, dw)
        dscale.insert(0, ds)
    want = y, dx, np.stack(dweights, 1), np.stack(dscale, 1)
    for name, got, value in zip(("y", "dx", "dweights", "dscale"), found, want):
        assert np.abs(value).max() < 2**24  # exact in float32
        assert_equal(got, value, name)


@harness.on_each_backend
def test_an_independent_psum_beside_every_dispatch(backend):
    """Two collectives at once, in one program: neither may wait for the other.

    https://github.com/deepseek-ai/DeepEP/issues/496
    """
    steps = 1000 if harness.ON_GPU else 200
    ids = cases.uniform(2, 8, 2, 4).astype(np.int32)
    x = payloads.payload((2, 8, 5), np.int32)
    matrix = integers((2, 16, 16), 0, 3, 9)

    def body(comm, ids, x, matrix):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=4)

        def step(carry, number):
            shift = number.astype(matrix.dtype)
            total = lax.psum(matrix @ matrix + shift, comm.axis_name)
            received = jax_ep.dispatch(x + number, plan)
            return carry, (received.sum(0), total[0])

        return lax.scan(step, None, jnp.arange(steps))[1]

    received, total = harness.run(
        body, harness.communicator(backend, 2), ids, x, matrix
    )
    right = oracle.plan(ids, 4, 16)
    number = np.arange(steps, dtype=np.int32)[None, :, None]
    count = right.fields["num_recv"][:, None, None]
    want = right.dispatch(x).sum(1, dtype=np.int32)[:, None] + number * count
    assert np.array_equal(received, want.astype(np.int32))
    assert_equal(
        total, (matrix @ matrix).sum(0)[0] + 2 * number + 0 * received[:, :, :1], "psum"
    )


@harness.on_each_backend
def test_no_address_is_remembered(backend):
    """Buffers move from run to run: other allocations come and go between.

    https://github.com/openxla/xla/pull/46029
    """
    case = next(case for case in cases.CASES if case.name == "holes")
    routing = case.routing(2)
    ids, experts = routing.topk_idx, routing.num_experts
    comm = harness.communicator(backend, 2)
    program = harness.case_program(comm, experts, routing.capacity)
    right = oracle.plan(ids, experts, routing.capacity)
    tokens = ids.shape[1]
    held = []
    for run in range(100):
        x = payloads.payload((2, tokens, 9), np.int16, run)
        y = payloads.numbers((2, routing.capacity, 9), np.float32, run)
        placed = program.put(ids, x, y)
        results = program.launch(placed)
        size = 1 + int(cases.mix(run) % np.uint64(50000))
        held.append(program.put(np.full((2, size), np.nan, np.float32))[0])
        if run % 3 == 2:
            held.pop(int(cases.mix(run, 1) % np.uint64(len(held)))).delete()
        _, received, combined = harness.fetch(results)
        payloads.assert_same_rows(received, right.dispatch(x), f"run {run}", x)
        payloads.assert_same_rows(combined, right.combine(y), f"run {run}")


@harness.on_each_backend
def test_first_use_of_a_communicator_is_inside_a_loop(backend):
    """Set-up at the first call came too late: that call was being captured.

    https://github.com/sgl-project/sglang/pull/39078
    """
    ids = cases.uniform(2, 6, 2, 4).astype(np.int32)
    x = payloads.payload((2, 3, 6, 4), np.int32)

    def body(comm, ids, x):
        def step(carry, x):
            plan = jax_ep.make_plan(ids, comm=comm, num_experts=4)
            return carry, jax_ep.dispatch(x, plan)

        return lax.scan(step, None, x)[1]

    with jax_ep.Communicator(harness.mesh(2), "ep", backend=backend) as comm:
        found = harness.run(body, comm, ids, x)
    right = oracle.plan(ids, 4, 12)
    for step in range(3):
        sent = x[:, step]
        payloads.assert_same_rows(found[:, step], right.dispatch(sent), str(step), sent)
