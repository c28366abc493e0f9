"""NumPy reference of permute and unpermute, for all ranks at once.

Written from the documented semantics alone; shares no code with the library.
Arrays are stacked over ranks: rows [R, C, ...], expert rows [R, S, ...].
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class ExpertOracle:
    """The right places of one plan.

    Attributes:
      places: int32[R, C, K], the expert row of each (row, k), or -1.
      group_sizes: int32[R, L].
      demand: int32[R], expert rows before any drop, pads included.
      overflow: bool[R].
      capacity: S.
    """

    places: np.ndarray
    group_sizes: np.ndarray
    demand: np.ndarray
    overflow: np.ndarray
    capacity: int

    def permute(self, x: np.ndarray) -> np.ndarray:
        """[R, C, ...] -> [R, S, ...], bit for bit."""
        out = np.zeros((len(x), self.capacity, *x.shape[2:]), x.dtype)
        for rank, row, k in np.argwhere(self.places >= 0):
            out[rank, self.places[rank, row, k]] = x[rank, row]
        return out

    def permute_weighted(self, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """What stands in a place is weights[c, k] * x[c]: unpermute's transpose."""
        wide = np.promote_types(x.dtype, np.float32)
        out = np.zeros((len(x), self.capacity, *x.shape[2:]), x.dtype)
        for rank, row, k in np.argwhere(self.places >= 0):
            scaled = weights[rank, row, k].astype(wide) * x[rank, row].astype(wide)
            out[rank, self.places[rank, row, k]] = scaled.astype(x.dtype)
        return out

    def unpermute(self, y: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """[R, S, ...] -> [R, C, ...]; products and sums round in float32."""
        wide = np.promote_types(y.dtype, np.float32)
        ranks, rows, top_k = self.places.shape
        total = np.zeros((ranks, rows, *y.shape[2:]), wide)
        begun = np.zeros((ranks, rows), bool)
        with np.errstate(all="ignore"):
            for k in range(top_k):
                for rank in range(ranks):
                    (here,) = np.nonzero(self.places[rank, :, k] >= 0)
                    term = y[rank, self.places[rank, here, k]].astype(wide)
                    if weights is not None:
                        scale = weights[rank, here, k].astype(wide)
                        term = term * scale.reshape(-1, *[1] * (y.ndim - 2))
                    old = total[rank, here]
                    again = begun[rank, here].reshape(-1, *[1] * (y.ndim - 2))
                    total[rank, here] = np.where(again, old + term, term)
                    begun[rank, here] = True
            return total.astype(y.dtype)

    def row_dots(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """float64[R, C, K]: <x[c], y[place of (c, k)]>, 0 where there is none."""
        dots = np.zeros(self.places.shape)
        for rank, row, k in np.argwhere(self.places >= 0):
            other = y[rank, self.places[rank, row, k]].astype(np.float64)
            dots[rank, row, k] = (x[rank, row].astype(np.float64) * other).sum()
        return dots

    def poison_empty(self, y: np.ndarray) -> np.ndarray:
        """[R, S, ...] with NaN where no pair stands."""
        y = y.copy()
        for rank in range(len(y)):
            used = np.zeros(self.capacity, bool)
            used[self.places[rank][self.places[rank] >= 0]] = True
            y[rank, ~used] = np.nan
        return y


def worst_case(rows: int, top_k: int, local: int, alignment: int) -> int:
    """S where nothing can be dropped: for min(C, R * T) rows."""
    pairs = max(1, rows) * top_k
    return (pairs + min(local, pairs) * (alignment - 1)) // alignment * alignment


def expert_plan(
    recv_topk_idx: np.ndarray, local: int, alignment: int, capacity: int
) -> ExpertOracle:
    """The right places for local expert ids [R, C, K], -1 for none."""
    places = np.full(recv_topk_idx.shape, -1, np.int32)
    sizes = np.zeros((len(recv_topk_idx), local), np.int32)
    demand = []
    for rank, ids in enumerate(recv_topk_idx):
        start = 0
        for expert in range(local):
            pairs = np.argwhere(ids == expert)  # in the order of (slot, k)
            for i, (row, k) in enumerate(pairs):
                if start + i < capacity:
                    places[rank, row, k] = start + i
            end = start + -(-len(pairs) // alignment) * alignment
            sizes[rank, expert] = min(end, capacity) - min(start, capacity)
            start = end
        demand.append(start)
    demand = np.array(demand, np.int32)
    return ExpertOracle(places, sizes, demand, demand > capacity, capacity)
