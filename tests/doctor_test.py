"""jax_ep.doctor: on this machine, and on machines made up of fakes."""

import itertools
import types

import jax
import pytest
from fake_gpus import Nvml

from jax_ep import doctor
from jax_ep._data import native
from jax_ep._setup import fabric, gpu_memory, nvml


class Names:
    """Any attribute is its own name."""

    def __getattr__(self, name):
        return name


def status(value=0, name="OK"):
    return types.SimpleNamespace(value=value, name=name)


class Driver:
    """A driver of `count` GPUs; `unreachable` are pairs without peer access."""

    CUdevice_attribute = Names()
    CUdevice_P2PAttribute = Names()

    def __init__(self, count=2, unreachable=(), no_atomics=(), exports=1):
        self.count = count
        self.missing = {
            "CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED": unreachable,
            "CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED": no_atomics,
        }
        self.attributes = {
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 9,
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 0,
            "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 132,
            "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": exports,
        }

    def cuDriverGetVersion(self):
        return status(), 13020

    def cuDeviceGetCount(self):
        return status(), self.count

    def cuDeviceGet(self, ordinal):
        return status(), ordinal

    def cuDeviceGetPCIBusId(self, length, device):
        return status(), f"00:{device}".encode()

    def cuDeviceGetName(self, length, device):
        return status(), b"H200\0\0"

    def cuDeviceGetAttribute(self, attribute, device):
        return status(), self.attributes[attribute]

    def cuDevicePrimaryCtxRetain(self, device):
        return status(), device

    def cuCtxPushCurrent(self, context):
        return (status(),)

    def cuCtxPopCurrent(self):
        return status(), None

    def cuDeviceGetP2PAttribute(self, attribute, a, b):
        return status(), int((a, b) not in self.missing[attribute])


def examine(check, *args, **kwargs):
    lines = []
    report = doctor.Report(lines.append)
    check(report, *args, **kwargs)
    return report, "\n".join(lines)


def gpus(monkeypatch, driver, made=None):
    monkeypatch.setattr(gpu_memory, "driver", lambda: driver)
    monkeypatch.setattr(nvml, "bindings", lambda: made)
    return examine(doctor.check_gpus)


def test_this_machine_is_well():
    lines = []
    code = doctor.main(["--skip-self-test"], lines.append)
    text = "\n".join(lines)
    assert code == 0, text
    assert "Nothing is wrong" in text
    assert jax.__version__ in text


def test_self_test_measures_every_pair(monkeypatch):
    monkeypatch.setattr(doctor, "_TOKENS", 16)
    devices = jax.devices()[:3]
    report, text = examine(doctor.check_operations, devices)
    assert not report.problems, text
    pairs = list(itertools.combinations(devices, 2))
    assert text.count("GB/s each way") == len(pairs)
    for a, b in pairs:
        assert f"devices {a.id} and {b.id}" in text


def test_self_test_on_one_device():
    report, text = examine(doctor.check_operations, jax.devices()[:1])
    assert not report.problems, text


def test_self_test_says_what_failed(monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(doctor, "_wrong_rows", fail)
    report, _ = examine(doctor.check_operations, jax.devices()[:1])
    ((what, remedy),) = report.problems
    assert "does not work: no such thing" in what
    assert "docs/errors.md" in remedy
    assert "Traceback" in capsys.readouterr().err


def test_wrong_rows_are_a_bug(monkeypatch):
    monkeypatch.setattr(doctor, "_wrong_rows", lambda *_: "3 of 8 rows differ")
    report, _ = examine(doctor.check_operations, jax.devices()[:1])
    assert "gave wrong rows: 3 of 8 rows differ" in report.problems[0][0]
    assert report.conclude() == 1


def test_gpus_that_reach_each_other(monkeypatch):
    report, text = gpus(monkeypatch, Driver())
    assert not report.problems
    assert "H200, sm_90, 132 multiprocessors, memory can be exported" in text
    assert "CUDA of the driver           13.2" in text
    assert "between all pairs" in text


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (Nvml(), "between all pairs"),
        (Nvml({("00:0", "00:1")}), "not between GPUs (0, 1), (1, 0): no LowLatency"),
        (None, "NVML can be asked of cuda-bindings from"),
    ],
)
def test_nvlink(monkeypatch, made, shown):
    report, text = gpus(monkeypatch, Driver(3), made)
    assert not report.problems
    assert f"  NVLink                       {shown}" in text


def test_pairs_out_of_reach_are_named(monkeypatch):
    driver = Driver(5, unreachable=[(0, 4), (4, 0)], no_atomics=[(1, 2)], exports=0)
    report, text = gpus(monkeypatch, driver)
    whats = [what for what, _ in report.problems]
    assert whats == [
        "no peer access between GPUs (0, 4), (4, 0)",
        "no atomic operations between GPUs (1, 2)",
    ]
    assert "cannot be exported" in text


@pytest.mark.parametrize(
    ("note", "said", "problems"),
    [
        ({"domain": "", "problem": ""}, "none: NVLink ends at this host", []),
        ({"domain": "ab.1", "problem": ""}, "ab.1", []),
        (
            {"domain": "ab.1", "problem": "no channel"},
            "ab.1",
            ["hosts of the domain do not count as one node: no channel"],
        ),
    ],
)
def test_nvlink_between_hosts(monkeypatch, note, said, problems):
    monkeypatch.setattr(fabric, "note", lambda devices: note)
    report, text = examine(doctor.check_fabric, [])
    assert f"domain                       {said}" in text
    assert [what for what, _ in report.problems] == problems


def test_memory_of_jax(monkeypatch):
    """GPU 0's is exported in part, GPU 1's not at all, GPU 2 cannot be asked."""

    def arenas(driver, device, context):
        if device.local_hardware_id == 2:
            raise RuntimeError("no such GPU")
        return [(64, 3 << 30), (65, 1 << 30)] if context == 0 else [(66, 1 << 30)]

    monkeypatch.setattr(gpu_memory, "driver", Driver)
    monkeypatch.setattr(gpu_memory, "arenas", arenas)
    monkeypatch.setattr(gpu_memory, "exportable", lambda _, at: at == 64)
    devices = [types.SimpleNamespace(local_hardware_id=i) for i in range(3)]
    report, text = examine(doctor.check_arenas, devices)
    assert not report.problems
    assert [
        "3.0 GiB exported: rows go straight" in text,
        "cannot be exported: rows are staged" in text,
        "cannot be asked about: no such GPU" in text,
    ] == [True] * 3


def test_no_cuda_bindings(monkeypatch):
    def missing():
        raise ImportError("no cuda-python")

    monkeypatch.setattr(gpu_memory, "driver", missing)
    report, _ = examine(doctor.check_gpus)
    ((what, remedy),) = report.problems
    assert what == "the CUDA driver cannot be asked: no cuda-python"
    assert "pip install" in remedy


@pytest.mark.parametrize("there", [True, False])
def test_the_cuda_module_matters_with_gpus_only(monkeypatch, there):
    def missing():
        raise ImportError("was not built")

    monkeypatch.setattr(native, "cuda", missing)
    report, text = examine(doctor.check_modules, gpus=there)
    assert bool(report.problems) == there
    assert "_host" in text
