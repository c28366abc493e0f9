"""LowLatencyBuffer: the memory of low-latency operations, and its set-up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._data import checks, limits, native
from jax_ep._setup import backends, bootstrap, reach, window_memory
from jax_ep._setup.communicator import Communicator
from jax_ep._setup.links import Links
from jax_ep._setup.native_resource import NativeResource

_DTYPES = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32")))


class LowLatencyBuffer(NativeResource):
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
        if comm.num_ranks > limits.MAX_RANKS_OF_WORD:
            raise ValueError(
                "jax_ep.LowLatencyBuffer: the communicator must have at most "
                f"{limits.MAX_RANKS_OF_WORD} ranks, found {comm.num_ranks}; take "
                "jax_ep.dispatch and jax_ep.combine"
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

    # What exchanges.communicator_call asks of whom a call belongs to.

    @property
    def backend(self) -> str:
        """The communicator's."""
        return self.comm.backend

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The communicator's."""
        return self.comm.mesh

    @property
    def axis_name(self) -> str | tuple[str, ...]:
        """The communicator's."""
        return self.comm.axis_name

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
        widest = max(self.num_local_experts, chunks, limits.MAX_TOP_K)
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
