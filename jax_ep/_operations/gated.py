"""The JAX exchanges of gated MLPs: glu(rows @ w_gate, rows @ w_up) @ w_down.

ep_gated_mlp is all of it. Its derivatives are taken at gate and up, which ep_gated
gives beside the hidden values, in the dtype of rows. There the rest of the MLP has
two linear maps, each the other's transpose:

    ep_gated_down_jvp:  (gate_dot, up_dot, w_down_dot) -> output_dot
    ep_gated_down_vjp:  cotangent of the output -> those of gate, up and w_down

So a backward pass keeps rows, gate and up, hidden values are written again by the
kernel that takes the cotangents back through them, and all other products are those
of ragged.py.

ep_gated_batches is the MLP of batches [G, M, H], of which each group has its first
rows. Its derivatives are those of plain JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jax_ep._operations import ragged
from jax_ep._operations.operation import (
    Operation,
    bind,
    instantiated,
    is_linear,
    is_zero,
    lower_plain,
    zero_tangent,
    zeros_of_linear,
)
from jax_ep._operations.ragged import (
    bias_rows,
    equally_varying,
    result_aval,
    row_blocks,
    wide,
)

# (gate, up) -> hidden, number by number, in the dtype of sums.
Glu = Callable[[jax.Array, jax.Array], jax.Array]


def gated_mlp(
    group_sizes: jax.Array,
    rows: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    *,
    glu: Glu,
    group_alignment: int,
    precision: Any,
) -> jax.Array:
    """Binds ep_gated_mlp: rows [M, H] -> [M, N].

    Args:
      group_sizes: i32[G].
      rows: [M, H].
      weights: w_gate and w_up [G, H, I], w_down [G, I, N].
      biases: of gate and up, [G, I], or none.
      glu: closes over no traced array.
      group_alignment: what group_sizes are multiples of.
      precision: of lax's products.
    """
    (out,) = bind(
        "ep_gated_mlp",
        *equally_varying(group_sizes, rows, *weights, *biases),
        glu=glu,
        group_alignment=group_alignment,
        precision=precision,
    )
    return out


def gated_batches(
    counts: jax.Array,
    rows: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    *,
    glu: Glu,
    precision: Any,
) -> jax.Array:
    """Binds ep_gated_batches: the first counts[g] of rows[g] -> [G, M, N]."""
    (out,) = bind(
        "ep_gated_batches",
        *equally_varying(counts, rows, *weights, *biases),
        glu=glu,
        precision=precision,
    )
    return out


@dataclasses.dataclass(frozen=True)
class Gated:
    """activation(gate) * up; equal where the activations are the same function."""

    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Hidden values of any shape."""
        return self.activation(gate) * up


def glu_jaxpr(glu: Glu, shape: tuple[int, ...], dtype: Any) -> ClosedJaxpr:
    """What glu does with gate and up of this shape, in the dtype of sums."""
    like = jax.ShapeDtypeStruct(shape, wide(dtype))
    return jax.make_jaxpr(glu)(like, like)


# What kernels compute of gate and up, each number by itself.
_IN_KERNELS = frozenset(
    "abs add add_any clamp convert_element_type copy custom_jvp_call div eq erf erfc "
    "exp exp2 ge gt integer_pow jit le log logistic lt max min mul ne neg and or "
    "pjit pow rsqrt select_n sign sqrt square stop_gradient sub tanh".split()
)


def in_kernels(closed: ClosedJaxpr) -> bool:
    """Whether kernels can compute it: number by number, of nothing else."""

    def only_known(jaxpr) -> bool:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name not in _IN_KERNELS:
                return False
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if inner is not None and (inner.consts or not only_known(inner.jaxpr)):
                return False
        return True

    return not closed.consts and only_known(closed.jaxpr)


# Plain JAX: products, and glu between them -----------------------------------


def _gate_and_up(group_sizes, rows, *others, **products) -> list[jax.Array]:
    """What glu is applied to, [M, I] each, in the dtype of rows."""
    products |= {"dtype": rows.dtype, "transpose_rhs": False}
    values = row_blocks(group_sizes, [rows], [others[:2]], **products)
    for i, bias in enumerate(others[2:]):
        dtype = wide(rows.dtype)
        value = values[i].astype(dtype)
        value += bias_rows(group_sizes, bias, len(rows), dtype)
        values[i] = value.astype(rows.dtype)
    return values


def _widened(*arrays) -> list[jax.Array]:
    return [a.astype(wide(a.dtype)) for a in arrays]


def gated_reference(group_sizes, rows, *others, glu, **products):
    gate, up = _gate_and_up(group_sizes, rows, *others, **products)
    return [glu(*_widened(gate, up)).astype(rows.dtype), gate, up]


def by_products(group_sizes, rows, w_gate, w_up, w_down, *biases, glu, **products):
    """The MLP without exchanges of its own: [its output]."""
    others = w_gate, w_up, *biases
    hidden, *_ = gated_reference(group_sizes, rows, *others, glu=glu, **products)
    return [_times(group_sizes, hidden, w_down, **products)]


