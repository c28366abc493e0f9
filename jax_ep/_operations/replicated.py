"""Tokens that every rank has: plan, dispatch and combine in plain JAX.

A slot is a token: each rank takes the rows of its own experts from its own copy, and
nothing crosses but the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep._data.ranks import collective_axes
from jax_ep._operations import exchanges, xla_backend
from jax_ep._operations.arrays import (
    id_counts,
    make_varying,
    rank_axes,
    sum_dtype,
    summed_axes,
    varying,
)

if TYPE_CHECKING:
    from jax_ep._data.plan import Plan
    from jax_ep._data.ranks import Ranks


def plan(
    ids: jax.Array,
    *,
    comm: Ranks,
    num_experts: int,
    capacity: int,
    expert_alignment: int,
) -> dict[str, jax.Array]:
    """Plan's array fields by name; ids is i32[T, K], the same on all ranks."""
    num_tokens, top_k = ids.shape
    local_experts = -(-num_experts // comm.num_ranks)
    ids = make_varying(ids, varying(ids) | rank_axes(comm))
    if num_tokens == 0:
        fields = xla_backend._plan_of_nothing(
            comm.num_ranks, top_k, local_experts, capacity
        )
        return {
            name: make_varying(array, varying(ids))
            for name, array in zip(exchanges.PLAN_FIELDS, fields, strict=True)
        }
    rank = lax.axis_index(collective_axes(comm))
    local = ids - rank * local_experts
    mine = (ids < num_experts) & (local >= 0) & (local < local_experts)
    local = jnp.where(mine, local, -1)
    here = mine.any(axis=1)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    num_rows = here.sum(dtype=jnp.int32)
    expert_counts = id_counts(local, local_experts)
    route = jnp.stack([jnp.broadcast_to(rank, token.shape), token], axis=-1)
    ranks = jnp.arange(comm.num_ranks, dtype=jnp.int32)
    return {
        "_routes": jnp.where(here[:, None], route, -1)[:, None],
        "num_recv": num_rows,
        "num_demand": num_rows,
        "overflow": jnp.zeros_like(num_rows, dtype=bool),
        "recv_counts": jnp.where(ranks == rank, num_rows, 0),
        "recv_topk_idx": local,
        "recv_src": jnp.where(here, rank * num_tokens + token, -1),
        "expert_counts": expert_counts,
        "group_sizes": -(-expert_counts // expert_alignment) * expert_alignment,
    }


def own_copies(leaves: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """`leaves` [T, ...] as this rank's own, whose cotangents are summed over ranks."""
    return [_own_copy(leaf, varying(plan.recv_src)) for leaf in leaves]


def _own_copy(leaf: jax.Array, axes: frozenset[str]) -> jax.Array:
    narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize <= 2
    axes = axes | varying(leaf)
    if not narrow or axes == varying(leaf):
        return make_varying(leaf, axes)
    # Cotangents are added up in the wide dtype; XLA drops both conversions.
    wide = make_varying(leaf.astype(sum_dtype(leaf.dtype)), axes)
    return wide.astype(leaf.dtype)


def dispatch(leaves: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Leaves [T, ...] -> [C, ...]: the rows that have an expert here, 0 elsewhere."""
    if plan.num_tokens == 0:
        return [
            jnp.zeros_like(leaf, shape=(plan.capacity, *leaf.shape[1:]))
            for leaf in own_copies(leaves, plan)
        ]
    return [_rows_here(leaf, plan) for leaf in own_copies(leaves, plan)]


def combine(leaves: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Leaves [C, ...] -> [T, ...], summed over ranks in the wide dtype."""
    axes = summed_axes(plan.comm)
    results = []
    for part, leaf in zip(parts(leaves, plan), leaves, strict=True):
        if part.size == 0:
            results.append(jnp.zeros(part.shape, leaf.dtype))
            continue
        wide = part.astype(sum_dtype(leaf.dtype))
        results.append(lax.psum(wide, axes).astype(leaf.dtype))
    return results


def parts(leaves: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Leaves [C, ...] -> [T, ...]: this rank's terms of the sums."""
    if plan.num_tokens == 0:
        return [leaf[:0] for leaf in leaves]
    return [_rows_here(leaf, plan) for leaf in leaves]


def _rows_here(leaf: jax.Array, plan: Plan) -> jax.Array:
    """Rows of tokens that have an expert here; others are not read, and 0."""
    here = (plan.recv_src >= 0).reshape(-1, *(1,) * (leaf.ndim - 1))
    return jnp.where(here, leaf, np.zeros((), leaf.dtype))
