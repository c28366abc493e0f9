"""Set-up of the CUDA backend in several processes, made of threads and of drivers
made of Python: no GPU needed. Sockets and the files that travel are real.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import threading
import types
import warnings

import fake_service
import jax
import numpy as np
import pytest
from fake_gpus import (
    ARENA,
    CONTROL,
    FABRIC,
    FAILS,
    OK,
    STAGING,
    UNIT,
    CommunicatorArguments,
    Driver,
    Gpu,
    Module,
    Nvml,
    NvmlError,
    Place,
    close_fabric,
    fabric_files,
)

from jax_ep._data import native
from jax_ep._setup import bootstrap, gpu_memory, nvml, peer_memory, reach, window_memory
from jax_ep._setup.links import Links
from jax_ep._setup.native_resource import Memory

_here = threading.local()
_numbers = itertools.count(1000)


class Process:
    """One of several: its driver, its module and what set-up gave."""

    def __init__(self, number, visible):
        self.number = number
        self.driver = Driver(visible, (number + 1) << 32)
        self.module = Module()
        self.arenas = {}


class Job:
    """Processes of a mesh. `gpus` has, for each process, its GPUs' bus ids.

    Each is on a host of its own with `over_hosts`.
    """

    def __init__(self, *gpus, groups=None, see_all=True, over_hosts=False):
        every = sorted({g for mine in gpus for g in mine})
        self.processes, devices = [], []
        for number, mine in enumerate(gpus):
            visible = every if see_all else mine
            process = Process(number, visible)
            self.processes.append(process)
            for gpu in mine:
                ordinal = visible.index(gpu)
                devices.append(Gpu(len(devices), number, ordinal))
                process.arenas[ordinal] = [process.driver.add_arena()]
        self.groups = [[devices[i] for i in g] for g in groups] if groups else [devices]
        ranks = len(self.groups[0])
        self.mesh_places = {d.id: (i, ranks, 1) for i, d in enumerate(devices)}
        self._over_hosts = over_hosts
        self._number = next(_numbers)
        self._service = fake_service.Service()

    def run(self, staging_bytes=STAGING, timeout_s=5.0, num_channels=2):
        """What set_up_cuda gave or raised in each process."""
        return self._all(self._set_up, staging_bytes, timeout_s, num_channels)

    def run_windows(self, size):
        """What set_up_windows gave or raised in each process."""
        return self._all(self._set_up_windows, size)

    def _all(self, function, *arguments):
        with concurrent.futures.ThreadPoolExecutor(len(self.processes)) as threads:
            running = [
                threads.submit(function, process, *arguments)
                for process in self.processes
            ]
            return [one.exception() or one.result() for one in running]

    @contextlib.contextmanager
    def _meet(self, process, timeout_s):
        _here.process = process
        members = range(len(self.processes))
        peers = bootstrap.Processes(
            members,
            process.number,
            timeout_s,
            client=fake_service.Client(self._service),
        )
        peers._conversation.number = self._number
        with contextlib.ExitStack() as stack:
            stack.enter_context(peers.all_or_none())
            if self._over_hosts:
                yield peers, None
                return
            links = stack.enter_context(contextlib.closing(Links()))
            assert links.connect(peers, peers.gather("hosts", links.host)) is None
            yield peers, links

    def _set_up_windows(self, process, size):
        with self._meet(process, 5.0) as (peers, links):
            return window_memory.set_up_windows(
                9,
                self.groups,
                size,
                mesh_places=self.mesh_places,
                num_sms=None,
                timeout_s=5.0,
                warn_after_s=30.0,
                processes=peers,
                links=links,
            )

    def _set_up(self, process, staging_bytes, timeout_s, num_channels):
        with self._meet(process, timeout_s) as (peers, links):
            where = reach.places(self.groups, peers)
            problem = reach.unsupported_between(self.groups, where, peers)
            if problem is not None:
                return problem
            return peer_memory.set_up_cuda(
                7,
                self.groups,
                mesh_places=self.mesh_places,
                num_sms=None,
                timeout_s=timeout_s,
                warn_after_s=30.0,
                num_channels=num_channels,
                staging_bytes=staging_bytes,
                processes=peers,
                links=links,
            )

    def table(self, process, place):
        """The regions that a rank sees, by rank."""
        ranks = len(place.control)
        shape = (ranks, Module.max_regions)
        size = int(np.prod(shape)) * peer_memory._REGION.itemsize
        words = self.processes[process].driver.read(place.regions, size)
        table = np.frombuffer(words, peer_memory._REGION).reshape(shape)
        return [[tuple(map(int, r)) for r in row if r["bytes"]] for row in table]


@pytest.fixture(autouse=True)
def in_threads(monkeypatch):
    def arenas(driver, device, context):
        return [(a, ARENA) for a in _here.process.arenas[device.local_hardware_id]]

    monkeypatch.setattr(gpu_memory, "driver", lambda: _here.process.driver)
    monkeypatch.setattr(gpu_memory, "arenas", arenas)
    monkeypatch.setattr(native, "cuda", lambda: _here.process.module)
    monkeypatch.setattr(nvml, "bindings", Nvml)
    monkeypatch.setattr(
        reach,
        "is_here",
        lambda device: device.process_index == _here.process.number,
    )


@pytest.fixture(autouse=True)
def no_file_stays_open(in_threads):
    before = os.listdir("/proc/self/fd")
    yield
    close_fabric()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def close(job):
    """What ~CudaCommunicator would do, and XLA; nothing else may be left."""
    for process in job.processes:
        made = process.module.created
        driver = process.driver
        assert driver.handles == []
        assert driver.current == []
        if made is not None:
            for address, size in made.mapped:
                driver.cuMemUnmap(address, size)
                driver.cuMemAddressFree(address, size)
            for address in made.allocated:
                driver.cuMemFree(address)
        arenas = {a for arenas in process.arenas.values() for a in arenas}
        assert set(driver.spaces) == arenas
        for address in arenas:
            os.close(driver.spaces[address][0])


def same_memory(job, a, at, b, there):
    """Whether two processes' addresses are the same physical byte."""
    one, two = job.processes[a].driver._at(at), job.processes[b].driver._at(there)
    return os.path.sameopenfile(one[0], two[0]) and one[1] == two[1]


