"""How large a plan's buffers are: what its options say, checked, and the defaults.

C rows of the receive buffer, S expert rows, both as in `PlanOptions`.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._api.plan_options import DropOrder, PlanOptions
from jax_ep._data import checks
from jax_ep._data.sizes import Defaults
from jax_ep._operations import ragged
from jax_ep._setup.communicator import Communicator


def checked_capacity(
    value: Any, num_rows: int, pairs: int, comm: Communicator, num_tokens: int
) -> int:
    """C as int, or raises."""
    if value is None:
        value = max(1, min(num_rows, pairs))
    capacity = checks.check_integer("make_plan", "capacity", value, 1)
    # Slots and token ids are int32; no real buffer comes near.
    if max(capacity, comm.num_ranks * num_tokens) > checks.INT32_MAX:
        raise ValueError(
            "jax_ep.make_plan: capacity and R * T must be below 2**31, found "
            f"capacity {capacity} and R * T = {comm.num_ranks * num_tokens}"
        )
    return capacity


def checked_expert_capacity(value: Any, alignment: int) -> int:
    """expert_capacity as int, or raises."""
    value = checks.check_integer("make_plan", "expert_capacity", value, 1)
    if value % alignment:
        raise ValueError(
            "jax_ep.make_plan: expert_capacity must be a multiple of "
            f"expert_alignment {alignment}, found {value}"
        )
    return value


def check_no_travel(options: PlanOptions) -> None:
    """Refuses sizes of what replicated tokens do not do: travel."""
    for name in ("capacity", "node_capacity"):
        value = getattr(options, name)
        if value is not None:
            raise ValueError(
                "jax_ep.make_plan: with tokens='replicated' no row travels and "
                f"{name} must be None, found {value!r}; expert_capacity, "
                "capacity_factor and expert_limit bound expert rows"
            )


def checked_limit(value: Any, most: int) -> tuple[Any, int | None]:
    """expert_limit as int, i32[] or a function that gives one, and the most it can be.

    None where that is not known while JAX traces.
    """
    number = checks.as_integer(value)
    if value is None or number is not None:
        if number is not None and number < 0:
            raise ValueError(
                f"jax_ep.make_plan: expert_limit must be >= 0, found {number}"
            )
        return number, number
    if callable(value):
        # Eagerly, as if no shard_map were around.
        nowhere = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
        with jax.ensure_compile_time_eval(), nowhere:
            most_kept = int(_limit_array(value(jnp.int32(most))))
        return lambda pairs: _limit_array(value(pairs)), max(0, most_kept)
    return _limit_array(value), None


def _limit_array(value: Any) -> jax.Array:
    found = type(value).__name__
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        if value.shape == () and jnp.issubdtype(value.dtype, jnp.integer):
            if jnp.iinfo(value.dtype).max > checks.INT32_MAX:
                value = jnp.clip(value, 0, checks.INT32_MAX)
            return value.astype(jnp.int32)
        found = f"{value.dtype}{list(value.shape)}"
    raise TypeError(
        "jax_ep.make_plan: expert_limit must be an integer, an integer array of "
        f"shape [], or a function that returns one, found {found}"
    )


def pairs_kept(
    expert_limit: int | jax.Array | None, fitting: int, most: int
) -> int | jax.Array | None:
    """Pairs that are kept at most; None where that is no limit."""
    if expert_limit is None:
        expert_limit = fitting
    if isinstance(expert_limit, jax.Array):
        return jnp.minimum(expert_limit, fitting)
    limit = min(expert_limit, fitting)
    return None if limit >= most else limit


def best_alignment(
    comm: Communicator, expert_capacity: Any, drop_order: DropOrder, pairs: float
) -> int:
    """The alignment that products need for groups of so many pairs, if S allows it."""
    checks.check_static("make_plan", "expert_capacity", expert_capacity)
    if drop_order == "source" and expert_capacity is not None:
        return 1  # Pads would take room from pairs.
    best = ragged.best_alignment(comm.mesh.devices.flat[0].platform, pairs)
    if hasattr(expert_capacity, "__index__") and expert_capacity.__index__() % best:
        return 1
    return best


def defaults_of(
    comm: Communicator, options: PlanOptions, most_kept: int | None
) -> Defaults:
    """Which of the capacities nobody chose."""
    given = {}
    if options.capacity_factor is None:
        chosen = options.expert_capacity
        chosen = most_kept if chosen is None else chosen
        given |= {"capacity": options.capacity, "expert_capacity": chosen}
    if comm.num_nodes > 1 and options.tokens == "split":
        given["node_capacity"] = options.node_capacity
    return Defaults(name for name, size in given.items() if size is None)


def balanced_pairs(
    factor: float | None, num_pairs: int, comm: Communicator, num_experts: int
) -> int:
    """`factor` times a rank's share of all (token, k) pairs; all if None."""
    if factor is None:
        return num_pairs
    checks.check_static("make_plan", "capacity_factor", factor)
    if isinstance(factor, bool) or not isinstance(factor, numbers.Real):
        raise TypeError(
            "jax_ep.make_plan: capacity_factor must be a Python number or None, "
            f"found {type(factor).__name__}"
        )
    if not 0 < factor < math.inf:
        raise ValueError(
            "jax_ep.make_plan: capacity_factor must be finite and above 0, found "
            f"{factor}"
        )
    # A rank owns at most so many of all experts.
    share = -(-num_experts // comm.num_ranks) / num_experts
    return min(num_pairs, math.ceil(float(factor) * num_pairs * share))


def padded(num_pairs: int, local_experts: int, alignment: int) -> int:
    """Rows that hold so many pairs however they fall on the experts.

    Only groups that have a pair have pads, and groups are whole multiples.
    """
    pads = min(local_experts, num_pairs) * (alignment - 1)
    return (num_pairs + pads) // alignment * alignment


def fitting_pairs(expert_capacity: int, local_experts: int, alignment: int) -> int:
    """The most pairs for which _padded is at most `expert_capacity`."""
    number = expert_capacity - (local_experts - 1) * (alignment - 1)
    if number >= local_experts:
        return number
    return expert_capacity // alignment
