"""Fresh random arrays of a workload, and the checks of what comes of them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from timing import AXIS, fence
from workloads import DTYPES, Workload


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
        """[R * rows, *more, H] of normal numbers, other ones on every rank."""
        w = self.workload
        shape = (rows, *more, w.hidden)
        drawn = self.dtype if self.dtype.itemsize > 1 else jnp.dtype("bfloat16")
        seed = self.put(np.arange(w.num_ranks) + 1000 * salt + 100000 * w.seed)

        def draw(seed):
            key = jax.random.key(seed[0])
            return jax.random.normal(key, shape, drawn).astype(self.dtype)

        return self.per_rank(draw)(seed)

    def bits(self, array: jax.Array) -> jax.Array:
        """The same rows as unsigned integers, which any mover of rows may take."""
        return self.per_rank(as_bits)(array)

    def per_rank(self, function: Callable) -> Callable:
        """jit of `function` over every rank's part of its arguments."""
        return jax.jit(
            jax.shard_map(function, mesh=self.mesh, in_specs=P(AXIS), out_specs=P(AXIS))
        )

    def wrong_rows(self, function: Callable, *args: jax.Array) -> int:
        """Sum over ranks of what `function` counts."""
        counted = self.per_rank(lambda *a: lax.psum(function(*a), AXIS).reshape(1))
        return int(np.asarray(counted(*args).addressable_shards[0].data)[0])


def check_plan(inputs: Inputs, plan_of: Callable) -> None:
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

    found = {
        name: {
            s.index[0].start or 0: np.asarray(s.data)[0] for s in a.addressable_shards
        }
        for name, a in inputs.per_rank(fields)(inputs.topk_idx).items()
    }
    ids = w.topk_idx.reshape(-1, w.top_k)
    for rank in found["num_recv"]:  # those of this process
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


def check_rows(inputs: Inputs, dispatched: Callable, *args: jax.Array) -> None:
    """dispatched(*args) must be the tokens in the slots that NumPy gave them."""

    def wrong(found, tokens, recv_src):
        everywhere = lax.all_gather(as_bits(tokens), AXIS, tiled=True)
        expected = jnp.where(
            recv_src[:, None] >= 0, everywhere[jnp.maximum(recv_src, 0)], 0
        )
        return (as_bits(found) != expected).any(axis=1).sum()

    found = inputs.per_rank(dispatched)(*args)
    bad = inputs.wrong_rows(wrong, found, inputs.tokens, inputs.recv_src)
    if bad:
        raise AssertionError(f"{bad} received rows are wrong")


def check_sums(inputs: Inputs, combined: Callable, *args: jax.Array) -> None:
    """combined(*args) must be the float32 sums of inputs.rows in rank order."""
    num_ranks = inputs.workload.num_ranks

    def wrong(found, rows, slots):
        rank = lax.axis_index(AXIS)
        total = jnp.zeros((slots.shape[0], rows.shape[1]), jnp.float32)
        for r in range(num_ranks):
            theirs = lax.psum(jnp.where(rank == r, rows, jnp.zeros_like(rows)), AXIS)
            slot = slots[:, r, None]
            term = theirs[jnp.maximum(slots[:, r], 0)].astype(jnp.float32)
            total = jnp.where(slot >= 0, total + term, total)
        expected = fence(total.astype(rows.dtype))  # rounded, whatever XLA likes
        return (found != expected).any(axis=1).sum()

    found = inputs.per_rank(combined)(*args)
    bad = inputs.wrong_rows(wrong, found, inputs.rows, inputs.slots)
    if bad:
        raise AssertionError(f"{bad} combined rows are wrong")
