"""Plan: who sends which row where, as a pytree of integer arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax

from jax_ep._data import sizes
from jax_ep._data.ranks import Ranks
from jax_ep._data.sizes import Defaults


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Crossing:
    """How this rank's rows reach nodes.

    Attributes:
      places: i32[T, min(K, N)], each token's wire rows, where they arrive, in the
        order of nodes; -1 where there is none.
      sends: i32[(N - 1) * Tn], the token of each row that leaves, in blocks for the
        nodes after this one; -1 where there is none.
      arrivals: i32[C], which wire row stands in each slot: source rank * T + its
        number in its block, so that it grows; -1 where the slot is empty.
    """

    places: jax.Array
    sends: jax.Array
    arrivals: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The routing of one batch of tokens, made by `make_plan`.

    A plan is a pytree of int32 arrays (one bool) plus static sizes. It crosses
    jit, scan, remat and cond, can be donated and saved, and is the only place
    where routing lives. Shapes are per shard: T tokens, K top-k, R ranks,
    C capacity, L = ceil(num_experts / R) experts a rank.

    Attributes:
      num_recv: i32[], rows in this rank's buffer: min(num_demand, C).
      num_demand: i32[], rows addressed to this rank, before any drop.
      overflow: bool[], num_demand > C: rows were dropped at their senders.
      recv_counts: i32[R], rows kept from each source rank.
      recv_topk_idx: i32[C, K], local expert ids of each row, -1 where the
        k-th choice lives elsewhere or the slot is empty, or where a drop_order or an
        expert_limit dropped it.
      recv_src: i32[C], source rank * T + token, -1 where the slot is empty.
      expert_counts: i32[L], (row, k) pairs of each local expert among the
        rows kept; a duplicate id counts each time.
      group_sizes: i32[L], expert_counts rounded up to expert_alignment: the
        rows of each expert in the result of `permute`. With an expert_capacity
        that cannot hold them all, what fits of each group.
      expert_demand: i32[], expert rows that were wanted of the rows kept, pads
        included.
      expert_overflow: bool[], expert rows were dropped: expert_demand > S, or more
        pairs than drop_order and expert_limit leave.
      expert_demand_counts: i32[L], (token, k) pairs of all ranks that name each local
        expert, before any drop. Where rows can be dropped, with a capacity below
        R * T or a node_capacity below T, reading it costs a reduce-scatter of a number
        for each expert; else it is expert_counts.
      dropped_pairs: i32[], how many of these pairs found no slot or no place and
        contribute 0. Costs the same.
      node_demand: i32[], the most rows that this rank had for one other node.
      node_overflow: bool[], node_demand > node_capacity: rows were dropped before
        they crossed, which no field of their receivers counts.
      comm: the Communicator that the plan belongs to.
      num_experts, num_tokens, top_k, capacity, expert_alignment: the sizes.
      expert_capacity: S, rows in the result of `permute`.
      node_capacity: rows that a rank can send to another node.
      defaults: which of the three capacities nobody chose.
      tokens: "split" or "replicated", see `make_plan`. Where they are replicated a slot
        is a token: those in use are those with recv_src >= 0, not the first num_recv.
    """

    num_recv: jax.Array
    num_demand: jax.Array
    overflow: jax.Array
    recv_counts: jax.Array
    recv_topk_idx: jax.Array
    recv_src: jax.Array
    expert_counts: jax.Array
    group_sizes: jax.Array
    expert_demand: jax.Array
    expert_overflow: jax.Array
    expert_demand_counts: jax.Array
    dropped_pairs: jax.Array
    node_demand: jax.Array
    node_overflow: jax.Array
    # i32[T, min(K, R), 2]: (rank, slot) of every row that this rank sends, in
    # rank order; (-1, -1) where there is none. The whole inverse map: combine
    # exchanges no metadata. With several nodes, of wire rows: see node_plan.py.
    _routes: jax.Array
    _crossing: Crossing | None
    comm: Ranks = dataclasses.field(metadata={"static": True})
    num_experts: int = dataclasses.field(metadata={"static": True})
    num_tokens: int = dataclasses.field(metadata={"static": True})
    top_k: int = dataclasses.field(metadata={"static": True})
    capacity: int = dataclasses.field(metadata={"static": True})
    expert_alignment: int = dataclasses.field(metadata={"static": True})
    expert_capacity: int = dataclasses.field(metadata={"static": True})
    node_capacity: int = dataclasses.field(metadata={"static": True})
    defaults: Defaults = dataclasses.field(metadata={"static": True})
    tokens: Literal["split", "replicated"] = dataclasses.field(
        metadata={"static": True}
    )

    def describe(self, tree: Any = ()) -> dict[str, Any]:
        """The plan's sizes, and what they come to in bytes, as a dict.

        Static numbers only, so it works while JAX traces.

        Args:
          tree: a pytree of arrays [T, ...] or [C, ...], or of their shapes
            (jax.ShapeDtypeStruct), to tell bytes of.

        Returns:
          "num_ranks", "num_tokens", "top_k", "num_experts", "num_local_experts",
          "capacity" (C), "expert_capacity" (S), "expert_alignment", "node_capacity";
          "defaults", the capacities that nobody chose, a list of names; and
          "leaves", by the path of each leaf (jax.tree_util.keystr) a dict of bytes:
          "row_bytes" of one row; and on each rank "receive_bytes" of what `dispatch`
          returns, C * row_bytes; "expert_bytes" of what `permute` returns and `moe`
          hands to its expert_fn, S * row_bytes; and with several nodes "wire_bytes"
          of what waits between them, (T + (N - 1) * node_capacity) * row_bytes.
        """
        return sizes.describe(self, tree)

    def __repr__(self) -> str:
        return (
            f"Plan(num_tokens={self.num_tokens}, top_k={self.top_k}, "
            f"num_experts={self.num_experts}, capacity={self.capacity}, "
            f"expert_alignment={self.expert_alignment}, "
            f"expert_capacity={self.expert_capacity}, "
            f"node_capacity={self.node_capacity}, comm={self.comm!r})"
        )
