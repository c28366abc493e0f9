"""What is wanted of a rank's experts, and what is kept of it: plain JAX on a plan.

A plan's kernels drop rows past C, and those of expert rows what stands past S, in the
order of experts. Other rules are a matter of which ids a plan holds: a pair that is
dropped here is taken out of recv_topk_idx, and then no operation knows it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._data.ranks import collective_axes
from jax_ep._operations import experts
from jax_ep._operations.arrays import (
    id_counts,
    make_varying,
    rank_axes,
    summed_axes,
    varying,
)

if TYPE_CHECKING:
    from jax_ep._data.plan import Plan
    from jax_ep._data.ranks import Ranks


def demand_counts(ids: jax.Array, comm: Ranks, num_experts: int) -> jax.Array:
    """i32[L]: how often all ranks' ids [T, K] name each expert of this rank.

    One reduce-scatter of a number for each expert.
    """
    experts = comm.num_ranks * -(-num_experts // comm.num_ranks)
    counts = id_counts(jnp.where(ids < num_experts, ids, -1), experts)
    counts = make_varying(counts, varying(ids) | rank_axes(comm))
    return lax.psum_scatter(
        counts, collective_axes(comm), scatter_dimension=0, tiled=True
    )


def pairs_of_group(
    ids: jax.Array, comm: Ranks, num_experts: int, tokens: str
) -> jax.Array:
    """i32[]: the ids [T, K] of all ranks of the group that name an expert."""
    pairs = ((ids >= 0) & (ids < num_experts)).sum(dtype=jnp.int32)
    if tokens == "replicated":
        return pairs
    pairs = make_varying(pairs, varying(ids) | rank_axes(comm))
    return lax.psum(pairs, summed_axes(comm))


def keep(plan: Plan, limit: int | jax.Array, by_source: bool) -> Plan:
    """`plan` with the first `limit` pairs of this rank, and without the others.

    Args:
      plan: as its kernels made it.
      limit: i32[].
      by_source: pairs go in the order of (source, expert, token, k), else in that of
        (expert, source, token, k), which is that of expert rows.
    """
    kept = _first_by_source(plan, limit) if by_source else _first(plan, limit)
    kept_ids = jnp.where(kept, plan.recv_topk_idx, -1)
    plan = dataclasses.replace(plan, recv_topk_idx=kept_ids)
    # permute and unpermute of this plan number its pairs by the same call.
    _, ranges = experts.expert_rows(plan)
    ends = ranges[:-1, 1]
    group_sizes = jnp.diff(ends, prepend=0)
    num_kept = (ranges[:-1, 0] - ends + group_sizes).sum(dtype=jnp.int32)
    wanted = plan.expert_demand_counts.sum(dtype=jnp.int32)
    return dataclasses.replace(
        plan,
        group_sizes=group_sizes,
        expert_overflow=num_kept < plan.expert_counts.sum(dtype=jnp.int32),
        dropped_pairs=wanted - num_kept,
    )


def _first(plan: Plan, limit: int | jax.Array) -> jax.Array:
    """bool[C, K]: the first pairs in the order of (expert, slot, k)."""
    number = _numbered(plan, plan.recv_topk_idx)
    return (number >= 0) & (number < limit)


def _first_by_source(plan: Plan, limit: int | jax.Array) -> jax.Array:
    """bool[C, K]: the first pairs in the order of (source, expert, slot, k)."""
    ids, num_ranks = plan.recv_topk_idx, plan.comm.num_ranks
    source = plan.recv_src // max(1, plan.num_tokens)
    source = jnp.where(plan.recv_src < 0, num_ranks, source)
    of_source = (
        jnp.zeros((num_ranks,), jnp.int32)
        .at[source]
        .add((ids >= 0).sum(1, dtype=jnp.int32), mode="drop")
    )
    # The first source that does not fit whole, if there is one; its pairs are numbered
    # by expert, and those of other sources are all kept or all dropped.
    whole = jnp.cumsum(of_source, dtype=jnp.int32) <= limit
    cut = whole.sum(dtype=jnp.int32)
    room = limit - jnp.where(whole, of_source, 0).sum(dtype=jnp.int32)
    number = _numbered(plan, jnp.where((source == cut)[:, None], ids, -1))
    here = (number >= 0) & (number < room)
    return ((source < cut)[:, None] & (ids >= 0)) | here


def _numbered(plan: Plan, ids: jax.Array) -> jax.Array:
    """i32[C, K]: the number of each pair in the order of (expert, slot, k), or -1."""
    packed = dataclasses.replace(
        plan, recv_topk_idx=ids, expert_alignment=1, expert_capacity=ids.size
    )
    return experts.expert_rows(packed)[0]
