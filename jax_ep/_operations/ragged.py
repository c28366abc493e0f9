"""The JAX exchanges of grouped products.

With the rows i of a [M, .] array grouped, group after group, as group_sizes say:

    rows(lhs, rhs)[i] = lhs[i] @ rhs[g]      where row i is one of group g,
                        0                    behind the last group;
                        or by rhs[g].T
    weights(lhs, rhs)[g] = sum over the rows i of g of lhs[i, :, None] * rhs[i]

Each is linear in lhs and in rhs, and the transposes of each are the others, so
derivatives of every kind and order are these again. What rows behind the last
group hold is read by none of them.

ep_ragged_rows multiplies several lhs by a block of matrices, to one result for each
column of the block: result[q] = sum over p of rows(lhs[p], rhs[p][q]). So the
gradient by rows that several products share, as gate and up do, is one sum.

On CUDA a kernel does it where there is one (product_kernels.py), everywhere else
jax.lax.ragged_dot. Which is decided when a program is lowered for its device.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep._data import checks
from jax_ep._operations.arrays import group_of_rows, make_varying, varying
from jax_ep._operations.operation import (
    Operation,
    add_to,
    bind,
    each_element,
    is_linear,
    is_zero,
    live_ones,
    lower_plain,
    zero_tangent,
    zeros_of_linear,
)


def best_alignment(platform: str, rows_per_group: float) -> int:
    """What sizes of groups should be multiples of, for products on `platform`.

    Kernels take 128 rows at a time, of one group where groups are aligned to that.
    Groups of few rows are bound by reading their matrices: there tiles of 64 rows
    do, with half the pads to zero, read and write. With 64 rows on average about
    half of the groups would have two such tiles, which is slower than a high one.
    """
    if platform != "gpu":
        return 1
    return 64 if rows_per_group <= 48 else 128


def rows(
    group_sizes: jax.Array,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    transpose_rhs: bool = False,
    group_alignment: int,
    precision: Any,
    dtype: Any,
) -> jax.Array:
    """Binds ep_ragged_rows: [M, K] by [G, K, N] (or [G, N, K]) -> [M, N]."""
    (out,) = row_blocks(
        group_sizes,
        [lhs],
        [[rhs]],
        transpose_rhs=transpose_rhs,
        group_alignment=group_alignment,
        precision=precision,
        dtype=np.dtype(dtype),
    )
    return out


def row_blocks(
    group_sizes: jax.Array,
    lhs: Sequence[jax.Array],
    rhs: Sequence[Sequence[jax.Array]],
    **params: Any,
) -> list[jax.Array]:
    """Binds ep_ragged_rows: rhs[p][q] is what lhs[p] is multiplied by for result q."""
    operands = equally_varying(group_sizes, *lhs, *itertools.chain(*rhs))
    return bind("ep_ragged_rows", *operands, num_lhs=len(lhs), **params)


def _blocks(operands: Sequence[Any], num_lhs: int) -> tuple[Any, list[Any], list[Any]]:
    """(group_sizes, lhs, rhs) of the operands of ep_ragged_rows."""
    lhs, rest = list(operands[1 : 1 + num_lhs]), operands[1 + num_lhs :]
    columns = len(rest) // num_lhs
    rhs = [list(rest[p * columns :][:columns]) for p in range(num_lhs)]
    return operands[0], lhs, rhs


def weights(
    group_sizes: jax.Array,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    group_alignment: int,
    precision: Any,
    dtype: Any,
) -> jax.Array:
    """Binds ep_ragged_weights: [M, K] and [M, N] -> [G, K, N]."""
    (out,) = bind(
        "ep_ragged_weights",
        *equally_varying(group_sizes, lhs, rhs),
        group_alignment=group_alignment,
        precision=precision,
        dtype=np.dtype(dtype),
    )
    return out


def bias_rows(
    group_sizes: jax.Array, bias: jax.Array, num_rows: int, dtype: Any
) -> jax.Array:
    """bias [G, N] -> [num_rows, N]: that of each row's group, 0 behind the last.

    A product by a column of ones, so that its derivative is one of products: a sum
    in a fixed order, that rows behind the last group have no part in.
    """
    return rows(
        group_sizes,
        jnp.ones((num_rows, 1), dtype),
        bias[:, None, :].astype(dtype),
        group_alignment=1,
        precision=None,
        dtype=dtype,
    )


def equally_varying(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """All of them varying over what one of them varies over."""
    axes = frozenset().union(*map(varying, operands))
    return tuple(make_varying(a, axes) for a in operands)


def result_aval(like: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The abstract value of a result that varies as `like` does."""
    return like.update(
        shape=shape,
        dtype=np.dtype(dtype),
        weak_type=False,
        # No dimension is sharded, as grouped_products.py has checked.
        sharding=like.sharding.update(
            spec=jax.sharding.PartitionSpec(*(None for _ in shape))
        ),
    )