@pytest.mark.parametrize("see_all", [True, False])
def test_one_gpu_in_each_process(see_all):
    job = Job(["00:1"], ["00:2"], ["00:3"], see_all=see_all)
    held = job.run()
    for me, process in enumerate(job.processes):
        made = process.module.created
        (place,) = made.places
        ordinal = me if see_all else 0
        assert (place.ordinal, place.rank, place.same_process) == (ordinal, me, [me])
        assert (made.num_channels, made.staging_bytes) == (2, STAGING)
        assert made.has_other_processes
        assert held[me].exported == {0, 1, 2}
        # Whole units, with staging memory and the proof.
        assert held[me].memory_bytes == 3 * UNIT
        regions = job.table(me, place)
        for peer, other in enumerate(job.processes):
            (theirs,) = other.module.created.places
            assert same_memory(job, me, place.control[peer], peer, theirs.control[peer])
            if peer == me:
                assert regions[me] == []
                continue
            (arena,) = next(iter(other.arenas.values()))
            assert theirs.exported == [(arena, ARENA)]
            ((begin, size, here),) = regions[peer]
            assert (begin, size) == (arena, ARENA)
            assert same_memory(job, me, here + 5, peer, arena + 5)
        assert process.driver.read(place.control[me], CONTROL + STAGING) == bytes(
            CONTROL + STAGING
        )
    close(job)


