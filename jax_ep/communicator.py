"""Communicator: the ranks along one mesh axis and how they reach each other."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_ep import (
    bootstrap,
    checks,
    fabric,
    node_wire,
    peer_memory,
    reach,
    staging,
    topology,
)
from jax_ep.held import Held
from jax_ep.links import Links

_BACKENDS = ("cuda", "cpu", "xla")
# kMaxRanks in cc/layout.h bounds ranks of a node, and nodes, each.
_MAX_RANKS = 1024
# A wait inside an operation that takes longer says so on stderr.
_WARN_AFTER_S = 30.0
_next_id = 1
_ids_lock = threading.Lock()


class Communicator(Held):
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
      num_nodes: N. A node is ranks that reach each other's memory; rank =
        node * node_size + local index there. Rows cross to a node once.
      node_size: ranks of a node, R / N.
      backend: "cuda" (kernels that store straight into the peers' XLA
        buffers), "cpu" (native host code) or "xla" (plain JAX collectives,
        wherever JAX runs).
      timeout_s: seconds that a rank waits for its peers inside an operation.
      setup_timeout_s: seconds that set-up and close() wait for other processes.
      processes: JAX's process indices of the mesh's devices, ascending.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        axis_name: str,
        *,
        backend: str | None = None,
        num_sms: int | None = None,
        num_channels: int | None = None,
        staging_bytes: int = 16 << 20,
        timeout_s: float = 300.0,
        setup_timeout_s: float = 60.0,
        node_size: int | None = None,
    ):
        """Creates the communicator.

        Args:
          mesh: with Auto or Explicit axes.
          axis_name: one axis of the mesh; at most 96 ranks of a node, 1024 in all.
          backend: "cuda", "cpu" or "xla". None takes cuda where all pairs of
            GPUs can reach each other, cpu on CPU devices, else xla, and warns
            why it fell back.
          num_sms: multiprocessors of a GPU that an operation between ranks
            uses; default: 2 of 11, 24 on an H200. What is local (`permute`,
            `unpermute`), and the one launch in which `moe` dispatches and
            permutes, may use all.
          num_channels: how many at a time exchange staged rows with other
            processes of the host: on CPUs threads of this process (default 2), on
            a GPU blocks of a kernel, at most num_sms (default: as many as
            staging_bytes has room for). Rows inside a process, and rows between
            GPUs that store into each other's memory, need none. Between nodes of
            GPUs: how many chunks of rows have a place at a time, at most 8
            (default 3); see docs/scaling.md.
          staging_bytes: memory through which staged rows come in, for all
            channels and peers together: of each process on CPUs, of each rank on
            GPUs; none where there is one process. Rows of any size and number go
            through; more of it lets senders run ahead further.
          timeout_s: seconds that a rank waits for its peers inside an operation
            before the operation fails: on CPUs with JaxRuntimeError, on a GPU
            with a message and a trap, which also reaches the user as
            JaxRuntimeError and takes the CUDA context with it. So it is longer
            than what one process may do while the others wait, such as compile
            or write a checkpoint. A wait of 30 s is told on stderr, in one line
            that says who waits in which operation for whom.
          setup_timeout_s: seconds that set-up and close() wait for the other
            processes, each time, before they raise RuntimeError.
          node_size: ranks of a node, for tests on one host and to cut nodes
            smaller than they are. None: as set-up finds them: all ranks on
            CPUs; on GPUs the ranks of one host, or of an NVLink domain over several
            hosts where its memory can be shared. Backend "xla" has one node.

        Raises:
          TypeError, ValueError: a bad argument, or one that differs between
            processes.
          RuntimeError: the named backend cannot work here, with the reason; or
            a process did not come.
        """
        self.mesh = mesh
        self.axis_name = axis_name
        self.timeout_s = timeout_s
        self.setup_timeout_s = setup_timeout_s
        self._warn_after_s = _WARN_AFTER_S
        self._num_sms = num_sms
        self._num_channels = num_channels
        self._staging_bytes = staging_bytes
        self._node_size = node_size
        self._check_arguments(backend)
        self.num_ranks = mesh.shape[axis_name]
        self.node_size = self._node_size or self.num_ranks
        self._groups = _groups(mesh, axis_name)
        self._mesh_places = topology.mesh_places(mesh, axis_name)
        self.processes = tuple(sorted({d.process_index for d in mesh.devices.flat}))
        self._memory_bytes = 0
        self._exported: frozenset[int] = frozenset()
        self._links: Links | None = None
        # Where GPUs of several processes are.
        self._places: reach.Places = {}
        # Whether this process's node is an NVLink domain over several hosts.
        self._over_hosts = False
        # Where there are several nodes: this rank's node and its rail.
        self._node: topology.Part | None = None
        self._rail: topology.Part | None = None
        self._peers = self._processes()
        # The processes that this one shares memory with.
        self._near = self._peers
        try:
            with bootstrap.all_or_none(self._peers):
                self._meet(backend)
                release = self._set_up(backend)
        finally:
            if self._links is not None:
                self._links.close()
        self._hold(release)

    def _set_up(self, backend: str | None) -> Callable[[], Any]:
        """Sets self.backend and self.id; returns what releases them."""
        problem: str | None = None
        for choice in [backend] if backend else _candidates(self._groups):
            if choice == "xla":
                break
            problem = self._why_not(choice)
            if problem is None:
                self.backend, self.id = choice, self._agree_on_id(self._peers, choice)
                try:
                    return self._set_up_native()
                except bootstrap.CannotWork as error:
                    problem = str(error)
                    self._node = self._rail = None
                    self._memory_bytes, self._exported = 0, frozenset()
            if backend is not None:
                raise RuntimeError(
                    f"jax_ep.Communicator: backend {choice!r} cannot work here: "
                    f"{problem}"
                )
        if backend is None:
            platforms = sorted(_platforms(self._groups))
            problem = problem or f"no native backend for {platforms} devices"
            warnings.warn(
                "jax_ep.Communicator: falling back to backend 'xla', which is "
                f"slow: {problem}",
                stacklevel=3,
            )
        self.backend, self.id = "xla", self._agree_on_id(self._peers, "xla")
        self.node_size = self.num_ranks
        return lambda: None

    def _processes(self) -> bootstrap.Processes | None:
        """The processes of the mesh, None where this is the only one."""
        if self.processes == (jax.process_index(),):
            return None
        if jax.process_index() not in self.processes:
            raise ValueError(
                f"jax_ep.Communicator: process {jax.process_index()} has no device "
                f"on the mesh, only processes {list(self.processes)} have"
            )
        names = {
            process: f"process {process} ({_ranks_of(process, self._groups)})"
            for process in self.processes
        }
        return bootstrap.Processes(
            self.processes, jax.process_index(), self.setup_timeout_s, names=names
        )

    def _meet(self, backend: str | None) -> None:
        """Meets the other processes, which must have come with the same."""
        if self._peers is None:
            return
        arguments = self._peers.gather("arguments", self._arguments(backend))
        bootstrap.compare_arguments(arguments, self._peers.name)

    def _arguments(self, backend: str | None) -> dict[str, Any]:
        """What every process has to have called this with."""
        return {
            "jax_ep version": _version(),
            "jax version": jax.__version__,
            "axis_name": self.axis_name,
            "mesh": [[str(name), size] for name, size in self.mesh.shape.items()],
            "devices": [device.id for device in self.mesh.devices.flat],
            "backend": backend,
            "num_sms": self._num_sms,
            "num_channels": self._num_channels,
            "staging_bytes": self._staging_bytes,
            "timeout_s": self.timeout_s,
            "setup_timeout_s": self.setup_timeout_s,
            "node_size": self._node_size,
        }

    def _why_not(self, backend: str) -> str | None:
        """Why `backend` cannot serve this mesh; the same on all processes."""
        platform = {"cpu": "cpu", "cuda": "gpu"}[backend]
        if _platforms(self._groups) != {platform}:
            raise RuntimeError(
                f"jax_ep.Communicator: backend {backend!r} needs a mesh of "
                f"{platform} devices, found {sorted(_platforms(self._groups))}"
            )
        if self._peers is None:
            self._check_nodes()
        if backend == "cuda":
            problem = reach.why_not_cuda(self._groups)
        else:
            problem = staging.why_not_host()
        if self._peers is None:
            return problem
        problem = self._connect(backend, problem)
        if problem is None and backend == "cuda":
            assert self._near is not None
            groups = self._node_groups()
            self._places = reach.places(groups, self._near)
            problem = reach.why_not_between(groups, self._places, self._near)
        return problem

    def _connect(self, backend: str, problem: str | None) -> str | None:
        """Finds the nodes and connects the processes that share memory.

        Args:
          backend: of the nodes.
          problem: why it cannot serve this process.

        Returns:
          The problems of all, or which processes cannot reach each other.
        """
        assert self._peers is not None
        with contextlib.ExitStack() as undo:
            links = undo.enter_context(contextlib.closing(Links()))
            try:
                hosts = self._peers.gather(f"backend {backend}", links.host, problem)
            except bootstrap.CannotWork as error:
                return str(error)
            if backend == "cuda":
                self._find_nodes(topology.host_names(hosts))
            self._check_nodes()
            assert self._near is not None
            # Processes of several hosts share memory without sockets.
            near = self._near.part((self._near.me,)) if self._over_hosts else self._near
            problem = links.connect(near, hosts)
            if problem is None and not self._over_hosts:
                undo.pop_all()
                self._links = links
            return problem

    def _find_nodes(self, hosts: dict[int, str]) -> None:
        """Sets node_size, and who is near, from the processes' hosts."""
        assert self._peers is not None
        if len(set(hosts.values())) == 1:
            if self._node_size is None:
                self.node_size = topology.find_node_size(self._groups, hosts)
            return
        mine = fabric.note(reach.local(self._groups))
        nodes, problems = fabric.join(hosts, self._peers.gather("fabrics", mine))
        if problems:
            warnings.warn(
                "jax_ep.Communicator: hosts of one NVLink domain do not count as one "
                f"node: {'; '.join(problems)}",
                stacklevel=6,
            )
        if self._node_size is None:
            self.node_size = topology.find_node_size(self._groups, nodes)
        near = topology.connected(self._node_groups(), self._peers.me)
        self._near = self._peers.part(near)
        self._over_hosts = (
            len({nodes[process] for process in near}) == 1
            and len({hosts[process] for process in near}) > 1
        )

    def _check_nodes(self) -> None:
        where = "jax_ep.Communicator"
        if self.node_size > peer_memory.MAX_RANKS:
            if self.num_nodes == 1:
                raise ValueError(
                    f"{where}: axis {self.axis_name!r} must have at most "
                    f"{peer_memory.MAX_RANKS} devices, found {self.num_ranks}"
                )
            raise ValueError(
                f"{where}: a node must have at most {peer_memory.MAX_RANKS} ranks, "
                f"found {self.node_size}; give a smaller node_size"
            )
        if self.num_nodes > peer_memory.MAX_RANKS:
            raise ValueError(
                f"{where}: there must be at most {peer_memory.MAX_RANKS} nodes, "
                f"found {self.num_nodes} of {self.node_size} ranks"
            )

    def _node_groups(self) -> list[list[jax.Device]]:
        return topology.node_groups(self._groups, self.node_size)

    def _agree_on_id(self, peers: bootstrap.Processes | None, what: str) -> int:
        """A number for the program, equal on all processes and new on each.

        So is the one after it, which rails have. `what` it is for: once in a
        conversation of processes.
        """
        global _next_id
        with _ids_lock:
            mine = _next_id
            if peers is None:
                _next_id = mine + 2
                return mine
            agreed = max(peers.gather(f"id of {what}", mine).values())
            _next_id = agreed + 2
            return agreed

    def _set_up_native(self) -> Callable[[], Any]:
        shared: dict[str, Any] = {
            "mesh_places": self._mesh_places,
            "timeout_s": self.timeout_s,
            "warn_after_s": self._warn_after_s,
            "num_channels": self._num_channels,
            "staging_bytes": self._staging_bytes,
            "processes": self._near,
            "links": self._links,
        }
        with contextlib.ExitStack() as stack:
            if self.num_nodes > 1:
                self._node = self._part(self.id, self.node_size)
                self._rail = self._part(self.id + 1, self.num_nodes)
            if self.backend == "cpu":
                scope = ", inside nodes: ranks are local" if self._node else ""
                host = staging.set_up_host(
                    self.id, self._node_groups(), scope=scope, **shared
                )
                stack.callback(host.release)
                self._memory_bytes = host.memory_bytes
                if self._rail is not None:
                    host = self._set_up_host_rails(shared)
                    stack.callback(host.release)
                    self._memory_bytes += host.memory_bytes
            else:
                gpus = peer_memory.set_up_cuda(
                    self.id, self._node_groups(), num_sms=self._num_sms, **shared
                )
                stack.callback(gpus.release)
                self._memory_bytes = gpus.memory_bytes
                self._exported = gpus.exported
                if self._rail is not None:
                    release = node_wire.set_up_wire(
                        self._rail.id,
                        topology.rail_groups(self._groups, self.node_size),
                        mesh_places=self._mesh_places,
                        node_size=self.node_size,
                        setup_timeout_s=self.setup_timeout_s,
                        timeout_s=self.timeout_s,
                        warn_after_s=self._warn_after_s,
                        processes=self._peers,
                    )
                    stack.callback(release)
            return stack.pop_all().close

    def _set_up_host_rails(self, shared: dict[str, Any]) -> staging.HostStaging:
        assert self._rail is not None
        shared = shared | {"scope": ", between nodes: ranks are nodes"}
        rails = topology.rail_groups(self._groups, self.node_size)
        if self._peers is None:
            return staging.set_up_host(self._rail.id, rails, **shared)
        # Sockets of their own: those of nodes are watched for hang-ups already.
        with contextlib.closing(Links()) as links:
            hosts = self._peers.gather("hosts", links.host)
            problem = links.connect(self._peers, hosts)
            if problem is not None:
                raise bootstrap.CannotWork(problem)
            shared = shared | {"processes": self._peers, "links": links}
            return staging.set_up_host(self._rail.id, rails, **shared)

    def _part(self, identity: int, num_ranks: int) -> topology.Part:
        return topology.Part(
            identity,
            self.backend,
            self.mesh,
            self.axis_name,
            num_ranks,
        )

    def _check_arguments(self, backend: str | None) -> None:
        where = "jax_ep.Communicator"
        mesh, axis_name = self.mesh, self.axis_name
        if not isinstance(mesh, jax.sharding.Mesh):
            raise TypeError(
                f"{where}: mesh must be a jax.sharding.Mesh, found "
                f"{type(mesh).__name__}"
            )
        if axis_name not in mesh.axis_names:
            raise ValueError(
                f"{where}: axis_name must be one of the mesh's axes "
                f"{mesh.axis_names}, found {axis_name!r}"
            )
        if backend is not None and backend not in _BACKENDS:
            raise ValueError(
                f"{where}: backend must be one of {_BACKENDS} or None, found "
                f"{backend!r}"
            )
        if mesh.shape[axis_name] > _MAX_RANKS:
            raise ValueError(
                f"{where}: axis {axis_name!r} must have at most {_MAX_RANKS} devices, "
                f"found {mesh.shape[axis_name]}"
            )
        num_ranks = mesh.shape[axis_name]
        self._node_size = topology.check_node_size(self._node_size, num_ranks)
        for name in ("num_sms", "num_channels"):
            value = getattr(self, f"_{name}")
            count = _as_count(value)
            if value is not None and count is None:
                raise ValueError(
                    f"{where}: {name} must be an integer >= 1 or None, found {value!r}"
                )
            setattr(self, f"_{name}", count)
        staging_bytes = _as_count(self._staging_bytes)
        if staging_bytes is None:
            raise ValueError(
                f"{where}: staging_bytes must be an integer >= 1, found "
                f"{self._staging_bytes!r}"
            )
        self._staging_bytes = staging_bytes
        for name in ("timeout_s", "setup_timeout_s"):
            seconds = getattr(self, name)
            if type(seconds) not in (int, float) or not 0 < seconds < 1e6:
                raise ValueError(
                    f"{where}: {name} must be seconds above 0 and below 1e6, "
                    f"found {seconds!r}"
                )
            setattr(self, name, float(seconds))

    @property
    def num_nodes(self) -> int:
        """N, how many nodes each group has."""
        return self.num_ranks // self.node_size

    def describe(self) -> dict[str, Any]:
        """Who takes part and how bytes go, as a dict; `print(comm)` shows it.

        Returns:
          "backend", "axis_name", "num_ranks", "num_nodes", "node_size", "closed";
          "memory_bytes", what this process holds for communication; and "groups",
          one dict for each coordinate of the other mesh axes: "devices" (JAX's ids) and
          "processes" by rank, and "paths", [rank][rank], how rows go from one to
          the other: "in-process" (straight from buffer to buffer on the host),
          "direct" (GPUs that store into each other's memory; buffers for which XLA
          takes more memory later are staged all the same), "staged" (through
          memory that processes share), "wire" (to another node: over the wire to
          the rank of the same local index there, from it inside the node) or "xla"
          (JAX's collectives).
        """
        return {
            "backend": self.backend,
            "axis_name": self.axis_name,
            "num_ranks": self.num_ranks,
            "num_nodes": self.num_nodes,
            "node_size": self.node_size,
            "closed": self.closed,
            "memory_bytes": 0 if self.closed else self._memory_bytes,
            "groups": [
                {
                    "devices": [device.id for device in devices],
                    "processes": [device.process_index for device in devices],
                    "paths": self._paths(devices),
                }
                for devices in self._groups
            ],
        }

    def _paths(self, devices: list[jax.Device]) -> list[list[str]]:
        return [
            [
                self._path(a, b)
                if i // self.node_size == j // self.node_size
                else "wire"
                for j, b in enumerate(devices)
            ]
            for i, a in enumerate(devices)
        ]

    def _path(self, a: jax.Device, b: jax.Device) -> str:
        inside = a.process_index == b.process_index
        if self.backend == "cpu":
            return "in-process" if inside else "staged"
        if self.backend == "cuda":
            return "direct" if inside or b.id in self._exported else "staged"
        return "xla"

    def __str__(self) -> str:
        about = self.describe()
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        lines = [
            f"{self!r}",
            f"  {self.num_ranks} ranks{nodes} in {len(self.processes)} processes, "
            f"{about['memory_bytes'] / 2**20:.1f} MiB held by this one",
        ]
        for number, group in enumerate(about["groups"]):
            lines.append(f"  group {number}: rank, device, process, paths to rank 0 ..")
            lines += [
                f"    {rank:4} {device:6} {process:4}  {' '.join(paths)}"
                for rank, (device, process, paths) in enumerate(
                    zip(
                        group["devices"],
                        group["processes"],
                        group["paths"],
                        strict=True,
                    )
                )
            ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return (
            f"Communicator(mesh={dict(self.mesh.shape)}, "
            f"axis_name={self.axis_name!r}, backend={self.backend!r}{state})"
        )


def _groups(mesh: jax.sharding.Mesh, axis_name: str) -> list[list[jax.Device]]:
    """Devices by [group][rank]; groups in row-major order of the other axes."""
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis_name), -1)
    return devices.reshape(-1, devices.shape[-1]).tolist()


def _as_count(value: Any) -> int | None:
    count = checks.as_integer(value)
    return count if count is not None and count >= 1 else None


def _version() -> str:
    import jax_ep

    return jax_ep.__version__


def _ranks_of(process: int, groups: list[list[jax.Device]]) -> str:
    """Its ranks in all groups together, as "ranks 2, 3"."""
    ranks = {
        rank
        for devices in groups
        for rank, device in enumerate(devices)
        if device.process_index == process
    }
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, sorted(ranks)))}"


def _candidates(groups: list[list[jax.Device]]) -> list[str]:
    """Native backends for these devices, the best first."""
    for platform, backend in (("gpu", "cuda"), ("cpu", "cpu")):
        if _platforms(groups) == {platform}:
            return [backend]
    return []


def _platforms(groups: list[list[jax.Device]]) -> set[str]:
    return {device.platform for group in groups for device in group}
