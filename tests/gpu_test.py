"""What only GPUs can show: graphs, traps, large buffers, races, allocators.

The routing cases run on GPUs with the other tests. Here programs that need XLA
flags, settings of the allocator or a tool around them, or that end a CUDA
context, have a process of their own (gpu_program).
"""

from __future__ import annotations

import functools
import glob
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import gpu_program
import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import on_device
import oracle
import payloads
import pytest
from jax import lax

import jax_ep

pytestmark = pytest.mark.gpu(count=2)

RANKS = harness.most_ranks()
PROGRAM = pathlib.Path(gpu_program.__file__)
OPS = ("plan", "dispatch", "combine")
# What XLA captures by default, and with it programs of a single command.
GRAPHS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL "
    "--xla_gpu_graph_min_graph_size=1"
)
NO_GRAPHS = "--xla_gpu_enable_command_buffer="
ALLOCATORS = {
    "growing": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    "platform": {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
    "cuda_async": {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    },
    "fraction": {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".2"},
}


# Processes


class Child:
    """gpu_program in a process of its own.

    Args:
      arguments: of gpu_program.
      flags: added to XLA_FLAGS.
      memory: share of a GPU's memory. This process has its 75 % already.
      tool: the command line of a tool to run it under.
      variables: of the environment, in place of `memory`.
    """

    def __init__(self, *arguments, flags="", memory=0.03, tool=(), variables=None):
        """Starts it."""
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        for name in ("PREALLOCATE", "ALLOCATOR", "MEM_FRACTION"):
            env.pop(f"XLA_PYTHON_CLIENT_{name}", None)
        env.pop("XLA_CLIENT_MEM_FRACTION", None)
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {flags}".strip()
        env |= variables or {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(memory)}
        self._command = [*tool, sys.executable, str(PROGRAM), *map(str, arguments)]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._start = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            env=env,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def finish(self, timeout: float) -> tuple[int, str]:
        """Waits; its exit status and all that it and its kernels printed."""
        try:
            status = self._process.wait(
                max(1.0, timeout - (time.monotonic() - self._start))
            )
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"{timeout} s were not enough\n{self._text()}")
        return status, self._text()

    def found(self, timeout: float = 120.0) -> dict:
        """Waits for a good end; what the program found."""
        status, output = self.finish(timeout)
        assert status == 0, f"exit status {status} of {self._command}\n{output}"
        return last_json(output)

    def kill(self) -> None:
        """Ends it with all that it has started; nothing where it has ended."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Ends it and lets go of its output."""
        self.kill()
        self._output.close()

    def _text(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")


def last_json(output: str) -> dict:
    lines = [line for line in output.splitlines() if line.startswith("{")]
    assert lines, output
    return json.loads(lines[-1])


@pytest.fixture(scope="module")
def start():
    """Child(...), ended with the module at the latest."""
    children = []

    def start_child(*args, **kwargs):
        children.append(Child(*args, **kwargs))
        return children[-1]

    yield start_child
    for child in children:
        child.close()


# CUDA graphs


@pytest.fixture(scope="module")
def with_graphs(start):
    return start("graphs", "--ranks", RANKS, flags=GRAPHS, memory=0.05).found()


def test_graph_captured_on_the_first_call_and_replayed(with_graphs):
    """The routing changes with every run, which the host does not see.

    https://github.com/microsoft/mscclpp/pull/875
    """
    found = with_graphs["replays"]
    assert found["wrong"] == 0
    every_time = found["launches"] * len(OPS) * RANKS
    assert found["launches"] == 1000
    assert found["calls of the first run"] > 0
    assert found["calls of the others"] < every_time / 10, found


def test_graph_of_buffers_that_move(with_graphs):
    """https://github.com/openxla/xla/pull/46029"""
    assert with_graphs["moving memory"]["wrong"] == 0


def test_graph_of_the_body_of_a_loop(with_graphs):
    assert with_graphs["loop"]["wrong"] == 0


def test_graph_with_two_exchanges_at_a_time(with_graphs):
    found = with_graphs["two chains"]
    assert found["wrong"] == 0
    every_time = found["launches"] * 2 * len(OPS) * RANKS
    assert found["calls of the others"] < every_time / 10, found


@pytest.mark.parametrize(
    ("which", "chains"), [("in one", 1), ("in one, two chains", 2)]
)
def test_graph_of_plan_dispatch(with_graphs, which, chains):
    found = with_graphs[which]
    assert found["wrong"] == 0
    # plan_dispatch and combine
    every_time = found["launches"] * chains * 2 * RANKS
    assert found["calls of the first run"] > 0
    assert found["calls of the others"] < every_time / 10, found


def test_low_latency_in_a_graph(start):
    """Ids and tokens change with every run, which the host does not see."""
    child = start("low_latency", "--ranks", RANKS, flags=GRAPHS, memory=0.05)
    for layout, found in child.found().items():
        assert found["wrong"] == 0, layout
        every_time = found["launches"] * 4 * RANKS
        assert found["calls of the first run"] > 0
        assert found["calls of the others"] < every_time / 10, found


def test_without_graphs_every_run_calls_the_handlers(start):
    child = start("graphs", "--ranks", RANKS, "--brief", flags=NO_GRAPHS)
    found = child.found()["replays"]
    assert found["wrong"] == 0
    assert found["calls of the first run"] == len(OPS) * RANKS
    assert found["calls of the others"] == found["launches"] * len(OPS) * RANKS


def test_beside_psum_and_all_gather(start):
    """https://github.com/deepseek-ai/DeepEP/issues/496"""
    found = start(
        "beside_collectives",
        "--ranks",
        RANKS,
        flags="--xla_gpu_enable_latency_hiding_scheduler=true",
        memory=0.05,
    ).found()
    print(found)  # how many collectives start early
    assert found["launches"] == 1000
    # recv_src, received, combined, num_recv, psum, all_gather
    assert found["wrong"] == [0] * 6
    assert found["wrong in a loop"] == 0


# Rows that travel while other work is done


@pytest.fixture(scope="module")
def overlapped(start):
    return start("overlap", "--ranks", RANKS, "--replays", 300, memory=0.05).found(180)


def test_flights_beside_collectives_and_products(overlapped):
    """recv_src, received, combined, num_recv; psum, all_gather, psum_scatter, @."""
    assert overlapped["launches"] == 300
    assert overlapped["wrong"] == [0] * 8


def test_flights_in_a_loop(overlapped):
    assert overlapped["wrong in a loop"] == 0


def test_work_is_enqueued_between_start_and_done(overlapped):
    between = overlapped["between start and done"]
    # XLA may make a reduce-scatter and an all-gather of a psum.
    for op in ("dispatch", "combine"):
        assert {"all-gather", "while"} <= set(between[op]), between
        assert {"all-reduce", "reduce-scatter"} & set(between[op]), between


def test_flight_whose_buffer_xla_copied_is_refused():
    """And nothing is wrong afterwards."""

    def twice(comm, x, ids):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=2 * RANKS)
        flight = jax_ep.dispatch_start(x, plan)
        return jax_ep.dispatch_done(flight), jax_ep.dispatch_done(flight) + 1

    def once(comm, x, ids):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=2 * RANKS)
        flight = jax_ep.dispatch_start(x, plan)
        return jax_ep.dispatch_done(flight), jax_ep.dispatch(x, plan)

    comm = harness.communicator("cuda", RANKS)
    x = payloads.numbers((RANKS, 64, 256), np.float32)
    ids = np.arange(RANKS * 64).reshape(RANKS, 64, 1).astype(np.int32) % (2 * RANKS)
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=r"jax_ep dispatch_done \(channel \d+\): no flight has these buffers",
    ):
        harness.run(twice, comm, x, ids)
    for _ in range(3):
        halves, whole = harness.run(once, comm, x, ids)
        np.testing.assert_array_equal(halves, whole)


