"""NVLink domains over several hosts, whose GPUs reach each other's memory.

There memory is given to other processes by fabric handles: words that may travel in
any way, also to another host. The driver takes one only from processes of the same
IMEX domain that may open the same channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jax_ep._setup import gpu_memory, nvml
from jax_ep._setup.gpu_memory import call

_CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"


def note(devices: Sequence[jax.Device]) -> dict[str, str]:
    """What a process tells the others about its GPUs.

    Returns:
      "domain", equal where GPUs of two processes are in one NVLink domain, else
      empty; "problem", why memory cannot be shared there, else empty.
    """
    driver = gpu_memory.driver()
    domains, problem = set(), ""
    try:
        for device in devices:
            domains.add(domain(driver, device.local_hardware_id))
        if domains != {""}:
            problem = next(
                filter(None, (why_not(driver, d.local_hardware_id) for d in devices)),
                "",
            )
    except RuntimeError as error:
        problem = str(error)
    if len(domains) > 1:
        problem = f"its GPUs are in several domains: {', '.join(sorted(domains))}"
    return {"domain": max(domains, default=""), "problem": problem}


def domain(driver: Any, ordinal: int) -> str:
    """What tells the NVLink domain of a GPU from others; empty: inside one host.

    Raises:
      RuntimeError: it cannot be asked for.
    """
    device = call(driver.cuDeviceGet, ordinal)
    if not _has_handles(driver, device):
        return ""
    module = nvml.bindings()
    if module is None:
        if why_not(driver, ordinal):
            return ""  # nothing to share by
        reason = (
            "whether GPUs of other hosts are in its NVLink domain can be asked of "
            "cuda-bindings from 12.9.6 or 13.2 on"
        )
        raise RuntimeError(reason)
    with nvml.session(module, "name the NVLink domain"):
        bus = gpu_memory.bus_id(driver, ordinal)
        found = module.device_get_gpu_fabric_info_v(
            module.device_get_handle_by_pci_bus_id_v2(bus)
        )
    name = bytes(found.cluster_uuid)
    # Where NVLink ends at the host, it has no name.
    if found.state != module.GpuFabricState.COMPLETED or not any(name):
        return ""
    return f"{name.hex()}.{found.clique_id}"


def why_not(driver: Any, ordinal: int) -> str | None:
    """Says why memory of a GPU cannot be shared by fabric handles; None: it can."""
    device = call(driver.cuDeviceGet, ordinal)
    if not _has_handles(driver, device):
        return f"GPU {ordinal} has no fabric handles"
    context = call(driver.cuDevicePrimaryCtxRetain, device)
    holdings = gpu_memory.Holdings(driver, {ordinal: context})
    try:
        holdings.allocate_shared(ordinal, 1, [ordinal], gpu_memory.Kind.FABRIC)
    except RuntimeError as error:
        return f"{error}; may this user open {_CHANNEL}?"
    finally:
        holdings.release()
    return None


def _has_handles(driver: Any, device: Any) -> bool:
    attribute = driver.CUdevice_attribute
    wanted = attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
    return bool(call(driver.cuDeviceGetAttribute, wanted, device))


def join(
    hosts: Mapping[int, str], notes: Mapping[int, Mapping[str, str]]
) -> tuple[dict[int, str], list[str]]:
    """Makes one of hosts that are in one NVLink domain and share memory there.

    Args:
      hosts: what tells hosts apart, by process.
      notes: each process's `note`.

    Returns:
      What tells nodes apart, by process; and in words which domains did not count,
      and why.
    """
    members: dict[str, list[int]] = {}
    for process, its in notes.items():
        if its["domain"]:
            members.setdefault(its["domain"], []).append(process)
    names = dict(hosts)
    problems = [
        f"process {process}: {its['problem']}"
        for process, its in sorted(notes.items())
        if its["problem"] and not its["domain"]
    ]
    for name, processes in sorted(members.items()):
        found = [
            f"process {process}: {notes[process]['problem']}"
            for process in sorted(processes)
            if notes[process]["problem"]
        ]
        if len({hosts[process] for process in processes}) == 1:
            continue
        problems += found
        if not found:
            names |= dict.fromkeys(processes, f"NVLink domain {name}")
    return names, problems
