"""Bytes of the buffers that a plan makes operations allocate: all static."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


class Defaults(tuple[str, ...]):
    """Names of the capacities that nobody chose.

    All are equal: plans of equal sizes have one tree structure, so that they can be
    the branches of a cond or the carry of a loop, whoever chose the sizes.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Defaults)

    def __hash__(self) -> int:
        return 0


def row_bytes(leaf: Any) -> int:
    """Bytes of one row of a leaf [rows, ...], as it travels."""
    return math.prod(leaf.shape[1:]) * np.dtype(leaf.dtype).itemsize


# A leaf's buffer that is larger only because of a default gets a warning.
_LARGE = 1 << 30


def num_rows(plan: Any) -> dict[str, int]:
    """Rows of a leaf's buffers on each rank, by the argument that bounds them.

    Args:
      plan: a Plan, or what one is to be made of.
    """
    rows = {"capacity": plan.capacity, "expert_capacity": plan.expert_capacity}
    others = plan.comm.num_nodes - 1
    if others and plan.tokens == "split":
        rows["node_capacity"] = plan.num_tokens + others * plan.node_capacity
    return rows


_NAMES = {
    "capacity": "receive_bytes",
    "expert_capacity": "expert_bytes",
    "node_capacity": "wire_bytes",
}


def describe(plan: Any, tree: Any) -> dict[str, Any]:
    """What Plan.describe returns."""
    return {
        "num_ranks": plan.comm.num_ranks,
        "num_tokens": plan.num_tokens,
        "top_k": plan.top_k,
        "num_experts": plan.num_experts,
        "num_local_experts": -(-plan.num_experts // plan.comm.num_ranks),
        "capacity": plan.capacity,
        "expert_capacity": plan.expert_capacity,
        "expert_alignment": plan.expert_alignment,
        "node_capacity": plan.node_capacity,
        "defaults": list(plan.defaults),
        "leaves": {
            jax.tree_util.keystr(path): {"row_bytes": row_bytes(leaf)}
            | {
                _NAMES[argument]: rows * row_bytes(leaf)
                for argument, rows in num_rows(plan).items()
            }
            for path, leaf in jax.tree.leaves_with_path(tree)
        },
    }


def warn_of_defaults(
    op: str, plan: Any, leaves: Sequence[jax.Array], *arguments: str
) -> None:
    """Warns where the default of one of `arguments` makes `op` allocate much."""
    for argument in arguments:
        if argument not in plan.defaults:
            continue
        rows = num_rows(plan)[argument]
        for leaf in leaves:
            if rows * row_bytes(leaf) > _LARGE:
                _warn(op, argument, rows, row_bytes(leaf))


_BUFFERS = {
    "capacity": "receive buffer",
    "expert_capacity": "buffer of expert rows",
    "node_capacity": "buffer of rows between nodes",
}
_INSTEAD = {
    "capacity": "capacity or capacity_factor",
    "expert_capacity": "expert_capacity or capacity_factor",
    "node_capacity": "node_capacity",
}


# Once for each size: JAX traces a layer many times.
@functools.cache
def _warn(op: str, argument: str, rows: int, size: int) -> None:
    warnings.warn(
        f"jax_ep.{op}: the {_BUFFERS[argument]} of a leaf takes "
        f"{rows * size / 2**30:.1f} GiB on each rank, {rows} rows of {size} bytes, "
        f"because the default of {argument} has room for the worst case; give "
        f"{_INSTEAD[argument]} where the plan is made; the same number, given, is "
        "not warned of",
        stacklevel=4,
    )
