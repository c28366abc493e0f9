"""dispatch against the oracle: rows are equal bit for bit, whatever they hold."""

import cases
import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import payloads

import jax_ep

_SMALL_FLOATS = (
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn",
)
_INTEGERS = ("int2", "int4", "int8", "int16", "int32")
DTYPES = (
    "bool",
    *_INTEGERS,
    *(f"u{name}" for name in _INTEGERS),
    *_SMALL_FLOATS,
    "bfloat16",
    "float16",
    "float32",
    "complex64",
)
DTYPES_X64 = ("int64", "uint64", "float64", "complex128", "int32", "bfloat16")

# Bytes a row: around 16 (a vector load), a warp's 512, and model widths.
ROW_BYTES = (
    *(1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65),
    *(127, 128, 129, 511, 512, 513, 528, 1000, 2047, 2049, 4096, 5760, 6001),
)


def _assert_tree_arrives(backend, x, ranks=None, capacity=None):
    """Dispatches a pytree [R, T, ...] in one call, with holes in the routing."""
    ranks = ranks or harness.few_ranks()
    x = jax.tree.map(lambda make: make(ranks), x)
    tokens = jax.tree.leaves(x)[0].shape[1]
    experts = 3 * ranks - 1
    ids = cases.holes(ranks, tokens, 3, experts).astype(np.int32)
    capacity = capacity or ranks * tokens

    def body(comm, topk_idx, x):
        plan = jax_ep.make_plan(
            topk_idx, comm=comm, num_experts=experts, capacity=capacity
        )
        return jax_ep.dispatch(x, plan)

    found = harness.run(body, harness.communicator(backend, ranks), ids, x)
    right = oracle.plan(ids, experts, capacity)
    assert jax.tree.structure(found) == jax.tree.structure(x)
    paths, _ = jax.tree.flatten_with_path(x)
    for (path, sent), got in zip(paths, jax.tree.leaves(found), strict=True):
        name = f"{jax.tree_util.keystr(path)} {sent.dtype}{sent.shape}"
        payloads.assert_same_rows(got, right.dispatch(sent), name, sent)


def _leaf(dtype, *trailing, tokens=11, seed=0):
    return lambda ranks: payloads.payload(
        (ranks, tokens, *trailing), jnp.dtype(dtype), seed
    )


@harness.on_each_backend
def test_every_dtype_in_one_call(backend):
    _assert_tree_arrives(backend, {name: _leaf(name, 5) for name in DTYPES})


@harness.on_each_backend
def test_every_64_bit_dtype(backend):
    with jax.enable_x64(True):
        leaves = {name: _leaf(name, 5) for name in DTYPES_X64}
        _assert_tree_arrives(backend, leaves)


@harness.on_each_backend
def test_every_row_size_in_one_call(backend):
    leaves = {str(size): _leaf("uint8", size) for size in ROW_BYTES}
    _assert_tree_arrives(backend, leaves, capacity=20)


@harness.on_each_backend
def test_trees_and_trailing_shapes(backend):
    _assert_tree_arrives(
        backend,
        {
            "scalar": _leaf("float32"),
            "nested": [
                _leaf("bfloat16", 2, 3, seed=1),
                (_leaf("int8", 1, 1, 5, seed=2), None),
            ],
            "empty rows": _leaf("float32", 0),
            "empty inside": _leaf("int32", 3, 0, 2),
            "again": _leaf("float32", seed=3),
        },
    )


@harness.on_each_backend
def test_a_tree_without_leaves(backend):
    comm = harness.communicator(backend, 2)

    def body(comm, topk_idx):
        plan = jax_ep.make_plan(topk_idx, comm=comm, num_experts=4)
        nothing = {"a": [], "b": None}
        assert jax_ep.dispatch(nothing, plan) == nothing
        assert jax_ep.combine(nothing, plan) == nothing
        return plan.num_recv

    ids = np.zeros((2, 3, 1), np.int32)
    assert harness.run(body, comm, ids).tolist() == [6, 0]


@harness.on_each_backend
def test_one_leaf_sent_twice(backend):
    """The same array as two leaves, and as the operand of two calls."""
    comm = harness.communicator(backend, 2)
    ids = cases.duplicates(2, 6, 2, 5).astype(np.int32)
    x = payloads.payload((2, 6, 3), ml_dtypes.bfloat16)

    def body(comm, topk_idx, x):
        plan = jax_ep.make_plan(topk_idx, comm=comm, num_experts=5)
        return jax_ep.dispatch((x, x), plan), jax_ep.dispatch(x, plan)

    (first, second), third = harness.run(body, comm, ids, x)
    right = oracle.plan(ids, 5, 12).dispatch(x)
    for number, got in enumerate((first, second, third)):
        payloads.assert_same_rows(got, right, f"result {number}", x)
