"""Between rows and experts, all of it local to a device.

ep_expert_rows numbers the (row, k) pairs, integers only. ep_permute and
ep_unpermute move rows by these numbers, ep_row_dots multiplies them. Each is
linear in its leaves, and in its weights where it has any; together they are
closed under differentiation:

    permute(x, w)[place of (c, k)] = w[c, k] * x[c]
    unpermute(f, w)[c] = sum over k of w[c, k] * f[place of (c, k)]
    row_dots(x, f)[c, k] = <x[c], f[place of (c, k)]>
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_ep._data import native
from jax_ep._operations import operation, xla_backend
from jax_ep._operations.arrays import (
    bind_rows,
    has_elements,
    make_varying,
    rank_axes,
    sum_dtype,
    varying,
)
from jax_ep._operations.operation import Operation, bind

if TYPE_CHECKING:
    from jax_ep._data.plan import Plan

# Routing operands that stand before weights and leaves. Only permute reads the empty
# ranges, but its transposes are permutes.
ROUTING = ("places", "empty_ranges")


def expert_rows(plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Binds ep_expert_rows: (i32[C, K] places or -1, i32[L + 1, 2] empty ranges).

    permute and unpermute of one plan each bind it; XLA merges equal calls.
    """
    axes = varying(plan.recv_topk_idx) | rank_axes(plan.comm)
    places, ranges = bind(
        "ep_expert_rows",
        make_varying(plan.recv_topk_idx, axes),
        backend=plan.comm.backend,
        local_experts=plan.group_sizes.shape[0],
        expert_alignment=plan.expert_alignment,
        expert_capacity=plan.expert_capacity,
    )
    return checkpoint_name((places, ranges), "ep_plan")


def permute(
    leaves: Sequence[jax.Array], plan: Plan, weights: jax.Array | None = None
) -> list[jax.Array]:
    """Binds ep_permute: leaves [C, ...] -> [S, ...]; weights [C, K] or None.

    Weights, where there are any, come in the dtype in which the leaves are summed.
    """
    return _bind_leaves("ep_permute", leaves, plan, plan.expert_capacity, weights)


def unpermute(
    leaves: Sequence[jax.Array], plan: Plan, weights: jax.Array | None
) -> list[jax.Array]:
    """Binds ep_unpermute: leaves [S, ...] -> [C, ...]; weights [C, K] or None."""
    if weights is None:
        return _bind_leaves("ep_unpermute", leaves, plan, plan.capacity, None)
    results: list[Any] = [None] * len(leaves)
    # Weights come in the dtype of the sums, which one call has one of.
    for wide in sorted({sum_dtype(leaf.dtype) for leaf in leaves}, key=str):
        chosen = [i for i, leaf in enumerate(leaves) if sum_dtype(leaf.dtype) == wide]
        sums = _bind_leaves(
            "ep_unpermute",
            [leaves[i] for i in chosen],
            plan,
            plan.capacity,
            weights.astype(wide),
        )
        for i, total in zip(chosen, sums, strict=True):
            results[i] = total
    return results


def _bind_leaves(name, leaves, plan, rows, weights) -> list[jax.Array]:
    moving = [leaf for leaf in leaves if has_elements(leaf)]
    routing = expert_rows(plan) if moving else ()
    axes = frozenset().union(*map(varying, routing))
    if weights is not None:
        # The gradient of the weights varies as all of the leaves do.
        axes |= varying(weights).union(*map(varying, moving))
        weights = make_varying(weights, axes)
    routing = tuple(make_varying(a, axes) for a in routing)
    return bind_rows(
        leaves,
        rows,
        lambda batch: bind_weighted(
            name,
            routing,
            weights,
            [make_varying(leaf, axes | varying(leaf)) for leaf in batch],
            backend=plan.comm.backend,
            expert_capacity=plan.expert_capacity,
        ),
    )


def bind_weighted(name, routing, weights, leaves, **params) -> list[Any]:
    """ep_permute or ep_unpermute; weights may be None."""
    weighted = weights is not None
    operands = (*routing, weights, *leaves) if weighted else (*routing, *leaves)
    return bind(name, *operands, **params | {"weighted": weighted})


def _split(operands, weighted: bool):
    """(routing, weights or None, leaves) of permute's and unpermute's operands."""
    routing, rest = operands[: len(ROUTING)], operands[len(ROUTING) :]
    return (routing, rest[0], rest[1:]) if weighted else (routing, None, rest)


# For the table ---------------------------------------------------------------


def expert_rows_results(recv_topk_idx, *, local_experts, **_):
    return [
        recv_topk_idx.update(weak_type=False),
        recv_topk_idx.update(shape=(local_experts + 1, 2), weak_type=False),
    ]


def expert_rows_reference(recv_topk_idx, *, backend, **sizes):
    del backend
    return xla_backend.expert_rows(recv_topk_idx, **sizes)


