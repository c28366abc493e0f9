"""Communicator: the ranks along one mesh axis and how they reach each other."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_ep import native, peer_memory

_BACKENDS = ("cuda", "cpu", "xla")
# Equal on all processes: communicators are created in the same order.
_ids = itertools.count(1)
_ids_lock = threading.Lock()


class Communicator:
    """The ranks along one mesh axis, set up once, outside jit.

    Eager and collective: every process creates (and closes) its communicators
    in the same order. Several live side by side, on other axes and meshes too.
    On a mesh with further axes there is one group of ranks for each coordinate
    of the others, and only members of a group talk. Nothing is sized by tokens
    or hidden size here.

    Attributes:
      mesh: the jax.sharding.Mesh.
      axis_name: the axis whose devices are the ranks.
      num_ranks: R, the axis's size.
      backend: "cuda" (kernels that store straight into the peers' XLA
        buffers), "cpu" (native host code) or "xla" (plain JAX collectives,
        wherever JAX runs).
      timeout_s: seconds that a rank waits for its peers inside an operation.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        axis_name: str,
        *,
        backend: str | None = None,
        num_sms: int | None = None,
        timeout_s: float = 30.0,
    ):
        """Creates the communicator.

        Args:
          mesh: with Auto or Explicit axes.
          axis_name: one axis of the mesh, of at most 64 devices.
          backend: "cuda", "cpu" or "xla". None takes cuda where all pairs of
            GPUs can reach each other, cpu on CPU devices, else xla, and warns
            why it fell back.
          num_sms: multiprocessors that one CUDA operation uses. Default: what
            fills the link, see docs/design.md.
          timeout_s: how long a rank waits for its peers inside an operation
            before the operation fails: on CPU with JaxRuntimeError, on a GPU
            with a message and a trap, which also reaches the user as
            JaxRuntimeError.

        Raises:
          TypeError, ValueError: a bad argument.
          RuntimeError: the named backend cannot work here, with the reason.
        """
        _check_arguments(mesh, axis_name, backend, num_sms, timeout_s)
        self.mesh = mesh
        self.axis_name = axis_name
        self.num_ranks = mesh.shape[axis_name]
        self.timeout_s = float(timeout_s)
        self._groups = _groups(mesh, axis_name)
        self.backend = backend or _choose_backend(self._groups)
        with _ids_lock:
            self.id = next(_ids)
        self._release: Callable[[], Any] = lambda: None
        if self.backend == "cpu":
            self._release = self._set_up_host()
        elif self.backend == "cuda":
            _require_platform("cuda", "gpu", self._groups)
            self._release = peer_memory.set_up_cuda(
                self.id, self._groups, num_sms=num_sms, timeout_s=self.timeout_s
            )
        # Runs once: on close(), or when the last reference goes.
        self._finalizer = weakref.finalize(self, self._release)
        # At exit the process takes everything with it.
        self._finalizer.atexit = False

    def _set_up_host(self) -> Callable[[], Any]:
        _require_platform("cpu", "cpu", self._groups)
        module = native.host()
        places = [
            (device.id, group, rank)
            for group, devices in enumerate(self._groups)
            for rank, device in enumerate(devices)
        ]
        module.create_communicator(self.id, places, self.num_ranks, self.timeout_s)
        identity = self.id
        return lambda: module.release_communicator(identity)

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Gives back what the communicator holds. Collective and idempotent.

        Safe with executables still alive: each holds on to what it needs, and
        the last holder frees it.
        """
        self._finalizer()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return (
            f"Communicator(mesh={dict(self.mesh.shape)}, "
            f"axis_name={self.axis_name!r}, backend={self.backend!r}{state})"
        )


def _check_arguments(mesh, axis_name, backend, num_sms, timeout_s) -> None:
    where = "jax_ep.Communicator"
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(
            f"{where}: mesh must be a jax.sharding.Mesh, found {type(mesh).__name__}"
        )
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"{where}: axis_name must be one of the mesh's axes "
            f"{mesh.axis_names}, found {axis_name!r}"
        )
    if backend is not None and backend not in _BACKENDS:
        raise ValueError(
            f"{where}: backend must be one of {_BACKENDS} or None, found {backend!r}"
        )
    if mesh.shape[axis_name] > peer_memory.MAX_RANKS:
        raise ValueError(
            f"{where}: axis {axis_name!r} must have at most "
            f"{peer_memory.MAX_RANKS} devices, found {mesh.shape[axis_name]}"
        )
    if num_sms is not None and (type(num_sms) is not int or num_sms < 1):
        raise ValueError(
            f"{where}: num_sms must be an integer >= 1 or None, found {num_sms!r}"
        )
    if type(timeout_s) not in (int, float) or not 0 < timeout_s < 1e6:
        raise ValueError(
            f"{where}: timeout_s must be seconds above 0 and below 1e6, "
            f"found {timeout_s!r}"
        )


def _groups(mesh: jax.sharding.Mesh, axis_name: str) -> list[list[jax.Device]]:
    """Devices by [group][rank]; groups in row-major order of the other axes."""
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis_name), -1)
    return devices.reshape(-1, devices.shape[-1]).tolist()


def _choose_backend(groups: list[list[jax.Device]]) -> str:
    _require_one_process(groups)
    platforms = _platforms(groups)
    if platforms == {"cpu"}:
        return "cpu"
    if platforms == {"gpu"}:
        problem = peer_memory.why_not_cuda(groups)
        if problem is None:
            return "cuda"
    else:
        problem = f"no native backend for {sorted(platforms)} devices"
    warnings.warn(
        f"jax_ep.Communicator: falling back to backend 'xla', which is slow: {problem}",
        stacklevel=3,
    )
    return "xla"


def _platforms(groups: list[list[jax.Device]]) -> set[str]:
    return {device.platform for group in groups for device in group}


def _require_one_process(groups: list[list[jax.Device]]) -> None:
    processes = {device.process_index for group in groups for device in group}
    if processes != {jax.process_index()}:
        raise RuntimeError(
            "jax_ep.Communicator: the native backends need all devices of the "
            f"mesh in this process ({jax.process_index()}), found processes "
            f"{sorted(processes)}; use backend='xla'"
        )


def _require_platform(backend: str, platform: str, groups) -> None:
    _require_one_process(groups)
    if _platforms(groups) != {platform}:
        raise RuntimeError(
            f"jax_ep.Communicator: backend {backend!r} needs a mesh of "
            f"{platform} devices, found {sorted(_platforms(groups))}"
        )
