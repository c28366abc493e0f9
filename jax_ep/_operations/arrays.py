"""What operations ask of arrays: dtypes of sums, mesh axes, leaves that travel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep._data.limits import MAX_LEAVES
from jax_ep._data.ranks import named_axes

if TYPE_CHECKING:
    from jax_ep._data.ranks import Ranks

SUMMABLE = frozenset(
    jnp.dtype(name)
    for name in (
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    )
)


def sum_dtype(dtype: Any) -> np.dtype:
    """The dtype in which rows of `dtype`, a summable one, are added up."""
    dtype = np.dtype(dtype)
    return dtype if dtype.itemsize > 2 else np.dtype(np.float32)


def varying(x: Any) -> frozenset[str]:
    """The mesh axes over which x varies; empty where check_vma is off."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def rank_axes(comm: Ranks) -> frozenset[str]:
    """The communicator's axes that are manual here: one of size 1 need not be."""
    return frozenset(summed_axes(comm))


def summed_axes(comm: Ranks) -> tuple[str, ...]:
    """The same in the communicator's order, for sums: HLO is equal in all processes."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in named_axes(comm.axis_name) if axis in manual)


def make_varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Casts x to vary over `axes`; nothing to do where check_vma is off."""
    missing = tuple(sorted(axes - varying(x)))
    if not missing or not varying(lax.axis_index(missing)):
        return x
    return lax.pcast(x, missing, to="varying")


def id_counts(ids: jax.Array, length: int) -> jax.Array:
    """i32[length]: how often each of 0 .. length - 1 stands in ids of any shape."""
    ids = jnp.where((ids >= 0) & (ids < length), ids, length).ravel()
    return jnp.zeros((length,), jnp.int32).at[ids].add(1, mode="drop")


def running_sums(sizes: jax.Array) -> jax.Array:
    """i32[..., G]: the sum of each element of sizes [..., G] and those before it.

    By comparing all with all: one short kernel on GPUs, where jnp.cumsum of so few
    elements takes 4 us.
    """
    index = jnp.arange(sizes.shape[-1])
    until = index[None, :] <= index[:, None]
    return jnp.sum(jnp.where(until, sizes[..., None, :], 0), axis=-1, dtype=jnp.int32)


def has_elements(leaf: jax.Array) -> bool:
    """Whether a row of this leaf holds anything."""
    return math.prod(leaf.shape[1:]) > 0


def launches(leaves: Sequence[jax.Array], most: int = MAX_LEAVES) -> list[list[int]]:
    """Which leaves travel, launch by launch, at most `most` at a time.

    Leaves of no elements stay at home: XLA's GPU compiler does not survive an
    empty result beside others.
    """
    moving = [i for i, leaf in enumerate(leaves) if has_elements(leaf)]
    return [moving[n : n + most] for n in range(0, len(moving), most)]


def without_travel(leaf: jax.Array, num_rows: int) -> jax.Array:
    """[num_rows, ...] of a leaf that stays at home; any other leaf as it is."""
    if has_elements(leaf):
        return leaf
    return jnp.zeros_like(leaf, shape=(num_rows, *leaf.shape[1:]))


def bind_rows(
    leaves: Sequence[jax.Array],
    num_rows: int,
    bind: Callable[[Sequence[jax.Array]], Sequence[jax.Array]],
) -> list[jax.Array]:
    """What `bind` makes of all leaves, [num_rows, ...] each, launch by launch."""
    results = [without_travel(leaf, num_rows) for leaf in leaves]
    for launch in launches(leaves):
        moved = bind([leaves[i] for i in launch])
        for i, result in zip(launch, moved, strict=True):
            results[i] = result
    return results


def group_of_rows(ends: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """(i32[M], bool[M]): the group of each row, or 0, and whether it has one."""
    # The default method is a loop of small kernels on GPUs.
    group = jnp.searchsorted(
        ends, jnp.arange(num_rows, dtype=jnp.int32), side="right", method="compare_all"
    )
    inside = group < len(ends)
    return jnp.where(inside, group, 0), inside
