"""Which GPUs reach each other's memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jax_ep import bootstrap, gpu_memory, native
from jax_ep.gpu_memory import call

# Of each group of ranks, their devices in order.
Groups = list[list[jax.Device]]


def why_not_cuda(groups: Groups) -> str | None:
    """Says why the CUDA backend cannot serve this process's part of `groups`.

    None where it can. Between processes, `why_not_between` goes on.
    """
    try:
        native.cuda()
        driver = gpu_memory.driver()
    except (ImportError, RuntimeError) as error:
        return str(error)
    pairs = [(a.local_hardware_id, b.local_hardware_id) for a, b in local_pairs(groups)]
    for kind, missing in pairs_out_of_reach(driver, pairs):
        return f"no {kind} between GPUs {', '.join(map(str, missing))}"
    return None


def why_not_between(groups: Groups, processes: bootstrap.Processes) -> str | None:
    """Says which pairs of different processes cannot reach each other.

    Collective; all get the same answer. A GPU that this process does not see
    cannot be asked about: set_up_cuda shows whether its memory can be mapped.
    """
    driver = gpu_memory.driver()  # `why_not_cuda` has called it before
    places: dict[str, str] = {}
    problem: str | None = None
    with Told() as told:
        for device in local(groups):
            places[str(device.id)] = _place(driver, device.local_hardware_id)
    for theirs in processes.gather("GPUs", places).values():
        places.update(theirs)
    with told:
        problem = _remote_pairs_out_of_reach(driver, groups, places)
    return processes.agree("peer access", told.problem or problem)


class Told(contextlib.AbstractContextManager):
    """Keeps an error of its block in words, to tell the other processes.

    Attributes:
      problem: the first one.
    """

    def __init__(self) -> None:
        """Begins without a problem."""
        self.problem: str | None = None

    def __exit__(self, kind, error, _) -> bool:
        if not isinstance(error, Exception):
            return False
        expected = isinstance(error, (RuntimeError, OSError))
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        self.problem = self.problem or text
        return True


def _remote_pairs_out_of_reach(
    driver: Any, groups: Groups, places: Mapping[str, str]
) -> str | None:
    ordinals = {
        _place(driver, ordinal): ordinal
        for ordinal in range(call(driver.cuDeviceGetCount))
    }
    names: dict[tuple[int, int], tuple[int, int]] = {}
    for a, b in itertools.chain.from_iterable(
        itertools.product(group, repeat=2) for group in groups
    ):
        if not is_here(a) or is_here(b):
            continue
        theirs = ordinals.get(places.get(str(b.id), ""))
        # Several processes may share a GPU.
        if theirs is not None and theirs != a.local_hardware_id:
            names[a.local_hardware_id, theirs] = (a.id, b.id)
    for kind, missing in pairs_out_of_reach(driver, list(names)):
        pairs = ", ".join(str(names[pair]) for pair in missing)
        return f"no {kind} between devices {pairs}"
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
            if not call(
                driver.cuDeviceGetP2PAttribute,
                wanted,
                *(call(driver.cuDeviceGet, ordinal) for ordinal in pair),
            )
        ]
        if missing:
            yield kind, missing


def _place(driver: Any, ordinal: int) -> str:
    """What tells a GPU from all others, also from those of other hosts."""
    host = bootstrap.host_identity()
    return f"{host['boot_id'] or host['host']} {gpu_memory.bus_id(driver, ordinal)}"


def is_here(device: jax.Device) -> bool:
    """Whether it is a device of this process."""
    return device.process_index == jax.process_index()


def local(groups: Groups) -> list[jax.Device]:
    """The devices of this process."""
    return [d for group in groups for d in group if is_here(d)]


def local_pairs(groups: Groups) -> Iterator[tuple[jax.Device, jax.Device]]:
    """Pairs of GPUs of this process."""
    for group in groups:
        yield from itertools.permutations(filter(is_here, group), 2)
