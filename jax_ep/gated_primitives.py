"""The JAX primitives of gated hidden values: glu(rows @ w_gate, rows @ w_up).

Beside the value (ep_gated) there are its two linear maps at a point, each the
other's transpose, with the same operands before their linear ones:

    ep_gated_jvp:  (gate_dot, up_dot) -> hidden_dot
    ep_gated_vjp:  cotangent of hidden -> those of gate and up

All three compute gate and up themselves, in float32. So a backward pass keeps what
the layer was called with and nothing of the hidden width, and kernels can do each
in one launch. What stands around them are products of product_primitives.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching

from jax_ep import product_primitives
from jax_ep.primitive_rules import define_everywhere, lower_plain, zero_tangent
from jax_ep.product_primitives import bias_rows, equally_varying, result_aval, wide

# (gate, up) -> hidden, number by number.
Glu = Callable[[jax.Array, jax.Array], jax.Array]


def gated(
    group_sizes: jax.Array,
    rows: jax.Array,
    weights: tuple[jax.Array, jax.Array],
    biases: tuple[jax.Array, ...],
    *,
    glu: Glu,
    group_alignment: int,
    precision: Any,
) -> jax.Array:
    """Hidden values [M, I] of rows [M, H], weights [G, H, I], biases [G, I].

    `glu` closes over no traced array; biases are two or none.
    """
    (hidden,) = gated_p.bind(
        *equally_varying(group_sizes, rows, *weights, *biases),
        glu=glu,
        group_alignment=group_alignment,
        precision=precision,
    )
    return hidden


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
    "abs add clamp convert_element_type copy custom_jvp_call div eq exp exp2 ge gt "
    "integer_pow jit le log logistic lt max min mul ne neg not and or pjit pow rsqrt "
    "select_n sign sqrt square stop_gradient sub tanh".split()
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


def _gate_and_up(group_sizes, rows, *others, glu, **params) -> tuple:
    """What glu is applied to, [M, I] each, in the dtype of sums."""
    del glu
    dtype = wide(rows.dtype)
    values = [
        product_primitives.rows(group_sizes, rows, w, dtype=dtype, **params)
        for w in others[:2]
    ]
    for i, bias in enumerate(others[2:]):
        values[i] += bias_rows(group_sizes, bias, len(rows), dtype)
    return tuple(values)


def by_products(group_sizes, rows, *others, glu, **params):
    """Hidden values without a primitive of their own: [that array]."""
    gate, up = _gate_and_up(group_sizes, rows, *others, glu=glu, **params)
    return [glu(gate, up).astype(rows.dtype)]


def _plain_jvp(group_sizes, rows, *others, glu, **params):
    *others, gate_dot, up_dot = others
    at = _gate_and_up(group_sizes, rows, *others, glu=glu, **params)
    dots = (gate_dot.astype(at[0].dtype), up_dot.astype(at[1].dtype))
    _, hidden_dot = jax.jvp(glu, at, dots)
    return [hidden_dot.astype(rows.dtype)]


def _plain_vjp(group_sizes, rows, *others, glu, **params):
    *others, ct = others
    at = _gate_and_up(group_sizes, rows, *others, glu=glu, **params)
    _, pull = jax.vjp(glu, *at)
    return [d.astype(rows.dtype) for d in pull(ct.astype(at[0].dtype))]


def _abstract_eval(group_sizes, rows, w_gate, *others, **_):
    del group_sizes, others
    return [result_aval(rows, (rows.shape[0], w_gate.shape[2]), rows.dtype)]


def _vjp_abstract_eval(*avals, **params):
    return 2 * _abstract_eval(*avals, **params)


# Lowering --------------------------------------------------------------------


def _cuda_lowering(plain: Callable, kernel: str, ctx, *operands, glu, **params):
    """A kernel where there is one for these rows and this glu, else products."""
    from jax_ep import mosaic_products

    group_sizes, rows, w_gate, *_ = ctx.avals_in
    glu_fits = in_kernels(glu_jaxpr(glu, ctx.avals_out[0].shape, rows.dtype))
    reason = (
        "glu"
        if not glu_fits
        else mosaic_products.unsupported_reason(
            [rows, w_gate], ctx.avals_out, product_primitives.device_of(ctx)
        )
    )
    if reason is not None or 0 in (*group_sizes.shape, *rows.shape, *w_gate.shape):
        return lower_plain(ctx, plain, operands, {"glu": glu, **params})

    def run(group_sizes, rows, w_gate, w_up, *others): ...

    return lower_plain(ctx, run, operands, {})


# Differentiation -------------------------------------------------------------


def _jvp(primals, tangents, **params):
    group_sizes, rows, *others = primals
    outputs = gated_p.bind(*primals, **params)
    products = {k: v for k, v in params.items() if k != "glu"}
    products |= {"dtype": rows.dtype, "transpose_rhs": False}
    dots: list[Any] = [None, None]  # of gate and up
    if type(tangents[1]) is not ad.Zero:
        dots = product_primitives.row_blocks(
            group_sizes, [tangents[1]], [others[:2]], **products
        )
    for i, dot in enumerate(tangents[2:]):
        if type(dot) is ad.Zero:
            continue
        if i < 2:
            term = product_primitives.rows(group_sizes, rows, dot, **products)
        else:
            term = bias_rows(group_sizes, dot, len(rows), rows.dtype)
        dots[i % 2] = term if dots[i % 2] is None else dots[i % 2] + term
    if all(dot is None for dot in dots):
        return outputs, [zero_tangent(outputs[0])]
    dots = [jnp.zeros_like(outputs[0]) if d is None else d for d in dots]
    return outputs, gated_jvp_p.bind(*equally_varying(*primals, *dots), **params)


def _linear_jvp(primitive: Primitive, plain, num_linear: int, primals, tangents, **p):
    """Linear in the last operands; at another point it is another map."""
    at, linear = tangents[:-num_linear], tangents[-num_linear:]
    if all(type(t) is ad.Zero for t in at[1:]):
        outputs = primitive.bind(*primals, **p)
        if all(type(t) is ad.Zero for t in linear):
            return outputs, list(map(zero_tangent, outputs))
        linear = list(map(ad.instantiate_zeros, linear))
        return outputs, primitive.bind(*primals[:-num_linear], *linear, **p)
    return jax.jvp(
        functools.partial(plain, primals[0], **p),
        tuple(primals[1:]),
        tuple(map(ad.instantiate_zeros, tangents[1:])),
    )


def _jvp_transpose(cotangents, *operands, **params):
    (ct,) = cotangents
    point, linear = operands[:-2], operands[-2:]
    if type(ct) is ad.Zero:
        return [None] * len(point) + [ad.Zero(a.aval) for a in linear]
    found = gated_vjp_p.bind(*point, ct, **params)
    return [None] * len(point) + [
        d if ad.is_undefined_primal(a) else None
        for d, a in zip(found, linear, strict=True)
    ]


def _vjp_transpose(cotangents, *operands, **params):
    *point, linear = operands
    if all(type(ct) is ad.Zero for ct in cotangents):
        return [None] * len(point) + [ad.Zero(linear.aval)]
    cotangents = map(ad.instantiate_zeros, cotangents)
    return [None] * len(point) + gated_jvp_p.bind(*point, *cotangents, **params)


# Batching: by products, which know how ---------------------------------------


def _batch(plain, args, dims, **params):
    outputs = jax.vmap(functools.partial(plain, **params), in_axes=tuple(dims))(*args)
    return outputs, [0] * len(outputs)


# Definitions -----------------------------------------------------------------


def _define(name: str, abstract_eval, plain, kernel: str | None) -> Primitive:
    rule = functools.partial(_cuda_lowering, plain, kernel)
    rules = {} if kernel is None else {"cuda": rule}
    primitive = define_everywhere(name, abstract_eval, plain, rules)
    batching.primitive_batchers[primitive] = functools.partial(_batch, plain)
    return primitive


gated_p = _define("ep_gated", _abstract_eval, by_products, "gated")
ad.primitive_jvps[gated_p] = _jvp
gated_jvp_p = _define("ep_gated_jvp", _abstract_eval, _plain_jvp, None)
ad.primitive_jvps[gated_jvp_p] = functools.partial(
    _linear_jvp, gated_jvp_p, _plain_jvp, 2
)
ad.primitive_transposes[gated_jvp_p] = _jvp_transpose
gated_vjp_p = _define("ep_gated_vjp", _vjp_abstract_eval, _plain_vjp, "gated_backward")
ad.primitive_jvps[gated_vjp_p] = functools.partial(
    _linear_jvp, gated_vjp_p, _plain_vjp, 1
)
ad.primitive_transposes[gated_vjp_p] = _vjp_transpose
