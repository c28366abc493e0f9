"""Backend "cuda" with a process for each GPU: operations, paths, faults, lifetime.

The processes are started by launch.py; this one only waits for them. Where there is
one GPU they share it, and take turns; those whose kernels trap run at the same time
then, as the driver may not tell a process that takes turns of its trap. What
gpu_ranks_test.py shows with several ranks on one GPU needs two GPUs here.
"""

import os
import re
import signal
import time

import launch
import mps
import process_suite
import pytest
from training import train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GPUS = launch.two_gpus()
DIRECT = [["direct", "direct"], ["direct", "direct"]]
STAGED = [["direct", "staged"], ["staged", "direct"]]
SMALL = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".03"}
PLATFORM = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
# Options of the job and of the program, and the paths where they are known. Three
# run at a time: most of their time is XLA's, but their kernels share the GPUs.
VARIANTS = {
    "fraction": ({"variables": SMALL}, {}, DIRECT),
    "growing": ({"variables": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}}, {}, None),
    "cuda_async": (
        {
            "variables": {
                "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            }
        },
        {},
        STAGED,
    ),
    "hidden": ({"variables": SMALL, "hide": True}, {}, DIRECT),
    "platform": ({"variables": PLATFORM}, {}, STAGED),
    "tiny_staging": (
        {"variables": PLATFORM},
        {"num_channels": 1, "staging_bytes": 2048, "steps": 4},
        STAGED,
    ),
}
AT_A_TIME = 3
if len(set(GPUS)) == 1:
    # For every two slots the processes would take turns.
    del VARIANTS["tiny_staging"]


def job(logs, name, gpus=GPUS, *, options=None, **keywords):
    return launch.gpu_job(logs, name, gpus, options, **keywords)


@pytest.fixture
def at_once():
    """Variables with which the kernels of both processes run at the same time."""
    if len(set(GPUS)) > 1:
        yield SMALL
        return
    with mps.service() as service:
        yield SMALL | service.variables


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """name -> what the processes of a variant have written, when they have ended."""
    jobs = {}
    names = list(VARIANTS)

    def start(name):
        keywords, options, _ = VARIANTS[name]
        logs = tmp_path_factory.mktemp(name)
        return job(logs, "exchanges", options=options, **keywords)

    def wait(name):
        if name not in jobs:
            for one in jobs.values():
                one.wait(100)
            first = names.index(name) // AT_A_TIME * AT_A_TIME
            jobs.update({n: start(n) for n in names[first : first + AT_A_TIME]})
        return jobs[name].wait(100)

    yield wait
    for one in jobs.values():
        one.__exit__()


@pytest.mark.parametrize("variant", VARIANTS)
def test_exchanges(outputs, variant):
    for log in outputs(variant):
        found = launch.found(log)
        print(variant, found)
        assert not any(map(any, found["wrong"])), found
        assert found["processes"] == [0, 1]
        paths = VARIANTS[variant][2]
        assert found["paths"] == paths or paths is None


@pytest.mark.gpu(count=2)
def test_low_latency(tmp_path):
    with job(tmp_path, "low_latency", variables=SMALL) as one:
        for log in one.wait(120):
            found = launch.found(log)
            assert found["expert"] == found["rank"] == 0, log
            assert found["bytes"] > 0


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize(
    ("op", "layout"),
    [("low_latency_dispatch", "rank"), ("low_latency_combine", "expert")],
)
def test_low_latency_process_that_never_calls(op, layout, tmp_path):
    with job(
        tmp_path,
        "silent_low_latency",
        options={"op": op, "layout": layout},
        variables=SMALL,
    ) as both:
        log, _ = both.wait(60)
    # What the kernel has printed (gpu_test.py looks at it) may be lost here: the driver
    # fetches it when the host synchronises, and another call may see the failure first.
    (seconds,) = re.findall(r"FAILED after (\d+\.\d) s: JaxRuntimeError", log)
    assert 3 <= float(seconds) < 15


@pytest.mark.gpu(count=2)
def test_operations_between_processes(tmp_path):
    """The routing cases over rings of two slots; gpu_ranks_test.py has the others."""
    arguments = ["-q", "--timeout=120", "-x", "--tiny-staging"]
    with launch.Job(
        "process_suite.py",
        2,
        tmp_path,
        gpus=GPUS,
        variables=PLATFORM,
        arguments=[*arguments, *process_suite.OPERATIONS],
    ) as suite:
        logs = suite.wait(200)
    counts = [re.search(r"(\d+) passed", log).group(1) for log in logs]
    assert len(set(counts)) == 1
    assert int(counts[0]) > 30


