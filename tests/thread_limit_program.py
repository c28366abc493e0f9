"""Run by thread_limit_test in a process of its own: no more threads can be had.

Prints one line of JSON: what set-up said, what came of calls while the limit held, and
whether rows were right when it was lifted in time.
"""

import contextlib
import importlib
import json
import os
import resource
import socket
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

import jax_ep  # noqa: E402
from jax_ep._data import native  # noqa: E402
from jax_ep._setup import links, request  # noqa: E402

RANKS, TOKENS = 4, 6
# A thread that ends calls goes when it has had nothing to do for 5 s.
UNTIL_IDLE_THREADS_END = 6.0


def allow_threads(allowed, more=0):
    """Any number of threads, or none but so many more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    here = len(os.listdir("/proc/self/task")) if more else 0
    resource.setrlimit(resource.RLIMIT_NPROC, (hard if allowed else here + more, hard))


class Lifts:
    """Lifts the limit when asked, from a thread that is there before."""

    def __init__(self):
        self._after = None
        self._asked = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        self._asked.wait()
        time.sleep(self._after)
        allow_threads(True)

    def after(self, seconds):
        self._after = seconds
        self._asked.set()


def there_and_back(comm):
    def body(topk_idx, x):
        plan = jax_ep.make_plan(topk_idx, comm=comm, num_experts=RANKS)
        return jax_ep.combine(jax_ep.dispatch(x, plan), plan)

    spec = P("ep")
    return jax.jit(jax.shard_map(body, mesh=comm.mesh, in_specs=spec, out_specs=spec))


def raised(function):
    try:
        jax.block_until_ready(function())
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def exchange(module):
    """A communicator with channels, as one of two processes has it."""
    size, _ = module.staging_size(1 << 20, 2, 2)
    memories = [links.create_shared_memory(size, b"") for _ in range(2)]
    ends = socket.socketpair()
    try:
        arguments = module.ExchangeArguments(
            numbers=[0, 1],
            staging_bytes=1 << 20,
            num_channels=2,
            memories=memories,
            sockets=[-1, ends[1].fileno()],
        )
        module.create_communicator(
            10_000, [(0, 0, 0, (0, 2, 1))], 2, 1.0, 0.5, [[0, 1]], 0, arguments
        )
        module.release_communicator(10_000)
    finally:
        for end in ends:
            end.close()
        for memory in memories:
            os.close(memory)


def gpu_communicator(module):
    """One without GPUs: what is left are its threads."""
    module.create_communicator(
        10_001,
        module.CommunicatorArguments(
            num_ranks=2,
            num_sms=1,
            timeout_s=1.0,
            warn_after_s=0.5,
            num_channels=1,
            staging_bytes=0,
            places=[],
            has_other_processes=False,
            mapped=[],
            allocated=[],
        ),
    )
    module.release_communicator(10_001)
    module.wait_for_releases()


def open_files():
    return len(os.listdir("/proc/self/fd"))


def main():
    mesh = jax.make_mesh((RANKS,), ("ep",), axis_types=(AxisType.Auto,))
    module, cuda = native.host(), None
    with contextlib.suppress(ImportError):
        cuda = importlib.import_module("jax_ep._cuda")
    token = np.arange(RANKS * TOKENS)
    topk_idx = np.stack([token % RANKS, (token + 1) % RANKS], -1).astype(np.int32)
    x = (token[:, None] * 5 + np.arange(3)).astype(np.float32)
    jax.block_until_ready(jnp.asarray(x) + 1)
    found = {}
    lifts = Lifts()
    # Root may start as many processes as it likes.
    if os.getuid() == 0:
        os.setresuid(65534, 65534, 65534)

    def create(**options):
        return jax_ep.Communicator(mesh, "ep", backend="cpu", **options)

    allow_threads(False)
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        pass
    else:
        print(json.dumps({"skip": "a process with RLIMIT_NPROC = 0 starts threads"}))
        return
    found["set-up"] = raised(create)
    if cuda is not None:
        found["GPU set-up"] = raised(lambda: gpu_communicator(cuda))
    files = open_files()
    found["exchange"] = []
    for more in range(3):  # two channels, and who watches the sockets
        allow_threads(False, more)
        found["exchange"].append(raised(lambda: exchange(module)))
    found["files left"] = open_files() - files
    allow_threads(True)
    exchange(module)
    if cuda is not None:
        gpu_communicator(cuda)

    request._WARN_AFTER_S = 0.5
    hasty, patient = create(timeout_s=1.5), create(timeout_s=60.0)
    programs = [there_and_back(comm) for comm in (hasty, patient)]
    args = jax.device_put((topk_idx, x), jax.NamedSharding(mesh, P("ep")))
    # Compiles: LLVM would end the process.
    for program in programs:
        np.testing.assert_array_equal(program(*args), 2 * x)
    time.sleep(UNTIL_IDLE_THREADS_END)
    allow_threads(False)
    found["call"] = raised(lambda: programs[0](*args))
    lifts.after(2.0)
    out = jax.block_until_ready(programs[1](*args))
    found["wrong"] = int((np.asarray(out) != 2 * x).sum())
    found["wrong afterwards"] = int((np.asarray(programs[0](*args)) != 2 * x).sum())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
