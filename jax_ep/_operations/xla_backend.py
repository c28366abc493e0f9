"""All operations in plain JAX.

Runs wherever JAX runs and is what the native backends are tested against.
dispatch and combine gather every row to every rank: right, not fast.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._operations.arrays import id_counts, sum_dtype

# Axes over which ranks count row-major; none where there is one rank.
Axes = tuple[str, ...]


def plan(
    topk_idx: jax.Array,
    *,
    axis_name: Axes,
    num_ranks: int,
    num_experts: int,
    capacity: int,
    expert_alignment: int,
) -> list[jax.Array]:
    """Plan's arrays in the order of ep_plan's results; topk_idx is i32[T, K]."""
    num_tokens, top_k = topk_idx.shape
    local_experts = -(-num_experts // num_ranks)
    if num_tokens == 0:
        return _plan_of_nothing(num_ranks, top_k, local_experts, capacity)
    rank = _rank(axis_name)
    ids = _gather_rows(topk_idx, axis_name, num_ranks)  # [R * T, K]
    owner = jnp.where((ids >= 0) & (ids < num_experts), ids // local_experts, num_ranks)
    # sent[i, r]: row i = (source rank, token) goes to rank r.
    sent = jnp.stack([(owner == r).any(axis=1) for r in range(num_ranks)], axis=1)
    slot = jnp.cumsum(sent, axis=0, dtype=jnp.int32) - 1
    kept = sent & (slot < capacity)

    kept_here = lax.dynamic_index_in_dim(kept, rank, 1, keepdims=False)
    slot_here = lax.dynamic_index_in_dim(slot, rank, 1, keepdims=False)
    rows = jnp.arange(num_ranks * num_tokens, dtype=jnp.int32)
    recv_src = (
        jnp.full((capacity,), -1, jnp.int32)
        .at[jnp.where(kept_here, slot_here, capacity)]
        .set(rows, mode="drop")
    )
    local_idx = jnp.where(owner == rank, ids - rank * local_experts, -1)
    recv_topk_idx = _take_rows(local_idx, recv_src, -1)
    expert_counts = id_counts(recv_topk_idx, local_experts)
    group_sizes = -(-expert_counts // expert_alignment) * expert_alignment
    num_demand = lax.dynamic_index_in_dim(
        sent.sum(axis=0, dtype=jnp.int32), rank, 0, keepdims=False
    )
    recv_counts = kept_here.reshape(num_ranks, num_tokens).sum(1, dtype=jnp.int32)
    return [
        _routes(sent, kept, slot, rank, num_tokens, min(top_k, num_ranks)),
        jnp.minimum(num_demand, capacity),
        num_demand,
        num_demand > capacity,
        recv_counts,
        recv_topk_idx,
        recv_src,
        expert_counts,
        group_sizes,
    ]


def _plan_of_nothing(num_ranks, top_k, local_experts, capacity):
    """What every rank gets where no rank has a token."""
    nothing = jnp.zeros((), jnp.int32)
    no_experts = jnp.zeros((local_experts,), jnp.int32)
    return [
        jnp.zeros((0, min(top_k, num_ranks), 2), jnp.int32),
        nothing,
        nothing,
        jnp.zeros((), jnp.bool_),
        jnp.zeros((num_ranks,), jnp.int32),
        jnp.full((capacity, top_k), -1, jnp.int32),
        jnp.full((capacity,), -1, jnp.int32),
        no_experts,
        no_experts,
    ]


def _routes(sent, kept, slot, rank, num_tokens, width):
    """i32[T, width, 2]: this rank's (rank, slot) pairs in rank order."""
    sent, kept, slot = (
        lax.dynamic_slice_in_dim(a, rank * num_tokens, num_tokens)
        for a in (sent, kept, slot)
    )
    column = jnp.where(kept, jnp.cumsum(sent, axis=1, dtype=jnp.int32) - 1, width)
    num_ranks = sent.shape[1]
    pairs = jnp.stack(
        [jnp.broadcast_to(jnp.arange(num_ranks, dtype=jnp.int32), slot.shape), slot],
        axis=2,
    )
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    return (
        jnp.full((num_tokens, width, 2), -1, jnp.int32)
        .at[token, column]
        .set(pairs, mode="drop")
    )


