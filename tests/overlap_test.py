"""Dispatch and combine in two halves do what the whole operations do.

All numbers are small integers, so that results are equal bit for bit however
XLA fuses. What only GPUs can show is in gpu_test.py.
"""

from __future__ import annotations

import functools
import re

import harness
import jax
import jax.numpy as jnp
import layers
import numpy as np
import payloads
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from twins import (
    CAPACITY,
    HIDDEN,
    RANKS,
    TOKENS,
    Twins,
    native_only,
    native_variants,
    per_backend,
    routing,
    variants,
)

import jax_ep

HALVES = ("dispatch_start", "dispatch_done", "combine_start", "combine_done")


def integers(seed, *shape):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(-3, 4, shape).astype(np.float32))


class Whole(Twins):
    """Twins' function of integers, and work between the halves."""

    def __init__(self, backend, check_vma=True):
        super().__init__(backend, check_vma)
        self.x = integers(1, RANKS * TOKENS, HIDDEN)
        self.scale = integers(2, RANKS * CAPACITY, 1)

    def body_with_plan(self, x, scale, plan):
        rows = jax_ep.dispatch(x * x, plan)
        y = self.work(x)
        rows = checkpoint_name(rows, "rows")
        out = jax_ep.combine(rows * (rows + scale), plan)
        return out + self.work(y)

    @staticmethod
    def work(y):
        return y * (y - 1)


class Halves(Whole):
    """The same in halves."""

    def body_with_plan(self, x, scale, plan):
        flight = jax_ep.dispatch_start(x * x, plan)
        flight, y = jax_ep.overlap(flight, self.work, x)
        rows = checkpoint_name(jax_ep.dispatch_done(flight), "rows")
        flight = jax_ep.combine_start(rows * (rows + scale), plan)
        flight, y = jax_ep.overlap(flight, self.work, y)
        return jax_ep.combine_done(flight) + y


def assert_same(transform, backend, check_vma=True):
    """transform(twins) -> a result, for the halves and for the whole."""
    halves, whole = (kind(backend, check_vma) for kind in (Halves, Whole))
    actual, expected = jax.jit(lambda: transform(halves)), transform(whole)
    actual = actual()
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(expected))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def in_jit(transform):
    return lambda twins: jax.jit(lambda: transform(twins))()


def loss(f):
    return lambda x: jnp.vdot(f(x), integers(5, *x.shape))


def tangent(twins):
    return integers(4, *twins.x.shape)


def value_and_grad(twins):
    return jax.value_and_grad(loss(twins.function()))(twins.x)


def grad_inside_shard_map(twins):
    def body(x, scale, topk_idx):
        return jax.grad(lambda x: twins.body(x, scale, topk_idx).sum())(x)

    return twins.function(body)(twins.x)


def jvp(twins):
    return jax.jvp(twins.function(), (twins.x,), (tangent(twins),))


def vjp(twins):
    return jax.vjp(twins.function(), twins.x)[1](tangent(twins))


def linearize(twins):
    value, linear = jax.linearize(twins.function(), twins.x)
    return value, linear(tangent(twins)), linear(twins.x)


def jacobians(twins):
    f = twins.function()
    a = jnp.full((1, HIDDEN), 2.0)
    return jax.jacfwd(lambda a: f(a * twins.x))(a), jax.jacrev(
        lambda a: f(a * twins.x)
    )(a)


def hvp_forward_over_reverse(twins):
    grad = jax.grad(loss(twins.function()))
    return jax.jvp(grad, (twins.x,), (tangent(twins),))[1]


def hvp_reverse_over_forward(twins):
    f = loss(twins.function())
    return jax.grad(lambda x: jax.jvp(f, (x,), (tangent(twins),))[1])(twins.x)


def hvp_reverse_over_reverse(twins):
    grad = jax.grad(loss(twins.function()))
    return jax.grad(lambda x: jnp.vdot(grad(x), tangent(twins)))(twins.x)


def vmap_data(twins):
    return jax.vmap(twins.function())(integers(6, 3, *twins.x.shape))


def vmap_of_grad(twins):
    grad = jax.grad(loss(twins.function()))
    return jax.vmap(grad)(integers(6, 2, *twins.x.shape))


