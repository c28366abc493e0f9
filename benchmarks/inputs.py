"""Fresh random arrays of a workload, and the checks of what comes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from timing import AXIS, Compilers, fence
from workloads import DTYPES, Workload

# Odd numbers that spread the index along each axis over all bits.
_FACTORS = (0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)


class Inputs:
    """Fresh random arrays of a workload on a mesh: never zeros."""

    def __init__(self, mesh: Mesh, workload: Workload):
        self.mesh = mesh
        self.workload = workload
        self.dtype = jnp.dtype(DTYPES[workload.dtype])
        w = workload
        self.topk_idx = self.put(w.topk_idx.reshape(-1, w.top_k))
        self.recv_src = self.put(w.recv_src.reshape(-1))
        self.slots = self.put(w.slots.reshape(-1, w.num_ranks))
        # Shaped like a plan's private map from tokens to slots.
        width = min(w.top_k, w.num_ranks)
        self.routes = self.put(
            np.arange(w.num_ranks * w.num_tokens * width * 2, dtype=np.int32).reshape(
                -1, width, 2
            )
        )
        self.tokens = self.random(1, w.num_tokens)
        self.rows = self.random(2, w.num_slots)

    def put(self, array: np.ndarray) -> jax.Array:
        sharding = NamedSharding(self.mesh, P(AXIS))
        if jax.process_count() == 1:
            return jax.device_put(array, sharding)
        return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])

    def random(self, salt: int, rows: int, *more: int) -> jax.Array:
        """[R * rows, *more, H] of numbers in (-2, -1] and [1, 2), other ones on
        every rank. Hashed: that compiles in a fraction of jax.random's time.
        """
        w = self.workload
        shape = (rows, *more, w.hidden)
        seed = self.put(np.arange(w.num_ranks) + 1000 * salt + 100000 * w.seed)

        def draw(seed):
            h = seed[0].astype(jnp.uint32) * np.uint32(0x9E3779B1)
            for i, factor in enumerate(_FACTORS):
                if i < len(shape):
                    counted = lax.broadcasted_iota(
                        jnp.uint32, shape, len(shape) - 1 - i
                    )
                    h = (h ^ (h >> 15)) + counted * np.uint32(factor)
            for factor in (0x7FEB352D, 0x846CA68B):
                h = (h ^ (h >> 16)) * np.uint32(factor)
            h ^= h >> 16
            bits = (h & np.uint32(0x807FFFFF)) | np.uint32(0x3F800000)
            return lax.bitcast_convert_type(bits, jnp.float32).astype(self.dtype)

        return self.per_rank(draw)(seed)

    def bits(self, array: jax.Array) -> jax.Array:
        """The same rows as unsigned integers, which any mover of rows may take."""
        return self.per_rank(as_bits)(array)

    def per_rank(self, function: Callable) -> Callable:
        """jit of `function` over every rank's part of its arguments."""
        return jax.jit(
            jax.shard_map(function, mesh=self.mesh, in_specs=P(AXIS), out_specs=P(AXIS))
        )

    def count_wrong(self, what: str, count: Callable, *args: jax.Array) -> Check:
        """`count` of `args` on each rank is how many rows are wrong."""

        def everywhere(*args):
            return lax.psum(count(*args), AXIS)

        program = jax.jit(
            jax.shard_map(everywhere, mesh=self.mesh, in_specs=P(AXIS), out_specs=P())
        )

        def expect(wrong):
            if int(wrong):
                raise AssertionError(f"{int(wrong)} {what} rows are wrong")

        return Check(program, args, expect)


@dataclasses.dataclass(frozen=True)
class Check:
    """A program, and what raises AssertionError where its result is wrong."""

    program: Any  # jitted
    args: tuple[jax.Array, ...]
    expect: Callable[[Any], None]
    compiler_options: Mapping[str, Any] | None = None

    def start(self, compilers: Compilers) -> Callable[[], None]:
        """Starts to compile; returns a call that runs and judges."""
        compiled = compilers.start(
            self.program.lower(*self.args), self.compiler_options
        )
        return lambda: self.expect(compiled()(*self.args))

    def run(self) -> None:
        """Compiles, runs and judges."""
        self.start(Compilers(1))()


def check_plan(inputs: Inputs, plan_of: Callable) -> Check:
    w = inputs.workload

    def fields(topk_idx):
        plan = plan_of(topk_idx)
        return {
            name: getattr(plan, name)[None]
            for name in (
                "num_recv",
                "num_demand",
                "recv_counts",
                "recv_src",
                "recv_topk_idx",
                "expert_counts",
            )
        }

    def expect(result):
        mine = {
            name: {
                shard.index[0].start or 0: np.asarray(shard.data)[0]
                for shard in array.addressable_shards
            }
            for name, array in result.items()
        }
        _expect_plan(w, mine)

    return Check(inputs.per_rank(fields), (inputs.topk_idx,), expect)


def _expect_plan(w: Workload, found: Mapping[str, Mapping[int, np.ndarray]]) -> None:
    """`found`: fields by name and by rank, for the ranks of this process."""
    ids = w.topk_idx.reshape(-1, w.top_k)
    for rank in found["num_recv"]:
        src = w.recv_src[rank]
        local = ids[np.maximum(src, 0)] - rank * w.local_experts
        here = (src >= 0)[:, None] & (local >= 0) & (local < w.local_experts)
        here &= ids[np.maximum(src, 0)] >= 0
        local = np.where(here, local, -1)
        expected = {
            "num_recv": w.counts[:, rank].sum(),
            "num_demand": w.demand[:, rank].sum(),
            "recv_counts": w.counts[:, rank],
            "recv_src": src,
            "recv_topk_idx": local,
            "expert_counts": np.bincount(local[here], minlength=w.local_experts),
        }
        for name, value in expected.items():
            if not np.array_equal(found[name][rank], value):
                raise AssertionError(f"plan.{name} is wrong on rank {rank}")


def as_bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def check_rows(inputs: Inputs, dispatched: Callable, *args: jax.Array) -> Check:
    """dispatched(*args) must be the tokens in the slots that NumPy gave them."""

    def wrong(tokens, recv_src, *args):
        found = fence(dispatched(*args))
        everywhere = lax.all_gather(as_bits(tokens), AXIS, tiled=True)
        expected = jnp.where(
            recv_src[:, None] >= 0, everywhere[jnp.maximum(recv_src, 0)], 0
        )
        return (as_bits(found) != expected).any(axis=1).sum()

    return inputs.count_wrong("received", wrong, inputs.tokens, inputs.recv_src, *args)


def check_sums(inputs: Inputs, combined: Callable, *args: jax.Array) -> Check:
    """combined(*args) must be the float32 sums of inputs.rows in rank order."""
    num_ranks = inputs.workload.num_ranks

    def wrong(rows, slots, *args):
        found = fence(combined(*args))
        rank = lax.axis_index(AXIS)
        total = jnp.zeros((slots.shape[0], rows.shape[1]), jnp.float32)
        for r in range(num_ranks):
            theirs = lax.psum(jnp.where(rank == r, rows, jnp.zeros_like(rows)), AXIS)
            slot = slots[:, r, None]
            term = theirs[jnp.maximum(slots[:, r], 0)].astype(jnp.float32)
            total = jnp.where(slot >= 0, total + term, total)
        expected = fence(total.astype(rows.dtype))  # rounded, whatever XLA likes
        return (found != expected).any(axis=1).sum()

    return inputs.count_wrong("combined", wrong, inputs.rows, inputs.slots, *args)
