"""combine against the oracle: sums are equal bit for bit."""

import cases
import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import payloads
import pytest

import jax_ep

DTYPES = ("bfloat16", "float16", "float32", "complex64")
DTYPES_X64 = ("float64", "complex128", "float32", "bfloat16")


def _combine(backend, ids, experts, y, capacity):
    """combine(y) on all ranks, and the oracle's plan."""

    def body(comm, topk_idx, y):
        plan = jax_ep.make_plan(
            topk_idx, comm=comm, num_experts=experts, capacity=capacity
        )
        return jax_ep.combine(y, plan)

    found = harness.run(body, harness.communicator(backend, len(ids)), ids, y)
    return found, oracle.plan(ids, experts, capacity)


def _assert_sums(backend, leaves, ranks):
    """Combines {name: (trailing shape, dtype)}; most tokens have all ranks."""
    experts, capacity = 2 * ranks, 10 * ranks
    ids = cases.holes(ranks, 9, experts, experts).astype(np.int32)
    right = oracle.plan(ids, experts, capacity)
    y = {
        name: payloads.poison_tail(
            payloads.numbers((ranks, capacity, *shape), jnp.dtype(dtype)),
            right.fields["num_recv"],
        )
        for name, (shape, dtype) in leaves.items()
    }
    found, right = _combine(backend, ids, experts, y, capacity)
    for name, sums in found.items():
        payloads.assert_same_rows(sums, right.combine(y[name]), name)


@harness.on_each_backend
def test_every_dtype_in_one_call(backend):
    _assert_sums(
        backend, {name: ((67,), name) for name in DTYPES}, harness.most_ranks()
    )


@harness.on_each_backend
def test_every_64_bit_dtype(backend):
    with jax.enable_x64(True):
        leaves = {name: ((19,), name) for name in DTYPES_X64}
        _assert_sums(backend, leaves, ranks=2)


@harness.on_each_backend
def test_trailing_shapes_and_row_sizes(backend):
    shapes = ((), (1,), (3,), (7,), (8,), (9,), (0,), (2, 5), (3, 1, 4), (515,))
    leaves = {f"bfloat16{shape}": (shape, "bfloat16") for shape in shapes}
    leaves |= {f"float32{shape}": (shape, "float32") for shape in shapes[:5]}
    _assert_sums(backend, leaves, ranks=2)


