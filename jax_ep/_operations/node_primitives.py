"""The JAX primitives ep_node_dispatch, ep_node_combine and ep_node_exchange.

Dispatch and combine where rows cross between nodes: over the rail to the rank with
the same local index, and from there inside the node. The rules are those of
ep_dispatch and ep_combine, the lowering is theirs one after the other. Like
primitives.py, the only file that knows these targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir

from jax_ep._data.ranks import collective_axes
from jax_ep._data.sizes import row_bytes
from jax_ep._operations import primitives
from jax_ep._operations.primitive_rules import (
    batch_rows,
    bind_rows,
    define,
    integers_jvp,
    make_varying,
    varying,
)

if TYPE_CHECKING:
    from jax_ep._data.plan import Plan
    from jax_ep._data.ranks import Ranks

# Routing operands: those of ep_dispatch inside the node, then Crossing's.
_NUM_ROUTING = primitives.NUM_ROUTING + 3


def dispatch(leaves: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Binds ep_node_dispatch: leaves [T, ...] -> [C, ...]."""
    return _bind_leaves(node_dispatch_p, leaves, plan, plan.capacity)


def combine(leaves: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Binds ep_node_combine: leaves [C, ...] -> [T, ...]."""
    return _bind_leaves(node_combine_p, leaves, plan, plan.num_tokens)


def _bind_leaves(primitive, leaves, plan, num_rows) -> list[jax.Array]:
    crossing = plan._crossing
    routing, leaves = primitives.varying_operands(
        leaves, plan, (crossing.places, crossing.sends, crossing.arrivals)
    )
    return bind_rows(
        leaves,
        num_rows,
        lambda batch: primitive.bind(*routing, *batch, **primitives.sizes(plan)),
    )


def exchange(rows: jax.Array, comm: Ranks, axes: frozenset[str]) -> jax.Array:
    """Binds ep_node_exchange: [(N - 1) * n, ...] to and from the other nodes.

    Block d - 1 of n rows goes to the d-th node after this one, in circles, and what
    comes back in its place is from the d-th before; all on one rail.
    """
    (result,) = node_exchange_p.bind(make_varying(rows, axes), comm=comm)
    return result


# Lowering --------------------------------------------------------------------


def _exchange_over_rail(rows, *, comm: Ranks):
    """ep_node_exchange by ep_dispatch: every row to one node."""
    num_rows = rows.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    distance = row // (num_rows // (comm.num_nodes - 1)) + 1
    node = lax.axis_index(collective_axes(comm)) // comm.node_size
    routes = jnp.stack([(node + distance) % comm.num_nodes, row], axis=-1)
    axes = varying(rows)
    return primitives.dispatch_p.bind(
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


def _dispatch_in_steps(*operands, comm, **sizes):
    leaves = operands[_NUM_ROUTING:]
    rail, node = _two_steps(operands[:_NUM_ROUTING], comm, sizes)
    for routing, params in (rail, node):
        leaves = primitives.dispatch_p.bind(*routing, *leaves, **params)
    return leaves


def _combine_in_steps(*operands, comm, **sizes):
    leaves = operands[_NUM_ROUTING:]
    rail, node = _two_steps(operands[:_NUM_ROUTING], comm, sizes)
    for routing, params in (node, rail):
        leaves = primitives.combine_p.bind(*routing, *leaves, **params)
    return leaves


def _lowering(in_steps, native):
    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any):
        if params["comm"].backend == "cuda":
            return native(ctx, *operands, **params)

        def steps(*operands):
            return in_steps(*operands, **params)

        return mlir.lower_fun(steps, multiple_results=True)(ctx, *operands)

    return rule


# On GPUs: one call, whose rows cross in chunks. A block for another node is cut into
# as many chunks as are at least this large, but not into more than that.
_MIN_CHUNK_BYTES = 4 << 20
_MAX_CHUNKS = 8
# Chunks that have a place in staging memory, unless num_channels says so; and the
# most of them: kMaxInFlight in cc/node_moves.h.
_IN_FLIGHT = 3
_MOST_IN_FLIGHT = 8
_PLACES, _SENDS, _ARRIVALS = range(primitives.NUM_ROUTING, _NUM_ROUTING)


def chunks(comm: Ranks, block: int, row_bytes: int) -> tuple[int, int]:
    """(rows of a chunk, chunks in flight) where a node gets `block` rows."""
    count = min(max(1, block * row_bytes // _MIN_CHUNK_BYTES), _MAX_CHUNKS, block)
    rows = -(-block // count)
    crossing = -(-block // rows) * (comm.num_nodes - 1)
    return rows, min(comm._num_channels or _IN_FLIGHT, crossing, _MOST_IN_FLIGHT)


def _native_rows(op: str, index: int):
    """Lowers an operation whose 4th operand is the routing operand `index`."""
    keep = [0, 1, _ARRIVALS, index]

    def rule(ctx, *operands, comm, num_tokens, **_):
        taken = [*keep, *range(_NUM_ROUTING, len(operands))]
        leaves = ctx.avals_in[_NUM_ROUTING:]
        num_wire_rows = ctx.avals_in[0].shape[0]
        sizes = list(map(row_bytes, leaves))
        block = (num_wire_rows - num_tokens) // (comm.num_nodes - 1)
        chunk_rows, in_flight = chunks(comm, block, sum(sizes))
        staged = in_flight * chunk_rows
        rows = 2 * staged if op == "dispatch" else num_wire_rows + staged
        staging = [
            jax.core.ShapedArray((rows * size,), np.dtype(np.uint8)) for size in sizes
        ]
        results = primitives.communicator_call(
            ctx,
            f"jax_ep_node_{op}",
            [operands[i] for i in taken],
            [ctx.avals_in[i] for i in taken],
            [*ctx.avals_out, *staging],
            comm._node,
            rail=comm._rail.id,
            slot="rows",
            chunk_rows=chunk_rows,
            in_flight=in_flight,
        )
        return results[: len(leaves)]

    return rule


def _native_exchange(ctx, rows, *, comm):
    return primitives.communicator_call(
        ctx, "jax_ep_node_exchange", [rows], ctx.avals_in, ctx.avals_out, comm._rail
    )


# Definitions -----------------------------------------------------------------
# Not cacheable: every call gets channels of its own.

node_dispatch_p = primitives.define_rows(
    "ep_node_dispatch",
    lambda p: p["capacity"],
    _lowering(_dispatch_in_steps, _native_rows("dispatch", _SENDS)),
    lambda: node_combine_p,
    num_routing=_NUM_ROUTING,
    sums=False,
)
node_combine_p = primitives.define_rows(
    "ep_node_combine",
    lambda p: p["num_tokens"],
    _lowering(_combine_in_steps, _native_rows("combine", _PLACES)),
    lambda: node_dispatch_p,
    num_routing=_NUM_ROUTING,
    sums=True,
)
node_exchange_p = define(
    "ep_node_exchange",
    lambda rows, **_: [rows.update(weak_type=False)],
    _lowering(_exchange_over_rail, _native_exchange),
    cacheable=False,
)
ad.primitive_jvps[node_exchange_p] = lambda *args, **params: integers_jvp(
    node_exchange_p, *args, **params
)
batching.primitive_batchers[node_exchange_p] = lambda *args, **params: batch_rows(
    node_exchange_p, 0, *args, **params
)
