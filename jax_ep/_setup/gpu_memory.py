"""Memory of GPUs through the CUDA driver: made, exported, imported and mapped.

Also says which of XLA's memory can be given to other processes.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np


def driver() -> Any:
    """cuda.bindings.driver, initialised."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError(
            "jax_ep: the CUDA backend needs cuda-python: pip install 'jax_ep[cuda]'"
        ) from error
    call(driver.cuInit, 0)
    return driver


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a driver function; returns its result or raises RuntimeError."""
    status, *results = function(*args)
    if status.value != 0:
        raise RuntimeError(f"jax_ep: {function.__name__} failed: {status.name}")
    return results[0] if len(results) == 1 else tuple(results) or None


class Kind(enum.Enum):
    """How memory is given to other processes.

    FILE: as an open file, inside a host.
    FABRIC: as 64 bytes, inside an NVLink domain.
    """

    FILE = "POSIX_FILE_DESCRIPTOR"
    FABRIC = "FABRIC"

    def of(self, driver: Any) -> Any:
        """The driver's word for it."""
        return getattr(
            driver.CUmemAllocationHandleType, f"CU_MEM_HANDLE_TYPE_{self.value}"
        )


def bus_id(driver: Any, ordinal: int) -> str:
    """What tells a GPU from others of its host."""
    name = call(driver.cuDeviceGetPCIBusId, 64, call(driver.cuDeviceGet, ordinal))
    return name.split(b"\0")[0].decode()


class Current:
    """Makes a context current for a block."""

    def __init__(self, driver: Any, context: Any):
        """Changes nothing yet."""
        self._driver = driver
        self._context = context

    def __enter__(self) -> None:
        call(self._driver.cuCtxPushCurrent, self._context)

    def __exit__(self, *exc_info: object) -> None:
        call(self._driver.cuCtxPopCurrent)