def _times(group_sizes, lhs, rhs, **products) -> jax.Array:
    return ragged.rows(group_sizes, lhs, rhs, dtype=lhs.dtype, **products)


def down_jvp_reference(group_sizes, gate, up, w_down, *dots, glu, **products):
    hidden, hidden_dot = jax.jvp(
        glu, tuple(_widened(gate, up)), tuple(_widened(*dots[:2]))
    )
    lhs = [hidden_dot.astype(gate.dtype)]
    rhs = [[w_down]]
    if len(dots) == 3:
        lhs, rhs = [*lhs, hidden.astype(gate.dtype)], [*rhs, [dots[2]]]
    products |= {"dtype": gate.dtype, "transpose_rhs": False}
    return row_blocks(group_sizes, lhs, rhs, **products)


def down_vjp_reference(
    group_sizes, gate, up, w_down, ct, *, glu, by_weights, **products
):
    hidden, pull = jax.vjp(glu, *_widened(gate, up))
    d_hidden = _times(group_sizes, ct, w_down, transpose_rhs=True, **products)
    found = [d.astype(gate.dtype) for d in pull(*_widened(d_hidden))]
    if by_weights:
        hidden = hidden.astype(gate.dtype)
        found.append(
            ragged.weights(group_sizes, hidden, ct, dtype=w_down.dtype, **products)
        )
    return found


def plain_batches(
    counts, rows, w_gate, w_up, w_down, *biases, glu, precision
) -> list[jax.Array]:
    """The MLP of batches by products of whole batches: [its output]."""
    inside = jnp.arange(rows.shape[1])[None] < counts[:, None]

    def times(lhs, matrix, bias=None):
        out = jax.lax.dot_general(
            lhs,
            matrix,
            (([2], [1]), ([0], [0])),
            precision=precision,
            preferred_element_type=wide(rows.dtype),
        )
        if bias is not None:
            out += bias.astype(out.dtype)[:, None]
        return out.astype(rows.dtype)

    rows = jnp.where(inside[:, :, None], rows, 0)
    b_gate, b_up = biases or (None, None)
    gate, up = times(rows, w_gate, b_gate), times(rows, w_up, b_up)
    hidden = glu(*_widened(gate, up)).astype(rows.dtype)
    return [jnp.where(inside[:, :, None], times(hidden, w_down), 0)]


# Abstract evaluation ---------------------------------------------------------


def batches_results(counts, rows, w_gate, w_up, w_down, *biases, **_):
    del counts, w_gate, w_up, biases
    return [result_aval(rows, (*rows.shape[:2], w_down.shape[2]), rows.dtype)]


def mlp_results(group_sizes, rows, w_gate, w_up, w_down, *biases, **_):
    del group_sizes, w_gate, w_up, biases
    return [result_aval(rows, (rows.shape[0], w_down.shape[2]), rows.dtype)]


def gated_results(group_sizes, rows, w_gate, *others, **_):
    del group_sizes, others
    return 3 * [result_aval(rows, (rows.shape[0], w_gate.shape[2]), rows.dtype)]


def down_jvp_results(group_sizes, gate, up, w_down, *dots, **_):
    del group_sizes, up, dots
    return [result_aval(gate, (gate.shape[0], w_down.shape[2]), gate.dtype)]


def down_vjp_results(group_sizes, gate, up, w_down, ct, *, by_weights, **_):
    del group_sizes, ct
    found = [gate, up, w_down][: 3 if by_weights else 2]
    return [result_aval(a, a.shape, a.dtype) for a in found]


# Lowering: kernels where there are some for the rows and for glu -------------


NOT_ELEMENTWISE = "the activation is not made of elementwise operations that they know"


def on_cuda(kernel: Callable) -> Callable[..., Any]:
    """By `kernel` of product_kernels.py, where it serves."""

    def rule(op: Operation, ctx, *operands, **params):
        if any(0 in a.shape for a in ctx.avals_in):
            return lower_plain(ctx, op.reference, operands, params)
        # Here, because Pallas takes time to import.
        from jax_ep._operations import product_kernels

        # Rows of a batch are no columns: their number may be any.
        has_batches = len(ctx.avals_in[1].shape) == 3
        reason = product_kernels.why_none(ctx, only_last=has_batches)
        glu = glu_jaxpr(params["glu"], (64, 64), ctx.avals_in[1].dtype)
        if reason is None and not in_kernels(glu):
            reason = NOT_ELEMENTWISE
        if reason is None:
            del params["precision"]
            function = functools.partial(kernel, product_kernels)
            return lower_plain(ctx, function, operands, params)
        if has_batches:
            _warn(reason)
        # Else each product tells by itself where it has no kernel.
        return lower_plain(ctx, op.reference, operands, params)

    return rule


def _warn(reason: str) -> None:
    """Python shows one warning for each reason: it is always of this line."""
    warnings.warn(
        "jax_ep.gated_mlp: multiplying whole batches, rows without a token included, "
        f"which is slow on GPUs: the kernels do not serve: {reason}",
        stacklevel=1,
    )


