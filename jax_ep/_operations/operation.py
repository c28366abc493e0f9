"""What an operation is, and the JAX primitive that one definition makes of it.

The only file that knows jax.interpreters. table.py holds the operations; others call
them by name, with `bind`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from jax_ep._operations import calls
from jax_ep._operations.arrays import SUMMABLE

LoweringContext = mlir.LoweringRuleContext


def _always(avals: Sequence[Any], params: Mapping[str, Any]) -> bool:
    del avals, params
    return True


def _nothing(avals: Sequence[Any], params: Mapping[str, Any]) -> Any:
    del avals, params
    return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Native:
    """A custom call that does an operation.

    Attributes:
      target: its name, as the native modules register it.
      backends: those that have it.
      fits: (avals of the operands, parameters) -> whether it serves these sizes. All
        ranks decide alike.
      owner: parameters -> the ranks or the buffer whose call it is; None where it is
        local to a device.
      slot: the kind of control slot that each call site takes, if any.
      routing: names of the routing operands that it takes, in its order; None: all.
      attributes: (avals, parameters) -> its attributes by name.
      scratch: (avals, parameters) -> what it has beside its results, behind them.
    """

    target: str
    backends: frozenset[str]
    fits: Callable[[Sequence[Any], Mapping[str, Any]], bool] = _always
    owner: Callable[[Mapping[str, Any]], Any] | None = None
    slot: Literal["plan", "rows"] | None = None
    routing: tuple[str, ...] | None = None
    attributes: Callable[..., Any] = _nothing
    scratch: Callable[..., Any] = _nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation: what JAX has to know of it.

    Its operands are the routing, which is integers, and then leaves. Rules are
    functions of the operation and of what JAX hands to the rule.

    Attributes:
      name: of the primitive, which users see in jaxprs and in policies of remat.
      results: (*avals, **parameters) -> avals of the results.
      reference: (*operands, **parameters) -> results in plain JAX, or by operations
        that it is made of.
      routing: names of the operands that stand before the leaves.
      native: the custom call that does it; None: there is only the reference.
      collective: every call is a rendezvous of ranks, which equal calls do not share.
      num_fields: results that stand before the rows.
      transpose: the operation that is its transpose, with the same routing and
        parameters; None where `back` says it, or where it has none.
      move: (routing, outputs, leaves, live, **parameters) -> rows of tangents, if that
        is not the operation itself. `live`: which leaves these are of.
      back: (routing, cotangents, live, **parameters) -> cotangents of leaves.
      summed_by: (itself, its transpose) as users call them, where that one adds rows.
      jvp, transposed, batch, dce, lowering: rules of its own, in place of those that
        follow from what is above.
      platforms: lowering rules of platforms that do better than the reference.
      eager: it also runs outside of jit, and no mesh axis counts.
    """

    name: str
    results: Callable[..., Any]
    reference: Callable[..., Any]
    routing: tuple[str, ...] = ()
    native: Native | None = None
    collective: bool = False
    num_fields: int = 0
    transpose: str | None = None
    move: Callable[..., Any] | None = None
    back: Callable[..., Any] | None = None
    summed_by: tuple[str, str] | None = None
    jvp: Callable[..., Any] | None = None
    transposed: Callable[..., Any] | None = None
    batch: Callable[..., Any] | None = None
    dce: Callable[..., Any] | None = None
    lowering: Callable[..., Any] | None = None
    platforms: Mapping[str, Callable[..., Any]] = dataclasses.field(
        default_factory=dict
    )
    eager: bool = False

    def num_before(self, params: Mapping[str, Any]) -> int:
        """Operands before the leaves: the routing, and weights where there are any."""
        return len(self.routing) + params.get("weighted", False)


TABLE: dict[str, Operation] = {}
_primitives: dict[str, Primitive] = {}


def bind(name: str, *operands: Any, **params: Any) -> list[Any]:
    """Calls the operation of that name."""
    return _primitives[name].bind(*operands, **params)


def define(op: Operation) -> None:
    """Makes the primitive, with all its rules."""
    primitive = Primitive(op.name)
    TABLE[op.name], _primitives[op.name] = op, primitive
    primitive.multiple_results = True
    primitive.def_abstract_eval(op.results)
    cacheable = not op.collective
    lowering = functools.partial(op.lowering or _lower, op)
    mlir.register_lowering(primitive, lowering, cacheable=cacheable)
    for platform, rule in op.platforms.items():
        rule = functools.partial(rule, op)
        mlir.register_lowering(primitive, rule, platform=platform, cacheable=cacheable)
    if op.eager:
        primitive.def_impl(
            lambda *operands, **params: _run(
                *operands, name=op.name, params=tuple(params.items())
            )
        )
    jvp, transposed = op.jvp, op.transposed
    if op.transpose or op.back:
        jvp, transposed = jvp or rows_jvp, transposed or rows_transposed
    if jvp is not None:
        ad.primitive_jvps[primitive] = functools.partial(jvp, op)
    if transposed is not None:
        ad.primitive_transposes[primitive] = functools.partial(transposed, op)
    batching.primitive_batchers[primitive] = functools.partial(
        op.batch or batch_rows, op
    )
    if op.dce is not None:
        partial_eval.dce_rules[primitive] = op.dce