def test_several_gpus_in_each_process():
    job = Job(["00:1", "00:2"], ["00:3", "00:4"])
    job.run()
    for me, process in enumerate(job.processes):
        first, second = process.module.created.places
        assert first.control == second.control
        assert first.same_process == second.same_process == [[0, 1], [2, 3]][me]
        tables = [job.table(me, place) for place in (first, second)]
        assert tables[0] == tables[1]
        filled = [rank for rank, regions in enumerate(tables[0]) if regions]
        assert filled == [[2, 3], [0, 1]][me]
        # Control memory and imports serve both GPUs here, and no others.
        mapped = [address for address, _ in process.module.created.mapped]
        access = {process.driver.spaces[address][2] for address in mapped}
        assert access == {((0, 1), (2, 3))[me]}
    close(job)


@pytest.mark.parametrize(("processes", "gpus"), [(5, 13), (18, 4), (4, 24)])
def test_as_many_ranks_as_a_node_may_have(processes, gpus):
    """65, 72 and 96: more than a word has bits."""
    ranks = processes * gpus
    names = [f"{rank:02x}:0" for rank in range(ranks)]
    job = Job(*(names[i : i + gpus] for i in range(0, ranks, gpus)), see_all=False)
    held = job.run(timeout_s=60.0)
    assert [one.exported for one in held] == [set(range(ranks))] * processes
    for me, process in enumerate(job.processes):
        here = list(range(me * gpus, (me + 1) * gpus))
        places = process.module.created.places
        assert [place.rank for place in places] == here
        assert all(place.same_process == here for place in places)
        regions = job.table(me, places[0])
        for peer in range(ranks):
            assert (regions[peer] == []) == (peer in here)
        # One of another process and the last rank: where their memory is.
        for peer in {(here[-1] + 1) % ranks, ranks - 1} - set(here):
            owner, other = peer // gpus, peer % gpus
            theirs = job.processes[owner].module.created.places[other]
            at = places[0].control[peer]
            assert same_memory(job, me, at, owner, theirs.control[peer])
            ((begin, size, at),) = regions[peer]
            assert theirs.exported == [(begin, size)]
            assert same_memory(job, me, at + 5, owner, begin + 5)
    close(job)


def test_groups_inside_a_process_share_nothing():
    job = Job(["00:1", "00:2"], ["00:3", "00:4"], groups=[[0, 1], [2, 3]])
    held = job.run(staging_bytes=1)
    for me, process in enumerate(job.processes):
        made = process.module.created
        assert made.mapped == []
        assert [place.regions for place in made.places] == [0, 0]
        assert [place.same_process for place in made.places] == [[0, 1]] * 2
        assert held[me].memory_bytes == 2 * CONTROL
        assert "cuMemCreate" not in process.driver.calls
    close(job)


def test_groups_across_processes():
    job = Job(["00:1", "00:2"], ["00:3", "00:4"], groups=[[0, 2], [1, 3]])
    job.run()
    for me, process in enumerate(job.processes):
        for number, place in enumerate(process.module.created.places):
            assert (place.rank, place.same_process) == (me, [me])
            (address,) = [a for r, a in enumerate(place.control) if r != me]
            access = process.driver.spaces[address][2]
            assert access == (2 * me + number,)
    close(job)


def test_memory_that_cannot_be_exported_is_staged():
    job = Job(["00:1"], ["00:2"])
    first = job.processes[0]
    first.driver.private = set(first.arenas[0])
    held = job.run()
    assert [one.exported for one in held] == [{1}, {1}]
    (place,) = first.module.created.places
    assert place.exported == []
    (place,) = job.processes[1].module.created.places
    assert job.table(1, place) == [[], []]
    assert len(place.exported) == 1
    close(job)


def test_memory_that_a_peer_cannot_map_is_staged():
    """Rank 0 hears from rank 2 that it cannot; so rank 1 does not use it either."""
    job = Job(["00:1"], ["00:2"], ["00:3"])
    # Rank 2 maps: its control memory, then of rank 0 control memory and arena.
    job.processes[2].driver.failing = {("cuMemSetAccess", 3)}
    held = job.run()
    assert [one.exported for one in held] == [{1, 2}] * 3
    assert job.processes[0].module.created.places[0].exported == []
    for me in (1, 2):
        (place,) = job.processes[me].module.created.places
        assert job.table(me, place)[0] == []
        assert len(place.exported) == 1
    close(job)


