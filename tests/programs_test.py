"""Whole programs: several meshes, communicators, groups and calls at a time."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import weakref

import harness
import jax
import jax.numpy as jnp
import layers
import numpy as np
import oracle
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

DEVICES = jax.device_count()
TOKENS, TOP_K, HIDDEN = 6, 3, 5
NATIVE = harness.BACKENDS[0]


def experts(ranks):
    return 2 * ranks + 1


def routing(seed, ranks, tokens=TOKENS):
    """int32 [R * T, K] with holes and duplicates."""
    return layers.random_routing(seed, ranks * tokens, TOP_K, experts(ranks))


def numbers(seed, *shape):
    """Small integers in float32: every sum of them is exact."""
    return np.random.default_rng(seed).integers(-9, 9, shape).astype(np.float32)


def round_trip(x, topk_idx, comm, capacity=None, scale=1.0):
    """combine(scale * (dispatch(x) + 1)) with a plan of its own."""
    plan = jax_ep.make_plan(
        topk_idx,
        comm=comm,
        num_experts=experts(comm.num_ranks),
        capacity=capacity,
    )
    return jax_ep.combine(scale * (jax_ep.dispatch(x, plan) + 1), plan)


def expected_round_trip(x, topk_idx, ranks, capacity=None, scale=1.0):
    """round_trip on all ranks' tokens [R * T, H]."""
    if capacity is None:
        capacity = topk_idx.shape[0]
    plan = oracle.plan(topk_idx.reshape(ranks, -1, TOP_K), experts(ranks), capacity)
    rows = plan.dispatch(x.reshape(ranks, -1, *x.shape[1:]))
    return plan.combine(np.float32(scale) * (rows + 1)).reshape(x.shape)


def on(mesh, body, spec=P("ep"), **kwargs):
    return layers.sharded(body, mesh, in_specs=spec, out_specs=spec, **kwargs)


same = np.testing.assert_array_equal


GROUP_SHAPES = (
    {"data": 4, "ep": 2},
    {"data": 2, "ep": 4},
    {"ep": 4, "data": 2},
    {"data": 2, "ep": 2, "model": 2},
    {"data": 1, "ep": 2},
    {"data": 2, "ep": 1},
)


