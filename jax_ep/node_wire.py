"""Set-up of the wire between nodes: NCCL, the library that JAX has loaded."""

from __future__ import annotations

import importlib.util
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import jax

from jax_ep import bootstrap, native
from jax_ep.peer_memory import CannotWork
from jax_ep.topology import MeshPlaces

_Groups = list[list[jax.Device]]


def set_up_wire(
    identity: int,
    rails: _Groups,
    *,
    mesh_places: MeshPlaces,
    node_size: int,
    setup_timeout_s: float,
    timeout_s: float,
    warn_after_s: float,
    processes: bootstrap.Processes | None,
) -> Callable[[], Any]:
    """Connects the rails with ranks here. Collective where there are `processes`.

    Args:
      identity: of the entry in the native registry.
      rails: devices by [rail][node], rails of a group one after the other.
      mesh_places: of all of them.
      node_size: rails of a group.
      setup_timeout_s: how long to wait for the others here.
      timeout_s: and in each transfer.
      warn_after_s: a transfer that takes longer says so.
      processes: all of the communicator.

    Returns:
      What releases the rails.

    Raises:
      CannotWork: no NCCL, or it cannot connect; the same on all processes.
    """
    module = native.cuda()
    version, problem = module.load_nccl(_files())
    _agree(processes, "NCCL", problem or None)
    if processes is not None:
        versions = processes.gather("NCCL's version", version)
        if len(set(versions.values())) > 1:
            found = ", ".join(
                f"{processes.name(p)} has {module.nccl_version_name(v)}"
                for p, v in versions.items()
            )
            problem = f"NCCL must be the same everywhere: {found}"
            raise CannotWork(problem)
    names = _name_rails(module, rails, processes)
    places = [
        (
            device.local_hardware_id,
            node * node_size + rail % node_size,
            node,
            len(devices),
            mesh_places[device.id],
            names[rail],
        )
        for rail, devices in enumerate(rails)
        for node, device in enumerate(devices)
        if device.process_index == jax.process_index()
    ]
    problem = _in_time(
        lambda: module.connect_rails(
            identity, places, setup_timeout_s, timeout_s, warn_after_s
        ),
        2 * setup_timeout_s,
    )
    if problem:
        name = module.nccl_version_name(version)
        problem = f"{problem} (NCCL {name}; NCCL_DEBUG=INFO tells more)"
    try:
        _agree(processes, "rails", problem)
    except CannotWork:
        module.release_rails(identity)
        raise
    return lambda: module.release_rails(identity)


def _files() -> list[str]:
    """Where NCCL lies that JAX's wheels bring along."""
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else spec.submodule_search_locations or []
    files = [pathlib.Path(place, "nccl/lib/libnccl.so.2") for place in places]
    return [str(file) for file in files if file.exists()]


def _agree(
    processes: bootstrap.Processes | None, what: str, problem: str | None
) -> None:
    if processes is not None:
        problem = processes.agree(what, problem)
    if problem:
        raise CannotWork(problem)


def _name_rails(
    module: Any, rails: _Groups, processes: bootstrap.Processes | None
) -> list[bytes]:
    """NCCL's unique id of each rail, made where its first rank is."""
    mine = {
        str(rail): module.new_rail()
        for rail, devices in enumerate(rails)
        if devices[0].process_index == jax.process_index()
    }
    lacking = None if all(mine.values()) else "NCCL made no unique id"
    _agree(processes, "unique ids", lacking)
    if processes is None:
        return [mine[str(rail)] for rail in range(len(rails))]
    notes = {rail: name.hex() for rail, name in mine.items()}
    names: dict[str, str] = {}
    for theirs in processes.gather("names of rails", notes).values():
        names |= theirs
    return [bytes.fromhex(names[str(rail)]) for rail in range(len(rails))]


def _in_time(connect: Callable[[], str], seconds: float) -> str | None:
    """What went wrong, else None. NCCL itself waits for a lost rank for ever."""
    result: list[str] = []

    def run() -> None:
        try:
            result.append(connect())
        except Exception as error:  # shown by the caller, on all processes
            result.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, daemon=True, name="jax_ep rails")
    try:
        thread.start()
    except RuntimeError as error:  # a limit on threads
        return str(error)
    thread.join(seconds)
    if not result:
        return f"NCCL did not connect the nodes within {seconds:.1f} s"
    return result[0] or None
