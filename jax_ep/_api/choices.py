"""Single choices of tokens: their weights at the experts, their outputs at home."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._api import ops
from jax_ep._data import checks
from jax_ep._data.plan import Plan
from jax_ep._data.ranks import collective_axes
from jax_ep._operations import experts
from jax_ep._operations.arrays import sum_dtype

# A slot is told in two numbers that float32 holds exactly.
_LOW_BITS = 12


def permute_weights(weights: jax.Array, plan: Plan) -> jax.Array:
    """The weight of each expert row, in the order of the rows that `permute` makes.

    For experts that scale their inputs, or that apply the router's weights
    themselves; `unpermute` is then called without weights. Local to a device. With
    `place` as in `permute`::

        for slot c, for each k with a place:
            output[place of (c, k)] = weights[c, k]
        all other numbers of output = 0

    An expert that a row names twice has two places, each with its own weight.

    Cost: one `permute` of a leaf of one number a row.

    Args:
      weights: floating [C, K], such as the router's weights [T, K] that `dispatch`
        brought along.
      plan: from `make_plan`, inside the same shard_map.

    Returns:
      [S] of the same dtype, S = plan.expert_capacity.

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.
      RuntimeError: the plan's communicator is closed.

    Derivative: linear in `weights`, whose cotangent at (c, k) is the output's at
    that place, exactly 0 where (c, k) has no place.
    """
    ops._checked_leaves("permute_weights", (), plan)
    checks.check_places("permute_weights", plan)
    weights = jnp.asarray(weights)
    ops._check_weights("permute_weights", weights, (plan.capacity, plan.top_k), "C, K")
    wide = sum_dtype(weights.dtype)
    ones = jnp.ones((plan.capacity,), wide)
    (scaled,) = experts.permute([ones], plan, weights.astype(wide))
    return scaled.astype(weights.dtype)


def combine_choices(tree: Any, plan: Plan) -> Any:
    """Brings what the experts made of each choice home, without summing.

    For layers that apply the router's weights, and sum over k, where the tokens are.
    With `place` as in `permute`::

        for token t of this rank, for each k:
            output[t, k] = y of rank r [place of (slot of t on rank r, k)]
                           where r owns expert topk_idx[t, k]
            output[t, k] = 0 where that is no expert, or was dropped

    Rows are shared by the experts of a rank on the way out, as always, and go home
    one for each choice. Bits travel as in `combine` of one term. Pads and dropped
    places are never read.

    Cost, in addition to `unpermute` and `combine` of T * K rows: the pairs are numbered
    twice more, in integers, and a `combine` of 12 * K bytes a row tells each choice
    where its row stands. Between nodes, and of replicated tokens, each row comes home
    with room for all K outputs, K times the bytes of `combine`. A lone -0.0 may become
    0.0.

    Args:
      tree: a pytree of arrays [S, ...], as for `unpermute`.
      plan: from `make_plan`, inside the same shard_map.

    Returns:
      The same tree with leaves [T, K, ...].

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.
      RuntimeError: the plan's communicator is closed.

    Derivative: linear in `tree`, whose cotangent at the place of a choice is the
    output's there, 0 in pads.
    """
    leaves, structure = ops._checked_leaves("combine_choices", tree, plan)
    checks.check_places("combine_choices", plan)
    if plan.comm.num_ranks * plan.num_tokens * plan.top_k > checks.INT32_MAX:
        raise ValueError(
            "jax_ep.combine_choices: R * T * K must be below 2**31, found "
            f"{plan.comm.num_ranks * plan.num_tokens * plan.top_k}"
        )
    if plan._crossing is None and plan.tokens == "split":
        choices = _plan_of_choices(plan)
        home = ops.combine(ops.unpermute(leaves, choices), choices)
        shape = (plan.num_tokens, plan.top_k)
        home = [y.reshape(*shape, *y.shape[1:]) for y in home]
    else:
        shape = (plan.capacity, plan.top_k)
        rows = ops.unpermute(leaves, _plan_of_pairs(plan))
        home = ops.combine([y.reshape(*shape, *y.shape[1:]) for y in rows], plan)
    return structure.unflatten(home)


def _plan_of_pairs(plan: Plan) -> Plan:
    """Each (row, k) as a row of its own [C * K, ...], for `unpermute`."""
    return dataclasses.replace(
        plan,
        recv_topk_idx=plan.recv_topk_idx.reshape(-1, 1),
        capacity=plan.capacity * plan.top_k,
        top_k=1,
    )


def _plan_of_choices(plan: Plan) -> Plan:
    """Each (token, k) as a token of its own, of T * K, for `unpermute` and `combine`.

    What make_plan would say of ids [T * K, 1], but for choices that have no place;
    only what the two read of it.
    """
    places, _ = experts.expert_rows(plan)
    placed = places >= 0
    capacity = min(plan.expert_capacity, plan.capacity * plan.top_k)
    # As rows of one expert, in the order of (slot, k): so of (source, token, k).
    in_order = dataclasses.replace(
        plan,
        recv_topk_idx=jnp.where(placed, 0, -1),
        group_sizes=plan.group_sizes[:1],
        expert_alignment=1,
        expert_capacity=capacity,
    )
    slots, _ = experts.expert_rows(in_order)
    pair = (
        jnp.full((capacity,), -1, jnp.int32)
        .at[jnp.where(placed, slots, capacity).ravel()]
        .set(jnp.arange(slots.size, dtype=jnp.int32), mode="drop")
    )
    row, k = pair // plan.top_k, pair % plan.top_k
    expert = plan.recv_topk_idx.ravel()[pair]
    return dataclasses.replace(
        plan,
        _routes=_told_home(slots, plan)[:, None],
        num_recv=placed.sum(dtype=jnp.int32),
        recv_src=jnp.where(pair < 0, -1, plan.recv_src[row] * plan.top_k + k),
        recv_topk_idx=jnp.where(pair < 0, -1, expert)[:, None],
        num_tokens=plan.num_tokens * plan.top_k,
        top_k=1,
        capacity=capacity,
    )


def _told_home(slots: jax.Array, plan: Plan) -> jax.Array:
    """i32[T * K, 2]: the rank and the slot of each choice; -1 where it has none.

    Only one rank has something for a choice, so the sum over ranks is that.
    """
    rank = lax.axis_index(collective_axes(plan.comm))
    low = (1 << _LOW_BITS) - 1
    parts = [jnp.full_like(slots, 1) + rank, slots >> _LOW_BITS, slots & low]
    told = jnp.where(slots[..., None] < 0, 0, jnp.stack(parts, axis=-1))
    found = ops.combine(told.astype(jnp.float32), plan).astype(jnp.int32)
    found = found.reshape(plan.num_tokens * plan.top_k, len(parts))
    rank, slot = found[:, 0] - 1, (found[:, 1] << _LOW_BITS) + found[:, 2]
    return jnp.stack([rank, jnp.where(rank < 0, -1, slot)], axis=-1)
