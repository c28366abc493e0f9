"""Dispatch and combine in one launch each, for the few tokens of decoding.

No plan is made before: rows go to fixed slots of memory that a `LowLatencyBuffer`
holds on every rank, and the receiver's side does the rest. For large T the plan and
the operations made of it are faster; README says which to take when.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_ep import (
    backends,
    bootstrap,
    checks,
    fp8,
    low_latency_primitives,
    native,
    reach,
    window_memory,
)
from jax_ep.communicator import Communicator
from jax_ep.held import Held
from jax_ep.links import Links
from jax_ep.plan import _MAX_TOP_K, _as_int32

Layout = Literal["expert", "rank"]

_DTYPES = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32")))
# kMaxRanksOfWord in cc/layout.h.
_MAX_RANKS = 64
# kMaxCountedExperts in cc/low_latency.h.
_MAX_COUNTED_EXPERTS = 4096


class LowLatencyBuffer(Held):
    """Memory through which the rows of low-latency operations travel.

    Eager and collective, as a `Communicator`: every process makes (and closes) its
    buffers in the same order. One buffer serves any number of layers and any T up
    to max_tokens. It holds nothing between two operations: results are arrays of
    their own, and any number of handles may be about.

    On GPUs the operations of one kind, dispatch or combine, of one buffer must
    follow one another. They do where each depends on what the one before returned,
    as layers do; give `after=` where it does not, or take two buffers. XLA may run
    independent calls at the same time, and a GPU that finds two of them under way
    fails with a message.

    Attributes:
      comm: the communicator.
      max_tokens: the largest T of a call.
      hidden: H, columns of a row.
      num_experts: E.
      dtype: of rows.
      num_local_experts: ceil(E / R).
      size_bytes: what it takes of each rank's GPU; 0 on the other backends, which
        need none.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        max_tokens: int,
        hidden: int,
        num_experts: int,
        dtype: Any = jnp.bfloat16,
    ):
        """Creates the buffer.

        Args:
          comm: the communicator.
          max_tokens: >= 1, the largest T of a call.
          hidden: H >= 1. On GPUs rows are padded where it is no multiple of 16,
            which takes copies in every call.
          num_experts: E >= 1; need not divide by R.
          dtype: bfloat16, float16 or float32.

        Raises:
          TypeError, ValueError: a bad argument, one that differs between processes,
            a communicator of several nodes, or a size that does not fit; the message
            names the largest max_tokens.
          RuntimeError: the communicator is closed; a process did not come or failed;
            or NVLink does not join all GPUs.
        """
        if not isinstance(comm, Communicator):
            raise TypeError(
                "jax_ep.LowLatencyBuffer: comm must be a jax_ep.Communicator, found "
                f"{type(comm).__name__}"
            )
        name = "LowLatencyBuffer"
        checks.check_open(comm, name)
        if comm.num_nodes > 1:
            raise ValueError(
                "jax_ep.LowLatencyBuffer: ranks must reach each other's memory, found "
                f"{comm.num_nodes} nodes; between nodes take jax_ep.dispatch and "
                "jax_ep.combine"
            )
        if comm.num_ranks > _MAX_RANKS:
            raise ValueError(
                f"jax_ep.LowLatencyBuffer: the communicator must have at most "
                f"{_MAX_RANKS} ranks, found {comm.num_ranks}; take jax_ep.dispatch and "
                "jax_ep.combine"
            )
        self.comm = comm
        self.max_tokens = checks.check_integer(name, "max_tokens", max_tokens, 1)
        self.hidden = checks.check_integer(name, "hidden", hidden, 1)
        self.num_experts = checks.check_small_integer(name, "num_experts", num_experts)
        self.dtype = jnp.dtype(dtype)
        if self.dtype not in _DTYPES:
            raise TypeError(
                "jax_ep.LowLatencyBuffer: dtype must be bfloat16, float16 or float32, "
                f"found {self.dtype}"
            )
        self.num_local_experts = -(-self.num_experts // comm.num_ranks)
        self._check_numbers()
        self._peers: bootstrap.Processes | None = None
        # Those of them that this process shares memory with.
        self._near: bootstrap.Processes | None = None
        if len(comm.processes) > 1:
            near = comm._made.nodes.near
            assert near is not None
            self._peers = bootstrap.Processes(
                comm.processes, jax.process_index(), comm.setup_timeout_s
            )
            self._near = self._peers.part(near.members)
        self.size_bytes, self.id, release = 0, comm.id, lambda: None
        with bootstrap.all_or_none(self._peers):
            self._meet()
            if comm.backend == "cuda":
                release = self._set_up()
        self._hold(release)

    @property
    def _columns(self) -> int:
        """Columns of a row on a GPU: H rounded up to 16."""
        return -(-self.hidden // 16) * 16

    def _pad(self, rows: jax.Array) -> jax.Array:
        """Rows as kernels take them: a copy where H is not a multiple of 16."""
        if self.backend != "cuda" or self._columns == self.hidden:
            return rows
        columns = (0, self._columns - self.hidden)
        return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [columns])

    def _unpad(self, rows: jax.Array) -> jax.Array:
        if rows.shape[-1] == self.hidden:
            return rows
        return rows[..., : self.hidden]

    # What primitives.communicator_call asks of whom a call belongs to.

    @property
    def backend(self) -> str:
        """The communicator's."""
        return self.comm.backend

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The communicator's."""
        return self.comm.mesh

    @staticmethod
    def bytes_for(
        *, num_ranks: int, max_tokens: int, hidden: int, dtype: Any = jnp.bfloat16
    ) -> int:
        """Bytes that a buffer takes of each rank's GPU.

        With b bytes an element: 4096 + 2 * R * max_tokens * (2 * 2048 *
        ceil(ceil(H / 16) * b / 96) + 3 * 256), for two windows of each operation; E
        has no part in it.

        Args:
          num_ranks: R.
          max_tokens: as in LowLatencyBuffer.
          hidden: H.
          dtype: of rows.
        """
        return native.low_latency_bytes(
            num_ranks=num_ranks,
            max_tokens=max_tokens,
            hidden=hidden,
            element_bytes=jnp.dtype(dtype).itemsize,
        )

    def _check_numbers(self) -> None:
        """Kernels count rows of all ranks and experts, and parts of rows, in int32."""
        chunks = -(-self._columns * self.dtype.itemsize // (16 * 96))
        widest = max(self.num_local_experts, chunks, _MAX_TOP_K)
        most = checks.INT32_MAX // (self.comm.num_ranks * widest)
        if self.max_tokens > most:
            raise ValueError(
                "jax_ep.LowLatencyBuffer: rows of all ranks and experts are counted "
                f"below 2**31, found max_tokens {self.max_tokens}; at most {most} "
                "fit"
            )

    def _meet(self) -> None:
        """Meets the other processes, which must have come with the same."""
        if self._peers is None:
            return
        mine = {
            "communicator": self.comm.id,
            "max_tokens": self.max_tokens,
            "hidden": self.hidden,
            "num_experts": self.num_experts,
            "dtype": self.dtype.name,
        }
        bootstrap.compare_arguments(
            self._peers.gather("buffers", mine), self._peers.name
        )

    def _set_up(self):
        """Sets size_bytes and id; returns what releases the memory."""
        comm = self.comm
        sizes = {
            "num_ranks": comm.num_ranks,
            "hidden": self.hidden,
            "dtype": self.dtype,
        }
        self.size_bytes = self.bytes_for(max_tokens=self.max_tokens, **sizes)
        torn = reach.why_torn(comm._job.groups, comm._made.places)
        free = window_memory.free_bytes(comm._job.groups)
        try:
            if self._peers is not None:
                told = self._peers.gather("free memory", free, torn)
                torn, free = None, min(told.values())
        except bootstrap.CannotWork as error:
            torn = str(error)
        if torn is not None:
            raise RuntimeError(
                "jax_ep.LowLatencyBuffer: rows go in lines of 128 bytes, which only "
                f"NVLink keeps whole: {torn}; take jax_ep.dispatch and jax_ep.combine"
            )
        if self.size_bytes > free:
            fixed = self.bytes_for(max_tokens=0, **sizes)
            most = (free - fixed) // (self.bytes_for(max_tokens=1, **sizes) - fixed)
            raise ValueError(
                f"jax_ep.LowLatencyBuffer: max_tokens {self.max_tokens} takes "
                f"{self.size_bytes} bytes of each GPU, found {free} free; at most "
                f"max_tokens {max(most, 0)} fits; a smaller "
                "XLA_PYTHON_CLIENT_MEM_FRACTION leaves more"
            )
        self.id = backends.agree_on_id(self._peers, "windows")
        return self._set_up_windows()

    def _set_up_windows(self) -> Callable[[], Any]:
        comm, near = self.comm, self._near
        with contextlib.ExitStack() as stack:
            links = None
            if near is not None:
                links = stack.enter_context(contextlib.closing(Links()))
                hosts = near.gather("hosts", links.host)
                problem = links.connect(
                    near.part((near.me,)) if comm._made.nodes.over_hosts else near,
                    hosts,
                )
                if problem is not None:
                    raise RuntimeError(
                        f"jax_ep.LowLatencyBuffer: processes lost each other: {problem}"
                    )
            return window_memory.set_up_windows(
                self.id,
                comm._job.groups,
                self.size_bytes,
                mesh_places=comm._job.mesh_places,
                num_sms=comm._job.settings.num_sms,
                timeout_s=comm.timeout_s,
                warn_after_s=comm._job.settings.warn_after_s,
                processes=near,
                links=None if comm._made.nodes.over_hosts else links,
            )

    def __repr__(self) -> str:
        return (
            f"LowLatencyBuffer(max_tokens={self.max_tokens}, hidden={self.hidden}, "
            f"num_experts={self.num_experts}, dtype={self.dtype.name}, "
            f"size_bytes={self.size_bytes}{', closed' if self.closed else ''})"
        )


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
        or not 1 <= topk_idx.shape[1] <= _MAX_TOP_K
    ):
        raise ValueError(
            "jax_ep.low_latency_dispatch: topk_idx must be [T, K] with T = "
            f"{x.shape[0]} as in x and 1 <= K <= {_MAX_TOP_K}, found shape "
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
    if by_expert and counted > _MAX_COUNTED_EXPERTS:
        raise ValueError(
            "jax_ep.low_latency_dispatch: layout 'expert' takes at most "
            f"{_MAX_COUNTED_EXPERTS} experts, found {counted}; take layout 'rank'"
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
    topk_idx = _as_int32(topk_idx, buffer.num_experts)
    results = low_latency_primitives.dispatch(
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
    out = low_latency_primitives.combine(
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