def grad_of_vmap(twins):
    f = jax.vmap(twins.function())
    x = integers(6, 2, *twins.x.shape)
    return jax.grad(lambda x: jnp.vdot(f(x), x))(x)


def vmap_routing(twins):
    f = jax.vmap(twins.sharded(), (None, None, 0))
    topk_idx = routing(7, 2)

    def total(x):
        return jnp.vdot(f(x, twins.scale, topk_idx), integers(8, 2, *x.shape))

    return f(twins.x, twins.scale, topk_idx), jax.grad(total)(twins.x)


def scan(twins, wrap=lambda step: step):
    topk_idx = routing(9, 3)

    def body(x, scale, topk_idx):
        def step(x, topk_idx):
            # Small again, or integers would outgrow float32.
            return jnp.clip(twins.body(x, scale, topk_idx), -3, 3), ()

        return lax.scan(wrap(step), x, topk_idx)[0]

    specs = (P("ep"), P("ep"), P(None, "ep"))
    f = twins.function(body, topk_idx, in_specs=specs)
    return jax.value_and_grad(loss(f))(twins.x)


def remat_in_scan(twins):
    return scan(twins, jax.checkpoint)


def scan_in_remat(twins):
    def body(x, scale, topk_idx):
        plan = twins.plan(topk_idx)

        @jax.checkpoint
        def loop(x):
            def step(x, _):
                return jnp.clip(twins.body_with_plan(x, scale, plan), -3, 3), ()

            return lax.scan(step, x, None, length=2)[0]

        return loop(x)

    return jax.value_and_grad(loss(twins.function(body)))(twins.x)


def cond(twins):
    def body(x, scale, topk_idx):
        plan = twins.plan(topk_idx)
        use = lax.psum(plan.num_recv, "ep") > 0
        return lax.cond(
            use, lambda x: twins.body_with_plan(x, scale, plan), lambda x: x, x
        )

    return jax.value_and_grad(loss(twins.function(body)))(twins.x)


TRANSFORMS = {
    f.__name__: f
    for f in (
        value_and_grad,
        grad_inside_shard_map,
        jvp,
        vjp,
        linearize,
        jacobians,
        hvp_forward_over_reverse,
        hvp_reverse_over_forward,
        hvp_reverse_over_reverse,
        vmap_data,
        vmap_of_grad,
        grad_of_vmap,
        vmap_routing,
        scan,
        remat_in_scan,
        scan_in_remat,
        cond,
    )
}


class TestTransforms:
    @pytest.mark.parametrize("name", TRANSFORMS)
    @native_variants
    def test_same_as_the_whole(self, backend, check_vma, name):
        assert_same(in_jit(TRANSFORMS[name]), backend, check_vma)

    @pytest.mark.parametrize("name", ("value_and_grad", "jvp", "vmap_routing"))
    @pytest.mark.parametrize("backend", ("xla",))
    def test_same_as_the_whole_in_plain_jax(self, backend, name):
        assert_same(in_jit(TRANSFORMS[name]), backend)

    @variants
    def test_against_dense_numbers(self, backend, check_vma):
        """So that both cannot be wrong together."""
        twins = Halves(backend, check_vma)
        m = layers.dispatch_matrix(
            np.asarray(twins.topk_idx),
            num_ranks=RANKS,
            num_experts=2 * RANKS + 1,
            capacity=CAPACITY,
        )

        def dense(x):
            rows = m @ (x * x)
            y = twins.work(twins.work(x))
            return m.T @ (rows * (rows + twins.scale)) + y

        actual = jax.jit(jax.value_and_grad(loss(twins.function())))(twins.x)
        expected = jax.value_and_grad(loss(dense))(twins.x)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)

    @native_only
    @pytest.mark.skipif(harness.ON_GPU, reason="a flight stays in one program there")
    def test_without_jit(self, backend):
        twins = Halves(backend)
        f = twins.function()
        np.testing.assert_array_equal(f(twins.x), jax.jit(f)(twins.x))

    @per_backend
    def test_linear_transpose(self, backend):
        twins = Whole(backend)
        y = integers(3, RANKS * CAPACITY, HIDDEN)

        def there(x, plan):
            return jax_ep.dispatch_done(jax_ep.dispatch_start(x, plan))

        def home(y, plan):
            return jax_ep.combine_done(jax_ep.combine_start(y, plan))

        @twins.sharded
        def pairs(x, y, topk_idx):
            plan = twins.plan(topk_idx)
            down = jax.linear_transpose(lambda x: there(x, plan), x)(y)[0]
            up = jax.linear_transpose(lambda y: home(y, plan), y)(x)[0]
            whole = jax_ep.combine(y, plan), jax_ep.dispatch(x, plan)
            return (down, up), whole

        actual, expected = jax.jit(pairs)(twins.x, y, twins.topk_idx)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


