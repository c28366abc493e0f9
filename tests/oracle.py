"""NumPy reference of the plan, dispatch and combine, for all ranks at once.

Written from the documented semantics alone; shares no code with the library.
Arrays are stacked over ranks: x is [R, T, ...], received rows [R, C, ...].
"""

from __future__ import annotations

import dataclasses

import numpy as np

# Ranks of a node in communicators with several of them; conftest.py sets it.
NODE_SIZE: int | None = None


def node_size(ranks: int) -> int:
    """Ranks of a node where the tests cut `ranks` into nodes, else all."""
    cut = NODE_SIZE is not None and ranks % NODE_SIZE == 0
    return NODE_SIZE if cut else ranks


def cut(ranks: int, backend: str) -> dict[str, int]:
    """Communicator's arguments for that; none where there is one node."""
    size = node_size(ranks)
    return {} if size == ranks or backend == "xla" else {"node_size": size}


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The right plan of one routing.

    Attributes:
      fields: the public array fields of jax_ep.Plan by name, [R, ...] each.
      sources: for each rank the int[n, 2] (source rank, token) of its rows.
      tokens: T.
      capacity: C.
      crosses: bool[R, T, N], whether a token's row reaches a node.
      node_demand: as in jax_ep.Plan, [R].
    """

    fields: dict[str, np.ndarray]
    sources: tuple[np.ndarray, ...]
    tokens: int
    capacity: int
    crosses: np.ndarray
    node_demand: np.ndarray

    @property
    def ranks(self) -> int:
        """R."""
        return len(self.sources)

    def dispatch(self, x: np.ndarray) -> np.ndarray:
        """[R, T, ...] -> [R, C, ...], bit for bit."""
        out = np.zeros((self.ranks, self.capacity, *x.shape[2:]), x.dtype)
        for rank, sources in enumerate(self.sources):
            out[rank, : len(sources)] = x[sources[:, 0], sources[:, 1]]
        return out

    def combine(self, y: np.ndarray) -> np.ndarray:
        """[R, C, ...] -> [R, T, ...].

        Sums in rank order from the first term on, in float32 (float64 for
        float64, components of complex numbers alike), rounds once to even. With
        several nodes so over the ranks of a node, and then over nodes.
        """
        num_nodes = self.crosses.shape[2]
        size = self.ranks // num_nodes
        wide = np.promote_types(y.dtype, np.float32)
        shape = (self.ranks, self.tokens, *y.shape[2:])
        total, begun = np.zeros(shape, wide), np.zeros(shape[:2], bool)
        with np.errstate(all="ignore"):
            for node in range(num_nodes):
                of_node, reached = np.zeros(shape, wide), np.zeros(shape[:2], bool)
                for rank in range(node * size, (node + 1) * size):
                    source, token = self.sources[rank].T
                    rows = y[rank, : len(source)].astype(wide)
                    # A token sends one row at most to a rank: no pair repeats.
                    _add(of_node, reached, (source, token), rows)
                # Where no rank had room for a row that came, its node adds 0.
                crossed = np.nonzero(self.crosses[:, :, node])
                if num_nodes > 1:
                    of_node = of_node.astype(y.dtype).astype(wide)
                _add(total, begun, crossed, of_node[crossed])
            return total.astype(y.dtype)


def _add(total, begun, where, rows) -> None:
    """Adds rows; the first one as it is, for -0.0 and NaN."""
    again = begun[where].reshape(-1, *[1] * (rows.ndim - 1))
    total[where] = np.where(again, total[where] + rows, rows)
    begun[where] = True


def plan(
    topk_idx: np.ndarray,
    num_experts: int,
    capacity: int,
    expert_alignment: int = 1,
    node_capacity: int | None = None,
) -> Oracle:
    """The right plan for expert ids [R, T, K] of any integer dtype."""
    ranks, tokens, top_k = topk_idx.shape
    local = -(-num_experts // ranks)
    valid = (topk_idx >= 0) & (topk_idx < num_experts)
    ids = np.where(valid, topk_idx, 0).astype(np.int64)
    owner = np.where(valid, ids // local, -1)
    size = node_size(ranks)
    node = np.where(valid, owner // size, -1)
    wanted = (node[..., None] == np.arange(ranks // size)).any(2)  # [R, T, N]
    crosses = wanted & (np.cumsum(wanted, axis=1) <= (node_capacity or tokens))
    own = np.arange(ranks) // size
    crosses[np.arange(ranks), :, own] = wanted[np.arange(ranks), :, own]
    # What does not cross is not known where it would have gone.
    lost = valid & ~np.take_along_axis(crosses, np.maximum(node, 0), axis=2)
    owner = np.where(lost, -1, owner)
    names = (
        "num_recv num_demand overflow recv_counts recv_topk_idx recv_src "
        "expert_counts group_sizes"
    ).split()
    columns: dict[str, list] = {name: [] for name in names}
    all_sources = []
    for rank in range(ranks):
        demand = np.argwhere((owner == rank).any(-1))
        sources = demand[:capacity]
        all_sources.append(sources)
        here = np.full((capacity, top_k), -1)
        picked = ids[sources[:, 0], sources[:, 1]]
        mine = owner[sources[:, 0], sources[:, 1]] == rank
        here[: len(sources)] = np.where(mine, picked - rank * local, -1)
        source = np.full(capacity, -1)
        source[: len(sources)] = sources[:, 0] * tokens + sources[:, 1]
        counts = np.bincount(here[here >= 0], minlength=local)
        groups = -(-counts // expert_alignment) * expert_alignment
        values = (
            len(sources),
            len(demand),
            len(demand) > capacity,
            np.bincount(sources[:, 0], minlength=ranks),
            here,
            source,
            counts,
            groups,
        )
        for name, value in zip(names, values, strict=True):
            columns[name].append(value)
    fields = {
        name: np.array(column, bool if name == "overflow" else np.int32)
        for name, column in columns.items()
    }
    others = wanted.copy()
    others[np.arange(ranks), :, own] = False
    node_demand = others.sum(1).max(-1).astype(np.int32)
    return Oracle(fields, tuple(all_sources), tokens, capacity, crosses, node_demand)
