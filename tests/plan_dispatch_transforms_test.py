"""Transformations of plan_dispatch: the bits of make_plan and dispatch; and what
it becomes."""

from __future__ import annotations

import functools
import re

import harness
import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest
from jax import lax

import jax_ep
from jax_ep._operations import table

RANKS = harness.few_ranks()
NATIVE = harness.BACKENDS[0]
TOKENS, TOP_K, EXPERTS = 6, 3, 2 * RANKS + 1


def in_one_step(x, topk_idx, comm, **sizes):
    return jax_ep.plan_dispatch(x, topk_idx, comm=comm, num_experts=EXPERTS, **sizes)


def in_two_steps(x, topk_idx, comm, **sizes):
    plan = jax_ep.make_plan(topk_idx, comm=comm, num_experts=EXPERTS, **sizes)
    return plan, jax_ep.dispatch(x, plan)


def inputs():
    rng = np.random.default_rng(3)
    draw = lambda *shape: rng.normal(size=(RANKS, *shape)).astype(np.float32)  # noqa: E731
    ids = np.asarray(layers.random_routing(3, RANKS * TOKENS, TOP_K, EXPERTS))
    return (
        ids.reshape(RANKS, TOKENS, TOP_K),
        {"a": draw(TOKENS, 5), "b": draw(TOKENS, 64)},
    )


# Each takes move: (x, topk_idx) -> (plan, rows).


def _value_and_gradients(move, x, ids):
    (plan, out), pull, *_ = jax.vjp(lambda x: move(x, ids), x)
    zeros = jax.tree.map(
        lambda a: (
            np.zeros(a.shape, jax.dtypes.float0)
            if not jnp.issubdtype(a.dtype, jnp.inexact)
            else jnp.zeros_like(a)
        ),
        plan,
    )
    return out, pull((zeros, jax.tree.map(jnp.sin, out)))


def _tangents(move, x, ids):
    f = lambda x: move(x, ids)[1]  # noqa: E731
    return jax.jvp(f, (x,), (jax.tree.map(jnp.cos, x),)), jax.linearize(f, x)[1](x)


def _layer(move, x, ids):
    """The plan is used for more: forward, backward, and of one leaf only."""

    def loss(x, pick):
        plan, rows = move(x, ids)
        y = jax_ep.permute(rows, plan)
        home = jax_ep.combine(jax_ep.unpermute(jax.tree.map(jnp.sin, y), plan), plan)
        return sum((home[name] ** 2).sum() for name in pick)

    return [jax.grad(loss)(x, pick) for pick in (("a", "b"), ("b",))]


def _second_order(move, x, ids):
    def loss(x):
        _, rows = move(jax.tree.map(jnp.sin, x), ids)
        return sum((leaf**3).sum() for leaf in jax.tree.leaves(rows))

    return jax.jvp(jax.grad(loss), (x,), (x,))


def _transposed(move, x, ids):
    f = lambda x: move(x, ids)[1]  # noqa: E731
    return jax.linear_transpose(f, x)(f(x))


def _batched(move, x, ids):
    """Over one leaf; the other is shared by the batch, and so is the plan."""
    xs = {"a": jnp.stack([x["a"], -x["a"]], 1), "b": x["b"]}

    def f(x):
        plan, rows = move(x, ids)
        return plan.recv_src, rows, jax_ep.combine(rows, plan)

    return jax.vmap(f, in_axes=({"a": 1, "b": None},))(xs)


def _gradient_of_a_batch(move, x, ids):
    loss = lambda x: sum(jnp.sum(leaf**2) for leaf in move(x, ids)[1].values())  # noqa: E731
    return jax.vmap(jax.grad(loss))(jax.tree.map(lambda a: jnp.stack([a, 2 * a]), x))


def _batch_of_routings(move, x, ids):
    several = jnp.stack([ids, ids[::-1], jnp.full_like(ids, -1)])

    def f(ids):
        plan, rows = move(x, ids)
        return harness.plan_fields(plan), rows

    return jax.vmap(f)(several), lax.scan(lambda _, i: (None, f(i)), None, several)[1]


def _remat(move, x, ids):
    @jax.checkpoint
    def f(x):
        plan, rows = move(x, ids)
        return jax_ep.combine(jax.tree.map(jnp.sin, rows), plan)

    return jax.grad(lambda x: sum((y**2).sum() for y in f(x).values()))(x)


def _cond(move, x, ids):
    f = lambda x: move(x, ids)[1]  # noqa: E731
    return lax.cond(
        ids.shape[0] > lax.psum(0, "ep"), f, lambda x: jax.tree.map(jnp.sin, f(x)), x
    )


TRANSFORMATIONS = (
    *(_value_and_gradients, _tangents, _layer, _second_order, _transposed, _batched),
    *(_gradient_of_a_batch, _batch_of_routings, _remat, _cond),
)


@pytest.mark.parametrize(
    "transform", TRANSFORMATIONS, ids=lambda f: f.__name__.strip("_")
)
@harness.on_each_backend
def test_transformations(backend, transform):
    def body(comm, topk_idx, x):
        moves = (functools.partial(f, comm=comm) for f in (in_one_step, in_two_steps))
        return [transform(lambda x, i, m=m: m(x, i), x, topk_idx) for m in moves]

    comm = harness.communicator(backend, RANKS)
    found, want = harness.run(body, comm, *inputs())
    jax.tree.map(np.testing.assert_array_equal, found, want)