# A rank that never calls


@pytest.mark.parametrize("op", OPS)
def test_rank_that_never_calls(start, op):
    # One process at a time: a kernel that spins in one keeps the others waiting.
    child = start("missing_rank", "--op", op, "--ranks", RANKS, memory=0.01)
    found = assert_traps(
        child,
        rf"jax_ep {op} \(channel \d+\): rank \d+ waited 2\.0 s for [a-z0-9 ]+ "
        rf"of rank {RANKS - 1}: expected epoch \d+, seen \d+",
    )
    assert 1.0 < found["seconds"] < 15.0, found


def test_letting_go_does_not_wait_for_a_callback(start):
    """The interpreter's lock is held where the last reference goes."""
    child = start("let_go_in_a_callback", "--ranks", RANKS, memory=0.01)
    assert child.found(timeout=100) == {"wrong": 0}


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("op", ["low_latency_dispatch", "low_latency_combine"])
def test_low_latency_rank_that_never_calls(start, op, layout):
    """What the operation before the last left is not taken for what does not come."""
    options = ("--op", op, "--layout", layout, "--ranks", RANKS)
    child = start("low_latency_missing_rank", *options, memory=0.01)
    found = assert_traps(
        child,
        rf"jax_ep {op} \(channel \d+\): rank \d+ waited 3\.0 s for [a-z ]+ "
        rf"of rank {RANKS - 1}: expected epoch 4, seen \d+",
    )
    assert 2.0 < found["seconds"] < 15.0, found