class TestTrees:
    @per_backend
    def test_any_tree(self, backend):
        """Every dtype, empty leaves, and more than one launch takes."""
        twins = Whole(backend)
        tokens = RANKS * TOKENS
        tree = {
            name: payloads.payload((tokens, *shape), jnp.dtype(name))
            for name, shape in {
                "bool": (5,),
                "int8": (3, 2),
                "int32": (),
                "uint16": (1,),
                "bfloat16": (9,),
                "float8_e4m3fn": (7,),
                "float32": (2, 2),
                "complex64": (3,),
            }.items()
        }
        tree |= {
            "int4": jnp.asarray(np.arange(tokens) % 8 - 4, "int4")[:, None],
            "empty": jnp.zeros((tokens, 0, 3)),
            "many": [integers(i, tokens, 2) for i in range(17)],
        }
        sums = {"many": tree["many"], "bfloat16": tree["bfloat16"], "e": tree["empty"]}

        @twins.sharded
        def both(tree, sums, topk_idx):
            plan = jax_ep.make_plan(
                topk_idx, comm=twins.comm, num_experts=2 * RANKS + 1, capacity=TOKENS
            )
            flight = jax_ep.dispatch_start(tree, plan)
            flight, _ = jax_ep.overlap(flight, lambda: ())
            rows = jax_ep.dispatch_done(flight)
            flight = jax_ep.combine_start(sums, plan)
            out = jax_ep.combine_done(flight)
            return (rows, out), (
                jax_ep.dispatch(tree, plan),
                jax_ep.combine(sums, plan),
            )

        actual, expected = jax.jit(both)(tree, sums, twins.topk_idx)
        assert jax.tree.map(jnp.shape, actual) == jax.tree.map(jnp.shape, expected)
        jax.tree.map(_assert_same_bits, actual, expected)

    @native_only
    def test_no_tokens(self, backend):
        # XLA's partitioner wants an argument that is not empty.
        def there_and_back(comm, x, y, topk_idx):
            plan = jax_ep.make_plan(topk_idx, comm=comm, num_experts=4, capacity=2)
            flight = jax_ep.dispatch_start(x, plan)
            flight, _ = jax_ep.overlap(flight, jnp.sin, x)
            rows = jax_ep.dispatch_done(flight)
            return rows, jax_ep.combine_done(jax_ep.combine_start(y, plan))

        ranks = min(2, harness.most_ranks())
        rows, out = harness.run(
            there_and_back,
            harness.communicator(backend, ranks),
            np.zeros((ranks, 0, HIDDEN), np.float32),
            np.ones((ranks, 2, HIDDEN), np.float32),
            np.zeros((ranks, 0, 2), np.int32),
        )
        np.testing.assert_array_equal(rows, np.zeros((ranks, 2, HIDDEN)))
        assert out.shape == (ranks, 0, HIDDEN)

    @native_only
    def test_what_fn_takes_and_returns(self, backend):
        """Leaves that are no arrays pass; a flight may start inside another."""
        twins = Whole(backend)

        @twins.sharded
        def nested(x, topk_idx):
            plan = twins.plan(topk_idx)

            def inside(x, factor, name, nothing):
                assert (factor, name, nothing) == (3, "a name", None)
                inner = jax_ep.dispatch_start(factor * x, plan)
                return inner, {"name": name, "sum": x.sum()[None]}

            flight = jax_ep.dispatch_start(x, plan)
            flight, (inner, out) = jax_ep.overlap(flight, inside, x, 3, "a name", None)
            assert out.pop("name") == "a name"
            return jax_ep.dispatch_done(flight), jax_ep.dispatch_done(inner), out["sum"]

        rows, inner, total = jax.jit(nested)(twins.x, twins.topk_idx)
        np.testing.assert_array_equal(inner, 3 * rows)
        np.testing.assert_array_equal(total.sum(), np.asarray(twins.x).sum())

    @native_only
    def test_finished_twice(self, backend):
        """Pure: where XLA does not have to copy, and that it tells."""
        twins = Whole(backend)
        if harness.ON_GPU:
            pytest.skip("the buffers of a flight land once")

        @twins.sharded
        def twice(x, topk_idx):
            flight = jax_ep.dispatch_start(x, twins.plan(topk_idx))
            return jax_ep.dispatch_done(flight), jax_ep.dispatch_done(flight)

        first, second = jax.jit(twice)(twins.x, twins.topk_idx)
        np.testing.assert_array_equal(first, second)


