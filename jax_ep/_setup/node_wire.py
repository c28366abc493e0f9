"""Set-up of the wire between nodes: NCCL, the library that JAX has loaded."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import jax

from jax_ep._data import native
from jax_ep._setup import bootstrap
from jax_ep._setup.bootstrap import CannotWork
from jax_ep._setup.topology import MeshPlaces

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
    versions = _gather(processes, "NCCL", version, problem or None)
    if len(set(versions.values())) > 1:
        assert processes is not None
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
    with contextlib.ExitStack() as undo:
        attempt = _Attempt(
            lambda: module.connect_rails(
                identity, places, setup_timeout_s, timeout_s, warn_after_s
            ),
            lambda: module.release_rails(identity),
        )
        undo.callback(attempt.give_back)
        problem = attempt.wait(2 * setup_timeout_s)
        if problem:
            name = module.nccl_version_name(version)
            problem = f"{problem} (NCCL {name}; NCCL_DEBUG=INFO tells more)"
        _gather(processes, "rails", None, problem)
        return undo.pop_all().close


def _files() -> list[str]:
    """Where NCCL lies that JAX's wheels bring along."""
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else spec.submodule_search_locations or []
    files = [pathlib.Path(place, "nccl/lib/libnccl.so.2") for place in places]
    return [str(file) for file in files if file.exists()]


def _gather(
    processes: bootstrap.Processes | None, what: str, value: Any, problem: str | None
) -> dict[int, Any]:
    """As `Processes.gather`, for one process as well."""
    if processes is not None:
        return processes.gather(what, value, problem)
    if problem:
        raise CannotWork(problem)
    return {jax.process_index(): value}


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
    notes = {rail: name.hex() for rail, name in mine.items()}
    names: dict[str, str] = {}
    for theirs in _gather(processes, "names of rails", notes, lacking).values():
        names |= theirs
    return [bytes.fromhex(names[str(rail)]) for rail in range(len(rails))]


class _Attempt:
    """Connecting in a thread: NCCL itself waits for a lost rank for ever."""

    def __init__(self, connect: Callable[[], str], release: Callable[[], Any]):
        """Begins.

        Args:
          connect: says what went wrong, empty: nothing.
          release: gives back what it made.
        """
        self._connect, self._release = connect, release
        self._lock = threading.Lock()
        self._has_ended = self._is_over = False
        self._problem: str | None = None
        self._thread = threading.Thread(
            target=self._run, daemon=True, name="jax_ep rails"
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # a limit on threads
            self._has_ended, self._problem = True, str(error)

    def wait(self, seconds: float) -> str | None:
        """What went wrong, else None."""
        if not self._has_ended:
            self._thread.join(seconds)
        with self._lock:
            if self._has_ended:
                return self._problem
        return f"NCCL did not connect the nodes within {seconds:.1f} s"

    def give_back(self) -> None:
        """What was connected, or will be: a thread that is late does it itself."""
        with self._lock:
            self._is_over = True
            if not self._has_ended:
                return
        self._release()

    def _run(self) -> None:
        try:
            problem = self._connect() or None
        except Exception as error:  # shown by the caller, on all processes
            problem = f"{type(error).__name__}: {error}"
        with self._lock:
            self._has_ended, self._problem = True, problem
            if not self._is_over:
                return
        self._release()
