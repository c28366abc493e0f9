"""Rows that travel in FP8: dispatch_fp8, and what a layer in FP8 dispatches."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._api import ops
from jax_ep._data import checks
from jax_ep._data.plan import Plan
from jax_ep._operations import replicated
from jax_ep._operations.arrays import make_varying, varying
from jax_ep._operations.fp8 import (
    FLOATS,
    Fp8Rows,
    Scale,
    check_scale,
    dequantize_fp8,
    quantize_fp8,
)


def dispatch_fp8(
    x: jax.Array,
    plan: Plan,
    *,
    block: int = 128,
    scale: Scale = "float32",
    dequantize: bool = True,
) -> Any:
    """`dispatch` with rows quantised on the wire.

    Args:
      x: [T, H], bfloat16, float16 or float32.
      plan: from `make_plan`, inside the same shard_map.
      block: see `quantize_fp8`.
      scale: see `quantize_fp8`.
      dequantize: whether rows come out as x's dtype, or as they travelled.

    Returns:
      Rows [C, H] of x's dtype; or (q [C, H], scales [C, ceil(H / block)]), where
      slots that no row came to hold 0 in both.

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.
      RuntimeError: the plan's communicator is closed.

    Derivative: straight through, as if nothing were quantised: `combine` of the
    cotangents in x's dtype. Reverse mode only. With dequantize=False the result
    does not depend on x for JAX: FP8 holds no cotangents. Put jax.custom_vjp
    around it and the products that take (q, scales), with `combine` of a wider
    cotangent as its backward pass.
    """
    x = jnp.asarray(x)
    check_scale("dispatch_fp8", scale)
    block = checks.check_integer("dispatch_fp8", "block", block, 1)
    if x.ndim != 2 or x.dtype not in FLOATS:
        raise TypeError(
            "jax_ep.dispatch_fp8: x must be bfloat16, float16 or float32 [T, H], "
            f"found {x.dtype}{list(x.shape)}"
        )
    if isinstance(plan, Plan):  # else dispatch says what is wrong
        ops._checked_leaves("dispatch", x, plan)  # before it is two arrays
    if not dequantize:
        return _send(lax.stop_gradient(x), plan, block, scale)
    if isinstance(plan, Plan):
        # So that the cotangent's type is that of x.
        (x,) = replicated.own_copies([x], plan)
    return _straight_through(block, scale, x, plan)


def _send(x, plan, block, scale):
    return ops.dispatch(quantize_fp8(x, block, scale), plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _straight_through(block, scale, x, plan):
    q, scales = _send(x, plan, block, scale)
    return dequantize_fp8(q, scales, block, x.dtype)


def _home(cotangent, plan):
    """Of replicated tokens this rank's terms: x was made this rank's own copy."""
    return ops.combine(cotangent, plan, unreduced=plan.tokens == "replicated")


def _forward(block, scale, x, plan):
    return _straight_through(block, scale, x, plan), plan


def _backward(block, scale, plan, cotangent):
    del block, scale
    return _home(cotangent, plan), None


_straight_through.defvjp(_forward, _backward)


def dispatch_permute(x: jax.Array, others: Any, plan: Plan) -> tuple[Fp8Rows, Any]:
    """(permute(dispatch(x)) in FP8, dispatch(others)), as ops does in one launch."""
    (x,) = replicated.own_copies([x], plan)
    pair = quantize_fp8(lax.stop_gradient(x))
    (values, scales), received = ops._dispatch_permute(pair, others, plan)
    return Fp8Rows(values, scales, _carrier(x, plan)), received


@jax.custom_vjp
def _carrier(x, plan):
    """Zeros [S, H] whose cotangents go home to x."""
    zeros = jnp.zeros((plan.expert_capacity, x.shape[1]), jnp.bfloat16)
    return make_varying(zeros, varying(x))


def _carrier_forward(x, plan):
    return _carrier(x, plan), (jnp.zeros((0,), x.dtype), plan)


def _carrier_backward(kept, cotangent):
    like, plan = kept
    home = _home(ops.unpermute(cotangent, plan), plan)
    return home.astype(like.dtype), None


_carrier.defvjp(_carrier_forward, _carrier_backward)