def _columns(dtype):
    """Per column what rank 0 and rank 1 give for one token; -0.0, inf, ..."""
    info = ml_dtypes.finfo(dtype)
    big, tiny = float(info.max), float(info.smallest_normal)
    inf, nan = np.inf, np.nan
    pairs = [
        (-0.0, -0.0),
        (-0.0, 0.0),
        (0.0, -0.0),
        (1.0, -1.0),
        (big, big),
        (-big, -big),
        (big, big * 2.0**-12),
        (inf, 1.0),
        (inf, -inf),
        (-inf, -inf),
        (nan, 1.0),
        (1.0, nan),
        (inf, nan),
        (big, -inf),
        (tiny, tiny),
        (tiny, -0.0),
    ]
    with np.errstate(over="ignore"):
        return np.array(pairs).T.astype(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@harness.on_each_backend
def test_zeros_infinities_and_nan(backend, dtype):
    """Token 0 goes to both ranks, 1 to rank 0, 2 to rank 1, 3 nowhere."""
    ids = np.array([[[0, 1], [0, -1], [-1, 1], [-1, -1]], [[-1, -1]] * 4])
    columns = _columns(jnp.dtype(dtype))
    y = np.full((2, 3, columns.shape[1]), np.nan, columns.dtype)
    y[:, 0] = columns  # token 0
    y[:, 1] = columns  # token 1 on rank 0, token 2 on rank 1
    found, right = _combine(backend, ids.astype(np.int32), 2, y, 3)
    want = right.combine(y)
    payloads.assert_same_sums(found, want, dtype)
    alone = payloads.as_bytes(found[0, 1:3])
    nan = np.isnan(columns)
    same = alone == payloads.as_bytes(columns)
    assert np.repeat(nan, columns.dtype.itemsize, axis=1)[~same].all()
    assert not payloads.as_bytes(found[0, 3:]).any()
    assert not payloads.as_bytes(found[1]).any()


@harness.on_each_backend
def test_sum_in_the_middle_may_exceed_the_dtype(backend):
    """float32 in between: 60000 + 60000 - 60000 is no infinity in float16."""
    ranks = min(3, harness.most_ranks())
    ids = np.full((ranks, 1, 3), -1, np.int32)
    ids[0, 0, :ranks] = np.arange(ranks)
    y = np.full((ranks, 1, 2), np.nan, np.float16)
    y[:, 0] = np.array([[6e4, -6e4], [6e4, -6e4], [-6e4, 6e4]])[:ranks]
    found, right = _combine(backend, ids, ranks, y, 1)
    payloads.assert_same_rows(found, right.combine(y), "float16")
    if ranks == 3:
        assert found[0, 0].tolist() == [np.float16(6e4), np.float16(-6e4)]


@pytest.mark.parametrize(
    ("dtype", "big", "small"),
    [
        ("bfloat16", 2.0**24, 1.0),
        ("float16", 2.0**15, 2.0**-9),
        ("float32", 2.0**24, 1.0),
    ],
)
@harness.on_each_backend
def test_sums_are_float32_in_the_order_of_the_ranks(backend, dtype, big, small):
    """big + small is big in float32: another order or a wider sum shows."""
    ranks = min(4, harness.most_ranks())
    ids = np.full((ranks, 1, 4), -1, np.int32)
    # The order of a token's choices does not matter.
    ids[-1, 0, :ranks] = np.arange(ranks)[::-1]
    columns = [[big, small, small, -big], [small, small, big, -big]]
    y = np.array(columns, jnp.dtype(dtype)).T[:ranks, None]
    found, right = _combine(backend, ids, ranks, y, 1)
    payloads.assert_same_rows(found, right.combine(y), dtype)
    if ranks == 4 and oracle.node_size(4) == 4:
        assert found[-1, 0].tolist() == [0.0, 2 * small]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@harness.on_each_backend
def test_subnormal_sums_are_what_xla_makes_of_them(backend, dtype):
    """XLA flushes them on the CPU and keeps them on GPUs; combine does the same."""
    ids = np.array([[[0, 1]], [[-1, -1]]], np.int32)
    tiny = float(ml_dtypes.finfo(jnp.dtype(dtype)).smallest_normal)
    terms = np.array([[0.5, 0.5, -0.25, 1.0, 1.5], [0.25, -0.5, -0.5, 1.0, -1.0]])
    y = (terms * tiny).astype(dtype)[:, None]
    found, _ = _combine(backend, ids, 2, y, 1)
    sums = jax.jit(lambda a, b: a.astype("float32") + b.astype("float32"))(*y[:, 0])
    want = np.asarray(sums).astype(y.dtype)
    payloads.assert_same_rows(found[:1, 0], want[None], dtype)


@harness.on_each_backend
def test_combine_of_dispatch_counts_destinations(backend):
    ranks = harness.few_ranks()
    ids = cases.holes(ranks, 12, 4, 2 * ranks).astype(np.int32)
    x = cases.lattice(ranks, 12, 40).astype(ml_dtypes.bfloat16)

    def body(comm, topk_idx, x):
        plan = jax_ep.make_plan(topk_idx, comm=comm, num_experts=2 * ranks)
        return jax_ep.combine(jax_ep.dispatch(x, plan), plan)

    found = harness.run(body, harness.communicator(backend, ranks), ids, x)
    owner = np.where(ids >= 0, ids // 2, -1)
    count = sum((owner == rank).any(-1) for rank in range(ranks))
    want = (x.astype(np.float32) * count[..., None]).astype(x.dtype)
    assert np.array_equal(found, want)