def _named(ids, count):
    """bool[..., count]: which of 0 .. count - 1 stand in ids [..., K]."""
    choices = jnp.arange(count, dtype=ids.dtype).reshape(*(1,) * ids.ndim, count)
    return (ids[..., None] == choices).any(axis=-2)


def _take_rows(rows, index, fill):
    """rows[index], `fill` where index is -1; takes an empty `rows`."""
    if rows.shape[0] == 0:
        return jnp.full((index.shape[0], *rows.shape[1:]), fill, rows.dtype)
    taken = rows[jnp.maximum(index, 0)]
    mask = (index >= 0).reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.where(mask, taken, jnp.array(fill, rows.dtype))


def _gather_rows(rows, axis_name, num_ranks):
    """Rows of all ranks; collectives refuse arrays without elements."""
    if rows.size == 0:
        return jnp.zeros((num_ranks * rows.shape[0], *rows.shape[1:]), rows.dtype)
    return lax.all_gather(rows, axis_name, tiled=True) if axis_name else rows


def _to_each(parts, axis_name):
    """The parts [R, ...] that all ranks have for this one, in the order of ranks."""
    if not axis_name:
        return parts
    return lax.all_to_all(parts, axis_name, split_axis=0, concat_axis=0)


def _rank(axis_name):
    return lax.axis_index(axis_name) if axis_name else jnp.int32(0)


def _as_bits(x):
    """x as unsigned integers: collectives do not carry every dtype."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_as_bits(x.real), _as_bits(x.imag)], axis=-1)
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _from_bits(bits, dtype):
    if dtype == jnp.bool_:
        return bits.astype(jnp.bool_)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.finfo(dtype).dtype
        return lax.complex(
            _from_bits(bits[..., 0], part), _from_bits(bits[..., 1], part)
        )
    return lax.bitcast_convert_type(bits, dtype)


def dispatch(routes, num_recv, recv_src, *leaves, axis_name: Axes, num_ranks: int):
    """ep_dispatch: gathers every rank's rows, keeps those that came here."""
    del routes, num_recv
    return [
        _from_bits(
            _take_rows(_gather_rows(_as_bits(x), axis_name, num_ranks), recv_src, 0),
            x.dtype,
        )
        for x in leaves
    ]


def combine(
    routes,
    num_recv,
    recv_src,
    *leaves,
    axis_name: Axes,
    num_ranks: int,
    num_tokens: int,
):
    """ep_combine: returns each row to its (source rank, token), then adds."""
    del num_recv
    num_rows = num_ranks * num_tokens
    # A slot that was dropped or never filled has no route: its row is not read.
    routed = _named(routes[..., 0], num_ranks)  # [T, R]
    results = []
    for y in leaves:
        if num_tokens == 0 or y.size == 0:
            results.append(jnp.zeros((num_tokens, *y.shape[1:]), y.dtype))
            continue
        bits = _as_bits(y)
        home = (
            jnp.zeros((num_rows, *bits.shape[1:]), bits.dtype)
            .at[jnp.where(recv_src >= 0, recv_src, num_rows)]
            .set(bits, mode="drop")
            .reshape(num_ranks, num_tokens, *bits.shape[1:])
        )
        terms = _to_each(home, axis_name)
        terms = _from_bits(terms, y.dtype)
        results.append(_sum_in_order(terms, routed, y.dtype))
    return results


def _sum_in_order(terms, routed, dtype):
    """Sums terms[r, t] over the r in routed[t, r], from the first on."""
    wide = sum_dtype(dtype)
    total = jnp.zeros(terms.shape[1:], wide)
    begun = jnp.zeros(terms.shape[1:2] + (1,) * (terms.ndim - 2), jnp.bool_)
    for r in range(terms.shape[0]):
        present = routed[:, r].reshape(begun.shape)
        term = terms[r].astype(wide)
        # Adding to a zero would turn a lone -0.0 into +0.0.
        total = jnp.where(present, jnp.where(begun, total + term, term), total)
        begun = begun | present
    # The barrier keeps XLA from carrying excess precision past the rounding.
    return lax.optimization_barrier(total.astype(dtype))