@functools.partial(jax.jit, static_argnames=("name", "params"))
def _run(*operands, name, params):
    return bind(name, *operands, **dict(params))


# Lowering --------------------------------------------------------------------


def lower_fun(ctx: LoweringContext, function: Callable, operands: Sequence) -> Any:
    """Lowers JAX code that returns a list."""
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def lower_plain(ctx, function: Callable, operands, params: Mapping[str, Any]) -> Any:
    """Lowers JAX code that takes operands and params, and knows no mesh axes."""
    plain = lambda aval: jax.core.ShapedArray(aval.shape, aval.dtype)  # noqa: E731
    ctx = ctx.replace(
        avals_in=list(map(plain, ctx.avals_in)),
        avals_out=list(map(plain, ctx.avals_out)),
    )
    return lower_fun(ctx, functools.partial(function, **params), operands)


def call_of(
    ctx: LoweringContext,
    target: str,
    owner: Any,
    operands: Sequence[Any],
    avals_in: Sequence[Any],
    avals_out: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    slot: Literal["plan", "rows"] | None = None,
    **attributes: int,
) -> Sequence[Any]:
    """A call of `owner`, ranks or a buffer, whose first operand is the position."""
    position = calls.position(ctx, owner, lower_fun)
    return calls.communicator_call(
        *(ctx, target, owner, position, operands, avals_in, avals_out, options, slot),
        **attributes,
    )


def _lower(op: Operation, ctx: LoweringContext, *operands: Any, **params: Any) -> Any:
    """By the native call where there is one that serves, else by the reference."""
    native, avals = op.native, ctx.avals_in
    owner = None if native is None or native.owner is None else native.owner(params)
    backend = params.get("backend") if owner is None else owner.backend
    if (
        native is None
        or backend not in native.backends
        or not native.fits(avals, params)
    ):
        if op.eager:
            return lower_plain(ctx, op.reference, operands, params)
        return lower_fun(ctx, functools.partial(op.reference, **params), operands)
    taken = list(range(len(operands)))
    if native.routing is not None:
        taken = [op.routing.index(name) for name in native.routing]
        taken += range(len(op.routing), len(operands))
    arguments = (
        [operands[i] for i in taken],
        [avals[i] for i in taken],
        [*ctx.avals_out, *native.scratch(avals, params)],
    )
    attributes = dict(native.attributes(avals, params))
    if owner is None:
        results = calls.ffi_call(ctx, native.target, backend, *arguments, **attributes)
    else:
        results = call_of(
            *(ctx, native.target, owner, *arguments), slot=native.slot, **attributes
        )
    return results[: len(ctx.avals_out)]


# Differentiation -------------------------------------------------------------
# Leaves are linear, routing operands are integers.


def zero_tangent(x: jax.Array) -> ad.Zero:
    """The tangent of what does not depend on the inputs."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def is_zero(x: Any) -> bool:
    """Whether a tangent or cotangent is known to be 0."""
    return type(x) is ad.Zero


is_linear = ad.is_undefined_primal
instantiated = ad.instantiate_zeros


def zeros_of_linear(operands: Sequence[Any]) -> list[Any]:
    """Cotangents that no output asks for: 0 of what is linear, else None."""
    return [ad.Zero(x.aval) if is_linear(x) else None for x in operands]


def live_ones(values: Sequence[Any]) -> list[int]:
    """Which tangents or cotangents are not known to be 0."""
    return [i for i, value in enumerate(values) if not is_zero(value)]


def add_to(totals: list[Any], index: int, term: Any) -> None:
    """Adds a tangent or cotangent to that of `index`."""
    old = totals[index]
    totals[index] = term if is_zero(old) else ad.add_jaxvals(old, term)


def integers_jvp(op: Operation, primals, tangents, **params):
    """Integers in, integers out."""
    del tangents
    outputs = bind(op.name, *primals, **params)
    return outputs, list(map(zero_tangent, outputs))


def rows_jvp(op: Operation, primals, tangents, **params):
    """Tangents of rows go the way of rows."""
    count = op.num_before(params)
    outputs = bind(op.name, *primals, **params)
    result: list[Any] = list(map(zero_tangent, outputs))
    dots = tangents[count:]
    live = live_ones(dots)
    if live:
        leaves = [dots[i] for i in live]
        if op.move is None:
            moved = bind(op.name, *primals[:count], *leaves, **params)
        else:
            moved = op.move(primals[:count], outputs, leaves, live, **params)
        for i, tangent in zip(live, moved, strict=True):
            result[op.num_fields + i] = tangent
    return outputs, result


def rows_transposed(op: Operation, cotangents, *operands, **params):
    """Cotangents of rows go the way of the transpose."""
    count = op.num_before(params)
    before, leaves = operands[:count], operands[count:]
    result = zeros_of_linear(leaves)
    rows = cotangents[op.num_fields :]
    live = [i for i in live_ones(rows) if is_linear(leaves[i])]
    if op.summed_by is not None:
        for i in live:
            check_gradient(rows[i], *op.summed_by)
    if live:
        found = [rows[i] for i in live]
        if op.back is None:
            assert op.transpose is not None
            found = bind(op.transpose, *before, *found, **params)
        else:
            found = op.back(before, found, live, **params)
        for i, cotangent in zip(live, found, strict=True):
            result[i] = cotangent
    return [None] * count + result


def check_gradient(cotangent: jax.Array, op: str, transpose: str) -> None:
    """Raises TypeError where a leaf's cotangents have no sum."""
    if cotangent.dtype not in SUMMABLE:
        raise TypeError(
            f"jax_ep.{op}: a leaf of dtype {cotangent.dtype} has no gradient: "
            f"{transpose} cannot sum it; {op} a wider dtype, or say with "
            "jax.custom_vjp what the gradient is"
        )


