"""examples/replacing: the layers of other packages by jax_ep, against a dense layer
with the rules of those packages for capacity, weights and drops.

The packages themselves are not needed here; what a layer asks of its object is made by
hand. Each example compares itself with its package where that is installed.
"""

from __future__ import annotations

import functools
import inspect
import math
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import harness
import jax
import jax.numpy as jnp
import layers
import moe_layers
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "examples/replacing"
sys.path.append(str(FOLDER))

import axlearn_moe  # noqa: E402
import levanter_moe  # noqa: E402
import maxtext_moe  # noqa: E402

TOKENS, TOP_K, EXPERTS, HIDDEN, INNER = 24, 3, 8, 6, 5
RANKS, GROUPS = 2, 2
AXES = {"data": GROUPS, "expert": RANKS}

normal = moe_layers.normal
ids = np.random.default_rng(1).integers(0, EXPERTS, (TOKENS, TOP_K), np.int32)
x = normal(2, TOKENS, HIDDEN)
weights = np.asarray(jax.nn.softmax(normal(3, TOKENS, TOP_K)))
w_gate, w_up = normal(4, EXPERTS, HIDDEN, INNER), normal(5, EXPERTS, HIDDEN, INNER)
w_down = normal(6, EXPERTS, INNER, HIDDEN)
biases = tuple(normal(n, EXPERTS, w) for n, w in ((7, INNER), (8, INNER), (9, HIDDEN)))


