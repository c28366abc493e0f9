"""Measures plan, dispatch and combine against what the machine allows.

    python benchmarks/dispatch_combine.py                 # GPUs, else CPU
    python benchmarks/dispatch_combine.py --quick         # under a minute
    python benchmarks/dispatch_combine.py --sweep --json out/sweep.jsonl
    python benchmarks/dispatch_combine.py --processes 2   # one process against two

README.md in this folder says how it measures and how to read the table.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Iterator

import jax
import layouts
import limits
import timing
from baselines import baselines
from inputs import Inputs
from jax.sharding import Mesh
from operations import Operation, jax_ep_operations
from options import parser as common_parser
from options import positive
from report import (
    FAILURES,
    MEANING,
    OPERATION_COLUMNS,
    SWEEP_COLUMNS,
    Report,
    machine,
)
from timing import AXIS, Budget, Chain, Stats
from workloads import DTYPES, Workload, sweep, workload_a, workload_cpu

import jax_ep


def main() -> int:
    options = _parse()
    if options.place:
        layouts.join(options.place, layouts.has_gpus(options))
    elif options.processes > 1:
        return layouts.compare(options)
    else:
        if options.platform == "cpu":
            jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.ranks or 8)
    devices = jax.devices()
    ranks = options.ranks or len(devices)
    if len(devices) < ranks:
        raise SystemExit(f"--ranks {ranks}: this machine has {len(devices)} devices")
    if options.platform == "gpu" and devices[0].platform != "gpu":
        raise SystemExit("--platform gpu: JAX sees no GPU here")
    return Benchmark(options, devices[:ranks]).run()


class Stopwatch:
    """Measures chains and knows what their links cost."""

    def __init__(self, mesh: Mesh, on_gpu: bool, quick: bool):
        self._mesh = mesh
        self._on_gpu = on_gpu
        self._seconds = 0.5 if quick else 3.0
        self._few = 2 if quick else 5
        # (Seconds of an empty chain, microseconds of a link) by what is linked.
        self._costs: dict[str | None, tuple[float, float]] = {}

    def measure(self, chain: Chain, slow: bool) -> Stats:
        """One repetition, its links taken off."""
        base_s, link_us = self._cost(chain)
        delay = self._on_gpu and not slow
        budget = self._budget(slow)
        stats = timing.measure(
            self._mesh, chain, budget, delay=delay, base_s=base_s * delay
        )
        return stats.less(link_us * chain.links)

    def _budget(self, slow: bool) -> Budget:
        if slow:
            return Budget(self._seconds, 0.0, min_extra=2, min_reps=self._few, short=1)
        if self._on_gpu:
            return Budget(self._seconds, 4e-3, min_extra=8, min_reps=10)
        return Budget(self._seconds, 0.05, min_extra=4, min_reps=5, short=2)

    def _cost(self, chain: Chain) -> tuple[float, float]:
        target = chain.linked
        if target is None:
            return self._costs.get(None, (0.0, 0.0))
        # One element written in place: the array's size does not matter.
        key = target.dtype.kind
        if key not in self._costs:
            links = timing.link_chain(self._mesh, target)
            base_s = timing.base_seconds(self._mesh, links, self._on_gpu)
            budget = Budget(0.3, 1e-3, min_extra=16, min_reps=10, short=8)
            stats = timing.measure(
                self._mesh, links, budget, delay=self._on_gpu, base_s=base_s
            )
            self._costs[key] = base_s, max(stats.median / 2, 0.0)
            # Good enough to choose the lengths of a chain without links.
            self._costs[None] = base_s, 0.0
        return self._costs[key]


class Benchmark:
    """One run: ceilings, then the table or the sweep."""

    def __init__(self, options: argparse.Namespace, devices: list[jax.Device]):
        self.options = options
        self.devices = devices
        self.mesh = jax.make_mesh((len(devices),), (AXIS,), devices=devices)
        self.on_gpu = devices[0].platform == "gpu"
        self.native = "cuda" if self.on_gpu else "cpu"
        self.report = Report(options.json, quiet=jax.process_index() > 0)
        make = workload_a if self.on_gpu else workload_cpu
        self.workload = _with_options(make(len(devices)), options)
        self.num_sms: list[int | None] = options.num_sms if self.on_gpu else [None]
        quick = options.quick or options.sweep
        self.stopwatch = Stopwatch(self.mesh, self.on_gpu, quick)
        self.limits = limits.Limits()
        self.failed = False

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
        self.limits = self._limits()
        if self.options.sweep:
            self._sweep()
        else:
            self._table()
        return int(self.failed)

    def _limits(self) -> limits.Limits:
        w, quick = self.workload, self.options.quick
        if jax.process_count() > 1:
            return limits.Limits()  # one process measures them
        if not self.on_gpu:
            return limits.measure_cpu(self.report, self.mesh, w, quick)
        counts = [n for n in self.num_sms if n]
        return limits.measure_gpu(self.report, self.devices, w, counts, quick)

    def _table(self) -> None:
        """Ours on every backend, then what JAX offers."""
        self.report.say()
        self.report.head(OPERATION_COLUMNS)
        inputs = Inputs(self.mesh, self.workload)
        for backend, num_sms in self._backends():
            with self._communicator(backend, num_sms) as comm:
                if jax.process_count() > 1:
                    self.report.say(str(comm))
                medians = {}
                for op in self._operations(inputs, comm):
                    with self._going_on(op.name, backend):
                        stats = self._checked_and_timed(op, backend)
                        medians[op.name] = stats.median
                        self._row(op, backend, num_sms, stats)
                self._compare_pair(medians)
        if self.options.no_baselines:
            return
        for name, make in baselines(self.workload).items():
            if self._wanted(name):
                with self._going_on(name, "jax"):
                    op = make(inputs)
                    self._row(op, "jax", None, self._checked_and_timed(op, "jax"))

    def _sweep(self) -> None:
        """plan, dispatch and combine with one size changed at a time."""
        self.report.say(
            "\nfloor = max(latency floor, bytes / ceiling); the latency floor is "
            f"{self.limits.latency_us:.1f} us. '!' marks a point below 0.6 of its "
            "floor."
        )
        self.report.head(SWEEP_COLUMNS)
        backend, num_sms = next(self._backends())
        with self._communicator(backend, num_sms) as comm:
            for point in sweep(self.workload, self.on_gpu):
                inputs = Inputs(self.mesh, point)
                for op in self._operations(inputs, comm):
                    if "+" in op.name:
                        continue
                    with self._going_on(f"{point} {op.name}", backend):
                        stats = self._checked_and_timed(op, backend)
                        floor_us = self._floor_us(point, op, num_sms)
                        self.report.sweep_row(
                            point, op.name, backend, num_sms, stats, op.moves, floor_us
                        )

    def _backends(self) -> Iterator[tuple[str, int | None]]:
        for backend in self.options.backends or (self.native, "xla"):
            for num_sms in self.num_sms if backend == "cuda" else [None]:
                yield backend, num_sms

    def _communicator(self, backend: str, num_sms: int | None) -> jax_ep.Communicator:
        return jax_ep.Communicator(self.mesh, AXIS, backend=backend, num_sms=num_sms)

    def _operations(self, inputs: Inputs, comm: jax_ep.Communicator):
        for op in jax_ep_operations(inputs, comm):
            # The sequences say nothing about a backend that is only a reference.
            if self._wanted(op.name) and not (comm.backend == "xla" and "+" in op.name):
                yield op

    def _wanted(self, name: str) -> bool:
        return not self.options.only or name in self.options.only

    def _checked_and_timed(self, op: Operation, backend: str) -> Stats:
        op.check()
        plain = backend == "xla" or (backend == "jax" and not self.on_gpu)
        return self.stopwatch.measure(op.chain, slow=op.slow or plain)

    @contextlib.contextmanager
    def _going_on(self, name: str, backend: str) -> Iterator[None]:
        """Makes what cannot run a line in the table, not the end of it."""
        try:
            yield
        except FAILURES as e:
            reason = " ".join(str(e).split())
            wrong = isinstance(e, AssertionError)
            what = "WRONG RESULT" if wrong else "did not run"
            self.report.say(f"{name} ({backend}) {what}: {reason[:120]}")
            self.report.record("failure", operation=name, backend=backend, why=reason)
            self.failed |= wrong or backend == self.native

    def _row(self, op: Operation, backend: str, num_sms, stats: Stats) -> None:
        limit = self.limits.of(num_sms)
        known = bool(op.moves) and all(m in limit for m in op.moves)
        self.report.operation_row(
            self.workload,
            op.name,
            backend,
            num_sms,
            stats,
            op.moves,
            sum(limit[m] for m in op.moves) if known else None,
        )

    def _compare_pair(self, medians: dict[str, float]) -> None:
        pair = medians.get("dispatch + combine")
        if pair and "dispatch" in medians and "combine" in medians:
            parts = medians["dispatch"] + medians["combine"]
            over = pair / parts - 1
            self.report.say(f"  the chained pair takes {over:+.1%} over its parts")
            self.report.record("pair over parts", share=round(over, 4))

    def _floor_us(self, point: Workload, op: Operation, num_sms) -> float:
        """max(latency floor, bytes / ceiling): what the point could take."""
        base, floor_us = self.workload, self.limits.latency_us
        for moved in op.moves:
            copy_us = self.limits.of(num_sms).get(moved, 0.0)
            # On a CPU all ranks share the memory, so all their rows count.
            if self.on_gpu:
                part = point.wire_bytes / max(base.wire_bytes, 1)
            else:
                part = point.total_bytes / max(base.total_bytes, 1)
            floor_us = max(floor_us, copy_us * part)
        return floor_us


# JAX raises most of what a backend cannot do as one of these.


def _with_options(workload: Workload, options: argparse.Namespace) -> Workload:
    given = {
        "num_tokens": options.T,
        "hidden": options.H,
        "top_k": options.K,
        "num_experts": options.E,
        "dtype": options.dtype,
        "routing": options.routing,
        "capacity": options.capacity,
        "seed": options.seed,
    }
    return dataclasses.replace(
        workload, **{k: v for k, v in given.items() if v is not None}
    )


def _parse() -> argparse.Namespace:
    parser = common_parser(__doc__, quick="fewer repetitions, one SM count")
    add = parser.add_argument
    add("--sweep", action="store_true", help="vary T, H, K, routing and dtype")
    add("--dtype", choices=tuple(DTYPES))
    add(
        "--capacity",
        type=lambda text: text if text in ("full", "fit") else positive(text),
        help="rows of a receive buffer: full (R * T, the default), fit or a number",
    )
    add("--seed", type=int, help="of routing and rows")
    add(
        "--num-sms",
        type=lambda text: [positive(n) for n in text.split(",")],
        default=[24],
        metavar="N[,N...]",
        help="SMs that an operation of ours uses on a GPU (default: 24)",
    )
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
