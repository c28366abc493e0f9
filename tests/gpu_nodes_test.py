"""Several nodes on the GPUs of one host: NCCL's sockets stand in for a network.

What runs here is all of it but a network card. Crossed: four processes on two GPUs,
node 0 on (GPU 0, GPU 1), node 1 on (GPU 1, GPU 0), so that each rail spans both GPUs.
Where there is one GPU all share it, and take turns.
"""

import re
import signal
import time

import launch
import mps
import pytest
from processes import run_script

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ONE, OTHER = launch.two_gpus()

SMALL = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".03"}
GROWING = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
APART = {"gpus": (ONE, OTHER), "variables": SMALL | launch.SOCKETS}
CROSSED = {"gpus": (ONE, OTHER, OTHER, ONE), "variables": SMALL | launch.SOCKETS}
# Rows inside the nodes are staged, too: XLA's memory is not exported.
CROSSED_STAGED = CROSSED | {"variables": GROWING | launch.SOCKETS}
EVERY_CASE = "tests/every_case_test.py"


def job(logs, name, *, gpus, variables, **options):
    return launch.gpu_job(logs, name, gpus, options, variables=variables)


@pytest.mark.gpu(count=2)
def test_two_nodes_of_one_process():
    """Every routing case, with both GPUs in one process."""
    done = run_script(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--platform=cuda"),
        *("--node-size=1", EVERY_CASE),
        timeout=550,
        **launch.SOCKETS,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize(
    ("place", "size"),
    [(APART, 1), (CROSSED, 2), (CROSSED_STAGED, 2)],
    ids=["apart", "crossed", "crossed_staged"],
)
def test_every_case_between_processes(place, size, tmp_path):
    arguments = ["-q", "--timeout=200", "-x", f"--node-size={size}"]
    with launch.Job(
        "process_suite.py",
        len(place["gpus"]),
        tmp_path,
        arguments=[*arguments, EVERY_CASE],
        **place,
    ) as suite:
        logs = suite.wait(500)
    counts = {re.search(r"(\d+) passed", log).group(1) for log in logs}
    assert len(counts) == 1 and int(counts.pop()) > 20


@pytest.mark.parametrize(
    ("place", "size"),
    [(APART, 1), (CROSSED, 2), (CROSSED_STAGED, 2)],
    ids=["apart", "crossed", "crossed_staged"],
)
def test_300_steps_forward_and_backward(place, size, tmp_path):
    """With delays, over changing routing; beside psum where NCCL allows it."""
    with job(
        tmp_path, "between_nodes", **place, node_size=size, beside=place is APART
    ) as nodes:
        for log in nodes.wait(500):
            assert "wrong 0\n" in log, log


def test_several_chunks(tmp_path):
    """Blocks of 17 MB: four chunks, three in flight."""
    with job(tmp_path, "large_blocks", **APART, node_size=1) as nodes:
        for log in nodes.wait(300):
            assert "wrong 0\n" in log, log


# Of processes that share a GPU and trap, the driver may leave one without a word.
@pytest.mark.parametrize(
    ("place", "size", "killed"),
    [
        pytest.param(APART, 1, 1, id="apart"),
        pytest.param(CROSSED, 2, 2, id="crossed", marks=pytest.mark.gpu(count=2)),
    ],
)
def test_a_peer_node_is_killed(place, size, killed, tmp_path):
    options = {"node_size": size, "killed": killed}
    with job(tmp_path, "killed_in_another_node", **place, **options) as nodes:
        processes = range(len(place["gpus"]))
        for process in processes:
            nodes.wait_for(process, "runs", 200)
        time.sleep(2)
        nodes.send(killed, signal.SIGKILL)
        logs = nodes.wait(120, killed=[killed])
    for process in processes:
        assert process == killed or "FAILED after" in logs[process], logs
    # Its rail has lost it; the others end because their node or rail has.
    assert "the wire between nodes is given up" in logs[0], logs


def test_lifetime(tmp_path):
    """Communicators come and go, and give the GPU's memory and all files back."""
    # NCCL's communicators leave some host memory behind: 4 to 6 MiB each were seen.
    limits = {"limit_gib": mps.LIMIT_GIB}
    with mps.service(gpus=len({ONE, OTHER}), **limits) as service:
        place = APART | {"variables": APART["variables"] | service.variables}
        options = {"node_size": 1, "host_mib": 160, **limits}
        with job(tmp_path, "memory", **place, **options) as nodes:
            for log in nodes.wait(300):
                print(log)
                assert "END\n" in log, log
