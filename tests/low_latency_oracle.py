"""What the low-latency operations have to give, in NumPy, for all ranks at once."""

from __future__ import annotations

import dataclasses

import numpy as np
import payloads


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The right result for one routing.

    Attributes:
      ids: [R, T, K].
      experts: E.
      max_tokens: of the buffer.
      local: [R, R, T, K], by receiver and source: local expert ids or -1.
      counts: [R, L], rows of each rank's experts.
      places: [R, R, T, K], by receiver and source: the row's index in [L *
        R * max_tokens], or -1.
    """

    ids: np.ndarray
    experts: int
    max_tokens: int
    local: np.ndarray
    counts: np.ndarray
    places: np.ndarray

    def dispatch(self, x: np.ndarray, layout: str, blank) -> np.ndarray:
        """[R, T, ...] -> the received rows of all ranks; `blank` where none came."""
        ranks, local = len(x), self.counts.shape[1]
        height = ranks * self.max_tokens
        shape = (local * height,) if layout == "expert" else (height,)
        out = np.full((ranks, *shape, *x.shape[2:]), blank, x.dtype)
        for rank, source, token in np.argwhere((self.local >= 0).any(-1)):
            if layout == "expert":
                at = self.places[rank, source, token]
                out[rank, at[at >= 0]] = x[source, token]
            else:
                out[rank, source * self.max_tokens + token] = x[source, token]
        rows = (local, height) if layout == "expert" else (ranks, self.max_tokens)
        return out.reshape(ranks, *rows, *x.shape[2:])

    def in_slots(self, by_rank: np.ndarray, blank) -> np.ndarray:
        """[R, R, T, K] -> [R, R, max_tokens, K]."""
        ranks, _, tokens, top_k = by_rank.shape
        out = np.full((ranks, ranks, self.max_tokens, top_k), blank, by_rank.dtype)
        out[:, :, :tokens] = by_rank
        return out

    def combine(
        self, y: np.ndarray, weights: np.ndarray | None, layout: str
    ) -> np.ndarray:
        """The received rows of all ranks -> [R, T, H].

        Sums from the first term on, in float32: over a rank's experts in the order
        of k, then rounded, then over ranks.
        """
        ranks, tokens, _ = self.ids.shape
        hidden = y.shape[-1]
        flat = y.reshape(ranks, -1, hidden)
        out = np.zeros((ranks, tokens, hidden), y.dtype)
        with np.errstate(all="ignore"):
            for source, token in np.ndindex(ranks, tokens):
                terms = []
                for rank in range(ranks):
                    here = np.flatnonzero(self.local[rank, source, token] >= 0)
                    if len(here) == 0:
                        continue
                    if layout == "rank":
                        terms.append(flat[rank, source * self.max_tokens + token])
                        continue
                    at = self.places[rank, source, token]
                    scaled = [
                        np.float32(weights[source, token, k])
                        * flat[rank, at[k]].astype(np.float32)
                        for k in here
                    ]
                    terms.append(_sum(scaled).astype(y.dtype))
                if terms:
                    wide = _sum([term.astype(np.float32) for term in terms])
                    out[source, token] = wide.astype(y.dtype)
        return out


def _sum(terms: list[np.ndarray]) -> np.ndarray:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def oracle(topk_idx: np.ndarray, experts: int, max_tokens: int) -> Oracle:
    """The right result for expert ids [R, T, K]."""
    ranks, tokens, top_k = topk_idx.shape
    count = -(-experts // ranks)
    ids = topk_idx.astype(np.int64)
    owner = np.where((ids >= 0) & (ids < experts), ids // count, -1)
    local = np.stack([np.where(owner == r, ids - r * count, -1) for r in range(ranks)])
    counts = np.zeros((ranks, count), np.int32)
    places = np.full((ranks, ranks, tokens, top_k), -1, np.int32)
    for rank, source, token in np.ndindex(ranks, ranks, tokens):
        mine: dict[int, int] = {}
        for k, expert in enumerate(local[rank, source, token].tolist()):
            if expert < 0:
                continue
            if expert not in mine:
                mine[expert] = expert * ranks * max_tokens + counts[rank, expert].item()
                counts[rank, expert] += 1
            places[rank, source, token, k] = mine[expert]
    return Oracle(topk_idx, experts, max_tokens, local.astype(np.int32), counts, places)


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


def assert_who(who, right, layout, weights=None):
    if layout == "expert":
        np.testing.assert_array_equal(who, right.counts)
        return
    if weights is not None:
        who, theirs = who
        want = np.where(right.local >= 0, weights[None], 0).astype(np.float32)
        np.testing.assert_array_equal(theirs, right.in_slots(want, 0))
    np.testing.assert_array_equal(who, right.in_slots(right.local, -1))