@pytest.mark.gpu(count=2)
def test_example_has_the_losses_of_one_process(tmp_path):
    """Same batches, same model, one group of two GPUs: 2 processes, and 1."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    variables = {
        "CUDA_VISIBLE_DEVICES": ",".join(visible),
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "NCCL_NVLS_ENABLE": "0",
    }
    one = train("train_moe_lm.py", out=tmp_path / "one", **variables)
    options = ("--processes=2", "--backend=cuda")
    two = train("multi_process.py", *options, out=tmp_path / "two", **variables)
    assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.gpu(count=4)
def test_two_gpus_in_each_of_two_processes(tmp_path):
    with job(tmp_path, "exchanges", ("0,1", "2,3")) as four:
        for log in four.wait(100):
            found = launch.found(log)
            assert not any(map(any, found["wrong"])), found
            assert found["processes"] == [0, 0, 1, 1]
            assert {path for row in found["paths"] for path in row} == {"direct"}


def test_a_long_wait_is_told_while_it_lasts(tmp_path):
    with job(tmp_path, "late_process", variables=SMALL) as both:
        log, _ = both.wait(100)
    waiting = log.partition("calls\n")[2].partition("has rows\n")[0]
    assert re.search(
        r"^jax_ep plan \(channel \d+\): rank 0 has waited 1\.5 s and will wait 60\.0 s "
        r"in all; missing: the [a-z]+ of rank 1$",
        waiting,
        re.MULTILINE,
    ), log
    assert waiting.count("jax_ep plan") == 1, log


def test_letting_go_does_not_wait_for_the_gpu(tmp_path):
    with job(tmp_path, "let_go_while_a_call_waits", variables=SMALL) as both:
        for log in both.wait(100):
            assert "END\n" in log, log


@pytest.mark.gpu(count=2)
def test_lifetime(tmp_path):
    """Survives stops, closes with work in flight, gives all memory back."""
    limits = {"limit_gib": mps.LIMIT_GIB}
    with (
        mps.service(gpus=len(set(GPUS)), **limits) as service,
        job(
            tmp_path,
            "lifetime",
            options=limits,
            variables=SMALL | service.variables,
        ) as both,
    ):
        both.wait_for(1, "runs", 60)
        for _ in range(2):
            both.send(1, signal.SIGSTOP)
            time.sleep(1)
            both.send(1, signal.SIGCONT)
            time.sleep(0.2)
        for log in both.wait(100):
            print(log)
            # JAX may have a last word.
            assert "END\n" in log, log


def test_killed_inside_a_dispatch(tmp_path):
    with job(tmp_path, "killed_inside_a_dispatch") as both:
        both.wait_for(0, "runs", 60)
        both.wait_for(1, "runs", 60)
        time.sleep(2)
        both.send(1, signal.SIGKILL)
        (log, _) = both.wait(40, killed=[1])
    assert "FAILED after" in log
    assert re.search(
        r"jax_ep dispatch \(channel \d+\): rank 0 waited 3\.0 s for [a-z0-9 ]+ of "
        r"rank 1",
        log,
    ), log


@pytest.mark.gpu(count=2)
def test_another_operation_on_one_rank(tmp_path):
    with job(tmp_path, "other_operation") as both:
        logs = both.wait(120)
    for rank, (op, log) in enumerate(zip(("dispatch", "combine"), logs)):
        assert re.search(
            rf"jax_ep {op} \(channel \d+\): rank {rank} waited 3\.0 s for the "
            rf"buffers of rank {1 - rank}",
            log,
        ), log


def test_other_sizes_on_one_rank(at_once, tmp_path):
    """Found before any row is written."""
    # XLA's processes share the work of tuning equal programs, and wait for each
    # other for ever where programs differ.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_shard_autotuning=false"
    with job(
        tmp_path, "other_shapes", variables=at_once | {"XLA_FLAGS": flags}
    ) as both:
        logs = both.wait(120)
    # Who has trapped cannot answer the other any more, which has seen enough.
    assert any(
        re.search(
            rf"jax_ep dispatch \(channel (\d+)\): rank {rank} found rank {1 - rank} in "
            r"another operation \(channel \1\)",
            log,
        )
        for rank, log in enumerate(logs)
    ), logs


@pytest.mark.parametrize("mode", (None, "CONCURRENT"), ids=("default", "concurrent"))
def test_plans_side_by_side(at_once, mode, tmp_path):
    """Two plans 64 channels apart, as branches of a CUDA graph too."""
    options = {"pairs": 31, "rounds": 20, "mode": mode}
    with job(
        tmp_path, "plans_side_by_side", options=options, variables=at_once
    ) as both:
        for log in both.wait(200):
            assert launch.found(log) == {"wrong": 0}, log


def test_two_launches_in_one_control_slot(at_once, tmp_path):
    """Which no two sites of a program have until there are as many as slots.

    The rows between them make the program large enough for a CUDA graph.
    """
    options = {"pairs": 4, "rounds": 20, "mode": "CONCURRENT", "one_slot": True}
    with job(
        tmp_path, "plans_side_by_side", options=options, variables=at_once
    ) as both:
        logs = both.wait(120)
    found = re.findall(
        r"jax_ep plan \(channel (\d+)\): rank \d found its control slot in use by "
        r"channel (\d+)",
        "".join(logs),
    )
    assert found, logs
    assert all(mine != other for mine, other in found)


def test_program_on_another_mesh(at_once, tmp_path):
    with job(tmp_path, "other_mesh", variables=at_once) as both:
        logs = both.wait(60)
    found = re.findall(
        r"jax_ep plan \(channel \d+\): rank (\d) found its device at position (\d) "
        r"\(rank (\d)\) of the program's mesh, but at position (\d)",
        "".join(logs),
    )
    assert found, logs
    assert set(found) <= {("0", "1", "1", "0"), ("1", "0", "0", "1")}
