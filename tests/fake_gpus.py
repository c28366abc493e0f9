"""GPUs made of Python: what set-up asks of JAX's devices and of the CUDA driver.

Memory is files, so what processes share can be told by its inode.
"""

import ctypes
import enum
import os
import types
from typing import ClassVar

UNIT = 2048
ARENA = 10 * UNIT


# What crosses into jax_ep._cuda -------------------------------------------------


def integer(bits, *, signed=True):
    """Whether a value is an integer that C++'s holds, as nanobind asks."""
    least, most = (-(1 << bits - 1), 1 << bits - 1) if signed else (0, 1 << bits)
    return lambda value: isinstance(value, int) and least <= value < most


def list_of(holds):
    return lambda value: isinstance(value, list) and all(map(holds, value))


def pair_of(holds):
    return lambda value: len(value) == 2 and all(map(holds, value))


INT32, INT64 = integer(32), integer(64)
UINT32, UINT64 = integer(32, signed=False), integer(64, signed=False)
RANGES = list_of(pair_of(UINT64))


class Bound:
    """A struct of the native module: what it does not hold is a TypeError.

    Attributes:
      FIELDS: of each argument, whether a value is one of its C++ type's.
    """

    FIELDS: ClassVar = {}

    def __init__(self, **given):
        wrong = given.keys() ^ self.FIELDS.keys()
        wrong |= {k for k in given.keys() - wrong if not self.FIELDS[k](given[k])}
        if wrong:
            raise TypeError(
                f"{type(self).__name__}: incompatible function arguments: "
                + ", ".join(sorted(wrong))
            )
        self.__dict__.update(given)


class Place(Bound):
    FIELDS: ClassVar = {
        "ordinal": INT32,
        "rank": INT32,
        "mesh": lambda value: (
            isinstance(value, tuple) and len(value) == 3 and all(map(UINT32, value))
        ),
        "control": list_of(UINT64),
        "same_process": list_of(INT32),
        "regions": UINT64,
        "exported": RANGES,
    }


class CommunicatorArguments(Bound):
    FIELDS: ClassVar = {
        "num_ranks": INT32,
        "num_sms": INT32,
        "timeout_s": lambda value: isinstance(value, (int, float)),
        "warn_after_s": lambda value: isinstance(value, (int, float)),
        "num_channels": INT32,
        "staging_bytes": INT64,
        "places": list_of(lambda value: isinstance(value, Place)),
        "has_other_processes": lambda value: isinstance(value, bool),
        "mapped": RANGES,
        "allocated": list_of(UINT64),
    }


# Devices and their driver -------------------------------------------------------


class Gpu:
    """What set-up asks of a jax.Device."""

    platform = "gpu"

    def __init__(self, number, process, ordinal):
        self.id, self.process_index, self.local_hardware_id = number, process, ordinal


