"""Dispatch and combine where rows cross between nodes, and what plans exchange there.

Rows go over the rail to the rank with the same local index, and from there inside the
node. The reference is ep_dispatch and ep_combine, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep._data.limits import MAX_IN_FLIGHT
from jax_ep._data.ranks import collective_axes
from jax_ep._data.sizes import row_bytes
from jax_ep._operations import exchanges
from jax_ep._operations.arrays import bind_rows, make_varying, varying
from jax_ep._operations.operation import bind

if TYPE_CHECKING:
    from jax_ep._data.plan import Plan
    from jax_ep._data.ranks import Ranks

# Routing operands: those of ep_dispatch inside the node, then Crossing's.
ROUTING = (*exchanges.ROUTING, "places", "sends", "arrivals")


def dispatch(leaves: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Binds ep_node_dispatch: leaves [T, ...] -> [C, ...]."""
    return _bind_leaves("ep_node_dispatch", plan.capacity, leaves, plan)


def combine(leaves: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Binds ep_node_combine: leaves [C, ...] -> [T, ...]."""
    return _bind_leaves("ep_node_combine", plan.num_tokens, leaves, plan)


def _bind_leaves(name, num_rows, leaves, plan) -> list[jax.Array]:
    crossing = plan._crossing
    routing, leaves = exchanges.varying_operands(
        leaves, plan, (crossing.places, crossing.sends, crossing.arrivals)
    )
    return bind_rows(
        leaves,
        num_rows,
        lambda batch: bind(name, *routing, *batch, **exchanges.sizes(plan)),
    )


def exchange(rows: jax.Array, comm: Ranks, axes: frozenset[str]) -> jax.Array:
    """Binds ep_node_exchange: [(N - 1) * n, ...] to and from the other nodes.

    Block d - 1 of n rows goes to the d-th node after this one, in circles, and what
    comes back in its place is from the d-th before; all on one rail.
    """
    (result,) = bind("ep_node_exchange", make_varying(rows, axes), comm=comm)
    return result


# For the table ---------------------------------------------------------------


def exchange_reference(rows, *, comm: Ranks):
    """By ep_dispatch: every row to one node."""
    num_rows = rows.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    distance = row // (num_rows // (comm.num_nodes - 1)) + 1
    node = lax.axis_index(collective_axes(comm)) // comm.node_size
    routes = jnp.stack([(node + distance) % comm.num_nodes, row], axis=-1)
    axes = varying(rows)
    return bind(
        "ep_dispatch",
        make_varying(routes[:, None], axes),
        make_varying(jnp.full((), num_rows, jnp.int32), axes),
        make_varying(row, axes),
        rows,
        comm=comm._rail,
        num_tokens=num_rows,
        capacity=num_rows,
    )


def _two_steps(routing, comm, sizes):
    """Routing and sizes of the step over the rail and of that inside the node."""
    routes, num_recv, recv_src, places, sends, _ = routing
    num_tokens, num_wire_rows = sizes["num_tokens"], routes.shape[0]
    block = (num_wire_rows - num_tokens) // (comm.num_nodes - 1)
    distance = jnp.where(places < num_tokens, 0, (places - num_tokens) // block + 1)
    node = lax.axis_index(collective_axes(comm)) // comm.node_size
    node = jnp.where(places < 0, -1, (node + distance) % comm.num_nodes)
    full = jnp.full_like(num_recv, num_wire_rows)
    # Nothing reads sources on the CPU.
    rail = (
        (jnp.stack([node, places], axis=-1), full, sends),
        {
            "comm": comm._rail,
            "num_tokens": num_tokens,
            "capacity": num_wire_rows,
        },
    )
    node = (
        (routes, num_recv, recv_src),
        {
            "comm": comm._node,
            "num_tokens": num_wire_rows,
            "capacity": sizes["capacity"],
        },
    )
    return rail, node


def dispatch_reference(*operands, comm, **sizes):
    leaves = operands[len(ROUTING) :]
    for routing, params in _two_steps(operands[: len(ROUTING)], comm, sizes):
        leaves = bind("ep_dispatch", *routing, *leaves, **params)
    return leaves


def combine_reference(*operands, comm, **sizes):
    leaves = operands[len(ROUTING) :]
    for routing, params in reversed(_two_steps(operands[: len(ROUTING)], comm, sizes)):
        leaves = bind("ep_combine", *routing, *leaves, **params)
    return leaves


# On GPUs: one call, whose rows cross in chunks. A block for another node is cut into
# as many chunks as are at least this large, but not into more than that.
_MIN_CHUNK_BYTES = 4 << 20
_MAX_CHUNKS = 8
# Chunks that have a place in staging memory, unless num_channels says so; and the
# most of them: MAX_IN_FLIGHT.
_IN_FLIGHT = 3


def chunks(comm: Ranks, block: int, row_bytes: int) -> tuple[int, int]:
    """(rows of a chunk, chunks in flight) where a node gets `block` rows."""
    count = min(max(1, block * row_bytes // _MIN_CHUNK_BYTES), _MAX_CHUNKS, block)
    rows = -(-block // count)
    crossing = -(-block // rows) * (comm.num_nodes - 1)
    return rows, min(comm._num_channels or _IN_FLIGHT, crossing, MAX_IN_FLIGHT)


def _chunks(avals, comm, num_tokens) -> tuple[int, int]:
    """The same of a call."""
    block = (avals[0].shape[0] - num_tokens) // (comm.num_nodes - 1)
    return chunks(comm, block, sum(map(row_bytes, avals[len(ROUTING) :])))


def attributes(avals, params) -> dict[str, int]:
    comm = params["comm"]
    chunk_rows, in_flight = _chunks(avals, comm, params["num_tokens"])
    rail = comm._rail.id
    return {"rail": rail, "chunk_rows": chunk_rows, "in_flight": in_flight}


def staging(avals, params, wire: bool) -> list[Any]:
    """Of each leaf, for chunks in flight; twice, or once beside all rows that cross."""
    chunk_rows, in_flight = _chunks(avals, params["comm"], params["num_tokens"])
    staged = in_flight * chunk_rows
    rows = avals[0].shape[0] + staged if wire else 2 * staged
    return [
        jax.core.ShapedArray((rows * row_bytes(leaf),), np.dtype(np.uint8))
        for leaf in avals[len(ROUTING) :]
    ]
