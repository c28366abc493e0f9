"""Dispatch and combine in one launch each, for the few tokens of decoding.

No plan is made before: rows go to fixed slots of memory that a `LowLatencyBuffer`
holds on every rank, and the receiver's side does the rest. For large T the plan and
the operations made of it are faster; docs/guide.md says which to take when.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_ep._api.planning import as_int32
from jax_ep._data import checks
from jax_ep._data.limits import MAX_COUNTED_EXPERTS, MAX_TOP_K
from jax_ep._operations import fp8, low_latency
from jax_ep._setup.low_latency_buffer import LowLatencyBuffer

Layout = Literal["expert", "rank"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowLatencyHandle:
    """Where the rows of a dispatch came from: what its combine needs.

    A pytree of int32 arrays; used as it was made.

    Attributes:
      buffer, layout: as the dispatch was called.
      num_tokens, top_k: T and K.
    """

    _topk_idx: jax.Array  # [T, K]
    # By expert [R, T, K], the index of each row among all of the experts', or -1;
    # by rank [R, max_tokens, K], local ids or -1.
    _places: jax.Array
    buffer: LowLatencyBuffer = dataclasses.field(metadata={"static": True})
    layout: Layout = dataclasses.field(metadata={"static": True})
    num_tokens: int = dataclasses.field(metadata={"static": True})
    top_k: int = dataclasses.field(metadata={"static": True})


def low_latency_dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    *,
    buffer: LowLatencyBuffer,
    quantize: Literal["fp8"] | None = None,
    layout: Layout = "expert",
    topk_weights: jax.Array | None = None,
    after: Any = None,
) -> tuple[Any, Any, LowLatencyHandle]:
    """Sends every token to the ranks of its experts, in one launch.

    A row crosses to a rank once, whatever number of its experts live there.

    Args:
      x: [T, H] of the buffer's dtype, T <= buffer.max_tokens.
      topk_idx: int[T, K], the experts of each token; as in `make_plan`, ids outside
        [0, E) mean "no expert", and a token may name one twice.
      buffer: the buffer, whose communicator's mesh the surrounding shard_map has.
      quantize: "fp8": rows travel and come out as `quantize_fp8` makes them, with
        blocks of 128 columns and float32 scales.
      layout: what comes out.
      topk_weights: floating [T, K], in the layout "rank" alone: travels along.
      after: arrays that the call has to come after; see `LowLatencyBuffer`.

    Returns:
      (rows, who, handle), L = ceil(E / R).

      "expert": rows [L, R * max_tokens, H], of each expert the tokens that name it,
      packed to the front in the order of (source rank, token); who is their number,
      i32[L]. A token that names an expert twice has one row there.

      "rank": rows [R, max_tokens, H], token t of rank s in rows[s, t]; who is i32[R,
      max_tokens, K], the local expert ids of each row, -1 for experts elsewhere and
      in rows that nothing came to. With topk_weights who is (ids, weights float32[R,
      max_tokens, K]), 0 where the id is -1.

      With quantize rows are (q float8_e4m3fn, scales float32[..., ceil(H / 128)]).
      Rows that nothing came to are not written and may hold anything.

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.
      RuntimeError: the buffer or its communicator is closed.

    Derivative: none, and asking for one raises; `dispatch` has one.
    """
    _check_buffer("low_latency_dispatch", buffer)
    x, topk_idx = jnp.asarray(x), jnp.asarray(topk_idx)
    if x.ndim != 2 or x.dtype != buffer.dtype or x.shape[1] != buffer.hidden:
        raise ValueError(
            f"jax_ep.low_latency_dispatch: x must be {buffer.dtype}[T, "
            f"{buffer.hidden}] as the buffer was made for, found "
            f"{x.dtype}{list(x.shape)}"
        )
    if x.shape[0] > buffer.max_tokens:
        raise ValueError(
            "jax_ep.low_latency_dispatch: T must be at most the buffer's max_tokens "
            f"{buffer.max_tokens}, found {x.shape[0]}"
        )
    if not jnp.issubdtype(topk_idx.dtype, jnp.integer):
        raise TypeError(
            "jax_ep.low_latency_dispatch: topk_idx must have an integer dtype, found "
            f"{topk_idx.dtype}"
        )
    if (
        topk_idx.ndim != 2
        or topk_idx.shape[0] != x.shape[0]
        or not 1 <= topk_idx.shape[1] <= MAX_TOP_K
    ):
        raise ValueError(
            "jax_ep.low_latency_dispatch: topk_idx must be [T, K] with T = "
            f"{x.shape[0]} as in x and 1 <= K <= {MAX_TOP_K}, found shape "
            f"{topk_idx.shape}"
        )
    if quantize not in (None, "fp8"):
        raise ValueError(
            "jax_ep.low_latency_dispatch: quantize must be None or 'fp8', found "
            f"{quantize!r}"
        )
    if layout not in ("expert", "rank"):
        raise ValueError(
            "jax_ep.low_latency_dispatch: layout must be 'expert' or 'rank', found "
            f"{layout!r}"
        )
    by_expert = layout == "expert"
    counted = buffer.comm.num_ranks * buffer.num_local_experts
    if by_expert and counted > MAX_COUNTED_EXPERTS:
        raise ValueError(
            "jax_ep.low_latency_dispatch: layout 'expert' takes at most "
            f"{MAX_COUNTED_EXPERTS} experts, found {counted}; take layout 'rank'"
        )
    if topk_weights is not None:
        if by_expert:
            raise ValueError(
                "jax_ep.low_latency_dispatch: topk_weights travel in the layout "
                "'rank' alone; in 'expert' give them to low_latency_combine"
            )
        topk_weights = _weights("low_latency_dispatch", topk_weights, topk_idx.shape)
    leaves, in_kernel = (buffer._pad(x),), False
    if quantize:
        in_kernel = buffer.backend == "cuda"
        leaves = leaves if in_kernel else fp8.quantize_fp8(x)
    topk_idx = as_int32(topk_idx, buffer.num_experts)
    results = low_latency.dispatch(
        topk_idx,
        topk_weights,
        leaves,
        jax.tree.leaves(after),
        buffer=buffer,
        by_expert=by_expert,
        quantize=in_kernel,
    )
    count = 2 if quantize else 1
    results[0] = buffer._unpad(results[0])
    rows = tuple(results[:2]) if quantize else results[0]
    places = results[count + by_expert]
    who: Any = results[count]
    if topk_weights is not None:
        who = (places, results[count + 1])
    handle = LowLatencyHandle(topk_idx, places, buffer, layout, *topk_idx.shape)
    return rows, who, handle


def low_latency_combine(
    y: jax.Array,
    topk_weights: jax.Array | None,
    handle: LowLatencyHandle,
    *,
    after: Any = None,
) -> jax.Array:
    """Brings rows back to their tokens and sums them, in one launch.

    A row comes back from a rank once: what its experts made of a token is summed
    there, in float32 in the order of k, and rounded to y's dtype; the sum over
    ranks, in rank order and float32, is rounded once more.

    Args:
      y: of the buffer's dtype; in the layout "expert" [L, R * max_tokens, H], in
        "rank" [R, max_tokens, H], where the caller's rank has summed up its experts
        itself. Rows that nothing came to are not read.
      topk_weights: floating [T, K] in the layout "expert", of this rank's tokens;
        used where the id names an expert. None in the layout "rank".
      handle: of the dispatch.
      after: arrays that the call has to come after; see `LowLatencyBuffer`.

    Returns:
      [T, H] of y's dtype: the sum over k of topk_weights[t, k] times the row of the
      k-th expert, or over ranks of their rows. 0 for a token without an expert.

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.
      RuntimeError: the buffer or its communicator is closed.

    Derivative: none, and asking for one raises; `combine` has one.
    """
    if not isinstance(handle, LowLatencyHandle):
        raise TypeError(
            "jax_ep.low_latency_combine: handle must be what low_latency_dispatch "
            f"returned, found {type(handle).__name__}"
        )
    buffer = handle.buffer
    _check_buffer("low_latency_combine", buffer)
    by_expert = handle.layout == "expert"
    ranks, most = buffer.comm.num_ranks, buffer.max_tokens
    rows = (buffer.num_local_experts, ranks * most) if by_expert else (ranks, most)
    y = jnp.asarray(y)
    if y.dtype != buffer.dtype or y.shape != (*rows, buffer.hidden):
        raise ValueError(
            f"jax_ep.low_latency_combine: y must be {buffer.dtype}"
            f"{[*rows, buffer.hidden]} in the layout {handle.layout!r}, found "
            f"{y.dtype}{list(y.shape)}"
        )
    if by_expert and topk_weights is None:
        raise ValueError(
            "jax_ep.low_latency_combine: the layout 'expert' needs topk_weights [T, K]"
        )
    if not by_expert and topk_weights is not None:
        raise ValueError(
            "jax_ep.low_latency_combine: in the layout 'rank' y is summed over experts "
            "already, topk_weights must be None; give them to low_latency_dispatch"
        )
    if topk_weights is not None:
        topk_weights = _weights(
            "low_latency_combine", topk_weights, (handle.num_tokens, handle.top_k)
        )
    out = low_latency.combine(
        handle._topk_idx,
        topk_weights,
        handle._places,
        buffer._pad(y),
        jax.tree.leaves(after),
        buffer=buffer,
        by_expert=by_expert,
    )
    return buffer._unpad(out)


def _check_buffer(op: str, buffer: LowLatencyBuffer) -> None:
    if not isinstance(buffer, LowLatencyBuffer):
        raise TypeError(
            f"jax_ep.{op}: buffer must be a jax_ep.LowLatencyBuffer, found "
            f"{type(buffer).__name__}"
        )
    checks.check_open(buffer.comm, op)
    if buffer.closed:
        raise RuntimeError(
            f"jax_ep.{op}: the buffer is closed; create a new one (executables "
            "compiled before close() keep working)"
        )
    checks.check_inside_shard_map(buffer.comm, op)


def _weights(op: str, weights: Any, shape: tuple[int, ...]) -> jax.Array:
    weights = jnp.asarray(weights)
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise TypeError(
            f"jax_ep.{op}: topk_weights must be floating, found "
            f"{weights.dtype}{list(weights.shape)}"
        )
    if weights.shape != shape:
        raise ValueError(
            f"jax_ep.{op}: topk_weights must be [T, K] = {list(shape)}, found "
            f"{weights.dtype}{list(weights.shape)}"
        )
    return weights.astype(jnp.float32)
