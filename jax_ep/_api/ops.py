"""The operations on rows: argument checks and what users read."""

from __future__ import annotations

import types
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import dtypes

from jax_ep._api.plan_options import PlanKeywords, PlanOptions, plan_options
from jax_ep._api.planning import PlanRequest, check_request
from jax_ep._data import checks, sizes
from jax_ep._data.plan import Plan
from jax_ep._operations import (
    exchanges,
    experts,
    fused,
    node_exchanges,
    replicated,
)
from jax_ep._operations.arrays import SUMMABLE
from jax_ep._setup.communicator import Communicator

# XLA packs these below a byte; they travel one to a byte, without loss.
_TRAVELS_AS = {
    jnp.dtype("int2"): jnp.dtype("int8"),
    jnp.dtype("int4"): jnp.dtype("int8"),
    jnp.dtype("uint2"): jnp.dtype("uint8"),
    jnp.dtype("uint4"): jnp.dtype("uint8"),
    jnp.dtype("float4_e2m1fn"): jnp.dtype("float8_e4m3fn"),
}

# The arguments of make_plan that say how large the buffers of a dispatch are.
_OF_DISPATCH = ("capacity", "node_capacity")


def dispatch(tree: Any, plan: Plan) -> Any:
    """Sends every row to the ranks that own its token's experts.

    Per device, with `slot` from the plan (rows ordered by source rank, then
    token)::

        for token t of this rank, for each rank r that t goes to:
            output of rank r [slot(t, r)] = x[t]
        output[num_recv:] = 0

    docs/semantics.md works a two-rank example by hand.

    Args:
      tree: a pytree of arrays [T, ...] of any dtype, T as in the plan. Up to
        16 leaves travel in one launch.
      plan: from `make_plan`, inside the same shard_map.

    Returns:
      The same tree with leaves [C, ...]; rows >= plan.num_recv are 0. Of each leaf
      that is C times the bytes of a row on each rank, whatever came; the default of C,
      R * T, warns above 1 GiB. `plan.describe(tree)` tells.

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.
      RuntimeError: the plan's communicator is closed.

    Derivative: linear in `tree`; its transpose is `combine` of the cotangents.
    Integer leaves have none.
    """
    leaves, treedef = _checked_leaves("dispatch", tree, plan)
    sizes.warn_of_defaults("dispatch", plan, leaves, *_OF_DISPATCH)
    rows = _moves(plan).dispatch([_convert(x, _travels_as(x)) for x in leaves], plan)
    return treedef.unflatten(
        [_convert(row, x.dtype) for row, x in zip(rows, leaves, strict=True)]
    )


def plan_dispatch(
    tree: Any,
    topk_idx: jax.Array,
    *,
    comm: Communicator,
    num_experts: int,
    options: PlanOptions | None = None,
    **keywords: Unpack[PlanKeywords],
) -> tuple[Plan, Any]:
    """`make_plan` and `dispatch` of few tokens in one launch.

    Exactly this, bit for bit::

        plan = make_plan(topk_idx, comm=comm, num_experts=num_experts, ...)
        return plan, dispatch(tree, plan)

    and that is what it becomes where one launch cannot do it. One launch does on
    backend "cuda" inside one node of at most 32 ranks, where both T * ceil(K / 2)
    * (R - 1) <= 16384 and the tokens' rows, cut into pieces of 5120 bytes, are at
    most 768 pieces (256 tokens of 14 KB, 768 of 5 KB, of all leaves together).

    Args:
      tree: as for `dispatch`. Leaves past the 16th take launches of their own.
      topk_idx: as for `make_plan`.
      comm: the communicator.
      num_experts: E.
      options: as for `make_plan`, but for tokens, which travel.
      **keywords: as for `make_plan`.

    Returns:
      (plan, rows): a `Plan`, and the tree with leaves [C, ...], C times the bytes of a
      row for each, as from `dispatch`.

    Raises:
      TypeError, ValueError, RuntimeError: as `make_plan` and `dispatch`, and in
        their name.

    Derivative: that of the two. The plan has none; the rows are linear in `tree`,
    with the transpose `combine`. (`jax.linear_transpose` of a function that uses
    the plan for more needs the two calls.)
    """
    options = plan_options("plan_dispatch", options, keywords, expert_alignment=1)
    if options.tokens != "split":
        raise ValueError(
            "jax_ep.plan_dispatch: tokens must be 'split', found "
            f"{options.tokens!r}; make_plan and dispatch move no replicated tokens"
        )
    request = check_request(topk_idx, comm, num_experts, options)
    leaves, treedef = _leaves_of("dispatch", tree, request)
    if request.between_nodes:
        plan = request.make()
        return plan, dispatch(tree, plan)
    sizes.warn_of_defaults("plan_dispatch", request, leaves, *_OF_DISPATCH)
    arrays, rows = fused.plan_dispatch(
        request.ids, [_convert(x, _travels_as(x)) for x in leaves], **request.sizes
    )
    return request.inside_a_node(arrays), treedef.unflatten(
        [_convert(row, x.dtype) for row, x in zip(rows, leaves, strict=True)]
    )


