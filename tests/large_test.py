"""Buffers of more than 2**31 elements: offsets need 64 bits all the way."""

import harness
import jax.numpy as jnp
import pytest
from jax import lax

import jax_ep

TOKENS, COLUMNS = 65536, 16392  # x 2 ranks: 2**31 + 1,048,576 elements


def wrong_elements(backend, tokens, columns):
    """Sends every token to every rank and back; counts what is not right."""
    ranks = min(2, harness.most_ranks())
    comm = harness.communicator(backend, ranks)

    def value(rank, token, column):
        return ((token * 37 + rank * 11 + column * 5) % 61).astype(jnp.bfloat16)

    def body(comm, nothing):
        rank = lax.axis_index(comm.axis_name)
        token = jnp.arange(tokens)[:, None]
        column = jnp.arange(columns)[None]
        ids = jnp.broadcast_to(jnp.arange(ranks) + nothing, (tokens, ranks))
        plan = jax_ep.make_plan(
            ids, comm=comm, num_experts=ranks, capacity=ranks * tokens
        )
        rows = jax_ep.dispatch(value(rank, token, column), plan)
        slot = jnp.arange(ranks * tokens)[:, None]
        right = value(slot // tokens, slot % tokens, column)
        # Small integers: their sums are exact.
        sums = jax_ep.combine(rows + rank.astype(rows.dtype), plan)
        total = value(rank, token, column) * ranks + sum(range(ranks))
        return (rows != right).sum(), (sums != total).sum()

    zero = jnp.zeros((ranks,), jnp.int32)
    return [int(wrong.sum()) for wrong in harness.run(body, comm, zero)]


@pytest.mark.gpu
@harness.on_each_backend
def test_more_than_2_to_the_31_elements(backend):
    if harness.most_ranks() < 2:
        pytest.skip("needs 2 GPUs, or the buffer is too small to tell")
    assert wrong_elements(backend, TOKENS, COLUMNS) == [0, 0]
