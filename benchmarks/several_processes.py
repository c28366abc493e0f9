"""The same ranks in one process and spread over two, on a CPU.

Between processes rows go through rings in shared memory, and each process has
threads that serve them. Every measurement runs in processes of its own; this
file is also the program that they run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
from inputs import Inputs
from operations import jax_ep_operations
from report import Report
from stopwatch import Stopwatch
from timing import AXIS
from workloads import Workload

import jax_ep

_HERE = pathlib.Path(__file__).resolve().parent
_TIME_OUT_S = 300.0
_NAMES = ("plan", "dispatch", "combine")


def run(report: Report, workload: Workload, quick: bool) -> None:
    """Prints and records both, for a workload with an even number of ranks."""
    ranks = workload.num_ranks
    report.say(f"\nProcesses: {workload}, us")
    report.head({"": 30, **dict.fromkeys(_NAMES, 11)})
    for count in (1, 2):
        if ranks % count:
            report.say(f"{ranks} ranks cannot be shared by {count} processes")
            continue
        shape = f"{count} x {ranks // count} devices"
        try:
            times = _measure(workload, count, 5 if quick else 15)
        except (RuntimeError, subprocess.TimeoutExpired) as e:
            reason = " ".join(str(e).split())
            report.say(f"{shape} did not run: {reason[-300:]}")
            report.record("failure", operation=f"processes {shape}", why=reason)
            continue
        cells = [f"{times[name]:.1f}" for name in _NAMES]
        name = f"{count} process{'es' if count > 1 else ''} x {ranks // count} devices"
        report.row([name, *cells])
        report.record(
            "processes", num_processes=count, us=times, workload=workload.as_dict()
        )


def _measure(workload: Workload, count: int, reps: int) -> dict[str, float]:
    """Starts `count` processes and returns the medians of the first."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    # Before jax 0.12, XLA's threads wait for each other where cores are few.
    environment = {**os.environ, "NPROC": "16"}
    paths = [str(_HERE.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    spec = json.dumps(dataclasses.asdict(workload))
    started = []
    try:
        for process in range(count):
            place = [address, str(count), str(process), str(reps), spec]
            started.append(
                subprocess.Popen(
                    [sys.executable, __file__, *place],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=environment,
                )
            )
        texts = [p.communicate(timeout=_TIME_OUT_S)[0] for p in started]
    finally:
        for p in started:
            p.kill()
            p.wait()
    for p, text in zip(started, texts, strict=True):
        if p.returncode:
            raise RuntimeError(f"exit code {p.returncode}: {text}")
    return json.loads(texts[0].splitlines()[-1])


def main() -> None:
    address, count, process, reps, spec = sys.argv[1:]
    workload = Workload(**json.loads(spec))
    several = int(count) > 1
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", workload.num_ranks // int(count))
    if several:
        jax.distributed.initialize(address, int(count), int(process))
    mesh = jax.make_mesh((workload.num_ranks,), (AXIS,))
    inputs = Inputs(mesh, workload)
    # All processes have to run the same chains as often.
    stopwatch = Stopwatch(mesh, False, same_reps=int(reps))
    times = {}
    with jax_ep.Communicator(mesh, AXIS, backend="cpu") as comm:
        operations = [op for op in jax_ep_operations(inputs, comm) if op.name in _NAMES]
        if several:
            # NumPy can look at the plans of this process's ranks only.
            operations = [
                dataclasses.replace(op, check=None) if op.name == "plan" else op
                for op in operations
            ]
        about_us = max(200.0, workload.total_bytes / 5e3)
        for op, stats in stopwatch.measure(operations, guess_us=lambda op: about_us):
            if isinstance(stats, Exception):
                raise stats
            times[op.name] = round(stats.median, 3)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
