"""Operations in two halves: ep_dispatch_start and its kin.

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

import functools
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ep._operations import exchanges, node_exchanges, operation, replicated
from jax_ep._operations.operation import (
    LoweringContext,
    Operation,
    bind,
    folded,
    instantiated,
    is_linear,
    is_zero,
    zero_tangent,
)

if TYPE_CHECKING:
    from jax_ep._data.plan import Plan


_NUM_ROUTING = len(exchanges.ROUTING)
_OTHER = {"dispatch": "combine", "combine": "dispatch"}


def _whole(op: Operation) -> str:
    """The operation whose half this is."""
    return op.name.rpartition("_")[0]


def _other(op: Operation, half: str) -> str:
    """A half of the transpose."""
    return f"ep_{_OTHER[_whole(op).removeprefix('ep_')]}_{half}"


def _in_one_step(plan: Plan) -> types.ModuleType | None:
    """What does it all in the start: between nodes, and where nothing travels."""
    if plan.tokens == "replicated":
        return replicated
    return None if plan._crossing is None else node_exchanges


def start(op: str, leaves: Sequence[jax.Array], plan: Plan):
    """Binds ep_<op>_start: (arriving, departing, signal). No leaf is empty."""
    whole = _in_one_step(plan)
    if whole is not None:
        arrived = getattr(whole, op)(leaves, plan)
        return arrived, leaves, jnp.zeros_like(plan._routes, np.float32, ())
    routing, leaves = exchanges.varying_operands(leaves, plan)
    sizes = exchanges.sizes(plan)
    outputs = bind(f"ep_{op}_start", *routing, *leaves, **sizes)
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
    routing, _ = exchanges.varying_operands((), plan)
    operands = *routing, *arriving, *departing, signal
    return bind(f"ep_{op}_done", *operands, **exchanges.sizes(plan))


def tie(
    signals: Sequence[jax.Array], arrays: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Identity, but no result is ready before all operands are."""
    if not (signals and arrays):
        return list(signals), list(arrays)
    outputs = bind("ep_tie", *signals, *arrays, num_signals=len(signals))
    return outputs[: len(signals)], outputs[len(signals) :]


def _count(operands: Sequence[Any]) -> int:
    """Leaves of a done: arriving and departing ones stand before the signal."""
    return (len(operands) - _NUM_ROUTING - 1) // 2


# Results ---------------------------------------------------------------------


def start_results(parameter: str) -> Callable[..., Any]:
    """`parameter` holds the number of rows that arrive."""

    def results(*avals, **params):
        routes, leaves = avals[0], avals[_NUM_ROUTING:]
        return [
            *exchanges.rows_of(parameter)(*avals, **params),
            *(leaf.update(weak_type=False) for leaf in leaves),
            # A float, so that it has a cotangent and ties the backward pass too.
            routes.update(
                shape=(),
                dtype=np.dtype(np.float32),
                weak_type=False,
                sharding=routes.sharding.update(spec=P()),
            ),
        ]

    return results


def done_results(*avals, **_):
    arriving = avals[_NUM_ROUTING : _NUM_ROUTING + _count(avals)]
    return [leaf.update(weak_type=False) for leaf in arriving]


# Lowering --------------------------------------------------------------------


def _in_flight(ctx: LoweringContext, params: dict) -> bool:
    """Whether rows travel between start and done in this program.

    Without tokens there is nothing to do, and a plain operation does it.
    """
    only_cuda = tuple(ctx.module_context.platforms) == ("cuda",)
    native = params["comm"].backend != "xla"
    return only_cuda and native and params["num_tokens"] > 0


def _barrier(ctx: LoweringContext, values: Sequence, avals: Sequence):
    """Values that XLA's scheduler takes to come after all of `values`."""
    ctx = ctx.replace(avals_in=avals, avals_out=avals)
    return operation.lower_fun(ctx, lambda *a: lax.optimization_barrier(a), values)