def mlp_kernel(
    kernels, group_sizes, rows, w_gate, w_up, w_down, *biases, glu, group_alignment
):
    others = w_gate, w_up, *biases
    options = {"group_alignment": group_alignment}
    (hidden,) = kernels.gated(
        group_sizes, rows, *others, glu=glu, keep=False, **options
    )
    return [kernels.rows(group_sizes, [(hidden, w_down)], **options)]


def batches_kernel(kernels, *operands, **params):
    return kernels.gated_batches(*operands, **params)


def gated_kernel(kernels, *operands, **params):
    return kernels.gated(*operands, keep=True, **params)


def down_vjp_kernel(kernels, *operands, **params):
    return kernels.gated_down_vjp(*operands, **params)


# Differentiation -------------------------------------------------------------


def _dots(group_sizes, rows, *others, tangents, **products) -> list[Any]:
    """Tangents of gate and up, from those of the operands; None where there is none."""
    products |= {"dtype": rows.dtype, "transpose_rhs": False}
    dots: list[Any] = [None, None]
    if not is_zero(tangents[0]):
        dots = row_blocks(group_sizes, [tangents[0]], [others[:2]], **products)
    for i, dot in enumerate(tangents[1:]):
        if is_zero(dot):
            continue
        if i < 2:
            term = ragged.rows(group_sizes, rows, dot, **products)
        else:
            term = bias_rows(group_sizes, dot, len(rows), rows.dtype)
        dots[i % 2] = term if dots[i % 2] is None else dots[i % 2] + term
    if all(dot is None for dot in dots):
        return []
    like = dots[0] if dots[1] is None else dots[1]
    return [jnp.zeros_like(like) if dot is None else dot for dot in dots]


def gated_jvp(op: Operation, primals, tangents, *, glu, **products):
    outputs = bind(op.name, *primals, glu=glu, **products)
    dots = _dots(*primals, tangents=tangents[1:], **products)
    if not dots:
        return outputs, list(map(zero_tangent, outputs))
    _, hidden_dot = jax.jvp(glu, tuple(_widened(*outputs[1:])), tuple(_widened(*dots)))
    return outputs, [hidden_dot.astype(outputs[0].dtype), *dots]


def mlp_jvp(op: Operation, primals, tangents, **params):
    del op
    products = {k: v for k, v in params.items() if k != "glu"}
    group_sizes, rows, w_gate, w_up, w_down, *biases = primals
    _, rows_dot, w_gate_dot, w_up_dot, w_down_dot, *bias_dots = tangents
    point = group_sizes, rows, w_gate, w_up, *biases
    hidden, gate, up = bind("ep_gated", *point, **params)
    output = _times(group_sizes, hidden, w_down, **products)
    dots = _dots(
        *point, tangents=(rows_dot, w_gate_dot, w_up_dot, *bias_dots), **products
    )
    by_weights = not is_zero(w_down_dot)
    if dots:
        dots += [w_down_dot] * by_weights
        operands = equally_varying(group_sizes, gate, up, w_down, *dots)
        return [output], bind("ep_gated_down_jvp", *operands, **params)
    if by_weights:
        return [output], [_times(group_sizes, hidden, w_down_dot, **products)]
    return [output], [zero_tangent(output)]


_POINT = 4  # group_sizes, gate, up and w_down stand before what is linear.


def batches_jvp(op: Operation, primals, tangents, **params):
    outputs = bind(op.name, *primals, **params)
    if all(is_zero(t) for t in tangents):
        return outputs, list(map(zero_tangent, outputs))
    function = functools.partial(op.reference, primals[0], **params)
    tangents = tuple(map(instantiated, tangents[1:]))
    return outputs, jax.jvp(function, tuple(primals[1:]), tangents)[1]


def down_jvp(op: Operation, primals, tangents, **params):
    """Linear in the last operands; at another point it is another map."""
    if all(is_zero(t) for t in tangents[1:_POINT]):
        outputs = bind(op.name, *primals, **params)
        linear = tangents[_POINT:]
        if all(is_zero(t) for t in linear):
            return outputs, list(map(zero_tangent, outputs))
        linear = map(instantiated, linear)
        return outputs, bind(op.name, *primals[:_POINT], *linear, **params)
    return jax.jvp(
        functools.partial(op.reference, primals[0], **params),
        tuple(primals[1:]),
        tuple(map(instantiated, tangents[1:])),
    )


def down_jvp_transposed(op: Operation, cotangents, *operands, **params):
    del op
    (ct,) = cotangents
    point, linear = operands[:_POINT], operands[_POINT:]
    if is_zero(ct):
        found = zeros_of_linear(linear)
    else:
        sizes = params | {"by_weights": len(linear) == 3}
        found = bind("ep_gated_down_vjp", *point, ct, **sizes)
    return [None] * _POINT + [
        d if is_linear(a) else None for d, a in zip(found, linear, strict=True)
    ]


def down_vjp_transposed(op: Operation, cotangents, *operands, by_weights, **params):
    del op, by_weights
    *point, linear = operands
    if all(is_zero(ct) for ct in cotangents):
        return [None] * _POINT + zeros_of_linear([linear])
    cotangents = map(instantiated, cotangents)
    found = bind("ep_gated_down_jvp", *point, *cotangents, **params)
    return [None] * _POINT + found
