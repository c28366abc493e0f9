"""Whole set-ups of many processes, which are threads: GPUs, NCCL and JAX's service
are made of Python, sockets and files are real.

How often the service is asked, and what is left where one process fails: after each
step in turn everything is given back in all processes, which all hear of it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import itertools
import os
import threading
import warnings

import fake_gpus
import fake_service
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jax_ep
from jax_ep._data import native
from jax_ep._setup import backends, bootstrap, fabric, gpu_memory, nvml

_here = threading.local()


class Module(fake_gpus.Module):
    """One process's jax_ep._cuda, that counts what is registered.

    Attributes:
      registered: (what, identity).
      failing: a method that raises.
    """

    def __init__(self):
        super().__init__()
        self.registered = []
        self.mapped = {}

    def create_communicator(self, identity, arguments):
        self.registered.append(("communicator", identity))
        self.mapped[identity] = arguments

    def release_communicator(self, identity):
        self.registered.remove(("communicator", identity))
        driver, arguments = _here.process.driver, self.mapped.pop(identity)
        for address, size in arguments.mapped:
            driver.cuMemUnmap(address, size)
            driver.cuMemAddressFree(address, size)
        for address in arguments.allocated:
            driver.cuMemFree(address)

    def load_nccl(self, files):
        return 22800, ""

    def nccl_version_name(self, version):
        return str(version)

    def new_rail(self):
        return os.urandom(128)

    def connect_rails(self, identity, places, *seconds) -> str:
        self.registered.append(("rails", identity))
        return ""

    def release_rails(self, identity):
        # The registry does not mind an id that is not there.
        if ("rails", identity) in self.registered:
            self.registered.remove(("rails", identity))


class Injected(Exception):
    """What goes wrong on purpose."""


class Process:
    """One process: one GPU, its driver, its client of JAX's service."""

    def __init__(self, number, service, host):
        self.number, self.host = number, host
        self.driver = fake_gpus.Driver([f"00:{number:02x}"], (number + 1) << 40)
        # What fabric.domain asks.
        self.driver.cuMemGetInfo = lambda: (fake_gpus.OK, 1 << 40, 1 << 40)
        self.arena = self.driver.add_arena()
        self.module = Module()
        self.client = fake_service.Client(service)
        self.numbers = {}
        self.fail_at = None
        self.steps_of_communicator = None

    def step(self, processes, what, gather):
        """Runs one step; before or after the one that was asked for it fails."""
        self.steps += 1
        if self.fail_at == (self.steps, "before"):
            raise Injected(what)
        result = gather()
        if self.fail_at == (self.steps, "after"):
            raise Injected(what)
        return result


