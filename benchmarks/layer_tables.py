"""What the tables of moe_layer.py share: devices, options, stopwatch, report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
from operations import Operation
from options import with_options
from report import Report
from stopwatch import Stopwatch
from timing import AXIS, Chain, Stats
from workloads import Workload


class Tables:
    """One run.

    Attributes:
      options: of the command line.
      devices: that it uses.
      mesh: of them all.
      on_gpu: whether they are GPUs.
      native: our backend there.
      report: where results go.
      stopwatch: what takes time.
      failed: whether a line of ours failed or was wrong.
    """

    def __init__(self, options: argparse.Namespace, devices: list[jax.Device]):
        self.options = options
        self.devices = devices
        self.mesh = jax.make_mesh((len(devices),), (AXIS,), devices=devices)
        self.on_gpu = devices[0].platform == "gpu"
        self.native = "cuda" if self.on_gpu else "cpu"
        self.report = Report(options.json)
        quick = options.quick
        self.stopwatch = Stopwatch(
            self.mesh,
            self.on_gpu,
            seconds=0.5 if quick else 3.0,
            few=3 if quick else 5,
        )
        self.failed = False

    def workload(self, make: Callable[[int], Workload]) -> Workload:
        """The default for these devices, with what the command line changes."""
        return with_options(make(len(self.devices)), self.options)

    def measured(
        self,
        chains: Mapping[str, Chain],
        guess_us: Callable[[str], float],
        others: Collection[str] = (),
    ) -> Iterator[tuple[str, Stats]]:
        """The lines of a table, each as soon as it is measured.

        Those that cannot run become a line that says why.

        Args:
          chains: by name; checked elsewhere.
          guess_us: about what one repetition takes on GPUs.
          others: names of those whose failing is not ours.
        """
        operations = [Operation(name, chain, None) for name, chain in chains.items()]
        found = self.stopwatch.measure(
            operations,
            plain=not self.on_gpu,
            guess_us=lambda op: guess_us(op.name) if self.on_gpu else None,
        )
        for op, result in found:
            if isinstance(result, Stats):
                yield op.name, result
            else:
                self.failure(op.name, result, ours=op.name not in others)

    def failure(self, name: str, e: Exception, ours: bool = True) -> None:
        wrong = isinstance(e, AssertionError)
        what = "WRONG RESULT" if wrong else "did not run"
        reason = " ".join(str(e).split())
        self.report.say(f"{name} {what}: {reason[:300]}")
        self.report.record("failure", operation=name, why=reason)
        self.failed |= wrong or ours

    def record(self, record: str, w: Workload, stats: Stats, **fields: Any) -> None:
        """The JSON line of a table's line."""
        self.report.record(
            record,
            us=round(stats.median, 3),
            p95_us=round(stats.p95, 3),
            reps=stats.reps,
            chain_lengths=[stats.short, stats.long],
            workload=w.as_dict(),
            **fields,
        )
