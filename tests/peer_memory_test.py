"""Set-up of the CUDA backend against a driver made of Python: no GPU needed."""

from __future__ import annotations

import enum
import sys
import types
import warnings

import numpy as np
import pytest
from fake_gpus import CommunicatorArguments, Place
from jax.sharding import Mesh

import jax_ep
from jax_ep._data import native
from jax_ep._setup import reach

CANNOT = "jax_ep.Communicator: backend 'cuda' cannot work here: "
FALLS_BACK = "jax_ep.Communicator: falling back to backend 'xla', which is slow: "
NO_ACCESS = "no peer access between GPUs (0, 4), (4, 0)"


class Gpu:
    """What set-up asks of a jax.Device."""

    platform = "gpu"
    device_kind = "made of Python"
    process_index = 0
    client = None

    def __init__(self, ordinal):
        self.id = self.local_hardware_id = ordinal

    def __repr__(self):
        return f"Gpu({self.id})"


class CUresult(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704


class Driver(types.ModuleType):
    """cuda.bindings.driver, as far as set-up uses it.

    Attributes:
      unreachable: pairs of GPUs that cannot reach each other.
      answers: status by function, or by (function, number of the call).
      calls: (function, current GPU, arguments) of each call that acts.
      memory: bytes by address of what is allocated.
      current: the stack of contexts; a context is its GPU.
    """

    CUresult = CUresult

    def __init__(self, unreachable=()):
        super().__init__("driver")
        self.unreachable = set(unreachable)
        self.without_atomics = set()
        self.answers = {}
        self.calls = []
        self.memory = {}
        self.current = []
        self._next = 1 << 20

    def _answer(self, function, *arguments):
        current = self.current[-1] if self.current else None
        self.calls.append((function, current, *arguments))
        number = sum(call[0] == function for call in self.calls)
        status = self.answers.get((function, number), self.answers.get(function))
        return status or CUresult.CUDA_SUCCESS

    def count(self, function):
        return sum(call[0] == function for call in self.calls)

    def cuInit(self, flags):
        return (self._answer("cuInit", flags),)

    def cuDeviceGet(self, ordinal):
        return CUresult.CUDA_SUCCESS, ordinal

    class CUdevice_P2PAttribute(enum.Enum):
        CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED = 2
        CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED = 3

    def cuDeviceGetP2PAttribute(self, attribute, device, peer):
        atomic = attribute.name.endswith("ATOMIC_SUPPORTED")
        lacking = self.without_atomics if atomic else self.unreachable
        return CUresult.CUDA_SUCCESS, int((device, peer) not in lacking)

    def cuDevicePrimaryCtxRetain(self, device):
        return self._answer("cuDevicePrimaryCtxRetain", device), device

    def cuCtxPushCurrent(self, context):
        self.current.append(context)
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self):
        return CUresult.CUDA_SUCCESS, self.current.pop()

    def cuCtxEnablePeerAccess(self, peer, flags):
        return (self._answer("cuCtxEnablePeerAccess", peer, flags),)

    def cuMemAlloc(self, size):
        status = self._answer("cuMemAlloc", size)
        if status is not CUresult.CUDA_SUCCESS:
            return status, None
        address, self._next = self._next, self._next + size
        self.memory[address] = None
        return status, address

    def cuMemsetD8(self, address, value, size):
        self.memory[address] = (value, size)
        return (self._answer("cuMemsetD8", address, value, size),)

    def cuCtxSynchronize(self):
        return (self._answer("cuCtxSynchronize"),)

    def cuMemFree(self, address):
        assert self.current, "the driver would say INVALID_CONTEXT"
        del self.memory[int(address)]
        return (self._answer("cuMemFree", address),)