@harness.on_each_backend
def test_replicated_inputs(backend):
    """With check_vma: gradients of what all ranks share are summed over them."""
    mesh = layers.mesh({"ep": RANKS})
    comm = layers.communicator(mesh, "ep", backend)
    ids, x = inputs()

    def gradient(move):
        def body(x, ids):
            def loss(x):
                _, rows = move(x, ids, comm)
                return lax.psum(sum((r**2).sum() for r in rows.values()), "ep")

            return jax.grad(loss)(x)

        spec = jax.sharding.PartitionSpec()
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=True
        )
        return jax.jit(mapped)(jax.tree.map(lambda a: a[0], x), ids[0])

    found, want = gradient(in_one_step), gradient(in_two_steps)
    jax.tree.map(np.testing.assert_array_equal, found, want)


@harness.on_each_backend
def test_dtypes_without_a_gradient(backend):
    comm = harness.communicator(backend, RANKS)

    def body(comm, topk_idx, x):
        loss = lambda x: in_one_step(x, topk_idx, comm)[1].astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(loss)(x)

    x = np.zeros((RANKS, TOKENS, 2), jnp.dtype("float8_e5m2"))
    with pytest.raises(TypeError, match="a leaf of dtype float8_e5m2 has no gradient"):
        harness.run(body, comm, inputs()[0], x)


# Errors: those of make_plan and dispatch, in that order ----------------------


@pytest.mark.parametrize(
    ("x", "ids", "sizes"),
    [
        (np.zeros((6, 2)), np.zeros((6, 3)), {}),
        (np.zeros((6, 2)), np.zeros((6, 3), np.int32), {"capacity": 0}),
        (np.zeros((6, 2)), np.zeros((6, 33), np.int32), {}),
        (np.zeros((6, 2)), np.zeros((6, 3), np.int32), {"capacity_factor": -1}),
        (np.zeros((5, 2)), np.zeros((6, 3), np.int32), {}),
        (np.zeros((5, 2)), np.zeros((6, 3)), {}),
        (np.zeros(()), np.zeros((6, 3), np.int32), {}),
    ],
    ids=str,
)
def test_errors_are_those_of_the_two(x, ids, sizes):
    comm = harness.communicator(NATIVE, RANKS)

    def message(move):
        def body(comm, number):
            del number
            return move(x, ids, comm, **sizes)[1]

        with pytest.raises((TypeError, ValueError)) as info:
            harness.run(body, comm, np.zeros((RANKS, 1), np.float32))
        return type(info.value), str(info.value)

    assert message(in_one_step) == message(in_two_steps)


def test_closed_communicator():
    with jax_ep.Communicator(harness.mesh(RANKS), "ep", backend=NATIVE) as comm:
        pass
    ids, x = inputs()
    with pytest.raises(RuntimeError, match=r"^jax_ep.make_plan: the communicator is"):
        harness.run(lambda comm, i, x: in_one_step(x, i, comm)[1], comm, ids, x)


# What it becomes -------------------------------------------------------------


def lowered(tokens, columns, wrap=lambda f: f):
    """The custom calls of a program for CUDA, lowered without a GPU."""
    mesh = layers.mesh({"ep": RANKS})
    comm = layers.communicator(mesh, "ep", NATIVE)

    def body(x, ids):
        return wrap(lambda x: in_one_step(x, ids, comm)[1])(x)

    shapes = (
        jax.ShapeDtypeStruct((RANKS * tokens, columns), jnp.bfloat16),
        jax.ShapeDtypeStruct((RANKS * tokens, 8), jnp.int32),
    )
    f = jax.jit(layers.sharded(body, mesh))
    text = f.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @jax_ep_" in line]
    return [re.search(r"custom_call @jax_ep_(\w+)", c)[1] for c in calls], calls


def test_one_call_for_cuda(monkeypatch):
    """Operands and results of the custom call."""
    backends = frozenset({NATIVE})
    monkeypatch.setitem(vars(table.PLAN_DISPATCH.native), "backends", backends)
    names, (call,) = lowered(128, 7168)
    assert names == ["plan_dispatch"]
    operands, results = call.split(" : ")[-1].split(" -> ")
    # Position, ids, a leaf; nine fields, a leaf, the workspace.
    assert operands.count("tensor<") == 3
    assert results.count("tensor<") == 11
    for attribute in ("comm", "channel", "num_experts", "expert_alignment"):
        assert attribute in call


def test_what_more_it_becomes(monkeypatch):
    backends = frozenset({NATIVE})
    monkeypatch.setitem(vars(table.PLAN_DISPATCH.native), "backends", backends)

    def tangent(f):
        return lambda x: jax.jvp(f, (x,), (x,))

    def gradient(f):
        return lambda x: jax.vjp(f, x)[1](f(x))[0]

    assert lowered(128, 7168, tangent)[0] == ["plan_dispatch", "dispatch"]
    assert sorted(lowered(128, 7168, gradient)[0]) == [
        "combine",
        "plan_dispatch",
        "plan_dispatch",
    ]
    # More tokens than one launch takes.
    assert lowered(257, 7168)[0] == ["plan", "dispatch"]
    assert lowered(256, 7168)[0] == ["plan_dispatch"]


def test_two_calls_elsewhere():
    if NATIVE == "cuda":
        pytest.skip("this machine has GPUs")
    assert lowered(128, 7168)[0] == ["plan", "dispatch"]
