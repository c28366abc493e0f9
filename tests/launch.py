"""Starts one program in several processes that find each other through JAX.

    with launch.Job("program.py", 2, tmp_path) as job:
        job.wait()

Every process gets its place on the command line, which `join` takes off again;
its output goes to a log of its own. A process that fails ends the wait with all
logs; what still runs at the end is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
_ALLOCATOR_VARIABLES = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)
# NCCL as between hosts: neither peer memory nor shared memory.
SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}


def join(argv: list[str] | None = None) -> list[str]:
    """In a process: takes its place; returns the other arguments."""
    import jax

    argv = sys.argv[1:] if argv is None else argv
    address, processes, process, platform, devices, *rest = argv
    jax.config.update("jax_platforms", platform)
    gpus = None
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", int(devices))
    elif devices:
        gpus = [int(gpu) for gpu in devices.split(",")]
    jax.distributed.initialize(
        address, int(processes), int(process), local_device_ids=gpus
    )
    return rest


def two_gpus() -> tuple[str, str]:
    """GPUs for two processes: one for each, or the only one for both."""
    import jax

    return "0", str(min(1, jax.device_count() - 1))


def free_port() -> int:
    """A port that nobody listens on now.

    Below those that the system hands out, and at random: what it names as free is the
    first that another process gets that asks, before the one here listens.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def gpu_job(
    logs: pathlib.Path,
    name: str,
    gpus: Sequence[str],
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Job:
    """A function of gpu_process_program.py, with `options`, on each of `gpus`."""
    return Job(
        "gpu_process_program.py",
        len(gpus),
        logs,
        gpus=gpus,
        arguments=(name, json.dumps(options or {})),
        **keywords,
    )


def found(log: str) -> Any:
    """What a process wrote as JSON in its log, on one line."""
    (line,) = (line for line in log.splitlines() if line.startswith("{"))
    return json.loads(line)


class Job:
    """The processes of one run, and their logs."""

    def __init__(
        self,
        program: str,
        processes: int,
        logs: pathlib.Path,
        *,
        arguments: Sequence[str] = (),
        devices: int = 2,
        own_arguments: Sequence[Sequence[str]] | None = None,
        gpus: Sequence[str] | None = None,
        hide: bool = False,
        variables: Mapping[str, str] | None = None,
    ):
        """Starts `python tests/program` once for each process.

        Args:
          program: a file beside this one.
          processes: how many.
          logs: directory for log.<process>.
          arguments: for all, after their place.
          devices: virtual CPU devices of each.
          own_arguments: for each process, after those.
          gpus: of each process, as "0" or "0,1", in place of CPU devices.
          hide: a process sees no GPUs but its own, by CUDA_VISIBLE_DEVICES.
          variables: of the environment; on GPUs in place of a small share of
            their memory, of which the calling process may have most.
        """
        address = f"localhost:{free_port()}"
        # XLA's pool on few cores, before jax 0.12: threads of several devices
        # wait in it for each other.
        pool = str(max(16, 2 * devices))
        environment = {**os.environ, "NPROC": pool, "PYTHONUNBUFFERED": "1"}
        paths = [str(HERE.parent), str(HERE), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        apart = False
        if gpus is not None:
            for name in _ALLOCATOR_VARIABLES:
                environment.pop(name, None)
            environment |= variables or {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".03"}
            # NCCL refuses two ranks on one GPU of one host.
            apart = len(set(gpus)) < len(gpus)
        self.logs = [logs / f"log.{process}" for process in range(processes)]
        self.processes = []
        for process, log in enumerate(self.logs):
            where = ["cpu", str(devices)]
            mine_alone = {"NCCL_HOSTID": f"{process}"} if apart else {}
            if gpus is not None:
                where = ["cuda", "" if hide else gpus[process]]
            if gpus is not None and hide:
                mine_alone["CUDA_VISIBLE_DEVICES"] = gpus[process]
            place = [address, str(processes), str(process), *where]
            mine = own_arguments[process] if own_arguments else ()
            with log.open("wb") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, HERE / program, *place, *arguments, *mine],
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        cwd=HERE.parent,
                        env=environment | mine_alone,
                    )
                )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def wait(
        self, timeout_s: float = 240.0, *, killed: Sequence[int] = ()
    ) -> list[str]:
        """Waits for all and returns their output; those `killed` may fail.

        Raises:
          AssertionError: a process failed or did not end; with all logs.
        """
        end = time.monotonic() + timeout_s
        codes: list[int | None] = [None] * len(self.processes)
        while None in codes and time.monotonic() < end:
            codes = [process.poll() for process in self.processes]
            bad = [p for p, code in enumerate(codes) if code and p not in killed]
            if bad:
                # The others' own words about it come within a moment.
                end = min(end, time.monotonic() + 5.0)
            time.sleep(0.02)
        failed = [p for p, code in enumerate(codes) if code != 0 and p not in killed]
        assert not failed, f"exit codes {codes} (None: still ran)\n{self.text()}"
        return self.output()

    def wait_for(self, process: int, text: str, timeout_s: float = 120.0) -> None:
        """Waits until a process has written `text`."""
        end = time.monotonic() + timeout_s
        while text not in self.output()[process]:
            assert time.monotonic() < end, f"no {text!r} came\n{self.text()}"
            assert self.processes[process].poll() is None, self.text()
            time.sleep(0.02)

    def send(self, process: int, number: signal.Signals) -> None:
        """Sends a signal to one process."""
        self.processes[process].send_signal(number)

    def output(self) -> list[str]:
        """What each process has written so far."""
        return [log.read_text(errors="replace") for log in self.logs]

    def text(self) -> str:
        """All logs, for messages."""
        return "\n".join(
            f"--- process {process}\n{text}"
            for process, text in enumerate(self.output())
        )
