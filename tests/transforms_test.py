"""Derivatives of every kind and order, and vmap, of dispatch and combine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from twins import (
    CAPACITY,
    HIDDEN,
    RANKS,
    TOKENS,
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


class TestFirstOrder:
    @variants
    def test_jit_and_eager(self, backend, check_vma):
        twins = Twins(backend, check_vma)
        f = twins.function()
        jitted = jax.jit(f)(twins.x)
        assert_close(jitted, twins.dense()(twins.x))
        assert jax.eval_shape(f, twins.x).shape == jitted.shape
        # One program per primitive instead of one for all: the same sums.
        assert_close(f(twins.x), jitted, 1e-6)

    @variants
    def test_grad(self, backend, check_vma):
        twins = Twins(backend, check_vma)

        def loss(f):
            return lambda x: jnp.sum(f(x) ** 2)

        actual = jax.jit(jax.value_and_grad(loss(twins.function())))(twins.x)
        expected = jax.value_and_grad(loss(twins.dense()))(twins.x)
        assert_close(actual, expected)

    @native_variants
    def test_grad_inside_shard_map(self, backend, check_vma):
        twins = Twins(backend, check_vma)

        def body(x, scale, topk_idx):
            return jax.grad(lambda x: twins.body(x, scale, topk_idx).sum())(x)

        actual = jax.jit(twins.function(body))(twins.x)
        expected = jax.grad(lambda x: twins.dense()(x).sum())(twins.x)
        assert_close(actual, expected)

    @native_variants
    def test_vjp(self, backend, check_vma):
        twins = Twins(backend, check_vma)
        cotangent = normal(4, *twins.x.shape)

        def pull(f):
            return lambda x: jax.vjp(f, x)[1](cotangent)

        actual = jax.jit(pull(twins.function()))(twins.x)
        assert_close(actual, pull(twins.dense())(twins.x))

    @variants
    def test_jvp(self, backend, check_vma):
        twins = Twins(backend, check_vma)
        tangent = normal(4, *twins.x.shape)

        def push(f):
            return lambda x: jax.jvp(f, (x,), (tangent,))

        actual = jax.jit(push(twins.function()))(twins.x)
        assert_close(actual, push(twins.dense())(twins.x))

    @native_variants
    def test_linearize(self, backend, check_vma):
        twins = Twins(backend, check_vma)
        value, linear = jax.linearize(jax.jit(twins.function()), twins.x)
        expected_value, expected = jax.linearize(twins.dense(), twins.x)
        assert_close(value, expected_value)
        for seed in (4, 5):
            tangent = normal(seed, *twins.x.shape)
            assert_close(linear(tangent), expected(tangent))

    @variants
    def test_linear_transpose(self, backend, check_vma):
        twins = Twins(backend, check_vma)
        m = matrix(twins.topk_idx)
        y = normal(4, RANKS * CAPACITY, HIDDEN)

        def transposed_dispatch(y, x, topk_idx):
            plan = twins.plan(topk_idx)
            return jax.linear_transpose(lambda x: jax_ep.dispatch(x, plan), x)(y)[0]

        def transposed_combine(x, y, topk_idx):
            plan = twins.plan(topk_idx)
            return jax.linear_transpose(lambda y: jax_ep.combine(y, plan), y)(x)[0]

        down = jax.jit(twins.sharded(transposed_dispatch))
        up = jax.jit(twins.sharded(transposed_combine))
        assert_close(down(y, twins.x, twins.topk_idx), m.T @ y)
        assert_close(up(twins.x, y, twins.topk_idx), m @ twins.x)

    @native_variants
    def test_linear_transpose_around_shard_map(self, backend, check_vma):
        twins = Twins(backend, check_vma)
        m = matrix(twins.topk_idx)
        y = normal(4, RANKS * CAPACITY, HIDDEN)

        @twins.sharded
        def dispatch(x, topk_idx):
            return jax_ep.dispatch(x, twins.plan(topk_idx))

        transposed = jax.linear_transpose(
            lambda x: dispatch(x, twins.topk_idx), twins.x
        )
        assert_close(jax.jit(transposed)(y)[0], m.T @ y)

    @variants
    def test_adjoint(self, backend, check_vma):
        """<f(x), y> = <x, f'(y)>, exactly: all numbers are small integers."""
        twins = Twins(backend, check_vma)
        rng = np.random.default_rng(4)
        x = rng.integers(-9, 9, twins.x.shape).astype(np.float32)
        y = rng.integers(-9, 9, (RANKS * CAPACITY, HIDDEN)).astype(np.float32)

        @twins.sharded
        def both(x, y, topk_idx):
            plan = twins.plan(topk_idx)
            return jax_ep.dispatch(x, plan), jax_ep.combine(y, plan)

        rows, tokens = jax.jit(both)(x, y, twins.topk_idx)
        assert np.vdot(rows, y) == np.vdot(x, tokens) != 0
        # And jvp and vjp of the non-linear function agree with one another.
        f = jax.jit(twins.function())
        tangent, cotangent = normal(5, *x.shape), normal(6, *x.shape)
        pushed = jax.jvp(f, (twins.x,), (tangent,))[1]
        pulled = jax.vjp(f, twins.x)[1](cotangent)[0]
        assert_close(np.vdot(pushed, cotangent), np.vdot(tangent, pulled))

    @native_variants
    def test_jacfwd_and_jacrev(self, backend, check_vma):
        twins = Twins(backend, check_vma)

        def narrow(f):  # a small Jacobian: one number in, all tokens
            return lambda a: f(a * twins.x)

        a = np.float32(0.7) + np.zeros((1, HIDDEN), np.float32)
        expected = jax.jacfwd(narrow(twins.dense()))(a)
        f = narrow(twins.function())
        assert_close(jax.jit(jax.jacfwd(f))(a), expected)
        assert_close(jax.jit(jax.jacrev(f))(a), expected)
        # All directions travel together.
        jaxpr = jax.make_jaxpr(jax.jacfwd(f))(a)
        assert layers.count_primitive(jaxpr, "ep_dispatch") == 2
        assert layers.count_primitive(jaxpr, "ep_combine") == 2

    @per_backend
    def test_dtypes_keep_their_gradient(self, backend):
        twins = Twins(backend)
        m = matrix(twins.topk_idx)
        dtypes = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64)
        tree = [twins.x.astype(dtype) for dtype in dtypes]

        @twins.sharded
        def dispatch(tree, topk_idx):
            return jax_ep.dispatch(tree, twins.plan(topk_idx))

        @jax.jit
        def grads(tree):
            rows, pull = jax.vjp(lambda t: dispatch(t, twins.topk_idx), tree)
            assert [r.dtype for r in rows] == list(dtypes)
            return pull([jnp.ones_like(r) for r in rows])[0]

        expected = np.broadcast_to(m.sum(axis=0)[:, None], twins.x.shape)
        for grad, dtype in zip(grads(tree), dtypes, strict=True):
            np.testing.assert_array_equal(grad, expected.astype(dtype))
            assert grad.dtype == dtype


