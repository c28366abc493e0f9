"""Every rank count on the GPUs that there are: R processes, a rank each.

They run at the same time under CUDA's multi-process service (mps.py): direct, where
XLA's memory is exported, and staged, where it is not.
"""

from __future__ import annotations

import collections
import math
import re
import signal
import time

import jax
import launch
import mps
import process_suite
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]

RANKS = (2, 3, 4, 5, 8)
# For what takes long: an odd number, and the most.
SOME_RANKS = (3, 8)
PATHS = {
    # Sixteen such processes and more run at a time.
    "direct": {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".015"},
    "staged": {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
}
SMALL = PATHS["direct"]

on_each_number = pytest.mark.parametrize("ranks", RANKS)
on_some_numbers = pytest.mark.parametrize("ranks", SOME_RANKS)
on_each_path = pytest.mark.parametrize("path", PATHS)


@pytest.fixture
def service():
    with mps.service() as one:
        yield one


@pytest.fixture
def limited():
    """One whose processes may take only so much memory."""
    with mps.service(limit_gib=mps.LIMIT_GIB, gpus=jax.device_count()) as one:
        yield one


def gpus_of(ranks):
    """One GPU a rank, or as few ranks a GPU as can be."""
    return [str(rank % jax.device_count()) for rank in range(ranks)]


def num_sms(ranks):
    most = math.ceil(ranks / jax.device_count())
    return mps.num_sms(most, jax.devices()[0].core_count)


def job(service, logs, name, ranks, *, variables=SMALL, **options):
    if service is not None:
        variables = variables | service.variables
    options |= {"num_sms": num_sms(ranks)}
    return launch.gpu_job(logs, name, gpus_of(ranks), options, variables=variables)


def run_suite(service, logs, ranks, *arguments, variables=SMALL):
    """Runs pytest in step in all ranks; all must pass the same number of tests."""
    options = ["-q", "--timeout=120", "-x", f"--num-sms={num_sms(ranks)}"]
    with launch.Job(
        "process_suite.py",
        ranks,
        logs,
        gpus=gpus_of(ranks),
        variables=service.variables | variables,
        arguments=[*options, *arguments],
    ) as suite:
        texts = suite.wait(400)
    (passed,) = {re.search(r"(\d+) passed", text).group(1) for text in texts}
    return int(passed)


# Operations ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "path"),
    [(r, "direct") for r in RANKS] + [(r, "staged") for r in SOME_RANKS],
)
def test_operations(service, ranks, path, tmp_path, record_property):
    """The routing cases of plan, dispatch, combine and plan_dispatch."""
    files = process_suite.OPERATIONS
    passed = run_suite(service, tmp_path, ranks, *files, variables=PATHS[path])
    record_property("passed_inside", passed)
    assert passed > 60


@on_some_numbers
def test_experts(service, ranks, tmp_path, record_property):
    """What crosses ranks in a layer, and thousands of steps."""
    files = (*process_suite.REPEATED, *process_suite.EXPERTS)
    passed = run_suite(
        service, tmp_path, ranks, *files, "-k", f"{process_suite.ACROSS} or repetition"
    )
    record_property("passed_inside", passed)
    assert passed > 20


@on_some_numbers
def test_low_latency(service, ranks, tmp_path, record_property):
    file, *which = process_suite.LOW_LATENCY
    passed = run_suite(service, tmp_path, ranks, file, *which)
    record_property("passed_inside", passed)
    assert passed > 30


@on_each_path
@on_each_number
def test_exchanges(service, ranks, path, tmp_path):
    """Rows of many sizes, step after step, checked where they are."""
    with job(service, tmp_path, "exchanges", ranks, variables=PATHS[path]) as all_:
        logs = all_.wait(200)
    for log in logs:
        found = launch.found(log)
        assert not any(map(any, found["wrong"])), found
        assert found["processes"] == list(range(ranks))
        between = [p for i, row in enumerate(found["paths"]) for p in _without(row, i)]
        assert collections.Counter(between) == {path: ranks * (ranks - 1)}


def _without(row, index):
    return row[:index] + row[index + 1 :]


@on_each_number
def test_300_low_latency_pairs(service, ranks, tmp_path):
    with job(service, tmp_path, "low_latency", ranks) as all_:
        for log in all_.wait(200):
            found = launch.found(log)
            assert found["expert"] == found["rank"] == 0, log
            assert found["bytes"] > 0


# Faults --------------------------------------------------------------------------
#
# The first trap ends every process of the service. So all get an error in time, and
# only one of them is sure to have its kernel's words.


@pytest.mark.parametrize(
    ("op", "layout"),
    [("low_latency_dispatch", "rank"), ("low_latency_combine", "expert")],
)
@on_some_numbers
def test_low_latency_process_that_never_calls(service, ranks, op, layout, tmp_path):
    options = {"op": op, "layout": layout}
    with job(service, tmp_path, "silent_low_latency", ranks, **options) as all_:
        logs = all_.wait(90)
    for log in logs[:-1]:
        (seconds,) = re.findall(r"FAILED after (\d+\.\d) s: JaxRuntimeError", log)
        assert float(seconds) < 15, logs


@pytest.mark.gpu(count=3)
def test_killed_inside_a_dispatch(tmp_path):
    """A GPU for each rank; gpu_processes_test.py has two ranks.

    Of processes that share a GPU and take turns, the driver does not tell one of those
    whose kernels trap at the same time (CUDA 13.0, driver 580: also of kernels that
    only spin and trap). At the same time, with a service, all may hang when one of
    them is killed.
    """
    ranks = jax.device_count()
    with job(None, tmp_path, "killed_inside_a_dispatch", ranks) as all_:
        for process in range(ranks):
            all_.wait_for(process, "runs", 90)
        time.sleep(2)
        all_.send(ranks - 1, signal.SIGKILL)
        logs = all_.wait(60, killed=[ranks - 1])
    assert all("FAILED after" in log for log in logs[:-1]), logs


@on_each_number
def test_another_operation_on_one_rank(service, ranks, tmp_path):
    with job(service, tmp_path, "other_operation", ranks) as all_:
        logs = all_.wait(90)
    waited = r"jax_ep (dispatch|combine) \(channel \d+\): rank \d+ waited 3\.0 s for "
    assert any(re.search(waited, log) for log in logs), logs


# Lifetime ------------------------------------------------------------------------


@on_each_number
def test_lifetime(limited, ranks, tmp_path):
    """Stops, closes with work in flight, 20 communicators: all memory comes back."""
    options = {"limit_gib": mps.LIMIT_GIB}
    with job(limited, tmp_path, "lifetime", ranks, **options) as all_:
        all_.wait_for(1, "runs", 90)
        for _ in range(2):
            all_.send(1, signal.SIGSTOP)
            time.sleep(1)
            all_.send(1, signal.SIGCONT)
            time.sleep(0.2)
        for log in all_.wait(150):
            print(log)
            assert "END\n" in log, log
