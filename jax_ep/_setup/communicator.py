"""Communicator: the ranks along mesh axes and how they reach each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jax_ep._setup import backends, bootstrap, topology
from jax_ep._setup.native_resource import NativeResource
from jax_ep._setup.request import Request


class Communicator(NativeResource):
    """The ranks along one mesh axis or several, set up once, outside jit.

    Eager and collective: every process creates (and closes) its communicators
    in the same order. Several live side by side, on other axes and meshes too.
    On a mesh with further axes there is one group of ranks for each coordinate
    of the others, and only members of a group talk. Nothing is sized by tokens
    or hidden size here.

    Two that are open are equal, and hash alike, where mesh, axes and options are,
    so what was traced with one serves the other. As an attribute of a module or a
    static argument it does not make JAX trace again. `jax_ep.communicator` gives
    the same object for the same arguments.

    Attributes:
      mesh: the jax.sharding.Mesh.
      axis_name: the axis whose devices are the ranks, or a tuple of axes: then
        ranks are row-major over them in the tuple's order, as
        `PartitionSpec(axis_name)` shards and `jax.lax.axis_index` counts.
      num_ranks: R, the axis's size, or the product of their sizes.
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
        axis_name: str | tuple[str, ...],
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
          axis_name: one axis of the mesh, or a tuple of different ones; at most 96
            ranks of a node, 1024 in all.
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
        request = Request.of(
            mesh,
            axis_name,
            backend=backend,
            num_sms=num_sms,
            num_channels=num_channels,
            staging_bytes=staging_bytes,
            timeout_s=timeout_s,
            setup_timeout_s=setup_timeout_s,
            node_size=node_size,
        )
        settings = request.settings
        groups = topology.mesh_groups(mesh, request.axes)
        processes = tuple(sorted({d.process_index for d in mesh.devices.flat}))
        peers = _peers(processes, groups, settings.setup_timeout_s)
        places = topology.mesh_places(mesh, request.axes)
        job = backends.Job(mesh, request.axis_name, groups, places, settings, peers)
        with bootstrap.all_or_none(peers):
            if peers is not None:
                arguments = peers.gather("arguments", _arguments(job, backend))
                bootstrap.compare_arguments(arguments, peers.name)
            made = backends.set_up(job, backend)
        self.mesh = mesh
        self.axis_name = request.axis_name
        self.num_ranks = job.num_ranks
        self.node_size = made.nodes.size
        self.backend = made.backend.name
        self.timeout_s = settings.timeout_s
        self.setup_timeout_s = settings.setup_timeout_s
        self.processes = processes
        self.id = made.id
        self._job, self._made = job, made
        # What operations between nodes ask for.
        self._node, self._rail = made.node, made.rail
        self._num_channels = settings.num_channels
        self._peers = peers
        self._like = request.found(made.backend.name, made.nodes.size)
        self._hold(made.release)

    # An open one is never equal to a closed one: what was traced with that would ask
    # for what it gave back. The hash stays, as containers want.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Communicator):
            return NotImplemented
        return self is other or (
            self._like == other._like
            and self._pid == other._pid
            and not (self.closed or other.closed)
        )

    def __hash__(self) -> int:
        return hash(self._like)

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
            "memory_bytes": 0 if self.closed else self._made.memory_bytes,
            "groups": [
                {
                    "devices": [device.id for device in devices],
                    "processes": [device.process_index for device in devices],
                    "paths": self._paths(devices),
                }
                for devices in self._job.groups
            ],
        }

    def _paths(self, devices: list[jax.Device]) -> list[list[str]]:
        return [
            [
                self._made.backend.path(self._made, a, b)
                if i // self.node_size == j // self.node_size
                else "wire"
                for j, b in enumerate(devices)
            ]
            for i, a in enumerate(devices)
        ]

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


def _peers(
    processes: tuple[int, ...], groups: list[list[jax.Device]], timeout_s: float
) -> bootstrap.Processes | None:
    """The processes of the mesh, None where this is the only one."""
    me = jax.process_index()
    if processes == (me,):
        return None
    if me not in processes:
        raise ValueError(
            f"jax_ep.Communicator: process {me} has no device on the mesh, only "
            f"processes {list(processes)} have"
        )
    names = {
        process: f"process {process} ({_ranks_of(process, groups)})"
        for process in processes
    }
    return bootstrap.Processes(processes, me, timeout_s, names=names)


def _arguments(job: backends.Job, backend: str | None) -> dict[str, Any]:
    """What every process has to have called Communicator with."""
    settings = dataclasses.asdict(job.settings)
    del settings["warn_after_s"]
    return {
        "jax_ep version": _version(),
        "jax version": jax.__version__,
        "axis_name": job.axis_name,
        "mesh": [[str(name), size] for name, size in job.mesh.shape.items()],
        "devices": [device.id for device in job.mesh.devices.flat],
        "backend": backend,
        **settings,
    }


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