class CUresult(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704


OK = CUresult.CUDA_SUCCESS
FAILS = CUresult.CUDA_ERROR_INVALID_VALUE


FILE = "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
FABRIC = "CU_MEM_HANDLE_TYPE_FABRIC"
# Files that fabric handles stand for, on all hosts.
fabric_files = {}


class Names:
    """Any attribute is its own name."""

    def __getattr__(self, name):
        return name


class Driver:
    """One process's cuda.bindings.driver. Physical memory is a file.

    Attributes:
      visible: bus ids of the GPUs that the process sees, by ordinal.
      unreachable: pairs of ordinals.
      failing: (function, n): the n-th call fails, from 1 on.
      spaces: (file, bytes, ordinals with access) by address; a file is None
        where only addresses are reserved.
      handles: files that cuMemCreate, -Import and -Retain gave and nobody
        released.
      private: addresses whose memory cannot be exported.
      kinds: what cuMemCreate's files may be exported as, by inode.
      calls: names of functions in order.
    """

    CUresult = CUresult
    CUmemLocation = CUmemAllocationProp = CUmemAccessDesc = types.SimpleNamespace
    CUmemLocationType = CUmemAllocationType = CUmemAllocationHandleType = Names()
    CUmemAllocationGranularity_flags = CUmemAccess_flags = Names()
    CUdevice_P2PAttribute = Names()

    def __init__(self, visible, first_address):
        self.visible = visible
        self.unreachable = set()
        self.failing = set()
        self.spaces = {}
        self.handles = []
        self.private = set()
        self.kinds = {}
        self.calls = []
        self.current = []
        self._next = first_address

    def _status(self, name):
        self.calls.append(name)
        return FAILS if (name, self.calls.count(name)) in self.failing else OK

    def _reserve(self, size):
        address, self._next = self._next, self._next + size + UNIT
        self.spaces[address] = [None, size, ()]
        return address

    def _at(self, address):
        for base, (file, size, access) in self.spaces.items():
            if base <= address < base + size:
                return file, address - base, access
        raise AssertionError(f"nothing at {address}")

    def add_arena(self):
        """XLA's memory, as it were."""
        address = self._reserve(ARENA)
        self.spaces[address][0] = os.memfd_create("arena")
        os.ftruncate(self.spaces[address][0], ARENA)
        return address

    def cuInit(self, flags):
        return (OK,)

    def cuDeviceGetCount(self):
        return OK, len(self.visible)

    def cuDeviceGet(self, ordinal):
        assert ordinal < len(self.visible)
        return OK, ordinal

    def cuDeviceGetPCIBusId(self, length, device):
        return OK, self.visible[device].encode() + b"\0\0"

    def cuDeviceGetP2PAttribute(self, attribute, a, b):
        return OK, int((a, b) not in self.unreachable)

    def cuDevicePrimaryCtxRetain(self, device):
        return OK, device

    def cuCtxPushCurrent(self, context):
        self.current.append(context)
        return (OK,)

    def cuCtxPopCurrent(self):
        return OK, self.current.pop()

    def cuCtxSynchronize(self):
        return (self._status("cuCtxSynchronize"),)

    def cuCtxEnablePeerAccess(self, peer, flags):
        return (self._status("cuCtxEnablePeerAccess"),)

    def cuMemGetAllocationGranularity(self, wanted, option):
        return OK, UNIT

    def cuMemCreate(self, size, wanted, flags):
        if (status := self._status("cuMemCreate")) is FAILS:
            return status, None
        assert size % UNIT == 0
        handle = os.memfd_create("gpu")
        os.ftruncate(handle, size)
        os.pwrite(handle, b"\x7f" * size, 0)
        self.handles.append(handle)
        self.kinds[os.fstat(handle).st_ino] = wanted.requestedHandleTypes
        return OK, handle

    def cuMemRetainAllocationHandle(self, address):
        self.handles.append(os.dup(self.spaces[address][0]))
        return OK, self.handles[-1]

    def cuMemExportToShareableHandle(self, handle, kind, flags):
        status = self._status("cuMemExportToShareableHandle")
        for address in self.private:
            if os.path.sameopenfile(handle, self.spaces[address][0]):
                status = FAILS
        # XLA asks for memory that can be exported as files.
        made_for = self.kinds.get(os.fstat(handle).st_ino, FILE)
        if status is FAILS or kind != made_for:
            return FAILS, None
        if kind == FILE:
            return OK, os.dup(handle)
        name = os.urandom(64)
        fabric_files[name] = os.dup(handle)
        return OK, types.SimpleNamespace(data=name)

    def cuMemImportFromShareableHandle(self, shared, kind):
        if (status := self._status("cuMemImportFromShareableHandle")) is FAILS:
            return status, None
        assert kind == (FILE if isinstance(shared, int) else FABRIC)
        file = shared if kind == FILE else fabric_files[shared]
        self.handles.append(os.dup(file))
        return OK, self.handles[-1]

    def cuMemRelease(self, handle):
        self.handles.remove(handle)
        os.close(handle)
        return (self._status("cuMemRelease"),)

    def cuMemAddressReserve(self, size, alignment, address, flags):
        return self._status("cuMemAddressReserve"), self._reserve(size)

    def cuMemMap(self, address, size, offset, handle, flags):
        if (status := self._status("cuMemMap")) is OK:
            space = self.spaces[address]
            assert space[:2] == [None, size]
            assert size <= os.fstat(handle).st_size
            space[0] = os.dup(handle)
        return (status,)

    def cuMemSetAccess(self, address, size, access, count):
        assert count == len(access)
        if (status := self._status("cuMemSetAccess")) is OK:
            self.spaces[address][2] = tuple(one.location.id for one in access)
        return (status,)

    def cuMemUnmap(self, address, size):
        assert self.spaces[address][1] == size
        os.close(self.spaces[address][0])
        self.spaces[address][0] = None
        return (self._status("cuMemUnmap"),)

    def cuMemAddressFree(self, address, size):
        assert self.spaces.pop(address)[:2] == [None, size]
        return (self._status("cuMemAddressFree"),)

    def cuMemAlloc(self, size):
        if (status := self._status("cuMemAlloc")) is FAILS:
            return status, None
        address = self._reserve(size)
        file = os.memfd_create("private")
        os.ftruncate(file, size)
        self.spaces[address] = [file, size, (self.current[-1],)]
        return OK, address

    def cuMemFree(self, address):
        os.close(self.spaces.pop(address)[0])
        return (self._status("cuMemFree"),)

    def cuMemsetD8(self, address, value, size):
        return (self._write(address, bytes([value]) * size),)

    def cuMemcpyHtoD(self, address, data, size):
        return (self._write(address, ctypes.string_at(data, size)),)

    def cuMemcpyDtoH(self, data, address, size):
        file, offset, access = self._at(address)
        assert self.current[-1] in access
        ctypes.memmove(data, os.pread(file, size, offset), size)
        return (self._status("cuMemcpyDtoH"),)

    def _write(self, address, data):
        file, offset, access = self._at(address)
        assert self.current[-1] in access
        os.pwrite(file, data, offset)
        return OK

    def read(self, address, size):
        file, offset, _ = self._at(address)
        return os.pread(file, size, offset)


def close_fabric():
    """The end of what fabric handles stand for."""
    while fabric_files:
        os.close(fabric_files.popitem()[1])


class NvmlError(Exception):
    """As cuda.bindings.nvml has it."""


class Nvml:
    """cuda.bindings.nvml of a host, as far as links go.

    Attributes:
      without_nvlink: pairs of bus ids.
      without_atomics: pairs of bus ids.
      unknown: bus ids that it does not know.
      open: sessions.
    """

    NvmlError = NvmlError

    def __init__(self, without_nvlink=(), without_atomics=(), unknown=()):
        self.without_nvlink = set(without_nvlink)
        self.without_atomics = set(without_atomics)
        self.unknown = set(unknown)
        self.open = 0

    def init_v2(self):
        self.open += 1

    def shutdown(self):
        self.open -= 1

    def device_get_handle_by_pci_bus_id_v2(self, bus):
        assert self.open > 0
        if bus in self.unknown:
            raise NvmlError("Not Found")
        return bus

    def device_get_p2p_status(self, one, other, asked):
        assert self.open > 0
        lacking = {2: self.without_nvlink, 3: self.without_atomics}[asked]
        return 5 if {(one, other), (other, one)} & lacking else 0


CONTROL, STAGING = 1000, 4096


class Module:
    """One process's jax_ep._cuda."""

    max_regions = 8
    Place, CommunicatorArguments = Place, CommunicatorArguments

    def __init__(self):
        self.problem = ""
        self.default_sms = 24
        self.created = None
        self.released = []

    def self_test(self, ordinal):
        return self.problem

    def control_bytes(self, num_ranks):
        return CONTROL

    def staging_size(self, staging_bytes, num_channels, num_ranks):
        least = 1024 * num_channels
        return STAGING if staging_bytes >= least else 0, least

    def num_sms(self, ordinal, asked_for):
        return asked_for or self.default_sms

    def create_communicator(self, identity, arguments):
        self.created = arguments

    def release_communicator(self, identity):
        self.released.append(identity)
