"""The primitives of operations in two halves: ep_dispatch_start and its kin.

A start takes rows and gives, leaf by leaf, the buffer that they arrive in and
the rows themselves, which must stay where they are until the done; and a signal,
a number that is there when the rows have been sent off. A done takes all three.
On backend "cuda" the rows travel between the two, on a stream of their own; the
others do the whole operation in the start.

Both halves are linear. In what a done hands back, the buffers change roles: the
cotangent of the arriving buffer is what departs, and that of the departing one
is what arrives. So the transpose of a done is the other operation's start, and
that of a start the other's done.

ep_tie puts work between them: its results are its operands, but wait for each
other. It knows which of them are signals, so that differentiation and removing
dead code never leave a start without its done.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import PartitionSpec as P

from jax_ep._operations import node_primitives, primitives, replicated
from jax_ep._operations.primitive_rules import (
    define,
    each_element,
    folded,
    zero_tangent,
)
from jax_ep._operations.primitives import NUM_ROUTING

if TYPE_CHECKING:
    from jax_ep._data.plan import Plan


@dataclasses.dataclass(frozen=True)
class _Operation:
    """What an operation's two halves are made of.

    Attributes:
      name: "dispatch" or "combine".
      rows: the parameter that holds the number of rows that arrive.
      whole, start, done: its primitives.
      other: the operation that is its transpose.
    """

    name: str
    rows: str
    whole: Primitive
    start: Callable[[], Primitive]
    done: Callable[[], Primitive]
    other: Callable[[], _Operation]


def _in_one_step(plan: Plan) -> types.ModuleType | None:
    """What does it all in the start: between nodes, and where nothing travels."""
    if plan.tokens == "replicated":
        return replicated
    return None if plan._crossing is None else node_primitives


def start(op: str, leaves: Sequence[jax.Array], plan: Plan):
    """Binds ep_<op>_start: (arriving, departing, signal). No leaf is empty."""
    whole = _in_one_step(plan)
    if whole is not None:
        arrived = getattr(whole, op)(leaves, plan)
        return arrived, leaves, jnp.zeros_like(plan._routes, np.float32, ())
    routing, leaves = primitives.varying_operands(leaves, plan)
    outputs = _OPERATIONS[op].start().bind(*routing, *leaves, **primitives.sizes(plan))
    count = len(leaves)
    return outputs[:count], outputs[count:-1], outputs[-1]


def done(
    op: str,
    arriving: Sequence[jax.Array],
    departing: Sequence[jax.Array],
    signal: jax.Array,
    plan: Plan,
) -> list[jax.Array]:
    """Binds ep_<op>_done: the rows that have arrived."""
    if _in_one_step(plan) is not None:
        return list(arriving)
    routing, _ = primitives.varying_operands((), plan)
    operands = *routing, *arriving, *departing, signal
    return _OPERATIONS[op].done().bind(*operands, **primitives.sizes(plan))


def tie(
    signals: Sequence[jax.Array], arrays: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The same, but none is there before all are."""
    if not (signals and arrays):
        return list(signals), list(arrays)
    outputs = tie_p.bind(*signals, *arrays, num_signals=len(signals))
    return outputs[: len(signals)], outputs[len(signals) :]


def _count(operands: Sequence[Any]) -> int:
    """Leaves of a done: arriving and departing ones stand before the signal."""
    return (len(operands) - NUM_ROUTING - 1) // 2


# Abstract evaluation ---------------------------------------------------------


def _start_abstract_eval(op: _Operation, *avals, **params):
    routes, leaves = avals[0], avals[NUM_ROUTING:]
    rows = params[op.rows]
    return [
        *(
            leaf.update(shape=(rows, *leaf.shape[1:]), weak_type=False)
            for leaf in leaves
        ),
        *(leaf.update(weak_type=False) for leaf in leaves),
        # A float, so that it has a cotangent and ties the backward pass too.
        routes.update(
            shape=(),
            dtype=np.dtype(np.float32),
            weak_type=False,
            sharding=routes.sharding.update(spec=P()),
        ),
    ]


