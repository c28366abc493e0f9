"""The low-latency operations against the oracle, on every backend."""

from __future__ import annotations

import functools

import cases
import harness
import jax
import jax.numpy as jnp
import low_latency_oracle
import ml_dtypes
import numpy as np
import payloads
import pytest

import jax_ep

LAYOUTS = ("expert", "rank")
on_each_layout = pytest.mark.parametrize("layout", LAYOUTS)
# 17 units of 16 bytes, two blocks of columns with a scale each.
HIDDEN = 136


@functools.cache
def buffer(backend, ranks, max_tokens, experts, hidden=HIDDEN, dtype="bfloat16"):
    """One buffer for each of these, kept for all tests."""
    return jax_ep.LowLatencyBuffer(
        harness.communicator(backend, ranks),
        max_tokens=max_tokens,
        hidden=hidden,
        num_experts=experts,
        dtype=dtype,
    )


@functools.cache
def pair_program(over, layout, weighted=False, quantize=None):
    """(ids, x, weights, y) -> what dispatch returns, and combine(y)."""

    def body(comm, ids, x, weights, y):
        del comm
        rows, who, handle = jax_ep.low_latency_dispatch(
            x,
            ids,
            buffer=over,
            layout=layout,
            quantize=quantize,
            topk_weights=weights if weighted else None,
        )
        out = jax_ep.low_latency_combine(
            y, weights if layout == "expert" else None, handle
        )
        return rows, who, out

    return harness.Program(body, over.comm)


def used_rows(right, layout):
    """bool, the received rows that something came to."""
    ones = np.ones(right.ids.shape[:2], bool)
    return right.dispatch(ones, layout, False)


def numbers_of(right, layout, hidden, dtype):
    """y: numbers in the rows that something came to, NaN in the others."""
    used = used_rows(right, layout)
    y = payloads.numbers((*used.shape, hidden), dtype)
    y[~used] = np.nan
    return y


def assert_rows(got, right, x, layout, what):
    """Rows that something came to are x's; the others may be anything."""
    used = used_rows(right, layout)
    want = right.dispatch(x, layout, 0)
    assert got.shape == want.shape, what
    got = np.where(used.reshape(*used.shape, *[1] * (x.ndim - 2)), got, want)
    ranks = len(x)
    payloads.assert_same_rows(
        got.reshape(ranks, -1, *x.shape[2:]),
        want.reshape(ranks, -1, *x.shape[2:]),
        what,
        x,
    )


def assert_who(who, right, layout, weights=None):
    if layout == "expert":
        np.testing.assert_array_equal(who, right.counts)
        return
    if weights is not None:
        who, theirs = who
        want = np.where(right.local >= 0, weights[None], 0).astype(np.float32)
        np.testing.assert_array_equal(theirs, right.in_slots(want, 0))
    np.testing.assert_array_equal(who, right.in_slots(right.local, -1))


def check(backend, ids, experts, layout, *, hidden=HIDDEN, dtype="bfloat16", spare=3):
    """Runs a dispatch and a combine and compares them."""
    ranks, tokens, top_k = ids.shape
    dtype = jnp.dtype(dtype)
    over = buffer(backend, ranks, tokens + spare, experts, hidden, dtype.name)
    right = low_latency_oracle.oracle(ids, experts, tokens + spare)
    x = payloads.payload((ranks, tokens, hidden), dtype)
    weights = payloads.numbers((ranks, tokens, top_k), np.float32, seed=5)
    y = numbers_of(right, layout, hidden, dtype)
    weighted = layout == "rank"
    rows, who, out = pair_program(over, layout, weighted)(ids, x, weights, y)
    assert_rows(rows, right, x, layout, f"{layout} rows")
    assert_who(who, right, layout, weights if weighted else None)
    want = right.combine(y, weights, layout)
    if over.backend == "xla" and layout == "expert":
        # XLA may contract a product and a sum.
        np.testing.assert_allclose(
            out.astype(np.float32),
            want.astype(np.float32),
            rtol=2 * float(jnp.finfo(dtype).eps),
            atol=1e-2 if dtype.itemsize == 2 else 1e-3,
        )
    else:
        payloads.assert_same_sums(out, want, f"{layout} sums")


@on_each_layout
@harness.on_each_combination
def test_every_case(backend, case, ranks, layout):
    routing = case.routing(ranks)
    if routing.topk_idx.shape[1] > 200:
        pytest.skip("a large T is what the other operations are for")
    check(backend, routing.topk_idx, routing.num_experts, layout)