def test_no_more_regions_than_the_table_holds():
    job = Job(["00:1"], ["00:2"])
    first = job.processes[0]
    first.arenas[0] += [first.driver.add_arena() for _ in range(10)]
    job.run()
    (place,) = job.processes[1].module.created.places
    assert len(job.table(1, place)[0]) == Module.max_regions
    assert len(first.module.created.places[0].exported) == Module.max_regions
    close(job)


def test_control_memory_that_cannot_be_mapped_names_the_pair():
    job = Job(["00:1"], ["00:2"])
    job.processes[1].driver.failing = {("cuMemSetAccess", 2)}
    message = (
        "process 1: cannot map the control memory of rank 0 of process 0: "
        "jax_ep: cuMemSetAccess failed: CUDA_ERROR_INVALID_VALUE"
    )
    for error in job.run():
        assert isinstance(error, bootstrap.CannotWork)
        assert str(error) == message
    close(job)


def test_bytes_that_do_not_arrive_name_the_pair(monkeypatch):
    job = Job(["00:1"], ["00:2"])
    monkeypatch.setattr(job.processes[0].driver, "cuMemcpyDtoH", lambda *_: (OK,))
    for error in job.run():
        assert str(error) == (
            "process 0: cannot map the control memory of rank 1 of process 1: "
            "GPU 0 reads other bytes there than were written"
        )
    close(job)


@pytest.mark.parametrize(
    "function",
    ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle"],
)
def test_what_fails_in_one_process_is_told_to_all(function):
    job = Job(["00:1"], ["00:2"])
    job.processes[1].driver.failing = {(function, 1)}
    for error in job.run():
        assert str(error) == (
            f"process 1: jax_ep: {function} failed: CUDA_ERROR_INVALID_VALUE"
        )
    close(job)


def test_a_table_that_cannot_be_made_is_told_to_all():
    job = Job(["00:1"], ["00:2"])
    job.processes[0].driver.failing = {("cuMemAlloc", 1)}
    for error in job.run():
        assert "process 0: jax_ep: cuMemAlloc failed" in str(error)
    close(job)


@pytest.mark.parametrize("step", ["Place", "create_communicator"])
def test_what_the_native_module_refuses_is_told_to_all(monkeypatch, step):
    """Any exception: one process's alone must not make the others wait."""
    job = Job(["00:1"], ["00:2"])

    def refuse(*_, **__):
        raise TypeError("incompatible function arguments")

    monkeypatch.setattr(job.processes[1].module, step, refuse)
    for error in job.run(timeout_s=30.0):
        assert isinstance(error, peer_memory.CannotWork)
        assert str(error) == ("process 1: TypeError: incompatible function arguments")
    assert job.processes[1].module.created is None
    # The others' native side has released what it had taken.
    assert job.processes[0].module.released == ([7] if step != "Place" else [])
    close(job)


def test_a_self_test_that_fails_is_told_to_all():
    job = Job(["00:1"], ["00:2"])
    job.processes[1].module.problem = "GPU 0: loading a kernel failed"
    for error in job.run():
        assert str(error) == "process 1: GPU 0: loading a kernel failed"
    close(job)


def test_staging_memory_has_a_least_size():
    job = Job(["00:1"], ["00:2"])
    for error in job.run(staging_bytes=100):
        assert isinstance(error, ValueError)
        assert "staging_bytes must be >= 2048 for 2 channels and 2 ranks" in str(error)
    close(job)


@pytest.mark.parametrize(("asked_for", "channels"), [(None, 4), (3, 3), (99, 16)])
def test_channels_are_blocks_of_every_rank(asked_for, channels):
    """By default as many as there are blocks and staging memory for."""
    job = Job(["00:1"], ["00:2"])
    job.processes[0].module.default_sms = 16
    job.run(num_channels=asked_for, staging_bytes=4 * 1024 + (asked_for or 0) * 9999)
    made = [process.module.created for process in job.processes]
    assert [one.num_channels for one in made] == [channels] * 2
    close(job)


