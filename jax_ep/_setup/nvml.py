"""What NVML knows of GPUs, also of those that this process does not see."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# nvmlGpuP2PCapsIndex_t and nvmlGpuP2PStatus_t. The bindings have renamed them.
_NVLINK, _ATOMICS = 2, 3
_OK = 0

Pair = tuple[str, str]  # PCI bus ids


@dataclasses.dataclass(frozen=True)
class Link:
    """How one GPU reaches another.

    Attributes:
      nvlink: over NVLink alone.
      atomics: with native atomic operations.
    """

    nvlink: bool
    atomics: bool


def bindings() -> Any | None:
    """cuda.bindings.nvml, from 12.9.6 or 13.2 on; None before."""
    try:
        from cuda.bindings import nvml
    except ImportError:
        return None
    return nvml


@contextlib.contextmanager
def session(nvml: Any, purpose: str) -> Iterator[None]:
    """NVML for a block; RuntimeError where it cannot do what it is asked for."""
    try:
        nvml.init_v2()
        try:
            yield
        finally:
            nvml.shutdown()
    except (nvml.NvmlError, AttributeError) as error:  # or bindings that are older
        reason = f"NVML cannot {purpose}: {error}"
        raise RuntimeError(reason) from error


def links(pairs: Sequence[Pair]) -> tuple[Mapping[Pair, Link], str | None]:
    """How GPUs of this host are joined, whoever sees them.

    Args:
      pairs: of bus ids.

    Returns:
      The link of each pair that NVML knows, and why others are missing.
    """
    found: dict[Pair, Link] = {}
    if not pairs:
        return found, None
    nvml = bindings()
    if nvml is None:
        return found, "NVML can be asked of cuda-bindings from 12.9.6 or 13.2 on"
    problem: str | None = None
    try:
        with session(nvml, "say how GPUs are joined"):
            for pair in pairs:
                try:
                    found[pair] = _link(nvml, *pair)
                except nvml.NvmlError as error:  # one that a container hides, say
                    problem = f"NVML knows nothing of {' and '.join(pair)}: {error}"
    except RuntimeError as error:
        problem = str(error)
    return found, problem


def _link(nvml: Any, a: str, b: str) -> Link:
    handles = [nvml.device_get_handle_by_pci_bus_id_v2(bus) for bus in (a, b)]
    nvlink, atomics = (
        int(nvml.device_get_p2p_status(*handles, asked)) == _OK
        for asked in (_NVLINK, _ATOMICS)
    )
    # NVLink has them.
    return Link(nvlink, nvlink or atomics)
