"""CUDA's multi-process service: kernels of several processes at the same time.

Without it processes that share a GPU take turns. With it R ranks run side by side as
long as R * num_sms is at most the GPU's number of multiprocessors: blocks that wait
for peers hold a multiprocessor each. A process that traps takes down all others of its
service, so every test has a service of its own. Services take turns with each other,
and with processes that have none.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

import pytest

_CONTROL = "nvidia-cuda-mps-control"
# Where drivers are mounted into containers.
_ELSEWHERE = ("/usr/bin", "/usr/local/nvidia/bin")
DEFAULT_SMS = 24
# Enough for a context, XLA's share of a large GPU, and what a test holds.
LIMIT_GIB = 8


def control() -> str | None:
    """The daemon's program."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *_ELSEWHERE])
    return shutil.which(_CONTROL, path=path)


def why_not() -> str | None:
    """Why there can be no service here; None where there can."""
    if control() is None:
        return f"{_CONTROL}, which comes with NVIDIA's driver, is not on this machine"
    return None


@contextlib.contextmanager
def service(**limits: int) -> Iterator[Service]:
    """Service(**limits) for a test, which is skipped where there can be none."""
    problem = why_not()
    if problem is not None:
        pytest.skip(problem)
    with Service(**limits) as one:
        yield one


def num_sms(ranks_of_a_gpu: int, multiprocessors: int) -> int:
    """Multiprocessors of each rank: all ranks fit, and a few stay free for XLA."""
    return max(1, min(DEFAULT_SMS, (multiprocessors - 4) // ranks_of_a_gpu))


class Service:
    """A service of its own for the processes that have `variables`.

    Attributes:
      variables: of the environment of processes that are to use it.
    """

    def __init__(self, limit_gib: int | None = None, gpus: int = 1) -> None:
        """Starts the daemon.

        Args:
          limit_gib: what each process may take of each GPU, in GiB. Free memory is
            then what is left of that.
          gpus: how many there are.

        Raises:
          RuntimeError: the daemon did not come up.
        """
        # Sockets have short names, and so has this folder.
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))
        pipes, logs = self._folder / "pipe", self._folder / "log"
        for folder in (pipes, logs):
            folder.mkdir()
        self.variables = {
            "CUDA_MPS_PIPE_DIRECTORY": str(pipes),
            "CUDA_MPS_LOG_DIRECTORY": str(logs),
        }
        if limit_gib is not None:
            limits = [f"{gpu}={limit_gib}G" for gpu in range(gpus)]
            self.variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(limits)
        self._environment = os.environ | self.variables
        self._output = (self._folder / "output").open("wb")
        self._daemon = subprocess.Popen(
            [control() or _CONTROL, "-f"],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            self._wait_for_the_daemon()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the daemon and its servers, whatever became of their clients."""
        if self._daemon.poll() is None:
            self._tell("quit -t 2", timeout=8)
            deadline = time.monotonic() + 5
            while self._daemon.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
        # Servers are of the daemon's group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._daemon.pid, signal.SIGKILL)
        self._daemon.wait()
        self._output.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def log(self) -> str:
        """What daemon and servers have written, for messages."""
        files = [self._folder / "output", *sorted((self._folder / "log").glob("*"))]
        return "\n".join(
            f"--- {file.name}\n{file.read_text(errors='replace')[-2000:]}"
            for file in files
            if file.is_file()
        )

    def _wait_for_the_daemon(self) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and self._daemon.poll() is None:
            if self._tell("get_server_list", timeout=10):
                return
            time.sleep(0.1)
        raise RuntimeError(f"{_CONTROL} did not start\n{self.log()}")

    def _tell(self, command: str, timeout: float) -> bool:
        """Sends the daemon a command; whether it took it."""
        try:
            done = subprocess.run(
                [control() or _CONTROL],
                input=command + "\n",
                text=True,
                env=self._environment,
                capture_output=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0 and "Cannot find" not in done.stdout + done.stderr
