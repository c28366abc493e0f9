"""What a communicator runs on: "cuda", "cpu" or "xla", and how each is set up."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax

from jax_ep._data import limits
from jax_ep._data.ranks import Part
from jax_ep._setup import (
    bootstrap,
    fabric,
    node_wire,
    peer_memory,
    reach,
    staging,
    topology,
)
from jax_ep._setup.links import Links
from jax_ep._setup.native_resource import Memory
from jax_ep._setup.topology import MeshPlaces

_next_id = 1
_ids_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Settings:
    """Arguments of a Communicator that say how it works, checked."""

    num_sms: int | None
    num_channels: int | None
    staging_bytes: int
    timeout_s: float
    setup_timeout_s: float
    warn_after_s: float
    node_size: int | None


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be set up.

    Attributes:
      mesh: the communicator's.
      axis_name: the communicator's.
      groups: devices by [group][rank].
      mesh_places: of all of them.
      settings: as the communicator was asked for.
      peers: the processes of the mesh; None where this is the only one.
    """

    mesh: jax.sharding.Mesh
    axis_name: str | tuple[str, ...]
    groups: reach.Groups
    mesh_places: MeshPlaces
    settings: Settings
    peers: bootstrap.Processes | None

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.groups[0])

    @property
    def platforms(self) -> set[str]:
        """Of the devices."""
        return {device.platform for group in self.groups for device in group}


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Nodes of ranks that reach each other's memory.

    Attributes:
      size: ranks of a node.
      near: the processes that this one shares memory with, itself among them; None
        where there is one process.
      over_hosts: whether this process's node is an NVLink domain over several hosts.
    """

    size: int
    near: bootstrap.Processes | None
    over_hosts: bool = False


@dataclasses.dataclass(frozen=True)
class SetUp:
    """A backend that is set up for a communicator.

    Attributes:
      backend: which one.
      id: of the entry in the native registry; equal on all processes.
      nodes: of its ranks.
      release: gives back what it holds.
      memory_bytes: what this process holds for communication.
      exported: ids of devices into whose memory other processes store directly.
      places: where GPUs of several processes are.
      node: this rank's node, where there are several.
      rail: and its rail.
    """

    backend: Backend
    id: int
    nodes: Nodes
    release: Callable[[], Any]
    memory_bytes: int = 0
    exported: frozenset[int] = frozenset()
    places: reach.Places = dataclasses.field(default_factory=dict)
    node: Part | None = None
    rail: Part | None = None


class Backend:
    """One way in which ranks exchange rows. Stateless.

    Attributes:
      name: as users spell it.
      platform: of the devices it is for; empty: any.
    """

    name = ""
    platform = ""

    def unsupported_reason(self, job: Job) -> str | None:
        """Why this process cannot take part, None where it can. Asks nobody."""
        raise NotImplementedError

    def set_up(self, job: Job) -> SetUp:
        """Sets it up. Collective.

        Raises:
          CannotWork: it cannot work here; the same on all processes.
          RuntimeError: the devices are of another platform, or a process did not
            come.
          ValueError: an argument does not fit what was found.
        """
        raise NotImplementedError

    def path(self, made: SetUp, a: jax.Device, b: jax.Device) -> str:
        """How rows go from `a` to `b` of the same node; see Communicator.describe."""
        raise NotImplementedError


class Xla(Backend):
    """JAX's collectives, wherever JAX runs. Holds nothing."""

    name = "xla"

    def unsupported_reason(self, job: Job) -> None:
        """Nothing."""

    def set_up(self, job: Job) -> SetUp:
        """All ranks are one node."""
        identity = agree_on_id(job.peers, self.name)
        nodes = Nodes(job.num_ranks, job.peers)
        return SetUp(self, identity, nodes, release=lambda: None)

    def path(self, made: SetUp, a: jax.Device, b: jax.Device) -> str:
        """Always through XLA."""
        return "xla"


