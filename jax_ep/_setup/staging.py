"""Set-up of the host backend: staging memory between processes of one host."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys

import jax

from jax_ep._data import native
from jax_ep._setup import bootstrap
from jax_ep._setup.links import Links, create_shared_memory, exchange_shared_memory
from jax_ep._setup.native_resource import Memory
from jax_ep._setup.topology import MeshPlaces

_DEFAULT_CHANNELS = 2


def unsupported_reason() -> str | None:
    """Says why the host backend cannot work in this process; None where it can."""
    try:
        native.host()
    except ImportError as error:
        return str(error)
    return None


def set_up_host(
    identity: int,
    groups: list[list[jax.Device]],
    *,
    mesh_places: MeshPlaces,
    timeout_s: float,
    warn_after_s: float,
    num_channels: int | None,
    staging_bytes: int,
    processes: bootstrap.Processes | None,
    links: Links | None,
    scope: str = "",
) -> Memory:
    """Registers the communicator; with other processes, shares memory with them.

    Args:
      identity: of the entry in the native registry.
      groups: devices by [group][rank].
      mesh_places: of all of them.
      timeout_s: as for Communicator.
      warn_after_s: a wait that takes longer says so.
      num_channels: as for Communicator.
      staging_bytes: as for Communicator.
      processes: who takes part, where there are several.
      links: connects them.
      scope: what ranks are in messages, where they are not the mesh axis's.

    Raises:
      ValueError: staging_bytes is too small.
      CannotWork: memory cannot be shared.
    """
    module = native.host()
    num_channels = num_channels or _DEFAULT_CHANNELS
    me = jax.process_index()
    places = [
        (device.id, group, rank, mesh_places[device.id])
        for group, devices in enumerate(groups)
        for rank, device in enumerate(devices)
        if device.process_index == me
    ]
    members = (me,) if processes is None else processes.members
    where = [[members.index(d.process_index) for d in devices] for devices in groups]
    memory_bytes = 0
    # The native side maps memory itself; descriptors go in any case.
    with contextlib.ExitStack() as descriptors, contextlib.ExitStack() as undo:
        exchange = None
        if processes is not None and links is not None:
            size, least = module.staging_size(staging_bytes, num_channels, len(members))
            if size == 0:
                raise ValueError(
                    f"jax_ep.Communicator: staging_bytes must be >= {least} for "
                    f"{num_channels} channels and {len(members)} processes, found "
                    f"{staging_bytes}"
                )
            memories = _share_memory(processes, links, size, descriptors)
            memory_bytes = size
            exchange = module.ExchangeArguments(
                numbers=list(members),
                staging_bytes=staging_bytes,
                num_channels=num_channels,
                memories=[memories[p] for p in members],
                sockets=[links.sockets[p].fileno() if p != me else -1 for p in members],
            )
        module.create_communicator(
            identity,
            places,
            len(groups[0]),
            timeout_s,
            warn_after_s,
            where,
            members.index(me),
            exchange,
            scope,
        )
        undo.callback(module.release_communicator, identity)
        if processes is not None:
            # Nobody begins before everybody can take part.
            processes.barrier("ready")
        return Memory(undo.pop_all().close, memory_bytes)


def _share_memory(processes, links, size, descriptors) -> dict[int, int]:
    """Staging memory of every process, closed with `descriptors`."""
    proof = secrets.token_bytes(16)
    mine = create_shared_memory(size, proof)
    descriptors.callback(os.close, mine)
    theirs = exchange_shared_memory(processes, links, mine, size, proof, descriptors)
    return {processes.me: mine, **theirs}


def _after_fork() -> None:
    # The child would hide from the peers that its parent is gone.
    host = sys.modules.get("jax_ep._host")
    if host is not None:
        host.abandon_after_fork()


os.register_at_fork(after_in_child=_after_fork)