class Module(types.ModuleType):
    """jax_ep._cuda, as far as set-up uses it."""

    def __init__(self):
        super().__init__("_cuda")
        self.problems = {}
        self.tested = []
        self.created = []
        self.released = []

    def self_test(self, ordinal):
        self.tested.append(ordinal)
        return self.problems.get(ordinal, "")

    def control_bytes(self, num_ranks):
        return 1000 * num_ranks

    max_regions = 8
    Place, CommunicatorArguments = Place, CommunicatorArguments

    def staging_size(self, staging_bytes, num_channels, num_ranks):
        least = 2048 * num_channels * (num_ranks - 1)
        return (staging_bytes if staging_bytes >= least else 0), least

    def create_communicator(self, identity, arguments):
        self.created.append((identity, arguments))

    def release_communicator(self, identity):
        self.released.append(identity)


@pytest.fixture
def driver(monkeypatch):
    """The driver that `from cuda.bindings import driver` finds."""
    fake = Driver()
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = fake
    package = types.ModuleType("cuda")
    package.bindings = bindings
    for module in (package, bindings):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    return fake


@pytest.fixture
def module(monkeypatch):
    fake = Module()
    monkeypatch.setattr(native, "cuda", lambda: fake)
    return fake


def mesh(*ordinals):
    return Mesh(np.array([Gpu(o) for o in ordinals]), ("ep",))


def communicator(*ordinals, **kwargs):
    return jax_ep.Communicator(mesh(*ordinals), "ep", **kwargs)


def ordinals_and_ranks(made):
    return [(place.ordinal, place.rank) for place in made.places]


def assert_refused(message, *ordinals):
    with pytest.raises(RuntimeError) as info:
        communicator(*ordinals, backend="cuda")
    assert info.type is RuntimeError
    assert str(info.value) == message


def assert_falls_back(reason, *ordinals):
    """backend=None: one warning, at the caller's line, and backend "xla"."""
    with pytest.warns(UserWarning) as caught:
        comm = communicator(*ordinals)
    assert [str(w.message) for w in caught] == [FALLS_BACK + reason]
    assert caught[0].filename == __file__
    assert comm.backend == "xla"


