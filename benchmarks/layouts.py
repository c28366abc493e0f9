"""One benchmark in several layouts: all ranks in one process, and in several."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

_Result = TypeVar("_Result")

_WAIT_MS = 600_000
_values = itertools.count()


def agreed(value: Any) -> Any:
    """Process 0's value (JSON); every process calls this in step."""
    if jax.process_count() == 1:
        return value
    from jax_ep._setup import bootstrap

    client = bootstrap.distributed_client()
    key = f"benchmark/{next(_values)}"
    if jax.process_index() == 0:
        client.key_value_set(key, json.dumps(value))
    return json.loads(client.blocking_key_value_get(key, _WAIT_MS))


def together(step: Callable[[], _Result]) -> _Result:
    """`step()` in every process; raises in all of them if it raises in one."""
    if jax.process_count() == 1:
        return step()
    from jax_ep._setup import bootstrap

    client = bootstrap.distributed_client()
    key = f"benchmark/{next(_values)}"
    failure: Exception | None = None
    result: Any = None
    try:
        result = step()
    except Exception as e:
        failure = e
    client.key_value_set(
        f"{key}/{jax.process_index()}", json.dumps(failure and str(failure))
    )
    for process in range(jax.process_count()):
        text = json.loads(client.blocking_key_value_get(f"{key}/{process}", _WAIT_MS))
        if text is not None and not failure:
            failure = RuntimeError(f"process {process}: {text}")
    if failure:
        raise failure
    return result


def join(place: str, on_gpu: bool) -> None:
    """Takes this process's place; before JAX's devices are asked for."""
    address, process, processes, ranks = place.split(",")
    mine = int(ranks) // int(processes)
    gpus = None
    if on_gpu:
        gpus = list(range(mine * int(process), mine * (int(process) + 1)))
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", mine)
    jax.distributed.initialize(
        address, int(processes), int(process), local_device_ids=gpus
    )


def free_address() -> str:
    """Where processes of one run can meet: a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def has_gpus(options: argparse.Namespace) -> bool:
    """Where to run, without JAX, which would take the memory."""
    driver = os.path.exists("/proc/driver/nvidia/version")
    return options.platform == "gpu" or (options.platform == "auto" and driver)


def compare(options: argparse.Namespace, say: Callable[[str], Any] = print) -> int:
    """Runs this program in every layout; prints their tables and one of all."""
    processes, on_gpu = options.processes, has_gpus(options)
    ranks = options.ranks or processes
    if ranks % processes:
        raise SystemExit(f"--ranks must be a multiple of {processes} processes")
    arguments = [  # later options win
        *sys.argv[1:],
        "--processes=1",
        "--sections=table",
        f"--ranks={ranks}",
        f"--backends={'cuda' if on_gpu else 'cpu'}",
        f"--platform={'gpu' if on_gpu else 'cpu'}",
        "--no-baselines",
    ]
    layouts: dict[str, tuple[int, dict[str, str]]] = {"1 process": (1, {})}
    if on_gpu:
        layouts[f"{processes} processes, direct"] = processes, {}
        # What XLA allocates one by one cannot be exported.
        platform = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
        layouts[f"{processes} processes, staged"] = processes, platform
    else:
        layouts[f"{processes} processes"] = processes, {}
    found: dict[str, dict[tuple, float]] = {}
    for layout, (count, variables) in layouts.items():
        say(f"\n==== {layout}")
        records, status = _run(arguments, count, ranks, variables)
        if options.json:
            with pathlib.Path(options.json).open("a") as file:
                for record in records:
                    file.write(json.dumps({**record, "layout": layout}) + "\n")
        if status:
            return status
        found[layout] = {
            (record["operation"], record["num_sms"]): record["us"]
            for record in records
            if record["record"] == "operation"
        }
    _print_all(found, say)
    return 0


def _run(
    arguments: Sequence[str], count: int, ranks: int, variables: dict[str, str]
) -> tuple[list[dict], int]:
    """What process 0 recorded, and the exit status."""
    address = free_address()
    environment = {"NPROC": "16", **os.environ, **variables}
    with tempfile.TemporaryDirectory() as directory:
        lines = pathlib.Path(directory, "lines.jsonl")
        running = []
        for process in range(count):
            command = [sys.executable, sys.argv[0], *arguments]
            if process == 0:
                command.append(f"--json={lines}")
            if count > 1:
                command.append(f"--place={address},{process},{count},{ranks}")
            running.append(subprocess.Popen(command, env=environment))
        try:
            ended = [process.wait() for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
        text = lines.read_text() if lines.exists() else ""
        records = [json.loads(line) for line in text.splitlines()]
    return records, next(filter(None, ended), 0)


def _print_all(found: dict[str, dict[tuple, float]], say: Callable[[str], Any]) -> None:
    layouts = list(found)
    first = found[layouts[0]]
    say("\nMicroseconds, and how much more than in one process:")
    say(
        "  ".join(["operation".ljust(22), "SMs", *(name.rjust(22) for name in layouts)])
    )
    for (operation, num_sms), base in first.items():
        cells = [f"{base:22.1f}"]
        for layout in layouts[1:]:
            us = found[layout].get((operation, num_sms))
            cells.append(
                " " * 22 if us is None else f"{us:13.1f} ({us / base - 1:+6.1%})"
            )
        say("  ".join([operation.ljust(22), str(num_sms or "").rjust(3), *cells]))
