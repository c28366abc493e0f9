"""Plan, dispatch and combine: what ranks exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_ep._data import native
from jax_ep._data.ranks import collective_axes
from jax_ep._operations import xla_backend
from jax_ep._operations.arrays import bind_rows, make_varying, rank_axes, varying
from jax_ep._operations.operation import bind

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
ROUTING = ("_routes", "num_recv", "recv_src")


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
    outputs = bind(
        "ep_plan",
        make_varying(topk_idx, axes),
        comm=comm,
        num_experts=num_experts,
        capacity=capacity,
        expert_alignment=expert_alignment,
    )
    return dict(zip(PLAN_FIELDS, outputs, strict=True))


def dispatch(leaves: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Binds ep_dispatch: leaves [T, ...] -> [C, ...]."""
    return _bind_leaves("ep_dispatch", plan.capacity, leaves, plan)


def combine(leaves: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Binds ep_combine: leaves [C, ...] -> [T, ...]."""
    return _bind_leaves("ep_combine", plan.num_tokens, leaves, plan)


def _bind_leaves(name, num_rows, leaves, plan) -> list[jax.Array]:
    routing, leaves = varying_operands(leaves, plan)
    return bind_rows(
        leaves,
        num_rows,
        lambda batch: bind(name, *routing, *batch, **sizes(plan)),
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


# For the table --------------------------------------------------------------


def plan_results(topk_idx, *, comm, num_experts, capacity, **_):
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


def rows_of(parameter: str, num_routing: int = len(ROUTING)) -> Callable[..., Any]:
    """Avals of rows of leaves, whose number a parameter holds.

    They vary as their leaf does, which varies over the routing's axes.
    """

    def results(*avals, **params):
        return [
            leaf.update(shape=(params[parameter], *leaf.shape[1:]), weak_type=False)
            for leaf in avals[num_routing:]
        ]

    return results


def has_tokens(avals: Sequence[Any], params: Any) -> bool:
    """Whether a native call serves.

    T is the same on all ranks. Where it is 0 nobody has to ask the others, and
    XLA's GPU compiler does not survive an empty result beside others.
    """
    return params.get("num_tokens", avals[0].shape[0]) > 0


def plan_scratch(avals: Sequence[Any], params: Any) -> list[Any]:
    """Of a plan."""
    del avals
    size = native.plan_workspace_size(
        num_ranks=params["comm"].num_ranks, num_experts=params["num_experts"]
    )
    return [jax.core.ShapedArray((size,), np.dtype(np.int32))]


def plan_reference(topk_idx, *, comm, **sizes):
    return xla_backend.plan(
        topk_idx, axis_name=collective_axes(comm), num_ranks=comm.num_ranks, **sizes
    )


def dispatch_reference(*operands, comm, **_):
    return xla_backend.dispatch(
        *operands, axis_name=collective_axes(comm), num_ranks=comm.num_ranks
    )


def combine_reference(*operands, comm, num_tokens, **_):
    return xla_backend.combine(
        *operands,
        axis_name=collective_axes(comm),
        num_ranks=comm.num_ranks,
        num_tokens=num_tokens,
    )
