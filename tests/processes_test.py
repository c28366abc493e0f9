"""Several processes on one host: operations, faults and lifetime, with real
processes that are killed, stopped, delayed and misused.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

import launch
import process_suite
import pytest
import training
import xla_flags
from process_runs import run, run_suite
from training import train

# JAX's own messages to stderr are not ours to judge; errors are.
pytestmark = pytest.mark.timeout(600)
OPERATIONS = (*process_suite.OPERATIONS[:4], "tests/faults_test.py")
# Rings of two slots.
TINY = ["--tiny-staging"]


# The tests of one process's operations again, over several ---------------------


@pytest.mark.parametrize(
    ("processes", "devices", "staging", "files"),
    [
        pytest.param(2, 2, [], OPERATIONS, id="2x2"),
        pytest.param(2, 2, TINY, process_suite.REPEATED, id="2x2-tiny"),
        pytest.param(4, 2, TINY, OPERATIONS, id="4x2-tiny", marks=pytest.mark.slow),
        pytest.param(4, 1, [], OPERATIONS[:1] + process_suite.REPEATED, id="4x1"),
    ],
)
def test_operations_between_processes(processes, devices, staging, files, tmp_path):
    """Every case with rings of either size, with and without ranks in a process."""
    passed = run_suite(*files, *staging, place=(processes, devices), logs=tmp_path)
    assert passed > 5


@pytest.mark.parametrize(("processes", "devices"), [(1, 72), (2, 36)])
def test_as_many_ranks_as_an_nvlink_domain_has(processes, devices, tmp_path):
    run("many_ranks", tmp_path, processes=processes, devices=devices)


def test_experts_between_processes(tmp_path):
    what = (*process_suite.EXPERTS, "-k", process_suite.ACROSS)
    assert run_suite(*what, place=(2, 2), logs=tmp_path) > 60


def test_low_latency_between_processes(tmp_path):
    passed = run_suite(*process_suite.LOW_LATENCY, place=(2, 2), logs=tmp_path)
    assert passed > 100


@pytest.mark.parametrize("processes", [2, 3])
def test_groups_inside_and_across_processes(processes, tmp_path):
    run("two_axes", tmp_path, processes=processes)


def test_program_on_another_mesh(tmp_path):
    logs = run("other_mesh", tmp_path)
    found = r"rank [01] found its device at position [01] \(rank [01]\) of the"
    assert re.search(rf"jax_ep plan \(channel \d+\): {found}", logs[0])
    told = r"heard that ranks 0, 1 \(process 0\) gave up|came after its peers had"
    assert re.search(rf"rank [23] ({told}).*: .*{found}", logs[1])


def test_independent_operations_in_any_order(tmp_path):
    """Every process runs them in an order of its own; rings are tiny."""
    run("many_at_once", tmp_path, 48)


def test_one_process_comes_late_to_every_step(tmp_path):
    run("random_delays", tmp_path, 1000)


# Faults ------------------------------------------------------------------------


def test_killed_in_set_up(tmp_path):
    (log, _) = run("killed_in_set_up", tmp_path, killed=[1])
    assert (
        "process 0 (ranks 0, 1) waited 3.0 s for process 1 (ranks 2, 3), which did "
        "not come" in log
    )


def test_killed_inside_set_up(tmp_path):
    logs = run("killed_inside_set_up", tmp_path, processes=3, killed=[2])
    for log in logs[:2]:
        assert "waited 3.0 s for process 2 (ranks 4, 5), which did not come" in log


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("processes", "node_size"), [(2, 0), (3, 2)])
def test_fails_in_one_process_at_each_step(processes, node_size, when, tmp_path):
    logs = run("fails_at_each_step", tmp_path, when, node_size, processes=processes)
    (steps,) = {re.search(r"STEPS (\d+)", log).group(1) for log in logs}
    assert int(steps) > 6


def test_never_comes_to_set_up(tmp_path):
    run("never_comes", tmp_path, killed=[1])


def test_killed_between_calls(tmp_path):
    (log, _) = run("killed_between_calls", tmp_path, killed=[1])
    assert re.search(
        r"jax_ep plan \(channel 2\): rank [01] lost ranks 2, 3 \(process 1\): that "
        r"process has ended",
        log,
    )


def test_killed_inside_a_dispatch(tmp_path):
    def kill(job):
        job.wait_for(0, "runs")
        job.wait_for(1, "runs")
        time.sleep(2)
        job.send(1, signal.SIGKILL)

    run("killed_inside_a_dispatch", tmp_path, killed=[1], act=kill)


def test_its_forked_child_does_not_hide_a_killed_process(tmp_path):
    run("orphaned_sockets", tmp_path, killed=[1])


def test_stopped_for_less_than_the_timeout(tmp_path):
    def stop(job):
        job.wait_for(1, "runs")
        for _ in range(3):
            job.send(1, signal.SIGSTOP)
            time.sleep(1)
            job.send(1, signal.SIGCONT)
            time.sleep(0.2)

    run("stopped_for_a_while", tmp_path, act=stop)


def test_stopped_for_more_than_the_timeout(tmp_path):
    run("stopped_for_good", tmp_path, killed=[1])


def test_a_long_wait_is_told_while_it_lasts(tmp_path):
    """Once, by the process that waits."""
    log, late = run_gpu_program("late_process", tmp_path)
    waiting = log.partition("calls\n")[2].partition("has rows\n")[0]
    assert re.search(
        r"^jax_ep plan \(channel \d+\): rank 0 has waited 1\.5 s and will wait 60\.0 s "
        r"in all; missing ranks: 1 \(process 1\)$",
        waiting,
        re.MULTILINE,
    ), log
    assert waiting.count("jax_ep plan") == 1, log
    assert "has waited" not in late, late


def test_letting_go_while_a_call_waits(tmp_path):
    run_gpu_program("let_go_while_a_call_waits", tmp_path)


def run_gpu_program(name, tmp_path):
    """A function of gpu_process_program.py in two processes of one rank each."""
    with launch.Job(
        "gpu_process_program.py", 2, tmp_path, arguments=(name,), devices=1
    ) as job:
        return job.wait(100)


def test_another_operation_on_some_ranks(tmp_path):
    logs = run("other_operation", tmp_path)
    assert "jax_ep dispatch (channel" in logs[0]
    assert "jax_ep combine (channel" in logs[1]


def test_another_program_in_one_process(tmp_path):
    run("other_shapes", tmp_path)


@pytest.mark.parametrize(
    ("axis", "staging_bytes", "shown"),
    [
        ("data", 16 << 20, ("axis_name = 'ep'", "axis_name = 'data'")),
        ("ep", 1 << 20, ("staging_bytes = 16777216", "staging_bytes = 1048576")),
    ],
)
def test_other_arguments(axis, staging_bytes, shown, tmp_path):
    for log in run("other_arguments", tmp_path, axis, staging_bytes):
        assert "jax_ep.Communicator: processes must agree; process 0" in log
        assert all(text in log for text in shown)


# Lifetime ----------------------------------------------------------------------


def test_closed_with_work_in_flight(tmp_path):
    run("closed_with_work_in_flight", tmp_path)


def test_collected_while_a_program_lives(tmp_path):
    run("collected_with_a_live_program", tmp_path)


def test_created_20_times(tmp_path):
    run("created_again_and_again", tmp_path, 20)


def test_fork_after_set_up(tmp_path):
    logs = run("forked", tmp_path)
    for log in logs:
        assert "CHILD jax_ep.dispatch: the communicator was set up before" in log


# The example -------------------------------------------------------------------

PORTS = 61440  # JAX takes one of the 4096 from here on, by the number of the job
# NPROC: XLA's pool on few cores, before jax 0.12.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "NPROC": "16"}


@pytest.fixture(scope="module")
def losses_of_one_process(tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    return train("train_moe_lm.py", out=out, **ENVIRONMENT)


def test_example_has_the_losses_of_one_process(losses_of_one_process, tmp_path):
    """Same batches, same model, same groups: 2 processes, and 1."""
    losses = train("multi_process.py", "--processes=2", out=tmp_path, **ENVIRONMENT)
    assert losses == pytest.approx(losses_of_one_process, rel=1e-5)


def slurm(process, job):
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process),
        "SLURM_STEP_NUM_NODES": "1",
    }


def open_mpi(process, job):
    uri = f"{job << 12}.0;tcp://127.0.0.1,10.0.0.1:34911"
    return {
        "OMPI_MCA_orte_hnp_uri": uri,
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(process),
        "OMPI_VERSION": "4.1.6",
    }


class Cluster(launch.Job):
    """Processes that the environment tells their places, as a cluster's do."""

    def __init__(self, program, logs, arguments, environments):
        """Starts `program` once for each of the environments."""
        clusters = ("SLURM_", "OMPI_", "JAX_COORDINATOR_")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(clusters)}
        inherited["XLA_FLAGS"] = xla_flags.of_user()
        path = os.pathsep.join(p for p in sys.path if p)
        self.logs = [logs / f"log.{process}" for process in range(len(environments))]
        self.processes = []
        for log, told in zip(self.logs, environments, strict=True):
            with log.open("wb") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, program, *arguments],
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env={**inherited, "PYTHONPATH": path, **ENVIRONMENT, **told},
                    )
                )


def job_with_a_free_port():
    for job in range(os.getpid(), os.getpid() + 4096):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", PORTS + job % 4096))
            return job
    raise OSError("no port is free")


@pytest.mark.parametrize("cluster", [slurm, open_mpi])
def test_example_under_a_cluster(cluster, losses_of_one_process, tmp_path):
    """JAX finds the processes by what Slurm or Open MPI put into the environment."""
    job = job_with_a_free_port()
    with Cluster(
        training.EXAMPLES / "multi_process.py",
        tmp_path,
        [*training.OPTIONS, "--cpu-devices=4", f"--out={tmp_path}"],
        [cluster(process, job) for process in range(2)],
    ) as running:
        (log, _) = running.wait(500)
    assert "4 ranks in 2 processes" in log
    losses = training.read_losses(tmp_path)
    assert losses == pytest.approx(losses_of_one_process, rel=1e-5)
