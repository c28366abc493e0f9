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
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from report import Report
from timing import AXIS, Budget, Chain, Compilers, Timer
from workloads import Workload

_SM_COUNTS = (8, 16, 24, 32, 64)
# Where an operation has no SM count of its own.
_USUAL_SMS = 24
# A rate is measured with at least so many bytes, or launching would be part of it.
LEAST_BYTES = 16 * 2**20


@dataclasses.dataclass
class Limits:
    """What the machine allows, measured with the bytes of one workload.

    Attributes:
      workload: whose bytes they are.
      copy_us: microseconds by SM count (None on a CPU) and by what is moved,
        "dispatch" (each row stored on its peer) or "combine" (rows loaded from
        the peer and from here, added, written). On a CPU, memcpy for both.
      local_rate: bytes a microsecond of rows that stay, in the same order; GPUs
        only.
      fill_us: on a CPU, zeros in what is left empty of all receive buffers.
      launch_us: an empty kernel; 0 on a CPU.
      latency_us: what ranks that only meet would take.
      handshake_us: one exchange of a word, launched alone; GPUs only.
    """

    workload: Workload
    copy_us: dict[int | None, dict[str, float]] = dataclasses.field(
        default_factory=dict
    )
    local_rate: dict[int | None, dict[str, float]] = dataclasses.field(
        default_factory=dict
    )
    fill_us: float = 0.0
    launch_us: float = 0.0
    latency_us: float = 0.0
    handshake_us: float = 0.0

    def of(self, num_sms: int | None) -> dict[str, float]:
        """Microseconds by what is moved; empty if nothing was measured."""
        return self.copy_us.get(num_sms) or self.copy_us.get(_USUAL_SMS) or {}

    def ceiling_us(self, moves: Sequence[str], num_sms: int | None) -> float | None:
        """Plain copies of what an operation moves; None where there are none."""
        limit = self.of(num_sms)
        if not moves or any(m not in limit for m in moves):
            return None
        return sum(limit[m] for m in moves)

    def floor_us(
        self, point: Workload, moves: Sequence[str], num_sms: int | None
    ) -> float:
        """max(latency floor, bytes / ceiling) of another workload on these GPUs.

        Bytes over the wire are those of the busiest direction of the busiest rank;
        rows that stay have a ceiling of their own, that of a copy inside one GPU.
        """
        base, floor_us = self.workload, self.latency_us
        local = self.local_rate.get(num_sms) or self.local_rate.get(_USUAL_SMS) or {}
        for moved in moves:
            copy_us = self.of(num_sms).get(moved)
            if copy_us and base.wire_bytes:
                floor_us = max(floor_us, point.wire_bytes * copy_us / base.wire_bytes)
            if moved in local:
                floor_us = max(floor_us, point.local_bytes / local[moved])
        return floor_us


def measure_gpu(
    report: Report,
    devices: Sequence[jax.Device],
    workload: Workload,
    num_sms: Sequence[int],
    quick: bool,
) -> Limits:
    """Times the copy kernels, all GPUs at once, and prints them."""
    limits, w = Limits(workload), workload
    counts = sorted({*num_sms, _USUAL_SMS} | (set() if quick else {*_SM_COUNTS}))
    report.say(
        f"\nCeilings: plain copies of {w.wire_bytes / 1e6:.3g} MB to peers, "
        f"{w.local_bytes / 1e6:.3g} MB that stay (T={w.num_tokens}), us (wire GB/s)"
    )
    report.head({"SMs": 30, **{str(n): 12 for n in counts}})
    alone = w.num_ranks == 1  # nothing crosses: the local copy is the ceiling
    bytes_per_peer = w.local_bytes if alone else w.wire_bytes // (w.num_ranks - 1)
    moved = {
        copies.STORE_LOCAL if alone else copies.STORE: "dispatch",
        copies.SUM: "combine",
    }
    launches, reps = (10, 7) if quick else (20, 20)
    try:
        with copies.CopyBench(devices, bytes_per_peer, w.local_bytes) as bench:
            for kind in (copies.STORE, copies.STORE_LOCAL, copies.SUM):
                cells = []
                for n in counts:
                    found = bench.run(kind, n, launches=launches, reps=reps)
                    rate = w.wire_bytes / found.median / 1e3
                    cells.append(f"{found.median:.1f} ({rate:.0f})")
                    _record(report, w, found, rate, kind=copies.NAMES[kind], num_sms=n)
                    if kind in moved:
                        limits.copy_us.setdefault(n, {})[moved[kind]] = found.median
                report.row([copies.NAMES[kind], *cells])
            for kind in (copies.LAUNCH, copies.HANDSHAKE, copies.HANDSHAKE_TWICE):
                found = bench.run(kind, _USUAL_SMS, launches=100, reps=reps)
                report.row([copies.NAMES[kind], f"{found.median:.1f}"])
                _record(report, w, found, None, kind=copies.NAMES[kind])
                if kind == copies.LAUNCH:
                    limits.launch_us = found.median
                if kind == copies.HANDSHAKE:
                    limits.handshake_us = found.median
                # The last one is the floor: one to open, one to close.
                limits.latency_us = found.median
        _measure_local(report, devices[0], limits, counts, launches, reps)
    except copies.CeilingError as e:
        report.say(f"not measured: {e}")
        report.record("failure", operation="ceilings", why=str(e))
    return limits


