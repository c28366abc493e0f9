"""Routing and rows made and checked where they are, on the devices.

All of it is integer arithmetic of (step, rank, token, column), so every rank
knows what every other one sends: gigabytes and thousands of steps are compared
bit for bit without a copy to the host. The same functions take NumPy arrays,
which is how the host looks at samples with tests/oracle.py.
"""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_ep


def mix(*keys) -> typing.Any:
    """Hashes integers (broadcast together) to uint32."""
    state = np.uint32(0x9E3779B9)
    axes = max(np.ndim(key) for key in keys)
    with np.errstate(over="ignore"):
        for key in keys:
            if 0 < np.ndim(key) < axes:
                key = key.reshape(*(1,) * (axes - key.ndim), *key.shape)
            state = state ^ _as_uint32(key)
            state = (state ^ (state >> np.uint32(16))) * np.uint32(0x7FEB352D)
            state = (state ^ (state >> np.uint32(15))) * np.uint32(0x846CA68B)
            state = state ^ (state >> np.uint32(16))
    return state


def _as_uint32(key):
    return np.uint32(key % 2**32) if isinstance(key, int) else key.astype("uint32")


def small_integers(bits, dtype):
    """From -64 to 63: exact in every dtype that combine takes."""
    return ((bits >> np.uint32(13)) & np.uint32(127)).astype("int32").astype(
        dtype
    ) - np.asarray(64, dtype)


def wrong_rows(got, want):
    """i32[]: rows of [n, ...] that differ in any bit."""
    if jnp.issubdtype(got.dtype, jnp.inexact):
        unsigned = f"uint{8 * got.dtype.itemsize}"
        got, want = (lax.bitcast_convert_type(a, unsigned) for a in (got, want))
    columns = tuple(range(1, got.ndim))
    return (got != want).any(axis=columns).sum(dtype=jnp.int32)


class Exchange(typing.NamedTuple):
    """One plan, dispatch and combine of a rank.

    Attributes:
      source: plan.recv_src.
      received: the rows that came.
      combined: their sum back at home, each with its rank's number added.
      wrong: i32[4], rows of these three that are not as they should be, and
        whether num_recv is not.
      beside: what was done while the rows travelled, there and back.
    """

    source: jax.Array
    received: jax.Array
    combined: jax.Array
    wrong: jax.Array
    beside: typing.Any = ()