class Job:
    """So many processes, `near` of them on each host, in one mesh axis."""

    def __init__(self, count, near, setup_timeout_s=60.0):
        self.setup_timeout_s = setup_timeout_s
        service = fake_service.Service()
        self.processes = [Process(p, service, p // near) for p in range(count)]
        self.devices = [fake_gpus.Gpu(p, p, 0) for p in range(count)]
        for device in self.devices:
            device.client, device.device_kind = None, "made of Python"

    def run(self, body, fail_at=None, failing=None):
        """What body(mesh) gave or raised, by process."""
        mesh = Mesh(np.array(self.devices), ("ep",))

        def run(process):
            _here.process = process
            process.steps = 0
            process.fail_at = fail_at if process.number == failing else None
            process.client.requests.clear()
            try:
                return body(mesh, self.setup_timeout_s)
            except BaseException as error:
                return error.with_traceback(None)

        with concurrent.futures.ThreadPoolExecutor(len(self.processes)) as threads:
            return list(threads.map(run, self.processes))

    def requests(self):
        return sum(process.client.requests.total() for process in self.processes)

    def assert_nothing_left(self):
        for process in self.processes:
            assert process.module.registered == []
            assert set(process.driver.spaces) == {process.arena}
            assert process.driver.handles == []
        names = ("jax_ep links", "jax_ep rails")
        assert not [t for t in threading.enumerate() if t.name in names]

    def close(self):
        for process in self.processes:
            os.close(process.driver.spaces[process.arena][0])


class Numbers:
    """bootstrap._numbers, of each process."""

    @staticmethod
    def setdefault(key, default):
        return _here.process.numbers.setdefault(key, default)


@pytest.fixture(autouse=True)
def in_threads(monkeypatch):
    def here(name):
        return lambda *_: getattr(_here.process, name)

    monkeypatch.setattr(jax, "process_index", here("number"))
    monkeypatch.setattr(bootstrap, "distributed_client", here("client"))
    monkeypatch.setattr(bootstrap, "_numbers", Numbers)
    monkeypatch.setattr(
        bootstrap,
        "host_identity",
        lambda: {"boot_id": f"{_here.process.host}", "host": "host", "uid": 0},
    )
    # One process's threads would wait for each other.
    monkeypatch.setattr(backends, "_ids_lock", contextlib.nullcontext())
    monkeypatch.setattr(fabric, "note", lambda _: {"domain": "", "problem": ""})
    monkeypatch.setattr(gpu_memory, "driver", here("driver"))
    monkeypatch.setattr(
        gpu_memory, "arenas", lambda *_: [(_here.process.arena, fake_gpus.ARENA)]
    )
    monkeypatch.setattr(native, "cuda", here("module"))
    monkeypatch.setattr(nvml, "bindings", fake_gpus.Nvml)
    gather = bootstrap.Processes.gather

    def step(self, what, *arguments):
        return _here.process.step(self, what, lambda: gather(self, what, *arguments))

    monkeypatch.setattr(bootstrap.Processes, "gather", step)


@pytest.fixture(autouse=True)
def no_file_stays_open(in_threads):
    before = os.listdir("/proc/self/fd")
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def set_up(mesh, setup_timeout_s):
    return jax_ep.Communicator(
        mesh, "ep", backend="cuda", setup_timeout_s=setup_timeout_s
    )


def set_up_buffer(mesh, setup_timeout_s):
    """A buffer of a communicator that nothing happens to."""
    process = _here.process
    fail_at, process.fail_at = process.fail_at, None
    comm = set_up(mesh, setup_timeout_s)
    process.steps_of_communicator, process.steps = process.steps, 0
    process.fail_at = fail_at
    try:
        return jax_ep.LowLatencyBuffer(
            comm, max_tokens=4, hidden=64, num_experts=comm.num_ranks
        )
    finally:
        comm._finalizer()


def let_go(job, outcomes):
    for process, made in zip(job.processes, outcomes, strict=True):
        _here.process = process
        if not isinstance(made, BaseException):
            made._finalizer()
    job.assert_nothing_left()
    job.close()


def test_requests_of_256_processes():
    """32 hosts with 8 GPUs each: all that set-up can have to say."""
    job = Job(256, 8, setup_timeout_s=280.0)
    made = job.run(set_up)
    assert [(comm.num_nodes, comm.node_size) for comm in made] == [(32, 8)] * 256
    assert job.requests() < 10_000
    let_go(job, made)


EACH = pytest.mark.parametrize(
    ("count", "near", "body"),
    [(3, 3, set_up), (4, 2, set_up), (3, 3, set_up_buffer)],
    ids=["one_host", "two_hosts", "buffer"],
)


@EACH
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failure_at_each_step(count, near, body, failing, when):
    its = None
    for step in itertools.count(1):
        job = Job(count, near)
        outcomes = job.run(body, (step, when), failing)
        its, others = outcomes.pop(failing), outcomes
        told = [isinstance(one, RuntimeError) for one in others]
        outcomes = [*others[:failing], its, *others[failing:]]
        let_go(job, outcomes)
        if not any(told):
            break
        assert isinstance(its, Injected)
        assert all(told), others
        for one in others:
            assert f"process {failing} " in str(one)
            assert "failed: Injected: " in str(one)
    # Behind the last step nothing is left that could fail together.
    assert isinstance(its, Injected) == (when == "after")
    assert step > 6


INSIDE = {
    "module": ("self_test", "num_sms", "create_communicator", "load_nccl", "new_rail"),
    "driver": (
        "cuDeviceGetPCIBusId",
        "cuDeviceGetCount",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemcpyHtoD",
        "cuMemcpyDtoH",
        "cuMemAlloc",
        "cuMemGetInfo",
    ),
}


@EACH
@pytest.mark.parametrize(
    ("where", "name"), [(where, n) for where, names in INSIDE.items() for n in names]
)
def test_a_failure_inside_a_step(count, near, body, where, name):
    """Of a type that nobody foresees."""
    job = Job(count, near)
    # A buffer's communicator is set up before.
    calls = []
    good = getattr(getattr(job.processes[1], where), name)

    def method(*arguments, **options):
        if body is set_up_buffer and job.processes[1].steps_of_communicator is None:
            return good(*arguments, **options)
        calls.append(name)
        raise Injected(name)

    setattr(getattr(job.processes[1], where), name, method)
    outcomes = job.run(body)
    let_go(job, outcomes)
    if not calls:
        assert not any(isinstance(one, BaseException) for one in outcomes), outcomes
        return
    # Where a step keeps errors to tell them, all raise the same.
    assert isinstance(outcomes.pop(1), (Injected, RuntimeError))
    for one in outcomes:
        assert isinstance(one, RuntimeError)
        assert f"Injected: {name}" in str(one)


def test_rails_that_do_not_connect():
    job = Job(4, 2)
    connect = job.processes[1].module.connect_rails

    def fail(identity, places, *seconds) -> str:
        connect(identity, places, *seconds)
        raise Injected

    job.processes[1].module.connect_rails = fail
    outcomes = job.run(set_up)
    for one in outcomes:
        assert "process 1 (rank 1): Injected: " in str(one)
    let_go(job, outcomes)


def test_what_falls_back_holds_nothing_of_what_did_not_work():
    job = Job(4, 2)

    def no_route(identity, places, *seconds) -> str:
        return "no route"

    job.processes[2].module.connect_rails = no_route
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = job.run(lambda mesh, setup_timeout_s: jax_ep.Communicator(mesh, "ep"))
    for comm in made:
        assert (comm.backend, comm.num_nodes, comm.node_size) == ("xla", 1, 4)
        assert (comm._node, comm._rail) == (None, None)
        assert comm.describe()["memory_bytes"] == 0
    assert len(caught) == 4
    reason = "process 2 (rank 2): no route (NCCL 22800; NCCL_DEBUG=INFO tells more)"
    assert all(str(one.message).endswith(reason) for one in caught)
    job.assert_nothing_left()
    let_go(job, made)
