"""The JAX primitives ep_plan, ep_dispatch and ep_combine.

The only file that knows their FFI targets, attributes, result shapes and rules
of differentiation and batching. dispatch and combine are linear in their rows
and each is the other's transpose; the routing operands are integers.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

from jax_ep._data import native
from jax_ep._data.ranks import collective_axes, named_axes, position_axes
from jax_ep._operations import xla_backend
from jax_ep._operations.primitive_rules import (
    SUMMABLE,
    batch_rows,
    bind_rows,
    define,
    each_element,
    ffi_call,
    integers_jvp,
    make_varying,
    rank_axes,
    varying,
    zero_tangent,
)

if TYPE_CHECKING:
    from jax_ep._data.plan import Plan
    from jax_ep._data.ranks import Ranks

# The results of ep_plan, as Plan names them.
PLAN_FIELDS = (
    "_routes",
    "num_recv",
    "num_demand",
    "overflow",
    "recv_counts",
    "recv_topk_idx",
    "recv_src",
    "expert_counts",
    "group_sizes",
)
# Routing operands that stand before the leaves in ep_dispatch and ep_combine.
ROUTING_FIELDS = ("_routes", "num_recv", "recv_src")
NUM_ROUTING = len(ROUTING_FIELDS)


def plan(
    topk_idx: jax.Array,
    *,
    comm: Ranks,
    num_experts: int,
    capacity: int,
    expert_alignment: int,
) -> dict[str, jax.Array]:
    """Binds ep_plan; returns Plan's array fields by name."""
    axes = varying(topk_idx) | rank_axes(comm)
    outputs = plan_p.bind(
        make_varying(topk_idx, axes),
        comm=comm,
        num_experts=num_experts,
        capacity=capacity,
        expert_alignment=expert_alignment,
    )
    return dict(zip(PLAN_FIELDS, outputs, strict=True))


