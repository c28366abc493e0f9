"""A program that was lowered for one mesh and runs on another one of its shape.

JAX keeps a lowering for all meshes with the same axes: the second call below is not
lowered again, though other devices are the ranks. The native backends refuse it,
before any row is written.

A refusal on a GPU ends its context, so there each of these has a process of its own:

    python other_mesh_test.py PLATFORM OPERATION AXIS_TYPE
"""

from __future__ import annotations

import functools
import sys

import jax

if __name__ == "__main__":  # what conftest.py does for pytest
    on_cpu = sys.argv[1] == "cpu"
    jax.config.update("jax_platforms", "cpu" if on_cpu else "cuda,cpu")
    jax.config.update("jax_num_cpu_devices", 8)

import harness
import jax.numpy as jnp
import layers
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import run_script

import jax_ep

RANKS = min(4, jax.device_count())
TOKENS, TOP_K, HIDDEN, EXPERTS = 4, 2, 16, 2 * RANKS
CAPACITY = RANKS * TOKENS
NATIVE = harness.BACKENDS[0]
TARGETS = ("plan", "plan_dispatch", "dispatch", "combine")

pytestmark = pytest.mark.skipif(
    RANKS < 2 or layers.between_nodes(), reason="needs a node of two devices"
)


def meshes(axis_type=AxisType.Auto, sizes=(("ep", RANKS),), order=None):
    """A mesh, and the same devices in another order: backwards by default."""
    names, shape = zip(*sizes, strict=True)
    devices = np.array(jax.devices()[: np.prod(shape)])
    other = devices[::-1] if order is None else devices[list(order)]
    types = (axis_type,) * len(names)
    return [Mesh(d.reshape(shape), names, axis_types=types) for d in (devices, other)]


@functools.cache
def places(mesh):
    """A communicator of the mesh, and a low-latency buffer of it."""
    # On GPUs a rank that stands where it should waits for those that refuse.
    comm = jax_ep.Communicator(mesh, "ep", backend=NATIVE, timeout_s=10.0)
    buffer = jax_ep.LowLatencyBuffer(
        comm,
        max_tokens=TOKENS,
        hidden=HIDDEN,
        num_experts=EXPERTS,
        dtype=jnp.float32,
    )
    return comm, buffer


def inputs():
    """Of all ranks: tokens, their experts, and rows to combine."""
    token = np.arange(RANKS * TOKENS)
    return {
        "x": (token[:, None] * 3 + np.arange(HIDDEN) % 5).astype(np.float32),
        "ids": ((token[:, None] + np.arange(TOP_K) * 3) % EXPERTS).astype(np.int32),
        "rows": np.ones((RANKS * CAPACITY, HIDDEN), np.float32),
    }


def plan_of(a, comm):
    return jax_ep.make_plan(a["ids"], comm=comm, num_experts=EXPERTS, capacity=CAPACITY)


def prepare(a, comm, buffer):
    """What the operations below take beside `inputs`, with an axis to shard."""
    rows, _, handle = jax_ep.low_latency_dispatch(a["x"], a["ids"], buffer=buffer)
    return layers.wrap_plan((plan_of(a, comm), rows, handle))


def overlapped(a, plan):
    flight = jax_ep.dispatch_start(a["x"], plan)
    flight, more = jax_ep.overlap(flight, jnp.sin, a["x"])
    return jax_ep.dispatch_done(flight), more


def transposed(operation, leaf, plan):
    out, pull = jax.vjp(lambda rows: operation(rows, plan), leaf)
    return pull(jnp.ones_like(out))[0]


