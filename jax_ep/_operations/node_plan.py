"""The plan of a communicator with several nodes, from expert ids to routes.

Where rows stand on their way, for each rank:

    wire rows   [W, ...], W = T + (N - 1) * Tn, Tn = node_capacity. First the rank's
                own T tokens, whether or not they stay on the node; then a block of
                Tn rows from each other node, that of the node d before this one
                (node - d mod N) d-th, rows in the order of their tokens. What is not
                filled holds anything and has no route.
    routes      of wire rows to the ranks of the node: as in a plan of one node
    crossing    of tokens to wire rows of this rank's rail: the d-th block holds, for
                the rank d nodes on, what stands in its d-th block

So a row is numbered where it arrives, sizes are fixed, and a rank sends to all
other nodes alike: blocks of Tn rows. Ids travel as rows do, over the rail and then
to every rank of the node; then all is counting, the same on all ranks of a node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep._data.plan import Crossing
from jax_ep._data.ranks import collective_axes
from jax_ep._operations import node_exchanges, xla_backend
from jax_ep._operations.arrays import id_counts, make_varying, rank_axes, varying
from jax_ep._operations.operation import bind

if TYPE_CHECKING:
    from jax_ep._data.ranks import Ranks

# Ranks that a row of ep_dispatch can go to: lanes of a warp.
_MAX_ROUTES = 32


def plan(
    topk_idx: jax.Array,
    *,
    comm: Ranks,
    num_experts: int,
    capacity: int,
    expert_alignment: int,
    node_capacity: int,
) -> tuple[dict[str, jax.Array], Crossing]:
    """Plan's array fields by name, and how rows cross."""
    num_tokens, top_k = topk_idx.shape
    axes = varying(topk_idx) | rank_axes(comm)
    layout = _Wire(comm, num_tokens, node_capacity)
    node, local = divmod(lax.axis_index(collective_axes(comm)), comm.node_size)
    valid = (topk_idx >= 0) & (topk_idx < num_experts)
    ids = jnp.where(valid, topk_idx, -1)
    local_experts = -(-num_experts // comm.num_ranks)

    places, sends, demand = _crossing(ids, local_experts, node, layout)
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    mine = jnp.concatenate([ids, tokens], axis=1)
    departing = xla_backend._take_rows(mine, sends, -1)
    arrived = node_exchanges.exchange(departing, comm, axes)
    rows = jnp.concatenate([mine, arrived])
    rows = _gather_in_node(rows, comm, local, axes)  # [L, W, K + 1]

    found = _Arrivals(rows, local_experts, node, local, layout, capacity)
    num_demand = found.counts.sum(dtype=jnp.int32)
    expert_counts = id_counts(found.topk_idx, local_experts)
    fields = {
        "_routes": found.routes(min(top_k, comm.node_size)),
        "num_recv": jnp.minimum(num_demand, capacity),
        "num_demand": num_demand,
        "overflow": num_demand > capacity,
        "recv_counts": found.kept_counts,
        "recv_topk_idx": found.topk_idx,
        "recv_src": found.src,
        "expert_counts": expert_counts,
        "group_sizes": -(-expert_counts // expert_alignment) * expert_alignment,
        "node_demand": demand,
        "node_overflow": demand > node_capacity,
    }
    return fields, Crossing(places, sends, found.wire_rows)


class _Wire:
    """Where blocks of wire rows begin and end.

    Attributes:
      num_nodes: N.
      node_size: L.
      num_tokens: T.
      node_capacity: Tn.
      num_rows: W.
      begins, ends: int[N], of the blocks by distance; numbers while JAX traces.
      block: int[W], each wire row's block.
    """

    def __init__(self, comm: Ranks, num_tokens: int, node_capacity: int):
        self.num_nodes = comm.num_nodes
        self.node_size = comm.node_size
        self.num_tokens = num_tokens
        self.node_capacity = node_capacity
        sizes = [num_tokens] + [node_capacity] * (comm.num_nodes - 1)
        self.ends = np.cumsum(sizes)
        self.begins = self.ends - sizes
        self.num_rows = int(self.ends[-1])
        self.block = np.repeat(np.arange(comm.num_nodes), sizes)


def _crossing(
    ids: jax.Array, local_experts: int, node: jax.Array, layout: _Wire
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Places and sends, and the most rows that one other node wants of this rank."""
    nodes = jnp.arange(layout.num_nodes, dtype=jnp.int32)[None]
    target = jnp.where(ids >= 0, ids // (local_experts * layout.node_size), -1)
    sent = xla_backend._named(target, layout.num_nodes)  # [T, N]
    index = jnp.cumsum(sent, axis=0, dtype=jnp.int32) - 1
    token = jnp.arange(layout.num_tokens, dtype=jnp.int32)[:, None]
    own = nodes == node
    kept = sent & (own | (index < layout.node_capacity))
    departure = ((nodes - node) % layout.num_nodes - 1) * layout.node_capacity + index
    routes = xla_backend._routes(
        sent,
        kept,
        jnp.where(own, token, layout.num_tokens + departure),
        0,
        layout.num_tokens,
        min(ids.shape[1], layout.num_nodes),
    )
    num_sends = layout.num_rows - layout.num_tokens
    sends = (
        jnp.full((num_sends,), -1, jnp.int32)
        .at[jnp.where(kept & ~own, departure, num_sends)]
        .set(jnp.broadcast_to(token, sent.shape), mode="drop")
    )
    demand = jnp.where(own, 0, sent.sum(axis=0, dtype=jnp.int32)[None]).max()
    return routes[..., 1], sends, demand


def _gather_in_node(
    rows: jax.Array, comm: Ranks, local: jax.Array, axes: frozenset[str]
) -> jax.Array:
    """[L, W, ...]: the wire rows of all ranks of the node, by local index."""
    num_rows, size = rows.shape[0], comm.node_size
    width = min(size, _MAX_ROUTES)
    copies = -(-size // width)  # of the rows, each for `width` ranks
    targets = jnp.arange(copies * width, dtype=jnp.int32).reshape(copies, 1, width)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    slots = jnp.broadcast_to(
        (local * num_rows + row)[:, None], (copies, num_rows, width)
    )
    routes = jnp.stack([jnp.broadcast_to(targets, slots.shape), slots], axis=-1)
    routes = jnp.where((targets < size)[..., None], routes, -1)
    sources = jnp.arange(size, dtype=jnp.int32)[:, None] * copies + local // width
    operands = (
        routes.reshape(copies * num_rows, width, 2),
        jnp.full((), size * num_rows, jnp.int32),
        (sources * num_rows + row[None]).ravel(),
        jnp.tile(rows, (copies, *(1,) * (rows.ndim - 1))),
    )
    (gathered,) = bind(
        "ep_dispatch",
        *(make_varying(a, axes) for a in operands),
        comm=comm._node,
        num_tokens=copies * num_rows,
        capacity=size * num_rows,
    )
    return gathered.reshape(size, num_rows, *rows.shape[1:])


class _Arrivals:
    """What all ranks of the node make of their wire rows, seen from one of them.

    Attributes:
      counts: i32[N * L], rows for this rank by source rank, before any drop.
      kept_counts: the same, of rows that have a slot.
      src: as Plan.recv_src.
      wire_rows: as Crossing.arrivals.
      topk_idx: as Plan.recv_topk_idx.
    """

    def __init__(self, rows, local_experts, node, local, layout, capacity):
        size, num_nodes = layout.node_size, layout.num_nodes
        # From global ids to the node's, and to ranks; `size` is nobody.
        ids = rows[..., :-1] - node * size * local_experts
        inside = (rows[..., :-1] >= 0) & (ids >= 0) & (ids < size * local_experts)
        owner = jnp.where(inside, ids // local_experts, size)
        sent = xla_backend._named(owner, size)  # [L, W, L]
        before = jnp.cumsum(sent, axis=1, dtype=jnp.int32) - sent.astype(jnp.int32)
        at_begin = before[:, layout.begins]  # [L, N, L]
        last = layout.ends - 1
        counts = before[:, last] + sent[:, last].astype(jnp.int32) - at_begin
        # Blocks lie by distance, slots by source node: each is its own inverse.
        distance = (node - jnp.arange(num_nodes, dtype=jnp.int32)) % num_nodes
        by_source = counts[:, distance].swapaxes(0, 1).reshape(num_nodes * size, size)
        begins = jnp.cumsum(by_source, axis=0, dtype=jnp.int32) - by_source
        first = begins.reshape(num_nodes, size, size)[distance].swapaxes(0, 1)
        slot = before + (first - at_begin)[:, layout.block]
        kept = sent & (slot < capacity)

        def of(array, index, axis):
            return lax.dynamic_index_in_dim(array, index, axis, keepdims=False)

        self._sent, self._kept, self._slot = (
            of(array, local, 0) for array in (sent, kept, slot)
        )
        self.counts = of(by_source, local, 1)
        self.kept_counts = jnp.clip(capacity - of(begins, local, 1), 0, self.counts)
        arrival = (
            jnp.full((capacity,), -1, jnp.int32)
            .at[jnp.where(of(kept, local, 2), of(slot, local, 2), capacity).ravel()]
            .set(jnp.arange(size * layout.num_rows, dtype=jnp.int32), mode="drop")
        )
        ranks = jnp.arange(size, dtype=jnp.int32)[:, None]
        source_node = distance[layout.block][None]
        source = (source_node * size + ranks) * layout.num_tokens  # [L, W]
        number = np.arange(layout.num_rows) - layout.begins[layout.block]
        self.src, self.wire_rows = (
            xla_backend._take_rows((source + token).ravel(), arrival, -1)
            for token in (rows[..., -1], jnp.asarray(number, jnp.int32)[None])
        )
        here = jnp.where(owner == local, ids - local * local_experts, -1)
        self.topk_idx = xla_backend._take_rows(
            here.reshape(size * layout.num_rows, -1), arrival, -1
        )

    def routes(self, width: int) -> jax.Array:
        """i32[W, width, 2]: (local rank, slot) of this rank's wire rows."""
        return xla_backend._routes(
            self._sent, self._kept, self._slot, 0, self._sent.shape[0], width
        )
