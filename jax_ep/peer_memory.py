"""Control memory of the CUDA backend: allocated, zeroed, reachable by peers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jax_ep import native

# kMaxRanks in cc/layout.h: ranks of one NVLink domain.
MAX_RANKS = 64

_Groups = list[list[jax.Device]]


def why_not_cuda(groups: _Groups) -> str | None:
    """Says why the CUDA backend cannot serve `groups`; None where it can."""
    try:
        native.cuda()
        driver = _driver()
    except (ImportError, RuntimeError) as error:
        return str(error)
    pairs = [(a.local_hardware_id, b.local_hardware_id) for a, b in _pairs(groups)]
    for kind, missing in pairs_out_of_reach(driver, pairs):
        return f"no {kind} between GPUs {', '.join(map(str, missing))}"
    return None


def pairs_out_of_reach(
    driver: Any, pairs: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """What some pairs of GPUs lack, and those pairs; nothing where all is well.

    Args:
      driver: cuda.bindings.driver.
      pairs: of ordinals; access is asked for from the first to the second.
    """
    attribute = driver.CUdevice_P2PAttribute
    for kind, wanted in (
        ("peer access", attribute.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED),
        # A plan adds to its peers' counters, which needs atomics over the link.
        (
            "atomic operations",
            attribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
        ),
    ):
        missing = [
            pair
            for pair in pairs
            if not _call(
                driver.cuDeviceGetP2PAttribute,
                wanted,
                *(_call(driver.cuDeviceGet, ordinal) for ordinal in pair),
            )
        ]
        if missing:
            yield kind, missing


def set_up_cuda(
    identity: int, groups: _Groups, *, num_sms: int | None, timeout_s: float
) -> Callable[[], Any]:
    """Sets up the CUDA backend; returns the function that releases it.

    For groups of which `why_not_cuda` said nothing.

    Raises:
      RuntimeError: a call of the driver or the self-test failed.
    """
    module, driver = native.cuda(), _driver()
    contexts = {
        ordinal: _call(
            driver.cuDevicePrimaryCtxRetain, _call(driver.cuDeviceGet, ordinal)
        )
        for ordinal in {d.local_hardware_id for group in groups for d in group}
    }
    for ordinal in contexts:
        # Also loads every kernel: loading one later would dead-lock behind a
        # kernel that waits for it.
        failure = module.self_test(ordinal)
        if failure:
            raise RuntimeError(
                f"jax_ep.Communicator: backend 'cuda' cannot work here: {failure}"
            )
    for a, b in _pairs(groups):
        _enable_peer_access(
            driver, contexts[a.local_hardware_id], contexts[b.local_hardware_id]
        )
    places: list[tuple[int, int, int, int]] = []
    try:
        for group, devices in enumerate(groups):
            for rank, device in enumerate(devices):
                ordinal = device.local_hardware_id
                control = _allocate_zeroed(
                    driver, contexts[ordinal], module.control_bytes(len(devices))
                )
                places.append((ordinal, group, rank, control))
    except RuntimeError:
        for *_, control in places:
            driver.cuMemFree(control)
        raise
    # From here on the native side owns the control memory: the last of the
    # communicator and its executables frees it.
    module.create_communicator(
        identity, places, len(groups[0]), num_sms or 0, timeout_s
    )
    return lambda: module.release_communicator(identity)


def control_bytes(groups: _Groups) -> int:
    """Control memory on all local GPUs together, for the communicator's groups."""
    here = jax.process_index()
    return sum(
        native.cuda().control_bytes(len(devices))
        for devices in groups
        for device in devices
        if device.process_index == here
    )


def _pairs(groups: _Groups) -> Iterator[tuple[jax.Device, jax.Device]]:
    for group in groups:
        yield from itertools.permutations(group, 2)


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError(
            "jax_ep: the CUDA backend needs cuda-python: pip install 'jax_ep[cuda]'"
        ) from error
    _call(driver.cuInit, 0)
    return driver


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a driver function; returns its result or raises RuntimeError."""
    status, *results = function(*args)
    if status.value != 0:
        raise RuntimeError(f"jax_ep: {function.__name__} failed: {status.name}")
    return results[0] if len(results) == 1 else None


class _Current:
    """Makes a context current for a block."""

    def __init__(self, driver: Any, context: Any):
        self._driver = driver
        self._context = context

    def __enter__(self) -> None:
        _call(self._driver.cuCtxPushCurrent, self._context)

    def __exit__(self, *exc_info: object) -> None:
        _call(self._driver.cuCtxPopCurrent)


def _enable_peer_access(driver: Any, context: Any, peer: Any) -> None:
    with _Current(driver, context):
        (status,) = driver.cuCtxEnablePeerAccess(peer, 0)
    # XLA may have been here first.
    enabled = driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
    if status.value not in (0, enabled.value):
        raise RuntimeError(f"jax_ep: cuCtxEnablePeerAccess failed: {status.name}")


def _allocate_zeroed(driver: Any, context: Any, size: int) -> int:
    with _Current(driver, context):
        pointer = _call(driver.cuMemAlloc, size)
        _call(driver.cuMemsetD8, pointer, 0, size)
        _call(driver.cuCtxSynchronize)
    return int(pointer)