# By name: one native call of (inputs, plan, rows and handle of low latency).
OPERATIONS = {
    "plan": lambda a, plan, rows, handle: plan_of(a, plan.comm).num_recv[None],
    "dispatch": lambda a, plan, rows, handle: jax_ep.dispatch(a["x"], plan),
    "combine": lambda a, plan, rows, handle: jax_ep.combine(a["rows"], plan),
    "plan_dispatch": lambda a, plan, rows, handle: jax_ep.plan_dispatch(
        a["x"],
        a["ids"],
        comm=plan.comm,
        num_experts=EXPERTS,
        capacity=CAPACITY,
    )[1],
    "gradient_of_dispatch": lambda a, plan, rows, handle: transposed(
        jax_ep.dispatch, a["x"], plan
    ),
    "gradient_of_combine": lambda a, plan, rows, handle: transposed(
        jax_ep.combine, a["rows"], plan
    ),
    "loop": lambda a, plan, rows, handle: lax.fori_loop(
        0, 3, lambda _, x: jax_ep.combine(jax_ep.dispatch(x, plan), plan), a["x"]
    ),
    "vmap": lambda a, plan, rows, handle: jax.vmap(
        lambda x: jax_ep.dispatch(x, plan), out_axes=1
    )(jnp.stack([a["x"], 2 * a["x"]])),
    "overlap": lambda a, plan, rows, handle: overlapped(a, plan),
    "permute": lambda a, plan, rows, handle: jax_ep.moe_with_plan(
        a["x"], jnp.ones((TOKENS, TOP_K)), lambda rows, sizes: rows, plan
    ),
    "low_latency_dispatch": lambda a, plan, rows, handle: jax_ep.low_latency_dispatch(
        a["x"], a["ids"], buffer=handle.buffer
    )[1][None],
    "low_latency_combine": lambda a, plan, rows, handle: jax_ep.low_latency_combine(
        rows, jnp.ones((TOKENS, TOP_K)), handle
    ),
}


def program(name):
    def body(a, prepared):
        return OPERATIONS[name](a, *layers.unwrap_plan(prepared))

    return jax.jit(jax.shard_map(body, in_specs=P("ep"), out_specs=P("ep")))


def put(tree, mesh, axes="ep"):
    """Arrays of all ranks, rank by rank where the mesh has it."""
    return jax.device_put(tree, NamedSharding(mesh, P(axes)))


def prepared(mesh):
    """All ranks' results of `prepare`, as host arrays."""
    comm, buffer = places(mesh)
    with jax.set_mesh(mesh):
        f = jax.jit(
            jax.shard_map(
                functools.partial(prepare, comm=comm, buffer=buffer),
                in_specs=P("ep"),
                out_specs=P("ep"),
            )
        )
        return jax.tree.map(np.asarray, f(put(inputs(), mesh)))


def run_under(mesh, f, *args):
    with jax.set_mesh(mesh):
        return jax.tree.map(np.asarray, f(*put(args, mesh)))


def refusal(run, *args):
    """The message of the error that the call ends in."""
    with pytest.raises(jax.errors.JaxRuntimeError) as info:
        jax.block_until_ready(run(*args))
    return str(info.value)


def assert_refused(message, mesh, other):
    """Names what both meshes say of a device, and what to do."""
    words = "jax_ep ", "of the communicator's; call the program under jax.set_mesh("
    assert all(word in message for word in words), message
    found = {
        f"at position {there} (rank {there % RANKS}) of the program's mesh, but at "
        f"position {here} (rank {here % RANKS}) of the communicator's"
        for here, device in enumerate(mesh.devices.flat)
        for there, same in enumerate(other.devices.flat)
        if device == same and here != there
    }
    assert any(words in message for words in found), message


def lowered_here_run_there(name, axis_type):
    """Runs under a mesh, then under the other one, which must refuse."""
    mesh, other = meshes(axis_type)
    args = inputs(), prepared(mesh)
    f = program(name)
    first = run_under(mesh, f, *args)
    message = refusal(run_under, other, f, *args)
    return mesh, other, message, lambda: (first, run_under(mesh, f, *args))


axis_types = pytest.mark.parametrize(
    "axis_type", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit")
)


@axis_types
@pytest.mark.parametrize("name", OPERATIONS)
def test_refused_on_the_other_mesh(name, axis_type):
    if harness.ON_GPU:
        done = run_script(__file__, "cuda", name, axis_type.name)
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        assert_refused(output, *meshes(axis_type))
        return
    mesh, other, message, again = lowered_here_run_there(name, axis_type)
    assert_refused(message, mesh, other)
    assert "waited" not in message
    # The communicator goes on.
    first, second = again()
    jax.tree.map(np.testing.assert_array_equal, first, second)


on_cpu = pytest.mark.skipif(harness.ON_GPU, reason="a trap ends the GPU's context")


