"""Custom calls of the native modules, as they stand in HLO."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from jax import lax
from jax.extend.mlir.dialects import stablehlo

from jax_ep._data import native
from jax_ep._data.ranks import named_axes, position_axes

if TYPE_CHECKING:
    from jax_ep._data.ranks import Ranks


def ffi_call(
    ctx: Any,
    target: str,
    backend: str,
    operands: Sequence[Any],
    avals_in: Sequence[Any],
    avals_out: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    **attributes: int,
) -> Sequence[Any]:
    """Emits a custom call; RuntimeError where `backend` has no code for it.

    `options` are those of jax.ffi.ffi_lowering, such as aliases.
    """
    platforms = set(ctx.module_context.platforms)
    if not platforms <= native.PLATFORMS:
        raise RuntimeError(
            f"jax_ep: backend {backend!r} runs on {sorted(native.PLATFORMS)}, "
            f"found a program for {sorted(platforms)}; use backend='xla' there"
        )
    rule = jax.ffi.ffi_lowering(target, **(options or {}))
    return rule(
        ctx.replace(avals_in=avals_in, avals_out=avals_out),
        *operands,
        **{name: np.int64(value) for name, value in attributes.items()},
    )


def _check_devices(ctx: Any, comm: Ranks) -> None:
    """Refuses other devices than the communicator's, or another order of them.

    As far as one can see here: the mesh may be an abstract one, and JAX may run the
    program on another mesh of its shape. So every call looks again when it runs
    (`_position`).
    """
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    if not isinstance(mesh, jax.sharding.Mesh):
        return
    # Axes may stand in another order: then each device's coordinates count.
    order = [mesh.axis_names.index(axis) for axis in comm.mesh.axis_names]
    found = np.transpose(mesh.devices, order)
    if not np.array_equal(found, comm.mesh.devices):
        raise ValueError(
            "jax_ep: the surrounding shard_map must use the communicator's "
            f"mesh, found another order of devices: {_ids(found)} instead of "
            f"{_ids(comm.mesh.devices)}"
        )


def _ids(devices: np.ndarray) -> list:
    return np.vectorize(lambda device: device.id)(devices).tolist()


def position(ctx: Any, comm: Ranks, lower_fun: Callable[..., Any]) -> tuple[Any, Any]:
    """This device's position on the program's mesh, u32[], and its abstract value.

    Every axis of more than one device is manual (checks.py saw to that). Where they
    stand in the order in which positions count them, it is what XLA calls the
    partition's number. XLA makes one of all of a computation's, without a kernel.
    Else it is a sum of coordinates.
    """
    aval = jax.core.ShapedArray((), np.dtype(np.uint32))
    sizes = comm.mesh.shape
    counted = [
        a for a in position_axes(sizes, named_axes(comm.axis_name)) if sizes[a] > 1
    ]
    here = [a for a in jax.sharding.get_abstract_mesh().axis_names if sizes[a] > 1]
    if here == counted:
        return stablehlo.partition_id(), aval

    def coordinates():
        return [lax.axis_index(tuple(counted)).astype(np.uint32)]

    (value,) = lower_fun(ctx.replace(avals_in=[], avals_out=[aval]), coordinates, [])
    return value, aval


# Call sites of each module that is lowered, by communicator and kind of slot.
_sites: weakref.WeakKeyDictionary[Any, dict[tuple[int, str], Iterator[int]]] = (
    weakref.WeakKeyDictionary()
)


def _site_number(ctx: Any, comm: Ranks, slot: str) -> int:
    """Which call of `comm` in this module takes a control slot of this kind."""
    sites = _sites.setdefault(ctx.module_context.module, {})
    return next(sites.setdefault((comm.id, slot), itertools.count()))


def _after_position(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options of a call whose operands stand behind the position."""
    moved = dict(options or {})
    aliases = moved.get("operand_output_aliases")
    if aliases is not None:
        moved["operand_output_aliases"] = {i + 1: out for i, out in aliases.items()}
    return moved


def communicator_call(
    ctx: Any,
    target: str,
    comm: Ranks,
    position: tuple[Any, Any],
    operands: Sequence[Any],
    avals_in: Sequence[Any],
    avals_out: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    slot: Literal["plan", "rows"] | None = None,
    **attributes: int,
) -> Sequence[Any]:
    """A call of `comm`, whose first operand is where the program has this device.

    HLO holds sizes and ids, equal on all processes. `slot` is the kind of control
    slot that a call of its own takes: SlotKind in cc/handshake/control_slots.h.
    """
    _check_devices(ctx, comm)
    # Sites that share a channel or a number are counted from here on.
    (native.host if comm.backend == "cpu" else native.cuda)().begin_program()
    if slot is not None:
        attributes["site"] = _site_number(ctx, comm, slot)
    value, aval = position
    return ffi_call(
        ctx,
        target,
        comm.backend,
        [value, *operands],
        [aval, *avals_in],
        avals_out,
        _after_position(options),
        comm=comm.id,
        channel=ctx.module_context.new_channel(),
        **attributes,
    )
