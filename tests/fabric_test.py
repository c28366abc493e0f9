"""NVLink domains over several hosts: how they are found, on drivers made of Python."""

import contextlib
import sys
import types

import fake_gpus as fakes
import pytest

from jax_ep._setup import fabric, gpu_memory

NAME = bytes(range(16))


class NvmlError(Exception):
    pass


class Nvml:
    """cuda.bindings.nvml of a GPU."""

    GpuFabricState = types.SimpleNamespace(COMPLETED=3)
    NvmlError = NvmlError

    def __init__(self, name=NAME, state=3, failure=None):
        self.found = types.SimpleNamespace(cluster_uuid=name, state=state, clique_id=7)
        self.failure = failure
        self.open = 0

    def init_v2(self):
        self.open += 1

    def shutdown(self):
        self.open -= 1

    def device_get_handle_by_pci_bus_id_v2(self, bus):
        if self.failure:
            raise self.failure
        return bus

    def device_get_gpu_fabric_info_v(self, handle):
        assert handle == "00:1"
        return self.found


@pytest.fixture
def driver(monkeypatch):
    made = fakes.Driver(["00:1", "00:2"], 1 << 32)
    made.CUdevice_attribute = fakes.Names()
    made.has_handles = True
    made.cuDeviceGetAttribute = lambda attribute, device: (
        fakes.OK,
        int(made.has_handles and attribute.endswith("HANDLE_TYPE_FABRIC_SUPPORTED")),
    )
    monkeypatch.setattr(gpu_memory, "driver", lambda: made)
    yield made
    assert not made.spaces and not made.handles
    fakes.close_fabric()


@contextlib.contextmanager
def nvml(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    bindings = types.ModuleType("cuda.bindings")
    if module is not None:
        bindings.nvml = module
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    # `from cuda.bindings import nvml` looks here too.
    monkeypatch.delitem(sys.modules, "cuda.bindings.nvml", raising=False)
    yield
    assert module is None or module.open == 0


GPU = fakes.Gpu(0, 0, 0)


def test_gpu_of_a_domain(driver, monkeypatch):
    with nvml(monkeypatch, Nvml()):
        assert fabric.note([GPU]) == {"domain": f"{NAME.hex()}.7", "problem": ""}


@pytest.mark.parametrize(
    "module", [Nvml(name=bytes(16)), Nvml(state=0)], ids=["no_name", "no_fabric"]
)
def test_gpu_whose_links_end_at_the_host(driver, monkeypatch, module):
    driver.failing = {("cuMemCreate", 1)}
    with nvml(monkeypatch, module):
        assert fabric.note([GPU]) == {"domain": "", "problem": ""}


def test_gpu_without_handles_is_not_asked(driver, monkeypatch):
    driver.has_handles = False
    with nvml(monkeypatch, Nvml(failure=AssertionError)):
        assert fabric.note([GPU]) == {"domain": "", "problem": ""}


def test_no_channel(driver, monkeypatch):
    driver.failing = {("cuMemCreate", 1)}
    with nvml(monkeypatch, Nvml()):
        found = fabric.note([GPU])
    assert found["domain"] == f"{NAME.hex()}.7"
    assert found["problem"] == (
        "jax_ep: cuMemCreate failed: CUDA_ERROR_INVALID_VALUE; may this user open "
        "/dev/nvidia-caps-imex-channels/channel0?"
    )


def test_nvml_that_cannot_say(driver, monkeypatch):
    with nvml(monkeypatch, Nvml(failure=NvmlError("lost"))):
        found = fabric.note([GPU])
    assert found == {
        "domain": "",
        "problem": "NVML cannot name the NVLink domain: lost",
    }


def test_nvml_of_older_bindings(driver, monkeypatch):
    monkeypatch.delattr(Nvml, "device_get_gpu_fabric_info_v")
    with nvml(monkeypatch, Nvml()):
        found = fabric.note([GPU])
    assert "has no attribute 'device_get_gpu_fabric_info_v'" in found["problem"]


@pytest.mark.parametrize("works", [True, False])
def test_bindings_without_nvml(driver, monkeypatch, works):
    """Matters only where memory could be shared."""
    driver.failing = set() if works else {("cuMemCreate", 1)}
    with nvml(monkeypatch, None):
        found = fabric.note([GPU])
    assert found["domain"] == ""
    assert ("cuda-bindings from 12.9.6" in found["problem"]) == works


# Which hosts make a node ------------------------------------------------------


def notes(*domains, **problems):
    return {
        process: {"domain": domain, "problem": problems.get(f"p{process}", "")}
        for process, domain in enumerate(domains)
    }


HOSTS = dict(enumerate("aabbcd"))


def test_hosts_of_one_domain_are_one_node():
    names, problems = fabric.join(HOSTS, notes("x", "x", "x", "x", "y", ""))
    assert problems == []
    assert list(names.values()) == ["NVLink domain x"] * 4 + ["c", "d"]


def test_a_domain_counts_whole_or_not():
    names, problems = fabric.join(
        HOSTS, notes("x", "x", "x", "x", "y", "y", p2="no channel")
    )
    assert problems == ["process 2: no channel"]
    assert list(names.values()) == ["a", "a", "b", "b"] + ["NVLink domain y"] * 2


def test_a_domain_of_one_host_needs_no_handles():
    names, problems = fabric.join(HOSTS, notes("x", "x", "", "", "", "", p0="none"))
    assert (names, problems) == (HOSTS, [])


def test_a_domain_that_is_not_known():
    _, problems = fabric.join(HOSTS, notes("", "", "", "", "", "", p3="too old"))
    assert problems == ["process 3: too old"]