def rows_results(*avals, num_lhs, transpose_rhs, dtype, **_):
    _, lhs, rhs = _blocks(avals, num_lhs)
    return [
        result_aval(lhs[0], (lhs[0].shape[0], a.shape[_n(transpose_rhs)]), dtype)
        for a in rhs[0]
    ]


def weights_results(group_sizes, lhs, rhs, *, dtype, **_):
    shape = (group_sizes.shape[0], lhs.shape[1], rhs.shape[1])
    return [result_aval(lhs, shape, dtype)]


def _n(transpose_rhs: bool) -> int:
    """The axis of rhs that the result has, too."""
    return 1 if transpose_rhs else 2


# Plain JAX -------------------------------------------------------------------


def rows_reference(*operands, num_lhs, dtype, **params):
    group_sizes, lhs, rhs = _blocks(operands, num_lhs)
    if num_lhs == 1:
        return [_plain_product(group_sizes, lhs[0], r, dtype, **params) for r in rhs[0]]
    sums = []
    for column in zip(*rhs, strict=True):
        terms = [
            _plain_product(group_sizes, *pair, wide(dtype), **params)
            for pair in zip(lhs, column, strict=True)
        ]
        sums.append(functools.reduce(jnp.add, terms).astype(dtype))
    return sums


def _plain_product(group_sizes, lhs, rhs, dtype, *, transpose_rhs, precision, **_):
    if 0 in lhs.shape or 0 in rhs.shape:
        return jnp.zeros((lhs.shape[0], rhs.shape[_n(transpose_rhs)]), dtype)
    if _is_bias(lhs, transpose_rhs):
        group, inside = group_of_rows(jnp.cumsum(group_sizes), lhs.shape[0])
        bias = jnp.where(inside[:, None], rhs[group, 0], 0)
        return jnp.where(inside[:, None], lhs * bias, 0).astype(dtype)
    return lax.ragged_dot_general(
        lhs,
        rhs,
        group_sizes,
        lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(([1], [3 - _n(transpose_rhs)]), ([], [])),
            lhs_ragged_dimensions=[0],
            rhs_group_dimensions=[0],
        ),
        precision=precision,
        preferred_element_type=dtype,
    )


def weights_reference(group_sizes, lhs, rhs, *, precision, dtype, **_):
    if 0 in lhs.shape or 0 in rhs.shape or 0 in group_sizes.shape:
        return [jnp.zeros((*group_sizes.shape, lhs.shape[1], rhs.shape[1]), dtype)]
    if _is_bias(lhs):
        group, inside = group_of_rows(jnp.cumsum(group_sizes), lhs.shape[0])
        of_group = group[:, None] == jnp.arange(len(group_sizes), dtype=jnp.int32)[None]
        terms = jnp.where(inside[:, None], lhs * rhs, 0)
        sums = lax.dot_general(
            (of_group & inside[:, None]).astype(terms.dtype),
            terms,
            (([0], [0]), ([], [])),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=dtype,
        )
        return [sums[:, None]]
    return [
        lax.ragged_dot_general(
            lhs,
            rhs,
            group_sizes,
            lax.RaggedDotDimensionNumbers(
                dot_dimension_numbers=(([0], [0]), ([], [])),
                lhs_ragged_dimensions=[0],
                rhs_group_dimensions=[],
            ),
            precision=precision,
            preferred_element_type=dtype,
        )
    ]