class _Native(Backend):
    """A native module with a registry of communicators."""

    def set_up(self, job: Job) -> SetUp:
        """Meets the other processes, then sets up nodes, then rails between them."""
        if job.platforms != {self.platform}:
            raise RuntimeError(
                f"jax_ep.Communicator: backend {self.name!r} needs a mesh of "
                f"{self.platform} devices, found {sorted(job.platforms)}"
            )
        with contextlib.ExitStack() as sockets, contextlib.ExitStack() as undo:
            nodes, links = self._meet(job, sockets)
            places = self._places(job, nodes)
            identity = agree_on_id(job.peers, self.name)
            node = rail = None
            if nodes.size < job.num_ranks:
                number = job.num_ranks // nodes.size
                about = self.name, job.mesh, job.axis_name
                node = Part(identity, *about, nodes.size)
                rail = Part(identity + 1, *about, number)
            inside = self._set_up_nodes(job, identity, nodes, links)
            undo.callback(inside.release)
            memory_bytes = inside.memory_bytes
            if rail is not None:
                between = self._set_up_rails(job, rail.id, nodes, links)
                undo.callback(between.release)
                memory_bytes += between.memory_bytes
            return SetUp(
                backend=self,
                id=identity,
                nodes=nodes,
                release=undo.pop_all().close,
                memory_bytes=memory_bytes,
                exported=inside.exported,
                places=places,
                node=node,
                rail=rail,
            )

    def _meet(
        self, job: Job, sockets: contextlib.ExitStack
    ) -> tuple[Nodes, Links | None]:
        """The nodes, and sockets to the processes that share memory, if any do.

        The sockets stay open for as long as `sockets` does.
        """
        if job.peers is None:
            nodes = Nodes(job.settings.node_size or job.num_ranks, None)
            _check_nodes(job, nodes.size)
            problem = self.unsupported_reason(job)
            if problem is not None:
                raise bootstrap.CannotWork(problem)
            return nodes, None
        links = sockets.enter_context(contextlib.closing(Links()))
        problem = self.unsupported_reason(job)
        hosts = job.peers.gather(f"backend {self.name}", links.host, problem)
        nodes = self._nodes(job, job.peers, hosts)
        _check_nodes(job, nodes.size)
        assert nodes.near is not None
        # Processes of several hosts share memory without sockets.
        near = nodes.near.part((nodes.near.me,)) if nodes.over_hosts else nodes.near
        problem = links.connect(near, hosts)
        if problem is not None:
            raise bootstrap.CannotWork(problem)
        return nodes, None if nodes.over_hosts else links

    def _nodes(
        self, job: Job, peers: bootstrap.Processes, hosts: dict[int, dict[str, str]]
    ) -> Nodes:
        """How ranks fall into nodes, from what all processes say of their hosts."""
        del hosts
        return Nodes(job.settings.node_size or job.num_ranks, peers)

    def _places(self, job: Job, nodes: Nodes) -> reach.Places:
        """Where devices are. Collective; raises CannotWork."""
        del job, nodes
        return {}

    def _set_up_nodes(
        self, job: Job, identity: int, nodes: Nodes, links: Links | None
    ) -> Memory:
        raise NotImplementedError

    def _set_up_rails(
        self, job: Job, identity: int, nodes: Nodes, links: Links | None
    ) -> Memory:
        raise NotImplementedError


class Cpu(_Native):
    """Native host code."""

    name = "cpu"
    platform = "cpu"

    def unsupported_reason(self, job: Job) -> str | None:
        """The module is missing."""
        return staging.unsupported_reason()

    def path(self, made: SetUp, a: jax.Device, b: jax.Device) -> str:
        """From buffer to buffer in a process, else through shared memory."""
        return "in-process" if a.process_index == b.process_index else "staged"

    def _set_up_nodes(
        self, job: Job, identity: int, nodes: Nodes, links: Links | None
    ) -> Memory:
        groups = topology.node_groups(job.groups, nodes.size)
        scope = (
            ", inside nodes: ranks are local" if len(groups) > len(job.groups) else ""
        )
        return self._stage(job, identity, groups, nodes.near, links, scope)

    def _set_up_rails(
        self, job: Job, identity: int, nodes: Nodes, links: Links | None
    ) -> Memory:
        rails = topology.rail_groups(job.groups, nodes.size)
        scope = ", between nodes: ranks are nodes"
        if job.peers is None:
            return self._stage(job, identity, rails, None, None, scope)
        # Sockets of their own: those of nodes are watched for hang-ups already.
        with contextlib.closing(Links()) as own:
            hosts = job.peers.gather("hosts", own.host)
            problem = own.connect(job.peers, hosts)
            if problem is not None:
                raise bootstrap.CannotWork(problem)
            return self._stage(job, identity, rails, job.peers, own, scope)

    @staticmethod
    def _stage(
        job: Job,
        identity: int,
        groups: reach.Groups,
        processes: bootstrap.Processes | None,
        links: Links | None,
        scope: str,
    ) -> Memory:
        return staging.set_up_host(
            identity,
            groups,
            mesh_places=job.mesh_places,
            timeout_s=job.settings.timeout_s,
            warn_after_s=job.settings.warn_after_s,
            num_channels=job.settings.num_channels,
            staging_bytes=job.settings.staging_bytes,
            processes=processes,
            links=links,
            scope=scope,
        )


