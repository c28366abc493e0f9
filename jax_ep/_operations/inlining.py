"""Elementwise functions in the operations that Mosaic GPU has rules for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core


def inlined(fun: Callable[..., Any], *args: jax.Array) -> Any:
    """fun(*args) without calls and operations that kernels do not take."""
    closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    outs = _evaluate(closed.jaxpr, closed.consts, args)
    return jax.tree.unflatten(jax.tree.structure(shape), outs)


def _evaluate(jaxpr, consts, args):
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(var):
        return var.val if isinstance(var, core.Literal) else values[var]

    for eqn in jaxpr.eqns:
        ins = [read(var) for var in eqn.invars]
        inner = [eqn.params[n] for n in ("call_jaxpr", "jaxpr") if n in eqn.params]
        if eqn.primitive.name in _CALLS and inner:
            outs = _evaluate(inner[0].jaxpr, inner[0].consts, ins)
        elif (instead := _INSTEAD.get(eqn.primitive.name)) is not None:
            outs = [instead(*ins)]
        else:
            params = eqn.params
            if "accuracy" in params:  # Kernels have one for each operation.
                params = params | {"accuracy": None}
            outs = eqn.primitive.bind(*ins, **params)
            outs = outs if eqn.primitive.multiple_results else [outs]
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _erf(x):
    """Abramowitz and Stegun 7.1.26; off by less than 2e-7."""
    size = jnp.abs(x)
    t = 1 / (1 + 0.3275911 * size)
    sum_ = 1.061405429 * t - 1.453152027
    for term in (1.421413741, -0.284496736, 0.254829592):
        sum_ = sum_ * t + term
    value = 1 - sum_ * t * jnp.exp(-size * size)
    return lax.select(x < 0, -value, value)


def _polynomial(x, terms):
    """terms[0] + x * (terms[1] + x * ...)."""
    *others, value = terms
    for term in reversed(others):
        value = value * x + term
    return value


_CALLS = ("custom_jvp_call", "custom_vjp_call", "jit", "pjit", "closed_call")
_INSTEAD = {
    "add_any": lax.add,
    "copy": lambda x: x,
    "erf": _erf,
    "pow": lambda x, y: jnp.exp2(y * jnp.log2(x)),
    "erfc": lambda x: 1 - _erf(x),
    "polynomial": lambda x, *terms: _polynomial(x, terms),
    # A division takes ten times as long.
    "logistic": lambda x: lax.square(lax.rsqrt(1 + jnp.exp(-x))),
}