class TestMeshes:
    @harness.on_each_backend
    def test_two_meshes_in_one_program(self, backend):
        """A flat mesh and a grid over the same devices, in one jit."""
        ranks = max(2, 2 * (DEVICES // 2))
        flat = layers.mesh({"ep": ranks})
        grid = layers.mesh({"data": ranks // 2, "ep": 2})
        flat_comm = layers.communicator(flat, "ep", backend)
        grid_comm = layers.communicator(grid, "ep", backend)
        f = on(flat, lambda x, i: round_trip(x, i, flat_comm))
        g = on(grid, lambda x, i: round_trip(x, i, grid_comm), P(("data", "ep")))

        @jax.jit
        def both(x, flat_idx, grid_idx):
            # Independent calls on the two meshes, then one after the other.
            return f(x, flat_idx), g(x, grid_idx), g(f(x, flat_idx), grid_idx)

        x = numbers(0, ranks * TOKENS, HIDDEN)
        flat_idx, grid_idx = routing(1, ranks), routing(2, 2, ranks // 2 * TOKENS)

        def expected_grid(x):
            groups = np.split(x, ranks // 2), np.split(grid_idx, ranks // 2)
            return np.concatenate(
                [expected_round_trip(a, i, 2) for a, i in zip(*groups, strict=True)]
            )

        first, second, third = both(x, flat_idx, grid_idx)
        expected = expected_round_trip(x, flat_idx, ranks)
        same(first, expected)
        same(second, expected_grid(x))
        same(third, expected_grid(expected))

    @harness.on_each_backend
    def test_two_communicators_on_one_mesh(self, backend):
        """Two communicators, also along two axes of one mesh, in one body."""
        mesh = layers.mesh({"a": 2, "ep": max(1, DEVICES // 2)})
        ranks = mesh.shape
        comms = {axis: layers.communicator(mesh, axis, backend) for axis in ranks}
        again = jax_ep.Communicator(mesh, "ep", backend=backend)

        def body(x, idx_a, idx_ep):
            along_a = round_trip(x, idx_a, comms["a"])
            along_ep = round_trip(x, idx_ep, comms["ep"])
            return along_a, along_ep, round_trip(along_a, idx_ep, again)

        spec = P(("a", "ep"))
        x = numbers(0, mesh.size * TOKENS, HIDDEN)
        idx_a = routing(1, 2, ranks["ep"] * TOKENS)
        idx_ep = routing(2, ranks["ep"], 2 * TOKENS)

        def expected(x, idx, axis):
            # [a, ep, T, ...] -> groups along the other axis.
            shape = (2, ranks["ep"], TOKENS)
            move = (lambda b: b.swapaxes(0, 1)) if axis == "a" else (lambda b: b)
            groups, indices = (move(b.reshape(*shape, b.shape[-1])) for b in (x, idx))
            out = [
                expected_round_trip(
                    g.reshape(-1, HIDDEN), i.reshape(-1, TOP_K), ranks[axis]
                ).reshape(g.shape)
                for g, i in zip(groups, indices, strict=True)
            ]
            return move(np.stack(out)).reshape(x.shape)

        along_a, along_ep, both = jax.jit(on(mesh, body, spec))(x, idx_a, idx_ep)
        expected_a = expected(x, idx_a, "a")
        same(along_a, expected_a)
        same(along_ep, expected(x, idx_ep, "ep"))
        same(both, expected(expected_a, idx_ep, "ep"))
        again.close()

    @pytest.mark.parametrize(
        ("backend", "shape", "axis_type"),
        [
            pytest.param(
                backend,
                shape,
                axis_type,
                id=f"{backend}-{axis_type}-"
                + "_".join(f"{k}{v}" for k, v in shape.items()),
            )
            for backend, axis_type, shapes in (
                (NATIVE, AxisType.Auto, GROUP_SHAPES),
                (NATIVE, AxisType.Explicit, GROUP_SHAPES[1:3]),
                ("xla", AxisType.Auto, GROUP_SHAPES[1:4]),
            )
            for shape in shapes
        ],
    )
    def test_groups(self, backend, shape, axis_type):
        """One group for each coordinate of the other axes; value and gradient."""
        mesh = layers.mesh(shape, axis_type)
        comm = layers.communicator(mesh, "ep", backend)
        ranks = shape["ep"]
        others = [axis for axis in shape if axis != "ep"]
        groups = mesh.size // ranks
        # Groups first, then ranks: what each device holds follows its place.
        spec = P((*others, "ep"))
        put = functools.partial(jax.device_put, device=NamedSharding(mesh, spec))
        x = numbers(0, groups, ranks * TOKENS, HIDDEN)
        idx = np.stack([routing(1 + g, ranks) for g in range(groups)])
        flat_x, flat_idx = put(x.reshape(-1, HIDDEN)), put(idx.reshape(-1, TOP_K))
        f = on(mesh, lambda x, i: round_trip(x, i, comm, scale=2.0), spec)

        def loss(x):
            out = f(x, flat_idx)
            return jnp.sum(out**2), out

        grad, out = jax.jit(jax.grad(loss, has_aux=True))(flat_x)
        times = [
            layers.dispatch_matrix(
                i, num_ranks=ranks, num_experts=experts(ranks), capacity=len(i)
            ).sum(axis=0)
            for i in idx
        ]
        expected = np.stack(
            [
                expected_round_trip(a, i, ranks, scale=2.0)
                for a, i in zip(x, idx, strict=True)
            ]
        )
        same(np.reshape(out, x.shape), expected)
        expected_grad = 4 * np.stack(times)[..., None] * expected
        same(np.reshape(grad, x.shape), expected_grad)

    @harness.on_each_backend
    def test_replicated_over_groups(self, backend):
        """Groups that share their data; its gradient is the sum over groups."""
        mesh = layers.mesh({"data": 2, "ep": max(1, DEVICES // 2)})
        comm = layers.communicator(mesh, "ep", backend)
        ranks = comm.num_ranks
        x = numbers(0, ranks * TOKENS, HIDDEN)
        idx = np.concatenate([routing(1 + g, ranks) for g in range(2)])

        def loss(x, spec):
            f = layers.sharded(
                functools.partial(round_trip, comm=comm),
                mesh,
                in_specs=(spec, P(("data", "ep"))),
                out_specs=P(("data", "ep")),
            )
            return jnp.sum(f(x, idx) ** 2)

        shared = jax.jit(jax.grad(lambda x: loss(x, P("ep"))))(x)
        apart = jax.jit(jax.grad(lambda x: loss(x, P(("data", "ep")))))(
            np.concatenate([x, x])
        )
        same(shared, apart.reshape(2, *x.shape).sum(axis=0))

    @harness.on_each_backend
    def test_manual_axis_by_axis(self, backend):
        """shard_map in shard_map, and vmap over the groups by spmd_axis_name."""
        mesh = layers.mesh({"data": 2, "ep": max(1, DEVICES // 2)})
        comm = layers.communicator(mesh, "ep", backend)
        ranks = comm.num_ranks
        layer = functools.partial(round_trip, comm=comm)
        x = numbers(0, 2, ranks * TOKENS, HIDDEN)
        idx = np.stack([routing(1 + g, ranks) for g in range(2)])

        def outer(x, idx):
            inner = jax.shard_map(
                layer, in_specs=P("ep"), out_specs=P("ep"), axis_names={"ep"}
            )
            return inner(x[0], idx[0])[None]

        nested = jax.shard_map(
            outer,
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
            axis_names={"data"},
        )
        batched = jax.vmap(on(mesh, layer), spmd_axis_name="data")
        expected = [expected_round_trip(x[g], idx[g], ranks) for g in range(2)]
        # The inner shard_map has no mesh of its own: the context names it.
        with jax.set_mesh(mesh):
            for f in (nested, batched):
                same(jax.jit(f)(x, idx), np.stack(expected))

    def test_meshes_over_other_devices(self):
        """Two programs at a time on two halves, and on ranks in another order."""
        if DEVICES < 4:
            pytest.skip(f"needs 4 devices; this machine has {DEVICES}")
        half = DEVICES // 2
        devices = np.array(jax.devices())
        fs, args, expected = [], [], []
        orders = (devices[:half], devices[half:], devices[half:][::-1], devices[::-1])
        for i, order in enumerate(orders):
            mesh = Mesh(order, ("ep",))
            comm = layers.communicator(mesh, "ep", NATIVE)
            f = on(mesh, functools.partial(round_trip, comm=comm))
            x, idx = numbers(i, len(order) * TOKENS, HIDDEN), routing(i, len(order))
            fs.append(jax.jit(f))
            args.append(jax.device_put((x, idx), NamedSharding(mesh, P("ep"))))
            expected.append(expected_round_trip(x, idx, len(order)))
        for _ in range(5):
            results = [f(*a) for f, a in zip(fs, args, strict=True)]
            jax.tree.map(same, results, expected)


class TestManyCalls:
    @pytest.mark.parametrize("calls", (2, 96))
    @pytest.mark.parametrize("ranks", (2, 4, 8))
    def test_independent_calls(self, ranks, calls):
        """Nothing orders them: devices may run them in different orders."""
        mesh = harness.mesh(ranks)
        comm = harness.communicator(NATIVE, ranks)
        x = numbers(0, calls, ranks * TOKENS, HIDDEN)
        idx = np.stack([routing(1 + i, ranks) for i in range(calls)])

        @jax.jit
        @functools.partial(on, mesh, spec=P(None, "ep"))
        def f(x, idx):
            return jnp.stack([round_trip(x[i], idx[i], comm) for i in range(calls)])

        args = jax.device_put((x, idx), NamedSharding(mesh, P(None, "ep")))
        expected = np.stack(
            [expected_round_trip(x[i], idx[i], ranks) for i in range(calls)]
        )
        # Several runs in flight at once.
        for out in [f(*args) for _ in range(10)]:
            same(out, expected)

    @harness.on_each_backend
    def test_collectives_between_calls(self, backend):
        """psum and all_gather beside, before and after our operations."""
        ranks = min(8, DEVICES)
        mesh = harness.mesh(ranks)
        comm = harness.communicator(backend, ranks)
        x, idx = numbers(0, ranks * TOKENS, HIDDEN), routing(1, ranks)

        @jax.jit
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=P("ep"), out_specs=(P("ep"), P())
        )
        def f(x, idx):
            beside = lax.psum(x.sum(), "ep")
            y = x + lax.psum(x[0, 0], "ep")
            y = round_trip(y, idx, comm)
            total = lax.psum(y.sum(), "ep")
            y = round_trip(y + total, idx, comm)
            return y, lax.psum(y.sum(), "ep") + beside

        args = jax.device_put((x, idx), NamedSharding(mesh, P("ep")))
        y = expected_round_trip(x + x[::TOKENS, 0].sum(), idx, ranks)
        y = expected_round_trip(y + y.sum(), idx, ranks)
        for out, total in [f(*args) for _ in range(5)]:
            same(out, y)
            # float32 sums of numbers above 2**24 depend on their order.
            np.testing.assert_allclose(total, y.sum() + x.sum(), rtol=1e-5)

    @harness.on_each_backend
    def test_jitted_layer_called_twice(self, backend):
        """One lowered function, two calls on independent data in one jit."""
        ranks = min(4, DEVICES)
        mesh = harness.mesh(ranks)
        comm = harness.communicator(backend, ranks)
        layer = jax.jit(on(mesh, functools.partial(round_trip, comm=comm)))

        @jax.jit
        def twice(x1, idx1, x2, idx2):
            first, second = layer(x1, idx1), layer(x2, idx2)
            return first, second, layer(first, idx2)

        x1, x2 = (numbers(i, ranks * TOKENS, HIDDEN) for i in (1, 2))
        idx1, idx2 = (routing(i, ranks) for i in (1, 2))
        args = jax.device_put((x1, idx1, x2, idx2), NamedSharding(mesh, P("ep")))
        first = expected_round_trip(x1, idx1, ranks)
        second = expected_round_trip(x2, idx2, ranks)
        third = expected_round_trip(first, idx2, ranks)
        for out in [twice(*args) for _ in range(10)]:
            jax.tree.map(same, out, (first, second, third))

    def test_inner_jit_inside_shard_map_called_twice(self):
        ranks = min(4, DEVICES)
        mesh = harness.mesh(ranks)
        comm = harness.communicator(NATIVE, ranks)
        layer = jax.jit(functools.partial(round_trip, comm=comm))
        f = jax.jit(on(mesh, lambda x, i, j: (layer(x, i), layer(x, j))))
        x = numbers(1, ranks * TOKENS, HIDDEN)
        idx = [routing(i, ranks) for i in (1, 2)]
        args = jax.device_put((x, *idx), NamedSharding(mesh, P("ep")))
        expected = [expected_round_trip(x, i, ranks) for i in idx]
        for out in [f(*args) for _ in range(10)]:
            jax.tree.map(same, list(out), expected)

    @pytest.mark.skipif(
        harness.ON_GPU,
        reason="programs of two threads may start in another order on each GPU",
    )
    def test_threads(self):
        """Runs of one program from several Python threads at once."""
        ranks = min(4, DEVICES)
        comm = harness.communicator(NATIVE, ranks)
        f = jax.jit(on(comm.mesh, functools.partial(round_trip, comm=comm)))
        put = functools.partial(
            jax.device_put, device=NamedSharding(comm.mesh, P("ep"))
        )

        def work(seed):
            x, idx = numbers(seed, ranks * TOKENS, HIDDEN), routing(seed, ranks)
            expected = expected_round_trip(x, idx, ranks)
            # Before jax 0.12 XLA may hang with more than 32 CPU programs started
            # and not awaited: three threads have 24.
            for _ in range(4):
                for out in [f(*put((x, idx))) for _ in range(8)]:
                    same(out, expected)

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(6)))

    @harness.on_each_backend
    def test_changing_routing_does_not_recompile(self, backend):
        ranks = min(4, DEVICES)
        mesh = harness.mesh(ranks)
        comm = harness.communicator(backend, ranks)
        traces = []

        def body(x, idx):
            traces.append(1)
            return round_trip(x, idx, comm, capacity=8)

        f = jax.jit(on(mesh, body))
        x = numbers(0, ranks * TOKENS, HIDDEN)
        put = functools.partial(jax.device_put, device=NamedSharding(mesh, P("ep")))
        f(put(x), put(routing(0, ranks)))
        once = len(traces)
        for seed in range(20):
            idx = routing(seed, ranks)
            out = f(put(x), put(idx))
            same(out, expected_round_trip(x, idx, ranks, capacity=8))
        assert len(traces) == once
        assert f._cache_size() == 1

    def test_long_chain_in_one_program(self):
        """Thousands of dependent operations in one run of one program."""
        ranks = min(4, DEVICES)
        mesh = harness.mesh(ranks)
        comm = harness.communicator(NATIVE, ranks)
        steps = 3000

        @jax.jit
        @functools.partial(on, mesh)
        def f(x, idx):
            def step(_, x):
                plan = jax_ep.make_plan(idx, comm=comm, num_experts=experts(ranks))
                y = jax_ep.combine(jax_ep.dispatch(x, plan), plan)
                # Back to what it was, where a token went anywhere at all.
                return jnp.where(times > 0, y / jnp.maximum(times, 1), 0)

            plan = jax_ep.make_plan(idx, comm=comm, num_experts=experts(ranks))
            ones = jnp.ones((plan.capacity, 1), x.dtype)
            times = jax_ep.combine(ones, plan)
            return lax.fori_loop(0, steps, step, x)

        x, idx = numbers(0, ranks * TOKENS, HIDDEN), routing(1, ranks)
        out = f(*jax.device_put((x, idx), NamedSharding(mesh, P("ep"))))
        went = ((idx >= 0) & (idx < experts(ranks))).any(axis=1)
        # x / 3 * 3 and the like are exact or off by an ulp a step.
        np.testing.assert_allclose(out, x * went[:, None], rtol=1e-3)

    @pytest.mark.slow
    @harness.on_each_backend
    def test_thousand_steps(self, backend):
        """Routing changes every step; the host waits for none of them."""
        ranks = min(4, DEVICES)
        mesh = harness.mesh(ranks)
        comm = harness.communicator(backend, ranks)
        num_experts, capacity = experts(ranks), ranks * TOKENS
        steps = 1000 if backend != "xla" else 100

        @jax.jit
        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(P("ep"), P(), P("ep")),
            out_specs=P("ep"),
        )
        def step(wrong, number, x):
            rank = lax.axis_index("ep")
            token = jnp.arange(TOKENS)[:, None] + rank * TOKENS
            k = jnp.arange(TOP_K)[None, :]
            mixed = token * 7919 + k * 104729 + number * 15485863 + number**2
            idx = (mixed ^ (mixed >> 7)) % (num_experts + 2) - 1
            plan = jax_ep.make_plan(
                idx, comm=comm, num_experts=num_experts, capacity=capacity
            )
            # Each step's rows differ, so rows of another step show.
            x = x + number.astype(x.dtype)
            y = jax_ep.combine(jax_ep.dispatch(x, plan), plan)
            local = -(-num_experts // ranks)
            valid = (idx >= 0) & (idx < num_experts)
            owner = jnp.where(valid, idx // local, -1)
            times = jnp.stack([(owner == r).any(axis=1) for r in range(ranks)])
            times = times.sum(axis=0).astype(x.dtype)
            bad = (y != x * times[:, None]).any(axis=1).sum()
            return wrong + bad

        put = functools.partial(jax.device_put, device=NamedSharding(mesh, P("ep")))
        wrong = put(np.zeros(ranks, np.int32))
        x = put(numbers(0, ranks * TOKENS, HIDDEN))
        for number in range(steps):
            wrong = step(wrong, number, x)
        same(wrong, np.zeros(ranks))


class TestLifetime:
    def program(self, comm):
        ranks = comm.num_ranks
        x, idx = numbers(0, ranks * TOKENS, HIDDEN), routing(1, ranks)
        args = jax.device_put((x, idx), NamedSharding(comm.mesh, P("ep")))
        f = jax.jit(on(comm.mesh, functools.partial(round_trip, comm=comm)))
        expected = expected_round_trip(x, idx, ranks)
        return lambda: same(f(*args), expected)

    @harness.on_each_backend
    def test_closed_while_an_executable_lives(self, backend):
        comm = jax_ep.Communicator(
            layers.mesh({"ep": min(4, DEVICES)}), "ep", backend=backend
        )
        check = self.program(comm)
        check()
        assert not comm.closed
        comm.close()
        assert comm.closed
        for _ in range(3):
            check()
        comm.close()
        check()

    def test_context_manager(self):
        mesh = layers.mesh({"ep": min(4, DEVICES)})
        with jax_ep.Communicator(mesh, "ep", backend=NATIVE) as comm:
            check = self.program(comm)
            check()
        assert comm.closed
        check()

    def test_closed_with_runs_in_flight(self):
        mesh = layers.mesh({"ep": min(4, DEVICES)})
        comm = jax_ep.Communicator(mesh, "ep", backend=NATIVE)
        ranks = comm.num_ranks
        x, idx = numbers(0, ranks * TOKENS, HIDDEN), routing(1, ranks)
        args = jax.device_put((x, idx), NamedSharding(mesh, P("ep")))
        f = jax.jit(on(mesh, functools.partial(round_trip, comm=comm)))
        results = [f(*args) for _ in range(20)]
        comm.close()
        del comm, f
        gc.collect()
        for out in results:
            same(out, expected_round_trip(x, idx, ranks))

    def test_many_communicators(self):
        """Created, used and closed by the dozen; a few alive at any time."""
        mesh = layers.mesh({"ep": min(4, DEVICES)})
        alive = []
        for i in range(60):
            alive.append(jax_ep.Communicator(mesh, "ep", backend=NATIVE))
            if i % 15 == 0:
                self.program(alive[-1])()
            if i % 3 == 0:
                alive.pop(0).close()
        self.program(alive[0])()
        self.program(alive[-1])()
        for comm in alive:
            comm.close()

    def test_two_communicators_take_turns(self):
        """Closing one leaves another on the same devices alone."""
        mesh = layers.mesh({"ep": min(4, DEVICES)})
        first, second = (
            jax_ep.Communicator(mesh, "ep", backend=NATIVE) for _ in range(2)
        )
        check_first, check_second = self.program(first), self.program(second)
        for _ in range(3):
            check_first()
            check_second()
        first.close()
        check_second()
        check_first()
        second.close()

    @harness.on_each_backend
    def test_garbage_collected(self, backend):
        """Neither JAX's caches nor ours keep a dropped communicator for ever."""
        mesh = layers.mesh({"ep": min(4, DEVICES)})
        comm = jax_ep.Communicator(mesh, "ep", backend=backend)
        self.program(comm)()
        gone = weakref.ref(comm)
        del comm
        jax.clear_caches()
        gc.collect()
        assert gone() is None

    @harness.on_each_backend
    def test_dropped_while_an_executable_lives(self, backend):
        """A compiled program needs no Python object of ours."""
        mesh = layers.mesh({"ep": min(4, DEVICES)})
        comm = jax_ep.Communicator(mesh, "ep", backend=backend)
        ranks = comm.num_ranks
        x, idx = numbers(0, ranks * TOKENS, HIDDEN), routing(1, ranks)
        args = jax.device_put((x, idx), NamedSharding(mesh, P("ep")))
        f = jax.jit(on(mesh, functools.partial(round_trip, comm=comm)))
        compiled = f.lower(*args).compile()
        del comm, f
        gc.collect()
        for _ in range(3):
            same(compiled(*args), expected_round_trip(x, idx, ranks))