# XLA drops neither half, nor moves one out of a loop without the other: the
# kernel would go on writing into memory that is free. JAX drops both (tie_dce).
_IN_PLACE = {"has_side_effect": True}


def start_reference(whole: str) -> Callable[..., Any]:
    """All of the operation `whole`."""

    def reference(*operands, **params):
        rows = bind(whole, *operands, **params)
        return [*rows, *operands[_NUM_ROUTING:], jnp.zeros((), np.float32)]

    return reference


def done_reference(*operands, **params):
    """Nothing: the start has done it."""
    del params
    return list(operands[_NUM_ROUTING : _NUM_ROUTING + _count(operands)])


def start_lowering(op: Operation, ctx, *operands, **params):
    count = len(operands) - _NUM_ROUTING
    if not _in_flight(ctx, params):
        whole = functools.partial(op.reference, **params)
        return operation.lower_fun(ctx, whole, operands)
    signal = ctx.avals_out[-1]
    assert op.native is not None
    results = operation.call_of(
        ctx,
        op.native.target,
        params["comm"],
        operands,
        ctx.avals_in,
        [*ctx.avals_out[:count], signal],
        _IN_PLACE,
    )
    # The done's operands come after the start, so that XLA has no reason to
    # make them a second time for the done: it has to see the same buffers.
    departing = _barrier(
        ctx,
        [results[count], *operands[_NUM_ROUTING:]],
        [signal, *ctx.avals_out[count:-1]],
    )
    return [*results[:count], *departing[1:], departing[0]]


def done_lowering(op: Operation, ctx, *operands, **params):
    count = _count(operands)
    if not _in_flight(ctx, params):
        return op.reference(*operands)
    assert op.native is not None
    return operation.call_of(
        ctx,
        op.native.target,
        params["comm"],
        operands,
        ctx.avals_in,
        ctx.avals_out,
        {
            # The rows arrive in the buffer that the start chose.
            "operand_output_aliases": {_NUM_ROUTING + i: i for i in range(count)},
            **_IN_PLACE,
        },
    )


def tie_lowering(op: Operation, ctx, *operands, num_signals):
    del op
    # Elsewhere the start has done everything, and order serves nobody.
    if not num_signals or tuple(ctx.module_context.platforms) != ("cuda",):
        return operands
    return _barrier(ctx, operands, ctx.avals_in)


# Differentiation -------------------------------------------------------------


def start_jvp(op: Operation, primals, tangents, **params):
    outputs = bind(op.name, *primals, **params)
    routing, leaves = primals[:_NUM_ROUTING], tangents[_NUM_ROUTING:]
    live = operation.live_ones(leaves)
    result: list[Any] = [zero_tangent(out) for out in outputs]
    if live:
        moved = bind(op.name, *routing, *(leaves[i] for i in live), **params)
        for n, i in enumerate(live):
            result[i] = moved[n]
            result[len(leaves) + i] = moved[len(live) + n]
        result[-1] = moved[-1]
    return outputs, result


def start_transposed(op: Operation, cotangents, *operands, **params):
    routing, leaves = operands[:_NUM_ROUTING], operands[_NUM_ROUTING:]
    count = len(leaves)
    arriving, departing = cotangents[:count], cotangents[count:-1]
    # Where only the departing rows were used, they were themselves.
    result = list(departing)
    live = operation.live_ones(arriving)
    if live:
        moved = bind(
            _other(op, "done"),
            *routing,
            *(instantiated(departing[i]) for i in live),
            *(arriving[i] for i in live),
            instantiated(cotangents[-1]),
            **params,
        )
        for i, cotangent in zip(live, moved, strict=True):
            result[i] = cotangent
    return [
        *([None] * _NUM_ROUTING),
        *(
            ct if is_linear(leaf) else None
            for ct, leaf in zip(result, leaves, strict=True)
        ),
    ]


