"""One small exchange, for tests that get something wrong in it."""

from __future__ import annotations

import harness
import jax
import layers
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

RANKS = min(4, jax.device_count())
TOKENS, TOP_K, HIDDEN, EXPERTS, CAPACITY = 6, 3, 5, 2 * RANKS, 9
NATIVE = harness.BACKENDS[0]
SIZES = f"{{'ep': {RANKS}}}"

needs_two_devices = pytest.mark.skipif(
    jax.device_count() < 2,
    reason=f"needs 2 devices; this machine has {jax.device_count()}",
)


def comm():
    return layers.communicator(layers.mesh({"ep": RANKS}), "ep", NATIVE)


def arguments(mesh=None):
    """x, topk_idx and rows of all ranks, with their axis to shard."""
    args = (
        np.ones((RANKS * TOKENS, HIDDEN), np.float32),
        np.zeros((RANKS * TOKENS, TOP_K), np.int32),
        np.ones((RANKS * CAPACITY, HIDDEN), np.float32),
    )
    if mesh is None:
        return args
    return jax.device_put(args, NamedSharding(mesh, P(mesh.axis_names)))


def trace(body, mesh=None, **kwargs):
    """Traces body(x, topk_idx, rows) in shard_map over the mesh."""
    mesh = layers.mesh({"ep": RANKS}) if mesh is None else mesh
    spec = P(mesh.axis_names)
    kwargs.setdefault("in_specs", spec)
    return jax.eval_shape(
        jax.shard_map(body, mesh=mesh, out_specs=spec, **kwargs), *arguments()
    )


def plan_of(topk_idx, **kwargs):
    if "comm" not in kwargs:
        kwargs["comm"] = comm()
    kwargs = {"num_experts": EXPERTS, "capacity": CAPACITY} | kwargs
    return jax_ep.make_plan(topk_idx, **kwargs)


def dispatch_and_combine(x, topk_idx, rows, **kwargs):
    plan = plan_of(topk_idx, **kwargs)
    return jax_ep.dispatch(x, plan), jax_ep.combine(rows, plan)


def assert_raises(error, message, run, *args, **kwargs):
    with pytest.raises(error) as info:
        run(*args, **kwargs)
    assert info.type is error
    assert str(info.value) == message
