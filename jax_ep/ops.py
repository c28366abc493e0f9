"""dispatch and combine: argument checks and what users read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import dtypes

from jax_ep import checks, primitives
from jax_ep.plan import Plan

# XLA packs these below a byte; they travel one to a byte, without loss.
_TRAVELS_AS = {
    jnp.dtype("int2"): jnp.dtype("int8"),
    jnp.dtype("int4"): jnp.dtype("int8"),
    jnp.dtype("uint2"): jnp.dtype("uint8"),
    jnp.dtype("uint4"): jnp.dtype("uint8"),
    jnp.dtype("float4_e2m1fn"): jnp.dtype("float8_e4m3fn"),
}


def dispatch(tree: Any, plan: Plan) -> Any:
    """Sends every row to the ranks that own its token's experts.

    Per device, with `slot` from the plan (rows ordered by source rank, then
    token)::

        for token t of this rank, for each rank r that t goes to:
            output of rank r [slot(t, r)] = x[t]
        output[num_recv:] = 0

    docs/semantics.md works a two-rank example by hand.

    Args:
      tree: a pytree of arrays [T, ...] of any dtype, T as in the plan. All
        leaves travel in one launch.
      plan: from `make_plan`, inside the same shard_map.

    Returns:
      The same tree with leaves [C, ...]; rows >= plan.num_recv are 0.

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.
      RuntimeError: the plan's communicator is closed.

    Derivative: linear in `tree`; its transpose is `combine` of the cotangents.
    Integer leaves have none.
    """
    leaves, treedef = _checked_leaves("dispatch", tree, plan)
    rows = primitives.dispatch([_convert(x, _travels_as(x)) for x in leaves], plan)
    return treedef.unflatten(
        [_convert(row, x.dtype) for row, x in zip(rows, leaves, strict=True)]
    )


def combine(tree: Any, plan: Plan) -> Any:
    """Brings rows back to their tokens and sums them over ranks.

    Per device, with `slot` from the plan::

        for token t of this rank:
            output[t] = sum over ranks r that t went to, in rank order, of
                        y of rank r [slot(t, r)]

    The sum is taken in float32 (float64 for float64 rows) starting from the
    first term and rounded once, so results are bit-equal on every backend (but
    for the payload of a NaN, and subnormal sums where the CPU flushes them).
    Tokens without a row get 0. Rows that were never sent are never read.

    Args:
      tree: a pytree of arrays [C, ...], C as in the plan; bfloat16, float16,
        float32, float64 or complex. All leaves travel in one launch.
      plan: from `make_plan`, inside the same shard_map.

    Returns:
      The same tree with leaves [T, ...].

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.
      RuntimeError: the plan's communicator is closed.

    Derivative: linear in `tree`; its transpose is `dispatch` of the cotangents.
    """
    leaves, treedef = _checked_leaves("combine", tree, plan)
    for leaf in leaves:
        if leaf.dtype not in primitives.SUMMABLE:
            raise TypeError(
                "jax_ep.combine: leaves must be bfloat16, float16, float32, "
                f"float64 or complex, found {leaf.dtype}[{_dims(leaf)}]"
            )
    return treedef.unflatten(primitives.combine(leaves, plan))


def _travels_as(leaf: jax.Array) -> jnp.dtype:
    return _TRAVELS_AS.get(leaf.dtype, leaf.dtype)


def _convert(leaf: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return leaf if leaf.dtype == dtype else leaf.astype(dtype)


def _dims(leaf: jax.Array) -> str:
    return ",".join(map(str, leaf.shape))


def _checked_leaves(op: str, tree: Any, plan: Plan):
    if not isinstance(plan, Plan):
        raise TypeError(
            f"jax_ep.{op}: plan must be a jax_ep.Plan, found {type(plan).__name__}"
        )
    checks.check_open(plan.comm, op)
    checks.check_inside_shard_map(plan.comm, op)
    rows, name = (plan.num_tokens, "T") if op == "dispatch" else (plan.capacity, "C")
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    for leaf in leaves:
        if dtypes.issubdtype(leaf.dtype, dtypes.extended):
            raise TypeError(
                f"jax_ep.{op}: typed key arrays cannot travel, found "
                f"{leaf.dtype}[{_dims(leaf)}]; pass jax.random.key_data(keys) "
                "and wrap the result again"
            )
        if leaf.ndim < 1 or leaf.shape[0] != rows:
            raise ValueError(
                f"jax_ep.{op}: leaves must be [{name}, ...] with {name} = {rows} "
                f"as in the plan, found {leaf.dtype}[{_dims(leaf)}]"
            )
    return leaves, treedef
