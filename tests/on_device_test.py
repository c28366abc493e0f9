"""The checks that run on the devices: they agree with NumPy's and see faults."""

from __future__ import annotations

import harness
import jax.numpy as jnp
import numpy as np
import on_device
import oracle
import payloads
import pytest
from jax import lax

BACKEND = harness.BACKENDS[0]
STEPS = (0, 3, 5, 10, 16)  # spread, all to rank 0, odd ranks idle


def traffic(ranks, **kwargs):
    sizes = {"tokens": 21, "top_k": 3, "experts": 7, "columns": 9}
    return on_device.Traffic(ranks=ranks, **(sizes | kwargs))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("capacity", [None, 20])
@pytest.mark.parametrize("in_one", [False, True])
def test_agrees_with_the_oracle(ranks, capacity, in_one):
    some = traffic(ranks, capacity=capacity, in_one=in_one)
    comm = harness.communicator(BACKEND, ranks)
    program = harness.Program(some.exchange, comm)
    rank = np.arange(ranks)
    for step in STEPS:
        found = program(np.full(ranks, step, np.int32))
        ids = some.ids(step, rank, np).astype(np.int32)
        right = oracle.plan(ids, some.experts, some.slots)
        x = some.rows(step, rank[:, None], np.arange(some.tokens), np)
        received = right.dispatch(x)
        y = received + rank.astype(x.dtype)[:, None, None]
        payloads.assert_same_rows(found.received, received, f"step {step}", x)
        payloads.assert_same_rows(found.combined, right.combine(y), f"step {step}")
        payloads.assert_same_rows(
            found.source, right.fields["recv_src"], f"step {step}"
        )
        np.testing.assert_array_equal(found.wrong, 0)


def test_sees_one_wrong_bit():
    ranks = min(2, harness.most_ranks())
    some = traffic(ranks)

    def body(comm, step):
        rank = lax.axis_index(comm.axis_name)
        source, rows = some.received(step, rank)
        combined = some.combined(step, rank, tagged=True)
        bits = lax.bitcast_convert_type(rows, "uint16")
        return jnp.stack(
            [
                on_device.wrong_rows(source, source.at[3].add(1)),
                on_device.wrong_rows(
                    rows, lax.bitcast_convert_type(bits.at[4, 8].add(1), rows.dtype)
                ),
                # Rows of another step, of another rank.
                on_device.wrong_rows(combined, some.combined(step + 1, rank, True)),
                on_device.wrong_rows(
                    combined, some.combined(step, (rank + 1) % ranks, True)
                ),
            ]
        )

    comm = harness.communicator(BACKEND, ranks)
    wrong = harness.run(body, comm, np.zeros(ranks, np.int32))
    np.testing.assert_array_equal(wrong[:, :2], 1)
    # A token without a row is zero in both; chance makes no other pair equal.
    assert (wrong[:, 2] > some.tokens // 2).all()
    if ranks > 1:
        assert (wrong[:, 3] > some.tokens // 2).all()