def _done_abstract_eval(*avals, **_):
    arriving = avals[NUM_ROUTING : NUM_ROUTING + _count(avals)]
    return [leaf.update(weak_type=False) for leaf in arriving]


# Lowering --------------------------------------------------------------------


def _in_flight(ctx: mlir.LoweringRuleContext, params: dict) -> bool:
    """Whether rows travel between start and done in this program.

    Without tokens there is nothing to do, and a plain operation does it.
    """
    only_cuda = tuple(ctx.module_context.platforms) == ("cuda",)
    native = params["comm"].backend != "xla"
    return only_cuda and native and params["num_tokens"] > 0


def _barrier(ctx: mlir.LoweringRuleContext, values: Sequence, avals: Sequence):
    """Values that XLA's scheduler takes to come after all of `values`."""
    rule = mlir.lower_fun(lambda *a: lax.optimization_barrier(a), multiple_results=True)
    return rule(ctx.replace(avals_in=avals, avals_out=avals), *values)


# XLA drops neither half, nor moves one out of a loop without the other: the
# kernel would go on writing into memory that is free. JAX drops both (_tie_dce).
_IN_PLACE = {"has_side_effect": True}


def _start_lowering(op: _Operation, ctx, *operands, **params):
    count = len(operands) - NUM_ROUTING
    if not _in_flight(ctx, params):

        def whole(*operands):
            rows = op.whole.bind(*operands, **params)
            return [*rows, *operands[NUM_ROUTING:], jnp.zeros((), np.float32)]

        return mlir.lower_fun(whole, multiple_results=True)(ctx, *operands)
    signal = ctx.avals_out[-1]
    results = primitives.communicator_call(
        ctx,
        f"jax_ep_{op.name}_start",
        operands,
        ctx.avals_in,
        [*ctx.avals_out[:count], signal],
        params["comm"],
        _IN_PLACE,
    )
    # The done's operands come after the start, so that XLA has no reason to
    # make them a second time for the done: it has to see the same buffers.
    departing = _barrier(
        ctx,
        [results[count], *operands[NUM_ROUTING:]],
        [signal, *ctx.avals_out[count:-1]],
    )
    return [*results[:count], *departing[1:], departing[0]]


def _done_lowering(op: _Operation, ctx, *operands, **params):
    count = _count(operands)
    if not _in_flight(ctx, params):
        return operands[NUM_ROUTING : NUM_ROUTING + count]
    return primitives.communicator_call(
        ctx,
        f"jax_ep_{op.name}_done",
        operands,
        ctx.avals_in,
        ctx.avals_out,
        params["comm"],
        {
            # The rows arrive in the buffer that the start chose.
            "operand_output_aliases": {NUM_ROUTING + i: i for i in range(count)},
            **_IN_PLACE,
        },
    )


def _tie_lowering(ctx, *operands, num_signals):
    # Elsewhere the start has done everything, and order serves nobody.
    if not num_signals or tuple(ctx.module_context.platforms) != ("cuda",):
        return operands
    return _barrier(ctx, operands, ctx.avals_in)


# Differentiation -------------------------------------------------------------


def _is_zero(x: Any) -> bool:
    return type(x) is ad.Zero


def _start_jvp(op: _Operation, primals, tangents, **params):
    outputs = op.start().bind(*primals, **params)
    routing, leaves = primals[:NUM_ROUTING], tangents[NUM_ROUTING:]
    live = [i for i, t in enumerate(leaves) if not _is_zero(t)]
    result: list[Any] = [zero_tangent(out) for out in outputs]
    if live:
        moved = op.start().bind(*routing, *(leaves[i] for i in live), **params)
        for n, i in enumerate(live):
            result[i] = moved[n]
            result[len(leaves) + i] = moved[len(live) + n]
        result[-1] = moved[-1]
    return outputs, result


