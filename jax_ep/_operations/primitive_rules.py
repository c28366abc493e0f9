"""What the rules of all primitives share; knows none of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jax_ep._data import native
from jax_ep._data.ranks import named_axes

if TYPE_CHECKING:
    from jax_ep._data.ranks import Ranks

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


def sum_dtype(dtype: Any) -> np.dtype:
    """The dtype in which rows of `dtype`, a summable one, are added up."""
    dtype = np.dtype(dtype)
    return dtype if dtype.itemsize > 2 else np.dtype(np.float32)


def varying(x: Any) -> frozenset[str]:
    """The mesh axes over which x varies; empty where check_vma is off."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def rank_axes(comm: Ranks) -> frozenset[str]:
    """The communicator's axes that are manual here: one of size 1 need not be."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset(named_axes(comm.axis_name)) & frozenset(mesh.manual_axes)


def make_varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Casts x to vary over `axes`; nothing to do where check_vma is off."""
    missing = tuple(sorted(axes - varying(x)))
    if not missing or not varying(lax.axis_index(missing)):
        return x
    return lax.pcast(x, missing, to="varying")


def has_elements(leaf: jax.Array) -> bool:
    """Whether a row of this leaf holds anything."""
    return math.prod(leaf.shape[1:]) > 0


def launches(leaves: Sequence[jax.Array], most: int = MAX_LEAVES) -> list[list[int]]:
    """Which leaves travel, launch by launch, at most `most` at a time.

    Leaves of no elements stay at home: XLA's GPU compiler does not survive an
    empty result beside others.
    """
    moving = [i for i, leaf in enumerate(leaves) if has_elements(leaf)]
    return [moving[n : n + most] for n in range(0, len(moving), most)]


def without_travel(leaf: jax.Array, num_rows: int) -> jax.Array:
    """[num_rows, ...] of a leaf that stays at home; any other leaf as it is."""
    if has_elements(leaf):
        return leaf
    return jnp.zeros_like(leaf, shape=(num_rows, *leaf.shape[1:]))


def bind_rows(
    leaves: Sequence[jax.Array],
    num_rows: int,
    bind: Callable[[Sequence[jax.Array]], Sequence[jax.Array]],
) -> list[jax.Array]:
    """What `bind` makes of all leaves, [num_rows, ...] each, launch by launch."""
    results = [without_travel(leaf, num_rows) for leaf in leaves]
    for launch in launches(leaves):
        moved = bind([leaves[i] for i in launch])
        for i, result in zip(launch, moved, strict=True):
            results[i] = result
    return results


def ffi_call(
    ctx: mlir.LoweringRuleContext,
    target: str,
    backend: str,
    operands: Sequence[Any],
    avals_in: Sequence[Any],
    avals_out: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    **attributes: int,
) -> Sequence[Any]:
    """Emits a custom call; RuntimeError where `backend` has no code for it.

    `options` are those of jax.ffi.ffi_lowering, such as aliases.
    """
    platforms = set(ctx.module_context.platforms)
    if not platforms <= native.PLATFORMS:
        raise RuntimeError(
            f"jax_ep: backend {backend!r} runs on {sorted(native.PLATFORMS)}, "
            f"found a program for {sorted(platforms)}; use backend='xla' there"
        )
    rule = jax.ffi.ffi_lowering(target, **(options or {}))
    return rule(
        ctx.replace(avals_in=avals_in, avals_out=avals_out),
        *operands,
        **{name: np.int64(value) for name, value in attributes.items()},
    )


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


def define_everywhere(
    name: str, abstract_eval, function: Callable, platforms: Mapping[str, Callable]
) -> Primitive:
    """A primitive that also runs outside of jit, and is plain JAX where it has to be.

    Args:
      name: what jaxprs show.
      abstract_eval: its rule.
      function: the JAX code that it stands for, which knows no mesh axes.
      platforms: lowering rules of platforms that do better.
    """

    def lowering(ctx, *operands, **params):
        return lower_plain(ctx, function, operands, params)

    primitive = define(name, abstract_eval, lowering, cacheable=True)
    primitive.def_impl(
        lambda *operands, **params: _run(
            *operands, primitive=primitive, params=tuple(params.items())
        )
    )
    for platform, rule in platforms.items():
        mlir.register_lowering(primitive, rule, platform=platform, cacheable=True)
    return primitive


@functools.partial(jax.jit, static_argnames=("primitive", "params"))
def _run(*operands, primitive, params):
    return primitive.bind(*operands, **dict(params))


def lower_plain(ctx, function: Callable, operands, params: Mapping[str, Any]) -> Any:
    """Lowers JAX code that takes operands and params, and knows no mesh axes."""
    plain = lambda aval: jax.core.ShapedArray(aval.shape, aval.dtype)  # noqa: E731
    ctx = ctx.replace(
        avals_in=list(map(plain, ctx.avals_in)),
        avals_out=list(map(plain, ctx.avals_out)),
    )
    function = functools.partial(function, **params)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def zero_tangent(x: jax.Array) -> ad.Zero:
    """The tangent of what does not depend on the inputs."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def integers_jvp(primitive: Primitive, primals, tangents, **params):
    """JVP rule: integers in, integers out."""
    del tangents
    outputs = primitive.bind(*primals, **params)
    return outputs, [zero_tangent(out) for out in outputs]


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


def folded(leaf: jax.Array, dim: int | None) -> jax.Array:
    """A batch over rows becomes part of the row."""
    return leaf if dim is None else jnp.moveaxis(leaf, dim, 1)


def batch_rows(primitive: Primitive, num_routing: int, args, dims, **params):
    """Batching rule of leaves that stand behind `num_routing` other operands."""
    if any(d is not None for d in dims[:num_routing]):
        return each_element(primitive, args, dims, **params)
    # One routing for the whole batch.
    leaf_dims = dims[num_routing:]
    leaves = map(folded, args[num_routing:], leaf_dims)
    outputs = primitive.bind(*args[:num_routing], *leaves, **params)
    return outputs, [None if d is None else 1 for d in leaf_dims]


def group_of_rows(ends: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """(i32[M], bool[M]): the group of each row, or 0, and whether it has one."""
    # The default method is a loop of small kernels on GPUs.
    group = jnp.searchsorted(
        ends, jnp.arange(num_rows, dtype=jnp.int32), side="right", method="compare_all"
    )
    inside = group < len(ends)
    return jnp.where(inside, group, 0), inside