class TestHigherOrder:
    @native_variants
    def test_hvp_forward_over_reverse(self, backend, check_vma):
        twins = Twins(backend, check_vma)
        tangent = normal(4, *twins.x.shape)

        def hvp(f):
            grad = jax.grad(lambda x: jnp.sum(f(x) ** 2))
            return lambda x: jax.jvp(grad, (x,), (tangent,))[1]

        actual = jax.jit(hvp(twins.function()))(twins.x)
        assert_close(actual, hvp(twins.dense())(twins.x), 1e-4)

    @native_variants
    def test_hvp_reverse_over_forward(self, backend, check_vma):
        twins = Twins(backend, check_vma)
        tangent = normal(4, *twins.x.shape)

        def hvp(f):
            def directional(x):
                return jax.jvp(lambda x: jnp.sum(f(x) ** 2), (x,), (tangent,))[1]

            return jax.grad(directional)

        actual = jax.jit(hvp(twins.function()))(twins.x)
        assert_close(actual, hvp(twins.dense())(twins.x), 1e-4)

    @native_only
    def test_hvp_reverse_over_reverse(self, backend):
        twins = Twins(backend)
        tangent = normal(4, *twins.x.shape)

        def hvp(f):
            grad = jax.grad(lambda x: jnp.sum(f(x) ** 2))
            return jax.grad(lambda x: jnp.vdot(grad(x), tangent))

        actual = jax.jit(hvp(twins.function()))(twins.x)
        assert_close(actual, hvp(twins.dense())(twins.x), 1e-4)

    @native_variants
    def test_check_grads(self, backend, check_vma):
        with jax.enable_x64(True):
            twins = Twins(backend, check_vma)
            twins.x = twins.x.astype(np.float64)
            twins.scale = twins.scale.astype(np.float64)
            twins.topk_idx = twins.topk_idx.astype(np.int64)
            f = jax.jit(twins.function())
            assert f(twins.x).dtype == np.float64
            check_grads(f, (twins.x,), order=2, modes=("fwd", "rev"), rtol=1e-6)


