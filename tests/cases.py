"""Routing cases, once for every test: deterministic, the same on every host.

`CASES` is the table. A case is a rule; `case.routing(ranks)` makes its arrays
for so many ranks. Cases that share (tokens, top_k, experts, capacity) share
one compiled program, which is why most of them do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

RANKS = (1, 2, 3, 4, 8)

# No random generator: NumPy may change its streams, a test may not change.


def mix(*keys) -> np.ndarray:
    """Hashes integers (broadcast together) to uint64, splitmix64 a round."""
    state = np.asarray(0x9E3779B97F4A7C15, np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            state = state ^ np.asarray(key).astype(np.uint64)
            state = state + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


def unit(*keys) -> np.ndarray:
    """Hashes integers to float64 in (0, 1)."""
    return ((mix(*keys) >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53


def grid(*sizes: int) -> list[np.ndarray]:
    """Open index grids: grid(R, T)[0] is [R, 1], grid(R, T)[1] is [1, T]."""
    return list(np.ogrid[tuple(slice(size) for size in sizes)])


def lattice(ranks: int, tokens: int, columns: int) -> np.ndarray:
    """[R, T, H] float32 multiples of 1/32 up to 3: exact in 16 bits too."""
    rank, token, column = grid(ranks, tokens, columns)
    return (((rank * 100003 + token) * 37 + column * 11) % 193 - 96).astype(
        np.float32
    ) / 32


# Routing rules: (ranks, tokens, top_k, experts) -> int64[ranks, tokens, top_k]


def _top(scores: np.ndarray, top_k: int) -> np.ndarray:
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :top_k]
    missing = top_k - order.shape[-1]
    return np.pad(order, ((0, 0), (0, 0), (0, missing)), constant_values=-1)


def _scores(ranks, tokens, experts, seed=1) -> np.ndarray:
    return unit(seed, *grid(ranks, tokens, experts))


def uniform(ranks, tokens, top_k, experts):
    """Distinct experts, all equally likely; another seed is `uniform_at`."""
    return _top(_scores(ranks, tokens, experts), top_k)


def uniform_at(seed: int):
    """As `uniform`, from another seed."""

    def rule(ranks, tokens, top_k, experts):
        return _top(_scores(ranks, tokens, experts, seed), top_k)

    return rule


def log_normal(ranks, tokens, top_k, experts):
    """Distinct experts; their popularity is log-normal with sigma 1.5."""
    normal = unit(2, *grid(experts, 12)).sum(-1) - 6.0
    gumbel = -np.log(-np.log(_scores(ranks, tokens, experts, 3)))
    return _top(gumbel + 1.5 * normal, top_k)


def group_limited(ranks, tokens, top_k, experts):
    """Groups of four; the best two by their two best scores, then the top k."""
    scores = _scores(ranks, tokens, experts, 4)
    groups = scores.reshape(ranks, tokens, -1, 4)
    best = np.sort(groups, axis=-1)[..., -2:].sum(-1)
    chosen = np.argsort(-best, axis=-1, kind="stable")[..., :2]
    inside = (np.arange(groups.shape[2]) == chosen[..., None]).any(-2)
    return _top(np.where(inside[..., None], groups, -1.0).reshape(scores.shape), top_k)


def identity(ranks, tokens, top_k, experts):
    """Rank r uses its own experts only."""
    rank, token, k = grid(ranks, tokens, top_k)
    local = -(-experts // ranks)
    return rank * local + (token + k) % local


def round_robin(ranks, tokens, top_k, experts):
    """Expert after expert, in order."""
    rank, token, k = grid(ranks, tokens, top_k)
    return ((rank * tokens + token) * top_k + k) % experts


def one_rank(ranks, tokens, top_k, experts):
    """Every token to distinct experts of the last rank."""
    _, token, k = np.broadcast_arrays(*grid(ranks, tokens, top_k))
    local = -(-experts // ranks)
    return (ranks - 1) * local + (token + k) % local


def one_expert(ranks, tokens, top_k, experts):
    """Every token to one expert, its other choices empty."""
    idx = np.full((ranks, tokens, top_k), -1)
    idx[..., 0] = experts // 2
    return idx


def idle_sender(ranks, tokens, top_k, experts):
    """One rank has no token that goes anywhere."""
    idx = uniform(ranks, tokens, top_k, experts)
    idx[ranks // 2] = -1
    return idx


def idle_receiver(ranks, tokens, top_k, experts):
    """Nobody needs an expert of rank 0."""
    idx = uniform(ranks, tokens, top_k, experts)
    return np.where(idx < -(-experts // ranks), -1, idx)


def one_token_only(ranks, tokens, top_k, experts):
    """A single token in the whole mesh."""
    idx = np.full((ranks, tokens, top_k), -1)
    token = tokens // 2
    idx[-1, token] = uniform(ranks, tokens, top_k, experts)[-1, token]
    return idx


def holes(ranks, tokens, top_k, experts):
    """Three of ten choices are -1, anywhere in the row."""
    idx = uniform(ranks, tokens, top_k, experts)
    return np.where(unit(5, *grid(*idx.shape)) < 0.3, -1, idx)


def all_missing(ranks, tokens, top_k, experts):
    """No token has an expert."""
    del experts
    return np.full((ranks, tokens, top_k), -1)


def out_of_range(ranks, tokens, top_k, experts):
    """Half the ids lie outside [0, experts), as far as int32 reaches."""
    strays = np.array(
        [-1, -2, -experts, experts, experts + 1, 2**31 - 1, -(2**31), 1 << 20]
    )
    idx = uniform(ranks, tokens, top_k, experts)
    where = mix(6, *grid(*idx.shape))
    stray = strays[(where >> np.uint64(8)) % np.uint64(len(strays))]
    return np.where(where % np.uint64(2) == 0, stray, idx)


def duplicates(ranks, tokens, top_k, experts):
    """The first expert again in the second place; every third token: in all."""
    idx = uniform(ranks, tokens, top_k, experts)
    idx[..., 1:2] = idx[..., :1]
    idx[:, ::3] = idx[:, ::3, :1]
    return idx


def strided(ranks, tokens, top_k, experts):
    """Distinct experts at a stride that changes from token to token."""
    idx = np.empty((ranks, tokens, top_k), np.int64)
    for rank, token in np.ndindex(ranks, tokens):
        first = rank * 7919 + token * 104729
        stride = 1 + (token * 31 + rank * 17) % max(experts - 1, 1)
        if experts // np.gcd(stride, experts) < top_k:
            stride = 1
        idx[rank, token] = (first + np.arange(top_k) * stride) % experts
    return idx


# The table


@dataclasses.dataclass(frozen=True)
class Routing:
    """One case for one number of ranks: the arguments of make_plan."""

    topk_idx: np.ndarray  # int32[R, T, K]
    num_experts: int
    capacity: int
    expert_alignment: int


@dataclasses.dataclass(frozen=True)
class Case:
    """A routing rule with its sizes.

    Attributes:
      name: what pytest shows.
      rule: makes the expert ids.
      tokens: T.
      top_k: K.
      experts: E, or experts a rank where negative (-4: E = 4 R).
      capacity: what to make of the largest demand of any rank; None is R * T.
      expert_alignment: passed on.
    """

    name: str
    rule: Callable[[int, int, int, int], np.ndarray]
    tokens: int = 13
    top_k: int = 3
    experts: int = -4
    capacity: Callable[[int], int] | None = None
    expert_alignment: int = 1

    def __str__(self) -> str:
        return self.name

    @property
    def program(self) -> tuple:
        """Equal for cases that share a compiled program."""
        return self.tokens, self.top_k, self.experts, self.capacity

    def routing(self, ranks: int) -> Routing:
        """The arrays of this case for `ranks` ranks."""
        return _routing(self, ranks)


@functools.cache
def _routing(case: Case, ranks: int) -> Routing:
    experts = case.experts if case.experts > 0 else -case.experts * ranks
    idx = case.rule(ranks, case.tokens, case.top_k, experts)
    idx = np.broadcast_to(idx, (ranks, case.tokens, case.top_k))
    capacity = max(1, ranks * case.tokens)
    if case.capacity is not None:
        capacity = max(1, case.capacity(_largest_demand(idx, experts)))
    return Routing(idx.astype(np.int32), experts, capacity, case.expert_alignment)


def _largest_demand(idx: np.ndarray, experts: int) -> int:
    ranks = len(idx)
    owner = np.where((idx >= 0) & (idx < experts), idx, -1) // -(-experts // ranks)
    return max(int((owner == r).any(-1).sum()) for r in range(ranks))


CASES = (
    # One program for all of these: only the ids differ.
    Case("uniform", uniform),
    Case("log_normal", log_normal),
    Case("group_limited", group_limited),
    Case("identity", identity),
    Case("round_robin", round_robin),
    Case("one_rank", one_rank),
    Case("one_expert", one_expert),
    Case("idle_sender", idle_sender),
    Case("idle_receiver", idle_receiver),
    Case("one_token_only", one_token_only),
    Case("holes", holes),
    Case("all_missing", all_missing),
    Case("out_of_range", out_of_range),
    Case("duplicates", duplicates),
    # Tokens.
    Case("no_tokens", uniform, tokens=0),
    Case("one_token", uniform, tokens=1),
    Case("many_tokens", log_normal, tokens=1031, top_k=4, expert_alignment=128),
    # Not few any more, however short rows are (cc/few_tokens/few_tokens.cuh).
    Case("more_tokens", uniform, tokens=2057, top_k=2),
    # Choices and experts; with E = 5 over 8 ranks some ranks own none.
    Case("top_1", uniform, top_k=1),
    Case("top_22", uniform, tokens=7, top_k=22, experts=24),
    Case("experts_60", holes, tokens=16, top_k=4, experts=60),
    Case("experts_62", uniform, tokens=16, top_k=6, experts=62),
    Case("experts_5", uniform, top_k=2, experts=5, expert_alignment=7),
    Case("experts_1", duplicates, tokens=3, top_k=2, experts=1),
    Case("widest", out_of_range, tokens=5, top_k=32, experts=2048),
    # Capacity.
    Case("exact_capacity", log_normal, capacity=lambda demand: demand),
    Case("one_over", log_normal, capacity=lambda demand: demand - 1),
    Case(
        "half_capacity",
        duplicates,
        capacity=lambda demand: demand // 2,
        expert_alignment=4,
    ),
    Case("capacity_1", uniform, capacity=lambda _: 1),
    Case("spare_capacity", one_rank, capacity=lambda demand: demand + 9),
)

# More experts than what groups rows by expert takes of a rank; for plan, dispatch and
# combine. Also more than plans by pushed ids take (PushedPlan in
# cc/layout/pushed_plan.h): experts in all, experts of a rank. The second has work for
# several blocks.
MANY_EXPERTS = (
    Case("experts_65536", strided, tokens=5, top_k=3, experts=1 << 16),
    Case("experts_2100_a_rank", strided, tokens=257, top_k=4, experts=-2100),
)
