"""Checks operations, times them, and takes off what their links cost."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

import jax
import timing
from inputs import Check
from jax.sharding import Mesh
from layouts import together
from operations import Operation
from report import FAILURES
from timing import Budget, Chain, Compilers, Stats, Timer

_COMPILERS = 8
# Device time that separates a long chain from a short one on GPUs.
_CHAIN_S = 4e-3


class Stopwatch:
    """Measures chains over one mesh.

    All programs of a group of operations are compiled side by side before the
    first of them runs, as far as the cores go: on GPUs that takes longer than
    measuring.

    Args:
      mesh: over whose "ep" axis the chains run.
      on_gpu: keep GPUs busy while the host enqueues a chain.
      seconds: for one operation, without compiling.
      few: repetitions of what is slow, in a chain and of the chain.
      longest: length of a chain at most.
    """

    def __init__(
        self,
        mesh: Mesh,
        on_gpu: bool,
        *,
        seconds: float = 3.0,
        few: int = 5,
        longest: int = 128,
    ):
        self._mesh = mesh
        self._on_gpu = on_gpu
        self._seconds = seconds
        self._few = few
        self._longest = longest
        threads = max(1, min(_COMPILERS, (os.cpu_count() or 1) // 2))
        self._compilers = Compilers(threads)
        # (Seconds of an empty chain, microseconds of a link) by what is linked.
        self._costs: dict[str | None, tuple[float, float]] = {}

    def measure(
        self,
        operations: Sequence[Operation],
        *,
        plain: bool = False,
        guess_us: Callable[[Operation], float | None] = lambda op: None,
    ) -> Iterator[tuple[Operation, Stats | Exception]]:
        """Each operation with its time, or with what went wrong.

        Args:
          operations: to be checked and timed, in this order.
          plain: all of them are slow.
          guess_us: about what one takes, or None: the length of its chain.
        """
        for op in operations:
            if op.chain.linked is not None:
                self._cost(op.chain)
        jobs = [self._start(op, plain or op.slow, guess_us(op)) for op in operations]
        self._compilers.wait()
        for op, job in zip(operations, jobs, strict=True):
            try:
                yield op, job()
            except FAILURES as e:
                yield op, e

    def measure_chain(self, chain: Chain, slow: bool) -> Stats:
        """One chain that was checked elsewhere."""
        base_s, link_us = self._cost(chain)
        timer = self._timer(chain, slow, None)
        return timer.run(base_s * (self._on_gpu and not slow)).less(
            link_us * chain.links
        )

    def compiled(
        self, lower: Sequence[Callable[[], jax.stages.Lowered]]
    ) -> list[jax.stages.Compiled | None]:
        """Programs compiled side by side; None: this one cannot be compiled."""
        started: dict[int, Callable[[], jax.stages.Compiled]] = {}
        for i, make in enumerate(lower):
            with contextlib.suppress(*FAILURES):
                started[i] = self._compilers.start(make())
        self._compilers.wait()
        programs: list[jax.stages.Compiled | None] = [None] * len(lower)
        for i, program in started.items():
            with contextlib.suppress(*FAILURES):
                programs[i] = program()
        return programs

    def _start(
        self, op: Operation, slow: bool, guess_us: float | None
    ) -> Callable[[], Stats]:
        """Starts to compile an operation; the result checks and measures it."""
        try:
            if isinstance(op.check, Check):
                check = op.check.start(self._compilers)
            else:
                check = op.check or (lambda: None)
            timer = self._timer(op.chain, slow, guess_us)
        except FAILURES as e:
            failure = e  # `e` ends with the clause

            def failed() -> Stats:
                raise failure

            return failed

        def run() -> Stats:
            together(check)
            base_s, link_us = self._cost(op.chain)
            return timer.run(base_s * (self._on_gpu and not slow)).less(
                link_us * op.chain.links
            )

        return run

    def _timer(self, chain: Chain, slow: bool, guess_us: float | None) -> Timer:
        if slow:
            budget = Budget(
                self._seconds, 0.0, min_extra=2, min_reps=self._few, short=1
            )
        elif self._on_gpu:
            # One that takes as long as a chain should is timed as it is.
            lengthy = (guess_us or 0.0) * 1e-6 > _CHAIN_S
            budget = Budget(
                self._seconds,
                _CHAIN_S,
                min_extra=self._few,
                min_reps=self._few,
                short=1 if lengthy else 4,
                longest=self._longest,
            )
        else:
            budget = Budget(self._seconds, 0.1, min_extra=16, min_reps=5, short=2)
        return Timer(
            self._mesh,
            chain,
            budget,
            delay=self._on_gpu and not slow,
            compilers=self._compilers,
            guess_us=guess_us,
        )

    def _cost(self, chain: Chain) -> tuple[float, float]:
        target = chain.linked
        if target is None:
            return self._costs.get(None, (0.0, 0.0))
        # One element written in place: the array's size does not matter.
        key = target.dtype.kind
        if key not in self._costs:
            links = timing.link_chain(self._mesh, target)
            budget = Budget(0.3, 1e-3, min_extra=16, min_reps=10, short=8)
            delay = self._on_gpu
            timer = Timer(
                self._mesh,
                links,
                budget,
                delay=delay,
                compilers=self._compilers,
                guess_us=2.0,
            )
            base = timing.base_seconds(self._mesh, links, delay, self._compilers)
            self._compilers.wait()
            base_s = base()
            stats = timer.run(base_s)
            self._costs[key] = base_s, max(stats.median / 2, 0.0)
            # Good enough to choose the lengths of a chain without links.
            self._costs[None] = base_s, 0.0
        return self._costs[key]