class TestPeerAccess:
    @pytest.fixture(autouse=True)
    def unreachable(self, driver, module):
        driver.unreachable = {(0, 4), (4, 0)}

    def test_unsupported_reason(self):
        groups = [[Gpu(0), Gpu(1), Gpu(4)]]
        assert reach.unsupported_reason(groups) == NO_ACCESS

    def test_only_pairs_of_a_group_count(self):
        groups = [[Gpu(0), Gpu(1)], [Gpu(4), Gpu(5)]]
        assert reach.unsupported_reason(groups) is None

    def test_one_way_is_not_enough(self, driver):
        driver.unreachable = {(4, 0)}
        groups = [[Gpu(0), Gpu(4)]]
        assert reach.unsupported_reason(groups) == "no peer access between GPUs (4, 0)"

    def test_peers_without_atomics(self, driver):
        driver.unreachable = set()
        driver.without_atomics = {(4, 0)}
        assert reach.unsupported_reason([[Gpu(0), Gpu(4)]]) == (
            "no atomic operations between GPUs (4, 0)"
        )

    def test_named_backend_raises(self, driver, module):
        assert_refused(CANNOT + NO_ACCESS, 0, 4)
        assert not driver.memory
        assert not module.created

    def test_no_named_backend_falls_back(self, module):
        assert_falls_back(NO_ACCESS, 0, 1, 4)
        assert not module.created

    def test_named_xla_does_not_warn(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert communicator(0, 4, backend="xla").backend == "xla"


class TestMissingParts:
    def test_cuda_python(self, module, monkeypatch):
        monkeypatch.setitem(sys.modules, "cuda", None)
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        reason = (
            "jax_ep: the CUDA backend needs cuda-python: pip install 'jax_ep[cuda]'"
        )
        assert_refused(CANNOT + reason, 0, 1)
        assert_falls_back(reason, 0, 1)

    def test_native_module(self, driver, monkeypatch):
        def cuda():
            raise ImportError("jax_ep: the native module _cuda was not built")

        monkeypatch.setattr(native, "cuda", cuda)
        reason = "jax_ep: the native module _cuda was not built"
        assert_refused(CANNOT + reason, 0, 1)
        assert_falls_back(reason, 0, 1)


class TestSelfTest:
    def test_failure_names_the_gpu_and_stops_set_up(self, driver, module):
        problem = (
            "GPU 1: loading a kernel failed: no kernel image is available for "
            "execution on the device; the GPU is sm_70, jax_ep was built for "
            "80-real;90a-real"
        )
        module.problems = {1: problem}
        assert_refused(CANNOT + problem, 0, 1)
        assert not driver.memory
        assert not module.created

    def test_failure_without_a_named_backend_falls_back(self, driver, module):
        module.problems = {0: "GPU 0: self-test moved rows to wrong places"}
        assert_falls_back(module.problems[0], 0, 1)
        assert not driver.memory

    def test_runs_once_on_every_gpu(self, driver, module):
        communicator(2, 0, 1, backend="cuda").close()
        assert sorted(module.tested) == [0, 1, 2]


class TestSetUp:
    def test_every_rank_gets_zeroed_memory_on_its_gpu(self, driver, module):
        with communicator(3, 1, num_sms=5, timeout_s=2.5) as comm:
            ((identity, made),) = module.created
            assert comm.backend == "cuda"
            assert identity == comm.id
            assert (made.num_ranks, made.num_sms, made.timeout_s) == (2, 5, 2.5)
            assert made.warn_after_s == 30.0
            assert ordinals_and_ranks(made) == [(3, 0), (1, 1)]
            gpus = [call[1] for call in driver.calls if call[0] == "cuMemAlloc"]
            assert gpus == [3, 1]
            assert driver.memory == dict.fromkeys(made.allocated, (0, 2000))
            for place in made.places:
                assert place.control == made.allocated
                assert (place.same_process, place.regions) == ([0, 1], 0)
            assert (made.has_other_processes, made.mapped) == (False, [])
            assert comm.describe()["memory_bytes"] == 4000
            assert driver.current == []
            assert module.released == []
        comm.close()
        assert module.released == [identity]
        # The native side frees it: kernels may still be running.
        assert driver.count("cuMemFree") == 0

    def test_default_num_sms_is_left_to_the_native_side(self, driver, module):
        communicator(0, 1).close()
        assert module.created[0][1].num_sms == 0

    def test_groups_of_a_mesh_with_two_axes(self, driver, module):
        grid = Mesh(np.array([[Gpu(0), Gpu(1)], [Gpu(2), Gpu(3)]]), ("data", "ep"))
        jax_ep.Communicator(grid, "ep").close()
        jax_ep.Communicator(grid, "data").close()
        along_ep, along_data = (made for _, made in module.created)
        assert ordinals_and_ranks(along_ep) == [(0, 0), (1, 1), (2, 0), (3, 1)]
        assert ordinals_and_ranks(along_data) == [(0, 0), (2, 1), (1, 0), (3, 1)]
        a, b, c, d = along_ep.allocated
        assert [place.control for place in along_ep.places] == [[a, b]] * 2 + [
            [c, d]
        ] * 2

    def test_peers_reach_each_other_both_ways(self, driver, module):
        communicator(0, 1).close()
        enabled = [call[1:3] for call in driver.calls if "EnablePeer" in call[0]]
        assert sorted(enabled) == [(0, 1), (1, 0)]

    def test_peer_access_that_xla_has_enabled(self, driver, module):
        driver.answers["cuCtxEnablePeerAccess"] = (
            CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
        )
        with communicator(0, 1) as comm:
            assert comm.backend == "cuda"

    def test_peer_access_that_fails(self, driver, module):
        driver.answers["cuCtxEnablePeerAccess"] = (
            CUresult.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
        )
        assert_refused(
            "jax_ep: cuCtxEnablePeerAccess failed: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
            0,
            1,
        )
        assert driver.current == []

    def test_memory_that_runs_out_is_given_back(self, driver, module):
        driver.answers["cuMemAlloc", 2] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
        assert_refused("jax_ep: cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY", 0, 1)
        assert driver.memory == {}
        assert driver.current == []
        assert not module.created
