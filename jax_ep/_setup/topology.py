"""Nodes: which ranks reach each other's memory, and how ranks are numbered there.

rank = node * node_size + local. A *rail* is the ranks with the same local index,
one of each node.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_ep._data import checks
from jax_ep._data.ranks import position_axes

_Groups = list[list[jax.Device]]
# MeshPlace in cc/handshake/mesh_place.h of devices, by their ids.
MeshPlaces = Mapping[int, tuple[int, int, int]]


def mesh_groups(mesh: jax.sharding.Mesh, axes: Sequence[str]) -> _Groups:
    """Devices by [group][rank]: ranks row-major over `axes`, groups over the others."""
    order = [mesh.axis_names.index(axis) for axis in axes]
    others = [axis for axis in range(mesh.devices.ndim) if axis not in order]
    devices = np.transpose(mesh.devices, others + order)
    return devices.reshape(-1, math.prod(mesh.shape[axis] for axis in axes)).tolist()


def mesh_places(mesh: jax.sharding.Mesh, axes: Sequence[str]) -> MeshPlaces:
    """Where the mesh has each device: (position, ranks, positions between ranks)."""
    counted = position_axes(mesh.shape, axes)
    devices = np.transpose(mesh.devices, [mesh.axis_names.index(a) for a in counted])
    behind = max((counted.index(a) + 1 for a in axes if mesh.shape[a] > 1), default=0)
    stride = math.prod(mesh.shape[axis] for axis in counted[behind:])
    num_ranks = math.prod(mesh.shape[axis] for axis in axes)
    return {
        device.id: (position, num_ranks, stride)
        for position, device in enumerate(devices.flat)
    }


def node_groups(groups: _Groups, node_size: int) -> _Groups:
    """Devices by [group * nodes + node][local]."""
    return [
        group[begin : begin + node_size]
        for group in groups
        for begin in range(0, len(group), node_size)
    ]


def rail_groups(groups: _Groups, node_size: int) -> _Groups:
    """Devices by [group * node_size + local][node]."""
    return [group[local::node_size] for group in groups for local in range(node_size)]


def host_names(hosts: Mapping[int, Mapping[str, str]]) -> dict[int, str]:
    """What tells hosts apart, by process, from `bootstrap.host_identity`.

    Containers of one host have names of their own, and cloned hosts the same name.
    """
    first: dict[str, str] = {}
    return {
        process: first.setdefault(
            host["boot_id"] or host["host"], f"{host['host']} {host['boot_id'][:8]}"
        )
        for process, host in sorted(hosts.items())
    }


def find_node_size(groups: _Groups, hosts: Mapping[int, Any]) -> int:
    """Ranks of a node where ranks of a host reach each other's memory.

    Args:
      groups: devices by [group][rank].
      hosts: what tells hosts apart, by process.

    Raises:
      ValueError: a host's ranks are not consecutive, or not equally many on all.
    """
    sizes = set()
    for group in groups:
        runs = [
            (host, len(list(run)))
            for host, run in itertools.groupby(hosts[d.process_index] for d in group)
        ]
        sizes.update(size for _, size in runs)
        if len({host for host, _ in runs}) < len(runs) or len(sizes) > 1:
            found = ", ".join(f"{size} of {host}" for host, size in runs)
            raise ValueError(
                "jax_ep.Communicator: every node must hold equally many ranks, one "
                f"after the other along the axis; found {found}; order the mesh's "
                "devices by host (jax.make_mesh does) and take as many of each"
            )
    return sizes.pop()


def connected(groups: _Groups, me: int) -> tuple[int, ...]:
    """The processes that share a group with `me`, or with one that does, ..."""
    found = {me}
    members = [{d.process_index for d in group} for group in groups]
    while True:
        more = set().union(found, *(m for m in members if m & found))
        if more == found:
            return tuple(sorted(found))
        found = more


def check_node_size(node_size: Any, num_ranks: int) -> int | None:
    """`node_size` as int; ValueError unless nodes of so many ranks can be cut."""
    if node_size is None:
        return None
    size = checks.as_integer(node_size)
    if size is None or size < 1 or num_ranks % size:
        raise ValueError(
            "jax_ep.Communicator: node_size must be None or an integer >= 1 that "
            f"divides the {num_ranks} ranks, found {node_size!r}"
        )
    return size
