"""Times operations on devices, not the host that launches them.

An operation is repeated n times inside one jit, each time on an input that
depends on the result of the time before, so that XLA can neither drop, merge
nor reorder them. Its time is the difference between two chain lengths, divided
by the difference of the lengths, less the measured cost of the small operation
that links the chain. What a call costs the host falls out of the difference.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from layouts import agreed

AXIS = "ep"
# Keeps a GPU busy while the host enqueues the chain behind it, so that short
# operations are not timed at the host's pace: passes over this many floats.
_DELAY_SIZE = 2**27
_DELAY_PASSES = 8


@dataclasses.dataclass(frozen=True)
class Stats:
    """Microseconds for one operation on the slowest rank, over `reps` pairs.

    `best` is from the quickest long and the quickest short run: what is left
    where other programs disturb the machine.
    """

    median: float
    p95: float
    best: float
    reps: int
    short: int
    long: int

    def less(self, us: float) -> Stats:
        """The same without `us`, the cost of what links the chain."""
        return dataclasses.replace(
            self,
            median=max(self.median - us, 1e-3),
            p95=max(self.p95 - us, 1e-3),
            best=max(self.best - us, 1e-3),
        )


@dataclasses.dataclass(frozen=True)
class Chain:
    """How an operation is repeated.

    Attributes:
      name: for messages.
      args: global arrays, sharded along AXIS in their first dimension.
      start: (*args) -> (context, carried), once a call. Any pytrees.
      move: (context, carried) -> result, the operation.
      relink: (context, carried, result) -> carried, so that the next repetition
        waits for this result.
      linked: an array like the one that a relink writes into, or None where
        the result is the next input and nothing needs to be taken off.
      opaque: XLA cannot look into the operation. Otherwise XLA on a CPU would
        compute only those elements of a result that are used, because it drops
        fences before it fuses: so the result is carried through a loop, whose
        arrays are whole.
      max_length: longest chain that keeps the numbers finite.
      links: how many arrays like `linked` a relink writes into.
    """

    name: str
    args: tuple[jax.Array, ...]
    start: Callable[..., tuple[Any, Any]]
    move: Callable[[Any, Any], Any]
    relink: Callable[[Any, Any, Any], Any]
    linked: jax.Array | None = None
    opaque: bool = True
    max_length: int = 128
    links: int = 1


@dataclasses.dataclass(frozen=True)
class Budget:
    """How long to measure one operation.

    Attributes:
      seconds: for all repetitions together, without compiling.
      chain_s: device time that separates the long chain from the short one.
      min_extra: at least so many operations separate them.
      min_reps, max_reps: bounds for the pairs of runs.
      short: length of the short chain.
    """

    seconds: float
    chain_s: float
    min_extra: int
    min_reps: int
    max_reps: int = 50
    short: int = 4


def fence(tree: Any) -> Any:
    """All of `tree` is computed, even if only a part of it is used."""
    return lax.optimization_barrier(tree)


def first(x: jax.Array) -> jax.Array:
    """The first element of x, as an array of one element."""
    return lax.slice(x, (0,) * x.ndim, (1,) * x.ndim)


def link(target: jax.Array, value: jax.Array, *sources: jax.Array) -> jax.Array:
    """`target`, but not before all `sources` are there.

    Its first element is written once more, in place: `value`, which is
    `fence(first(target))` taken outside the chain, unless a source begins with a
    NaN or an extreme integer. None does, but XLA cannot know. The sources must be
    fenced.
    """
    never = jnp.zeros((), bool)
    for source in sources:
        if source.size:
            never |= _is_odd(first(source)).reshape(())
    return lax.dynamic_update_slice(
        target, jnp.where(never, -value, value), (0,) * target.ndim
    )


def _is_odd(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.isnan(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.int32)
    limits = jnp.iinfo(x.dtype)
    return x == np.array(limits.min or limits.max, x.dtype)


def compile_chain(mesh: Mesh, chain: Chain, length: int, delay: bool) -> Callable:
    """Compiles `length` repetitions; returns a call that waits for all ranks."""

    def body(*args: jax.Array) -> jax.Array:
        if delay:
            args = (_delayed(args[0]), *args[1:])
        context, carried = fence(chain.start(*args))

        def move(carried):
            return fence(chain.move(context, carried))

        def again(_, state):
            carried = chain.relink(context, *state)
            return carried, move(carried)

        if length:
            state = carried, move(carried)
            if chain.opaque:
                for i in range(1, length):
                    state = again(i, state)
            else:
                state = lax.fori_loop(1, length, again, state)
            carried = chain.relink(context, *state)
        return lax.slice_in_dim(jax.tree.leaves(carried)[0], 0, 1)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    compiled = jax.jit(mapped).lower(*chain.args).compile()
    return lambda: jax.block_until_ready(compiled(*chain.args))


def _delayed(x: jax.Array) -> jax.Array:
    """X after about two milliseconds of a GPU's time."""
    value = fence(first(x))
    z = fence(jnp.broadcast_to(value.reshape(()).astype(jnp.float32), (_DELAY_SIZE,)))
    for _ in range(_DELAY_PASSES):
        z = fence(z * 0.5 + 1.0)
    return link(x, value, z)


def measure(
    mesh: Mesh, chain: Chain, budget: Budget, *, delay: bool, base_s: float = 0.0
) -> Stats:
    """Times one repetition of `chain`, links included.

    Args:
      mesh: over whose AXIS the chain runs.
      chain: what to repeat.
      budget: how long to take.
      delay: keep the GPU busy first (`_delayed`).
      base_s: what a chain of length 0 takes, roughly: only to choose lengths.
    """
    short = budget.short
    run_short = compile_chain(mesh, chain, short, delay)
    run_short()
    once = max(min(_seconds(run_short) for _ in range(2)) - base_s, 1e-6) / short
    once, base_s = agreed([once, base_s])  # every process runs the same chains
    most = max(chain.max_length - short, 2)
    extra = int(np.clip(budget.chain_s / once, min(budget.min_extra, most), most))
    long = short + extra
    run_long = compile_chain(mesh, chain, long, delay)
    run_long()
    pair_s = once * (short + long) + 2 * base_s
    reps = int(np.clip(budget.seconds / pair_s, budget.min_reps, budget.max_reps))
    times = np.array([(_seconds(run_short), _seconds(run_long)) for _ in range(reps)])
    slopes = (times[:, 1] - times[:, 0]) / extra * 1e6
    least_short, least_long = times.min(axis=0)
    return Stats(
        median=float(np.median(slopes)),
        p95=float(np.percentile(slopes, 95)),
        best=float(least_long - least_short) / extra * 1e6,
        reps=reps,
        short=short,
        long=long,
    )


def link_chain(mesh: Mesh, x: jax.Array) -> Chain:
    """Two links a step and nothing else: what the chaining itself costs."""
    copied = jax.shard_map(
        lambda a: fence(a)[::-1], mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)
    )

    def start(x, y):
        return fence((first(x), first(y))), (x, y)

    def move(values, carried):
        x, y = carried
        x = fence(link(x, values[0], y))
        return x, fence(link(y, values[1], x))

    return Chain("link", (x, jax.jit(copied)(x)), start, move, lambda *state: state[2])


def base_seconds(mesh: Mesh, chain: Chain, delay: bool) -> float:
    """Seconds of a chain of length 0: set-up, delay and the call itself."""
    run = compile_chain(mesh, chain, 0, delay)
    run()
    return min(_seconds(run) for _ in range(3))


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
