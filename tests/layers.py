"""A mixture-of-experts layer built by hand from the three operations, with its
dense twin: the same function of global arrays with no rank in it.

Twins are written in jax.numpy, so that a test can put the same transformation
on both and compare.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep


def mesh(shape, axis_type=AxisType.Auto, devices=None):
    """A mesh with the axes {name: size}; skips where devices are too few."""
    devices = jax.devices() if devices is None else devices
    size = math.prod(shape.values())
    if size > len(devices):
        pytest.skip(f"needs {size} devices; this machine has {len(devices)}")
    return jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        axis_types=(axis_type,) * len(shape),
        devices=devices[:size],
    )


@functools.cache
def communicator(mesh, axis_name, backend):
    """One communicator for each set of arguments, kept for all tests."""
    cut = oracle.cut(mesh.shape[axis_name], backend)
    return jax_ep.Communicator(mesh, axis_name, backend=backend, **cut)


def kept_pairs(topk_idx, *, num_ranks, num_experts, capacity):
    """bool [R * T, K]: the (token, k) pairs whose row travels.

    topk_idx holds all ranks' tokens, rank after rank. False where the id is no
    expert's and where the receiver's buffer was full.
    """
    local = -(-num_experts // num_ranks)
    valid = (topk_idx >= 0) & (topk_idx < num_experts)
    rank = np.where(valid, topk_idx // local, -1)
    kept = np.zeros(topk_idx.shape, bool)
    for r in range(num_ranks):
        wanted = (rank == r).any(axis=1)
        fits = wanted & (np.cumsum(wanted) <= capacity)
        kept |= (rank == r) & fits[:, None]
    return kept


def dispatch_matrix(topk_idx, *, num_ranks, num_experts, capacity):
    """float32 [R * C, R * T]: dispatch as a matrix; its transpose is combine."""
    local = -(-num_experts // num_ranks)
    valid = (topk_idx >= 0) & (topk_idx < num_experts)
    rank = np.where(valid, topk_idx // local, -1)
    matrix = np.zeros((num_ranks * capacity, topk_idx.shape[0]), np.float32)
    for r in range(num_ranks):
        tokens = np.flatnonzero((rank == r).any(axis=1))[:capacity]
        matrix[r * capacity + np.arange(len(tokens)), tokens] = 1
    return matrix


def random_routing(seed, num_tokens, top_k, num_experts):
    """int32 [num_tokens, top_k] with duplicates, holes (-1) and ids too large."""
    rng = np.random.default_rng(seed)
    return rng.integers(-1, num_experts + 1, (num_tokens, top_k), np.int32)


def expert_weights(seed, *, num_ranks, num_experts, hidden, inner):
    """(w_in, w_out) of all ranks' experts, padded to the same number a rank."""
    rng = np.random.default_rng(seed)
    padded = num_ranks * -(-num_experts // num_ranks)
    return (
        rng.normal(size=(padded, hidden, inner)).astype(np.float32),
        rng.normal(size=(padded, inner, hidden)).astype(np.float32),
    )


def moe_layer(x, topk_idx, topk_weights, experts, *, comm, num_experts, capacity=None):
    """One layer, inside shard_map; each expert is w_out(tanh(w_in(row)))."""
    plan = jax_ep.make_plan(
        topk_idx, comm=comm, num_experts=num_experts, capacity=capacity
    )
    return moe_with_plan(x, topk_weights, experts, plan)


def moe_with_plan(x, topk_weights, experts, plan):
    rows, weights = jax_ep.dispatch((x, topk_weights), plan)
    outputs = _all_experts(rows, experts)
    chosen = _one_hot(plan.recv_topk_idx, outputs.shape[1])
    gate = jnp.where(chosen, weights[..., None], 0).sum(axis=1)
    return jax_ep.combine((gate[..., None] * outputs).sum(axis=1), plan)


def dense_moe(x, topk_idx, topk_weights, experts, kept):
    """moe_layer on all ranks' tokens at once; `kept` from kept_pairs, or True."""
    outputs = _all_experts(x, experts)
    chosen = _one_hot(topk_idx, outputs.shape[1])
    chosen &= jnp.broadcast_to(jnp.asarray(kept), topk_idx.shape)[..., None]
    gate = jnp.where(chosen, topk_weights[..., None], 0).sum(axis=1)
    return (gate[..., None] * outputs).sum(axis=1)


def _one_hot(ids, count):
    """bool [N, K, count] of ids [N, K]."""
    return ids[..., None] == jnp.arange(count, dtype=ids.dtype)[None, None]


def _all_experts(rows, experts):
    """[N, H] -> [N, E, H]: every expert on every row."""
    w_in, w_out = experts
    inner = jnp.tanh(jnp.einsum("nh,ehf->nef", rows, w_in, precision="highest"))
    return jnp.einsum("nef,efh->neh", inner, w_out, precision="highest")


def wrap_plan(plan):
    """Gives each array of a plan an axis that P("ep") can shard."""
    return jax.tree.map(lambda a: a[None], plan)


def unwrap_plan(plan):
    """Inside shard_map, the plan that wrap_plan sent out."""
    return jax.tree.map(lambda a: a[0], plan)


def between_nodes():
    """Whether this run cuts communicators into nodes."""
    return oracle.NODE_SIZE is not None


# What stands for each primitive in the programs of communicators with several nodes.
_BETWEEN_NODES = {
    "ep_plan": "ep_node_exchange",
    "ep_dispatch": "ep_node_dispatch",
    "ep_combine": "ep_node_combine",
}


def count_primitive(jaxpr, name):
    """How many equations named `name` a jaxpr holds, at any depth."""
    if between_nodes():
        name = _BETWEEN_NODES.get(name, name)
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    total = 0
    for eqn in jaxpr.eqns:
        total += eqn.primitive.name == name
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                total += count_primitive(inner, name)
    return total


def sharded(fn, mesh, *, in_specs=P("ep"), out_specs=P("ep"), **kwargs):
    return jax.shard_map(
        fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **kwargs
    )
