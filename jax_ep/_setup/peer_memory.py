"""Set-up of the CUDA backend: control memory, and the peers' memory mapped here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jax_ep._data import native
from jax_ep._setup import bootstrap, gpu_memory, reach
from jax_ep._setup.bootstrap import CannotWork
from jax_ep._setup.gpu_memory import call
from jax_ep._setup.links import Links, receive_descriptor, send_descriptor
from jax_ep._setup.native_resource import Memory
from jax_ep._setup.reach import CaughtError, Groups
from jax_ep._setup.topology import MeshPlaces

# What the maker of shared control memory writes behind it, and its users read.
_PROOF_BYTES = 128
# struct Region in cc/handshake/peer_view.h.
_REGION = np.dtype([("begin", "<u8"), ("bytes", "<u8"), ("here", "<u8")])


@dataclasses.dataclass(frozen=True)
class Piece:
    """Memory of a rank that is shared, in the owner's addresses.

    Attributes:
      proof: of control memory, in hexadecimal; empty for an arena.
      fabric: its fabric handle, in hexadecimal; empty where it goes as a file.
    """

    group: int
    rank: int
    base: int
    size: int
    proof: str
    fabric: str = ""

    @property
    def is_control(self) -> bool:
        """Control memory, not an arena."""
        return bool(self.proof)


# Pieces of this process, each with an open file where it does not go by handle.
Offers = dict[Piece, int | None]


def _offer(mine: Offers, piece: Piece, shared: int | bytes) -> None:
    if isinstance(shared, int):
        mine[piece] = shared
    else:
        mine[dataclasses.replace(piece, fabric=shared.hex())] = None


def close_files(mine: Offers) -> None:
    """Closes what has been sent."""
    for descriptor in mine.values():
        if descriptor is not None:
            os.close(descriptor)


def set_up_cuda(
    identity: int,
    groups: Groups,
    *,
    mesh_places: MeshPlaces,
    num_sms: int | None,
    timeout_s: float,
    warn_after_s: float,
    num_channels: int | None,
    staging_bytes: int,
    processes: bootstrap.Processes | None,
    links: Links | None,
) -> Memory:
    """Sets up the CUDA backend. Collective where there are `processes`.

    For groups of which `reach.unsupported_reason` and `unsupported_between` said
    nothing. Without `links` the processes share memory by fabric handles.

    Raises:
      ValueError: staging_bytes is too small.
      CannotWork: the self-test failed, or memory cannot be shared.
      RuntimeError: a call of the driver failed.
    """
    set_up = SetUp(groups, mesh_places, num_sms or 0, staging_bytes, processes, links)
    try:
        set_up.run(num_channels)
        return set_up.hand_over(identity, timeout_s, warn_after_s)
    except BaseException:
        set_up.holdings.release()
        raise


class SetUp:
    """The steps, and what they leave behind.

    Attributes:
      holdings: memory until the native side takes it.
    """

    def __init__(self, groups, mesh_places, num_sms, staging_bytes, processes, links):
        """Begins with nothing but the contexts of this process's GPUs."""
        self.groups: Groups = groups
        self.mesh_places: MeshPlaces = mesh_places
        self.num_ranks = len(groups[0])
        self.num_sms: int = num_sms
        self.num_channels = 0
        self.staging_bytes: int = staging_bytes
        self.processes: bootstrap.Processes | None = processes
        self.links: Links | None = links
        # Processes of several hosts have no sockets.
        self.kind = gpu_memory.Kind.FILE if links else gpu_memory.Kind.FABRIC
        self.module = native.cuda()
        self.driver = gpu_memory.driver()
        self.contexts = {
            ordinal: call(
                self.driver.cuDevicePrimaryCtxRetain,
                call(self.driver.cuDeviceGet, ordinal),
            )
            for ordinal in {d.local_hardware_id for d in reach.local(groups)}
        }
        self.holdings = gpu_memory.Holdings(self.driver, self.contexts)
        self.memory_bytes = 0
        # Where each rank's control memory is for this process, by (group, rank).
        self.control: dict[tuple[int, int], int] = {}
        # Arenas of this process's ranks, and where those of others are.
        self.exported: dict[tuple[int, int], list[Piece]] = {}
        self.imported: dict[Piece, int] = {}
        self.places: list[Any] = []
        # Ids of devices with an exported arena, on all processes alike.
        self.reachable: frozenset[int] = frozenset()

    # In one process it raises where something fails; between processes it keeps
    # step with the others and all raise the same.

    def run(self, num_channels: int | None) -> None:
        """Allocates, shares and places; collective where there are processes."""
        if self.processes is None:
            self._test_and_connect()
            self._allocate()
            self._place_ranks()
            return
        staging = self._choose_channels(num_channels)
        mine: Offers = {}
        try:
            with CaughtError() as told:
                self._test_and_connect()
                self._allocate()
                self._share(staging, mine)
            pieces, lost = self._exchange(mine, told.problem)
        finally:
            close_files(mine)
        with told:
            self._keep(pieces, lost)
            self._place_ranks()
        self.processes.gather("tables of GPU memory", None, told.problem)

    def _choose_channels(self, asked_for: int | None) -> int:
        """Sets num_channels, equal on all processes; returns a rank's staging size.

        A channel is a block of each rank's kernels.
        """
        assert self.processes is not None
        blocks = [self.module.num_sms(o, self.num_sms) for o in self.contexts]
        most = min(self.processes.gather("blocks", min(blocks)).values())
        if asked_for is None:
            _, least = self._staging_size(1)
            asked_for = max(1, self.staging_bytes // least)
        self.num_channels = min(asked_for, most)
        size, least = self._staging_size(self.num_channels)
        if size == 0 and any(map(self._is_split, self.groups)):
            raise ValueError(
                f"jax_ep.Communicator: staging_bytes must be >= {least} for "
                f"{self.num_channels} channels and {self.num_ranks} ranks, found "
                f"{self.staging_bytes}"
            )
        return size

    def _control_bytes(self) -> int:
        """Bytes of a rank's control memory, without staging memory."""
        return self.module.control_bytes(self.num_ranks)

    def _staging_size(self, num_channels: int) -> tuple[int, int]:
        """Bytes of a rank's staging memory, 0: too few; the least staging_bytes."""
        return self.module.staging_size(
            self.staging_bytes, num_channels, self.num_ranks
        )

    @staticmethod
    def _is_split(group: list[jax.Device]) -> bool:
        """Whether a group has ranks in several processes."""
        return len({device.process_index for device in group}) > 1

    def _ranks_here(self) -> Iterator[tuple[int, int, jax.Device]]:
        for group, devices in enumerate(self.groups):
            for rank, device in enumerate(devices):
                if reach.is_here(device):
                    yield group, rank, device

    def _ordinals(self, group: int) -> list[int]:
        return [d.local_hardware_id for d in self.groups[group] if reach.is_here(d)]

    def _test_and_connect(self) -> None:
        for ordinal in self.contexts:
            # Also loads every kernel: loading one later would deadlock behind
            # a kernel that waits for it.
            failure = self.module.self_test(ordinal)
            if failure:
                raise CannotWork(failure)
        for a, b in reach.local_pairs(self.groups):
            _enable_peer_access(
                self.driver,
                self.contexts[a.local_hardware_id],
                self.contexts[b.local_hardware_id],
            )

    def _allocate(self) -> None:
        """Control memory of groups inside this process."""
        size = self._control_bytes()
        for group, rank, device in self._ranks_here():
            if not self._is_split(self.groups[group]):
                self.control[group, rank] = self.holdings.allocate(
                    device.local_hardware_id, size
                )
                self.memory_bytes += size

    # Between processes

    def _share(self, staging: int, mine: Offers) -> None:
        """Makes control memory and finds arenas, and puts both into `mine`."""
        for group, rank, device in self._ranks_here():
            if self._is_split(self.groups[group]):
                self._share_control(group, rank, device, staging, mine)
                self._share_arenas(group, rank, device, mine)

    def _share_control(self, group, rank, device, staging, mine) -> None:
        ordinal = device.local_hardware_id
        used = self._control_bytes() + staging
        address, size, shared = self.holdings.allocate_shared(
            ordinal, used + _PROOF_BYTES, self._ordinals(group), self.kind
        )
        proof = secrets.token_bytes(_PROOF_BYTES)
        _offer(mine, Piece(group, rank, address, size, proof.hex()), shared)
        self.holdings.write(ordinal, address + used, np.frombuffer(proof, np.uint8))
        self.control[group, rank] = address
        self.memory_bytes += size

    def _share_arenas(self, group, rank, device, mine) -> None:
        context = self.contexts[device.local_hardware_id]
        count = 0
        for base, size in gpu_memory.arenas(self.driver, device, context):
            if count == self.module.max_regions:
                break
            with gpu_memory.Current(self.driver, context):
                shared = gpu_memory.export_arena(self.driver, base, self.kind)
            if shared is not None:
                _offer(mine, Piece(group, rank, base, size, ""), shared)
                count += 1

    def _gather_pieces(
        self, what: str, mine: Iterable[Piece], problem: str | None
    ) -> dict[int, list[Piece]]:
        assert self.processes is not None
        notes = [dataclasses.asdict(piece) for piece in mine]
        return {
            process: [Piece(**note) for note in theirs]
            for process, theirs in self.processes.gather(what, notes, problem).items()
        }

    def _exchange(
        self, mine: Offers, problem: str | None
    ) -> tuple[dict[int, list[Piece]], set[Piece]]:
        """Gives the others what is shared, and maps what they share.

        Args:
          mine: what this process shares.
          problem: why it cannot.

        Returns:
          Everybody's pieces by process, and those that somebody could not map.
        """
        assert self.processes is not None
        pieces = self._gather_pieces("pieces of GPU memory", mine, problem)
        problems: list[str] = []
        failed: list[Piece] = []
        for process in self.processes.others:
            try:
                # One sends while the other receives: no socket's buffer fills.
                if self.processes.me < process:
                    self._send(process, mine)
                self._receive(process, pieces[process], problems, failed)
                if self.processes.me > process:
                    self._send(process, mine)
            except OSError as error:
                problems.append(
                    f"cannot exchange memory with {self.processes.name(process)}: "
                    f"{error}"
                )
        lost = self._gather_pieces(
            "mapped GPU memory", failed, "; ".join(problems) or None
        )
        return pieces, {piece for theirs in lost.values() for piece in theirs}

    def _users(self, piece: Piece) -> set[int]:
        """Processes with ranks in the piece's group."""
        return {device.process_index for device in self.groups[piece.group]}

    def _send(self, process: int, mine: Offers) -> None:
        for piece, descriptor in mine.items():
            if descriptor is not None and process in self._users(piece):
                assert self.links is not None
                note = json.dumps(dataclasses.asdict(piece)).encode()
                send_descriptor(self.links.sockets[process], descriptor, note)

    def _receive(self, process, pieces, problems, failed) -> None:
        """Maps what one process gives. An arena may fail, control memory not."""
        assert self.processes is not None
        for piece in pieces:
            if self.processes.me not in self._users(piece):
                continue
            shared = self._take(process, piece)
            try:
                self.imported[piece] = self.holdings.import_shared(
                    shared, piece.size, self._ordinals(piece.group)
                )
                if piece.is_control:
                    self._check_proof(piece)
                    self.control[piece.group, piece.rank] = self.imported[piece]
            except RuntimeError as error:
                if not piece.is_control:
                    failed.append(piece)
                    continue
                problems.append(
                    f"cannot map the control memory of rank {piece.rank} of "
                    f"{self.processes.name(process)}: {error}"
                )
            finally:
                if isinstance(shared, int):
                    os.close(shared)

    def _take(self, process: int, piece: Piece) -> int | bytes:
        """What stands for a piece of another process; a file is the caller's."""
        if piece.fabric:
            return bytes.fromhex(piece.fabric)
        assert self.links is not None
        descriptor, note = receive_descriptor(self.links.sockets[process])
        if Piece(**json.loads(note)) != piece:
            os.close(descriptor)
            reason = "it sent other memory than it had announced"
            raise OSError(reason)
        return descriptor

    def _check_proof(self, piece: Piece) -> None:
        """Every GPU here has to read what the maker's GPU wrote."""
        proof = bytes.fromhex(piece.proof)
        size, _ = self._staging_size(self.num_channels)
        at = self.imported[piece] + self._control_bytes() + size
        for ordinal in self._ordinals(piece.group):
            if self.holdings.read(ordinal, at, len(proof)) != proof:
                message = f"GPU {ordinal} reads other bytes there than were written"
                raise RuntimeError(message)

    def _keep(self, pieces: Mapping[int, list[Piece]], lost: set[Piece]) -> None:
        """Notes which arenas serve. One that a process cannot map serves none."""
        assert self.processes is not None
        for piece in lost & set(self.imported):
            self.holdings.unmap(self.imported.pop(piece))
        kept = [
            (process, piece)
            for process, theirs in pieces.items()
            for piece in theirs
            if not piece.is_control and piece not in lost
        ]
        for process, piece in kept:
            if process == self.processes.me:
                self.exported.setdefault((piece.group, piece.rank), []).append(piece)
        self.reachable = frozenset(self.groups[p.group][p.rank].id for _, p in kept)

    # The native side

    def hand_over(self, identity: int, timeout_s: float, warn_after_s: float) -> Memory:
        """Registers the communicator, which owns the memory from then on."""
        with contextlib.ExitStack() as undo:
            if self.processes is None:
                self._register(identity, timeout_s, warn_after_s, undo)
            else:
                with CaughtError() as told:
                    self._register(identity, timeout_s, warn_after_s, undo)
                # Nobody begins before everybody has mapped.
                self.processes.gather("ready", None, told.problem)
            release = undo.pop_all().close
        return Memory(release, self.memory_bytes, self.reachable)

    def _register(
        self,
        identity: int,
        timeout_s: float,
        warn_after_s: float,
        undo: contextlib.ExitStack,
    ) -> None:
        self.module.create_communicator(
            identity,
            self.module.CommunicatorArguments(
                num_ranks=self.num_ranks,
                num_sms=self.num_sms,
                timeout_s=timeout_s,
                warn_after_s=warn_after_s,
                num_channels=self.num_channels,
                staging_bytes=self.staging_bytes,
                places=self.places,
                has_other_processes=self.processes is not None,
                mapped=list(self.holdings.mapped),
                allocated=list(self.holdings.allocated),
            ),
        )
        self.holdings.mapped.clear()
        self.holdings.allocated.clear()
        undo.callback(self.module.release_communicator, identity)

    def _place_ranks(self) -> None:
        self.places = [self._place(*place) for place in self._ranks_here()]

    def _place(self, group: int, rank: int, device: jax.Device) -> Any:
        devices = self.groups[group]
        split = self._is_split(devices)
        exported = self.exported.get((group, rank), [])
        return self.module.Place(
            ordinal=device.local_hardware_id,
            rank=rank,
            mesh=self.mesh_places[device.id],
            control=[self.control[group, r] for r in range(self.num_ranks)],
            same_process=[r for r, d in enumerate(devices) if reach.is_here(d)],
            regions=self._table(group, device) if split else 0,
            exported=[(piece.base, piece.size) for piece in exported],
        )

    def _table(self, group: int, device: jax.Device) -> int:
        """Puts the regions of all ranks into memory of `device`."""
        table = np.zeros((self.num_ranks, self.module.max_regions), _REGION)
        count = [0] * self.num_ranks
        for piece, here in self.imported.items():
            if piece.group == group and not piece.is_control:
                table[piece.rank, count[piece.rank]] = piece.base, piece.size, here
                count[piece.rank] += 1
        ordinal = device.local_hardware_id
        address = self.holdings.allocate(ordinal, table.nbytes)
        self.holdings.write(ordinal, address, table)
        return address


def _enable_peer_access(driver: Any, context: Any, peer: Any) -> None:
    with gpu_memory.Current(driver, context):
        (status,) = driver.cuCtxEnablePeerAccess(peer, 0)
    # XLA may have been here first.
    enabled = driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
    if status.value not in (0, enabled.value):
        raise RuntimeError(f"jax_ep: cuCtxEnablePeerAccess failed: {status.name}")
