"""Measures plan, dispatch and combine against what the machine allows.

    python benchmarks/dispatch_combine.py                 # GPUs, else CPU
    python benchmarks/dispatch_combine.py --quick         # under a minute
    python benchmarks/dispatch_combine.py --sweep --quick --plot out/sweep.png
    python benchmarks/dispatch_combine.py --processes 2   # one process against two

README.md in this folder says how it measures and how to read the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping

import jax
import layouts
import limits
import scaling
import terms
from baselines import baselines, with_xla_options
from inputs import Inputs
from operations import Operation, jax_ep_operations
from options import add_num_sms, choose_platform, devices_of, positive, with_options
from options import parser as common_parser
from report import (
    FAILURES,
    MEANING,
    OPERATION_COLUMNS,
    SWEEP_COLUMNS,
    Report,
    machine,
)
from session import Session
from stopwatch import Stopwatch
from workloads import DTYPES, Workload, sweep, workload_a, workload_cpu

import jax_ep


def main() -> int:
    options = _parse()
    if options.plot and options.processes > 1:
        raise SystemExit("--plot draws one layout: leave out --processes")
    if options.place:
        layouts.join(options.place, layouts.has_gpus(options))
    elif options.processes > 1:
        return layouts.compare(options)
    else:
        choose_platform(options)
    devices = devices_of(options)
    if not options.plot:
        return Benchmark(options, devices).run()
    import plot  # with matplotlib, which is not needed for anything else

    options.json = options.json or f"{options.plot}.jsonl"
    status = Benchmark(options, devices).run()
    plot.draw([options.json], options.plot)
    return status


class Benchmark(Session):
    """One run: the sections that were asked for."""

    def __init__(self, options: argparse.Namespace, devices: list[jax.Device]):
        on_gpu = devices[0].platform == "gpu"
        make = workload_a if on_gpu else workload_cpu
        super().__init__(
            devices,
            with_options(make(len(devices)), options),
            Report(options.json, quiet=jax.process_index() > 0),
            options.num_sms if on_gpu else [None],
            options.quick,
        )
        self.options = options

    def run(self) -> int:
        """Everything; the exit status is 1 if an operation of ours failed."""
        say, w = self.report.say, self.workload
        say(MEANING)
        say()
        kind, count = self.devices[0].device_kind, len(self.devices)
        say(f"{count} x {kind}, jax {jax.__version__}: {w}")
        say(
            f"{w.wire_bytes / 1e6:.3g} MB over the wire, "
            f"{w.logical_bytes / 1e6:.3g} MB with local rows (busiest rank); "
            f"receive buffers of {w.num_slots} rows, {100 * w.filled:.0f} % filled"
        )
        record = machine(self.devices)
        self.report.record("run", **record, workload=w.as_dict())
        busy, cores = record["load_average"], os.cpu_count() or 1
        if not self.on_gpu and busy > 0.5 * cores:
            say(f"NOTE: load average {busy:.1f} on {cores} cores: others run here too")
        sections = {
            "table": self._table,
            "terms": lambda: terms.run(self),
            "scaling": lambda: scaling.run(self),
            "sweep": self._sweep,
            "xla-options": self._xla_options,
        }
        for name, section in sections.items():
            if name in self.options.sections:
                section()
        return int(self.failed)

    def _table(self) -> None:
        """Ours on every backend, then what JAX offers."""
        found = self.limits_of(self.workload)
        self.report.say()
        self.report.head(OPERATION_COLUMNS)
        inputs = Inputs(self.mesh, self.workload)
        for backend, num_sms in self._backends():
            with self.communicator(backend, num_sms) as comm:
                if jax.process_count() > 1:
                    self.report.say(str(comm))
                medians = {}
                wanted = self._operations(inputs, comm)
                guess = self._guess(found, num_sms)
                for op, stats in self.measured(wanted, backend, guess_us=guess):
                    medians[op.name] = stats.median
                    self._row(op.name, op, backend, num_sms, stats)
                self._compare_pair(medians)
                if backend == self.native:
                    self.remember(self.workload, num_sms, medians)
        if not self.options.no_baselines:
            self._others(inputs, baselines(self.workload))

    def _xla_options(self) -> None:
        if self.on_gpu:
            self.limits_of(self.workload)
            self.report.say()
            self.report.head(OPERATION_COLUMNS)
            self._others(Inputs(self.mesh, self.workload), with_xla_options())

    def _others(self, inputs: Inputs, makers: Mapping[str, Callable]) -> None:
        """What JAX offers, one after the other: each has inputs of its own."""
        guess = self._guess(self.limits_of(self.workload), None)
        for name, make in makers.items():
            if not self._wanted(name):
                continue
            try:
                op = make(inputs)
            except FAILURES as e:
                self.failure(name, "jax", e)
                continue
            for _, stats in self.measured([op], "jax", guess_us=guess):
                self.others_us[name] = stats.median
                self._row(name, op, "jax", None, stats)

    def _sweep(self) -> None:
        """plan, dispatch and combine with one size changed at a time."""
        base = self.workload
        if self.on_gpu and base.wire_bytes < limits.LEAST_BYTES:
            base = dataclasses.replace(base, num_tokens=4096)
        rates = self.limits_of(base)
        self.report.say(
            "\nfloor = max(latency floor, bytes / ceiling); the latency floor is "
            f"{rates.latency_us:.1f} us, and below {limits.LEAST_BYTES >> 20} MiB over "
            "the wire the ceiling is a copy of the very bytes. '!' marks a point below "
            "0.6 of its floor."
        )
        self.report.head(SWEEP_COLUMNS)
        backend, num_sms = next(self._backends())
        stopwatch = Stopwatch(self.mesh, self.on_gpu, seconds=0.2, few=2, longest=68)
        with self.communicator(backend, num_sms) as comm:
            for point in sweep(self.workload, self.on_gpu):
                inputs = Inputs(self.mesh, point)
                wanted = [op for op in self._operations(inputs, comm) if op.single]
                floor_of = self._floors(rates, point, num_sms)
                found = self.measured(
                    wanted,
                    backend,
                    guess_us=lambda op, floor_of=floor_of: self._twice(floor_of(op)),
                    stopwatch=stopwatch,
                )
                for op, stats in found:
                    self.report.sweep_row(
                        point, op.name, backend, num_sms, stats, op.moves, floor_of(op)
                    )

    def _twice(self, floor_us: float) -> float | None:
        """What to expect of an operation whose floor this is; on GPUs only."""
        return 2 * floor_us if self.on_gpu else None

    def _floors(
        self, rates: limits.Limits, point: Workload, num_sms: int | None
    ) -> Callable[[Operation], float]:
        """What each operation could take at a point of the sweep."""
        if self.on_gpu:
            few: dict[str, float] = {}
            if rates.copy_us and 0 < point.wire_bytes < limits.LEAST_BYTES:
                few = limits.measure_few(self.devices, point, num_sms or 0)
            exchange_us = max(rates.handshake_us - rates.launch_us, 0.0)
            return lambda op: (
                op.counts_first * exchange_us
                + max(
                    rates.floor_us(point, op.moves, num_sms),
                    sum(few.get(moved, 0.0) for moved in op.moves),
                )
            )
        # memcpy has no one rate: caches decide.
        own = limits.measure_cpu(self.report, self.mesh, point, True, loud=False)
        return lambda op: max(
            rates.latency_us, own.ceiling_us(op.moves, num_sms) or 0.0
        )

    def _backends(self) -> Iterator[tuple[str, int | None]]:
        for backend in self.options.backends or (self.native, "xla"):
            for num_sms in self.num_sms if backend == "cuda" else [None]:
                yield backend, num_sms

    def _operations(self, inputs: Inputs, comm: jax_ep.Communicator) -> list[Operation]:
        # The sequences say nothing about a backend that is only a reference.
        return [
            op
            for op in jax_ep_operations(inputs, comm)
            if self._wanted(op.name) and (op.single or comm.backend != "xla")
        ]

    def _wanted(self, name: str) -> bool:
        return not self.options.only or name in self.options.only

    def _guess(
        self, found: limits.Limits, num_sms: int | None
    ) -> Callable[[Operation], float | None]:
        """On GPUs, about what an operation takes."""

        def guess(op: Operation) -> float | None:
            if not self.on_gpu:
                return None
            fixed = 2 * found.latency_us * (1 + op.name.count("+"))
            return max(fixed, found.ceiling_us(op.moves, num_sms) or 0.0) or None

        return guess

    def _row(self, name: str, op: Operation, backend: str, num_sms, stats) -> None:
        self.report.operation_row(
            self.workload,
            name,
            backend,
            num_sms,
            stats,
            op.moves,
            self.limits_of(self.workload).ceiling_us(op.moves, num_sms),
        )

    def _compare_pair(self, medians: dict[str, float]) -> None:
        pair = medians.get("dispatch + combine")
        if pair and "dispatch" in medians and "combine" in medians:
            parts = medians["dispatch"] + medians["combine"]
            over = pair / parts - 1
            self.report.say(f"  the chained pair takes {over:+.1%} over its parts")
            self.report.record("pair over parts", share=round(over, 4))


_SECTIONS = ("table", "terms", "scaling", "sweep", "xla-options")
_DEFAULT_SECTIONS = ("table", "terms", "scaling")


def _sections(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in _SECTIONS:
            raise argparse.ArgumentTypeError(f"no section {name}")
    return names


def _parse() -> argparse.Namespace:
    parser = common_parser(__doc__, quick="fewer repetitions, one SM count")
    add = parser.add_argument
    add(
        "--sections",
        type=_sections,
        default=list(_DEFAULT_SECTIONS),
        metavar="NAME[,NAME...]",
        help=f"of {', '.join(_SECTIONS)} (default: {','.join(_DEFAULT_SECTIONS)})",
    )
    add(
        "--sweep",
        dest="sections",
        action="store_const",
        const=["sweep"],
        help="vary T, H, K, routing and dtype: --sections sweep",
    )
    add("--plot", metavar="PATH", help="draw this run, and what --json had before it")
    add("--dtype", choices=tuple(DTYPES))
    add(
        "--capacity",
        type=lambda text: text if text in ("full", "fit") else positive(text),
        help="rows of a receive buffer: full (R * T, the default), fit or a number",
    )
    add("--seed", type=int, help="of routing and rows")
    add_num_sms(parser)
    add(
        "--backends",
        type=lambda text: text.split(","),
        metavar="NAME[,NAME]",
        help="of jax_ep (default: the native one and xla)",
    )
    add(
        "--only",
        type=lambda text: [name.strip() for name in text.split(",")],
        metavar="NAME[,NAME...]",
        help='lines of the table, such as "plan,dispatch,dispatch + combine"',
    )
    add("--no-baselines", action="store_true", help="only jax_ep")
    add(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help="compare: all ranks in one process, and in N",
    )
    add("--place", help=argparse.SUPPRESS)  # one of several processes
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
