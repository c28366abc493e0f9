"""The JAX primitive of gated MLPs in FP8.

ep_fp8_gated_mlp is glu(rows @ w_gate, rows @ w_up) @ w_down with rows and matrices of
e4m3. Sums of 128 columns are scaled and added in float32, and hidden values are
quantised again, 128 columns a scale, before the second product.

It has no derivative of its own: `gated_mlp` here goes straight through, with the
gradient of the MLP in bfloat16 at the dequantised rows.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._operations import fp8, gated
from jax_ep._operations.arrays import group_of_rows
from jax_ep._operations.gated import Glu
from jax_ep._operations.operation import Operation, bind, lower_plain
from jax_ep._operations.ragged import equally_varying, result_aval

_BLOCK = 128
_OUT = jnp.dtype(jnp.bfloat16)

# A matrix, or what quantize_weights made of it.
Weights = jax.Array | fp8.Fp8Weights


def gated_mlp(
    group_sizes: jax.Array,
    rows: fp8.Fp8Rows,
    weights: Sequence[Weights],
    *,
    glu: Glu,
    group_alignment: int,
    precision: Any,
) -> jax.Array:
    """[M, N] in bfloat16, differentiable in rows.carrier and in matrices not in FP8.

    Args:
      group_sizes: i32[G].
      rows: [M, H].
      weights: w_gate and w_up [G, H, I], w_down [G, I, N].
      glu: closes over no traced array.
      group_alignment: what group_sizes are multiples of.
      precision: of lax's products.
    """
    carrier = rows.carrier
    if carrier is None:  # dead in a program: nothing reads them
        carrier = jnp.zeros(rows.values.shape, _OUT)
    leaves, tree = jax.tree.flatten(
        (group_sizes, rows.values, rows.scales, carrier, list(weights))
    )
    operands = jax.tree.unflatten(tree, equally_varying(*leaves))
    params = {"glu": glu, "group_alignment": group_alignment, "precision": precision}
    return _straight_through(tuple(params.items()), *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _straight_through(params, group_sizes, values, scales, carrier, weights):
    del carrier
    quantized = [
        w if isinstance(w, fp8.Fp8Weights) else fp8.quantize_weights(w) for w in weights
    ]
    matrices = [a for w in quantized for a in (w.values, w.scales)]
    operands = equally_varying(group_sizes, values, scales, *matrices)
    (out,) = bind("ep_fp8_gated_mlp", *operands, **dict(params))
    return out


def _forward(params, group_sizes, values, scales, carrier, weights):
    out = _straight_through(params, group_sizes, values, scales, carrier, weights)
    return out, (group_sizes, values, scales, weights)


def _backward(params, kept, cotangent):
    group_sizes, values, scales, weights = kept
    plain = [None if isinstance(w, fp8.Fp8Weights) else w for w in weights]

    def mlp(rows, plain):
        matrices = [
            w.dequantize(_OUT) if p is None else p.astype(_OUT)
            for w, p in zip(weights, plain, strict=True)
        ]
        return gated.gated_mlp(group_sizes, rows, matrices, (), **dict(params))

    rows = fp8.dequantize_fp8(values, scales, dtype=_OUT)
    _, pull = jax.vjp(mlp, rows, plain)
    by_rows, by_weights = pull(cotangent)
    return None, None, None, by_rows, by_weights


_straight_through.defvjp(_forward, _backward)


# Plain JAX -------------------------------------------------------------------


def reference(group_sizes, values, scales, *matrices, glu, precision, **_):
    """As the kernels do it: [the output]."""
    del precision  # Numbers of 8 bits: their products are exact in float32.
    gate, up, down = zip(matrices[::2], matrices[1::2], strict=True)
    product = functools.partial(_product, group_sizes)
    hidden = glu(product(values, scales, *gate), product(values, scales, *up))
    return [product(*fp8.quantize_fp8(hidden), *down).astype(_OUT)]


def _product(group_sizes, values, scales, matrices, matrix_scales) -> jax.Array:
    """float32 [M, N], 128 columns after the other; 0 behind the last group."""
    num_rows, n = len(values), matrices.shape[1]
    out = jnp.zeros((num_rows, n), jnp.float32)
    if 0 in (*values.shape, *matrices.shape):
        return out
    group, inside = group_of_rows(jnp.cumsum(group_sizes), num_rows)

    def blocks(a):
        """[K / 128, ..., 128] of [..., K]."""
        short = [(0, 0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % _BLOCK, 0)]
        a = lax.pad(a, jnp.zeros((), a.dtype), short)
        return jnp.moveaxis(a.reshape(*a.shape[:-1], -1, _BLOCK), -2, 0)

    def add(out, block):
        values, scale, matrices, matrix_scale = block
        part = lax.ragged_dot_general(
            values.astype(jnp.float32),
            matrices.astype(jnp.float32),
            group_sizes,
            lax.RaggedDotDimensionNumbers(
                dot_dimension_numbers=(([1], [2]), ([], [])),
                lhs_ragged_dimensions=[0],
                rhs_group_dimensions=[0],
            ),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        columns = jnp.repeat(matrix_scale[group], _BLOCK, axis=1)[:, :n]
        return out + part * (scale[:, None] * columns), None

    steps = (
        blocks(values),
        jnp.moveaxis(scales, 1, 0),
        blocks(matrices),
        jnp.moveaxis(matrix_scales, 2, 0),
    )
    return jnp.where(inside[:, None], lax.scan(add, out, steps)[0], 0)


def _in_bfloat16(group_sizes, values, scales, *matrices, glu, **products):
    """On GPUs without a kernel: of what it is dequantised to."""
    weights = [
        fp8.Fp8Weights(*pair).dequantize(_OUT)
        for pair in zip(matrices[::2], matrices[1::2], strict=True)
    ]

    def quantised_again(gate, up):
        hidden = glu(gate, up)
        return fp8.dequantize_fp8(*fp8.quantize_fp8(hidden), dtype=hidden.dtype)

    rows = fp8.dequantize_fp8(values, scales, dtype=_OUT)
    return gated.by_products(
        group_sizes, rows, *weights, glu=quantised_again, **products
    )


# Lowering --------------------------------------------------------------------


def results(group_sizes, values, *others, **_):
    del group_sizes
    width = others[-2].shape[1]
    return [result_aval(values, (values.shape[0], width), _OUT)]


def on_cuda(op: Operation, ctx, *operands, **params):
    if any(0 in a.shape for a in ctx.avals_in):
        return lower_plain(ctx, op.reference, operands, params)
    # Here, because Pallas takes time to import.
    from jax_ep._operations import product_kernels

    _, rows, _, gate, *_, down, _ = ctx.avals_in
    widths = (rows.shape[1], gate.shape[1], down.shape[1])
    reason = product_kernels.why_no_fp8(ctx, widths)
    glu = gated.glu_jaxpr(params["glu"], (64, 64), jnp.float32)
    if reason is None and not gated.in_kernels(glu):
        reason = gated.NOT_ELEMENTWISE
    if reason is None:
        del params["precision"]
        kernel = functools.partial(_kernel, product_kernels)
        return lower_plain(ctx, kernel, operands, params)
    return _warned(reason, ctx, operands, params)


def _kernel(kernels, *operands, **params):
    return kernels.fp8_gated_mlp(*operands, **params)


def on_rocm(op: Operation, ctx, *operands, **params):
    del op
    return _warned("the kernels are for NVIDIA GPUs", ctx, operands, params)


def _warned(reason, ctx, operands, params):
    """Python shows one warning for each reason: it is always of this line."""
    warnings.warn(
        "jax_ep.gated_mlp: copying FP8 rows and matrices to bfloat16 for its products, "
        f"which takes memory and is slower: the FP8 kernels do not serve: {reason}",
        stacklevel=1,
    )
    return lower_plain(ctx, _in_bfloat16, operands, params)