def no_derivative(instead: str) -> Callable[..., Any]:
    """The JVP rule of what has none; `instead` has one."""

    def rule(op: Operation, primals, tangents, **params):
        if live_ones(tangents):
            raise TypeError(
                f"jax_ep.{op.name.removeprefix('ep_')}: it has no derivative; use "
                f"make_plan and jax_ep.{instead}, which has one, or "
                "jax.lax.stop_gradient"
            )
        return integers_jvp(op, primals, tangents, **params)

    return rule


# Batching --------------------------------------------------------------------


def _one_more(a: jax.Array, dim: int) -> list[tuple[int, int, int]]:
    """Padding for lax.pad that adds one element at the end of `dim`."""
    return [(0, int(axis == dim), 0) for axis in range(a.ndim)]


def _batch_size(args, dims) -> int:
    return next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)


def _element(i: int, args, dims) -> list[jax.Array]:
    """Operands of one element of the batch."""
    return [
        a if d is None else lax.index_in_dim(a, i, d, keepdims=False)
        for a, d in zip(args, dims, strict=True)
    ]


def _stacked(elements) -> tuple[list[jax.Array], list[int]]:
    return [jnp.stack(e) for e in zip(*elements, strict=True)], [0] * len(elements[0])


def each_element(op: Operation, args, dims, **params):
    """One call for each element, because its routing differs."""
    size = _batch_size(args, dims)
    if size == 0:
        # Nothing to send; one blank element shows what the results look like.
        args = [
            a if d is None else lax.pad(a, jnp.zeros((), a.dtype), _one_more(a, d))
            for a, d in zip(args, dims, strict=True)
        ]
        outputs, out_dims = each_element(op, args, dims, **params)
        return [out[:0] for out in outputs], out_dims
    return _stacked(
        [bind(op.name, *_element(i, args, dims), **params) for i in range(size)]
    )


def one_after_another(op: Operation, args, dims, **params):
    """One call for each element, after the one before it: they share memory."""
    elements: list[Any] = []
    for i in range(_batch_size(args, dims)):
        after = elements[-1][:1] if elements else []
        elements.append(bind(op.name, *_element(i, args, dims), *after, **params))
    if not elements:
        avals = [
            jax.core.ShapedArray(
                a.shape if d is None else (*a.shape[:d], *a.shape[d + 1 :]), a.dtype
            )
            for a, d in zip(args, dims, strict=True)
        ]
        abstract, _ = _primitives[op.name].abstract_eval(*avals, **params)
        return [jnp.zeros((0, *out.shape), out.dtype) for out in abstract], [0] * len(
            abstract
        )
    return _stacked(elements)


def folded(leaf: jax.Array, dim: int | None) -> jax.Array:
    """A batch over rows becomes part of the row."""
    return leaf if dim is None else jnp.moveaxis(leaf, dim, 1)


def batch_rows(op: Operation, args, dims, **params):
    """One routing for the whole batch: it becomes part of the rows."""
    count = op.num_before(params)
    if any(d is not None for d in dims[:count]):
        return each_element(op, args, dims, **params)
    leaf_dims = dims[count:]
    leaves = map(folded, args[count:], leaf_dims)
    outputs = bind(op.name, *args[:count], *leaves, **params)
    out_dims = [None if d is None else 1 for d in leaf_dims]
    return outputs, [None] * op.num_fields + out_dims


def vmapped(op: Operation, args, dims, **params):
    """By the reference, which knows how."""
    function = functools.partial(op.reference, **params)
    outputs = jax.vmap(function, in_axes=tuple(dims))(*args)
    return outputs, [0] * len(outputs)