class Cuda(_Native):
    """Kernels that store into the peers' buffers."""

    name = "cuda"
    platform = "gpu"

    def unsupported_reason(self, job: Job) -> str | None:
        """The module or the driver is missing, or GPUs here do not reach each other."""
        return reach.unsupported_reason(job.groups)

    def path(self, made: SetUp, a: jax.Device, b: jax.Device) -> str:
        """Straight where the peer's memory is mapped, else through staging memory."""
        inside = a.process_index == b.process_index
        return "direct" if inside or b.id in made.exported else "staged"

    def _nodes(
        self, job: Job, peers: bootstrap.Processes, hosts: dict[int, dict[str, str]]
    ) -> Nodes:
        names = topology.host_names(hosts)
        asked_for = job.settings.node_size
        if len(set(names.values())) == 1:
            size = asked_for or topology.find_node_size(job.groups, names)
            return Nodes(size, peers)
        mine = fabric.note(reach.local(job.groups))
        nodes, problems = fabric.join(names, peers.gather("fabrics", mine))
        if problems:
            warnings.warn(
                "jax_ep.Communicator: hosts of one NVLink domain do not count as one "
                f"node: {'; '.join(problems)}",
                stacklevel=6,
            )
        size = asked_for or topology.find_node_size(job.groups, nodes)
        near = topology.connected(topology.node_groups(job.groups, size), peers.me)
        over_hosts = (
            len({nodes[process] for process in near}) == 1
            and len({names[process] for process in near}) > 1
        )
        return Nodes(size, peers.part(near), over_hosts)

    def _places(self, job: Job, nodes: Nodes) -> reach.Places:
        if nodes.near is None:
            return {}
        groups = topology.node_groups(job.groups, nodes.size)
        places = reach.places(groups, nodes.near)
        problem = reach.unsupported_between(groups, places, nodes.near)
        if problem is not None:
            raise bootstrap.CannotWork(problem)
        return places

    def _set_up_nodes(
        self, job: Job, identity: int, nodes: Nodes, links: Links | None
    ) -> Memory:
        return peer_memory.set_up_cuda(
            identity,
            topology.node_groups(job.groups, nodes.size),
            mesh_places=job.mesh_places,
            num_sms=job.settings.num_sms,
            timeout_s=job.settings.timeout_s,
            warn_after_s=job.settings.warn_after_s,
            num_channels=job.settings.num_channels,
            staging_bytes=job.settings.staging_bytes,
            processes=nodes.near,
            links=links,
        )

    def _set_up_rails(
        self, job: Job, identity: int, nodes: Nodes, links: Links | None
    ) -> Memory:
        release = node_wire.set_up_wire(
            identity,
            topology.rail_groups(job.groups, nodes.size),
            mesh_places=job.mesh_places,
            node_size=nodes.size,
            setup_timeout_s=job.settings.setup_timeout_s,
            timeout_s=job.settings.timeout_s,
            warn_after_s=job.settings.warn_after_s,
            processes=job.peers,
        )
        return Memory(release, memory_bytes=0)


CUDA, CPU, XLA = Cuda(), Cpu(), Xla()
# By the names that users give.
BACKENDS: dict[str, Backend] = {one.name: one for one in (CUDA, CPU, XLA)}


def set_up(job: Job, wanted: str | None) -> SetUp:
    """Sets up the backend `wanted`, or the best that can work. Collective.

    Raises:
      RuntimeError: `wanted` cannot work here, or a process did not come.
      ValueError: an argument does not fit what was found.
    """
    if wanted is not None:
        try:
            return BACKENDS[wanted].set_up(job)
        except bootstrap.CannotWork as error:
            raise RuntimeError(
                f"jax_ep.Communicator: backend {wanted!r} cannot work here: {error}"
            ) from error
    problem = f"no native backend for {sorted(job.platforms)} devices"
    for backend in (CUDA, CPU):
        if job.platforms == {backend.platform}:
            try:
                return backend.set_up(job)
            except bootstrap.CannotWork as error:
                problem = str(error)
    warnings.warn(
        f"jax_ep.Communicator: falling back to backend 'xla', which is slow: {problem}",
        stacklevel=3,
    )
    return XLA.set_up(job)


def agree_on_id(peers: bootstrap.Processes | None, what: str) -> int:
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


def _check_nodes(job: Job, size: int) -> None:
    where, most = "jax_ep.Communicator", limits.MAX_RANKS
    number = job.num_ranks // size
    if size > most and number == 1:
        raise ValueError(
            f"{where}: axis {job.axis_name!r} must have at most {most} devices, found "
            f"{job.num_ranks}"
        )
    if size > most:
        raise ValueError(
            f"{where}: a node must have at most {most} ranks, found {size}; give a "
            "smaller node_size"
        )
    if number > most:
        raise ValueError(
            f"{where}: there must be at most {most} nodes, found {number} of {size} "
            "ranks"
        )
