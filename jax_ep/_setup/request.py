"""What a communicator is asked to be: the arguments, checked and made comparable."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

import jax

from jax_ep._data import checks
from jax_ep._data.ranks import named_axes
from jax_ep._setup import backends, topology

# limits.MAX_RANKS bounds ranks of a node, and nodes, each.
_MAX_RANKS = 1024
# A wait inside an operation that takes longer says so on stderr.
_WARN_AFTER_S = 30.0
_WHERE = "jax_ep.Communicator"


@dataclasses.dataclass(frozen=True)
class Request:
    """Arguments of a Communicator; equal ones ask for the same.

    Attributes:
      mesh: as it was given.
      axis_name: one axis, or a tuple of several.
      backend: by name, None: the best that works.
      settings: all others.
    """

    mesh: jax.sharding.Mesh
    axis_name: str | tuple[str, ...]
    backend: str | None
    settings: backends.Settings

    @classmethod
    def of(
        cls,
        mesh: Any,
        axis_name: Any,
        *,
        backend: Any,
        num_sms: Any,
        num_channels: Any,
        staging_bytes: Any,
        timeout_s: Any,
        setup_timeout_s: Any,
        node_size: Any,
    ) -> Self:
        """Checks the arguments of Communicator, which says what they are.

        Raises:
          TypeError, ValueError: a bad one.
        """
        axes = _check_mesh(mesh, axis_name, backend)
        limits = {"timeout_s": timeout_s, "setup_timeout_s": setup_timeout_s}
        settings = backends.Settings(
            node_size=topology.check_node_size(node_size, _num_ranks(mesh, axes)),
            num_sms=_count_or_none("num_sms", num_sms),
            num_channels=_count_or_none("num_channels", num_channels),
            staging_bytes=_count("staging_bytes", staging_bytes),
            warn_after_s=_WARN_AFTER_S,
            **{name: _seconds(name, value) for name, value in limits.items()},
        )
        return cls(mesh, axes if len(axes) > 1 else axes[0], backend, settings)

    @property
    def axes(self) -> tuple[str, ...]:
        """Those of `axis_name`."""
        return named_axes(self.axis_name)

    def found(self, backend: str, node_size: int) -> Self:
        """This one, with what set-up chose where nothing was said."""
        settings = dataclasses.replace(self.settings, node_size=node_size)
        return dataclasses.replace(self, backend=backend, settings=settings)


def _num_ranks(mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _check_mesh(mesh: Any, axis_name: Any, backend: Any) -> tuple[str, ...]:
    """The axes."""
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(
            f"{_WHERE}: mesh must be a jax.sharding.Mesh, found {type(mesh).__name__}"
        )
    axes = named_axes(axis_name)
    known = [axis for axis in mesh.axis_names if axis in axes]
    if not axes or len(known) < len(axes):
        raise ValueError(
            f"{_WHERE}: axis_name must be one of the mesh's axes {mesh.axis_names}, or "
            f"a tuple of different ones, found {axis_name!r}"
        )
    names = tuple(backends.BACKENDS)
    if backend is not None and backend not in names:
        raise ValueError(
            f"{_WHERE}: backend must be one of {names} or None, found {backend!r}"
        )
    if _num_ranks(mesh, axes) > _MAX_RANKS:
        raise ValueError(
            f"{_WHERE}: axis {axis_name!r} must have at most {_MAX_RANKS} devices, "
            f"found {_num_ranks(mesh, axes)}"
        )
    return axes


def _as_count(value: Any) -> int | None:
    count = checks.as_integer(value)
    return count if count is not None and count >= 1 else None


def _count(name: str, value: Any) -> int:
    count = _as_count(value)
    if count is None:
        raise ValueError(f"{_WHERE}: {name} must be an integer >= 1, found {value!r}")
    return count


def _count_or_none(name: str, value: Any) -> int | None:
    if value is None:
        return None
    count = _as_count(value)
    if count is None:
        raise ValueError(
            f"{_WHERE}: {name} must be an integer >= 1 or None, found {value!r}"
        )
    return count


def _seconds(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < 1e6:
        raise ValueError(
            f"{_WHERE}: {name} must be seconds above 0 and below 1e6, found {value!r}"
        )
    return float(value)
