"""make_plan: its arguments, checked, and what follows from them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Unpack, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep._api import buffer_sizes
from jax_ep._api.plan_options import (
    DropOrder,
    PlanKeywords,
    PlanOptions,
    Tokens,
    plan_options,
)
from jax_ep._data import checks
from jax_ep._data.limits import MAX_TOP_K
from jax_ep._data.plan import Plan
from jax_ep._data.sizes import Defaults
from jax_ep._operations import (
    demand,
    exchanges,
    node_plan,
    replicated,
)
from jax_ep._operations.arrays import running_sums
from jax_ep._setup.communicator import Communicator


def make_plan(
    topk_idx: jax.Array,
    *,
    comm: Communicator,
    num_experts: int,
    options: PlanOptions | None = None,
    **keywords: Unpack[PlanKeywords],
) -> Plan:
    """Decides who sends which row where. Collective over `comm`'s axis.

    Expert e lives on rank e // ceil(num_experts / R). A token sends one row to
    each rank that owns at least one of its experts. A receiver orders its rows
    by (source rank, token), so the plan is a pure function of the inputs.

    The capacities are the sizes of buffers: on each rank a leaf of b bytes a row
    takes C * b bytes when it is dispatched and S * b when it is permuted. The
    defaults have room for the worst case, all rows on one rank: with R = 64,
    T = 4096, K = 8 and 7168 columns of bfloat16 (b = 14336) C * b is 3.8 GB and
    S * b is 30 GB; capacity_factor=1.25 makes both 0.6 GB. `Plan.describe` tells
    them, and a default that makes a buffer of more than 1 GiB warns once.

    Args:
      topk_idx: int[T, K], the experts of each token (any integer dtype). An id
        outside [0, num_experts), -1 above all, means "no expert". Duplicate
        ids in one token are legal: one row travels, each k counts.
      comm: the communicator, over whose mesh the surrounding shard_map runs.
      num_experts: E >= 1; need not divide by R (the last ranks own fewer).
      options: capacities, alignment and what is dropped, as one value; in its place
        its attributes can be keywords. Default: nothing can be dropped.
      **keywords: attributes of `PlanOptions`. expert_alignment is 1 where neither
        says anything.

    Returns:
      A `Plan`. Integers only: it has no derivative.

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.
      RuntimeError: the communicator is closed.
    """
    options = plan_options("make_plan", options, keywords, expert_alignment=1)
    return check_request(topk_idx, comm, num_experts, options).make()


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """A plan that is still to be made: the arguments of `make_plan`, checked.

    Attributes:
      ids: i32[T, K].
      worst_case: the expert rows that there can be at most, pads included.
      limit: pairs that are kept at most; None where S alone says.
      defaults: as in Plan.
      others: as in Plan.
    """

    ids: jax.Array
    comm: Communicator
    num_experts: int
    capacity: int
    expert_alignment: int
    expert_capacity: int
    worst_case: int
    node_capacity: int
    drop_order: DropOrder
    limit: int | jax.Array | None
    defaults: Defaults
    tokens: Tokens

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.ids.shape[0]

    @property
    def sizes(self) -> dict[str, Any]:
        """Parameters of the exchanges that make plans."""
        return {
            "comm": self.comm,
            "num_experts": self.num_experts,
            "capacity": self.capacity,
            "expert_alignment": self.expert_alignment,
        }

    @property
    def between_nodes(self) -> bool:
        """Whether ranks ask those of other nodes.

        T is the same on all ranks; where it is 0 nobody has to ask.
        """
        travel = self.tokens == "split" and self.num_tokens > 0
        return self.comm.num_nodes > 1 and travel

    def make(self) -> Plan:
        """Asks the other ranks."""
        if self.between_nodes:
            arrays, crossing = node_plan.plan(
                self.ids, **self.sizes, node_capacity=self.node_capacity
            )
            return self._plan(arrays, crossing)
        makes = replicated if self.tokens == "replicated" else exchanges
        return self.inside_a_node(makes.plan(self.ids, **self.sizes))

    def inside_a_node(self, arrays: dict[str, jax.Array]) -> Plan:
        """The plan that consists of `arrays`, as exchanges.plan returns them."""
        nodes = {
            "node_demand": jnp.zeros_like(arrays["num_recv"]),
            "node_overflow": jnp.zeros_like(arrays["overflow"]),
        }
        return self._plan(arrays | nodes, None)

    def _plan(self, arrays, crossing) -> Plan:
        # Dropped by XLA where nobody asks: the plan's kernel knows no expert rows.
        padded, kept = arrays["group_sizes"], arrays["expert_counts"]
        ends = running_sums(padded)
        if self.expert_capacity < self.worst_case:
            fitting = jnp.minimum(ends, self.expert_capacity)
            arrays = arrays | {"group_sizes": jnp.diff(fitting, prepend=0)}
            kept = jnp.clip(self.expert_capacity - ends + padded, 0, kept)
        wanted = arrays["expert_counts"]
        if self._drops_rows:
            wanted = demand.demand_counts(self.ids, self.comm, self.num_experts)
        plan = Plan(
            **arrays,
            **self.sizes,
            _crossing=crossing,
            expert_demand=ends[-1],
            expert_overflow=ends[-1] > self.expert_capacity,
            expert_demand_counts=wanted,
            dropped_pairs=(wanted - kept).sum(dtype=jnp.int32),
            num_tokens=self.num_tokens,
            top_k=self.ids.shape[1],
            expert_capacity=self.expert_capacity,
            node_capacity=self.node_capacity,
            defaults=self.defaults,
            tokens=self.tokens,
        )
        if self.limit is not None:
            checks.check_places("make_plan", plan)
            plan = demand.keep(plan, self.limit, self.drop_order == "source")
        return checkpoint_name(plan, "ep_plan")

    @property
    def _drops_rows(self) -> bool:
        """Whether pairs can be lost before their experts are asked."""
        all_rows = _sources(self.comm, self.tokens) * self.num_tokens
        between_nodes = self.between_nodes and self.node_capacity < self.num_tokens
        return self.capacity < all_rows or between_nodes


def check_request(
    topk_idx: jax.Array,
    comm: Communicator,
    num_experts: int,
    options: PlanOptions,
    *,
    in_fp8: bool = False,
) -> PlanRequest:
    """Checks the arguments of `make_plan` and fills in what follows from others.

    in_fp8: products will be in FP8, whose kernels need groups aligned to 128.
    """
    _check_comm(comm)
    topk_idx = _checked_ids(topk_idx)
    num_tokens, top_k = topk_idx.shape
    num_experts = checks.check_small_integer("make_plan", "num_experts", num_experts)
    ids = as_int32(topk_idx, num_experts)
    drop_order, tokens = options.drop_order, options.tokens
    _check_choice("drop_order", drop_order, DropOrder)
    _check_choice("tokens", tokens, Tokens)
    if tokens == "replicated":
        buffer_sizes.check_no_travel(options)
        options = dataclasses.replace(options, capacity=max(1, num_tokens))
    num_rows = _sources(comm, tokens) * num_tokens
    limit, most_kept = buffer_sizes.checked_limit(
        options.expert_limit, num_rows * top_k
    )
    if callable(limit):
        limit = limit(demand.pairs_of_group(ids, comm, num_experts, tokens))
    alignment = options.expert_alignment
    if alignment is None:
        busy = math.inf if in_fp8 else num_rows * top_k / num_experts
        alignment = buffer_sizes.best_alignment(
            comm, options.expert_capacity, drop_order, busy
        )
    alignment = checks.check_small_integer("make_plan", "expert_alignment", alignment)
    defaults = buffer_sizes.defaults_of(comm, options, most_kept)
    pairs = buffer_sizes.balanced_pairs(
        options.capacity_factor, num_rows * top_k, comm, num_experts
    )
    capacity = buffer_sizes.checked_capacity(
        options.capacity, num_rows, pairs, comm, num_tokens
    )
    local_experts = -(-num_experts // comm.num_ranks)
    most = min(capacity, max(1, num_rows)) * top_k
    # Pairs that fit, however they fall on the experts.
    fitting = most if options.capacity_factor is None else max(1, min(most, pairs))
    expert_capacity = options.expert_capacity
    if expert_capacity is None:
        if most_kept is not None:
            fitting = min(fitting, max(1, most_kept))
        expert_capacity = buffer_sizes.padded(fitting, local_experts, alignment)
    else:
        expert_capacity = buffer_sizes.checked_expert_capacity(
            expert_capacity, alignment
        )
        fitting = buffer_sizes.fitting_pairs(expert_capacity, local_experts, alignment)
    node_capacity = options.node_capacity
    node_capacity = max(1, num_tokens) if node_capacity is None else node_capacity
    node_capacity = checks.check_integer("make_plan", "node_capacity", node_capacity, 1)
    return PlanRequest(
        ids=ids,
        comm=comm,
        num_experts=num_experts,
        capacity=capacity,
        expert_alignment=alignment,
        expert_capacity=expert_capacity,
        worst_case=buffer_sizes.padded(most, local_experts, alignment),
        node_capacity=min(node_capacity, max(1, num_tokens)),
        drop_order=drop_order,
        limit=buffer_sizes.pairs_kept(
            limit, fitting if drop_order == "source" else most, most
        ),
        defaults=defaults,
        tokens=tokens,
    )


def _check_comm(comm: Any) -> None:
    if not isinstance(comm, Communicator):
        raise TypeError(
            "jax_ep.make_plan: comm must be a jax_ep.Communicator, found "
            f"{type(comm).__name__}"
        )
    checks.check_open(comm, "make_plan")
    checks.check_inside_shard_map(comm, "make_plan")


def _checked_ids(topk_idx: Any) -> jax.Array:
    topk_idx = jnp.asarray(topk_idx)
    if not jnp.issubdtype(topk_idx.dtype, jnp.integer):
        raise TypeError(
            "jax_ep.make_plan: topk_idx must have an integer dtype, found "
            f"{topk_idx.dtype}"
        )
    if topk_idx.ndim != 2 or not 1 <= topk_idx.shape[1] <= MAX_TOP_K:
        raise ValueError(
            f"jax_ep.make_plan: topk_idx must be [T, K] with 1 <= K <= {MAX_TOP_K}, "
            f"found shape {topk_idx.shape}"
        )
    return topk_idx


def _sources(comm: Communicator, tokens: Tokens) -> int:
    """Ranks whose tokens may come to a rank."""
    return comm.num_ranks if tokens == "split" else 1


def _check_choice(name: str, value: Any, choices: Any) -> None:
    first, second = get_args(choices)
    if value not in (first, second):
        raise ValueError(
            f"jax_ep.make_plan: {name} must be {first!r} or {second!r}, found {value!r}"
        )


def as_int32(topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """Narrows ids to int32 without letting a wide or unsigned id wrap."""
    if topk_idx.dtype == jnp.int32:
        return topk_idx
    info = jnp.iinfo(topk_idx.dtype)
    if jnp.iinfo(jnp.int32).min <= info.min and info.max <= jnp.iinfo(jnp.int32).max:
        return topk_idx.astype(jnp.int32)
    # Compared in the wide type: 2**32 - 1 must not come out as expert -1.
    limit = min(num_experts, info.max)
    inside = (topk_idx >= 0) & (topk_idx < limit)
    return jnp.where(inside, topk_idx, 0).astype(jnp.int32) - jnp.where(
        inside, 0, 1
    ).astype(jnp.int32)
