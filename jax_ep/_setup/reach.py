"""Which GPUs reach each other's memory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jax_ep._data import native
from jax_ep._setup import bootstrap, gpu_memory, nvml
from jax_ep._setup.gpu_memory import call

# Of each group of ranks, their devices in order.
Groups = list[list[jax.Device]]
# What tells a GPU from all others: its host, and its bus id there.
Place = tuple[str, str]
Places = dict[int, Place]  # by JAX's id of the device
# Pairs in one message.
_SHOWN = 8


def unsupported_reason(groups: Groups) -> str | None:
    """Says why the CUDA backend cannot serve this process's part of `groups`.

    None where it can. Between processes, `unsupported_between` goes on.
    """
    try:
        native.cuda()
        driver = gpu_memory.driver()
    except (ImportError, RuntimeError) as error:
        return str(error)
    pairs = [(a.local_hardware_id, b.local_hardware_id) for a, b in local_pairs(groups)]
    for kind, missing in pairs_out_of_reach(driver, pairs):
        return f"no {kind} between GPUs {_some(missing)}"
    return None


def places(groups: Groups, processes: bootstrap.Processes) -> Places:
    """Where the GPUs of all processes are. Collective."""
    mine: dict[str, Place] = {}
    with CaughtError() as told:
        driver = gpu_memory.driver()
        for device in local(groups):
            mine[str(device.id)] = _place(driver, device.local_hardware_id)
    found: Places = {}
    for theirs in processes.gather("GPUs", mine, told.problem).values():
        found |= {int(device): tuple(place) for device, place in theirs.items()}
    return found


def unsupported_between(
    groups: Groups, where: Places, processes: bootstrap.Processes
) -> str | None:
    """Says which pairs of different processes cannot reach each other.

    The driver is asked about GPUs that this process sees, NVML about the others of
    this host: it needs no `CUDA_VISIBLE_DEVICES`. Warns where nobody can say.
    Collective; all get the same answer.

    Args:
      groups: of which `unsupported_reason` said nothing.
      where: the `places` of all.
      processes: who takes part.
    """
    problem, asked = None, _Asked([], [], None)
    with CaughtError() as told:
        problem, asked = _ask_between(groups, where)
    try:
        answers = processes.gather(
            "peer access", dataclasses.astuple(asked), told.problem or problem
        )
    except bootstrap.CannotWork as error:
        return str(error)
    # Both ends of a pair ask, and one of them may be told.
    known, unknown = (
        {tuple(pair) for its in answers.values() for pair in its[i]} for i in (0, 1)
    )
    if unknown - known:
        ids = {place: device for device, place in sorted(where.items(), reverse=True)}
        pairs = sorted((ids[h, a], ids[h, b]) for h, a, b in unknown - known)
        reasons = sorted({its[2] for its in answers.values() if its[2]})
        warnings.warn(
            "jax_ep.Communicator: nobody can say whether NVLink joins devices "
            f"{_some(pairs)}, without which rows may come out wrong: "
            f"{'; '.join(reasons)}",
            stacklevel=6,
        )
    return None


def why_torn(groups: Groups, where: Places) -> str | None:
    """Says between which GPUs of this process and others 128 bytes may arrive apart.

    Over NVLink they arrive together. `where` may lack what this process sees.
    """
    driver = gpu_memory.driver()
    pairs = _pairs_of_host(driver, groups, where)
    links, _ = nvml.links(list(pairs))
    missing = [pairs[pair] for pair, link in links.items() if not link.nvlink]
    return f"no NVLink between devices {_some(missing)}" if missing else None


class CaughtError(contextlib.AbstractContextManager):
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


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What one process could find out about its pairs with others.

    Attributes:
      known: pairs that are well, as (host, bus id, bus id).
      unknown: those of which it was not told.
      reason: why.
    """

    known: list[tuple[str, str, str]]
    unknown: list[tuple[str, str, str]]
    reason: str | None


def _ask_between(groups: Groups, where: Places) -> tuple[str | None, _Asked]:
    """What pairs with other processes lack, and what is known of them."""
    driver = gpu_memory.driver()
    ordinals = {
        gpu_memory.bus_id(driver, ordinal): ordinal
        for ordinal in range(call(driver.cuDeviceGetCount))
    }
    mine = {device.id for device in local(groups)}
    seen: dict[tuple[int, int], tuple[int, int]] = {}
    hidden: dict[nvml.Pair, tuple[int, int]] = {}
    pairs = _pairs_of_host(driver, groups, where)
    for (a, b), ids in pairs.items():
        if ids[1] in mine:
            continue  # asked about by `unsupported_reason`
        if b in ordinals:
            seen[ordinals[a], ordinals[b]] = ids
        else:
            hidden[a, b] = ids
    nothing = _Asked([], [], None)
    for kind, missing in pairs_out_of_reach(driver, list(seen)):
        lacking = _some([seen[pair] for pair in missing])
        return f"no {kind} between devices {lacking}", nothing
    links, reason = nvml.links(list(hidden))
    if missing := [hidden[pair] for pair, link in links.items() if not link.atomics]:
        kinds = "NVLink and no atomic operations"
        return f"no {kinds} between devices {_some(missing)}", nothing
    host, unknown = _host(), hidden.keys() - links.keys()
    return None, _Asked(
        [(host, min(pair), max(pair)) for pair in pairs.keys() - unknown],
        [(host, min(pair), max(pair)) for pair in unknown],
        reason,
    )


def _pairs_of_host(
    driver: Any, groups: Groups, where: Places
) -> dict[nvml.Pair, tuple[int, int]]:
    """Ids of a device here and another of its group, by their GPUs on this host.

    Several processes may share a GPU: that is no pair.
    """
    host = _host()
    known = where | {
        device.id: _place(driver, device.local_hardware_id) for device in local(groups)
    }
    pairs: dict[nvml.Pair, tuple[int, int]] = {}
    for group in groups:
        for a, b in itertools.permutations(group, 2):
            if not is_here(a) or b.id not in known or known[b.id][0] != host:
                continue
            pair = (known[a.id][1], known[b.id][1])
            if pair[0] != pair[1]:
                pairs[pair] = (a.id, b.id)
    return pairs


def _some(pairs: Sequence[tuple[int, int]]) -> str:
    """Pairs as errors show them, not more than a reader wants."""
    shown = ", ".join(f"({a}, {b})" for a, b in pairs[:_SHOWN])
    return shown + (f" and {len(pairs) - _SHOWN} more" if len(pairs) > _SHOWN else "")


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


def _place(driver: Any, ordinal: int) -> Place:
    return _host(), gpu_memory.bus_id(driver, ordinal)


def _host() -> str:
    identity = bootstrap.host_identity()
    return identity["boot_id"] or identity["host"]


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
