"""permute and unpermute against the oracle, forward and backward."""

from __future__ import annotations

import dataclasses
import functools

import cases
import expert_oracle
import harness
import jax
import jax.numpy as jnp
import layers
import ml_dtypes
import numpy as np
import oracle
import payloads
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_ep

RANKS = min(4, harness.most_ranks())
NATIVE = harness.BACKENDS[0]
ROWS = {
    "bfloat16[9]": ((9,), ml_dtypes.bfloat16),
    "float32[]": ((), np.float32),
    "uint8[3,7]": ((3, 7), np.uint8),
}
# One whose rows move in 16-byte units, one whose rows do not.
SUMS = {
    "bfloat16[16]": ((16,), ml_dtypes.bfloat16),
    "float16[5]": ((5,), np.float16),
    "float32[2,2]": ((2, 2), np.float32),
}


def _combinations():
    """Every case natively with every alignment; plain JAX with one of them."""
    for case in cases.CASES:
        for alignment in (1, 8, 128):
            for backend in harness.BACKENDS:
                if backend != "xla" or alignment == 8:
                    yield pytest.param(
                        backend, case, alignment, id=f"{backend}-{case}-{alignment}"
                    )


on_each_combination = pytest.mark.parametrize(
    ("backend", "case", "alignment"), list(_combinations())
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One routing with the oracle's plan and places, and inputs for them."""

    routing: cases.Routing
    plan: oracle.Oracle
    right: expert_oracle.ExpertOracle
    alignment: int

    def rows(self, shape, dtype, seed=0):
        """[R, C, ...] with NaN in slots that hold no row."""
        full = (len(self.routing.topk_idx), self.routing.capacity, *shape)
        if dtype == np.uint8:
            return payloads.payload(full, dtype, seed)
        rows = payloads.numbers(full, dtype, seed)
        return payloads.poison_tail(rows, self.plan.fields["num_recv"])

    def expert_rows(self, shape, dtype, seed=0):
        """[R, S, ...] with NaN in places that hold no pair."""
        full = (len(self.routing.topk_idx), self.right.capacity, *shape)
        return self.right.poison_empty(payloads.numbers(full, dtype, seed))

    def weights(self, seed=0, dtype=np.float32):
        """[R, C, K] with NaN where there is no place."""
        # Small: 22 products must not leave float16.
        weights = payloads.numbers(self.right.places.shape, dtype, seed) / dtype(64)
        return np.where(self.right.places >= 0, weights, dtype(np.nan))


def setting(routing, alignment, expert_capacity=None):
    plan = oracle.plan(
        routing.topk_idx, routing.num_experts, routing.capacity, alignment
    )
    ranks, _, top_k = routing.topk_idx.shape
    local = -(-routing.num_experts // ranks)
    if expert_capacity is None:
        rows = min(routing.capacity, ranks * routing.topk_idx.shape[1])
        expert_capacity = expert_oracle.worst_case(rows, top_k, local, alignment)
    right = expert_oracle.expert_plan(
        plan.fields["recv_topk_idx"], local, alignment, expert_capacity
    )
    return Setting(routing, plan, right, alignment)


@functools.cache
def program(comm, num_experts, capacity, alignment, expert_capacity):
    """Everything forward and backward of one plan, in one program."""

    def body(comm, topk_idx, x, y, weights):
        plan = jax_ep.make_plan(
            topk_idx,
            comm=comm,
            num_experts=num_experts,
            capacity=capacity,
            expert_alignment=alignment,
            expert_capacity=expert_capacity,
        )
        weighted, pull = jax.vjp(
            lambda y, weights: jax_ep.unpermute(y, plan, weights), y, weights
        )
        summable = {name: x[name] for name in SUMS}
        permuted, pull_permute = jax.vjp(lambda x: jax_ep.permute(x, plan), summable)
        return {
            "group_sizes": plan.group_sizes,
            "demand": plan.expert_demand,
            "overflow": plan.expert_overflow,
            "moved": jax_ep.permute({name: x[name] for name in ROWS}, plan),
            "permuted": permuted,
            "sum": jax_ep.unpermute(y, plan),
            "weighted": weighted,
            "backward": pull(summable),
            "permute backward": pull_permute(y)[0],
        }

    return harness.Program(body, comm)


def run(backend, s: Setting, explicit_capacity=False):
    comm = harness.communicator(backend, len(s.routing.topk_idx))
    x = {name: s.rows(*leaf) for name, leaf in (ROWS | SUMS).items()}
    y = {name: s.expert_rows(*leaf, seed=1) for name, leaf in SUMS.items()}
    run_on = program(
        comm,
        s.routing.num_experts,
        s.routing.capacity,
        s.alignment,
        s.right.capacity if explicit_capacity else None,
    )
    weights = s.weights(2)
    return x, y, weights, run_on(s.routing.topk_idx, x, y, weights)


def assert_close_rows(got, want, what):
    """Plain JAX may contract a product and a sum; a bfloat16 may then differ."""
    eps = float(ml_dtypes.finfo(want.dtype).eps)
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, what
    scale = np.abs(want).max(initial=1.0)
    np.testing.assert_allclose(got, want, rtol=2 * eps, atol=1e-6 * scale, err_msg=what)


def assert_right(backend, s: Setting, x, y, weights, found):
    right = s.right
    np.testing.assert_array_equal(found["group_sizes"], right.group_sizes)
    np.testing.assert_array_equal(found["demand"], right.demand)
    np.testing.assert_array_equal(found["overflow"], right.overflow)
    for name in ROWS:
        want = right.permute(x[name])
        payloads.assert_same_rows(found["moved"][name], want, name, x[name])
    same = payloads.assert_same_rows if backend != "xla" else assert_close_rows
    dots = 0.0
    for name in SUMS:
        gy = x[name]  # the cotangent of unpermute; of permute it is y
        want = right.permute(gy)
        payloads.assert_same_rows(found["permuted"][name], want, name)
        payloads.assert_same_rows(found["sum"][name], right.unpermute(y[name]), name)
        same(found["weighted"][name], right.unpermute(y[name], weights), name)
        payloads.assert_same_rows(
            found["permute backward"][name], right.unpermute(y[name]), name
        )
        same(
            found["backward"][0][name],
            right.permute_weighted(gy, weights),
            f"cotangent of {name}",
        )
        dots = dots + right.row_dots(gy, y[name])
    got = found["backward"][1]
    scale = np.abs(dots).max(initial=1.0)
    np.testing.assert_allclose(got, dots, rtol=1e-4, atol=1e-5 * scale)
    assert not got[right.places < 0].any()
    assert not np.signbit(got[right.places < 0]).any()


@on_each_combination
def test_every_case(backend, case, alignment):
    s = setting(case.routing(RANKS), alignment)
    assert_right(backend, s, *run(backend, s))


@pytest.mark.parametrize("ranks", [r for r in cases.RANKS if r != RANKS])
@pytest.mark.parametrize("backend", harness.BACKENDS)
def test_every_number_of_ranks(backend, ranks):
    if ranks > harness.most_ranks():
        pytest.skip(f"needs {ranks} devices; this machine has {jax.device_count()}")
    s = setting(cases.CASES[0].routing(ranks), 4)
    assert_right(backend, s, *run(backend, s))


@pytest.mark.parametrize("part", [0.0, 0.3, 0.5, 1.0], ids=str)
@harness.on_each_backend
def test_dropped_expert_rows(backend, part):
    """Expert rows past S contribute exactly 0, forward and backward."""
    case = next(c for c in cases.CASES if c.name == "half_capacity")
    routing = case.routing(RANKS)
    demand = int(setting(routing, 4).right.demand.max())
    s = setting(routing, 4, max(4, int(part * demand) // 4 * 4))
    assert s.right.overflow.any() == (part < 1.0)
    assert (s.right.group_sizes.sum(-1) <= s.right.capacity).all()
    assert_right(backend, s, *run(backend, s, explicit_capacity=True))


@harness.on_each_backend
def test_more_experts_than_a_block_counts_at_once(backend):
    """2048 local experts, and more pairs than chunks of the least size."""
    ids = cases.uniform(1, 700, 8, 2048).astype(np.int32)
    s = setting(cases.Routing(ids, 2048, 700, 1), 1)
    found = _places(backend, s, 2048)
    np.testing.assert_array_equal(found, s.right.permute(s.plan.fields["recv_src"]))


@harness.on_each_backend
def test_many_pairs(backend):
    """Several blocks and chunks longer than the least size."""
    ids = cases.log_normal(1, 40000, 8, 64).astype(np.int32)
    s = setting(cases.Routing(ids, 64, 40000, 1), 16)
    found = _places(backend, s, 64)
    np.testing.assert_array_equal(found, s.right.permute(s.plan.fields["recv_src"]))


def _places(backend, s, experts):
    """permute of recv_src: who stands where."""

    def body(comm, topk_idx):
        plan = jax_ep.make_plan(
            topk_idx, comm=comm, num_experts=experts, expert_alignment=s.alignment
        )
        return jax_ep.permute(plan.recv_src, plan)

    comm = harness.communicator(backend, 1)
    return harness.run(body, comm, s.routing.topk_idx)


DTYPES = (
    *("bool", "int4", "uint4", "int8", "int16", "int32", "uint8", "uint32"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn"),
    *("bfloat16", "float16", "float32", "complex64"),
)
ROW_BYTES = (1, 2, 3, 4, 6, 8, 12, 15, 16, 17, 31, 32, 48, 511, 512, 528, 4096, 5760)


def _trees(s):
    ranks, capacity = len(s.routing.topk_idx), s.routing.capacity
    tree = {
        name: payloads.payload((ranks, capacity, 5), jnp.dtype(name)) for name in DTYPES
    }
    tree |= {
        f"{size} bytes": payloads.payload((ranks, capacity, size), np.uint8, size)
        for size in ROW_BYTES
    }
    tree["no elements"] = np.zeros((ranks, capacity, 3, 0), np.float32)
    return tree


@harness.on_each_backend
def test_every_dtype_and_row_size_in_one_call(backend):
    case = next(c for c in cases.CASES if c.name == "duplicates")
    s = setting(case.routing(RANKS), 4)
    tree = _trees(s)

    def body(comm, topk_idx, tree):
        plan = jax_ep.make_plan(
            topk_idx,
            comm=comm,
            num_experts=s.routing.num_experts,
            expert_alignment=4,
        )
        return jax_ep.permute(tree, plan)

    comm = harness.communicator(backend, RANKS)
    found = harness.run(body, comm, s.routing.topk_idx, tree)
    for name, x in tree.items():
        payloads.assert_same_rows(found[name], s.right.permute(x), name, x)


@harness.on_each_backend
def test_float64_and_complex(backend):
    case = next(c for c in cases.CASES if c.name == "holes")
    s = setting(case.routing(RANKS), 2)
    with jax.enable_x64(True):
        y = {
            name: s.expert_rows((3,), np.dtype(name))
            for name in ("float64", "complex128", "complex64")
        }
        real = {"float64": y["float64"], "float32": s.expert_rows((3,), np.float32)}
        weights = s.weights(2, np.float64)

        def body(comm, topk_idx, y, real, weights):
            plan = jax_ep.make_plan(
                topk_idx,
                comm=comm,
                num_experts=s.routing.num_experts,
                expert_alignment=2,
            )
            weighted, pull = jax.vjp(lambda w: jax_ep.unpermute(real, plan, w), weights)
            return jax_ep.unpermute(y, plan), weighted, pull(weighted)[0]

        comm = harness.communicator(backend, RANKS)
        plain, weighted, gradient = harness.run(
            body, comm, s.routing.topk_idx, y, real, weights
        )
        for name in y:
            payloads.assert_same_rows(plain[name], s.right.unpermute(y[name]), name)
        for name in real:
            scale = weights if name == "float64" else weights.astype(np.float32)
            assert_close_rows(
                weighted[name], s.right.unpermute(real[name], scale), name
            )
        assert gradient.dtype == np.float64
        dots = sum(s.right.row_dots(weighted[name], real[name]) for name in real)
        scale = np.abs(dots).max()
        np.testing.assert_allclose(gradient, dots, rtol=1e-5, atol=1e-6 * scale)


# Transformations -------------------------------------------------------------

TOKENS, TOP_K, HIDDEN, EXPERTS, ALIGNMENT = 6, 3, 5, 2 * RANKS + 1, 4


class Layer:
    """x [T, H] and weights [T, K] of all ranks through permute and unpermute."""

    def __init__(self, backend, check_vma=True, expert_capacity=None):
        self.mesh = layers.mesh({"ep": RANKS})
        self.comm = layers.communicator(self.mesh, "ep", backend)
        self.check_vma = check_vma
        self.expert_capacity = expert_capacity
        rng = np.random.default_rng(7)
        self.topk_idx = layers.random_routing(3, RANKS * TOKENS, TOP_K, EXPERTS)
        self.x = jnp.asarray(rng.normal(size=(RANKS * TOKENS, HIDDEN)), jnp.float32)
        self.weights = jnp.asarray(
            rng.normal(size=(RANKS * TOKENS, TOP_K)), jnp.float32
        )

    def plan(self, topk_idx):
        return jax_ep.make_plan(
            topk_idx,
            comm=self.comm,
            num_experts=EXPERTS,
            expert_alignment=ALIGNMENT,
            expert_capacity=self.expert_capacity,
        )

    def body(self, x, weights, topk_idx):
        plan = self.plan(topk_idx)
        rows, row_weights = jax_ep.dispatch((jnp.sin(x), jnp.cos(weights)), plan)
        expert_rows = jax_ep.permute(rows, plan)
        # Experts that differ, pads included: what stands there is not read.
        ends = jnp.cumsum(plan.group_sizes)
        expert = jnp.searchsorted(ends, jnp.arange(len(expert_rows)), side="right")
        scale = (expert + 2 + lax.axis_index("ep")).astype(jnp.float32)
        y = jnp.tanh(expert_rows * scale[:, None])
        return jax_ep.combine(jax_ep.unpermute(y, plan, row_weights), plan)

    def function(self, body=None, topk_idx=None):
        topk_idx = self.topk_idx if topk_idx is None else topk_idx
        mapped = layers.sharded(body or self.body, self.mesh, check_vma=self.check_vma)
        return lambda x, weights: mapped(x, weights, topk_idx)

    def dense(self, x, weights, topk_idx=None):
        topk_idx = self.topk_idx if topk_idx is None else topk_idx
        local = -(-EXPERTS // RANKS)
        rank, expert = topk_idx // local, topk_idx % local
        valid = (topk_idx >= 0) & (topk_idx < EXPERTS)
        scale = jnp.where(valid, expert + 2 + rank, 0).astype(jnp.float32)
        y = jnp.tanh(jnp.sin(x)[:, None, :] * scale[..., None])
        gate = jnp.where(valid, jnp.cos(weights), 0)
        return (gate[..., None] * y).sum(1)


variants = pytest.mark.parametrize(
    ("backend", "check_vma"),
    [(NATIVE, True), (NATIVE, False), ("xla", True)],
    ids=["native-vma", "native-no_vma", "xla-vma"],
)


def assert_close(actual, expected, tolerance=3e-5):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(
            np.asarray(a), np.asarray(e), rtol=tolerance, atol=tolerance
        ),
        actual,
        expected,
    )


@variants
def test_value_gradient_and_tangent(backend, check_vma):
    layer = Layer(backend, check_vma)
    args = layer.x, layer.weights
    f = layer.function()
    assert_close(jax.jit(f)(*args), layer.dense(*args))
    for transform in (
        lambda g: jax.grad(lambda *a: (g(*a) ** 2).sum(), argnums=(0, 1)),
        lambda g: lambda *a: jax.jvp(g, a, a)[1],
        lambda g: lambda *a: jax.linearize(g, *a)[1](*a),
        # Hessian-vector products, forward over reverse and the other way.
        lambda g: (
            lambda *a: jax.jvp(
                jax.grad(lambda *b: (g(*b) ** 2).sum(), argnums=(0, 1)), a, a
            )[1]
        ),
        lambda g: jax.grad(lambda *a: (jax.jvp(g, a, a)[1] ** 2).sum(), argnums=(0, 1)),
    ):
        assert_close(jax.jit(transform(f))(*args), transform(layer.dense)(*args), 2e-4)


@variants
def test_check_grads(backend, check_vma):
    layer = Layer(backend, check_vma)
    f = jax.jit(layer.function())
    check_grads(f, (layer.x, layer.weights), order=2, atol=2e-2, rtol=2e-2, eps=1e-2)


@variants
def test_vmap(backend, check_vma):
    """Over rows, over weights, over the routing."""
    layer = Layer(backend, check_vma)
    f, dense = layer.function(), layer.dense
    xs = jnp.stack([layer.x, 2 * layer.x, -layer.x])
    ws = jnp.stack([layer.weights, -layer.weights, layer.weights + 1])
    assert_close(
        jax.jit(jax.vmap(f, (0, None)))(xs, layer.weights),
        jax.vmap(dense, (0, None))(xs, layer.weights),
    )
    assert_close(
        jax.jit(jax.vmap(f, (None, 0), 1))(layer.x, ws),
        jax.vmap(dense, (None, 0), 1)(layer.x, ws),
    )
    ids = jnp.stack(
        [layers.random_routing(s, RANKS * TOKENS, TOP_K, EXPERTS) for s in (4, 5, 6)]
    )
    mapped = layers.sharded(layer.body, layer.mesh, check_vma=check_vma)
    assert_close(
        jax.jit(jax.vmap(mapped))(xs, ws, ids),
        jax.vmap(dense)(xs, ws, ids),
    )
    gradient = lambda g: jax.vmap(  # noqa: E731
        jax.grad(lambda *a: (g(*a) ** 2).sum(), argnums=(0, 1)), (0, None)
    )
    assert_close(
        jax.jit(gradient(f))(xs, layer.weights),
        gradient(dense)(xs, layer.weights),
        2e-4,
    )


@harness.on_each_backend
def test_scan_under_remat_with_a_plan_a_layer(backend):
    layer = Layer(backend)
    ids = np.stack(
        [layers.random_routing(s, RANKS * TOKENS, TOP_K, EXPERTS) for s in (8, 9, 10)],
        axis=1,
    )

    def body(x, weights, ids):
        @jax.checkpoint
        def step(x, idx):
            return x + layer.body(x, weights, idx), None

        return lax.scan(step, x, jnp.swapaxes(ids, 0, 1))[0]

    def dense(x, weights):
        for i in range(ids.shape[1]):
            x = x + layer.dense(x, weights, ids[:, i])
        return x

    f = layer.function(body, ids)
    transform = lambda g: jax.value_and_grad(  # noqa: E731
        lambda *a: (g(*a) ** 2).sum(), argnums=(0, 1)
    )
    args = layer.x, layer.weights
    assert_close(jax.jit(transform(f))(*args), transform(dense)(*args), 5e-4)


@harness.on_each_backend
def test_weights_of_another_type(backend):
    """bfloat16 weights get bfloat16 gradients; replicated ones a sum of all."""
    layer = Layer(backend)

    def body(x, scale, topk_idx):
        plan = layer.plan(topk_idx)
        rows = jax_ep.permute(jax_ep.dispatch(x, plan), plan)
        weights = jnp.broadcast_to(scale, (plan.capacity, TOP_K))
        return jax_ep.combine(jax_ep.unpermute(rows, plan, weights), plan)

    mapped = layers.sharded(body, layer.mesh, in_specs=(P("ep"), P(), P("ep")))
    valid = (layer.topk_idx >= 0) & (layer.topk_idx < EXPERTS)
    scale = jnp.asarray([0.5, -1.0, 2.0], jnp.bfloat16)

    def loss(scale):
        return (mapped(layer.x, scale, layer.topk_idx) * layer.x).sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(scale)
    per_k = valid.T @ np.asarray(layer.x**2).sum(1)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(value, per_k @ np.float32(scale), rtol=1e-4)
    np.testing.assert_allclose(np.float32(gradient), per_k, rtol=2e-2)


# What the program becomes ----------------------------------------------------


def test_places_are_numbered_once_and_only_where_they_are_used():
    layer = Layer(NATIVE)
    args = (layer.x, layer.weights, layer.topk_idx)

    def count(body):
        mapped = jax.jit(layers.sharded(body, layer.mesh))
        text = mapped.lower(*args).compile().as_text()
        return text.count('custom_call_target="jax_ep_expert_rows"')

    def without(x, weights, topk_idx):
        plan = layer.plan(topk_idx)
        return jax_ep.combine(jax_ep.dispatch(x, plan), plan)

    assert count(layer.body) == 1
    assert count(without) == 0


def test_lowering_for_cuda():
    """Local calls: no channel, no collective around them."""
    layer = Layer(NATIVE)

    def loss(x, weights):
        return layer.function()(x, weights).sum()

    f = jax.jit(jax.grad(loss, argnums=(0, 1)))
    text = f.trace(layer.x, layer.weights).lower(lowering_platforms=("cuda",)).as_text()
    lines = [
        line
        for line in text.splitlines()
        for name in ("expert_rows", "permute", "unpermute", "row_dots")
        if f"@jax_ep_{name}(" in line
    ]
    assert {line.split("@jax_ep_")[1].split("(")[0] for line in lines} == {
        "expert_rows",
        "permute",
        "unpermute",
        "row_dots",
    }
    assert not any("channel" in line for line in lines)


# Errors ----------------------------------------------------------------------


def _trace(body, **plan_args):
    layer = Layer(NATIVE)

    def mapped(x, weights, topk_idx):
        plan = jax_ep.make_plan(
            topk_idx,
            **{"comm": layer.comm, "num_experts": EXPERTS, "capacity": 9} | plan_args,
        )
        return body(plan)

    jax.eval_shape(
        layers.sharded(mapped, layer.mesh), layer.x, layer.weights, layer.topk_idx
    )


S = expert_oracle.worst_case(9, TOP_K, -(-EXPERTS // RANKS), 1)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (
            lambda plan: jax_ep.permute(jnp.ones((8, 2)), plan),
            ValueError,
            "jax_ep.permute: leaves must be [C, ...] with C = 9 as in the plan, "
            "found float32[8,2]",
        ),
        (
            lambda plan: jax_ep.unpermute(jnp.ones((9, 2)), plan),
            ValueError,
            f"jax_ep.unpermute: leaves must be [S, ...] with S = {S} as in the plan, "
            "found float32[9,2]",
        ),
        (
            lambda plan: jax_ep.unpermute(jnp.ones((S, 2), jnp.int32), plan),
            TypeError,
            "jax_ep.unpermute: leaves must be bfloat16, float16, float32, float64 or "
            f"complex, found int32[{S},2]",
        ),
        (
            lambda plan: jax_ep.unpermute(
                jnp.ones((S, 2), jnp.complex64), plan, jnp.ones((9, TOP_K))
            ),
            TypeError,
            f"jax_ep.unpermute: weights apply to real leaves, found complex64[{S},2]",
        ),
        (
            lambda plan: jax_ep.unpermute(
                jnp.ones((S, 2)), plan, jnp.ones((9, TOP_K), jnp.int32)
            ),
            TypeError,
            f"jax_ep.unpermute: weights must be floating, found int32[9,{TOP_K}]",
        ),
        (
            lambda plan: jax_ep.unpermute(jnp.ones((S, 2)), plan, jnp.ones((9, 1))),
            ValueError,
            f"jax_ep.unpermute: weights must be [C, K] = [9, {TOP_K}] as in the plan, "
            "found float32[9,1]",
        ),
        (
            lambda plan: jax_ep.permute(jnp.ones((9, 2)), 3),
            TypeError,
            "jax_ep.permute: plan must be a jax_ep.Plan, found int",
        ),
        (
            lambda plan: jax.grad(
                lambda x: jax_ep.permute(x, plan).astype(jnp.float32).sum()
            )(jnp.ones((9, 2), jnp.float8_e5m2)),
            TypeError,
            "jax_ep.permute: a leaf of dtype float8_e5m2 has no gradient: unpermute "
            "cannot sum it; permute a wider dtype, or say with jax.custom_vjp what "
            "the gradient is",
        ),
    ],
)
def test_bad_rows(body, error, message):
    with pytest.raises(error) as info:
        _trace(body)
    assert str(info.value) == message


@pytest.mark.parametrize(
    ("plan_args", "error", "message"),
    [
        (
            {"expert_capacity": 0},
            ValueError,
            "expert_capacity must be >= 1, found 0",
        ),
        (
            {"expert_capacity": 12, "expert_alignment": 8},
            ValueError,
            "expert_capacity must be a multiple of expert_alignment 8, found 12",
        ),
        (
            {"expert_capacity": 2.0},
            TypeError,
            "expert_capacity must be a Python integer, found float",
        ),
        (
            {"capacity_factor": 0},
            ValueError,
            "capacity_factor must be above 0, found 0",
        ),
        (
            {"capacity_factor": float("nan")},
            ValueError,
            "capacity_factor must be above 0, found nan",
        ),
        (
            {"capacity_factor": "1"},
            TypeError,
            "capacity_factor must be a Python number or None, found str",
        ),
    ],
    ids=str,
)
def test_bad_capacity(plan_args, error, message):
    with pytest.raises(error) as info:
        _trace(lambda plan: plan.recv_src, **plan_args)
    assert str(info.value) == f"jax_ep.make_plan: {message}"


def test_too_many_experts_on_a_rank():
    with pytest.raises(ValueError, match=r"at most 2048 experts, found 2049"):
        _trace(
            lambda plan: jax_ep.permute(jnp.ones((9, 2)), plan),
            num_experts=2049 * RANKS,
        )


@pytest.mark.parametrize(
    ("plan_args", "capacity", "expert_capacity"),
    [
        # (token, k) pairs of a rank that is as busy as the others:
        # RANKS * TOKENS * TOP_K * local / EXPERTS.
        ({"capacity_factor": 1.0}, None, None),
        ({"capacity_factor": 1.25, "expert_alignment": 8}, None, None),
        ({"capacity_factor": 100.0}, None, None),
        ({"capacity_factor": 0.5, "capacity": 7}, 7, None),
        ({"capacity_factor": 0.5, "expert_capacity": 5}, None, 5),
        ({}, RANKS * TOKENS, None),
    ],
    ids=str,
)
def test_sizes_from_a_capacity_factor(plan_args, capacity, expert_capacity):
    local = -(-EXPERTS // RANKS)
    pairs = RANKS * TOKENS * TOP_K
    factor = plan_args.get("capacity_factor")
    if factor is not None:
        pairs = min(pairs, int(np.ceil(factor * pairs * local / EXPERTS)))
    if capacity is None:
        capacity = min(RANKS * TOKENS, pairs)
    align = plan_args.get("expert_alignment", 1)
    if expert_capacity is None:
        most = min(capacity * TOP_K, pairs)
        most = max(1, most)
        expert_capacity = (most + min(local, most) * (align - 1)) // align * align
    seen = []

    def body(plan):
        seen.append((plan.capacity, plan.expert_capacity))
        return plan.recv_src

    _trace(body, **{"capacity": None} | plan_args)
    assert seen == [(capacity, expert_capacity)]
