"""The JAX primitives of gated MLPs: glu(rows @ w_gate, rows @ w_up) @ w_down.

ep_gated_mlp is all of it. Its derivatives are taken at gate and up, which ep_gated
gives beside the hidden values, in the dtype of rows. There the rest of the MLP has
two linear maps, each the other's transpose:

    ep_gated_down_jvp:  (gate_dot, up_dot, w_down_dot) -> output_dot
    ep_gated_down_vjp:  cotangent of the output -> those of gate, up and w_down

So a backward pass keeps rows, gate and up, hidden values are written again by the
kernel that takes the cotangents back through them, and all other products are those
of product_primitives.py.

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
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching

from jax_ep._operations import product_primitives
from jax_ep._operations.primitive_rules import (
    define_everywhere,
    lower_plain,
    zero_tangent,
)
from jax_ep._operations.product_primitives import (
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
    (out,) = mlp_p.bind(
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
    (out,) = batches_p.bind(
        *equally_varying(counts, rows, *weights, *biases), glu=glu, precision=precision
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


def _plain_gated(group_sizes, rows, *others, glu, **products):
    gate, up = _gate_and_up(group_sizes, rows, *others, **products)
    return [glu(*_widened(gate, up)).astype(rows.dtype), gate, up]


def by_products(group_sizes, rows, w_gate, w_up, w_down, *biases, glu, **products):
    """The MLP without primitives of its own: [its output]."""
    others = w_gate, w_up, *biases
    hidden, *_ = _plain_gated(group_sizes, rows, *others, glu=glu, **products)
    return [_times(group_sizes, hidden, w_down, **products)]


def _times(group_sizes, lhs, rhs, **products) -> jax.Array:
    return product_primitives.rows(group_sizes, lhs, rhs, dtype=lhs.dtype, **products)


def _plain_down_jvp(group_sizes, gate, up, w_down, *dots, glu, **products):
    hidden, hidden_dot = jax.jvp(
        glu, tuple(_widened(gate, up)), tuple(_widened(*dots[:2]))
    )
    lhs = [hidden_dot.astype(gate.dtype)]
    rhs = [[w_down]]
    if len(dots) == 3:
        lhs, rhs = [*lhs, hidden.astype(gate.dtype)], [*rhs, [dots[2]]]
    products |= {"dtype": gate.dtype, "transpose_rhs": False}
    return row_blocks(group_sizes, lhs, rhs, **products)


def _plain_down_vjp(group_sizes, gate, up, w_down, ct, *, glu, by_weights, **products):
    hidden, pull = jax.vjp(glu, *_widened(gate, up))
    d_hidden = _times(group_sizes, ct, w_down, transpose_rhs=True, **products)
    found = [d.astype(gate.dtype) for d in pull(*_widened(d_hidden))]
    if by_weights:
        hidden = hidden.astype(gate.dtype)
        found.append(
            product_primitives.weights(
                group_sizes, hidden, ct, dtype=w_down.dtype, **products
            )
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


def _batches_abstract_eval(counts, rows, w_gate, w_up, w_down, *biases, **_):
    del counts, w_gate, w_up, biases
    return [result_aval(rows, (*rows.shape[:2], w_down.shape[2]), rows.dtype)]


def _mlp_abstract_eval(group_sizes, rows, w_gate, w_up, w_down, *biases, **_):
    del group_sizes, w_gate, w_up, biases
    return [result_aval(rows, (rows.shape[0], w_down.shape[2]), rows.dtype)]


def _gated_abstract_eval(group_sizes, rows, w_gate, *others, **_):
    del group_sizes, others
    return 3 * [result_aval(rows, (rows.shape[0], w_gate.shape[2]), rows.dtype)]


def _down_jvp_abstract_eval(group_sizes, gate, up, w_down, *dots, **_):
    del group_sizes, up, dots
    return [result_aval(gate, (gate.shape[0], w_down.shape[2]), gate.dtype)]


def _down_vjp_abstract_eval(group_sizes, gate, up, w_down, ct, *, by_weights, **_):
    del group_sizes, ct
    found = [gate, up, w_down][: 3 if by_weights else 2]
    return [result_aval(a, a.shape, a.dtype) for a in found]


# Lowering: kernels where there are some for the rows and for glu -------------


NOT_ELEMENTWISE = "the activation is not made of elementwise operations that they know"


def _cuda_lowering(plain: Callable, kernel: Callable, ctx, *operands, **params):
    if any(0 in a.shape for a in ctx.avals_in):
        return lower_plain(ctx, plain, operands, params)
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
        kernel = functools.partial(kernel, product_kernels)
        return lower_plain(ctx, kernel, operands, params)
    if has_batches:
        _warn(reason)
    # Else each product tells by itself where it has no kernel.
    return lower_plain(ctx, plain, operands, params)


def _warn(reason: str) -> None:
    """Python shows one warning for each reason: it is always of this line."""
    warnings.warn(
        "jax_ep.gated_mlp: multiplying whole batches, rows without a token included, "
        f"which is slow on GPUs: the kernels do not serve: {reason}",
        stacklevel=1,
    )


def _kernel_mlp(
    kernels, group_sizes, rows, w_gate, w_up, w_down, *biases, glu, group_alignment
):
    others = w_gate, w_up, *biases
    options = {"group_alignment": group_alignment}
    (hidden,) = kernels.gated(
        group_sizes, rows, *others, glu=glu, keep=False, **options
    )
    return [kernels.rows(group_sizes, [(hidden, w_down)], **options)]


def _kernel_batches(kernels, *operands, **params):
    return kernels.gated_batches(*operands, **params)


def _kernel_gated(kernels, *operands, **params):
    return kernels.gated(*operands, keep=True, **params)


def _kernel_down_vjp(kernels, *operands, **params):
    return kernels.gated_down_vjp(*operands, **params)


# Differentiation -------------------------------------------------------------


def _dots(group_sizes, rows, *others, tangents, **products) -> list[Any]:
    """Tangents of gate and up, from those of the operands; None where there is none."""
    products |= {"dtype": rows.dtype, "transpose_rhs": False}
    dots: list[Any] = [None, None]
    if type(tangents[0]) is not ad.Zero:
        dots = row_blocks(group_sizes, [tangents[0]], [others[:2]], **products)
    for i, dot in enumerate(tangents[1:]):
        if type(dot) is ad.Zero:
            continue
        if i < 2:
            term = product_primitives.rows(group_sizes, rows, dot, **products)
        else:
            term = bias_rows(group_sizes, dot, len(rows), rows.dtype)
        dots[i % 2] = term if dots[i % 2] is None else dots[i % 2] + term
    if all(dot is None for dot in dots):
        return []
    like = dots[0] if dots[1] is None else dots[1]
    return [jnp.zeros_like(like) if dot is None else dot for dot in dots]


def _gated_jvp(primals, tangents, *, glu, **products):
    outputs = gated_p.bind(*primals, glu=glu, **products)
    dots = _dots(*primals, tangents=tangents[1:], **products)
    if not dots:
        return outputs, list(map(zero_tangent, outputs))
    _, hidden_dot = jax.jvp(glu, tuple(_widened(*outputs[1:])), tuple(_widened(*dots)))
    return outputs, [hidden_dot.astype(outputs[0].dtype), *dots]


def _mlp_jvp(primals, tangents, **params):
    products = {k: v for k, v in params.items() if k != "glu"}
    group_sizes, rows, w_gate, w_up, w_down, *biases = primals
    _, rows_dot, w_gate_dot, w_up_dot, w_down_dot, *bias_dots = tangents
    point = group_sizes, rows, w_gate, w_up, *biases
    hidden, gate, up = gated_p.bind(*point, **params)
    output = _times(group_sizes, hidden, w_down, **products)
    dots = _dots(
        *point, tangents=(rows_dot, w_gate_dot, w_up_dot, *bias_dots), **products
    )
    by_weights = type(w_down_dot) is not ad.Zero
    if dots:
        dots += [w_down_dot] * by_weights
        operands = equally_varying(group_sizes, gate, up, w_down, *dots)
        return [output], down_jvp_p.bind(*operands, **params)
    if by_weights:
        return [output], [_times(group_sizes, hidden, w_down_dot, **products)]
    return [output], [zero_tangent(output)]


_POINT = 4  # group_sizes, gate, up and w_down stand before what is linear.


def _batches_jvp(primals, tangents, **params):
    outputs = batches_p.bind(*primals, **params)
    if all(type(t) is ad.Zero for t in tangents):
        return outputs, list(map(zero_tangent, outputs))
    function = functools.partial(plain_batches, primals[0], **params)
    tangents = tuple(map(ad.instantiate_zeros, tangents[1:]))
    return outputs, jax.jvp(function, tuple(primals[1:]), tangents)[1]


def _down_jvp(primitive: Primitive, plain, primals, tangents, **params):
    """Linear in the last operands; at another point it is another map."""
    if all(type(t) is ad.Zero for t in tangents[1:_POINT]):
        outputs = primitive.bind(*primals, **params)
        linear = tangents[_POINT:]
        if all(type(t) is ad.Zero for t in linear):
            return outputs, list(map(zero_tangent, outputs))
        linear = map(ad.instantiate_zeros, linear)
        return outputs, primitive.bind(*primals[:_POINT], *linear, **params)
    return jax.jvp(
        functools.partial(plain, primals[0], **params),
        tuple(primals[1:]),
        tuple(map(ad.instantiate_zeros, tangents[1:])),
    )


def _down_jvp_transpose(cotangents, *operands, **params):
    (ct,) = cotangents
    point, linear = operands[:_POINT], operands[_POINT:]
    if type(ct) is ad.Zero:
        found = [ad.Zero(a.aval) for a in linear]
    else:
        found = down_vjp_p.bind(*point, ct, by_weights=len(linear) == 3, **params)
    return [None] * _POINT + [
        d if ad.is_undefined_primal(a) else None
        for d, a in zip(found, linear, strict=True)
    ]


def _down_vjp_transpose(cotangents, *operands, by_weights, **params):
    del by_weights
    *point, linear = operands
    if all(type(ct) is ad.Zero for ct in cotangents):
        return [None] * _POINT + [ad.Zero(linear.aval)]
    cotangents = map(ad.instantiate_zeros, cotangents)
    return [None] * _POINT + down_jvp_p.bind(*point, *cotangents, **params)


# Batching: by products, which know how ---------------------------------------


def _batch(plain, args, dims, **params):
    outputs = jax.vmap(functools.partial(plain, **params), in_axes=tuple(dims))(*args)
    return outputs, [0] * len(outputs)


# Definitions -----------------------------------------------------------------


def _define(name: str, abstract_eval, plain, kernel, jvp) -> Primitive:
    rule = functools.partial(_cuda_lowering, plain, kernel)
    rules = {} if kernel is None else {"cuda": rule}
    primitive = define_everywhere(name, abstract_eval, plain, rules)
    batching.primitive_batchers[primitive] = functools.partial(_batch, plain)
    ad.primitive_jvps[primitive] = jvp
    return primitive


mlp_p = _define("ep_gated_mlp", _mlp_abstract_eval, by_products, _kernel_mlp, _mlp_jvp)
batches_p = _define(
    "ep_gated_batches",
    _batches_abstract_eval,
    plain_batches,
    _kernel_batches,
    _batches_jvp,
)
gated_p = _define(
    "ep_gated", _gated_abstract_eval, _plain_gated, _kernel_gated, _gated_jvp
)
down_jvp_p = _define(
    "ep_gated_down_jvp",
    _down_jvp_abstract_eval,
    _plain_down_jvp,
    None,
    lambda *args, **params: _down_jvp(down_jvp_p, _plain_down_jvp, *args, **params),
)
ad.primitive_transposes[down_jvp_p] = _down_jvp_transpose
down_vjp_p = _define(
    "ep_gated_down_vjp",
    _down_vjp_abstract_eval,
    _plain_down_vjp,
    _kernel_down_vjp,
    lambda *args, **params: _down_jvp(down_vjp_p, _plain_down_vjp, *args, **params),
)
ad.primitive_transposes[down_vjp_p] = _down_vjp_transpose
