"""Times operations on devices, not the host that launches them.

An operation is repeated n times inside one jit, each time on an input that
depends on the result of the time before, so that XLA can neither drop, merge
nor reorder them. Its time is the difference between two chain lengths, divided
by the difference of the lengths, less the measured cost of the small operation
that links the chain. What a call costs the host falls out of the difference.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
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
      compiler_options: XLA's flags for these programs.
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
    compiler_options: Mapping[str, Any] | None = None
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
      longest: length of the long chain at most.
    """

    seconds: float
    chain_s: float
    min_extra: int
    min_reps: int
    max_reps: int = 50
    short: int = 4
    longest: int = 128


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


def lower_chain(
    mesh: Mesh, chain: Chain, length: int, delay: bool
) -> jax.stages.Lowered:
    """`length` repetitions as one program over all ranks, ready to be compiled."""

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
    return jax.jit(mapped).lower(*chain.args)


def _delayed(x: jax.Array) -> jax.Array:
    """X after about two milliseconds of a GPU's time."""
    value = fence(first(x))
    z = fence(jnp.broadcast_to(value.reshape(()).astype(jnp.float32), (_DELAY_SIZE,)))
    for _ in range(_DELAY_PASSES):
        z = fence(z * 0.5 + 1.0)
    return link(x, value, z)


class Compilers:
    """Threads that compile programs while others are lowered.

    Nothing may run before wait(): a program that is loaded onto a GPU may wait for
    kernels there, which wait for their peers, which are behind it on the host.
    Of several processes each compiles a program right after lowering it: jax_ep
    tells operations apart by the order of both, which has to be the same in all.
    """

    def __init__(self, threads: int):
        self._pool = ThreadPoolExecutor(threads)
        self._started: list[Future] = []

    def start(
        self, lowered: jax.stages.Lowered, options: Mapping[str, Any] | None = None
    ) -> Callable[[], jax.stages.Compiled]:
        """Starts to compile; returns a call that has the program, or raises."""
        options = dict(options) if options else None
        future = self._pool.submit(lowered.compile, compiler_options=options)
        self._started.append(future)
        if jax.process_count() > 1:
            self.wait()
        return future.result

    def wait(self) -> None:
        """Until all that was started has ended, well or not."""
        concurrent.futures.wait(self._started)
        self._started.clear()


class Timer:
    """Times one repetition of `chain`, links included.

    Programs are lowered here and compiled by `compilers`, so that many timers can
    be made before the first one runs.

    Args:
      mesh: over whose AXIS the chain runs.
      chain: what to repeat.
      budget: how long to take.
      delay: keep the GPU busy first (`_delayed`).
      compilers: who compiles.
      guess_us: about what one repetition takes, to choose the length of the long
        chain; None: the short chain is run to find out.
    """

    def __init__(
        self,
        mesh: Mesh,
        chain: Chain,
        budget: Budget,
        *,
        delay: bool,
        compilers: Compilers,
        guess_us: float | None = None,
    ):
        self._mesh, self._chain, self._budget = mesh, chain, budget
        self._delay, self._compilers = delay, compilers
        self._short = self._compiled(budget.short)
        self._extra = 0
        if guess_us or not budget.chain_s:
            self._choose_length((guess_us or 0.0) * 1e-6)

    def _compiled(self, length: int) -> Callable[[], jax.stages.Compiled]:
        chain = self._chain
        lowered = lower_chain(self._mesh, chain, length, self._delay)
        return self._compilers.start(lowered, chain.compiler_options)

    def _choose_length(self, once_s: float) -> None:
        budget = self._budget
        most = max(min(self._chain.max_length, budget.longest) - budget.short, 2)
        least = min(budget.min_extra, most)
        wanted = budget.chain_s / max(once_s, 1e-6)
        self._extra = int(np.clip(wanted, least, most))
        self._long = self._compiled(budget.short + self._extra)

    def run(self, base_s: float = 0.0) -> Stats:
        """Measures. `base_s`: seconds of a chain of length 0, roughly."""
        args, short = self._chain.args, self._budget.short
        short_program = self._short()
        run_short = lambda: jax.block_until_ready(short_program(*args))  # noqa: E731
        run_short()
        once = max(min(_seconds(run_short) for _ in range(2)) - base_s, 1e-6) / short
        once, base_s = agreed([once, base_s])  # every process runs the same chains
        if not self._extra:
            self._choose_length(once)
        extra = self._extra
        long_program = self._long()
        run_long = lambda: jax.block_until_ready(long_program(*args))  # noqa: E731
        run_long()
        pair_s = once * (2 * short + extra) + 2 * base_s
        budget = self._budget
        reps = int(np.clip(budget.seconds / pair_s, budget.min_reps, budget.max_reps))
        times = np.array(
            [(_seconds(run_short), _seconds(run_long)) for _ in range(reps)]
        )
        slopes = (times[:, 1] - times[:, 0]) / extra * 1e6
        least_short, least_long = times.min(axis=0)
        return Stats(
            median=float(np.median(slopes)),
            p95=float(np.percentile(slopes, 95)),
            best=float(least_long - least_short) / extra * 1e6,
            reps=reps,
            short=short,
            long=short + extra,
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


def base_seconds(
    mesh: Mesh, chain: Chain, delay: bool, compilers: Compilers
) -> Callable[[], float]:
    """Starts to compile a chain of length 0; returns a call that runs it.

    It has the seconds of set-up, delay and the call itself.
    """
    program = compilers.start(lower_chain(mesh, chain, 0, delay))

    def run() -> float:
        compiled = program()
        call = lambda: jax.block_until_ready(compiled(*chain.args))  # noqa: E731
        call()
        return min(_seconds(call) for _ in range(3))

    return run


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