def test_pairs_that_cannot_reach_each_other():
    job = Job(["00:1"], ["00:2"])
    job.processes[1].driver.unreachable = {(1, 0)}
    for problem in job.run():
        assert problem == "process 1: no peer access between devices (1, 0)"
    close(job)


# Links of GPUs that a process does not see ------------------------------------


def hidden(*gpus, **options):
    """Processes each of which sees its own GPU alone; the driver knows no pair."""
    job = Job(*([gpu] for gpu in gpus), see_all=False, **options)
    for process in job.processes:
        process.driver.unreachable = {(0, 1), (1, 0), (0, 0)}
    return job


def use_nvml(monkeypatch, made):
    monkeypatch.setattr(nvml, "bindings", lambda: made)


def works(job):
    held = job.run()
    assert all(isinstance(one, Memory) for one in held), held
    close(job)


def test_hidden_gpus_that_nvlink_joins(monkeypatch):
    # NVLink has atomic operations, whatever NVML says of PCIe.
    made = Nvml(without_atomics={("00:1", "00:2")})
    use_nvml(monkeypatch, made)
    works(hidden("00:1", "00:2"))
    assert made.open == 0


def test_hidden_gpus_with_atomics_over_pcie(monkeypatch):
    use_nvml(monkeypatch, Nvml(without_nvlink={("00:1", "00:2")}))
    works(hidden("00:1", "00:2"))


def test_hidden_gpus_that_only_pcie_joins(monkeypatch):
    lacking = {("00:1", "00:3"), ("00:2", "00:3")}
    use_nvml(monkeypatch, Nvml(lacking, lacking))
    job = hidden("00:1", "00:2", "00:3")
    no = "no NVLink and no atomic operations between devices"
    for problem in job.run():
        assert problem == (
            f"process 0: {no} (0, 2); process 1: {no} (1, 2); "
            f"process 2: {no} (2, 0), (2, 1)"
        )
    close(job)


def test_only_pairs_of_a_group_are_asked_about(monkeypatch):
    lacking = {("00:1", "00:3"), ("00:1", "00:4"), ("00:2", "00:4")}
    use_nvml(monkeypatch, Nvml(lacking, lacking))
    works(hidden("00:1", "00:2", "00:3", "00:4", groups=[[0, 1], [2, 3]]))


def test_processes_that_share_a_gpu_need_no_link(monkeypatch):
    lacking = {("00:1", "00:1"), ("00:2", "00:2")}
    use_nvml(monkeypatch, Nvml(lacking, lacking))
    works(hidden("00:1", "00:1", "00:2", "00:2"))