def test_low_latency_operations_side_by_side(start):
    """As far as the second one can see: no kernel can be held where it stands."""
    child = start("low_latency_under_way", "--ranks", RANKS, memory=0.01)
    found = assert_traps(
        child,
        r"jax_ep low_latency_dispatch \(channel \d+\): rank 0 found another "
        r"operation of this buffer under way; make one depend on the other, or use "
        r"two buffers",
    )
    assert found["wrong before"] == 0
    assert found["seconds"] < 15.0, found


def assert_traps(child, pattern):
    """A JaxRuntimeError, and before it the kernel's own words; what was found."""
    status, output = child.finish(timeout=60)
    assert status == 0, output
    found = last_json(output)
    assert found["raised"] == "JaxRuntimeError", output
    message = re.search(pattern, output)
    assert message, f"no message of the kernel:\n{output}"
    assert message.start() < output.index(gpu_program.CAUGHT), (
        f"the kernel's message came after the error, with a synchronisation that "
        f"users do not make:\n{output}"
    )
    return found


# Allocators


@pytest.fixture(scope="module")
def small_allocators(start):
    """All but the one that takes its memory at once, at a time."""
    return {
        name: start("allocations", "--ranks", RANKS, variables=variables)
        for name, variables in ALLOCATORS.items()
        if name != "fraction"
    }


@pytest.mark.slow
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_allocator(start, small_allocators, allocator):
    child = small_allocators.get(allocator)
    if child is None:
        for other in small_allocators.values():
            other.finish(120)
        variables = ALLOCATORS[allocator]
        child = start(
            "allocations", "--ranks", RANKS, "--megabytes", 512, variables=variables
        )
    found = child.found()
    assert found["wrong"] == 0
    assert found["launches"] == 24


# compute-sanitizer


