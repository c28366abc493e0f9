"""FP8 rows: quantised per block of columns, half the bytes on the wire.

e4m3 (float8_e4m3fn) with one scale for each block of columns of each token:
x is about q * scale with |q| <= 448, as DeepSeek-V3 quantises activations
(arXiv:2412.19437, section 3.3). The scale is the block's largest magnitude, at
least 1e-4, over 448; "ue8m0" rounds it up to a power of two before anything is
quantised. The floor keeps a block of zeros from dividing by zero, and scales
in the normal range. The last block may be short.

Fp8Rows and Fp8Weights are what the experts of a layer in FP8 multiply.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._data import checks

Scale = Literal["float32", "ue8m0"]

_FP8 = jnp.dtype("float8_e4m3fn")
_UE8M0 = jnp.dtype("float8_e8m0fnu")
_LARGEST = 448.0
_FLOOR = 1e-4
FLOATS = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32")))
_BLOCK = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Rows:
    """Expert rows of a layer with quantize="fp8", as `moe` hands them to experts.

    Attributes:
      values: float8_e4m3fn [S, H].
      scales: float32 [S, ceil(H / 128)], see `quantize_fp8`.
      carrier: bfloat16 [S, H], zeros that take the gradient back to the tokens, as
        FP8 holds none. Where nobody reads them XLA makes none. None: no gradient.
    """

    values: jax.Array
    scales: jax.Array
    carrier: jax.Array | None = None

    def dequantize(self, dtype: Any = jnp.bfloat16) -> jax.Array:
        """[S, H] of `dtype`. Derivative: straight through, to the tokens."""
        rows = dequantize_fp8(
            lax.stop_gradient(self.values),
            lax.stop_gradient(self.scales),
            dtype=dtype,
        )
        return rows if self.carrier is None else rows + self.carrier.astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Weights:
    """Matrices [..., K, N] in FP8, as `quantize_weights` makes them: x @ w is right.

    Attributes:
      values: float8_e4m3fn [..., N, K], transposed, as tensor cores want them.
      scales: float32 [..., ceil(N / 128), ceil(K / 128)].
    """

    values: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., K, N)."""
        *batch, n, k = self.values.shape
        return (*batch, k, n)

    def dequantize(self, dtype: Any = jnp.bfloat16) -> jax.Array:
        """[..., K, N] of `dtype`. Derivative: none."""
        *batch, n, _ = self.values.shape
        scales = jnp.repeat(lax.stop_gradient(self.scales), _BLOCK, axis=-2)
        scales = scales[..., :n, :].reshape(*batch, n, -1)
        wide = dequantize_fp8(lax.stop_gradient(self.values), scales, dtype=dtype)
        return wide.swapaxes(-1, -2)


def quantize_weights(weights: jax.Array) -> Fp8Weights:
    """Quantises matrices in blocks of 128 x 128, as `gated_mlp` takes them.

    Args:
      weights: [..., K, N], bfloat16, float16 or float32; x @ weights is the product.

    Returns:
      `Fp8Weights` of the same matrices, with scales as `quantize_fp8` chooses them;
      the last blocks may be short.

    Raises:
      TypeError: a bad argument, with the rule and what was found.

    Derivative: none. To train give `gated_mlp` the matrices as they are: with rows in
    FP8 it quantises them itself, and their gradient goes straight through.
    """
    weights = jnp.asarray(weights)
    if weights.ndim < 2 or weights.dtype not in FLOATS:
        raise TypeError(
            "jax_ep.quantize_weights: weights must be bfloat16, float16 or float32 "
            f"[..., K, N], found {weights.dtype}{list(weights.shape)}"
        )
    turned = lax.stop_gradient(weights).swapaxes(-1, -2)
    *batch, n, k = turned.shape
    short = [(0, 0, 0)] * len(batch) + [(0, -size % _BLOCK, 0) for size in (n, k)]
    tiles = lax.pad(turned, jnp.zeros((), turned.dtype), short)
    rows, columns = (size // _BLOCK for size in tiles.shape[-2:])
    tiles = tiles.reshape(*batch, rows, _BLOCK, columns, _BLOCK).swapaxes(-2, -3)
    flat = tiles.reshape(*batch, rows, columns, _BLOCK * _BLOCK)
    values, scales = quantize_fp8(flat, _BLOCK * _BLOCK)
    values = values.reshape(tiles.shape).swapaxes(-2, -3)
    values = values.reshape(*batch, rows * _BLOCK, columns * _BLOCK)
    return Fp8Weights(values[..., :n, :k], scales[..., 0])


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
    check_scale("quantize_fp8", scale)
    if x.ndim < 1 or x.dtype not in FLOATS:
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


def check_scale(op: str, scale: str) -> None:
    """Raises ValueError unless it is a kind of scale."""
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
