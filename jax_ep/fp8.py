"""FP8 rows: quantised per block of columns, half the bytes on the wire.

e4m3 (float8_e4m3fn) with one scale for each block of columns of each token:
x is about q * scale with |q| <= 448, as DeepSeek-V3 quantises activations
(arXiv:2412.19437, section 3.3). The scale is the block's largest magnitude, at
least 1e-4, over 448; "ue8m0" rounds it up to a power of two before anything is
quantised. The floor keeps a block of zeros from dividing by zero, and scales
in the normal range. The last block may be short.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import checks, ops
from jax_ep.plan import Plan
from jax_ep.primitive_rules import make_varying, varying

Scale = Literal["float32", "ue8m0"]

_FP8 = jnp.dtype("float8_e4m3fn")
_UE8M0 = jnp.dtype("float8_e8m0fnu")
_LARGEST = 448.0
_FLOOR = 1e-4
_FLOATS = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32")))


def quantize_fp8(
    x: jax.Array, block: int = 128, scale: Scale = "float32"
) -> tuple[jax.Array, jax.Array]:
    """Quantises the last axis of x in blocks.

    Args:
      x: [..., H], bfloat16, float16 or float32.
      block: columns that share a scale; the last block may be short.
      scale: "float32", or "ue8m0": a power of two, kept in one byte.

    Returns:
      (q, scales): q float8_e4m3fn [..., H]; scales [..., ceil(H / block)],
      float32 or float8_e8m0fnu. A block that holds an infinity or a NaN becomes
      NaN as a whole, scale included; no other block is affected.

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.

    Derivative: none; `dispatch_fp8` has one. JAX differentiates what stands
    here as it is, which for the rounding is 0 or a cast to FP8: put
    jax.custom_vjp around your own use.
    """
    x = jnp.asarray(x)
    block = checks.check_integer("quantize_fp8", "block", block, 1)
    _check_scale("quantize_fp8", scale)
    if x.ndim < 1 or x.dtype not in _FLOATS:
        raise TypeError(
            "jax_ep.quantize_fp8: x must be bfloat16, float16 or float32 [..., H], "
            f"found {x.dtype}{list(x.shape)}"
        )
    blocks = _in_blocks(x.astype(jnp.float32), block)
    # Magnitudes are ordered as their bits are, NaN above all: XLA's maximum of
    # floats may lose one.
    bits = lax.bitcast_convert_type(jnp.abs(blocks), jnp.uint32)
    amax = lax.bitcast_convert_type(bits.max(axis=-1, initial=0), jnp.float32)
    scales = jnp.where(
        jnp.isfinite(amax), jnp.maximum(amax, _FLOOR) / _LARGEST, jnp.nan
    )
    sent = scales
    if scale == "ue8m0":
        exponents = _exponents_above(scales)
        sent = lax.bitcast_convert_type(exponents, _UE8M0)
        scales = _power_of_two(exponents)
    # Division may end a rounding above 448, where e4m3 knows only NaN.
    q = jnp.clip(blocks / scales[..., None], -_LARGEST, _LARGEST).astype(_FP8)
    return q.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]], sent


def dequantize_fp8(
    q: jax.Array, scales: jax.Array, block: int = 128, dtype: Any = jnp.bfloat16
) -> jax.Array:
    """q * scales, block by block.

    Args:
      q: float8_e4m3fn [..., H].
      scales: [..., ceil(H / block)], float32 or float8_e8m0fnu.
      block: columns that share a scale, as they were quantised.
      dtype: of the result; the product is taken in float32.

    Returns:
      [..., H] of `dtype`.

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.

    Derivative: that of the product as it stands here, in which a cotangent of q
    is rounded to FP8; `dispatch_fp8` has a better one.
    """
    q, scales = jnp.asarray(q), jnp.asarray(scales)
    block = checks.check_integer("dequantize_fp8", "block", block, 1)
    if q.dtype != _FP8 or scales.dtype not in (jnp.dtype(jnp.float32), _UE8M0):
        raise TypeError(
            "jax_ep.dequantize_fp8: q must be float8_e4m3fn and scales float32 or "
            f"float8_e8m0fnu, found {q.dtype} and {scales.dtype}"
        )
    wanted = (*q.shape[:-1], -(-q.shape[-1] // block)) if q.ndim else None
    if scales.shape != wanted:
        raise ValueError(
            "jax_ep.dequantize_fp8: q must be [..., H] and scales "
            f"[..., ceil(H / {block})], found {list(q.shape)} and "
            f"{list(scales.shape)}"
        )
    if scales.dtype == _UE8M0:
        scales = _power_of_two(lax.bitcast_convert_type(scales, jnp.uint8))
    blocks = _in_blocks(q.astype(jnp.float32), block) * scales[..., None]
    return blocks.reshape(*q.shape[:-1], -1)[..., : q.shape[-1]].astype(dtype)


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
    _check_scale("dispatch_fp8", scale)
    block = checks.check_integer("dispatch_fp8", "block", block, 1)
    if x.ndim != 2 or x.dtype not in _FLOATS:
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
        x = make_varying(x, varying(x) | varying(plan._routes))
    return _straight_through(block, scale, x, plan)


def _send(x, plan, block, scale):
    return ops.dispatch(quantize_fp8(x, block, scale), plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _straight_through(block, scale, x, plan):
    q, scales = _send(x, plan, block, scale)
    return dequantize_fp8(q, scales, block, x.dtype)


def _forward(block, scale, x, plan):
    return _straight_through(block, scale, x, plan), plan


def _backward(block, scale, plan, cotangent):
    del block, scale
    return ops.combine(cotangent, plan), None


_straight_through.defvjp(_forward, _backward)


def _check_scale(op: str, scale: str) -> None:
    if scale not in ("float32", "ue8m0"):
        raise ValueError(
            f"jax_ep.{op}: scale must be 'float32' or 'ue8m0', found {scale!r}"
        )


def _in_blocks(x: jax.Array, block: int) -> jax.Array:
    """[..., H] -> [..., ceil(H / block), block], zeros at the end."""
    short = -x.shape[-1] % block
    if short:
        x = lax.pad(
            x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [(0, short, 0)]
        )
    return x.reshape(*x.shape[:-1], -1, block)


def _exponents_above(scales: jax.Array) -> jax.Array:
    """uint8 e with 2**(e - 127) the smallest power of two >= scales; 255: NaN.

    For normal numbers, which the floor ensures.
    """
    bits = lax.bitcast_convert_type(scales, jnp.uint32)
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0).astype(jnp.uint32)
    return jnp.where(jnp.isnan(scales), 255, exponents).astype(jnp.uint8)


def _power_of_two(exponents: jax.Array) -> jax.Array:
    """float32 2**(e - 127) of uint8 e, NaN for 255."""
    bits = exponents.astype(jnp.uint32) << 23
    # e = 0 would be a subnormal 2**-127.
    bits = jnp.where(exponents == 0, jnp.uint32(1 << 22), bits)
    bits = jnp.where(exponents == 255, jnp.uint32(0x7FC00000), bits)
    return lax.bitcast_convert_type(bits, jnp.float32)
