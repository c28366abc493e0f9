"""What every operation asks of its surroundings, checked while JAX traces."""

from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AxisType

from jax_ep._data import limits

if TYPE_CHECKING:
    from jax_ep._data.plan import Plan
    from jax_ep._data.ranks import Ranks


def check_open(comm: Ranks, op: str) -> None:
    """Raises RuntimeError where `comm` was closed, or set up before a fork."""
    if comm._pid != os.getpid():
        raise RuntimeError(
            f"jax_ep.{op}: the communicator was set up before this process was "
            "forked, and neither it nor JAX works in the child; start processes "
            "with the method 'spawn'"
        )
    if comm.closed:
        raise RuntimeError(
            f"jax_ep.{op}: the communicator is closed; create a new one "
            "(executables compiled before close() keep working)"
        )


def check_inside_shard_map(comm: Ranks, op: str) -> None:
    """Raises ValueError unless tracing inside shard_map over comm's mesh.

    Its axes may stand in another order. All of more than one device have to be manual:
    around a call that leaves one to the compiler XLA gathers the operands without a
    word.
    """
    mesh = jax.sharding.get_abstract_mesh()
    wanted = dict(comm.mesh.shape)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if not any(t == AxisType.Manual for t in types.values()):
        raise ValueError(
            f"jax_ep.{op}: call it inside jax.shard_map over the "
            f"communicator's mesh {wanted}; found no manual mesh axis here"
        )
    found = dict(mesh.shape)
    if found != wanted:
        raise ValueError(
            f"jax_ep.{op}: the surrounding shard_map must use the "
            f"communicator's mesh {wanted}, found {found}"
        )
    types = {axis: t for axis, t in types.items() if found[axis] > 1}
    automatic = [a for a, t in types.items() if t == AxisType.Auto]
    if automatic:
        raise ValueError(
            f"jax_ep.{op}: every mesh axis of more than one device must be manual in "
            f"the surrounding shard_map, found {automatic} left to the compiler. Make "
            "them manual where jax_ep is called, with a shard_map inside this one, "
            "whose specs name these axes alone: jax.shard_map(layer, in_specs=..., "
            f"out_specs=..., axis_names={{{str(automatic)[1:-1]}}}); or leave out "
            "axis_names= of this one"
        )
    explicit = [a for a, t in types.items() if t == AxisType.Explicit]
    if explicit:
        # JAX's vmap takes them out of shard_map's default for axis_names.
        raise ValueError(
            f"jax_ep.{op}: every mesh axis of more than one device must be manual in "
            f"the surrounding shard_map, found Explicit {explicit} left out. jax.vmap "
            "over a batch that is split over an Explicit axis leaves it out: call "
            "jax.vmap inside shard_map, whose specs then name the axis for the batch, "
            "or make the axis Auto and call jax.vmap(..., "
            f"spmd_axis_name={explicit[0]!r}). Without vmap, leave out axis_names= or "
            "name all axes"
        )


# Rows and slots are numbered by int32.
INT32_MAX = 2**31 - 1
# What the plan's kernel divides by multiplication; far above real models.
_MAXIMUM = 2**16


def as_integer(value: Any) -> int | None:
    """`value` as int: Python's, NumPy's, and arrays of one; None for others."""
    if isinstance(value, (bool, np.bool_, jax.core.Tracer)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_static(op: str, name: str, value: Any) -> None:
    """Raises TypeError where `value` is known only when the program runs."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"jax_ep.{op}: {name} is static, found a traced "
            f"{value.dtype}{list(value.shape)}; give a number that is known while JAX "
            "traces: one that the function closes over, or an argument that "
            "jax.jit(..., static_argnames=...) names"
        )


def check_integer(op: str, name: str, value: Any, minimum: int) -> int:
    """Returns `value` as int, or raises where it is no integer >= minimum."""
    check_static(op, name, value)
    result = as_integer(value)
    if result is None:
        raise TypeError(
            f"jax_ep.{op}: {name} must be a Python integer, found "
            f"{type(value).__name__}"
        )
    if result < minimum:
        raise ValueError(f"jax_ep.{op}: {name} must be >= {minimum}, found {result}")
    return result


def check_small_integer(op: str, name: str, value: Any) -> int:
    """Like check_integer with a minimum of 1, and at most 2**16."""
    result = check_integer(op, name, value, 1)
    if result > _MAXIMUM:
        raise ValueError(f"jax_ep.{op}: {name} must be <= {_MAXIMUM}, found {result}")
    return result


def check_places(op: str, plan: Plan) -> None:
    """Raises ValueError where the pairs of `plan` cannot be numbered."""
    local_experts = plan.group_sizes.shape[0]
    if local_experts > limits.MAX_LOCAL_EXPERTS:
        raise ValueError(
            f"jax_ep.{op}: a rank must own at most {limits.MAX_LOCAL_EXPERTS} experts, "
            f"found {local_experts}"
        )
    places = plan.capacity * plan.top_k + local_experts * plan.expert_alignment
    if max(places, plan.expert_capacity) > INT32_MAX:
        raise ValueError(
            f"jax_ep.{op}: C * K and the pads must be below 2**31, found {places}; "
            "give make_plan a smaller capacity"
        )