def expert_rows_attributes(avals, params) -> dict[str, int]:
    del avals
    return {name: params[name] for name in ("expert_alignment", "expert_capacity")}


def expert_rows_scratch(avals, params) -> list[Any]:
    num_words = native.expert_rows_workspace_size(
        num_pairs=math.prod(avals[0].shape), local_experts=params["local_experts"]
    )
    return [jax.core.ShapedArray((num_words,), np.dtype(np.int32))]


def permute_results(*avals, weighted, expert_capacity, **_):
    _, _, leaves = _split(avals, weighted)
    return [
        leaf.update(shape=(expert_capacity, *leaf.shape[1:]), weak_type=False)
        for leaf in leaves
    ]


def permute_reference(*operands, weighted, expert_capacity, **_):
    (places, _), weights, leaves = _split(operands, weighted)
    return xla_backend.permute(
        places, weights, *leaves, expert_capacity=expert_capacity
    )


def unpermute_results(*avals, weighted, **_):
    (places, _), _, leaves = _split(avals, weighted)
    return [
        leaf.update(shape=(places.shape[0], *leaf.shape[1:]), weak_type=False)
        for leaf in leaves
    ]


def unpermute_reference(*operands, weighted, **_):
    (places, _), weights, leaves = _split(operands, weighted)
    return xla_backend.unpermute(places, weights, *leaves)


def row_dots_results(places, ranges, *leaves, **_):
    del ranges
    return [places.update(dtype=sum_dtype(leaves[0].dtype), weak_type=False)]


def row_dots_reference(places, ranges, *leaves, **_):
    del ranges
    dtype = sum_dtype(leaves[0].dtype)
    return xla_backend.row_dots(places, *leaves, dtype=dtype)


# Differentiation: by weights, too --------------------------------------------


def permute_jvp(op: Operation, primals, tangents, *, weighted, **params):
    """Of permute and unpermute."""
    params |= {"weighted": weighted}
    outputs, result = operation.rows_jvp(op, primals, tangents, **params)
    routing, _, leaves = _split(primals, weighted)
    _, weights_dot, _ = _split(tangents, weighted)
    if weighted and not operation.is_zero(weights_dot):
        moved = bind(op.name, *routing, weights_dot, *leaves, **params)
        for i, tangent in enumerate(moved):
            operation.add_to(result, i, tangent)
    return outputs, result


def permute_transposed(op: Operation, cotangents, *operands, weighted, **params):
    """Of permute and unpermute."""
    routing, weights, leaves = _split(operands, weighted)
    if weights is None or not operation.is_linear(weights):
        params |= {"weighted": weighted}
        return operation.rows_transposed(op, cotangents, *operands, **params)
    live = operation.live_ones(cotangents)
    (dots,) = operation.zeros_of_linear([weights])
    if live:
        rows, places = [cotangents[i] for i in live], [leaves[i] for i in live]
        if op.name == "ep_permute":
            rows, places = places, rows
        (dots,) = bind("ep_row_dots", *routing, *rows, *places, **params)
    return [*[None] * len(ROUTING), dots, *[None] * len(leaves)]


def row_dots_jvp(op: Operation, primals, tangents, **params):
    routing, leaves = primals[: len(ROUTING)], primals[len(ROUTING) :]
    dots = tangents[len(ROUTING) :]
    half = len(leaves) // 2
    outputs, result = operation.integers_jvp(op, primals, tangents, **params)
    for moving in (range(half), range(half, 2 * half)):
        live = [i for i in moving if not operation.is_zero(dots[i])]
        if not live:
            continue
        # Each live tangent beside the other factor of its pair.
        first = [dots[i] if i < half else leaves[i - half] for i in live]
        second = [leaves[i + half] if i < half else dots[i] for i in live]
        (tangent,) = bind(op.name, *routing, *first, *second, **params)
        operation.add_to(result, 0, tangent)
    return outputs, result


def row_dots_transposed(op: Operation, cotangents, *operands, **params):
    del op
    routing, leaves = operands[: len(ROUTING)], operands[len(ROUTING) :]
    half = len(leaves) // 2
    linear = [i for i, leaf in enumerate(leaves) if operation.is_linear(leaf)]
    result = operation.zeros_of_linear(leaves)
    if not operation.is_zero(cotangents[0]):
        for to, indices in (
            ("ep_unpermute", [i for i in linear if i < half]),
            ("ep_permute", [i for i in linear if i >= half]),
        ):
            if not indices:
                continue
            factors = [leaves[(i + half) % (2 * half)] for i in indices]
            moved = bind_weighted(to, routing, cotangents[0], factors, **params)
            for i, cotangent in zip(indices, moved, strict=True):
                result[i] = cotangent
    return [None] * len(ROUTING) + result
