"""What operations ask of a communicator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A part of every group of a communicator, with ranks of its own.

    Stands where a Communicator stands in the exchanges: in one part for each
    node a rank is its local index, in one part for each rail it is its node.

    Attributes:
      id: of the native registry's entry.
      backend: the communicator's.
      mesh: the communicator's.
      axis_name: the communicator's.
      num_ranks: ranks of one part.
    """

    id: int
    backend: str
    mesh: jax.sharding.Mesh
    axis_name: str | tuple[str, ...]
    num_ranks: int

    def __repr__(self) -> str:
        return f"Part(id={self.id}, num_ranks={self.num_ranks})"


class Ranks(Protocol):
    """A Communicator, as operations see it; its docstring says what is what.

    Set-up stands beside operations, not below them, so they do not import it.
    """

    id: int
    backend: str
    mesh: jax.sharding.Mesh
    axis_name: str | tuple[str, ...]
    num_ranks: int
    node_size: int
    processes: tuple[int, ...]
    # This rank's node and rail, where there are several nodes.
    _node: Part | None
    _rail: Part | None
    _num_channels: int | None
    # The process that has set it up.
    _pid: int

    @property
    def num_nodes(self) -> int:
        """N."""
        ...

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        ...


def named_axes(axis_name: str | tuple[str, ...]) -> tuple[str, ...]:
    """The axes that a communicator's `axis_name` names, in their order."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def collective_axes(comm: Ranks | Part) -> tuple[str, ...]:
    """The axes over which ranks talk: those of more than one device.

    The others count for nothing in a rank, and need not be manual.
    """
    return tuple(a for a in named_axes(comm.axis_name) if comm.mesh.shape[a] > 1)


def position_axes(sizes: Mapping[str, int], axes: Sequence[str]) -> tuple[str, ...]:
    """All axes of a mesh, in the order in which devices' positions count them.

    It is the mesh's own order where ranks are equally far apart in it, which is where
    `axes` stand there one after the other; else `axes` come behind all others.

    Args:
      sizes: of the mesh's axes, in its order.
      axes: the communicator's.
    """
    long = [a for a in sizes if sizes[a] > 1]
    ours = [a for a in axes if sizes[a] > 1]
    first = long.index(ours[0]) if ours else 0
    if long[first : first + len(ours)] == ours:
        return tuple(sizes)
    return (*(a for a in sizes if a not in axes), *axes)


class Buffer(Protocol):
    """A LowLatencyBuffer, as operations see it."""

    max_tokens: int
    num_experts: int
    num_local_experts: int

    @property
    def comm(self) -> Ranks:
        """The communicator."""
        ...