def _start_transpose(op: _Operation, cotangents, *operands, **params):
    routing, leaves = operands[:NUM_ROUTING], operands[NUM_ROUTING:]
    count = len(leaves)
    arriving, departing = cotangents[:count], cotangents[count:-1]
    # Where only the departing rows were used, they were themselves.
    result = list(departing)
    live = [i for i, ct in enumerate(arriving) if not _is_zero(ct)]
    if live:
        moved = (
            op.other()
            .done()
            .bind(
                *routing,
                *(ad.instantiate_zeros(departing[i]) for i in live),
                *(arriving[i] for i in live),
                ad.instantiate_zeros(cotangents[-1]),
                **params,
            )
        )
        for i, cotangent in zip(live, moved, strict=True):
            result[i] = cotangent
    return [
        *([None] * NUM_ROUTING),
        *(
            ct if ad.is_undefined_primal(leaf) else None
            for ct, leaf in zip(result, leaves, strict=True)
        ),
    ]


def _done_jvp(op: _Operation, primals, tangents, **params):
    outputs = op.done().bind(*primals, **params)
    count = len(outputs)
    arriving = tangents[NUM_ROUTING : NUM_ROUTING + count]
    departing = tangents[NUM_ROUTING + count : -1]
    live = [i for i in range(count) if not _is_zero(arriving[i])]
    result: list[Any] = [zero_tangent(out) for out in outputs]
    if live:
        moved = op.done().bind(
            *primals[:NUM_ROUTING],
            *(arriving[i] for i in live),
            *(ad.instantiate_zeros(departing[i]) for i in live),
            ad.instantiate_zeros(tangents[-1]),
            **params,
        )
        for i, tangent in zip(live, moved, strict=True):
            result[i] = tangent
    return outputs, result


def _done_transpose(op: _Operation, cotangents, *operands, **params):
    count = len(cotangents)
    result: list[Any] = [
        ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands
    ]
    live = [i for i, ct in enumerate(cotangents) if not _is_zero(ct)]
    if live:
        if op.name == "dispatch":
            for i in live:
                primitives.check_gradient(cotangents[i])
        moved = (
            op.other()
            .start()
            .bind(
                *operands[:NUM_ROUTING],
                *(cotangents[i] for i in live),
                **params,
            )
        )
        places = [NUM_ROUTING + count + i for i in live]  # what now arrives
        places += [NUM_ROUTING + i for i in live]  # what now departs
        for place, cotangent in zip([*places, -1], moved, strict=True):
            if result[place] is not None:
                result[place] = cotangent
    return result


def _tie_live(num_signals: int, values: Sequence[Any]) -> list[Any]:
    """Ties tangents or cotangents; those that are zero stay as they are."""
    result = list(values)
    live = [i for i, v in enumerate(values) if v is not None and not _is_zero(v)]
    signals = sum(i < num_signals for i in live)
    if 0 < signals < len(live):
        tied = tie_p.bind(*(values[i] for i in live), num_signals=signals)
        for i, value in zip(live, tied, strict=True):
            result[i] = value
    return result


def _tie_jvp(primals, tangents, *, num_signals):
    outputs = tie_p.bind(*primals, num_signals=num_signals)
    return outputs, _tie_live(num_signals, tangents)


def _tie_transpose(cotangents, *operands, num_signals):
    linear = [
        ct if ad.is_undefined_primal(x) else None
        for ct, x in zip(cotangents, operands, strict=True)
    ]
    return _tie_live(num_signals, linear)