def measure_few(
    devices: Sequence[jax.Device], point: Workload, num_sms: int
) -> dict[str, float]:
    """Plain copies of a workload's own bytes, us by what is moved.

    For few bytes, which no copy moves at the rate of many. Empty where the ceilings
    cannot be measured.
    """
    per_peer = point.wire_bytes // (point.num_ranks - 1)
    moved = {copies.STORE: "dispatch", copies.SUM: "combine"}
    try:
        with copies.CopyBench(devices, per_peer, point.local_bytes) as bench:
            return {
                name: bench.run(kind, num_sms, launches=20, reps=5).median
                for kind, name in moved.items()
            }
    except copies.CeilingError:
        return {}


def _measure_local(
    report: Report,
    device: jax.Device,
    limits: Limits,
    counts: Sequence[int],
    launches: int,
    reps: int,
) -> None:
    """Times copies inside one GPU: what rows that stay can reach at most."""
    size = max(limits.workload.local_bytes, LEAST_BYTES)
    kinds = {copies.STORE_LOCAL: "dispatch", copies.SUM: "combine"}
    with copies.CopyBench([device], size, size) as bench:
        for kind, moved in kinds.items():
            cells = []
            for n in counts:
                found = bench.run(kind, n, launches=launches, reps=reps)
                limits.local_rate.setdefault(n, {})[moved] = size / found.median
                name = f"one GPU alone, {size / 1e6:.3g} MB, {moved}"
                cells.append(f"{found.median:.1f} ({size / found.median / 1e3:.0f})")
                _record(report, limits.workload, found, None, kind=name, num_sms=n)
            report.row([f"one GPU, {size / 1e6:.3g} MB, {moved}", *cells])


def measure_cpu(
    report: Report, mesh: Mesh, workload: Workload, quick: bool, loud: bool = True
) -> Limits:
    """Times memcpy of the bytes that all ranks move together, and prints it."""
    w = workload
    total = max(w.total_bytes, 1)
    source = max(w.num_ranks * w.num_tokens * w.row_bytes, 1)
    if loud:
        report.say(
            f"\nCeilings: memcpy of all ranks' rows, {total / 1e6:.3g} MB "
            f"(T={w.num_tokens}; the ranks share this machine's memory)"
        )
        report.head({"": 30, "us": 9, "p95": 9, "wire GB/s": 9, "GB/s copied": 11})
    best = np.inf
    for threads in sorted({1, 2, os.cpu_count() or 1}):
        found = copies.memcpy(source, total, threads, reps=10 if quick else 30)
        rate = w.wire_bytes / found.median / 1e3
        best = min(best, found.median)
        _record(report, w, found, rate, kind="memcpy", threads=threads)
        if loud:
            report.row(
                [
                    f"memcpy, {threads} thread" + "s" * (threads > 1),
                    f"{found.median:.1f}",
                    f"{found.p95:.1f}",
                    f"{rate:.1f}",
                    f"{total / found.median / 1e3:.1f}",
                ]
            )
    limits = Limits(w, {None: {"dispatch": best, "combine": best}})
    if loud:
        empty = w.num_ranks * w.num_slots * w.row_bytes - w.total_bytes
        found = copies.memset(max(empty, 1), os.cpu_count() or 1, 10 if quick else 30)
        limits.fill_us = found.median
        report.row([f"zeros, {empty / 1e6:.3g} MB", f"{found.median:.1f}"])
        limits.latency_us = _rendezvous_us(mesh)
        report.row(["psum of one number a rank", f"{limits.latency_us:.1f}"])
        report.record(
            "ceiling",
            kind="psum of one number a rank",
            us=round(limits.latency_us, 3),
        )
    return limits


def _record(
    report: Report,
    workload: Workload,
    found: copies.Timing,
    rate: float | None,
    **fields,
) -> None:
    report.record(
        "ceiling",
        **fields,
        us=round(found.median, 3),
        p95_us=round(found.p95, 3),
        best_us=round(found.best, 3),
        reps=found.reps,
        launch_shape=found.variant,
        wire_gb_per_s=None if rate is None else round(rate, 3),
        workload=workload.as_dict(),
    )


def _rendezvous_us(mesh: Mesh) -> float:
    """What it costs the ranks to meet, in XLA's own way."""

    def move(_, x):
        return lax.pcast(lax.psum(x, AXIS) * 0.5, AXIS, to="varying")

    ones = np.ones(mesh.size, np.float32)
    one = jax.device_put(ones, NamedSharding(mesh, P(AXIS)))
    chain = Chain("psum", (one,), lambda x: ((), x), move, lambda *state: state[2])
    budget = Budget(0.3, 0.02, min_extra=16, min_reps=5, short=16)
    timer = Timer(mesh, chain, budget, delay=False, compilers=Compilers(1))
    return timer.run().median
