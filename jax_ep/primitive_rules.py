"""What the rules of all primitives share; knows none of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

# Leaves that one launch carries: kMaxLeaves in cc/layout.h.
MAX_LEAVES = 16

SUMMABLE = frozenset(
    jnp.dtype(name)
    for name in (
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    )
)


def varying(x: Any) -> frozenset[str]:
    """The mesh axes over which x varies; empty where check_vma is off."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def make_varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Casts x to vary over `axes`; nothing to do where check_vma is off."""
    missing = tuple(sorted(axes - varying(x)))
    if not missing or not varying(lax.axis_index(missing)):
        return x
    return lax.pcast(x, missing, to="varying")


def define(name: str, abstract_eval, lowering, *, cacheable: bool) -> Primitive:
    """A primitive with several results.

    Args:
      name: what jaxprs show.
      abstract_eval: its rule.
      lowering: its rule for every platform.
      cacheable: whether equal calls may share a lowering.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, lowering, cacheable=cacheable)
    return primitive


def zero_tangent(x: jax.Array) -> ad.Zero:
    """The tangent of what does not depend on the inputs."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _one_more(a: jax.Array, dim: int) -> list[tuple[int, int, int]]:
    """Padding for lax.pad that adds one element at the end of `dim`."""
    return [(0, int(axis == dim), 0) for axis in range(a.ndim)]


def each_element(primitive: Primitive, args, dims, **params):
    """Batching rule: one call for each element, because its routing differs."""
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    if size == 0:
        # Nothing to send; one blank element shows what the results look like.
        args = [
            a if d is None else lax.pad(a, jnp.zeros((), a.dtype), _one_more(a, d))
            for a, d in zip(args, dims, strict=True)
        ]
        outputs, out_dims = each_element(primitive, args, dims, **params)
        return [out[:0] for out in outputs], out_dims
    elements = [
        primitive.bind(
            *(
                a if d is None else lax.index_in_dim(a, i, d, keepdims=False)
                for a, d in zip(args, dims, strict=True)
            ),
            **params,
        )
        for i in range(size)
    ]
    return [jnp.stack(e) for e in zip(*elements, strict=True)], [0] * len(elements[0])