class TestVmap:
    def assert_collectives(self, f, args, backend, plans, pairs):
        """Counts operations in the jaxpr and, where native, in the HLO."""
        if layers.between_nodes():
            return  # other operations, of which a batch over routing is one
        jaxpr = jax.make_jaxpr(f)(*args)
        counts = {"plan": plans, "dispatch": pairs, "combine": pairs}
        found = {n: layers.count_primitive(jaxpr, f"ep_{n}") for n in counts}
        assert found == counts
        if backend == "xla":
            return
        hlo = jax.jit(f).lower(*args).compile().as_text()
        found = {n: hlo.count(f'custom_call_target="jax_ep_{n}"') for n in counts}
        assert found == counts

    @variants
    def test_data(self, backend, check_vma):
        """A batch over the data alone is one collective."""
        twins = Twins(backend, check_vma)
        batch = normal(4, 3, *twins.x.shape)

        def body(x, scale, topk_idx):
            return jax.vmap(twins.body, (0, None, None))(x, scale, topk_idx)

        spec = P(None, "ep")
        inside = twins.function(body, in_specs=(spec, P("ep"), P("ep")), out_specs=spec)
        around = jax.vmap(twins.function())
        expected = jax.vmap(twins.dense())(batch)
        for f in (inside, around):
            assert_close(jax.jit(f)(batch), expected)
            self.assert_collectives(f, (batch,), backend, plans=1, pairs=1)

    @native_variants
    def test_data_other_axes_nested_and_ranks(self, backend, check_vma):
        """Any batch axis, two batches, leaves of one to four dimensions."""
        twins = Twins(backend, check_vma)
        m = matrix(twins.topk_idx)

        @twins.sharded
        def dispatch(x, topk_idx):
            return jax_ep.dispatch(x, twins.plan(topk_idx))

        def up(x):
            return dispatch(x, twins.topk_idx)

        tokens = RANKS * TOKENS
        for in_axis, out_axis in ((1, 0), (0, 1), (1, 1)):
            x = normal(5, *((2, tokens) if in_axis == 0 else (tokens, 2)))
            f = jax.vmap(up, in_axis, out_axis)
            rows = m @ (x.T if in_axis == 0 else x)
            assert_close(jax.jit(f)(x), rows if out_axis == 1 else rows.T)
        x = normal(6, 2, tokens, 3, 2, 2)
        nested = jax.vmap(jax.vmap(up, 3, 3))
        expected = np.einsum("ct,btwij->bcwij", m, x)
        assert_close(jax.jit(nested)(x), expected)
        jaxpr = jax.make_jaxpr(nested)(x)
        assert layers.count_primitive(jaxpr, "ep_dispatch") == 1

    @native_only
    @pytest.mark.parametrize("batched", ("data", "routing", "both"))
    def test_empty_batch(self, backend, batched):
        twins = Twins(backend)
        axes = {"data": (0, None), "routing": (None, 0), "both": (0, 0)}[batched]

        @twins.sharded
        def dispatch(x, topk_idx):
            return jax_ep.dispatch(x, twins.plan(topk_idx))

        args = [
            a if axis is None else np.zeros((0, *a.shape), a.dtype)
            for a, axis in zip((twins.x, twins.topk_idx), axes, strict=True)
        ]
        rows = jax.jit(jax.vmap(dispatch, axes))(*args)
        assert rows.shape == (0, RANKS * CAPACITY, HIDDEN)
        assert rows.dtype == twins.x.dtype

    @native_only
    def test_grad_of_vmap_and_vmap_of_grad(self, backend):
        twins = Twins(backend)
        batch = normal(4, 3, *twins.x.shape)

        def outer(f):
            return jax.grad(lambda x: jnp.sum(jax.vmap(f)(x) ** 2))

        def inner(f):
            return jax.vmap(jax.grad(lambda x: jnp.sum(f(x) ** 2)))

        for transform in (outer, inner):
            actual = jax.jit(transform(twins.function()))(batch)
            assert_close(actual, transform(twins.dense())(batch))
        # Forward, and the two transposes.
        jaxpr = jax.make_jaxpr(inner(twins.function()))(batch)
        assert layers.count_primitive(jaxpr, "ep_dispatch") == 2
        assert layers.count_primitive(jaxpr, "ep_combine") == 2

    @variants
    def test_routing(self, backend, check_vma):
        """A batch over the routing is one collective for each element."""
        twins = Twins(backend, check_vma)
        topk_idx = routing(4, 3)
        batch = normal(5, 3, *twins.x.shape)
        f = twins.sharded()

        def both(x, topk_idx):
            return jax.vmap(f, (0, None, 0))(x, twins.scale, topk_idx)

        def routing_only(x, topk_idx):
            return jax.vmap(f, (None, None, 0))(x, twins.scale, topk_idx)

        def dense(x, i):
            return dense_twin(matrix(topk_idx[i]), x, twins.scale)

        expected = [dense(batch[i], i) for i in range(3)]
        assert_close(jax.jit(both)(batch, topk_idx), np.stack(expected))
        self.assert_collectives(both, (batch, topk_idx), backend, 3, 3)
        expected = [dense(twins.x, i) for i in range(3)]
        assert_close(jax.jit(routing_only)(twins.x, topk_idx), np.stack(expected))

        def loss(x):
            return jnp.sum(both(x, topk_idx) ** 2)

        expected = [
            jax.grad(lambda x, i=i: jnp.sum(dense(x, i) ** 2))(batch[i])
            for i in range(3)
        ]
        assert_close(jax.jit(jax.grad(loss))(batch), np.stack(expected))

    @variants
    def test_make_plan(self, backend, check_vma):
        """Batched plans hold, field by field, the plans of the elements."""
        twins = Twins(backend, check_vma)
        topk_idx = routing(4, 3)
        specs = {"in_specs": P(None, "ep"), "out_specs": P("ep")}

        def batched(topk_idx):
            return layers.wrap_plan(jax.vmap(twins.plan)(topk_idx))

        def one_by_one(topk_idx):
            plans = [twins.plan(one) for one in topk_idx]
            return layers.wrap_plan(jax.tree.map(lambda *a: jnp.stack(a), *plans))

        batched, one_by_one = (twins.sharded(f, **specs) for f in (batched, one_by_one))
        jax.tree.map(
            np.testing.assert_array_equal,
            jax.jit(batched)(topk_idx),
            jax.jit(one_by_one)(topk_idx),
        )
        if layers.between_nodes():
            return
        jaxpr = jax.make_jaxpr(batched)(topk_idx)
        assert layers.count_primitive(jaxpr, "ep_plan") == 3
