"""Loops, branches and recomputation around dispatch and combine."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from twins import (
    EXPERTS,
    RANKS,
    TOKENS,
    TOP_K,
    Twins,
    assert_close,
    dense_twin,
    matrix,
    native_only,
    native_variants,
    normal,
    per_backend,
    routing,
    variants,
)

import jax_ep


class TestControlFlow:
    @variants
    def test_scan_over_layers(self, backend, check_vma):
        """Each layer with a plan of its own, made in the loop or before it."""
        twins = Twins(backend, check_vma)
        num_layers = 3
        topk_idx = routing(4, num_layers)

        def in_loop(x, scale, topk_idx):
            def step(x, topk_idx):
                return twins.body(x, scale, topk_idx), ()

            return lax.scan(step, x, topk_idx)[0]

        def before_loop(x, scale, topk_idx):
            plans = lax.map(twins.plan, topk_idx)

            def step(x, plan):
                return twins.body_with_plan(x, scale, plan), ()

            return lax.scan(step, x, plans)[0]

        def loss(f):
            return lambda x: jnp.sum(f(x) ** 2)

        def dense(x):
            for one in topk_idx:
                x = dense_twin(matrix(one), x, twins.scale)
            return x

        value_and_grad = jax.value_and_grad(loss(dense))(twins.x)
        specs = (P("ep"), P("ep"), P(None, "ep"))
        for body in (in_loop, before_loop):
            f = twins.function(body, topk_idx, in_specs=specs)
            assert_close(jax.jit(jax.value_and_grad(loss(f)))(twins.x), value_and_grad)

    @native_only
    def test_fori_loop_forward_mode(self, backend):
        twins = Twins(backend)
        tangent = normal(4, *twins.x.shape)

        def body(x, scale, topk_idx):
            plan = twins.plan(topk_idx)
            return lax.fori_loop(
                0, 3, lambda _, x: twins.body_with_plan(x, scale, plan), x
            )

        def dense(x):
            for _ in range(3):
                x = twins.dense()(x)
            return x

        def push(f):
            return jax.jvp(f, (twins.x,), (tangent,))

        actual = jax.jit(lambda: push(twins.function(body)))()
        assert_close(actual, push(dense))

    @variants
    def test_cond(self, backend, check_vma):
        """All ranks take the same branch: one with, one without a collective."""
        twins = Twins(backend, check_vma)

        def body(x, scale, topk_idx, use):
            plan = twins.plan(topk_idx)
            return lax.cond(
                use,
                lambda x: twins.body_with_plan(x, scale, plan),
                lambda x: 2 * x,
                x,
            )

        f = twins.sharded(body, in_specs=(P("ep"), P("ep"), P("ep"), P()))

        @jax.jit
        def grad(x, use):
            def loss(x):
                return jnp.sum(f(x, twins.scale, twins.topk_idx, use) ** 2)

            return jax.value_and_grad(loss)(x)

        def taken(x):
            return jnp.sum(twins.dense()(x) ** 2)

        assert_close(grad(twins.x, True), jax.value_and_grad(taken)(twins.x))
        assert_close(grad(twins.x, False)[1], 8 * twins.x)

    @native_only
    def test_plan_in_the_carry(self, backend):
        twins = Twins(backend)

        def body(x, scale, topk_idx):
            def step(carry, _):
                x, plan = carry
                return (twins.body_with_plan(x, scale, plan), plan), ()

            carry = x, twins.plan(topk_idx)
            return lax.scan(step, carry, None, length=2)[0][0]

        def loss(f):
            return lambda x: jnp.sum(f(x) ** 2)

        actual = jax.jit(jax.grad(loss(twins.function(body))))(twins.x)
        twice = loss(lambda x: twins.dense()(twins.dense()(x)))
        assert_close(actual, jax.grad(twice)(twins.x))

    @per_backend
    def test_fallback_on_overflow(self, backend):
        """A small buffer at first, a large one where somebody's overflowed."""
        twins = Twins(backend)

        def body(x, scale, topk_idx):
            del scale
            plan = twins.plan(topk_idx)
            overflow = lax.psum(plan.overflow.astype(jnp.int32), "ep") > 0

            def small(x):
                return jax_ep.combine(jnp.sin(jax_ep.dispatch(x, plan)), plan)

            def large(x):
                plan = jax_ep.make_plan(topk_idx, comm=twins.comm, num_experts=EXPERTS)
                return jax_ep.combine(jnp.sin(jax_ep.dispatch(x, plan)), plan)

            return lax.cond(overflow, large, small, x)

        f = twins.sharded(body)
        grad = jax.jit(jax.grad(lambda x, i: jnp.sum(f(x, twins.scale, i) ** 2)))
        sparse = np.where(np.arange(TOP_K) == 0, twins.topk_idx, -1)
        sparse = np.where(np.arange(len(sparse))[:, None] % 3, -1, sparse)
        for topk_idx in (twins.topk_idx, sparse):
            fits = matrix(topk_idx, RANKS * TOKENS)
            assert (fits.sum() > matrix(topk_idx).sum()) == (topk_idx is not sparse)

            def dense(x, m=fits):
                return jnp.sum((m.T @ jnp.sin(m @ x)) ** 2)

            assert_close(grad(twins.x, topk_idx), jax.grad(dense)(twins.x))

    @native_only
    def test_switch_with_collectives_in_every_branch(self, backend):
        twins = Twins(backend)

        def body(x, scale, topk_idx, which):
            plan = twins.plan(topk_idx)
            branches = [
                functools.partial(lambda k, x: twins.body(k * x, scale, topk_idx), 2.0),
                lambda x: twins.body_with_plan(x, scale, plan),
            ]
            return lax.switch(which, branches, x)

        f = twins.sharded(body, in_specs=(P("ep"), P("ep"), P("ep"), P()))
        f = jax.jit(f)
        for which, factor in ((0, 2.0), (1, 1.0), (0, 2.0)):
            actual = f(twins.x, twins.scale, twins.topk_idx, which)
            assert_close(actual, twins.dense()(factor * twins.x))


