"""NVLink domains over several hosts, as far as one host has them.

Fabric handles are real; that the processes are on several hosts is not. It takes an
IMEX channel that this user may open: /dev/nvidia-caps-imex-channels/channel0, made by
`mknod` with the major number that /proc/devices has for nvidia-caps-imex-channels.
"""

import launch
import pytest

from jax_ep._setup import fabric, gpu_memory

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ONE, OTHER = launch.two_gpus()
TWO_HOSTS = {"where": ("ab", "xx")}


@pytest.fixture(scope="module", autouse=True)
def handles():
    problem = fabric.why_not(gpu_memory.driver(), 0)
    if problem:
        pytest.skip(problem)


def job(logs, name, gpus=(ONE, OTHER), variables=None, **options):
    return launch.gpu_job(logs, name, gpus, options, variables=variables)


def test_exchanges(tmp_path):
    """XLA does not make its memory for fabric handles, so rows are staged."""
    with job(tmp_path, "exchanges", **TWO_HOSTS) as hosts:
        for log in hosts.wait(200):
            found = launch.found(log)
            assert not any(map(any, found["wrong"])), found
            assert found["paths"] == [["direct", "staged"], ["staged", "direct"]]


def test_low_latency(tmp_path):
    with job(tmp_path, "low_latency", **TWO_HOSTS) as hosts:
        for log in hosts.wait(200):
            found = launch.found(log)
            assert found["expert"] == found["rank"] == 0, log


def test_two_domains_are_two_nodes(tmp_path):
    """Four hosts, each domain with two; rows cross between the domains by NCCL."""
    with job(
        tmp_path,
        "between_nodes",
        (ONE, OTHER, OTHER, ONE),
        {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".03"} | launch.SOCKETS,
        where=("abcd", "xxyy"),
        node_size=None,
        steps=50,
    ) as hosts:
        for log in hosts.wait(250):
            assert "wrong 0\n" in log, log
            assert "4 ranks on 2 nodes" in log, log


def test_a_host_that_does_not_come(tmp_path):
    """Found by the time alone, as everywhere on GPUs."""
    with job(
        tmp_path,
        "silent_low_latency",
        op="low_latency_combine",
        layout="rank",
        **TWO_HOSTS,
    ) as hosts:
        log, _ = hosts.wait(100)
    assert "FAILED after" in log
