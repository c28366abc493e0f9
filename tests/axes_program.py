"""What each of two processes does in communicator_context_test.py."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import launch
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep


def layer(x, experts, node_size):
    def body(x, experts):
        comm = jax_ep.communicator(("a", "c"), backend="cpu", node_size=node_size)
        ids = jnp.arange(len(x), dtype=jnp.int32)[:, None] % comm.num_ranks
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=comm.num_ranks)
        return jax_ep.combine(experts * jax_ep.dispatch(x, plan), plan)

    specs = P(("b", "a", "c")), P(("a", "c"))
    return jax.shard_map(body, in_specs=specs, out_specs=specs[0])(x, experts)


def check_sharded(mesh, comm, x, scale, expected):
    """Drops of the order of sources, and replicated tokens: expert e is scale[e]."""
    split = P(("b", "a", "c"))
    ids, ones = np.arange(64, dtype=np.int32)[:, None] % 4, np.ones((64, 1), np.float32)

    def run(spec, **options):
        layer = functools.partial(jax_ep.sharded_moe, comm=comm, num_experts=4)
        layer = functools.partial(layer, token_spec=spec, **options)
        args = [put(mesh, a, spec) for a in (x, ids, ones)]
        scales = put(mesh, scale, P(("a", "c")))
        return jax.jit(lambda *a: layer(*a, lambda p, rows, _: p * rows))(*args, scales)

    # Each of two groups has 32 tokens, 8 an expert: 3 of the first source stay.
    y, stats = run(split, expert_limit=3, drop_order="source")
    assert int(stats.dropped_pairs) == 2 * 4 * 5
    # All of the first source, and of the second one of its two for each expert.
    kept = np.arange(64)[:, None] % 32 < 12
    for shard in y.addressable_shards:
        want = np.where(kept, expected, 0)[shard.index]
        np.testing.assert_array_equal(shard.data, want)
    y, _ = run(P("b"), tokens="replicated")
    for shard in y.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[shard.index])


def put(mesh, array, spec):
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])


def main(node_size):
    # Each process has both values of "b" and of "c".
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    x = np.arange(64 * 2, dtype=np.float32).reshape(64, 2)
    scale = np.arange(1, 5, dtype=np.float32)[:, None]
    expected = x * scale[np.arange(64) % 4]
    with jax.set_mesh(mesh):
        placed = put(mesh, x, P(("b", "a", "c"))), put(mesh, scale, P(("a", "c")))
        for _ in range(2):
            f = jax.jit(lambda x, experts: layer(x, experts, node_size))
            for shard in f(*placed).addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[shard.index])
            comm = jax_ep.communicator(("a", "c"), backend="cpu", node_size=node_size)
            assert comm.num_nodes == 4 // node_size
            check_sharded(mesh, comm, x, scale, expected)
            # All together; then both trace and make one again.
            comm.close()


if __name__ == "__main__":
    warnings.simplefilter("error")
    (size,) = launch.join()
    main(int(size))
    print("END", flush=True)