def expert_rows(
    recv_topk_idx: jax.Array,
    *,
    local_experts: int,
    expert_alignment: int,
    expert_capacity: int,
) -> list[jax.Array]:
    """ep_expert_rows: the place of each (row, k) pair, and the empty ranges."""
    expert = recv_topk_idx.ravel()
    expert = jnp.where((expert >= 0) & (expert < local_experts), expert, local_experts)
    counts = id_counts(expert, local_experts)
    sizes = -(-counts // expert_alignment) * expert_alignment
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    # Sorted by expert, a pair's place is its index plus the pads before it.
    pads = ends - sizes - (jnp.cumsum(counts, dtype=jnp.int32) - counts)
    order = jnp.argsort(expert, stable=True)
    ordered = expert[order]
    place = jnp.arange(expert.size, dtype=jnp.int32) + jnp.append(pads, 0)[ordered]
    kept = (ordered < local_experts) & (place < expert_capacity)
    rows = jnp.zeros_like(expert).at[order].set(jnp.where(kept, place, -1))
    begins = jnp.append(ends - sizes + counts, ends[-1])
    ranges = jnp.stack([begins, jnp.append(ends, expert_capacity)], axis=1)
    ranges = jnp.minimum(ranges, expert_capacity)
    return [rows.reshape(recv_topk_idx.shape), ranges.astype(jnp.int32)]


def permute(expert_rows, weights, *leaves, expert_capacity: int):
    """ep_permute: every row to its places, times its weights unless None."""
    num_rows, top_k = expert_rows.shape
    places = jnp.where(expert_rows < 0, expert_capacity, expert_rows).ravel()
    pair = (
        jnp.full((expert_capacity,), -1, jnp.int32)
        .at[places]
        .set(jnp.arange(num_rows * top_k, dtype=jnp.int32), mode="drop")
    )
    row = jnp.where(pair < 0, -1, pair // top_k)
    results = []
    for x in leaves:
        if weights is None:
            # As integers: conversions inside XLA would change a NaN's bits.
            moved = _from_bits(_take_rows(_as_bits(x), row, 0), x.dtype)
        else:
            scale = _take_rows(weights.ravel(), pair, 0)
            moved = _scaled(_take_rows(x, row, 0), scale, pair >= 0).astype(x.dtype)
        results.append(moved)
    return results


def unpermute(expert_rows, weights, *leaves):
    """ep_unpermute: the sum over k of what stands in the places of each row."""
    results = []
    for f in leaves:
        terms = [_take_rows(f, place, 0) for place in expert_rows.T]
        if weights is not None:
            terms = [
                _scaled(term, scale, place >= 0)
                for term, scale, place in zip(
                    terms, weights.T, expert_rows.T, strict=True
                )
            ]
        results.append(_sum_in_order(jnp.stack(terms), expert_rows >= 0, f.dtype))
    return results


def row_dots(expert_rows, *leaves, dtype):
    """ep_row_dots: products of the rows with what stands in their places."""
    half = len(leaves) // 2
    total = jnp.zeros(expert_rows.shape, dtype)
    for x, f in zip(leaves[:half], leaves[half:], strict=True):
        axes = tuple(range(1, x.ndim))
        dots = [
            (x.astype(dtype) * _take_rows(f, place, 0).astype(dtype)).sum(axes)
            for place in expert_rows.T
        ]
        # What stands in no place may be anything, the row's own NaN included.
        total += jnp.where(expert_rows >= 0, jnp.stack(dots, axis=1), 0)
    return [total]


def low_latency_dispatch(
    topk_idx,
    weights,
    *leaves,
    axis_name: Axes,
    num_ranks: int,
    num_experts: int,
    max_tokens: int,
    by_expert: bool,
):
    """ep_low_latency_dispatch: gathers every rank's tokens, keeps what is wanted."""
    num_tokens, top_k = topk_idx.shape
    local_experts = -(-num_experts // num_ranks)
    ids = _gather_rows(topk_idx, axis_name, num_ranks)  # [R * T, K]
    rank = _rank(axis_name)
    valid = (ids >= 0) & (ids < num_experts) & (ids // local_experts == rank)
    local = jnp.where(valid, ids - rank * local_experts, -1)

    def in_slots(rows, fill):
        rows = rows.reshape(num_ranks, num_tokens, *rows.shape[1:])
        short = [(0, 0, 0)] * rows.ndim
        short[1] = (0, max_tokens - num_tokens, 0)
        return lax.pad(rows, jnp.array(fill, rows.dtype), short)

    def gathered(leaf):
        return _gather_rows(_as_bits(leaf), axis_name, num_ranks)

    if not by_expert:
        row = jnp.arange(num_ranks * num_tokens, dtype=jnp.int32)
        source = in_slots(jnp.where(valid.any(axis=1), row, -1), -1)
        results = []
        for x in leaves:
            moved = _take_rows(gathered(x), source.ravel(), 0)
            moved = moved.reshape(num_ranks, max_tokens, *moved.shape[1:])
            results.append(_from_bits(moved, x.dtype))
        results.append(in_slots(local, -1))
        if weights is not None:
            theirs = _gather_rows(weights, axis_name, num_ranks)
            results.append(in_slots(jnp.where(valid, theirs, 0), 0))
        return results
    # One row for each (row, expert), however often the expert is named.
    sent = _named(local, local_experts)
    slot = jnp.cumsum(sent, axis=0, dtype=jnp.int32) - 1  # [R * T, L]
    height = num_ranks * max_tokens
    if num_tokens == 0:
        places = local
    else:
        own = jnp.take_along_axis(slot, jnp.maximum(local, 0), axis=1)
        places = jnp.where(valid, local * height + own, -1)
    row = jnp.arange(num_ranks * num_tokens, dtype=jnp.int32)
    source = (
        jnp.full((local_experts * height,), -1, jnp.int32)
        .at[jnp.where(valid, places, local_experts * height)]
        .set(jnp.broadcast_to(row[:, None], places.shape), mode="drop")
    )
    results = []
    for x in leaves:
        moved = _take_rows(gathered(x), source, 0)
        moved = moved.reshape(local_experts, height, *moved.shape[1:])
        results.append(_from_bits(moved, x.dtype))
    results.append(sent.sum(axis=0, dtype=jnp.int32))
    results.append(places.reshape(num_ranks, num_tokens, top_k))
    return results


def low_latency_combine(
    topk_idx,
    weights,
    places,
    y,
    *,
    axis_name: Axes,
    num_ranks: int,
    num_experts: int,
    max_tokens: int,
    by_expert: bool,
):
    """ep_low_latency_combine: sums over experts, sends home, sums over ranks."""
    del max_tokens
    num_tokens, top_k = topk_idx.shape
    if num_tokens == 0:
        return [jnp.zeros((0, y.shape[-1]), y.dtype)]
    if by_expert:
        theirs = _gather_rows(weights, axis_name, num_ranks)  # [R * T, K]
        place = places.reshape(-1, top_k)
        rows = y.reshape(-1, y.shape[-1])
        terms = [
            _scaled(_take_rows(rows, at, 0), scale, at >= 0)
            for at, scale in zip(place.T, theirs.T, strict=True)
        ]
        sums = _sum_in_order(jnp.stack(terms), place >= 0, y.dtype)
        sums = sums.reshape(num_ranks, num_tokens, -1)
    else:
        sums = y[:, :num_tokens]
    local_experts = -(-num_experts // num_ranks)
    valid = (topk_idx >= 0) & (topk_idx < num_experts)
    owner = jnp.where(valid, topk_idx // local_experts, -1)
    routed = _named(owner, num_ranks)  # [T, R]
    home = _to_each(_as_bits(sums), axis_name)
    return [_sum_in_order(_from_bits(home, y.dtype), routed, y.dtype)]


def _scaled(rows, scale, present):
    """rows[i] * scale[i] in the dtype of sums, 0 where not present."""
    wide = sum_dtype(rows.dtype)
    shape = (-1, *(1,) * (rows.ndim - 1))
    scaled = rows.astype(wide) * scale.astype(wide).reshape(shape)
    return jnp.where(present.reshape(shape), scaled, 0)
