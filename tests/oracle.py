"""NumPy reference of the plan, dispatch and combine, for all ranks at once.

Written from the documented semantics alone; shares no code with the library.
Arrays are stacked over ranks: x is [R, T, ...], received rows [R, C, ...].
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The right plan of one routing.

    Attributes:
      fields: the public array fields of jax_ep.Plan by name, [R, ...] each.
      sources: for each rank the int[n, 2] (source rank, token) of its rows.
      tokens: T.
      capacity: C.
    """

    fields: dict[str, np.ndarray]
    sources: tuple[np.ndarray, ...]
    tokens: int
    capacity: int

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
        float64, components of complex numbers alike), rounds once to even.
        """
        wide = np.promote_types(y.dtype, np.float32)
        total = np.zeros((self.ranks, self.tokens, *y.shape[2:]), wide)
        begun = np.zeros((self.ranks, self.tokens), bool)
        with np.errstate(all="ignore"):
            for rank, sources in enumerate(self.sources):
                source, token = sources.T
                rows = y[rank, : len(sources)].astype(wide)
                # A token sends one row at most to a rank: no pair repeats.
                sums = total[source, token] + rows
                again = begun[source, token].reshape(-1, *[1] * (y.ndim - 2))
                total[source, token] = np.where(again, sums, rows)
                begun[source, token] = True
            return total.astype(y.dtype)


def plan(
    topk_idx: np.ndarray,
    num_experts: int,
    capacity: int,
    expert_alignment: int = 1,
) -> Oracle:
    """The right plan for expert ids [R, T, K] of any integer dtype."""
    ranks, tokens, top_k = topk_idx.shape
    local = -(-num_experts // ranks)
    valid = (topk_idx >= 0) & (topk_idx < num_experts)
    ids = np.where(valid, topk_idx, 0).astype(np.int64)
    owner = np.where(valid, ids // local, -1)
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
    return Oracle(fields, tuple(all_sources), tokens, capacity)
