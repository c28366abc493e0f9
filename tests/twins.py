"""A sharded function of dispatch and combine and its dense twin.

The twin is a product with the 0/1 matrix of the routing: a test puts the same
transformation on both and compares.
"""

from __future__ import annotations

import harness
import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

import jax_ep

# GPUs would round the factors of float32 products otherwise.
jax.config.update("jax_default_matmul_precision", "highest")

RANKS = min(4, jax.device_count())
TOKENS, TOP_K, HIDDEN = 6, 3, 5
# Not divisible: the last rank owns fewer experts, with four ranks none at all.
EXPERTS = 2 * RANKS + 1
# Small enough that rows are dropped.
CAPACITY = 5 * RANKS // 2 + 1

# The rules of differentiation and batching are one code for all backends: the
# slower "xla" runs the tests of what it lowers by itself.
NATIVE = harness.BACKENDS[0]
CHECKED = pytest.param(NATIVE, True, id=f"{NATIVE}-vma")
UNCHECKED = pytest.param(NATIVE, False, id=f"{NATIVE}-no_vma")
XLA = pytest.param("xla", True, id="xla-vma")
variants = pytest.mark.parametrize(("backend", "check_vma"), (CHECKED, UNCHECKED, XLA))
native_variants = pytest.mark.parametrize(
    ("backend", "check_vma"), (CHECKED, UNCHECKED)
)
native_only = pytest.mark.parametrize("backend", (NATIVE,))
per_backend = harness.on_each_backend


def routing(seed, *batch):
    tokens = int(np.prod(batch, dtype=int)) * RANKS * TOKENS
    flat = layers.random_routing(seed, tokens, TOP_K, EXPERTS)
    return flat.reshape(*batch, RANKS * TOKENS, TOP_K)


def normal(seed, *shape, dtype=np.float32):
    value = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(value.astype(dtype))


def matrix(topk_idx, capacity=CAPACITY):
    return layers.dispatch_matrix(
        topk_idx, num_ranks=RANKS, num_experts=EXPERTS, capacity=capacity
    )


def assert_close(actual, expected, tolerance=2e-5):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(
            np.asarray(a), np.asarray(e), rtol=tolerance, atol=tolerance
        ),
        actual,
        expected,
    )


class Twins:
    """A sharded function of (x, scale, topk_idx) and the same in dense form.

    Not linear before, between and after the operations, and `scale` differs
    from slot to slot, so that a misplaced row shows.
    """

    def __init__(self, backend, check_vma=True, axis_type=AxisType.Auto):
        self.mesh = layers.mesh({"ep": RANKS}, axis_type)
        self.comm = layers.communicator(self.mesh, "ep", backend)
        self.check_vma = check_vma
        self.x = normal(1, RANKS * TOKENS, HIDDEN)
        self.scale = normal(2, RANKS * CAPACITY, 1)
        self.topk_idx = routing(3)

    def plan(self, topk_idx):
        return jax_ep.make_plan(
            topk_idx, comm=self.comm, num_experts=EXPERTS, capacity=CAPACITY
        )

    def body(self, x, scale, topk_idx):
        return self.body_with_plan(x, scale, self.plan(topk_idx))

    def body_with_plan(self, x, scale, plan):
        rows = jax_ep.dispatch(jnp.sin(x), plan)
        rows = checkpoint_name(rows, "rows")
        return jnp.tanh(jax_ep.combine(jnp.cos(rows) * scale, plan))

    def sharded(self, body=None, **kwargs):
        body = self.body if body is None else body
        return layers.sharded(body, self.mesh, check_vma=self.check_vma, **kwargs)

    def function(self, body=None, topk_idx=None, **kwargs):
        """The sharded function of x alone."""
        topk_idx = self.topk_idx if topk_idx is None else topk_idx
        fn = self.sharded(body, **kwargs)
        return lambda x: fn(x, self.scale, topk_idx)

    def dense(self, topk_idx=None):
        m = matrix(self.topk_idx if topk_idx is None else topk_idx)
        return lambda x: dense_twin(m, x, self.scale)


def dense_twin(m, x, scale):
    rows = m @ jnp.sin(x)
    return jnp.tanh(m.T @ (jnp.cos(rows) * scale))
