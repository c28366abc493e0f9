"""Times plan, and dispatch with combine, on one node and on several.

    python benchmarks/node_rows.py                   # 2 GPUs: one node, two of one
    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 python benchmarks/node_rows.py

The second takes NCCL off peer memory, as between hosts; what stands behind its sockets
is one host all the same. Chains of calls inside one jit, wall time over the chain.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep


def routing(ranks: int, tokens: int, top_k: int, experts: int) -> np.ndarray:
    """i32[R * T, K] of distinct experts, uniform."""
    scores = np.random.default_rng(0).random((ranks * tokens, experts))
    return np.argpartition(scores, top_k, axis=1)[:, :top_k].astype(np.int32)


def microseconds(program, args, chain: int, repetitions: int) -> float:
    """Of one call: the median of runs of `chain` calls."""
    jax.block_until_ready(program(*args))
    taken = []
    for _ in range(repetitions):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        taken.append(time.perf_counter() - start)
    return float(np.median(taken)) / chain * 1e6


def measure(arguments: argparse.Namespace, node_size: int | None) -> None:
    """Prints a row of the table."""
    mesh = jax.make_mesh((jax.device_count(),), ("ep",))
    ranks, chain = mesh.size, arguments.chain
    spec = P("ep")
    with jax_ep.Communicator(mesh, "ep", node_size=node_size) as comm:

        def make(ids):
            return jax_ep.make_plan(ids, comm=comm, num_experts=arguments.experts)

        def plans(ids):
            def step(_, ids):
                return ids + jnp.minimum(make(ids).num_recv, 0)

            return jax.lax.fori_loop(0, chain, step, ids)

        def rows(ids, x, steps):
            plan = make(ids)

            def step(_, x):
                return jax_ep.combine(jax_ep.dispatch(x, plan), plan)

            return jax.lax.fori_loop(0, steps, step, x)

        sharding = NamedSharding(mesh, spec)
        ids = jax.device_put(
            routing(ranks, arguments.tokens, arguments.top_k, arguments.experts),
            sharding,
        )
        shape = (ranks * arguments.tokens, arguments.hidden)
        draw = jax.jit(
            lambda key: jax.random.normal(key, shape, jnp.bfloat16),
            out_shardings=sharding,
        )
        x = draw(jax.random.key(0))

        def timed(body, *args):
            mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
            program = jax.jit(mapped)
            return microseconds(program, args, chain, arguments.repetitions)

        plan = timed(plans, ids)
        there_and_back = timed(lambda ids, x: rows(ids, x, chain), ids, x)
        print(
            f"| {comm.num_nodes} x {comm.node_size} | {plan:.0f} | "
            f"{there_and_back:.0f} |",
            flush=True,
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Times operations between nodes.")
    add = parser.add_argument
    add("--tokens", type=int, default=4096)
    add("--hidden", type=int, default=7168)
    add("--top-k", type=int, default=8)
    add("--experts", type=int, default=256)
    add("--chain", type=int, default=10)
    add("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    print("| nodes x ranks | plan, us | dispatch and combine, us |\n|---|---|---|")
    ranks = jax.device_count()
    sizes = [size for size in (ranks, ranks // 2) if size and ranks % size == 0]
    for size in dict.fromkeys([*sizes, 1]):
        measure(arguments, None if size == ranks else size)


if __name__ == "__main__":
    main()
