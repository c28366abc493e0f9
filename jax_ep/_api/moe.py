"""The whole mixture-of-experts layer: from routed tokens to their outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep._api import fp8_dispatch, ops
from jax_ep._api.plan_options import PlanKeywords, PlanOptions, plan_options
from jax_ep._api.planning import check_request
from jax_ep._data.plan import Plan
from jax_ep._operations import fp8
from jax_ep._setup.communicator import Communicator

ExpertFn = Callable[..., Any]


def moe(
    x: Any,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    expert_fn: ExpertFn,
    *,
    comm: Communicator,
    num_experts: int,
    options: PlanOptions | None = None,
    unreduced: bool = False,
    quantize: Literal["fp8"] | None = None,
    **keywords: Unpack[PlanKeywords],
) -> Any:
    """A mixture-of-experts layer. Collective over `comm`'s axis.

    Per token t of this rank::

        output[t] = sum over k of topk_weights[t, k] * expert topk_idx[t, k] of x[t]

    Tokens travel to the ranks of their experts (`dispatch`) with their weights,
    are grouped by expert (`permute`), go through `expert_fn`, are weighted and
    summed (`unpermute`) and come home (`combine`). The outputs of one rank's
    experts for a token are summed in float32 and rounded to the dtype of
    expert_fn's result before they travel, once more after the sum over ranks.

    On each rank an x of b bytes a row takes C * b bytes where it arrives and S * b as
    expert rows, and expert_fn returns as many. The defaults of C and S have room for
    the worst case: with R = 64, T = 4096, K = 8 and 7168 columns of bfloat16 expert
    rows alone take 30 GB, with capacity_factor=1.25 0.6 GB. See `make_plan`.

    Args:
      x: [T, ...], this rank's tokens; or a pytree of such arrays.
      topk_idx: int[T, K], the experts of each token; see `make_plan`.
      topk_weights: floating [T, K]; float32 is best. Used where topk_idx names
        an expert, whatever stands elsewhere.
      expert_fn: (rows [S, ...], group_sizes i32[L]) -> [S, ...], this rank's
        experts: rows of expert e stand together, group_sizes[e] of them, after
        those of the experts before it, as `ragged_dot` and `gated_mlp` take them.
        Where it has a parameter group_alignment it gets the plan's
        expert_alignment as that, for those two. It may change the trailing shape
        and the dtype, and return a pytree. What it returns for pads and unused
        rows is not read.
      comm: the communicator.
      num_experts: E, see `make_plan`.
      options: sizes of buffers, what is dropped, and whether tokens are replicated;
        see `PlanOptions`. The Plan tells about demand and overflow: `moe_with_plan`
        lets you look at it.
      unreduced: of replicated tokens, gives this rank's terms of the outputs and sums
        nothing; see `combine`.
      quantize: "fp8": x, one array [T, H], travels as `quantize_fp8` makes it, half
        the bytes, and expert_fn gets `Fp8Rows`, which `gated_mlp` multiplies as they
        are. What expert_fn returns comes home as it is, of `gated_mlp` bfloat16.
      **keywords: attributes of PlanOptions, in place of it. expert_alignment=None, the
        default, is what products are fastest with; where no expert row is dropped
        results do not depend on it.

    Returns:
      [T, ...] for each array that expert_fn returned.

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.
      RuntimeError: the communicator is closed.

    Derivative: that of the formula above, in x, topk_weights and whatever
    expert_fn closes over. Weights of choices that name no expert or that were
    dropped get exactly 0. With quantize straight through, as if x were not quantised,
    and in reverse mode only: cotangents of expert rows travel in bfloat16.
    """
    options = plan_options("moe", options, keywords)
    in_fp8 = quantize is not None
    plan = check_request(topk_idx, comm, num_experts, options, in_fp8=in_fp8).make()
    return moe_with_plan(
        x, topk_weights, expert_fn, plan, unreduced=unreduced, quantize=quantize
    )


def moe_with_plan(
    x: Any,
    topk_weights: jax.Array,
    expert_fn: ExpertFn,
    plan: Plan,
    *,
    unreduced: bool = False,
    quantize: Literal["fp8"] | None = None,
) -> Any:
    """`moe` with a plan at hand, whose demand and overflow can be looked at.

    Args:
      x: as for `moe`.
      topk_weights: as for `moe`.
      expert_fn: as for `moe`.
      plan: from `make_plan`, inside the same shard_map.
      unreduced: as for `moe`.
      quantize: as for `moe`.

    Returns:
      As `moe`.

    Raises:
      TypeError, ValueError, RuntimeError: as `moe`.

    Derivative: as of `moe`; the plan has none.
    """
    topk_weights = jnp.asarray(topk_weights)
    if quantize is not None:
        x = _checked_tokens(x, quantize)
    if isinstance(plan, Plan):  # else dispatch says what is wrong
        ops._check_weights("moe", topk_weights, (plan.num_tokens, plan.top_k), "T, K")
        ops._checked_leaves("dispatch", x, plan)  # before others travel beside it
    send = ops._dispatch_permute if quantize is None else fp8_dispatch.dispatch_permute
    # Together: what one launch brings is kept or made again as a whole.
    rows, weights = checkpoint_name(send(x, topk_weights, plan), "ep_rows")
    outputs = checkpoint_name(_call(expert_fn, rows, plan), "ep_outputs")
    terms = ops.unpermute(outputs, plan, weights)
    return ops.combine(terms, plan, unreduced=unreduced)


def _checked_tokens(x: Any, quantize: str) -> jax.Array:
    """What travels in FP8: one array [T, H]."""
    if quantize != "fp8":
        raise ValueError(
            f"jax_ep.moe: quantize must be None or 'fp8', found {quantize!r}"
        )
    leaves = jax.tree.leaves(x)
    if len(leaves) != 1 or not jax.tree_util.all_leaves([x]):
        raise TypeError(
            "jax_ep.moe: with quantize='fp8' x must be one array [T, H], found a tree "
            f"of {len(leaves)} leaves"
        )
    x = jnp.asarray(x)
    if x.ndim != 2 or x.dtype not in fp8.FLOATS:
        raise TypeError(
            "jax_ep.moe: with quantize='fp8' x must be bfloat16, float16 or float32 "
            f"[T, H], found {x.dtype}{list(x.shape)}"
        )
    return x


def _call(expert_fn: ExpertFn, rows: Any, plan: Plan) -> Any:
    """What the experts make of their rows."""
    try:
        parameters = inspect.signature(expert_fn).parameters
    except (TypeError, ValueError):  # Some callables do not tell.
        parameters = {}
    if "group_alignment" not in parameters:
        return expert_fn(rows, plan.group_sizes)
    return expert_fn(rows, plan.group_sizes, group_alignment=plan.expert_alignment)