def test_one_end_of_a_pair_that_knows_is_enough(monkeypatch):
    """Of processes 0 and 1, which share a GPU, neither sees process 2's."""
    job = hidden("00:1", "00:1", "00:2")
    bindings = iter([None, Nvml(), None])
    mine = [next(bindings) for _ in job.processes]
    monkeypatch.setattr(nvml, "bindings", lambda: mine[_here.process.number])
    works(job)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (None, "NVML can be asked of cuda-bindings from 12.9.6 or 13.2 on"),
        (Nvml(unknown={"00:2"}), "NVML knows nothing of 00:1 and 00:2: Not Found"),
    ],
)
def test_links_of_which_nobody_can_say_anything(monkeypatch, made, reason):
    """Each process warns once, and goes on."""
    use_nvml(monkeypatch, made)
    job = hidden("00:1", "00:2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held = job.run()
    assert all(isinstance(one, Memory) for one in held)
    assert len(caught) == 2
    for warning in caught:
        text = str(warning.message)
        assert "whether NVLink joins devices (0, 1), without which" in text
        assert reason in text
    close(job)


def test_nvml_that_does_not_start(monkeypatch):
    made = Nvml()
    made.init_v2 = lambda: (_ for _ in ()).throw(NvmlError("driver not loaded"))
    use_nvml(monkeypatch, made)
    links, reason = nvml.links([("00:1", "00:2")])
    assert links == {}
    assert reason == "NVML cannot say how GPUs are joined: driver not loaded"


def test_lines_are_whole_over_nvlink_alone(monkeypatch):
    """Asked about all pairs, also those that a process sees."""
    job = Job(["00:1", "00:2"], ["00:3"])
    pairs = itertools.combinations(["00:1", "00:2", "00:3"], 2)
    made = Nvml(pairs)
    use_nvml(monkeypatch, made)
    works(job)  # which wants atomic operations alone
    groups = job.groups
    host = reach._host()
    where = {d.id: (host, f"00:{d.id + 1}") for d in groups[0]}
    found = {}
    for process in job.processes:
        _here.process = process
        found[process.number] = reach.why_torn(groups, where)
    no = "no NVLink between devices"
    assert found == {
        0: f"{no} (0, 1), (0, 2), (1, 0), (1, 2)",
        1: f"{no} (2, 0), (2, 1)",
    }
    made.without_nvlink = set()
    assert reach.why_torn(groups, where) is None
    # Over hosts of a domain there is nothing but NVLink.
    made.without_nvlink = {("00:3", "00:1"), ("00:3", "00:2")}
    assert reach.why_torn(groups, {0: ("far", "00:1"), 1: ("far", "00:2")}) is None


def test_windows_are_control_memory_alone():
    """Each rank finds every rank's window, and no arena is shared."""
    job = Job(["00:1"], ["00:2"])
    size = CONTROL // 2
    assert all(map(callable, job.run_windows(size)))
    for me, process in enumerate(job.processes):
        made = process.module.created
        (place,) = made.places
        assert (made.num_sms, made.staging_bytes) == (32, 0)
        assert (place.regions, place.exported) == (0, [])
        for peer, other in enumerate(job.processes):
            (theirs,) = other.module.created.places
            assert same_memory(job, me, place.control[peer], peer, theirs.control[peer])
        assert process.driver.read(place.control[me], size) == bytes(size)
    close(job)


def test_hosts_of_an_nvlink_domain():
    """Control memory goes by fabric handles; XLA's cannot, so rows are staged."""
    job = Job(["00:1", "00:2"], ["00:1", "00:2"], see_all=False, over_hosts=True)
    held = job.run()
    assert [one.exported for one in held] == [set(), set()]
    for me, process in enumerate(job.processes):
        made = process.module.created
        assert made.staging_bytes == STAGING
        for place in made.places:
            assert place.same_process == [[0, 1], [2, 3]][me]
            assert place.exported == []
            assert job.table(me, place) == [[]] * 4
            for peer in range(4):
                other = job.processes[peer // 2].module.created.places[peer % 2]
                assert same_memory(
                    job, me, place.control[peer], peer // 2, other.control[peer]
                )
    assert len(fabric_files) == 4
    close(job)


def test_memory_of_xla_made_for_fabric_handles():
    job = Job(["00:1"], ["00:1"], over_hosts=True)
    for process in job.processes:
        for file, _, _ in process.driver.spaces.values():
            process.driver.kinds[os.fstat(file).st_ino] = FABRIC
    held = job.run()
    assert [one.exported for one in held] == [{0, 1}] * 2
    (place,) = job.processes[0].module.created.places
    ((begin, size, here),) = job.table(0, place)[1]
    assert (begin, size) == (job.processes[1].arenas[0][0], ARENA)
    assert same_memory(job, 0, here + 5, 1, begin + 5)
    close(job)


def test_windows_over_hosts():
    job = Job(["00:1"], ["00:1"], over_hosts=True)
    assert all(map(callable, job.run_windows(CONTROL)))
    for me, process in enumerate(job.processes):
        (place,) = process.module.created.places
        for peer, other in enumerate(job.processes):
            (theirs,) = other.module.created.places
            assert same_memory(job, me, place.control[peer], peer, theirs.control[peer])
    close(job)


def test_a_fabric_handle_that_a_host_may_not_take():
    job = Job(["00:1"], ["00:1"], over_hosts=True)
    job.processes[1].driver.failing = {("cuMemImportFromShareableHandle", 1)}
    for error in job.run():
        assert str(error) == (
            "process 1: cannot map the control memory of rank 0 of process 0: jax_ep: "
            "cuMemImportFromShareableHandle failed: CUDA_ERROR_INVALID_VALUE"
        )
    close(job)


def test_two_processes_on_one_gpu():
    job = Job(["00:1"], ["00:1"])
    for process in job.processes:
        process.driver.unreachable = {(0, 0)}
    assert all(isinstance(held, Memory) for held in job.run())
    close(job)


def test_a_process_that_fails_before_the_end():
    """The other gives back what it had, also what the native side had taken."""
    job = Job(["00:1"], ["00:2"])

    def die(*_):
        raise KeyboardInterrupt

    job.processes[1].module.create_communicator = die
    first, second = job.run(timeout_s=60.0)
    assert isinstance(second, KeyboardInterrupt)
    assert "ready: process 1 failed: KeyboardInterrupt" in str(first)
    assert job.processes[0].module.released == [7]
    close(job)


# What stands for the native module ---------------------------------------------


def test_the_binding_made_of_python_takes_what_the_native_one_takes():
    native_module = pytest.importorskip("jax_ep._cuda")
    edges = [-1, 2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64]
    good = {
        Place: {
            "ordinal": 0,
            "rank": 0,
            "mesh": (0, 1, 1),
            "control": [],
            "same_process": [],
            "regions": 0,
            "exported": [],
        },
        CommunicatorArguments: {
            "num_ranks": 1,
            "num_sms": 1,
            "timeout_s": 1.0,
            "warn_after_s": 1.0,
            "num_channels": 0,
            "staging_bytes": 0,
            "places": [],
            "has_other_processes": False,
            "mapped": [],
            "allocated": [],
        },
    }
    for fake, arguments in good.items():
        real = getattr(native_module, fake.__name__)
        assert list(arguments) == list(fake.FIELDS)
        for name, value in arguments.items():
            for edge in edges:
                wrong = [edge] if isinstance(value, list) else edge
                for given in (wrong, [(edge, 0)], None, "1"):
                    assert takes(fake, arguments | {name: given}) == takes(
                        real, arguments | {name: given}
                    ), (fake.__name__, name, given)


def takes(made, arguments):
    try:
        made(**arguments)
    except TypeError:
        return False
    return True


# Which memory XLA cuts its arrays from -------------------------------------------


class Array:
    def __init__(self, pointer, device):
        self._pointer = pointer
        self.addressable_shards = [types.SimpleNamespace(device=device, data=self)]

    def unsafe_buffer_pointer(self):
        if self._pointer is None:
            raise RuntimeError("deleted")
        return self._pointer


@pytest.mark.parametrize(
    ("probes", "live", "pool", "found"),
    [
        # One arena, all there is.
        ([1000, 1256], [5100], 1000, [(1000, 1000)]),
        # Every array has memory of its own.
        ([1000, 2000], [3000, 4000], None, []),
        # It has grown; what one array or none lies in may not be an arena.
        ([1000, 1256], [3000, 3001, 4000, None], 9000, [(1000, 1000), (3000, 1000)]),
        ([1000, 1000], [], None, []),
        ([99, 98], [], None, []),
    ],
)
def test_arenas(monkeypatch, probes, live, pool, found):
    monkeypatch.undo()  # the autouse fixture's arenas
    stats = None if pool is None else {"pool_bytes": pool}
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    pointers = iter(probes)
    monkeypatch.setattr(jax, "device_put", lambda _, d: Array(next(pointers), d))
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: arrays)
    monkeypatch.setattr(jax, "live_arrays", lambda: [Array(p, device) for p in live])
    driver = Driver(["00:1"], 0)

    def cuMemGetAddressRange(pointer):
        if pointer < 1000:
            return FAILS, None, None
        return OK, pointer // 1000 * 1000, 1000

    driver.cuMemGetAddressRange = cuMemGetAddressRange
    assert gpu_memory.arenas(driver, device, 0) == found
    assert driver.current == []
