"""Dispatch and combine in two halves, so that work goes on while rows travel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import dtypes

from jax_ep._api import ops
from jax_ep._data import checks, sizes
from jax_ep._data.plan import Plan
from jax_ep._operations import flights
from jax_ep._operations.arrays import launches, without_travel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flight:
    """Rows on their way: made by a start, ended by the done of the same name.

    A pytree, so that it passes through jit and its transformations; nothing in
    it is for reading. Start and finish it in the same function, loop body or
    branch, once: while rows travel XLA must not copy their buffers, and where
    it has, the done raises.

    Attributes:
      plan: the Plan by which they go.
    """

    plan: Plan
    # Leaf by leaf: the buffer that rows arrive in, and the rows that depart. A
    # leaf without elements has arrived.
    _arriving: list[jax.Array]
    _departing: list[jax.Array]
    _signals: list[jax.Array]  # one for each launch
    _op: str = dataclasses.field(metadata={"static": True})
    _structure: Any = dataclasses.field(metadata={"static": True})
    _dtypes: tuple[str, ...] = dataclasses.field(metadata={"static": True})


def dispatch_start(tree: Any, plan: Plan) -> Flight:
    """Sends rows off as `dispatch` does and does not wait for them.

        flight = jax_ep.dispatch_start(x, plan)
        flight, y = jax_ep.overlap(flight, shared_expert, parameters, x)
        rows = jax_ep.dispatch_done(flight)

    Args:
      tree: as for `dispatch`.
      plan: as for `dispatch`.

    Returns:
      A Flight, for `overlap` and `dispatch_done`.

    Raises:
      TypeError, ValueError, RuntimeError: as `dispatch`.

    Derivative: start and done together are linear, as `dispatch`; in the
    backward pass cotangents start where rows were waited for, travel beside
    the backward pass of what was put in between, and are waited for here.
    """
    leaves, structure = ops._checked_leaves("dispatch_start", tree, plan)
    sizes.warn_of_defaults("dispatch_start", plan, leaves, *ops._OF_DISPATCH)
    names = tuple(leaf.dtype.name for leaf in leaves)
    leaves = [ops._convert(x, ops._travels_as(x)) for x in leaves]
    return _start("dispatch", leaves, plan, plan.capacity, structure, names)


def dispatch_done(flight: Flight) -> Any:
    """Waits for the rows of `dispatch_start`: what `dispatch` returns.

    Args:
      flight: from `dispatch_start`, inside the same shard_map. What it waits
        for besides is what `overlap` put in between.

    Returns:
      The tree that was sent, with leaves [C, ...].

    Raises:
      TypeError, ValueError: not a flight, or one of `combine_start`.
      RuntimeError: the plan's communicator is closed.
    """
    return _done("dispatch", flight)


def combine_start(tree: Any, plan: Plan) -> Flight:
    """Sends rows home as `combine` does and does not wait for them.

    Args:
      tree: as for `combine`.
      plan: as for `combine`.

    Returns:
      A Flight, for `overlap` and `combine_done`.

    Raises:
      TypeError, ValueError, RuntimeError: as `combine`.

    Derivative: as of `dispatch_start`, with `combine` for `dispatch`.
    """
    leaves, structure = ops._checked_leaves("combine_start", tree, plan)
    names = tuple(leaf.dtype.name for leaf in leaves)
    return _start("combine", leaves, plan, plan.num_tokens, structure, names)


def combine_done(flight: Flight) -> Any:
    """Waits for the rows of `combine_start`: what `combine` returns.

    Args:
      flight: from `combine_start`, inside the same shard_map.

    Returns:
      The tree that was sent, with leaves [T, ...].

    Raises:
      TypeError, ValueError: not a flight, or one of `dispatch_start`.
      RuntimeError: the plan's communicator is closed.
    """
    return _done("combine", flight)


def overlap(flight: Flight, fn: Callable, *args: Any) -> tuple[Flight, Any]:
    """Calls `fn(*args)` while the rows of a flight travel.

    The order is one of data alone: fn sees `args` as they are after the start,
    and the done of the flight that this returns waits for fn's results. So the
    accelerator works on fn between the two, and on its backward pass between
    the backward pass's start and done. Several calls, one after the other, put
    several pieces of work in between.

    What fn closes over is not ordered. To have the gradients of parameters
    computed before the backward pass's done as well, hand them over in `args`.

    Args:
      flight: from `dispatch_start` or `combine_start`.
      fn: any function of arrays, collectives included; called once, now.
      *args: pytrees. Leaves that are no arrays go to fn as they are.

    Returns:
      (the flight, for its done or the next `overlap`; what fn returned).

    Raises:
      TypeError: not a flight, or not a function.

    Derivative: that of fn.
    """
    _check_flight("overlap", flight)
    if not callable(fn):
        raise TypeError(
            f"jax_ep.overlap: fn must be a function, found {type(fn).__name__}; "
            "call overlap(flight, fn, *args)"
        )
    signals, args = _tie(flight._signals, args)
    signals, results = _tie(signals, fn(*args))
    return dataclasses.replace(flight, _signals=signals), results


def _tie(signals: Sequence[jax.Array], tree: Any) -> tuple[list[jax.Array], Any]:
    leaves, structure = jax.tree.flatten(tree)
    tied = [i for i, leaf in enumerate(leaves) if _can_wait(leaf)]
    signals, arrays = flights.tie(signals, [leaves[i] for i in tied])
    for i, array in zip(tied, arrays, strict=True):
        leaves[i] = array
    return signals, structure.unflatten(leaves)


def _can_wait(leaf: Any) -> bool:
    return (
        isinstance(leaf, (jax.Array, np.ndarray))
        and leaf.size > 0
        and not dtypes.issubdtype(leaf.dtype, dtypes.extended)
    )


def _start(op, leaves, plan, num_rows, structure, names) -> Flight:
    arriving = [without_travel(leaf, num_rows) for leaf in leaves]
    departing, signals = list(leaves), []
    for launch in launches(leaves):
        started = flights.start(op, [leaves[i] for i in launch], plan)
        for i, arrives, departs in zip(launch, *started[:2], strict=True):
            arriving[i], departing[i] = arrives, departs
        signals.append(started[2])
    return Flight(plan, arriving, departing, signals, op, structure, names)


def _done(op: str, flight: Flight) -> Any:
    _check_flight(f"{op}_done", flight)
    if flight._op != op:
        raise ValueError(
            f"jax_ep.{op}_done: this flight was started by {flight._op}_start; "
            f"finish it with {flight._op}_done"
        )
    checks.check_open(flight.plan.comm, f"{op}_done")
    checks.check_inside_shard_map(flight.plan.comm, f"{op}_done")
    rows = list(flight._arriving)
    for launch, signal in zip(
        launches(flight._departing), flight._signals, strict=True
    ):
        arrived = flights.done(
            op,
            [flight._arriving[i] for i in launch],
            [flight._departing[i] for i in launch],
            signal,
            flight.plan,
        )
        for i, row in zip(launch, arrived, strict=True):
            rows[i] = row
    return flight._structure.unflatten(
        [
            ops._convert(row, np.dtype(name))
            for row, name in zip(rows, flight._dtypes, strict=True)
        ]
    )


def _check_flight(op: str, flight: Any) -> None:
    if not isinstance(flight, Flight):
        raise TypeError(
            f"jax_ep.{op}: flight must be a jax_ep.Flight, found "
            f"{type(flight).__name__}"
        )
