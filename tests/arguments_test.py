"""Forms that data, meshes and plans come in: each with its gradient."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from twins import (
    CAPACITY,
    EXPERTS,
    HIDDEN,
    RANKS,
    TOKENS,
    Twins,
    assert_close,
    matrix,
    native_only,
    native_variants,
    normal,
    per_backend,
    routing,
    variants,
)

import jax_ep


class TestReplicatedInput:
    """Inputs equal on all ranks, which JAX types as unvarying."""

    @variants
    def test_replicated_data(self, backend, check_vma):
        twins = Twins(backend, check_vma)
        x = normal(4, TOKENS, HIDDEN)
        f = twins.sharded(in_specs=(P(), P("ep"), P("ep")))

        def sharded(x):
            return jnp.sum(f(x, twins.scale, twins.topk_idx) ** 2)

        def dense(x):
            return jnp.sum(twins.dense()(jnp.tile(x, (RANKS, 1))) ** 2)

        actual = jax.jit(jax.value_and_grad(sharded))(x)
        assert_close(actual, jax.value_and_grad(dense)(x))
        tangent = normal(5, *x.shape)
        actual = jax.jit(lambda x: jax.jvp(sharded, (x,), (tangent,)))(x)
        assert_close(actual, jax.jvp(dense, (x,), (tangent,)))

    @native_variants
    def test_replicated_routing(self, backend, check_vma):
        twins = Twins(backend, check_vma)
        topk_idx = routing(5)[:TOKENS]
        f = twins.sharded(in_specs=(P("ep"), P("ep"), P()))

        def sharded(x):
            return jnp.sum(f(x, twins.scale, topk_idx) ** 2)

        def dense(x):
            f = twins.dense(np.tile(topk_idx, (RANKS, 1)))
            return jnp.sum(f(x) ** 2)

        actual = jax.jit(jax.value_and_grad(sharded))(twins.x)
        assert_close(actual, jax.value_and_grad(dense)(twins.x))

    @native_variants
    def test_replicated_rows(self, backend, check_vma):
        """combine of a buffer that is the same constant everywhere."""
        twins = Twins(backend, check_vma)
        y = normal(4, CAPACITY, HIDDEN)

        @functools.partial(twins.sharded, in_specs=(P(), P("ep")))
        def f(y, topk_idx):
            return jax_ep.combine(y, twins.plan(topk_idx))

        m = matrix(twins.topk_idx)
        tall = np.tile(y, (RANKS, 1))
        assert_close(jax.jit(f)(y, twins.topk_idx), m.T @ tall)
        grad = jax.jit(jax.grad(lambda y: jnp.sum(f(y, twins.topk_idx) ** 2)))(y)
        by_rank = (2 * m @ (m.T @ tall)).reshape(RANKS, CAPACITY, HIDDEN)
        assert_close(grad, by_rank.sum(axis=0))

    @native_only
    def test_gradient_inside_shard_map(self, backend):
        """With check_vma JAX sums the gradient of a replicated input itself."""
        twins = Twins(backend, check_vma=True)
        x = normal(4, TOKENS, HIDDEN)

        def body(x, scale, topk_idx):
            return jax.grad(lambda x: twins.body(x, scale, topk_idx).sum())(x)

        f = twins.function(body, in_specs=(P(), P("ep"), P("ep")), out_specs=P())
        expected = jax.grad(lambda x: twins.dense()(jnp.tile(x, (RANKS, 1))).sum())(x)
        assert_close(jax.jit(f)(x), expected)


class TestMesh:
    @pytest.mark.parametrize("set_mesh", (True, False))
    @pytest.mark.parametrize("axis_type", (AxisType.Auto, AxisType.Explicit), ids=str)
    @native_variants
    def test_axis_types(self, backend, axis_type, check_vma, set_mesh):
        twins = Twins(backend, check_vma, axis_type)
        put = functools.partial(
            jax.device_put, device=NamedSharding(twins.mesh, P("ep"))
        )
        x, scale, topk_idx = map(put, (twins.x, twins.scale, twins.topk_idx))
        tangent = put(normal(4, *x.shape))

        def check():
            def loss(x):
                return jnp.sum(f(x, scale, topk_idx) ** 2)

            hvp = jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (tangent,)))
            assert_close(hvp(x), expected, 1e-4)
            batch = jax.device_put(
                np.stack([twins.x, 2 * twins.x]),
                NamedSharding(twins.mesh, P(None, "ep")),
            )
            batched = jax.jit(jax.vmap(lambda x: f(x, scale, topk_idx)))
            assert_close(batched(batch)[1], twins.dense()(2 * twins.x))

        dense_grad = jax.grad(lambda x: jnp.sum(twins.dense()(x) ** 2))
        expected = jax.jvp(dense_grad, (twins.x,), (np.asarray(tangent),))
        if set_mesh:
            with jax.set_mesh(twins.mesh):
                f = jax.shard_map(
                    twins.body,
                    in_specs=P("ep"),
                    out_specs=P("ep"),
                    check_vma=check_vma,
                )
                check()
        else:
            f = twins.sharded()
            check()


def unseen(x):
    """A copy to look at: memory that NumPy has seen cannot be donated."""
    return jnp.copy(x)


def fresh(x, sharding):
    """x in memory of its own, to be donated."""
    return jax.device_put(x, sharding, may_alias=False)


class TestPlan:
    """A plan is data: it leaves a program, waits anywhere and comes back."""

    def split(self, backend):
        twins = Twins(backend)

        @jax.jit
        @twins.sharded
        def make(topk_idx):
            return layers.wrap_plan(twins.plan(topk_idx))

        def use(x, scale, plan):
            return twins.body_with_plan(x, scale, layers.unwrap_plan(plan))

        return twins, make, twins.sharded(use)

    @per_backend
    def test_crosses_jit(self, backend):
        twins, make, use = self.split(backend)
        plan = make(twins.topk_idx)
        assert isinstance(plan, jax_ep.Plan)

        def loss(x, plan):
            return jnp.sum(use(x, twins.scale, plan) ** 2)

        actual = jax.jit(jax.value_and_grad(loss))(twins.x, plan)
        expected = jax.value_and_grad(lambda x: jnp.sum(twins.dense()(x) ** 2))
        assert_close(actual, expected(twins.x))
        # Other plans of the same sizes run the same program.
        use = jax.jit(use)
        for seed in (5, 6, 7):
            topk_idx = routing(seed)
            actual = use(twins.x, twins.scale, make(topk_idx))
            assert_close(actual, twins.dense(topk_idx)(twins.x))
        assert use._cache_size() == 1

    @native_only
    def test_saved_and_restored(self, backend, tmp_path):
        """Only arrays are saved; the sizes come from the program, and the
        communicator may be another one, as after a restart."""
        twins, make, use = self.split(backend)
        path = tmp_path / "plan.npz"
        leaves = jax.tree.leaves(make(twins.topk_idx))
        np.savez(path, *leaves)
        for restart in (False, True):
            if restart:
                twins, make, use = self.split(backend)
                twins.comm = jax_ep.Communicator(twins.mesh, "ep", backend=backend)
            with np.load(path) as saved:
                arrays = [saved[f"arr_{i}"] for i in range(len(leaves))]
            treedef = jax.tree.structure(jax.eval_shape(make, twins.topk_idx))
            plan = treedef.unflatten(arrays)
            actual = jax.jit(use)(twins.x, twins.scale, plan)
            assert_close(actual, twins.dense()(twins.x))

    @per_backend
    def test_donated(self, backend):
        twins, make, use = self.split(backend)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(x, plan):
            return use(x, twins.scale, plan), plan

        put = NamedSharding(twins.mesh, P("ep"))
        x, plan = fresh(twins.x, put), make(twins.topk_idx)
        expected = twins.x
        for _ in range(3):
            before = x, plan
            x, plan = step(x, plan)
            expected = twins.dense()(expected)
            assert_close(unseen(x), expected, 1e-4)
            assert before[0].is_deleted()
            assert before[1].recv_src.is_deleted()


class TestBuffer:
    @per_backend
    def test_donated_data(self, backend):
        """Outputs may lie where the inputs lay."""
        twins = Twins(backend)
        put = NamedSharding(twins.mesh, P("ep"))
        topk_idx = jax.device_put(twins.topk_idx, put)

        @functools.partial(jax.jit, donate_argnums=0)
        @twins.sharded
        def round_trip(x, topk_idx):
            plan = twins.plan(topk_idx)
            return jax_ep.combine(jax_ep.dispatch(x, plan), plan)

        x = fresh(twins.x, put)
        times = matrix(twins.topk_idx).sum(axis=0) ** np.arange(4)[:, None]
        for step in range(1, 4):
            before, x = x, round_trip(x, topk_idx)
            assert before.is_deleted()
            assert_close(unseen(x), twins.x * times[step][:, None])

    @native_only
    def test_donated_rows(self, backend):
        """dispatch and combine between buffers of one size, [C, H] = [T, H]."""
        twins = Twins(backend)
        put = NamedSharding(twins.mesh, P("ep"))
        m = matrix(twins.topk_idx, TOKENS)

        def donating(op):
            def body(x, topk_idx):
                plan = jax_ep.make_plan(
                    topk_idx, comm=twins.comm, num_experts=EXPERTS, capacity=TOKENS
                )
                return op(x, plan)

            return jax.jit(twins.sharded(body), donate_argnums=0)

        up, down = donating(jax_ep.dispatch), donating(jax_ep.combine)
        x = fresh(twins.x, put)
        rows = up(x, twins.topk_idx)
        np.testing.assert_array_equal(unseen(rows), m @ twins.x)
        tokens = down(rows, twins.topk_idx)
        assert x.is_deleted()
        assert rows.is_deleted()
        assert_close(tokens, m.T @ (m @ twins.x))


class TestTree:
    """Trees with integer leaves: only floating leaves have a gradient."""

    def tree(self):
        tokens = RANKS * TOKENS
        return {
            "x": normal(4, tokens, HIDDEN),
            "id": np.arange(tokens, dtype=np.int32),
            "odd": np.arange(tokens)[:, None] % 2 == 1,
            "half": normal(5, tokens, 2, dtype=jnp.bfloat16),
        }

    def dispatch(self, backend):
        twins = Twins(backend)

        @twins.sharded
        def f(tree, topk_idx):
            return jax_ep.dispatch(tree, twins.plan(topk_idx))

        return lambda tree: f(tree, twins.topk_idx), matrix(twins.topk_idx)

    def loss(self, f, tree):
        rows = f(tree)
        weight = 1.0 + rows["id"][:, None].astype(jnp.float32)
        weight += rows["odd"].astype(jnp.float32)
        return jnp.sum(jnp.sin(rows["x"]) * weight) + jnp.sum(
            rows["half"].astype(jnp.float32) * weight
        )

    def dense(self, m):
        def rows(tree):
            sent = m.sum(axis=1) > 0
            source = m.argmax(axis=1)
            mask = {1: sent, 2: sent[:, None]}
            return jax.tree.map(
                lambda a: jnp.where(
                    mask[a.ndim], jnp.asarray(a)[source], jnp.zeros((), a.dtype)
                ),
                tree,
            )

        return rows

    @per_backend
    def test_values(self, backend):
        f, m = self.dispatch(backend)
        tree = self.tree()
        expected = self.dense(m)(tree)
        actual = jax.jit(f)(tree)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
        assert jax.tree.map(lambda a: a.dtype, actual) == jax.tree.map(
            lambda a: jnp.dtype(a.dtype), tree
        )
        # One launch for the whole tree.
        jaxpr = jax.make_jaxpr(f)(tree)
        assert layers.count_primitive(jaxpr, "ep_dispatch") == 1

    @per_backend
    def test_gradient_of_mixed_tree(self, backend):
        f, m = self.dispatch(backend)
        tree = self.tree()
        grads = [
            jax.grad(jax.jit(functools.partial(self.loss, g)), allow_int=True)(tree)
            for g in (f, self.dense(m))
        ]
        for grad in grads:
            assert grad["id"].dtype == jax.dtypes.float0
            assert grad["odd"].dtype == jax.dtypes.float0
            del grad["id"], grad["odd"]
        assert grads[0]["half"].dtype == jnp.bfloat16
        as_float = [jax.tree.map(lambda a: np.asarray(a, np.float32), g) for g in grads]
        assert_close(as_float[0]["x"], as_float[1]["x"])
        # bfloat16 sums are rounded once here, after each term in the twin.
        assert_close(as_float[0]["half"], as_float[1]["half"], 0.02)

    @native_only
    def test_jvp_of_mixed_tree(self, backend):
        f, m = self.dispatch(backend)
        tree = self.tree()
        float0 = functools.partial(np.zeros, dtype=jax.dtypes.float0)
        tangent = dict(
            self.tree(), id=float0(tree["id"].shape), odd=float0(tree["odd"].shape)
        )
        actual, expected = (
            jax.jvp(jax.jit(functools.partial(self.loss, g)), (tree,), (tangent,))
            for g in (f, self.dense(m))
        )
        assert_close(actual, expected, 1e-2)

    @native_only
    def test_unused_leaves(self, backend):
        """Cotangents that are symbolic zeros, for one leaf and for all."""
        f, m = self.dispatch(backend)
        tree = {k: v for k, v in self.tree().items() if k in ("x", "half")}
        grad = jax.jit(jax.grad(lambda t: f(t)["x"].sum()))(tree)
        assert_close(grad["x"], np.tile(m.sum(axis=0)[:, None], HIDDEN))
        assert not grad["half"].any()
        grad = jax.jit(jax.grad(lambda t: f(t)["x"].shape[0] * t["x"].sum()))(tree)
        assert_close(grad["x"], np.full_like(tree["x"], RANKS * CAPACITY))

    @per_backend
    def test_combine_of_a_tree(self, backend):
        twins = Twins(backend)
        m = matrix(twins.topk_idx)
        rows = RANKS * CAPACITY
        tree = {
            "a": normal(4, rows, HIDDEN),
            "b": (normal(5, rows), normal(6, rows, 2, 3)),
        }

        @twins.sharded
        def f(tree, topk_idx):
            return jax_ep.combine(tree, twins.plan(topk_idx))

        def dense(tree):
            return jax.tree.map(lambda a: jnp.einsum("ct,c...->t...", m, a), tree)

        def loss(f):
            def of(tree):
                return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(f(tree)))

            return jax.value_and_grad(of)

        actual = jax.jit(loss(lambda tree: f(tree, twins.topk_idx)))(tree)
        assert_close(actual, loss(dense)(tree))

    @native_only
    def test_empty_tree_and_many_leaves(self, backend):
        twins = Twins(backend)
        m = matrix(twins.topk_idx)

        @jax.jit
        @twins.sharded
        def f(tree, topk_idx):
            plan = twins.plan(topk_idx)
            assert jax_ep.dispatch({}, plan) == {}
            assert jax_ep.combine((), plan) == ()
            return jax_ep.combine(jax_ep.dispatch(tree, plan), plan)

        tree = [i * twins.x[:, : 1 + i % 3] for i in range(40)]
        expected = [m.sum(axis=0)[:, None] * a for a in tree]
        assert_close(f(tree, twins.topk_idx), expected)
