"""What operations ask of a communicator."""

from __future__ import annotations

from typing import Protocol

import jax

from jax_ep.topology import Part


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