def wide(dtype: Any) -> np.dtype:
    """The dtype of sums, and of what is computed from them before it rounds."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _is_bias(lhs, transpose_rhs: bool = False, **_) -> bool:
    """Whether rows are one number, as those of bias_rows: no product is needed."""
    return lhs.shape[1] == 1 and not transpose_rhs


# Lowering --------------------------------------------------------------------


def on_cuda(kernel: Callable) -> Callable[..., Any]:
    """By `kernel` of product_kernels.py, where it serves."""

    def rule(op: Operation, ctx, *operands, **params):
        group_sizes, lhs, *others = ctx.avals_in
        empty = 0 in group_sizes.shape or any(0 in a.shape for a in (lhs, *others))
        if empty or _is_bias(lhs, **params):
            return lower_plain(ctx, op.reference, operands, params)
        # Here, because Pallas takes time to import.
        from jax_ep._operations import product_kernels

        reason = product_kernels.why_none(ctx)
        if reason is not None:
            _warn(reason)
            return lower_plain(ctx, op.reference, operands, params)
        del params["precision"]  # Factors have 16 bits, their products are exact.
        function = functools.partial(kernel, product_kernels)
        return lower_plain(ctx, function, operands, params)

    return rule


def rows_kernel(kernels, *operands, num_lhs, dtype, **params):
    group_sizes, lhs, rhs = _blocks(operands, num_lhs)
    return [
        kernels.rows(
            group_sizes,
            list(zip(lhs, column, strict=True)),
            out_dtype=dtype,
            **params,
        )
        for column in zip(*rhs, strict=True)
    ]


def weights_kernel(kernels, group_sizes, lhs, rhs, *, dtype, **params):
    return [kernels.weights(group_sizes, lhs, rhs, out_dtype=dtype, **params)]


def on_rocm(op: Operation, ctx, *operands, **params):
    _warn("the kernels are for NVIDIA GPUs")
    return lower_plain(ctx, op.reference, operands, params)


def _warn(reason: str) -> None:
    """Python shows one warning for each reason: it is always of this line."""
    warnings.warn(
        "jax_ep.ragged_dot: falling back to jax.lax.ragged_dot, which is slow on "
        f"GPUs: {reason}",
        stacklevel=1,
    )


# Differentiation -------------------------------------------------------------


def rows_jvp(op: Operation, primals, tangents, *, num_lhs, **params):
    group_sizes, lhs, rhs = _blocks(primals, num_lhs)
    _, lhs_dots, rhs_dots = _blocks(tangents, num_lhs)
    outputs = bind("ep_ragged_rows", *primals, num_lhs=num_lhs, **params)
    result: list[Any] = list(map(zero_tangent, outputs))
    live = live_ones(lhs_dots)
    if live:
        of_live = [lhs_dots[p] for p in live], [rhs[p] for p in live]
        result = row_blocks(group_sizes, *of_live, **params)
    for q in range(len(outputs)):
        dots = [(lhs[p], [rhs_dots[p][q]]) for p in range(num_lhs)]
        dots = [(a, dot) for a, dot in dots if not is_zero(dot[0])]
        if dots:
            (term,) = row_blocks(group_sizes, *zip(*dots, strict=True), **params)
            add_to(result, q, term)
    return outputs, result


def weights_jvp(op: Operation, primals, tangents, **params):
    group_sizes, *factors = primals
    outputs = bind("ep_ragged_weights", *primals, **params)
    result: list[Any] = [zero_tangent(outputs[0])]
    for i, dot in enumerate(tangents[1:]):
        if not is_zero(dot):
            pair = (dot, factors[1]) if i == 0 else (factors[0], dot)
            add_to(
                result, 0, bind("ep_ragged_weights", group_sizes, *pair, **params)[0]
            )
    return outputs, result


def rows_transposed(op: Operation, cts, *operands, num_lhs, transpose_rhs, **params):
    group_sizes, lhs, rhs = _blocks(operands, num_lhs)
    live = live_ones(cts)
    results = zeros_of_linear((*lhs, *itertools.chain(*rhs)))
    linear = [p for p, a in enumerate(lhs) if is_linear(a)]
    if linear and live:
        found = row_blocks(
            group_sizes,
            [cts[q] for q in live],
            [[rhs[p][q] for p in linear] for q in live],
            **params
            | {"transpose_rhs": not transpose_rhs, "dtype": lhs[linear[0]].aval.dtype},
        )
        for p, cotangent in zip(linear, found, strict=True):
            results[p] = cotangent
    for p, q in itertools.product(range(num_lhs), live):
        if is_linear(rhs[p][q]):
            factors = (cts[q], lhs[p]) if transpose_rhs else (lhs[p], cts[q])
            options = params | {"dtype": rhs[p][q].aval.dtype}
            (cotangent,) = bind("ep_ragged_weights", group_sizes, *factors, **options)
            results[num_lhs + p * len(cts) + q] = cotangent
    return [None, *results]


def weights_transposed(op: Operation, cotangents, group_sizes, lhs, rhs, **params):
    (ct,) = cotangents
    by_lhs = is_linear(lhs)
    linear, other = (lhs, rhs) if by_lhs else (rhs, lhs)
    (out,) = zeros_of_linear([linear])
    if not is_zero(ct):
        params |= {"dtype": linear.aval.dtype, "transpose_rhs": by_lhs}
        out = rows(group_sizes, other, ct, **params)
    return [None, out, None] if by_lhs else [None, None, out]


# Batching: where one operand alone has a batch, it is one product ------------


def rows_batch(op: Operation, args, dims, *, num_lhs, **params):
    if len(args) > 3:
        products = functools.partial(_one_by_one, num_lhs=num_lhs, **params)
        outputs = jax.vmap(products, in_axes=tuple(dims))(*args)
        return outputs, [0] * len(outputs)
    group_sizes, lhs, rhs = args
    if dims[0] is None and dims[2] is None:
        # Rows of a batch stand together, and groups are longer.
        lhs = jnp.moveaxis(lhs, dims[1], 1)
        num_rows, batch, _ = lhs.shape
        if batch and num_rows * batch <= checks.INT32_MAX:
            lhs = lhs.reshape(num_rows * batch, -1)
            out = rows(group_sizes * batch, lhs, rhs, **params)
            return [out.reshape(num_rows, batch, -1)], [1]
    elif dims[0] is None and dims[1] is None:
        # Columns of all the batch's matrices.
        n = _n(params["transpose_rhs"])
        rhs = jnp.moveaxis(rhs, dims[2], n)
        batch, columns = rhs.shape[n : n + 2]
        shape = (*rhs.shape[:n], batch * columns, *rhs.shape[n + 2 :])
        out = rows(group_sizes, lhs, rhs.reshape(shape), **params)
        return [out.reshape(-1, batch, columns)], [1]
    return each_element(op, args, dims, num_lhs=num_lhs, **params)


def _one_by_one(*operands, num_lhs, **params):
    """All products of a block, each by itself."""
    group_sizes, lhs, rhs = _blocks(operands, num_lhs)
    return [
        functools.reduce(
            jnp.add,
            [
                rows(group_sizes, *pair, **params)
                for pair in zip(lhs, column, strict=True)
            ],
        )
        for column in zip(*rhs, strict=True)
    ]


def weights_batch(op: Operation, args, dims, **params):
    group_sizes, *factors = args
    batched = [i for i in (1, 2) if dims[i] is not None]
    if dims[0] is not None or len(batched) == 2:
        return each_element(op, args, dims, **params)
    (i,) = batched
    factor = jnp.moveaxis(args[i], dims[i], 1)
    num_rows, batch, columns = factor.shape
    factors[i - 1] = factor.reshape(num_rows, batch * columns)
    (out,) = bind("ep_ragged_weights", group_sizes, *factors, **params)
    shape = list(out.shape)
    shape[i : i + 1] = [batch, columns]
    return [out.reshape(shape)], [i]