def _sanitizer() -> str | None:
    """Where compute-sanitizer is."""
    on_path = shutil.which("compute-sanitizer")
    beside_nvcc = (
        glob.glob("/usr/local/cuda*/bin/compute-sanitizer")
        + glob.glob("/usr/local/cuda*/compute-sanitizer/compute-sanitizer")
        + glob.glob("/opt/nvidia/*/compute-sanitizer")
    )
    return on_path or next(iter(sorted(beside_nvcc)), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "summary"),
    [
        ("memcheck", r"ERROR SUMMARY: 0 errors"),
        ("racecheck", r"RACECHECK SUMMARY: 0 hazards displayed \(0 errors"),
    ],
    ids=["memcheck", "racecheck"],
)
def test_sanitizer(start, tool, summary):
    path = _sanitizer()
    if path is None:
        pytest.skip("compute-sanitizer is neither on PATH nor beside nvcc")
    child = start(
        "every_dtype",
        tool=(
            path,
            f"--tool={tool}",
            "--target-processes=all",
            "--error-exitcode=77",
            "--launch-timeout=120",
            "--report-api-errors=no",  # XLA asks for what may not be there
            "--kernel-name",
            "kns=jax_ep",
        ),
        # Every buffer an allocation, so that its end is known.
        variables={"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
    )
    status, output = child.finish(timeout=200)
    assert status == 0, f"exit status {status}\n{output}"
    assert last_json(output)["ranks"] == [1, 2], output
    assert re.search(summary, output), output


# More than 2**31 elements


LARGE_TOKENS = 1 << 17


def _both_ranks_plan(comm):
    """Every token to both ranks: slot j holds token j % T of rank j // T."""
    ids = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (LARGE_TOKENS, 2))
    return jax_ep.make_plan(ids, comm=comm, num_experts=2, capacity=2 * LARGE_TOKENS)


