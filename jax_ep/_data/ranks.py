"""What operations ask of a communicator."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A part of every group of a communicator, with ranks of its own.

    Stands where a Communicator stands in the primitives: in one part for each
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
    axis_name: str
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
    axis_name: str
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


class Buffer(Protocol):
    """A LowLatencyBuffer, as operations see it."""

    max_tokens: int
    num_experts: int
    num_local_experts: int

    @property
    def comm(self) -> Ranks:
        """The communicator."""
        ...