def first_choices(ids, capacity, order="expert"):
    """bool [T, K]: each rank keeps its first, by expert or by source, then by token.

    capacity: a number, or a function of how many ids of the group are experts.
    """
    kept = np.zeros(ids.shape, bool)
    for group in np.split(np.arange(TOKENS), GROUPS):
        for rank in range(RANKS):
            # (token, k) in the order of the tokens of all ranks of the group.
            mine = [
                (ids[t, k], t, k)
                for t in group
                for k in range(TOP_K)
                if ids[t, k] // (EXPERTS // RANKS) == rank
            ]
            if order == "source":
                size = len(group) // RANKS
                mine.sort(key=lambda pair: ((pair[1] - group[0]) // size, *pair))
            else:
                mine.sort()
            most = capacity
            if callable(capacity):
                most = capacity((ids[group] >= 0).sum())
            for _, t, k in mine[:most]:
                kept[t, k] = True
    return kept


def dense(kept, x, weights, w_gate, w_up, w_down, biases=None):
    """Every expert on every token; the choices that count, weighted."""
    b_gate, b_up, b_down = biases or [np.zeros((EXPERTS, 1), np.float32)] * 3
    product = functools.partial(jnp.einsum, precision="highest")
    gate = product("th,ehi->tei", x, w_gate) + b_gate[None]
    up = product("th,ehi->tei", x, w_up) + b_up[None]
    y = product("tei,eih->teh", jax.nn.silu(gate) * up, w_down) + b_down[None]
    chosen = jax.nn.one_hot(ids, EXPERTS) * jnp.where(kept, weights, 0)[..., None]
    return product("tke,teh->th", chosen, y)


def assert_same(ours, dense_twin, *args):
    """Results, and the gradients of a weighted sum of them in all arguments."""
    gy = normal(10, TOKENS, HIDDEN)

    grads = jax.jit(jax.grad(lambda *a: (ours(*a) * gy).sum(), range(len(args))))
    want = dense_twin(*args)
    np.testing.assert_allclose(jax.jit(ours)(*args), want, rtol=1e-4, atol=1e-4)
    right = jax.grad(lambda *a: (dense_twin(*a) * gy).sum(), range(len(args)))(*args)
    for a, b in zip(jax.tree.leaves(grads(*args)), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.fixture(params=harness.BACKENDS)
def comm(request):
    mesh = layers.mesh(AXES, AxisType.Explicit)
    with jax.set_mesh(mesh):
        yield layers.communicator(mesh, "expert", request.param)


class TestLevanter:
    """Limit, order of drops and counts of its "ring"."""

    @pytest.mark.parametrize("factor", [0.6, 4.0])
    def test_moe_mlp(self, comm, factor):
        pairs = TOKENS * TOP_K // GROUPS
        capacity = max(math.ceil(factor * pairs / RANKS), EXPERTS // RANKS)
        kept = first_choices(ids, capacity)
        assert kept.all() == (factor == 4.0)

        def ours(x, weights, w_gate, w_up, w_down):
            w_up_gate = jnp.concatenate([w_gate, w_up], -1)
            options = {"capacity_factor": factor, "report_capacity_overflow": True}
            return levanter_moe.moe_mlp(
                x, ids, weights, w_up_gate, w_down, comm=comm, **options
            )

        args = x, weights, w_gate, w_up, w_down
        assert_same(lambda *a: ours(*a)[0], functools.partial(dense, kept), *args)
        counts = jax.jit(ours)(*args)[1]
        assert int(counts.dropped) == (~kept).sum()
        assert int(counts.padding_skipped) == 0

    def test_padding(self, comm):
        valid = np.arange(TOKENS) % 5 > 0
        w_up_gate = np.concatenate([w_gate, w_up], -1)
        y, counts = levanter_moe.moe_mlp(
            *(x, ids, weights, w_up_gate, w_down),
            comm=comm,
            token_valid=jnp.asarray(valid),
            capacity_factor=4.0,
            report_capacity_overflow=True,
        )
        want = dense(valid[:, None], x, weights, w_gate, w_up, w_down)
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
        assert int(counts.padding_skipped) == TOP_K * (~valid).sum()
        assert int(counts.dropped) == 0

    def test_padding_takes_no_room(self, comm):
        """The capacity of a group is of its valid tokens; here groups differ."""
        valid = np.arange(TOKENS) % 5 > (np.arange(TOKENS) >= TOKENS // 2) * 2
        factor = 0.7
        kept = first_choices(
            np.where(valid[:, None], ids, -1),
            lambda pairs: max(math.ceil(factor * pairs / RANKS), EXPERTS // RANKS),
        )
        assert 0 < kept.sum() < TOP_K * valid.sum()
        y, counts = levanter_moe.moe_mlp(
            *(x, ids, weights, np.concatenate([w_gate, w_up], -1), w_down),
            comm=comm,
            token_valid=jnp.asarray(valid),
            capacity_factor=factor,
            report_capacity_overflow=True,
        )
        want = dense(kept, x, weights, w_gate, w_up, w_down)
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
        assert int(counts.dropped) == TOP_K * valid.sum() - kept.sum()


class TestMaxText:
    """Routing by its own methods, buffers by ragged_buffer_factor."""

    @staticmethod
    def layer(factor, ring):
        """What RoutedMoE has that sparse_matmul asks for."""
        config = SimpleNamespace(
            use_ring_of_experts=ring,
            ragged_buffer_factor=factor,
            load_balance_loss_weight=0.5,
            routed_bias_update_rate=0.25,
        )

        def get_topk(gate_logits, pre_bias_logits, input_ids=None):
            assert pre_bias_logits is None
            assert input_ids is not None
            chosen = jnp.asarray(ids).reshape(4, -1, TOP_K)
            picked = jax.nn.one_hot(chosen, EXPERTS) * gate_logits[:, :, None]
            return jax.nn.softmax(picked.sum(-1)), chosen

        return SimpleNamespace(
            config=config,
            dtype=jnp.dtype("float32"),
            num_experts=EXPERTS,
            get_topk=get_topk,
            apply_ffn_activation=lambda gate, up: jax.nn.silu(gate) * up,
            load_balance_loss=lambda ids, shares: (
                ids[..., :1].astype(shares.dtype) * shares
            ).mean(),
            should_update_load_balance=lambda: True,
        )

    @pytest.mark.parametrize("factor", [0.6, -1.0])
    @pytest.mark.parametrize("with_biases", [False, True])
    @pytest.mark.parametrize("ring", [False, True])
    def test_sparse_matmul(self, comm, factor, with_biases, ring):
        layer = self.layer(factor, ring)
        logits = normal(11, TOKENS, EXPERTS)
        none_dropped = np.ones(ids.shape, bool)
        capacity = int(factor * (TOKENS * TOP_K // (GROUPS * RANKS)))
        kept = none_dropped
        if factor > 0:
            kept = first_choices(ids, capacity, "expert" if ring else "source")
        assert kept.all() == (factor < 0)

        def ours(x, logits, w_gate, w_up, w_down, biases):
            x, logits = (a.reshape(4, -1, a.shape[-1]) for a in (x, logits))
            kernels = w_gate, w_up, w_down, *(biases or [None] * 3)
            routing = {"input_ids": jnp.zeros(x.shape[:2], jnp.int32)}
            return maxtext_moe.sparse_matmul(
                layer, x, logits, None, *kernels, comm=comm, **routing
            )

        def twin(x, logits, *rest):
            picked = jax.nn.one_hot(ids, EXPERTS) * logits[:, None]
            return dense(kept, x, jax.nn.softmax(picked.sum(-1)), *rest)

        args = x, logits, w_gate, w_up, w_down, biases if with_biases else ()
        assert_same(lambda *a: ours(*a)[0].reshape(x.shape), twin, *args)
        _, loss, updates = jax.jit(ours)(*args)
        want = (ids[:, :1] * np.asarray(jax.nn.softmax(logits))).mean()
        np.testing.assert_allclose(loss, want, rtol=1e-5)
        counts = np.bincount(ids.ravel(), minlength=EXPERTS)
        np.testing.assert_allclose(updates, 0.25 * np.sign(counts.mean() - counts))


class TestAxLearn:
    """Gating by its own module, room by expert_parallel_capacity."""

    @pytest.mark.parametrize("factor", [0.6, 4.0])
    def test_dispatch_and_combine(self, comm, factor):
        capacity = int(factor * (TOKENS * TOP_K // (GROUPS * RANKS)))
        # A device's tokens here are a part of the sequence of a batch of two.
        kept = first_choices(ids, capacity, "source")
        assert kept.all() == (factor == 4.0)
        left: dict[str, object] = {}
        shape = (2, TOKENS // 2)

        def gating(logits, _):
            picked = jax.nn.one_hot(ids, EXPERTS) * logits.reshape(TOKENS, 1, EXPERTS)
            return SimpleNamespace(
                gate_assignment=jnp.asarray(ids).reshape(*shape, TOP_K),
                expert_weights=jax.nn.softmax(picked.sum(-1)).reshape(*shape, TOP_K),
                load_balance_loss=logits.mean(),
                router_z_loss=jnp.float32(3),
                seq_load_balance_loss=jnp.float32(5),
            )

        def ours(x, w_router, *matrices):
            names = "wi_0_weight", "wi_1_weight", "wo_weight"
            layer = SimpleNamespace(
                config=SimpleNamespace(
                    num_experts=EXPERTS,
                    expert_parallel_capacity=factor,
                    input_dim_to_partition_spec={"bsm": P("data", "expert", None)},
                    load_balance_loss_weight=0.5,
                    router_z_loss_weight=0.25,
                    seq_load_balance_loss_weight=None,
                ),
                parameters={"gate_weight": w_router} | dict(zip(names, matrices)),
                gating=gating,
                add_module_output=left.__setitem__,
                add_summary=left.__setitem__,
            )
            y = axlearn_moe.dispatch_and_combine(
                layer, x.reshape(*shape, -1), comm=comm
            )
            return y.reshape(x.shape)

        def twin(x, w_router, *matrices):
            logits = jnp.einsum("tm,me->te", x, w_router, precision="highest")
            picked = jax.nn.one_hot(ids, EXPERTS) * logits[:, None]
            return dense(kept, x, jax.nn.softmax(picked.sum(-1)), *matrices)

        w_router = normal(11, HIDDEN, EXPERTS)
        args = x, w_router, w_gate, w_up, w_down
        assert_same(ours, twin, *args)

        def all_left(*args):
            ours(*args)
            return dict(left)

        found = jax.jit(all_left)(*args)
        np.testing.assert_allclose(
            found["aux_loss"], 0.5 * (x @ w_router).mean() + 0.25 * 3, rtol=1e-4
        )
        assert int(found["ep_dropped_tokens"]) == (~kept).sum()


@pytest.mark.parametrize(
    "function",
    [
        axlearn_moe.dispatch_and_combine,
        levanter_moe.moe_mlp,
        maxtext_moe.sparse_matmul,
    ],
)
def test_takes_eight_lines(function):
    lines = inspect.getsource(function).splitlines()
    body = lines[next(i for i, line in enumerate(lines) if line.endswith(":")) + 1 :]
    assert len(body) <= 8


@pytest.mark.parametrize("name", ["axlearn", "levanter", "maxtext"])
def test_program_says_where_the_package_is_missing(name):
    run = subprocess.run(
        [sys.executable, FOLDER / f"{name}_moe.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "nothing was compared" in run.stdout or "['results']" in run.stdout