def _assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    assert actual.tobytes() == expected.tobytes()


# Lowering for CUDA, where there are two halves


def lower_for_cuda(twins, wrap=lambda body: body):
    f = twins.sharded(wrap(twins.body))
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype)
        for a in (twins.x, twins.scale, twins.topk_idx)
    ]
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def count_halves(text):
    return {half: len(re.findall(rf"@jax_ep_{half}\(", text)) for half in HALVES}


def gradient(body):
    def wrapped(x, scale, topk_idx):
        out, pull = jax.vjp(lambda x: body(x, scale, topk_idx), x)
        return pull(out)[0]

    return wrapped


def rematerialised(**options):
    def wrap(body):
        return gradient(lambda *args: jax.checkpoint(body, **options)(*args))

    return wrap


POLICIES = jax.checkpoint_policies


def _dones_saveable(prim, *_, **__):
    return prim.name.endswith("_done")


class TestLowering:
    @pytest.mark.parametrize("check_vma", (True, False), ids=("vma", "no_vma"))
    def test_forward(self, check_vma):
        """start, barrier, work, barrier, done: each takes what the last gave."""
        text = lower_for_cuda(Halves(harness.BACKENDS[0], check_vma))
        assert count_halves(text) == dict.fromkeys(HALVES, 1)
        assert not re.search(r"@jax_ep_(dispatch|combine)\(", text)
        order = re.findall(r"@jax_ep_(\w+)|(stablehlo.optimization_barrier)", text)
        order = [call or "barrier" for call, _ in order]
        # One behind each start, two for each overlap.
        half = ["start", "barrier", "barrier", "barrier", "done"]
        assert order == ["plan"] + [
            f"{op}_{step}" if step != "barrier" else step
            for op in ("dispatch", "combine")
            for step in half
        ]

    def test_done_waits_for_work_and_work_for_start(self):
        text = lower_for_cuda(Halves(harness.BACKENDS[0]))
        uses = {
            result: set(re.findall(r"%[\w#]+", rest))
            for results, rest in re.findall(r"(%\w+)(?::\d+)? = (.*)", text)
            for result in [results]
        }

        def reaches(line, target):
            seen, todo = set(), [line]
            while todo:
                name = todo.pop().partition("#")[0]
                if name not in seen:
                    seen.add(name)
                    todo += uses.get(name, ())
            return target in seen

        def result_of(call):
            return re.search(rf"(%\w+)(?::\d+)? = .*@jax_ep_{call}\(", text)[1]

        start, done = result_of("dispatch_start"), result_of("dispatch_done")
        # y * (y - 1): the first subtraction is work beside dispatch.
        work = re.search(r"(%\w+) = stablehlo.subtract", text)[1]
        assert reaches(done, work)
        assert reaches(work, start)

    def test_rows_land_where_they_were_started(self):
        text = lower_for_cuda(Halves(harness.BACKENDS[0]))
        for op in ("dispatch", "combine"):
            done = next(line for line in text.splitlines() if f"{op}_done(" in line)
            assert "operand_index = 4" in done  # behind position and routing
            start = next(line for line in text.splitlines() if f"{op}_start(" in line)
            for call in (start, done):  # neither moves, nor goes, alone
                assert "has_side_effect = true" in call

    def test_backward_has_halves_and_ties_too(self):
        text = lower_for_cuda(Halves(harness.BACKENDS[0]), gradient)
        assert count_halves(text) == dict.fromkeys(HALVES, 2)
        assert text.count("stablehlo.optimization_barrier") == 4 * 3

    @pytest.mark.parametrize(
        "options",
        (
            {},
            {"policy": POLICIES.everything_saveable},
            {"policy": POLICIES.dots_saveable},
            {"policy": POLICIES.save_only_these_names("rows")},
            {"policy": _dones_saveable},
        ),
        ids=("nothing", "everything", "dots", "rows", "dones"),
    )
    def test_remat_keeps_pairs(self, options):
        """No start without its done, whatever is saved and what is not."""
        twins = Halves(harness.BACKENDS[0])
        text = lower_for_cuda(twins, rematerialised(**options))
        found = count_halves(text)
        assert found["dispatch_start"] == found["dispatch_done"]
        assert found["combine_start"] == found["combine_done"]
        saved = options.get("policy") in (
            POLICIES.everything_saveable,
            _dones_saveable,
        )
        names = "rows" in str(options.get("policy")) and not saved
        if saved or names:
            assert found["dispatch_start"] == 2, "dispatched again for a tie alone"

    @pytest.mark.parametrize("finished", (True, False), ids=("unused", "forgotten"))
    @pytest.mark.parametrize("around", ("jit", "scan", "remat"))
    def test_start_goes_with_its_done(self, around, finished):
        """A kernel without a done would write into memory that is free."""
        twins = Halves(harness.BACKENDS[0])

        def wrap(body):
            del body

            def wrapped(x, scale, topk_idx):
                del scale
                plan = twins.plan(topk_idx)

                def one(x):
                    flight = jax_ep.dispatch_start(x, plan)
                    flight, y = jax_ep.overlap(flight, jnp.sin, x)
                    if finished:
                        jax_ep.dispatch_done(flight)
                    return jnp.cos(y)

                if around == "scan":
                    return lax.scan(lambda x, _: (one(x), ()), x, None, length=2)[0]
                if around == "remat":
                    return jax.grad(lambda x: jax.checkpoint(one)(x).sum())(x)
                return one(x)

            return wrapped

        found = count_halves(lower_for_cuda(twins, wrap))
        assert found == dict.fromkeys(HALVES, 0)

    def test_batch_over_data_is_one_flight(self):
        def batched(body):
            def wrapped(x, scale, topk_idx):
                xs = jnp.stack([x, 2 * x])
                return jax.vmap(body, (0, None, None))(xs, scale, topk_idx).sum(0)

            return wrapped

        text = lower_for_cuda(Halves(harness.BACKENDS[0]), batched)
        assert count_halves(text) == dict.fromkeys(HALVES, 1)

    def test_batch_over_routing_does_it_at_once(self):
        def batched(body):
            def wrapped(x, scale, topk_idx):
                ids = jnp.stack([topk_idx, topk_idx + 1])
                return jax.vmap(body, (None, None, 0))(x, scale, ids).sum(0)

            return wrapped

        text = lower_for_cuda(Halves(harness.BACKENDS[0]), batched)
        assert count_halves(text) == dict.fromkeys(HALVES, 0)
        assert len(re.findall(r"@jax_ep_dispatch\(", text)) == 2

    @pytest.mark.skipif(harness.ON_GPU, reason="needs a communicator of CPU devices")
    def test_one_call_and_no_barrier_on_the_cpu(self):
        twins = Halves("cpu")
        shapes = [
            jax.ShapeDtypeStruct(a.shape, a.dtype)
            for a in (twins.x, twins.scale, twins.topk_idx)
        ]
        f = jax.jit(twins.sharded())
        text = f.trace(*shapes).lower(lowering_platforms=("cpu",)).as_text()
        assert count_halves(text) == dict.fromkeys(HALVES, 0)
        assert "optimization_barrier" not in text


