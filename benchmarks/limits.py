"""The ceilings of a run: measured first, printed, and then divided by.

On GPUs the copy kernels at several SM counts, on a CPU memcpy.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import copies
import jax
import numpy as np
import timing
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from report import Report
from timing import AXIS, Budget, Chain
from workloads import Workload

_SM_COUNTS = (8, 16, 24, 32, 64)
# Where an operation has no SM count of its own.
_USUAL_SMS = 24


@dataclasses.dataclass
class Limits:
    """What the machine allows for a workload's bytes.

    Attributes:
      copy_us: microseconds by SM count (None on a CPU) and by what is moved,
        "dispatch" (each row stored on its peer) or "combine" (rows loaded from
        the peer and from here, added, written). On a CPU, memcpy for both.
      latency_us: what ranks that only meet would take.
    """

    copy_us: dict[int | None, dict[str, float]] = dataclasses.field(
        default_factory=dict
    )
    latency_us: float = 0.0

    def of(self, num_sms: int | None) -> dict[str, float]:
        """Microseconds by what is moved; empty if nothing was measured."""
        return self.copy_us.get(num_sms) or self.copy_us.get(_USUAL_SMS) or {}


def measure_gpu(
    report: Report,
    devices: Sequence[jax.Device],
    workload: Workload,
    num_sms: Sequence[int],
    quick: bool,
) -> Limits:
    """Times the copy kernels, all GPUs at once, and prints them."""
    limits, w = Limits(), workload
    counts = sorted({*num_sms, _USUAL_SMS} | (set() if quick else {*_SM_COUNTS}))
    report.say("\nCeilings: plain copies of the same bytes, us (wire GB/s)")
    report.head({"SMs": 30, **{str(n): 12 for n in counts}})
    alone = w.num_ranks == 1  # nothing crosses: the local copy is the ceiling
    local_bytes = w.local_rows * w.row_bytes
    bytes_per_peer = local_bytes if alone else w.wire_bytes // (w.num_ranks - 1)
    moved = {
        copies.STORE_LOCAL if alone else copies.STORE: "dispatch",
        copies.SUM: "combine",
    }
    launches, reps = (10, 7) if quick else (20, 20)
    try:
        with copies.CopyBench(devices, bytes_per_peer, local_bytes) as bench:
            for kind in (copies.STORE, copies.STORE_LOCAL, copies.SUM):
                cells = []
                for n in counts:
                    found = bench.run(kind, n, launches=launches, reps=reps)
                    rate = w.wire_bytes / found.median / 1e3
                    cells.append(f"{found.median:.1f} ({rate:.0f})")
                    _record(report, found, rate, kind=copies.NAMES[kind], num_sms=n)
                    if kind in moved:
                        limits.copy_us.setdefault(n, {})[moved[kind]] = found.median
                report.row([copies.NAMES[kind], *cells])
            for kind in (copies.LAUNCH, copies.HANDSHAKE, copies.HANDSHAKE_TWICE):
                found = bench.run(kind, _USUAL_SMS, launches=100, reps=reps)
                report.row([copies.NAMES[kind], f"{found.median:.1f}"])
                _record(report, found, None, kind=copies.NAMES[kind])
                # The last one is the floor: one to open, one to close.
                limits.latency_us = found.median
    except copies.CeilingError as e:
        report.say(f"not measured: {e}")
        report.record("failure", operation="ceilings", why=str(e))
    return limits


def measure_cpu(report: Report, mesh: Mesh, workload: Workload, quick: bool) -> Limits:
    """Times memcpy of the bytes that all ranks move together, and prints it."""
    w = workload
    total = max(w.total_bytes, 1)
    source = max(w.num_ranks * w.num_tokens * w.row_bytes, 1)
    report.say(
        f"\nCeilings: memcpy of all ranks' rows, {total / 1e6:.3g} MB "
        "(the ranks share this machine's memory)"
    )
    report.head({"": 30, "us": 9, "p95": 9, "wire GB/s": 9, "GB/s copied": 11})
    best = np.inf
    for threads in sorted({1, 2, os.cpu_count() or 1}):
        found = copies.memcpy(source, total, threads, reps=10 if quick else 30)
        rate = w.wire_bytes / found.median / 1e3
        report.row(
            [
                f"memcpy, {threads} thread" + "s" * (threads > 1),
                f"{found.median:.1f}",
                f"{found.p95:.1f}",
                f"{rate:.1f}",
                f"{total / found.median / 1e3:.1f}",
            ]
        )
        _record(report, found, rate, kind="memcpy", threads=threads)
        best = min(best, found.median)
    latency_us = _meeting_us(mesh)
    report.row(["psum of one number a rank", f"{latency_us:.1f}"])
    report.record("ceiling", kind="psum of one number a rank", us=round(latency_us, 3))
    return Limits({None: {"dispatch": best, "combine": best}}, latency_us)


def _record(report: Report, found: copies.Timing, rate: float | None, **fields):
    report.record(
        "ceiling",
        **fields,
        us=round(found.median, 3),
        p95_us=round(found.p95, 3),
        best_us=round(found.best, 3),
        reps=found.reps,
        launch_shape=found.variant,
        wire_gb_per_s=None if rate is None else round(rate, 3),
    )


def _meeting_us(mesh: Mesh) -> float:
    """What it costs the ranks to meet, in XLA's own way."""

    def move(_, x):
        return lax.pcast(lax.psum(x, AXIS) * 0.5, AXIS, to="varying")

    ones = np.ones(mesh.size, np.float32)
    one = jax.device_put(ones, NamedSharding(mesh, P(AXIS)))
    chain = Chain("psum", (one,), lambda x: ((), x), move, lambda *state: state[2])
    budget = Budget(0.3, 0.02, min_extra=16, min_reps=5, short=16)
    return timing.measure(mesh, chain, budget, delay=False).median
