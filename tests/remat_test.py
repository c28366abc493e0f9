"""What runs again under jax.checkpoint: the table of docs/semantics.md, counted."""

from __future__ import annotations

import collections
import functools
import pathlib
import re

import harness
import jax
import jax.numpy as jnp
import layers
import moe_layers
import numpy as np
import pytest
from jax import ad_checkpoint
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._api import moe as moe_module
from jax_ep._api import planning
from jax_ep._operations import experts, fused

RANKS, TOKENS, TOP_K, EXPERTS, HIDDEN, INNER = 4, 6, 2, 8, 5, 3
ROOT = pathlib.Path(__file__).resolve().parent.parent
# What crosses ranks or copies rows, which all backends have.
OF_ROWS = ("ep_plan", "ep_dispatch", "ep_permute", "ep_unpermute", "ep_combine")


def documented():
    """{names that a policy saves, or None: {operation: how often it runs}}."""
    text = (ROOT / "docs/semantics.md").read_text()
    table = text.partition("<!-- counts -->\n")[2].partition("\n\n")[0]
    head, _, *rows = (line.strip("| ").split(" | ") for line in table.splitlines())
    operations = [cell.strip("`") for cell in head[1:]]
    result = {}
    for saved, *counts in rows:
        names = tuple(re.findall(r"`(ep_\w+)`", saved))
        key = None if saved.startswith("everything") else names
        result[key] = dict(zip(operations, map(int, counts), strict=True))
    return result


COUNTS = documented()


def gradients(comm, names):
    """A layer's gradients in all that it has, with a policy that saves `names`."""

    def body(x, ids, weights, matrices):
        experts = functools.partial(jax_ep.gated_mlp, **matrices)
        return jax_ep.moe(x, ids, weights, experts, comm=comm, num_experts=EXPERTS)

    layer = layers.sharded(body, comm.mesh)
    if names is not None:
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        layer = jax.checkpoint(layer, policy=policy)

    def loss(x, weights, matrices, ids):
        return (layer(x, ids, weights, matrices) ** 2).sum()

    return jax.grad(loss, (0, 1, 2))


def arguments():
    normal = moe_layers.normal
    matrices = {
        "w_gate": normal(3, EXPERTS, HIDDEN, INNER),
        "w_up": normal(4, EXPERTS, HIDDEN, INNER),
        "w_down": normal(5, EXPERTS, INNER, HIDDEN),
    }
    ids = layers.random_routing(6, RANKS * TOKENS, TOP_K, EXPERTS)
    x, weights = normal(1, RANKS * TOKENS, HIDDEN), normal(2, RANKS * TOKENS, TOP_K)
    return x, weights, matrices, ids


def test_the_table_is_there():
    assert len(COUNTS) == 6
    assert {None, (), ("ep_plan", "ep_rows", "ep_outputs")} <= COUNTS.keys()


@pytest.mark.parametrize("names", COUNTS, ids=str)
@pytest.mark.parametrize("one_launch", [False, True], ids=["two", "one"])
def test_counts(names, one_launch, monkeypatch):
    backends = frozenset({"xla"} if one_launch else ())
    monkeypatch.setattr(fused, "BACKENDS", backends)
    comm = layers.communicator(layers.mesh({"ep": RANKS}), "ep", "xla")
    jaxpr = jax.make_jaxpr(gradients(comm, names))(*arguments())
    found = {op: layers.count_primitive(jaxpr, op) for op in COUNTS[names]}
    launches = layers.count_primitive(jaxpr, "ep_dispatch_permute")
    assert (launches > 0) == one_launch
    found["ep_dispatch"] += launches
    found["ep_permute"] += launches
    assert found == COUNTS[names]
    # permute and unpermute each bind it; XLA merges the two.
    places = layers.count_primitive(jaxpr, "ep_expert_rows")
    assert places == 2 * found["ep_plan"]


@pytest.mark.parametrize("names", COUNTS, ids=str)
def test_counts_in_the_compiled_program(names):
    """XLA merges nothing of what runs again, and runs nothing more."""
    if harness.ON_GPU:
        pytest.skip("there dispatch and permute are one call")
    comm = layers.communicator(layers.mesh({"ep": RANKS}), "ep", "cpu")
    program = jax.jit(gradients(comm, names)).lower(*arguments()).compile()
    calls = re.findall(r'custom_call_target="jax_(ep_\w+)"', program.as_text())
    found = collections.Counter(calls)
    assert {op: found[op] for op in OF_ROWS} == {
        op: COUNTS[names][op] for op in OF_ROWS
    }


@harness.on_each_backend
def test_gradients_are_the_same(backend):
    comm = layers.communicator(layers.mesh({"ep": RANKS}), "ep", backend)
    args = arguments()
    want, *others = (jax.jit(gradients(comm, names))(*args) for names in COUNTS)
    assert any(np.asarray(a).any() for a in jax.tree.leaves(want))
    for got in others:
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_names_of_expert_fn_keep_no_second_copy(capsys):
    """Expert rows that two names name are saved once."""
    comm = layers.communicator(layers.mesh({"ep": RANKS}), "ep", "xla")

    def body(x, ids, weights, w):
        def experts(rows, group_sizes):
            rows = ad_checkpoint.checkpoint_name(rows, "mine")
            return jnp.tanh(jax.lax.ragged_dot(rows, w, group_sizes))

        return jax_ep.moe(x, ids, weights, experts, comm=comm, num_experts=EXPERTS)

    policy = jax.checkpoint_policies.save_only_these_names("ep_plan", "ep_rows", "mine")
    layer = jax.checkpoint(layers.sharded(body, comm.mesh), policy=policy)
    x, weights, _, ids = arguments()
    w = moe_layers.normal(3, EXPERTS, HIDDEN, HIDDEN)
    ad_checkpoint.print_saved_residuals(layer, x, ids, weights, w)
    places = RANKS * RANKS * TOKENS * TOP_K
    assert capsys.readouterr().out.count(f"f32[{places},{HIDDEN}]") == 1


def test_names_are_not_in_the_program(monkeypatch):
    comm = layers.communicator(layers.mesh({"ep": RANKS}), "ep", "xla")

    def text():
        jax.clear_caches()
        return jax.jit(gradients(comm, None)).lower(*arguments()).as_text()

    named = text()
    monkeypatch.setattr(moe_module, "checkpoint_name", lambda tree, _: tree)
    monkeypatch.setattr(planning, "checkpoint_name", lambda tree, _: tree)
    monkeypatch.setattr(experts, "checkpoint_name", lambda tree, _: tree)
    assert text() == named


def test_operations_by_themselves_can_be_transposed():
    """The plan has names, rows have none: JAX cannot transpose a name."""
    comm = layers.communicator(layers.mesh({"ep": RANKS}), "ep", "xla")

    def body(x, ids):
        def there_and_back(x):
            plan = jax_ep.make_plan(ids, comm=comm, num_experts=EXPERTS)
            rows = jax_ep.permute(jax_ep.dispatch(x, plan), plan)
            return jax_ep.combine(jax_ep.unpermute(rows, plan), plan)

        return jax.linear_transpose(there_and_back, x)(x)[0], there_and_back(x)

    x, _, _, ids = arguments()
    run = layers.sharded(body, comm.mesh, in_specs=P("ep"), out_specs=P("ep"))
    back, there = jax.jit(run)(x, ids)
    # Symmetric: each token times the number of its choices that are experts.
    np.testing.assert_array_equal(back, there)
    times = ((ids >= 0) & (ids < EXPERTS)).sum(-1, keepdims=True)
    np.testing.assert_allclose(there, times * x, rtol=1e-6)