# What is refused


class TestErrors:
    def raises(self, kind, message, body):
        twins = Whole(harness.BACKENDS[0])

        def wrapped(x, topk_idx):
            body(x, twins.plan(topk_idx))
            return x

        with pytest.raises(kind, match=rf"^{re.escape(message)}(\n|$)"):
            jax.eval_shape(twins.sharded(wrapped), twins.x, twins.topk_idx)

    def test_done_of_the_other_operation(self):
        self.raises(
            ValueError,
            "jax_ep.combine_done: this flight was started by dispatch_start; "
            "finish it with dispatch_done",
            lambda x, plan: jax_ep.combine_done(jax_ep.dispatch_start(x, plan)),
        )
        self.raises(
            ValueError,
            "jax_ep.dispatch_done: this flight was started by combine_start; "
            "finish it with combine_done",
            lambda x, plan: jax_ep.dispatch_done(
                jax_ep.combine_start(jax_ep.dispatch(x, plan), plan)
            ),
        )

    @pytest.mark.parametrize("op", ("dispatch_done", "combine_done", "overlap"))
    def test_no_flight(self, op):
        args = (jnp.sin,) if op == "overlap" else ()
        self.raises(
            TypeError,
            f"jax_ep.{op}: flight must be a jax_ep.Flight, found list",
            lambda x, plan: getattr(jax_ep, op)([x], *args),
        )

    def test_no_function(self):
        self.raises(
            TypeError,
            "jax_ep.overlap: fn must be a function, found int; call "
            "overlap(flight, fn, *args)",
            lambda x, plan: jax_ep.overlap(jax_ep.dispatch_start(x, plan), 3),
        )

    def test_starts_check_as_the_whole(self):
        self.raises(
            ValueError,
            f"jax_ep.dispatch_start: leaves must be [T, ...] with T = {TOKENS} as in "
            f"the plan, found float32[{TOKENS - 1},{HIDDEN}]",
            lambda x, plan: jax_ep.dispatch_start(x[1:], plan),
        )
        self.raises(
            TypeError,
            "jax_ep.combine_start: leaves must be bfloat16, float16, float32, "
            f"float64 or complex, found int32[{CAPACITY}]",
            lambda x, plan: jax_ep.combine_start(plan.recv_src, plan),
        )
        self.raises(
            TypeError,
            "jax_ep.dispatch_start: plan must be a jax_ep.Plan, found int",
            lambda x, plan: jax_ep.dispatch_start(x, 1),
        )

    def test_no_gradient_of_float8(self):
        def body(x, plan):
            def through(x):
                flight = jax_ep.dispatch_start(x.astype("float8_e4m3fn"), plan)
                return jax_ep.dispatch_done(flight).astype(jnp.float32).sum()

            return jax.grad(through)(x)

        self.raises(
            TypeError,
            "jax_ep.dispatch: a leaf of dtype float8_e4m3fn has no gradient: combine "
            "cannot sum it; dispatch a wider dtype, or say with jax.custom_vjp what "
            "the gradient is",
            body,
        )

    def test_closed_communicator(self):
        mesh = layers.mesh({"ep": RANKS})
        comm = jax_ep.Communicator(mesh, "ep", backend=harness.BACKENDS[0])
        flights = []

        def start(x, topk_idx):
            plan = jax_ep.make_plan(topk_idx, comm=comm, num_experts=RANKS)
            flights.append(jax_ep.dispatch_start(x, plan))
            comm.close()
            return jax_ep.dispatch_done(flights[0])

        f = layers.sharded(start, mesh)
        twins = Whole(harness.BACKENDS[0])
        with pytest.raises(RuntimeError, match=r"jax_ep\.dispatch_done: .* is closed"):
            jax.eval_shape(f, twins.x, twins.topk_idx)


def test_saved_by_name():
    """A policy can name the halves; their names are documented."""
    twins = Halves(harness.BACKENDS[0])
    f = twins.function()
    jaxpr = jax.make_jaxpr(functools.partial(f))(twins.x)
    for half in HALVES:
        assert layers.count_primitive(jaxpr, f"ep_{half}") == 1
    assert layers.count_primitive(jaxpr, "ep_tie") == 4