class Holdings:
    """What set-up holds until the native side takes it over.

    Attributes:
      mapped: (address, bytes) of what has to be unmapped, its addresses freed.
      allocated: addresses of cuMemAlloc.
    """

    def __init__(self, driver: Any, contexts: dict[int, Any]):
        """`contexts` are the primary contexts of GPUs by ordinal."""
        self._driver = driver
        self._contexts = contexts
        self.mapped: list[tuple[int, int]] = []
        self.allocated: list[int] = []

    def allocate(self, ordinal: int, size: int) -> int:
        """Zeroed memory for the GPUs of this process."""
        driver = self._driver
        with Current(driver, self._contexts[ordinal]):
            address = int(call(driver.cuMemAlloc, size))
            self.allocated.append(address)
            call(driver.cuMemsetD8, address, 0, size)
            call(driver.cuCtxSynchronize)
        return address

    def allocate_shared(
        self, ordinal: int, size: int, accessors: Sequence[int], kind: Kind
    ) -> tuple[int, int, int | bytes]:
        """Zeroed memory of a GPU that other processes can map.

        Args:
          ordinal: of the GPU.
          size: at least so many bytes.
          accessors: ordinals of the GPUs here that use it.
          kind: how it is to be shared.

        Returns:
          Its address, its size, and what stands for it: an open file, which is
          the caller's to close, or bytes.
        """
        driver = self._driver
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = int(call(driver.cuDeviceGet, ordinal))
        wanted = driver.CUmemAllocationProp()
        wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location = location
        wanted.requestedHandleTypes = kind.of(driver)
        unit = int(
            call(
                driver.cuMemGetAllocationGranularity,
                wanted,
                driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        )
        size = -(-size // unit) * unit
        with Current(driver, self._contexts[ordinal]):
            handle = call(driver.cuMemCreate, size, wanted, 0)
            try:
                address = self._map(handle, size, accessors)
                call(driver.cuMemsetD8, address, 0, size)
                call(driver.cuCtxSynchronize)
                return address, size, _export(driver, handle, kind)
            finally:
                # The mapping keeps the memory, and so does a file.
                call(driver.cuMemRelease, handle)

    def import_shared(
        self, shared: int | bytes, size: int, accessors: Sequence[int]
    ) -> int:
        """Maps what another process exported; returns where."""
        driver = self._driver
        with Current(driver, self._contexts[accessors[0]]):
            kind = Kind.FILE if isinstance(shared, int) else Kind.FABRIC
            handle = call(
                driver.cuMemImportFromShareableHandle, shared, kind.of(driver)
            )
            try:
                return self._map(handle, size, accessors)
            finally:
                call(driver.cuMemRelease, handle)

    def _map(self, handle: Any, size: int, accessors: Sequence[int]) -> int:
        driver = self._driver
        address = int(call(driver.cuMemAddressReserve, size, 0, 0, 0))
        try:
            call(driver.cuMemMap, address, size, 0, handle, 0)
        except BaseException:
            call(driver.cuMemAddressFree, address, size)
            raise
        self.mapped.append((address, size))
        try:
            call(driver.cuMemSetAccess, address, size, *self._access(accessors))
        except BaseException:
            self.unmap(address)
            raise
        return address

    def _access(self, accessors: Sequence[int]) -> tuple[list[Any], int]:
        driver = self._driver
        access = []
        for ordinal in accessors:
            location = driver.CUmemLocation()
            location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            location.id = int(call(driver.cuDeviceGet, ordinal))
            one = driver.CUmemAccessDesc()
            one.location = location
            one.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            access.append(one)
        return access, len(access)

    def unmap(self, address: int) -> None:
        """Takes one mapping back."""
        (entry,) = [m for m in self.mapped if m[0] == address]
        self.mapped.remove(entry)
        call(self._driver.cuMemUnmap, *entry)
        call(self._driver.cuMemAddressFree, *entry)

    def write(self, ordinal: int, address: int, data: np.ndarray) -> None:
        """Copies to memory that the GPU can use."""
        driver = self._driver
        with Current(driver, self._contexts[ordinal]):
            call(driver.cuMemcpyHtoD, address, data.ctypes.data, data.nbytes)
            call(driver.cuCtxSynchronize)

    def read(self, ordinal: int, address: int, size: int) -> bytes:
        """Copies from memory that the GPU can use."""
        driver = self._driver
        data = np.zeros(size, np.uint8)
        with Current(driver, self._contexts[ordinal]):
            call(driver.cuMemcpyDtoH, data.ctypes.data, address, size)
        return data.tobytes()

    def release(self) -> None:
        """Gives everything back; for a set-up that failed. Raises nothing."""
        driver = self._driver
        for context in self._contexts.values():
            with contextlib.suppress(RuntimeError), Current(driver, context):
                call(driver.cuCtxSynchronize)
        for address, _ in reversed(list(self.mapped)):
            with contextlib.suppress(RuntimeError):
                self.unmap(address)
        while self.allocated:
            address = self.allocated.pop()
            # It wants a context; the address says whose memory it is.
            context = next(iter(self._contexts.values()))
            with contextlib.suppress(RuntimeError), Current(driver, context):
                call(driver.cuMemFree, address)


# XLA's memory --------------------------------------------------------------------


def arenas(driver: Any, device: jax.Device, context: Any) -> list[tuple[int, int]]:
    """(address, bytes) of the memory out of which XLA cuts a GPU's arrays.

    Only what holds two arrays counts: where an array has memory of its own, XLA
    gives it back with the array, and other memory may take its addresses.
    """
    probes = [jax.device_put(np.zeros(256, np.uint8), device) for _ in range(2)]
    jax.block_until_ready(probes)
    found: dict[tuple[int, int], set[int]] = {}

    def look_at(pointers: Iterator[int]) -> None:
        for pointer in pointers:
            with contextlib.suppress(RuntimeError):
                base, size = call(driver.cuMemGetAddressRange, pointer)
                found.setdefault((int(base), int(size)), set()).add(pointer)

    with Current(driver, context):
        look_at(probe.unsafe_buffer_pointer() for probe in probes)
        # An arena that does not grow is all there is.
        if sum(size for _, size in found) < _pool_bytes(device):
            look_at(_live_pointers(device))
    several = [arena for arena, pointers in found.items() if len(pointers) > 1]
    del probes
    return sorted(several, key=lambda arena: -arena[1])


def _pool_bytes(device: jax.Device) -> int:
    try:
        return (device.memory_stats() or {}).get("pool_bytes", 1 << 62)
    except jax.errors.JaxRuntimeError:
        return 1 << 62


def _live_pointers(device: jax.Device) -> Iterator[int]:
    for array in jax.live_arrays():
        # Arrays may be deleted meanwhile, or lie in memory without addresses.
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            for shard in array.addressable_shards:
                if shard.device == device:
                    yield shard.data.unsafe_buffer_pointer()


def export_arena(driver: Any, address: int, kind: Kind) -> int | bytes | None:
    """What stands for an arena, a file the caller's; None: cannot be."""
    try:
        handle = call(driver.cuMemRetainAllocationHandle, address)
    except RuntimeError:
        return None
    try:
        return _export(driver, handle, kind)
    except RuntimeError:
        return None
    finally:
        call(driver.cuMemRelease, handle)


def exportable(driver: Any, address: int) -> bool:
    """Whether an arena can be given to other processes of the host."""
    shared = export_arena(driver, address, Kind.FILE)
    if isinstance(shared, int):
        os.close(shared)
    return shared is not None


def _export(driver: Any, handle: Any, kind: Kind) -> int | bytes:
    shared = call(driver.cuMemExportToShareableHandle, handle, kind.of(driver), 0)
    return int(shared) if kind is Kind.FILE else bytes(shared.data)
