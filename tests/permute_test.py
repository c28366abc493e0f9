"""permute and unpermute against the oracle, forward and backward."""

from __future__ import annotations

import dataclasses
import functools

import cases
import expert_oracle
import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import payloads
import pytest

import jax_ep

RANKS = harness.few_ranks()
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


# Of the cases with a program of their own, which plain JAX takes seconds to compile:
# no rows, many, many choices, ranks without experts, rows that find no room.
PLAIN = {"no_tokens", "many_tokens", "top_22", "experts_5", "half_capacity"}


def _combinations():
    """Every case; natively on GPUs, and of a shared program, at every alignment."""
    for number, case in enumerate(cases.CASES):
        own = case.program != cases.CASES[0].program
        for backend in harness.BACKENDS:
            alignments = (1, 8, 128)
            if backend == "xla":
                alignments = (8,) if not own or case.name in PLAIN else ()
            elif backend == "cpu" and own:
                alignments = (8, (1, 128)[number % 2])
            for alignment in alignments:
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
