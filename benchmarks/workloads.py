"""What is measured: sizes, routing, and the rows that follow from them.

Everything here is NumPy on the host. The routing is worked out a second time,
independently of jax_ep, so that results and byte counts have another source.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

ROUTINGS = ("uniform", "skewed", "one-rank")
# Names on the command line -> dtypes that JAX knows.
DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "float8": "float8_e4m3fn",
}
_ITEMSIZE = {"bf16": 2, "f16": 2, "f32": 4, "float8": 1}
# A dtype that combine can sum.
SUMMABLE = ("bf16", "f16", "f32")


@dataclasses.dataclass(frozen=True)
class Workload:
    """One batch of tokens on every rank and where its rows go.

    Attributes:
      num_tokens, hidden, top_k, num_experts, num_ranks: T, H, K, E, R.
      routing: one of ROUTINGS.
      dtype: a key of DTYPES.
      capacity: "full" (R * T, jax_ep's default), "fit" (what the fullest rank
        receives, rounded up to 128 rows) or a number of rows.
      seed: of the routing and of the rows.
    """

    num_tokens: int
    hidden: int
    top_k: int
    num_experts: int
    num_ranks: int
    routing: str = "uniform"
    dtype: str = "bf16"
    capacity: str | int = "full"
    seed: int = 0

    def __str__(self) -> str:
        return (
            f"T={self.num_tokens} H={self.hidden} K={self.top_k} "
            f"E={self.num_experts} R={self.num_ranks} {self.routing} {self.dtype}"
        )

    @property
    def row_bytes(self) -> int:
        return self.hidden * _ITEMSIZE[self.dtype]

    @property
    def local_experts(self) -> int:
        return -(-self.num_experts // self.num_ranks)

    @functools.cached_property
    def topk_idx(self) -> np.ndarray:
        """i32[R, T, K]: the experts of each rank's tokens, all distinct."""
        rng = np.random.default_rng(self.seed)
        rows = self.num_ranks * self.num_tokens
        if self.routing == "one-rank":
            choices = min(self.local_experts, self.num_experts)
        else:
            choices = self.num_experts
        taken = min(self.top_k, choices)
        idx = np.full((rows, self.top_k), -1, np.int32)
        if self.routing != "skewed" and taken * taken <= 2 * choices:
            idx[:, :taken] = _distinct(rng, rows, taken, choices)
            return idx.reshape(self.num_ranks, self.num_tokens, self.top_k)
        # Expert e is as popular as 1 / (rank among a shuffled order + 1).
        bias = np.zeros(choices, np.float32)
        if self.routing == "skewed":
            bias = -np.log1p(rng.permutation(choices).astype(np.float32))
        for start in range(0, rows, 16384):
            stop = min(start + 16384, rows)
            # Gumbel noise on the logits draws without replacement.
            noise = rng.gumbel(size=(stop - start, choices)).astype(np.float32)
            score = bias + noise
            top = np.argpartition(-score, taken - 1, axis=1)[:, :taken]
            idx[start:stop, :taken] = top
        return idx.reshape(self.num_ranks, self.num_tokens, self.top_k)

    @functools.cached_property
    def sent(self) -> np.ndarray:
        """bool[R, T, R]: token t of source s goes to rank r."""
        owner = np.where(self.topk_idx >= 0, self.topk_idx // self.local_experts, -1)
        return np.stack(
            [(owner == r).any(axis=2) for r in range(self.num_ranks)], axis=2
        )

    @functools.cached_property
    def demand(self) -> np.ndarray:
        """i64[R, R]: rows from source s for rank r, before any drop."""
        return self.sent.sum(axis=1)

    @functools.cached_property
    def num_slots(self) -> int:
        """C, the rows of a receive buffer."""
        if self.capacity == "full":
            return max(1, self.num_ranks * self.num_tokens)
        if self.capacity == "fit":
            return max(128, -(-int(self.demand.sum(axis=0).max()) // 128) * 128)
        return int(self.capacity)

    @functools.cached_property
    def slots(self) -> np.ndarray:
        """i32[R, T, R]: where token t of source s lies on rank r, or -1."""
        flat = self.sent.reshape(-1, self.num_ranks)
        slot = np.cumsum(flat, axis=0, dtype=np.int64) - 1
        slot = np.where(flat & (slot < self.num_slots), slot, -1)
        return slot.reshape(self.sent.shape).astype(np.int32)

    @functools.cached_property
    def recv_src(self) -> np.ndarray:
        """i32[R, C]: source rank * T + token of each slot of each rank, or -1."""
        out = np.full((self.num_ranks, self.num_slots), -1, np.int32)
        flat = self.slots.reshape(-1, self.num_ranks)
        for r in range(self.num_ranks):
            kept = np.flatnonzero(flat[:, r] >= 0)
            out[r, flat[kept, r]] = kept
        return out

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """i64[R, R]: rows from source s that rank r keeps."""
        return (self.slots >= 0).sum(axis=1)

    @property
    def wire_rows(self) -> int:
        """Rows that the busiest rank sends to or receives from other ranks."""
        remote = self.counts * ~np.eye(self.num_ranks, dtype=bool)
        return int(max(remote.sum(axis=0).max(), remote.sum(axis=1).max()))

    @property
    def logical_rows(self) -> int:
        """Rows that the busiest rank sends or receives, its own included."""
        return int(max(self.counts.sum(axis=0).max(), self.counts.sum(axis=1).max()))

    @property
    def local_rows(self) -> int:
        """Most rows that stay on a rank."""
        return int(np.diagonal(self.counts).max())

    @property
    def local_bytes(self) -> int:
        return self.local_rows * self.row_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all ranks' rows together, local ones included."""
        return int(self.counts.sum()) * self.row_bytes

    @property
    def wire_bytes(self) -> int:
        return self.wire_rows * self.row_bytes

    @property
    def logical_bytes(self) -> int:
        return self.logical_rows * self.row_bytes

    @property
    def filled(self) -> float:
        """The part of all receive buffers that holds rows; the rest is zeros."""
        return int(self.counts.sum()) / (self.num_ranks * self.num_slots)

    def as_dict(self) -> dict:
        """The sizes, for a record."""
        return {
            **dataclasses.asdict(self),
            "capacity": self.num_slots,
            "row_bytes": self.row_bytes,
            "wire_bytes": self.wire_bytes,
            "logical_bytes": self.logical_bytes,
            "local_bytes": self.local_bytes,
            "filled": round(self.filled, 4),
        }


def _distinct(rng, rows: int, taken: int, choices: int) -> np.ndarray:
    """i32[rows, taken], distinct in each row: rows with repeats are drawn again."""
    idx = rng.integers(choices, size=(rows, taken), dtype=np.int32)
    again = np.arange(rows)
    while again.size:
        ordered = np.sort(idx[again], axis=1)
        again = again[(ordered[:, 1:] == ordered[:, :-1]).any(axis=1)]
        idx[again] = rng.integers(choices, size=(again.size, taken), dtype=np.int32)
    return idx


def workload_a(num_ranks: int) -> Workload:
    """A layer of a large model: what GPUs are measured with."""
    return Workload(4096, 7168, 8, 256, num_ranks)


def workload_cpu(num_ranks: int) -> Workload:
    """The same shape in small, for virtual CPU devices."""
    return Workload(512, 1024, 4, 64, num_ranks)


_SWEEP_GPU: dict[str, tuple[Any, ...]] = {
    "num_tokens": (128, 512, 1024, 4096, 8192, 32768, 65536),
    "hidden": (2048, 2880, 4096, 7168),
    "top_k": (1, 2, 4, 8),
    "routing": ("skewed", "one-rank"),
    "dtype": ("f32", "float8"),
}
_SWEEP_CPU: dict[str, tuple[Any, ...]] = {
    "num_tokens": (16, 128, 512, 2048),
    "hidden": (256, 720, 1024, 2048),
    "top_k": (1, 2, 4, 8),
    "routing": ("skewed", "one-rank"),
    "dtype": ("f32", "float8"),
}


def sweep(base: Workload, on_gpu: bool) -> list[Workload]:
    """`base`, then one size changed at a time."""
    points = [base]
    for field, values in (_SWEEP_GPU if on_gpu else _SWEEP_CPU).items():
        points += [
            dataclasses.replace(base, **{field: value})
            for value in values
            if value != getattr(base, field)
        ]
    return points