def _large_samples(slots, columns):
    """Rows to look at on the host: around 2**31 and 2**32 bytes, and the ends."""
    places = [0, 2**31 // columns, 2**32 // columns, slots - 1]
    return np.array(sorted({min(p, slots - 1) for p in places}))


def _large_bytes(rank, token, columns):
    """int8[..., H]; every bit depends on the place."""
    key = on_device.mix(rank, token)[..., None]
    bits = on_device.mix(key, columns) >> np.uint32(24)
    return bits.astype("uint8")


def test_dispatch_of_more_than_2_to_the_32_bytes():
    """int8[2**18, 20480]: elements pass 2**31 and byte offsets pass 2**32."""
    columns, slots = 20480, 2 * LARGE_TOKENS
    assert slots * columns > 2**32
    samples = _large_samples(slots, columns)

    def body(comm, _):
        rank = lax.axis_index("ep")
        token, column = jnp.arange(LARGE_TOKENS), jnp.arange(columns)
        x = lax.bitcast_convert_type(_large_bytes(rank, token, column), jnp.int8)
        received = jax_ep.dispatch(x, _both_ranks_plan(comm))
        slot = jnp.arange(slots)
        right = _large_bytes(slot // LARGE_TOKENS, slot % LARGE_TOKENS, column)
        wrong = on_device.wrong_rows(lax.bitcast_convert_type(received, "uint8"), right)
        return wrong, received[samples]

    wrong, found = _launch_large(body)
    rank, token = samples // LARGE_TOKENS, samples % LARGE_TOKENS
    right = _large_bytes(rank, token, np.arange(columns)).view(np.int8)
    for of_rank in found:
        np.testing.assert_array_equal(of_rank, right)
    assert wrong.tolist() == [0, 0]


def test_combine_of_more_than_2_to_the_31_elements():
    """bfloat16[2**18, 8448]: byte offsets pass 2**32 too."""
    columns, slots = 8448, 2 * LARGE_TOKENS
    assert slots * columns > 2**31
    samples = _large_samples(LARGE_TOKENS, columns)

    def rows(rank, slot, column):
        bits = on_device.mix(on_device.mix(rank, slot)[..., None], column)
        return on_device.small_integers(bits, jnp.bfloat16)

    def body(comm, _):
        rank = lax.axis_index("ep")
        column = jnp.arange(columns)
        y = rows(rank, jnp.arange(slots), column)
        out = jax_ep.combine(y, _both_ranks_plan(comm))
        slot = rank * LARGE_TOKENS + jnp.arange(LARGE_TOKENS)
        # From -128 to 126: exact.
        right = rows(0, slot, column) + rows(1, slot, column)
        return on_device.wrong_rows(out, right), out[samples]

    wrong, found = _launch_large(body)
    for rank, of_rank in enumerate(found):
        slot = rank * LARGE_TOKENS + samples
        right = rows(0, slot, np.arange(columns)) + rows(1, slot, np.arange(columns))
        np.testing.assert_array_equal(of_rank, right)
    assert wrong.tolist() == [0, 0]


def _launch_large(body):
    """Runs body(comm, _) on two ranks; without poison, which takes as much."""
    program = harness.Program(body, harness.communicator("cuda", 2))
    outputs = program.launch(program.put(np.zeros(2, np.int32)))
    return jax.tree.map(np.asarray, outputs)


# The same bits every time


def test_400_pairs_back_to_back():
    """Nothing but the three operations between one pair and the next.

    https://github.com/deepseek-ai/DeepEP/issues/700
    """
    pairs = 400
    traffic = on_device.Traffic(
        ranks=RANKS, tokens=256, top_k=8, experts=256, columns=7168
    )

    def run_pairs(comm, first):
        rank = lax.axis_index("ep")
        steps = first + jnp.arange(pairs)
        ids = lax.map(lambda step: traffic.ids(step, rank), steps)
        x = lax.map(lambda s: traffic.rows(s, rank, jnp.arange(traffic.tokens)), steps)
        # All made before the first pair starts.
        ids, x = lax.optimization_barrier((ids, x))

        def pair(carry, step):
            ids, x = step
            plan = jax_ep.make_plan(ids, comm=comm, num_experts=traffic.experts)
            received = jax_ep.dispatch(x, plan)
            return carry, (received, jax_ep.combine(received, plan))

        return lax.scan(pair, None, (ids, x))[1]

    def check(comm, first, received, combined):
        rank = lax.axis_index("ep")

        def wrong(step):
            step, received, combined = step
            return jnp.stack(
                [
                    on_device.wrong_rows(received, traffic.received(step, rank)[1]),
                    on_device.wrong_rows(
                        combined, traffic.combined(step, rank, tagged=False)
                    ),
                ]
            )

        return lax.map(wrong, (first + jnp.arange(pairs), received, combined))

    comm = harness.communicator("cuda", RANKS)
    first = np.zeros(RANKS, np.int32)
    program, checks = harness.Program(run_pairs, comm), harness.Program(check, comm)
    (placed,) = program.put(first)
    received, combined = program.launch((placed,))
    wrong = np.asarray(checks.launch((placed, received, combined)))
    assert wrong.shape == (RANKS, pairs, 2)
    np.testing.assert_array_equal(wrong, 0)


def test_two_runs_of_50_training_steps_are_the_same():
    """Forward and backward, with other data in the same memory in between.

    https://github.com/AMD-AGI/Primus-Turbo/pull/482
    """
    traffic = on_device.Traffic(
        ranks=RANKS, tokens=1024, top_k=8, experts=256, columns=7168
    )

    def body(comm, first):
        rank = lax.axis_index("ep")
        scale = 1.0 + rank.astype(jnp.float32) / 4

        def step(x, step):
            plan = jax_ep.make_plan(
                traffic.ids(step, rank), comm=comm, num_experts=traffic.experts
            )

            def layer(x):
                rows = jax_ep.dispatch(x, plan).astype(jnp.float32)
                return jax_ep.combine(jnp.tanh(rows * scale).astype(x.dtype), plan)

            out, transpose = jax.vjp(layer, x)
            (gradient,) = transpose(out)  # of half the sum of squares
            x = (x.astype(jnp.float32) - 0.1 * gradient.astype(jnp.float32)).astype(
                x.dtype
            )
            return x, jnp.stack([_checksum(a) for a in (out, gradient, x)])

        x = traffic.rows(first, rank, jnp.arange(traffic.tokens)) / 32
        x, checksums = lax.scan(step, x, first + jnp.arange(50))
        return lax.bitcast_convert_type(x, "uint16"), checksums

    program = harness.Program(body, harness.communicator("cuda", RANKS))
    runs = [program.launch(program.put(np.full(RANKS, s, np.int32))) for s in (0, 7, 0)]
    one, other, again = jax.tree.map(np.asarray, runs)
    for got, want, different in zip(again, one, other):
        np.testing.assert_array_equal(got, want)
        assert (got != different).any()


def _checksum(x):
    """u32[] of all bits of x in their places; integers add in any order."""
    bits = lax.bitcast_convert_type(x, "uint16").astype(jnp.uint32)
    places = on_device.mix(
        jnp.arange(x.shape[0])[:, None] * x.shape[1] + jnp.arange(x.shape[1])[None]
    )
    return (bits * (places | jnp.uint32(1))).sum(dtype=jnp.uint32)


def test_300_steps_with_late_ranks():
    """Matrix products, as many as the rank and the step want, before each op."""
    steps, most, size = 300, 24, 512
    traffic = on_device.Traffic(
        ranks=RANKS, tokens=128, top_k=4, experts=4 * RANKS, columns=1040
    )

    def late(x, step, place):
        rank = lax.axis_index("ep")
        products = (on_device.mix(step, rank, place) % np.uint32(most)).astype("int32")
        start = x.ravel()[0].astype(jnp.float32) * 0.0 + 1.0 / size
        matrix = jnp.full((size, size), start)
        # The square of this matrix is the matrix.
        matrix = lax.fori_loop(0, products, lambda _, m: m @ m, matrix)
        return x + (matrix.max() > 2.0).astype(x.dtype)

    comm = harness.communicator("cuda", RANKS)
    program = harness.Program(
        lambda comm, step: traffic.exchange(comm, step, late).wrong, comm
    )
    placed = [program.put(np.full(RANKS, s, np.int32)) for s in range(steps)]
    wrong = [program.launch(args) for args in placed]
    np.testing.assert_array_equal(np.stack(wrong), 0)


@functools.cache
def _multiprocessors() -> int:
    return jax.devices()[0].core_count


@pytest.mark.parametrize("sms", [1, 2, 24, "all", "more"])
def test_any_number_of_multiprocessors_gives_the_same_bits(sms):
    """ "more" is more blocks than the GPU can hold at a time."""
    count = {"all": _multiprocessors(), "more": 20 * _multiprocessors()}.get(sms, sms)
    tokens, experts, capacity = 300, 4 * RANKS + 1, 200 * RANKS
    traffic = on_device.Traffic(RANKS, tokens, 4, experts, 1, capacity)
    ids = traffic.ids(0, np.arange(RANKS), np).astype(np.int32)
    right = oracle.plan(ids, experts, capacity)
    x = {
        "wide": payloads.payload((RANKS, tokens, 2056), ml_dtypes.bfloat16),
        "odd": payloads.payload((RANKS, tokens, 33), np.uint8),
    }
    y = {
        "wide": payloads.numbers((RANKS, capacity, 2056), ml_dtypes.bfloat16),
        "odd": payloads.numbers((RANKS, capacity, 5), np.float32),
    }
    y = {
        name: payloads.poison_tail(rows, right.fields["num_recv"])
        for name, rows in y.items()
    }
    mesh = harness.mesh(RANKS)
    with jax_ep.Communicator(mesh, "ep", backend="cuda", num_sms=count) as comm:
        program = harness.case_program(comm, experts, capacity)
        for _ in range(3):
            plan, received, combined = program(ids, x, y)
            payloads.assert_same_trees(plan, right.fields, f"{count} SMs: plan")
            for name, sent in x.items():
                what = f"{count} SMs: received {name}"
                payloads.assert_same_rows(
                    received[name], right.dispatch(sent), what, sent
                )
            for name, rows in y.items():
                what = f"{count} SMs: combined {name}"
                payloads.assert_same_sums(combined[name], right.combine(rows), what)
