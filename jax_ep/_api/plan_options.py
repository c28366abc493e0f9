"""How large a plan's buffers are, and what is dropped, as one value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypedDict

import jax

DropOrder = Literal["expert", "source"]
Tokens = Literal["split", "replicated"]
Limit = int | jax.Array | Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Sizes of a plan's buffers, and what is dropped where they are too small.

    One value for `make_plan`, `plan_dispatch`, `moe` and `sharded_moe`, which take the
    attributes as keywords, too. Values are checked there.

    Attributes:
      capacity: C >= 1, rows of the receive buffer. Default R * T: nothing can
        be dropped, b * R * T bytes for a leaf of b bytes a row. Rows past C, in
        (source rank, token) order, are dropped at the sender: they contribute 0
        forward and backward, and `num_demand` and `overflow` tell.
      capacity_factor: chooses both capacities where they are None, as a
        multiple of the (token, k) pairs of a rank when all experts are equally
        busy: capacity = factor * pairs, at most R * T, and expert_capacity =
        factor * pairs plus the pads. 1 is enough for perfect balance.
      expert_alignment: group_sizes is rounded up to a multiple of it. None: what
        `ragged_dot` and `gated_mlp` need: 128 on GPUs, 64 where an expert
        has 48 (token, k) pairs or fewer on average and products are not in FP8, and 1
        elsewhere; 1 with an expert_capacity that is no multiple of that.
      expert_capacity: S >= 1, a multiple of expert_alignment, the rows that
        `permute` makes. Default: the worst case, min(C, R * T) * K and the
        pads, where nothing can be dropped: K times the bytes of the receive
        buffer and more. Expert rows past S are dropped: they contribute 0 forward
        and backward, and `expert_demand` and `expert_overflow` tell.
      node_capacity: >= 1, rows that a rank can send to one other node; buffers
        between nodes are so large, and so much travels, whatever is in it.
        Default T: nothing can be dropped. Rows past it, in the order of tokens,
        are dropped at the sender: they contribute 0 forward and backward, and
        `node_demand` and `node_overflow` tell. Without effect on one node.
      drop_order: in which order (token, k) pairs fill the S expert rows, and past
        which they are dropped. "expert": (expert, source, token, k), as rows stand in
        the result of `permute`. "source": (source, expert, token, k), as where each
        source sorts its pairs by expert and the receiver's buffer takes them source
        after source: MaxText's ragged buffer, AXLearn's capacity. It keeps S pairs, or
        what capacity_factor says; with a given expert_capacity and an alignment of A
        as many as fit however they fall on the experts, about S - L * (A - 1), so
        that expert_alignment=None then stays 1. `expert_limit` needs no such care.
      expert_limit: pairs that this rank keeps at most, the first in drop_order, pads
        not counted. An integer, from which a default of expert_capacity follows; an
        i32[] array, which may be traced and differ from rank to rank; or a function
        of how many pairs all ranks of the group have, i32[], that returns one and
        never falls, for capacities that count valid tokens: the default of
        expert_capacity follows from what it gives for the most pairs there can be.
        None: as many as there is room for. Where it, or drop_order="source", can drop
        something, the pairs are numbered once more, in integers.
      tokens: "split": every rank has tokens of its own. "replicated": every rank of
        the group has the same T tokens and gives the same topk_idx, as in decoding
        over ranks that share a batch. Then nothing travels: `dispatch` takes the rows
        of this rank's experts from its own copy, C = T, slot t is token t, and
        `combine` sums over ranks, so that every rank has all sums. Ids that differ
        from rank to rank give sums of different tokens, and nobody notices. capacity
        and node_capacity have to be None, and capacity_factor is of T * K pairs.
    """

    capacity: int | None = None
    capacity_factor: float | None = None
    expert_alignment: int | None = None
    expert_capacity: int | None = None
    node_capacity: int | None = None
    drop_order: DropOrder = "expert"
    expert_limit: Limit | None = None
    tokens: Tokens = "split"


class PlanKeywords(TypedDict, total=False):
    """The attributes of PlanOptions as keywords."""

    capacity: int | None
    capacity_factor: float | None
    expert_alignment: int | None
    expert_capacity: int | None
    node_capacity: int | None
    drop_order: DropOrder
    expert_limit: Limit | None
    tokens: Tokens


def plan_options(
    op: str, options: Any, keywords: PlanKeywords, **defaults: Any
) -> PlanOptions:
    """What the caller of `op` gave: `options`, or keywords over `defaults`."""
    if options is not None:
        if keywords:
            raise TypeError(
                f"jax_ep.{op}: give options or keywords, found options and "
                f"{sorted(keywords)}; dataclasses.replace changes options"
            )
        if not isinstance(options, PlanOptions):
            raise TypeError(
                f"jax_ep.{op}: options must be a jax_ep.PlanOptions, found "
                f"{type(options).__name__}"
            )
        return options
    names = [field.name for field in dataclasses.fields(PlanOptions)]
    unknown = sorted(set(keywords) - set(names))
    if unknown:
        raise TypeError(
            f"jax_ep.{op}: keywords must be attributes of PlanOptions, {names}, found "
            f"{unknown}"
        )
    given: dict[str, Any] = {**defaults, **keywords}
    return PlanOptions(**given)