def done_jvp(op: Operation, primals, tangents, **params):
    outputs = bind(op.name, *primals, **params)
    count = len(outputs)
    arriving = tangents[_NUM_ROUTING : _NUM_ROUTING + count]
    departing = tangents[_NUM_ROUTING + count : -1]
    live = operation.live_ones(arriving)
    result: list[Any] = [zero_tangent(out) for out in outputs]
    if live:
        moved = bind(
            op.name,
            *primals[:_NUM_ROUTING],
            *(arriving[i] for i in live),
            *(instantiated(departing[i]) for i in live),
            instantiated(tangents[-1]),
            **params,
        )
        for i, tangent in zip(live, moved, strict=True):
            result[i] = tangent
    return outputs, result


def done_transposed(op: Operation, cotangents, *operands, **params):
    count = len(cotangents)
    result = operation.zeros_of_linear(operands)
    live = operation.live_ones(cotangents)
    if live:
        if op.summed_by is not None:
            for i in live:
                operation.check_gradient(cotangents[i], *op.summed_by)
        moved = bind(
            _other(op, "start"),
            *operands[:_NUM_ROUTING],
            *(cotangents[i] for i in live),
            **params,
        )
        places = [_NUM_ROUTING + count + i for i in live]  # what now arrives
        places += [_NUM_ROUTING + i for i in live]  # what now departs
        for place, cotangent in zip([*places, -1], moved, strict=True):
            if result[place] is not None:
                result[place] = cotangent
    return result


def _tie_live(num_signals: int, values: Sequence[Any]) -> list[Any]:
    """Ties tangents or cotangents; those that are zero stay as they are."""
    result = list(values)
    live = [i for i, v in enumerate(values) if v is not None and not is_zero(v)]
    signals = sum(i < num_signals for i in live)
    if 0 < signals < len(live):
        tied = bind("ep_tie", *(values[i] for i in live), num_signals=signals)
        for i, value in zip(live, tied, strict=True):
            result[i] = value
    return result


def tie_jvp(op: Operation, primals, tangents, *, num_signals):
    outputs = bind(op.name, *primals, num_signals=num_signals)
    return outputs, _tie_live(num_signals, tangents)


def tie_transposed(op: Operation, cotangents, *operands, num_signals):
    del op
    linear = [
        ct if is_linear(x) else None for ct, x in zip(cotangents, operands, strict=True)
    ]
    return _tie_live(num_signals, linear)


def tie_dce(used_outputs, *rest):
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


def start_batch(op: Operation, args, dims, **params):
    leaves, leaf_dims = args[_NUM_ROUTING:], dims[_NUM_ROUTING:]
    if any(d is not None for d in dims[:_NUM_ROUTING]):
        # An operation for each element, done at once: done_batch does nothing.
        whole = operation.TABLE[_whole(op)]
        rows, row_dims = operation.each_element(whole, args, dims, **params)
        signal = jnp.zeros_like(args[0], shape=(), dtype=np.float32)
        return [*rows, *leaves, signal], [*row_dims, *leaf_dims, None]
    leaves = map(folded, leaves, leaf_dims)
    outputs = bind(op.name, *args[:_NUM_ROUTING], *leaves, **params)
    out_dims = [None if d is None else 1 for d in leaf_dims]
    return outputs, [*out_dims, *out_dims, None]


def done_batch(op: Operation, args, dims, **params):
    count = _count(args)
    arriving = slice(_NUM_ROUTING, _NUM_ROUTING + count)
    if any(d is not None for d in dims[:_NUM_ROUTING]):
        return list(args[arriving]), list(dims[arriving])
    leaves = map(folded, args[_NUM_ROUTING:-1], dims[_NUM_ROUTING:-1])
    outputs = bind(op.name, *args[:_NUM_ROUTING], *leaves, args[-1], **params)
    return outputs, [None if d is None else 1 for d in dims[arriving]]


def tie_batch(op: Operation, args, dims, *, num_signals):
    return bind(op.name, *args, num_signals=num_signals), dims