def _operations_saveable(prim, *_, **__):
    return prim.name in ("ep_plan", "ep_dispatch", "ep_combine")


class TestRemat:
    # Dispatches in the gradient's jaxpr: forward, again where it was not saved,
    # and the transpose of combine; then the same for plans.
    @pytest.mark.parametrize(
        ("policy", "dispatches", "plans"),
        (
            pytest.param(None, 3, 2, id="none"),
            pytest.param(
                jax.checkpoint_policies.everything_saveable, 2, 1, id="everything"
            ),
            pytest.param(
                jax.checkpoint_policies.save_only_these_names("rows"),
                None,
                None,
                id="named_rows",
            ),
            pytest.param(_operations_saveable, 2, 1, id="operations"),
        ),
    )
    @native_variants
    def test_remat(self, backend, check_vma, policy, dispatches, plans):
        twins = Twins(backend, check_vma)
        body = jax.checkpoint(twins.body, policy=policy)

        def loss(f):
            return lambda x: jnp.sum(f(x) ** 2)

        grad = jax.grad(loss(twins.function(body)))
        expected = jax.grad(loss(twins.dense()))(twins.x)
        assert_close(jax.jit(grad)(twins.x), expected)
        if dispatches is not None:
            jaxpr = jax.make_jaxpr(grad)(twins.x)
            assert layers.count_primitive(jaxpr, "ep_dispatch") == dispatches
            assert layers.count_primitive(jaxpr, "ep_plan") == plans

    @variants
    def test_remat_around_shard_map(self, backend, check_vma):
        twins = Twins(backend, check_vma)

        def loss(f):
            return lambda x: jnp.sum(f(x) ** 2)

        grad = jax.grad(loss(jax.checkpoint(twins.function())))
        assert_close(jax.jit(grad)(twins.x), jax.grad(loss(twins.dense()))(twins.x))

    @native_only
    def test_remat_in_scan(self, backend):
        twins = Twins(backend)
        topk_idx = routing(4, 3)

        def body(x, scale, topk_idx):
            @functools.partial(
                jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable
            )
            def step(x, topk_idx):
                return twins.body(x, scale, topk_idx), ()

            return lax.scan(step, x, topk_idx)[0]

        def dense(x):
            for one in topk_idx:
                x = dense_twin(matrix(one), x, twins.scale)
            return x

        f = twins.function(body, topk_idx, in_specs=(P("ep"), P("ep"), P(None, "ep")))
        actual = jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(twins.x)
        assert_close(actual, jax.grad(lambda x: jnp.sum(dense(x) ** 2))(twins.x))