def _tie_dce(used_outputs, *rest):
    """Unties what goes on from what does not.

    Without this rule a value that the backward pass needs would keep its tie
    alive, that the signal, and that a start whose done is gone.
    """
    eqn = rest[-1]  # jax 0.12 passes something before it
    if not any(used_outputs):
        return [False] * len(used_outputs), None
    keep = [i for i, used in enumerate(used_outputs) if used]
    num_signals = sum(i < eqn.params["num_signals"] for i in keep)
    untied = eqn.replace(
        invars=[eqn.invars[i] for i in keep],
        outvars=[eqn.outvars[i] for i in keep],
        params={"num_signals": num_signals},
    )
    return list(used_outputs), untied


# Batching --------------------------------------------------------------------


def _start_batch(op: _Operation, args, dims, **params):
    leaves, leaf_dims = args[NUM_ROUTING:], dims[NUM_ROUTING:]
    if any(d is not None for d in dims[:NUM_ROUTING]):
        # An operation for each element, done at once: _done_batch does nothing.
        rows, row_dims = each_element(op.whole, args, dims, **params)
        signal = jnp.zeros_like(args[0], shape=(), dtype=np.float32)
        return [*rows, *leaves, signal], [*row_dims, *leaf_dims, None]
    leaves = map(folded, leaves, leaf_dims)
    outputs = op.start().bind(*args[:NUM_ROUTING], *leaves, **params)
    out_dims = [None if d is None else 1 for d in leaf_dims]
    return outputs, [*out_dims, *out_dims, None]


def _done_batch(op: _Operation, args, dims, **params):
    count = _count(args)
    arriving = slice(NUM_ROUTING, NUM_ROUTING + count)
    if any(d is not None for d in dims[:NUM_ROUTING]):
        return list(args[arriving]), list(dims[arriving])
    leaves = map(folded, args[NUM_ROUTING:-1], dims[NUM_ROUTING:-1])
    outputs = op.done().bind(*args[:NUM_ROUTING], *leaves, args[-1], **params)
    return outputs, [None if d is None else 1 for d in dims[arriving]]


def _tie_batch(args, dims, *, num_signals):
    return tie_p.bind(*args, num_signals=num_signals), dims


# Definitions -----------------------------------------------------------------
# Not cacheable: every call gets a channel of its own.


def _define_halves(op: _Operation) -> tuple[Primitive, Primitive]:
    def of(rule):
        return functools.partial(rule, op)

    start_p = define(
        f"ep_{op.name}_start",
        of(_start_abstract_eval),
        of(_start_lowering),
        cacheable=False,
    )
    ad.primitive_jvps[start_p] = of(_start_jvp)
    ad.primitive_transposes[start_p] = of(_start_transpose)
    batching.primitive_batchers[start_p] = of(_start_batch)
    done_p = define(
        f"ep_{op.name}_done", _done_abstract_eval, of(_done_lowering), cacheable=False
    )
    ad.primitive_jvps[done_p] = of(_done_jvp)
    ad.primitive_transposes[done_p] = of(_done_transpose)
    batching.primitive_batchers[done_p] = of(_done_batch)
    return start_p, done_p


_OPERATIONS = {
    "dispatch": _Operation(
        "dispatch",
        rows="capacity",
        whole=primitives.dispatch_p,
        start=lambda: dispatch_start_p,
        done=lambda: dispatch_done_p,
        other=lambda: _OPERATIONS["combine"],
    ),
    "combine": _Operation(
        "combine",
        rows="num_tokens",
        whole=primitives.combine_p,
        start=lambda: combine_start_p,
        done=lambda: combine_done_p,
        other=lambda: _OPERATIONS["dispatch"],
    ),
}
dispatch_start_p, dispatch_done_p = _define_halves(_OPERATIONS["dispatch"])
combine_start_p, combine_done_p = _define_halves(_OPERATIONS["combine"])

tie_p = define("ep_tie", lambda *avals, **_: list(avals), _tie_lowering, cacheable=True)
ad.primitive_jvps[tie_p] = _tie_jvp
ad.primitive_transposes[tie_p] = _tie_transpose
batching.primitive_batchers[tie_p] = _tie_batch
partial_eval.dce_rules[tie_p] = _tie_dce