def combine(tree: Any, plan: Plan, *, unreduced: bool = False) -> Any:
    """Brings rows back to their tokens and sums them over ranks.

    Per device, with `slot` from the plan::

        for token t of this rank:
            output[t] = sum over ranks r that t went to, in rank order, of
                        y of rank r [slot(t, r)]

    The sum is taken in float32 (float64 for float64 rows) starting from the
    first term and rounded once, so results are bit-equal on every backend (but
    for the payload of a NaN, and subnormal sums where the CPU flushes them).
    Tokens without a row get 0. Rows that were never sent are never read.

    With a plan of replicated tokens every rank gets the sum of every token, by
    jax.lax.psum, in float32 (float64 for float64 rows) and rounded once; the order of
    its terms is XLA's. The result is the same on all ranks, also as JAX's types see it.

    Args:
      tree: a pytree of arrays [C, ...], C as in the plan; bfloat16, float16,
        float32, float64 or complex. Up to 16 leaves travel in one launch.
      plan: from `make_plan`, inside the same shard_map.
      unreduced: of replicated tokens, gives this rank's terms and sums nothing: for
        whoever adds more to them and sums then, or wants a part of the sums alone
        (jax.lax.psum_scatter).

    Returns:
      The same tree with leaves [T, ...].

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.
      RuntimeError: the plan's communicator is closed.

    Derivative: linear in `tree`; its transpose is `dispatch` of the cotangents. Of
    replicated tokens that of jax.lax.psum.
    """
    leaves, treedef = _checked_leaves("combine", tree, plan)
    if unreduced:
        if plan.tokens != "replicated":
            raise ValueError(
                "jax_ep.combine: unreduced terms are those of a plan of "
                f"tokens='replicated', found a plan of tokens={plan.tokens!r}"
            )
        return treedef.unflatten(replicated.parts(leaves, plan))
    return treedef.unflatten(_moves(plan).combine(leaves, plan))


def permute(tree: Any, plan: Plan) -> Any:
    """Copies rows to their experts: one row for each (row, local expert).

    Local to a device. Rows come grouped by expert, expert after expert; inside
    a group they stand in the order of (slot, k), and zeros fill the group up to
    expert_alignment. plan.group_sizes are the sizes of the groups, pads
    included, just as `ragged_dot` takes them::

        place = 0
        for each local expert e:
            for each slot c, for each k with plan.recv_topk_idx[c, k] == e:
                output[place] = x[c]; place += 1
            place = place rounded up to expert_alignment
        all other rows of output = 0

    Args:
      tree: a pytree of arrays [C, ...] of any dtype, C as in the plan: what
        `dispatch` returned. Up to 16 leaves move in one launch.
      plan: from `make_plan`, inside the same shard_map.

    Returns:
      The same tree with leaves [S, ...], S = plan.expert_capacity. Places past
      S are dropped. Of each leaf that is S times the bytes of a row on each rank; the
      default of S, C * K and the pads, warns above 1 GiB. `plan.describe(tree)` tells.

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.
      RuntimeError: the plan's communicator is closed.

    Derivative: linear in `tree`; its transpose is `unpermute` without weights.
    """
    leaves, treedef = _checked_leaves("permute", tree, plan)
    checks.check_places("permute", plan)
    sizes.warn_of_defaults("permute", plan, leaves, "expert_capacity")
    rows = experts.permute([_convert(x, _travels_as(x)) for x in leaves], plan)
    return treedef.unflatten(
        [_convert(row, x.dtype) for row, x in zip(rows, leaves, strict=True)]
    )


def unpermute(tree: Any, plan: Plan, weights: jax.Array | None = None) -> Any:
    """Sums what the experts made of each row, weighted if `weights` are given.

    Local to a device. With `place` as in `permute`::

        for slot c:
            output[c] = sum over k with a place, in order, of
                        weights[c, k] * y[place of (c, k)]

    Taken in float32 (float64 for float64 rows): every product and every sum
    rounds, then the result once to the rows' dtype. Rows without a place get 0.
    Pads and dropped places are never read.

    Args:
      tree: a pytree of arrays [S, ...], S = plan.expert_capacity; bfloat16,
        float16, float32, float64, or complex where there are no weights. Up to
        16 leaves move in one launch.
      plan: from `make_plan`, inside the same shard_map.
      weights: floating [C, K], such as the router's weights that `dispatch`
        brought along. None: the plain sum.

    Returns:
      The same tree with leaves [C, ...].

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.
      RuntimeError: the plan's communicator is closed.

    Derivative: linear in `tree`, whose cotangent at the place of (c, k) is
    weights[c, k] times the output's at c, 0 in pads; and linear in `weights`,
    whose cotangent at (c, k) is the product of the output's cotangent at c with
    y at that place, exactly 0 where (c, k) has no place.
    """
    leaves, treedef = _checked_leaves("unpermute", tree, plan)
    checks.check_places("unpermute", plan)
    if weights is not None:
        weights = jnp.asarray(weights)
        _check_weights("unpermute", weights, (plan.capacity, plan.top_k), "C, K")
        paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
        for path, leaf in zip(paths, leaves, strict=True):
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                raise TypeError(
                    "jax_ep.unpermute: weights apply to real leaves, found "
                    f"{_found(leaf, path)}"
                )
    return treedef.unflatten(experts.unpermute(leaves, plan, weights))