@on_cpu
def test_ranks_that_stand_right_are_told():
    """Two of four change places; the others do not wait for them."""
    mesh, other = meshes(order=(1, 0, *range(2, RANKS)))
    args = inputs(), prepared(mesh)
    f = program("dispatch")
    run_under(mesh, f, *args)
    messages = {
        refusal(lambda s=s: np.asarray(s.data))
        for out in [_started(other, f, *args)]
        for s in out.addressable_shards
    }
    told = [m for m in messages if "heard that rank" in m]
    assert len(told) == RANKS - 2
    for message in messages:
        assert_refused(message, mesh, other)
        assert "waited" not in message


def _started(mesh, f, *args):
    with jax.set_mesh(mesh):
        return f(*put(args, mesh))


@on_cpu
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@axis_types
def test_same_rank_in_another_group(axis_type):
    """Each rank is the same one, but its peers are others."""
    sizes = (("data", 2), ("ep", 2))
    mesh, other = meshes(axis_type, sizes, order=(0, 3, 2, 1))
    comm = jax_ep.Communicator(mesh, "ep", backend=NATIVE)
    token = np.arange(4 * TOKENS)
    x = token[:, None].astype(np.float32)
    ids = (token[:, None] % 4).astype(np.int32)

    @jax.jit
    @functools.partial(
        jax.shard_map, in_specs=P(("data", "ep")), out_specs=P(("data", "ep"))
    )
    def f(x, ids):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=4)
        return jax_ep.combine(jax_ep.dispatch(x, plan), plan)

    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(f(*put((x, ids), mesh, ("data", "ep"))), x)
    with jax.set_mesh(other):
        message = refusal(f, *put((x, ids), other, ("data", "ep")))
    assert (
        "rank 1 found its device at position 3 (rank 1) of the program's mesh, but at "
        "position 1 (rank 1) of the communicator's"
    ) in message or (
        "rank 1 found its device at position 1 (rank 1) of the program's mesh, but at "
        "position 3 (rank 1) of the communicator's"
    ) in message
    comm.close()


def layer(comm):
    def body(x, ids):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=EXPERTS)
        return jax_ep.combine(jax_ep.dispatch(x, plan), plan)

    return body


def expected(x, ids):
    """One row for each rank that a token goes to."""
    ranks = ids // (EXPERTS // RANKS)
    return x * np.array([len(set(row)) for row in ranks.tolist()])[:, None]


@on_cpu
@axis_types
def test_exported_program(axis_type):
    mesh, other = meshes(axis_type)
    comm, _ = places(mesh)
    args = inputs()["x"], inputs()["ids"]
    allowed = [
        export.DisabledSafetyCheck.custom_call(f"jax_ep_{name}") for name in TARGETS
    ]
    with jax.set_mesh(mesh):
        f = jax.jit(jax.shard_map(layer(comm), in_specs=P("ep"), out_specs=P("ep")))
        exported = export.export(f, disabled_checks=allowed)(*put(args, mesh))
    out = run_under(mesh, jax.jit(exported.call), *args)
    np.testing.assert_array_equal(out, expected(*args))
    message = refusal(run_under, other, jax.jit(exported.call), *args)
    assert_refused(message, mesh, other)


@on_cpu
@axis_types
def test_one_program_of_two_communicators(axis_type):
    """Each mesh has its own: the function is traced for either, and both are right."""
    pair = meshes(axis_type)
    args = inputs()["x"], inputs()["ids"]
    for mesh in (*pair, *pair):
        comm, _ = places(mesh)
        f = jax.jit(jax.shard_map(layer(comm), in_specs=P("ep"), out_specs=P("ep")))
        np.testing.assert_array_equal(run_under(mesh, f, *args), expected(*args))


@on_cpu
@axis_types
@pytest.mark.parametrize("right", (True, False), ids=("same", "other"))
def test_abstract_mesh(axis_type, right):
    """Nobody knows the devices while the program is lowered."""
    mesh, other = meshes(axis_type)
    comm, _ = places(mesh)
    args = inputs()["x"], inputs()["ids"]
    f = jax.jit(
        jax.shard_map(
            layer(comm), mesh=mesh.abstract_mesh, in_specs=P("ep"), out_specs=P("ep")
        )
    )
    if right:
        np.testing.assert_array_equal(f(*put(args, mesh)), expected(*args))
    else:
        assert_refused(refusal(f, *put(args, other)), mesh, other)


def main(platform, name, axis_type):
    del platform
    *_, message, _ = lowered_here_run_there(name, AxisType[axis_type])
    print(message)


if __name__ == "__main__":
    main(*sys.argv[1:])