def dispatch(leaves: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Binds ep_dispatch: leaves [T, ...] -> [C, ...]."""
    return _bind_leaves(dispatch_p, leaves, plan)


def combine(leaves: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Binds ep_combine: leaves [C, ...] -> [T, ...]."""
    return _bind_leaves(combine_p, leaves, plan)


def _bind_leaves(primitive, leaves, plan) -> list[jax.Array]:
    routing, leaves = varying_operands(leaves, plan)
    return bind_rows(
        leaves,
        plan.capacity if primitive is dispatch_p else plan.num_tokens,
        lambda batch: primitive.bind(*routing, *batch, **sizes(plan)),
    )


def varying_operands(
    leaves: Sequence[jax.Array], plan: Plan, more: Sequence[jax.Array] = ()
) -> tuple[tuple[jax.Array, ...], list[jax.Array]]:
    """The routing operands and `leaves`, varying over what they have to.

    `more` are further routing operands.
    """
    routing = (plan._routes, plan.num_recv, plan.recv_src, *more)
    axes = rank_axes(plan.comm).union(*map(varying, routing))
    # Each leaf varies at least as the routing does, so that a result's type is
    # its leaf's and the transpose gives the cotangent the type JAX expects.
    return (
        tuple(make_varying(a, axes) for a in routing),
        [make_varying(leaf, axes | varying(leaf)) for leaf in leaves],
    )


def sizes(plan: Plan) -> dict[str, Any]:
    """Parameters of ep_dispatch, ep_combine and their halves."""
    return {
        "comm": plan.comm,
        "num_tokens": plan.num_tokens,
        "capacity": plan.capacity,
    }


# Abstract evaluation ---------------------------------------------------------


def plan_abstract_eval(topk_idx, *, comm, num_experts, capacity, **_):
    """The abstract values of PLAN_FIELDS."""
    num_tokens, top_k = topk_idx.shape
    ranks = comm.num_ranks
    local_experts = -(-num_experts // ranks)
    shapes = (
        (num_tokens, min(top_k, ranks), 2),
        (),
        (),
        (),
        (ranks,),
        (capacity, top_k),
        (capacity,),
        (local_experts,),
        (local_experts,),
    )
    return [
        topk_idx.update(
            shape=shape,
            dtype=np.dtype(bool if name == "overflow" else np.int32),
            weak_type=False,
            # Every axis is manual here, so no dimension is sharded; only the
            # number of dimensions differs from the operand's.
            sharding=topk_idx.sharding.update(spec=P(*(None for _ in shape))),
        )
        for name, shape in zip(PLAN_FIELDS, shapes, strict=True)
    ]


def _rows_abstract_eval(rows_of: Callable[[dict], int], num_routing: int):
    def abstract_eval(*avals, **params):
        # Results vary as their leaf does: varying_operands made the leaf vary over
        # the routing's axes.
        return [
            leaf.update(shape=(rows_of(params), *leaf.shape[1:]), weak_type=False)
            for leaf in avals[num_routing:]
        ]

    return abstract_eval


# Lowering --------------------------------------------------------------------


def _check_devices(ctx: mlir.LoweringRuleContext, comm: Ranks) -> None:
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


def _position(ctx: mlir.LoweringRuleContext, comm: Ranks) -> tuple[Any, Any]:
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

    def position():
        return [lax.axis_index(tuple(counted)).astype(np.uint32)]

    (value,) = mlir.lower_fun(position, multiple_results=True)(
        ctx.replace(avals_in=[], avals_out=[aval])
    )
    return value, aval


# Call sites of each module that is lowered, by communicator and kind of slot.
_sites: weakref.WeakKeyDictionary[Any, dict[tuple[int, str], Iterator[int]]] = (
    weakref.WeakKeyDictionary()
)


def _site_number(ctx: mlir.LoweringRuleContext, comm: Ranks, slot: str) -> int:
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
    ctx: mlir.LoweringRuleContext,
    target: str,
    operands: Sequence[Any],
    avals_in: Sequence[Any],
    avals_out: Sequence[Any],
    comm: Ranks,
    options: Mapping[str, Any] | None = None,
    slot: Literal["plan", "rows"] | None = None,
    **attributes: int,
) -> Sequence[Any]:
    """A call of `comm`, whose first operand is where the program has this device.

    HLO holds sizes and ids, equal on all processes. `slot` is the kind of control
    slot that a call of its own takes: SlotKind in cc/control_slots.h.
    """
    _check_devices(ctx, comm)
    # Sites that share a channel or a number are counted from here on.
    (native.host if comm.backend == "cpu" else native.cuda)().begin_program()
    if slot is not None:
        attributes["site"] = _site_number(ctx, comm, slot)
    position, aval = _position(ctx, comm)
    return ffi_call(
        ctx,
        target,
        comm.backend,
        [position, *operands],
        [aval, *avals_in],
        avals_out,
        _after_position(options),
        comm=comm.id,
        channel=ctx.module_context.new_channel(),
        **attributes,
    )


def _is_plain(comm: Ranks, num_tokens: int) -> bool:
    """Whether a call is lowered to plain JAX.

    T is the same on all ranks. Where it is 0 nobody has to ask the others, and
    XLA's GPU compiler does not survive an empty result beside others.
    """
    return comm.backend == "xla" or num_tokens == 0


def plan_workspace(comm: Ranks, num_experts: int) -> Any:
    """The scratch of a plan, its last result."""
    size = native.plan_workspace_size(num_ranks=comm.num_ranks, num_experts=num_experts)
    return jax.core.ShapedArray((size,), np.dtype(np.int32))


def _plan_lowering(ctx, topk_idx, *, comm, num_experts, capacity, expert_alignment):
    if _is_plain(comm, ctx.avals_in[0].shape[0]):
        xla_plan = functools.partial(
            xla_backend.plan,
            axis_name=collective_axes(comm),
            num_ranks=comm.num_ranks,
            num_experts=num_experts,
            capacity=capacity,
            expert_alignment=expert_alignment,
        )
        return mlir.lower_fun(xla_plan, multiple_results=True)(ctx, topk_idx)
    results = communicator_call(
        ctx,
        "jax_ep_plan",
        [topk_idx],
        ctx.avals_in,
        [*ctx.avals_out, plan_workspace(comm, num_experts)],
        comm,
        slot="plan",
        num_experts=num_experts,
        expert_alignment=expert_alignment,
    )
    return results[: len(PLAN_FIELDS)]


def _dispatch_lowering(ctx, *operands, comm, num_tokens, **_):
    if _is_plain(comm, num_tokens):
        xla_dispatch = functools.partial(
            xla_backend.dispatch,
            axis_name=collective_axes(comm),
            num_ranks=comm.num_ranks,
        )
        return mlir.lower_fun(xla_dispatch, multiple_results=True)(ctx, *operands)
    return communicator_call(
        ctx,
        "jax_ep_dispatch",
        operands,
        ctx.avals_in,
        ctx.avals_out,
        comm,
        slot="rows",
    )


def _combine_lowering(ctx, *operands, comm, num_tokens, **_):
    if _is_plain(comm, num_tokens):
        xla_combine = functools.partial(
            xla_backend.combine,
            axis_name=collective_axes(comm),
            num_ranks=comm.num_ranks,
            num_tokens=num_tokens,
        )
        return mlir.lower_fun(xla_combine, multiple_results=True)(ctx, *operands)
    return communicator_call(
        ctx,
        "jax_ep_combine",
        operands,
        ctx.avals_in,
        ctx.avals_out,
        comm,
        slot="rows",
    )


# Differentiation: leaves are linear, routing operands are integers -----------


def _rows_jvp(primitive: Primitive, num_routing: int, primals, tangents, **params):
    outputs = primitive.bind(*primals, **params)
    leaf_tangents = tangents[num_routing:]
    live = [i for i, t in enumerate(leaf_tangents) if type(t) is not ad.Zero]
    result: list[Any] = [zero_tangent(out) for out in outputs]
    if live:
        moved = primitive.bind(
            *primals[:num_routing], *(leaf_tangents[i] for i in live), **params
        )
        for i, tangent in zip(live, moved, strict=True):
            result[i] = tangent
    return outputs, result


def check_gradient(cotangent: jax.Array) -> None:
    """Raises TypeError where a dispatched leaf's cotangents have no sum."""
    if cotangent.dtype not in SUMMABLE:
        raise TypeError(
            f"jax_ep.dispatch: a leaf of dtype {cotangent.dtype} has no gradient: "
            "combine cannot sum it; dispatch a wider dtype, or say with "
            "jax.custom_vjp what the gradient is"
        )


def _rows_transpose(
    other: Callable[[], Primitive],
    num_routing: int,
    sums: bool,
    cotangents,
    *operands,
    **params,
):
    leaves = operands[num_routing:]
    result: list[Any] = [
        ad.Zero(leaf.aval) if ad.is_undefined_primal(leaf) else None for leaf in leaves
    ]
    live = [
        i
        for i, (ct, leaf) in enumerate(zip(cotangents, leaves, strict=True))
        if ad.is_undefined_primal(leaf) and type(ct) is not ad.Zero
    ]
    if live:
        if not sums:
            for i in live:
                check_gradient(cotangents[i])
        moved = other().bind(
            *operands[:num_routing], *(cotangents[i] for i in live), **params
        )
        for i, cotangent in zip(live, moved, strict=True):
            result[i] = cotangent
    return [None] * num_routing + result


# Definitions -----------------------------------------------------------------
# Not cacheable: every call gets a channel of its own.


def define_rows(
    name: str,
    rows_of: Callable[[dict], int],
    lowering: Callable,
    other: Callable[[], Primitive],
    *,
    num_routing: int = NUM_ROUTING,
    sums: bool,
) -> Primitive:
    """A primitive that moves rows: linear in the leaves behind its routing.

    Args:
      name: what jaxprs show.
      rows_of: rows of its results, from its parameters.
      lowering: its rule for every platform.
      other: its transpose, which takes the same routing and parameters.
      num_routing: routing operands.
      sums: whether it adds rows; if not, its transpose does.
    """
    primitive = define(
        name, _rows_abstract_eval(rows_of, num_routing), lowering, cacheable=False
    )
    ad.primitive_jvps[primitive] = functools.partial(_rows_jvp, primitive, num_routing)
    ad.primitive_transposes[primitive] = functools.partial(
        _rows_transpose, other, num_routing, sums
    )
    batching.primitive_batchers[primitive] = functools.partial(
        batch_rows, primitive, num_routing
    )
    return primitive


plan_p = define("ep_plan", plan_abstract_eval, _plan_lowering, cacheable=False)
ad.primitive_jvps[plan_p] = functools.partial(integers_jvp, plan_p)
batching.primitive_batchers[plan_p] = functools.partial(each_element, plan_p)
dispatch_p = define_rows(
    "ep_dispatch",
    lambda p: p["capacity"],
    _dispatch_lowering,
    lambda: combine_p,
    sums=False,
)
combine_p = define_rows(
    "ep_combine",
    lambda p: p["num_tokens"],
    _combine_lowering,
    lambda: dispatch_p,
    sums=True,
)