def _dispatch_permute(tree: Any, others: Any, plan: Plan) -> tuple[Any, Any]:
    """(permute(dispatch(tree)), dispatch(others)), in one launch where that pays."""
    if isinstance(plan, Plan) and plan.tokens == "replicated":
        # A slot is a token, and of others than those here nothing is read.
        leaves, treedef = _checked_leaves("dispatch", (tree, others), plan)
        if plan.num_tokens > 0:
            tree, others = treedef.unflatten(replicated.own_copies(leaves, plan))
            return permute(tree, plan), others
    if (
        not isinstance(plan, Plan)
        or plan.comm.backend not in fused.BACKENDS
        or plan._crossing is not None
    ):
        rows, received = dispatch((tree, others), plan)
        return permute(rows, plan), received
    leaves, treedef = _checked_leaves("dispatch", (tree, others), plan)
    checks.check_places("permute", plan)
    count = len(jax.tree.leaves(tree))
    sizes.warn_of_defaults("dispatch", plan, leaves, *_OF_DISPATCH)
    sizes.warn_of_defaults("permute", plan, leaves[:count], "expert_capacity")
    moving = [_convert(x, _travels_as(x)) for x in leaves]
    grouped, received = fused.dispatch_permute(moving[:count], moving[count:], plan)
    return treedef.unflatten(
        [
            _convert(row, x.dtype)
            for row, x in zip((*grouped, *received), leaves, strict=True)
        ]
    )


def _moves(plan: Plan) -> types.ModuleType:
    """What moves the rows of `plan`: inside a node, between nodes, or nothing."""
    if plan.tokens == "replicated":
        return replicated
    return exchanges if plan._crossing is None else node_exchanges


def _check_weights(op: str, weights: jax.Array, shape: tuple, letters: str) -> None:
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise TypeError(
            f"jax_ep.{op}: weights must be floating, found {_found(weights)}"
        )
    if weights.shape != shape:
        raise ValueError(
            f"jax_ep.{op}: weights must be [{letters}] = {list(shape)} as in the "
            f"plan, found {_found(weights)}"
        )


def _travels_as(leaf: jax.Array) -> jnp.dtype:
    return _TRAVELS_AS.get(leaf.dtype, leaf.dtype)


def _convert(leaf: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return leaf if leaf.dtype == dtype else leaf.astype(dtype)


def _found(leaf: jax.Array, path: tuple[Any, ...] = ()) -> str:
    """What a message says of a leaf: its type, and where it is in its tree."""
    where = f" at {jax.tree_util.keystr(path)}" if path else ""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]{where}"


# What the leaves of an operation are: the size of their first axis by Plan's name
# and in words, and whether the operation sums them.
_LEAVES = {
    "dispatch": ("num_tokens", "T", False),
    "dispatch_start": ("num_tokens", "T", False),
    "combine": ("capacity", "C", True),
    "combine_start": ("capacity", "C", True),
    "permute": ("capacity", "C", False),
    "unpermute": ("expert_capacity", "S", True),
    "permute_weights": ("capacity", "C", False),
    "combine_choices": ("expert_capacity", "S", True),
}


def _checked_leaves(op: str, tree: Any, plan: Plan):
    """(leaves, structure) of what `op` takes."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"jax_ep.{op}: plan must be a jax_ep.Plan, found {type(plan).__name__}"
        )
    checks.check_open(plan.comm, op)
    checks.check_inside_shard_map(plan.comm, op)
    return _leaves_of(op, tree, plan)


def _leaves_of(op: str, tree: Any, plan: Plan | PlanRequest):
    """As _checked_leaves, of a plan that was looked at."""
    size, name, summed = _LEAVES[op]
    rows = getattr(plan, size)
    pairs, treedef = jax.tree.flatten_with_path(tree)
    leaves = []
    for path, leaf in pairs:
        try:
            leaf = jnp.asarray(leaf)
        except (TypeError, ValueError):
            where = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise TypeError(
                f"jax_ep.{op}: leaves must be arrays, found {type(leaf).__name__}"
                f"{where}"
            ) from None
        if dtypes.issubdtype(leaf.dtype, dtypes.extended):
            raise TypeError(
                f"jax_ep.{op}: typed key arrays cannot travel, found "
                f"{_found(leaf, path)}; pass jax.random.key_data(keys) and wrap the "
                "result again"
            )
        if leaf.ndim < 1 or leaf.shape[0] != rows:
            raise ValueError(
                f"jax_ep.{op}: leaves must be [{name}, ...] with {name} = {rows} "
                f"as in the plan, found {_found(leaf, path)}"
            )
        if summed and leaf.dtype not in SUMMABLE:
            raise TypeError(
                f"jax_ep.{op}: leaves must be bfloat16, float16, float32, "
                f"float64 or complex, found {_found(leaf, path)}"
            )
        leaves.append(leaf)
    return leaves, treedef