def _unchanged(x, step, place):
    del step, place
    return x


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The sizes of an exchange; its routing and rows follow from the step.

    Most steps spread the tokens with holes and duplicates; in some they all go
    to rank 0, in some the odd ranks send nothing.

    Attributes:
      ranks, tokens, top_k, experts, columns: R, T, K, E and H.
      capacity: C; R * T where it is None.
      dtype: of the rows; one that combine takes.
      in_one: plan_dispatch instead of make_plan and dispatch.
    """

    ranks: int
    tokens: int
    top_k: int
    experts: int
    columns: int
    capacity: int | None = None
    dtype: typing.Any = jnp.bfloat16
    in_one: bool = False

    @property
    def slots(self) -> int:
        """C."""
        return self.capacity or self.ranks * self.tokens

    @property
    def local_experts(self) -> int:
        """Experts of rank 0."""
        return -(-self.experts // self.ranks)

    def ids(self, step, rank, xp=jnp):
        """i32[..., T, K] for rank [...]."""
        rank = xp.asarray(rank)[..., None, None]
        token = xp.arange(self.tokens)[:, None]
        k = xp.arange(self.top_k)
        bits = mix(step, rank, token, k)
        ids = (bits % np.uint32(self.experts)).astype("int32")
        ids = xp.where(bits >> np.uint32(24) < 40, -1, ids)
        ids = xp.where(step % 7 == 3, ids % self.local_experts, ids)
        return xp.where((step % 11 == 5) & (rank % 2 == 1), -1, ids)

    def rows(self, step, rank, token, xp=jnp):
        """[..., H] for rank and token [...]."""
        key = mix(step, rank, token)[..., None]
        return small_integers(mix(key, xp.arange(self.columns)), self.dtype)

    def sent(self, step):
        """bool[R, R * T]: the rows (source rank, token) that rank r keeps."""
        ids = self.ids(step, jnp.arange(self.ranks))
        owner = jnp.where(ids >= 0, ids // self.local_experts, self.ranks)
        ranks = jnp.arange(self.ranks)[:, None, None, None]
        goes = (owner[None] == ranks).any(-1)
        goes = goes.reshape(self.ranks, self.ranks * self.tokens)
        return goes & (jnp.cumsum(goes, axis=1, dtype=jnp.int32) <= self.slots)

    def received(self, step, rank):
        """What rank `rank` gets: (recv_src i32[C], rows [C, H])."""
        sent = lax.dynamic_index_in_dim(self.sent(step), rank, keepdims=False)
        slot = jnp.where(sent, jnp.cumsum(sent, dtype=jnp.int32) - 1, self.slots)
        source = (
            jnp.full((self.slots,), -1, jnp.int32)
            .at[slot]
            .set(jnp.arange(len(sent), dtype=jnp.int32), mode="drop")
        )
        rows = self.rows(step, source // self.tokens, source % self.tokens)
        return source, jnp.where(source[:, None] >= 0, rows, jnp.zeros_like(rows))

    def combined(self, step, rank, tagged):
        """[T, H]: the sum of a token's rows, each plus its rank if `tagged`."""
        start = rank * self.tokens
        sent = lax.dynamic_slice_in_dim(self.sent(step), start, self.tokens, axis=1)
        tags = jnp.arange(self.ranks)[:, None] if tagged else 0
        count = sent.sum(0, dtype=jnp.int32)[:, None].astype(jnp.float32)
        tag = (
            jnp.where(sent, tags, 0)
            .sum(0, dtype=jnp.int32)[:, None]
            .astype(jnp.float32)
        )
        rows = self.rows(step, rank, jnp.arange(self.tokens)).astype(jnp.float32)
        # Integers below 2**24: nothing is rounded before the last conversion.
        total = jnp.where(count > 0, count * rows + tag, 0.0)  # 0 * -1 is -0
        return total.astype(self.dtype)

    def exchange(
        self, comm: jax_ep.Communicator, step, late=_unchanged, beside=None
    ) -> Exchange:
        """Plan, dispatch, combine and their check, inside shard_map.

        Args:
          comm: over `ranks` ranks.
          step: i32[].
          late: (array, step, 0 or 1) -> the array, for delays before the plan
            and before combine.
          beside: (step, 0 or 1) -> arrays, to be done while rows travel there
            and back. None: dispatch and combine are whole operations.
        """
        rank = lax.axis_index(comm.axis_name)
        ids = late(self.ids(step, rank), step, 0)
        sizes = {
            "comm": comm,
            "num_experts": self.experts,
            "capacity": self.slots,
        }
        x = self.rows(step, rank, jnp.arange(self.tokens))
        there, back = (), ()
        if self.in_one:
            plan, received = jax_ep.plan_dispatch(x, ids, **sizes)
        elif beside is None:
            plan = jax_ep.make_plan(ids, **sizes)
            received = jax_ep.dispatch(x, plan)
        else:
            plan = jax_ep.make_plan(ids, **sizes)
            flight = jax_ep.dispatch_start(x, plan)
            flight, there = jax_ep.overlap(flight, beside, step, 0)
            received = jax_ep.dispatch_done(flight)
        y = late(received, step, 1) + rank.astype(self.dtype)
        # Whoever reads a row that was never sent brings a NaN home.
        y = jnp.where(plan.recv_src[:, None] >= 0, y, jnp.nan)
        if beside is None:
            combined = jax_ep.combine(y, plan)
        else:
            flight = jax_ep.combine_start(y, plan)
            flight, back = jax_ep.overlap(flight, beside, step, 1)
            combined = jax_ep.combine_done(flight)
        source, rows = self.received(step, rank)
        wrong = (
            wrong_rows(plan.recv_src, source),
            wrong_rows(received, rows),
            wrong_rows(combined, self.combined(step, rank, tagged=True)),
            (plan.num_recv != (source >= 0).sum(dtype=jnp.int32)).astype(jnp.int32),
        )
        wrong = jnp.stack(wrong)
        if beside is None:
            return Exchange(plan.recv_src, received, combined, wrong)
        return Exchange(plan.recv_src, received, combined, wrong, (there, back))
