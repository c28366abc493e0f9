"""Several hosts: network namespaces of this machine, two processes in each.

Backend "xla" goes between them, backend "cpu" inside each; between hosts jax_ep's own
code needs GPUs. What is shown here is what a user sees of a network that fails.
"""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import time

import hosts
import pytest
import training

pytestmark = pytest.mark.timeout(300)

HERE = pathlib.Path(__file__).resolve().parent
PROCESSES = 4
PORT = 6000
TRAIN = training.EXAMPLES / "multi_host" / "train.py"


@pytest.fixture
def two_hosts(tmp_path):
    """Both, and nothing of them afterwards."""
    problem = hosts.why_not()
    if problem is not None:
        pytest.skip(problem)
    before = set(os.listdir("/dev/shm"))
    with hosts.TwoHosts(tmp_path) as both:
        print("the cable:", both.network)
        yield both
        assert not both.processes()
        assert not both.sockets()
    assert set(os.listdir("/dev/shm")) <= before


class Job:
    """A program on the hosts: processes 0 and 1 on one, 2 and 3 on the other."""

    def __init__(self, two_hosts, folder, program, *arguments, place):
        """Starts it; `place` has a process's place on its command line."""
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "NPROC": "16",
            "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)]),
            "PYTHONUNBUFFERED": "1",
        }
        address = f"{hosts.ADDRESSES[0]}:{PORT}"
        self.logs = [folder / f"log.{process}" for process in range(PROCESSES)]
        self.processes = []
        for process, log in enumerate(self.logs):
            command = [sys.executable, program, *place(address, process), *arguments]
            with log.open("wb") as file:
                self.processes.append(
                    subprocess.Popen(
                        two_hosts.command(process // 2, command),
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )

    def output(self):
        return [log.read_text(errors="replace") for log in self.logs]

    def wait_for(self, text, timeout_s=150.0):
        """Waits until all have written it."""
        end = time.monotonic() + timeout_s
        while not all(text in log for log in self.output()):
            assert time.monotonic() < end, self.output()
            codes = [process.poll() for process in self.processes]
            assert not any(codes), (codes, self.output())
            time.sleep(0.05)

    def go_on(self):
        """Lets those that wait for the test go on."""
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.stdin.write(b"\n")
                process.stdin.flush()

    def wait(self, timeout_s):
        """Waits until all have ended; their exit statuses and their output."""
        end = time.monotonic() + timeout_s
        while any(process.poll() is None for process in self.processes):
            assert time.monotonic() < end, self.output()
            time.sleep(0.05)
        for process in self.processes:
            process.stdin.close()
        return [process.returncode for process in self.processes], self.output()


def job(two_hosts, folder, name):
    def place(address, process):
        return address, PROCESSES, process

    return Job(two_hosts, folder, HERE / "hosts_program.py", name, place=place)


def test_set_up_and_operations(two_hosts, tmp_path):
    codes, logs = job(two_hosts, tmp_path, "works").wait(250)
    assert codes == [0] * PROCESSES, logs
    for process, log in enumerate(logs):
        assert "WARNED jax_ep.Communicator: falling back to backend 'xla'" in log
        assert "4 ranks in 4 processes" in log
        # Who cannot reach whom, by name.
        assert "process 2 (rank 2): cannot reach process 0 (rank 0)" in log
        assert "2 ranks in 2 processes" in log
        assert ("staged in-process" in log) and log.endswith("END\n"), process


def test_example_to_its_last_step(two_hosts, tmp_path):
    def place(address, process):
        where = ("--coordinator", address, "--processes", PROCESSES)
        return *where, "--process", process

    codes, logs = Job(two_hosts, tmp_path, TRAIN, "--steps", 20, place=place).wait(250)
    assert codes == [0] * PROCESSES, logs
    assert re.search(r"loss \d+\.\d+ -> \d+\.\d+", logs[0]), logs[0]


def test_link_cut_during_set_up(two_hosts, tmp_path):
    """Each side names who is on the other, within set-up's limit."""
    running = job(two_hosts, tmp_path, "cut_in_set_up")
    running.wait_for("ready")
    two_hosts.cut()
    running.go_on()
    codes, logs = running.wait(30)
    assert codes == [0] * PROCESSES, logs
    for log in logs[:2]:
        assert "for process 2 (rank 2), process 3 (rank 3), which did not come" in log
    for log in logs[2:]:
        assert "JAX's service, which runs in process 0, did not answer" in log


def test_coordinator_gone_during_set_up(two_hosts, tmp_path):
    running = job(two_hosts, tmp_path, "coordinator_gone_in_set_up")
    running.wait_for("ready")
    running.processes[0].kill()
    running.go_on()
    _, logs = running.wait(30)
    for log in logs[1:]:
        # JAX may end a process first, in words of its own.
        assert re.search(
            r"FAILED after \d\.\d s: RuntimeError: jax_ep.Communicator: arguments: .*"
            r"process 0|Either the leader task was preempted/died",
            log,
        ), log


@pytest.mark.parametrize("fault", ["link", "coordinator"])
def test_lost_during_a_step(fault, two_hosts, tmp_path):
    """JAX's heartbeat finds it, names who is missing, and ends every process."""
    running = job(two_hosts, tmp_path, "steps")
    running.wait_for("ready")
    if fault == "link":
        two_hosts.cut()
    else:
        running.processes[0].kill()
    codes, logs = running.wait(45)
    assert all(codes), logs
    near, far = (logs[:2], logs[2:]) if fault == "link" else ([], logs[1:])
    for log in near:
        assert re.search(r"unhealthy \(stopped sending heartbeats\):\n[23]\n", log)
    for log in far:
        # The service's host, in JAX's words, or the peer's address in Gloo's.
        assert re.search(
            r"CoordinationService/Heartbeat|leader task was preempted/died|"
            rf"Gloo.*{re.escape(hosts.ADDRESSES[0])}",
            log,
        ), log
