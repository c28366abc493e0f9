"""What a run prints and writes: tables for people, JSON lines for programs."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import jax
from timing import Stats
from workloads import Workload

MEANING = (
    "GB/s: wire = rows that go to another rank, logical = all rows, those that "
    "stay included;\n"
    "      bytes of the busiest rank over the slowest rank's time, "
    "1 GB = 10^9 bytes. Padding and zero fill do not count.\n"
    "us:   median and 95th percentile of one call in a chain inside one jit, "
    "the chain's link taken off."
)

# What a measurement may end in without ending the run: a wrong result, and what
# XLA, JAX or jax_ep refuse.
FAILURES = (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError)


class Report:
    """Prints rows as they come and appends each as one JSON line."""

    def __init__(self, json_path: str | None, *, quiet: bool = False):
        self._quiet = quiet
        self._file: TextIO | None = None
        if json_path:
            path = pathlib.Path(json_path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a")
        self._widths: list[int] = []

    def record(self, record: str, /, **fields: Any) -> None:
        """Writes one JSON line; nothing on the screen."""
        if self._file:
            self._file.write(json.dumps({"record": record, **fields}) + "\n")
            self._file.flush()

    def say(self, text: str = "") -> None:
        if not self._quiet:
            print(text, flush=True)

    def head(self, columns: Mapping[str, int]) -> None:
        """Starts a table: column names with widths; the first is left-aligned."""
        self._widths = list(columns.values())
        self.row(list(columns))
        self.say("-" * (sum(self._widths) + 2 * (len(self._widths) - 1)))

    def row(self, cells: Sequence[str]) -> None:
        first, *others = cells
        widths = self._widths
        parts = [first.ljust(widths[0])]
        parts += [c.rjust(w) for c, w in zip(others, widths[1:])]
        self.say("  ".join(parts).rstrip())

    def operation_row(
        self,
        workload: Workload,
        name: str,
        backend: str,
        num_sms: int | None,
        stats: Stats,
        moves: Sequence[str],
        ceiling_us: float | None,
    ) -> None:
        """One operation of the table and its JSON line."""
        share = None if ceiling_us is None else ceiling_us / stats.median
        wire, logical = _rates(workload, stats, len(moves))
        self.row(
            [
                name,
                backend,
                str(num_sms or ""),
                *_cells(".1f", stats.median, stats.p95, wire, logical),
                *_cells(".2f", share),
            ]
        )
        self.record(
            "operation",
            operation=name,
            **_timing(backend, num_sms, stats, wire, logical),
            ceiling_us=_rounded(ceiling_us),
            share_of_ceiling=_rounded(share),
            workload=workload.as_dict(),
        )

    def sweep_row(
        self,
        workload: Workload,
        name: str,
        backend: str,
        num_sms: int | None,
        stats: Stats,
        moves: Sequence[str],
        floor_us: float,
    ) -> None:
        """One point of a sweep and its JSON line."""
        share = floor_us / stats.median if moves else None
        wire, logical = _rates(workload, stats, len(moves))
        self.row(
            [
                str(workload),
                name,
                *_cells(".1f", stats.median, stats.p95, floor_us if moves else None),
                *_cells(".2f", share),
                "!" if share is not None and share < 0.6 else "",
                *_cells(".1f", wire, logical),
            ]
        )
        self.record(
            "sweep",
            operation=name,
            **_timing(backend, num_sms, stats, wire, logical),
            floor_us=_rounded(floor_us if moves else None),
            share_of_floor=_rounded(share),
            workload=workload.as_dict(),
        )


OPERATION_COLUMNS = {
    "operation": 22,
    "backend": 7,
    "SMs": 3,
    "us": 10,
    "p95": 10,
    "wire GB/s": 9,
    "logical GB/s": 12,
    "of ceiling": 10,
}
SWEEP_COLUMNS = {
    "workload": 52,
    "operation": 9,
    "us": 9,
    "p95": 9,
    "floor": 9,
    "of floor": 8,
    "": 1,
    "wire GB/s": 9,
    "logical GB/s": 12,
}


def _rates(
    workload: Workload, stats: Stats, passes: int
) -> tuple[float | None, float | None]:
    """Wire and logical GB/s of an operation that moves the rows `passes` times."""
    if not passes:
        return None, None
    scale = passes / stats.median / 1e3
    return workload.wire_bytes * scale, workload.logical_bytes * scale


def _cells(form: str, *values: float | None) -> list[str]:
    return ["" if v is None else format(v, form) for v in values]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _timing(backend, num_sms, stats: Stats, wire, logical) -> dict:
    return {
        "backend": backend,
        "num_sms": num_sms,
        "us": round(stats.median, 3),
        "p95_us": round(stats.p95, 3),
        "best_us": round(stats.best, 3),
        "reps": stats.reps,
        "chain_lengths": [stats.short, stats.long],
        "wire_gb_per_s": _rounded(wire),
        "logical_gb_per_s": _rounded(logical),
    }


def machine(devices: Sequence[jax.Device]) -> dict:
    """Where and on what a run happened."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(),
        "command": sys.argv,
        "commit": _commit(),
        "python": sys.version.split()[0],
        "jax": jax.__version__,
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "load_average": os.getloadavg()[0],
    }


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty"]
    here = pathlib.Path(__file__).parent
    try:
        done = subprocess.run(
            command, cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
