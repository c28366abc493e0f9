"""Communicators over several mesh axes, and programs that leave axes out."""

from __future__ import annotations

import functools

import contexts
import harness
import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest
from bad_input import assert_raises
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

TOKENS, TOP_K, HIDDEN = 8, 3, 16
NATIVE = harness.BACKENDS[0]
SIZES = {"a": 2, "b": 2, "c": 2}

pytestmark = pytest.mark.skipif(
    harness.PROCESSES > 1 or jax.device_count() < 8 or layers.between_nodes(),
    reason="needs 8 devices of one process; cuts nodes itself",
)

axis_types = pytest.mark.parametrize(
    "axis_type", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit")
)


def backends(values, xla):
    """(backend, value): all on the native one, some on plain JAX, which is slow."""
    of = dict.fromkeys(harness.BACKENDS, values) | {"xla": xla}
    return [
        pytest.param(backend, value, id=f"{backend}-{'-'.join(value)}")
        for backend, values in of.items()
        for value in values
    ]


def turned(mesh, order):
    """The same devices at the same coordinates, axes in another order."""
    return Mesh(
        mesh.devices.transpose([mesh.axis_names.index(a) for a in order]),
        tuple(order),
        axis_types=mesh.axis_types,
    )


@functools.cache
def communicator(mesh, axes, backend, node_size=None):
    return jax_ep.Communicator(mesh, axes, backend=backend, node_size=node_size)


def low_latency(x, ids, weights, comm, num_experts):
    # Slots that no row came to hold anything.
    buffer = jax_ep.LowLatencyBuffer(
        comm,
        max_tokens=TOKENS,
        hidden=HIDDEN,
        num_experts=num_experts,
        dtype=jnp.float32,
    )
    rows, counts, handle = jax_ep.low_latency_dispatch(x, ids, buffer=buffer)
    return counts, jax_ep.low_latency_combine(3 * rows, weights, handle)


def every_operation(comm, x, ids, weights):
    """On one rank: its number, and what each operation gives, by name."""
    num_experts = 2 * comm.num_ranks
    plan = jax_ep.make_plan(ids, comm=comm, num_experts=num_experts, capacity=11)
    rows = jax_ep.dispatch((x, weights), plan)
    flight = jax_ep.dispatch_start(x, plan)
    flight, beside = jax_ep.overlap(flight, jnp.sin, x)
    flown = jax_ep.dispatch_done(flight)
    moe = jax_ep.moe_with_plan(x, weights, lambda r, sizes: 2 * r, plan)
    grads = jax.grad(
        lambda x, w: jnp.sin(
            jax_ep.moe_with_plan(x, w, lambda r, sizes: r * r, plan)
        ).sum(),
        argnums=(0, 1),
    )(x, weights)
    results = {
        "rank": lax.axis_index(comm.axis_name)[None],
        "plan": [jnp.atleast_1d(f) for f in harness.plan_fields(plan).values()],
        "dispatch": rows,
        "combine": jax_ep.combine(jnp.sin(rows[0]), plan),
        "flight": (
            flown,
            beside,
            jax_ep.combine_done(jax_ep.combine_start(flown, plan)),
        ),
        "moe": moe,
        "gradients": grads,
    }
    expert_rows = jax_ep.permute(rows[0], plan)
    results["choices"] = (
        plan.expert_demand_counts,
        jnp.atleast_1d(plan.dropped_pairs),
        jax_ep.permute_weights(rows[1], plan),
        jax_ep.combine_choices(expert_rows, plan),
    )
    if comm.num_nodes == 1:
        results["plan_dispatch"] = jax_ep.plan_dispatch(
            x, ids, comm=comm, num_experts=num_experts, capacity=11
        )[1]
        results["low latency"] = low_latency(x, ids, weights, comm, num_experts)
    return results


def inputs(ranks):
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(8 * TOKENS, HIDDEN)).astype(np.float32),
        rng.integers(-1, 2 * ranks + 1, (8 * TOKENS, TOP_K), np.int32),
        rng.normal(size=(8 * TOKENS, TOP_K)).astype(np.float32),
    )


def run(comm, spec, args, mesh=None):
    mesh = mesh or comm.mesh
    f = jax.shard_map(
        functools.partial(every_operation, comm),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    out = jax.jit(f)(*jax.device_put(args, NamedSharding(mesh, spec)))
    return jax.tree.map(np.asarray, out)


@pytest.mark.parametrize("node_size", (None, 2), ids=("", "nodes"))
@pytest.mark.parametrize(
    ("backend", "axes"), backends(("ab", "ca", "cba"), xla=("ca",))
)
def test_as_over_one_axis(backend, axes, node_size):
    """Bit for bit what ranks along one axis get, group by group."""
    if node_size and (backend == "xla" or harness.ON_GPU):
        pytest.skip("one node")
    mesh, axes = layers.mesh(SIZES), tuple(axes)
    others = tuple(a for a in SIZES if a not in axes)
    comm = communicator(mesh, axes, backend, node_size)
    args = inputs(comm.num_ranks)
    together = run(comm, P((*others, *axes)), args)
    by_group = turned(mesh, (*others, *axes)).devices.reshape(-1, comm.num_ranks)
    assert [g["devices"] for g in comm.describe()["groups"]] == [
        [d.id for d in group] for group in by_group
    ]
    for number, group in enumerate(by_group):
        alone = communicator(Mesh(group, ("ep",)), "ep", backend, node_size)
        part = lambda a: np.split(a, len(by_group))[number]  # noqa: E731, B023
        expected = run(alone, P("ep"), jax.tree.map(part, args))
        assert expected["rank"].tolist() == list(range(comm.num_ranks))
        jax.tree.map(
            np.testing.assert_array_equal, jax.tree.map(part, together), expected
        )


def layer(x, ids, weights, experts, *, comm):
    num_experts = experts.shape[0] * comm.num_ranks
    mlp = lambda rows, sizes: jax_ep.ragged_dot(rows, experts, sizes)  # noqa: E731
    return jnp.sin(jax_ep.moe(x, ids, weights, mlp, comm=comm, num_experts=num_experts))


def dense(x, ids, weights, experts):
    inside = (ids >= 0) & (ids < len(experts))
    rows = jnp.einsum("th,tkhg->tkg", x, experts[ids], precision="highest")
    return jnp.sin((rows * jnp.where(inside, weights, 0)[..., None]).sum(axis=1))


def layer_inputs(num_experts):
    x, ids, weights = inputs(num_experts // 2)
    rng = np.random.default_rng(1)
    return x, ids, weights, rng.normal(size=(num_experts, HIDDEN, 4)).astype(np.float32)


def value_and_gradients(f):
    def loss(x, ids, weights, experts):
        out = f(x, ids, weights, experts)
        return (out * out).sum(), out

    return jax.jit(jax.value_and_grad(loss, (0, 2, 3), has_aux=True))


def assert_like_dense(f, args, placed):
    with jax.default_matmul_precision("highest"):
        found, expected = (
            value_and_gradients(f)(*placed),
            value_and_gradients(dense)(*args),
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4),
        jax.tree.map(np.asarray, found),
        jax.tree.map(np.asarray, expected),
    )


@axis_types
@pytest.mark.parametrize("order", ("abc", "cab"))
@pytest.mark.parametrize(("backend", "axes"), backends(("ba", "ac"), xla=("ac",)))
def test_experts_lie_where_partition_spec_has_them(backend, axes, order, axis_type):
    """Also under a mesh with the axes in another order."""
    mesh, axes = layers.mesh(SIZES, axis_type), tuple(axes)
    comm = communicator(mesh, axes, backend)
    program, args = turned(mesh, order), layer_inputs(8)
    specs = (P(tuple(SIZES)),) * 3 + (P(axes),)
    f = jax.shard_map(
        functools.partial(layer, comm=comm),
        mesh=program,
        in_specs=specs,
        out_specs=specs[0],
    )
    placed = jax.device_put(args, tuple(NamedSharding(program, s) for s in specs))
    assert_like_dense(f, args, placed)


def there_and_back(x, *, comm):
    ids = jnp.arange(len(x), dtype=jnp.int32)[:, None] % comm.num_ranks
    plan = jax_ep.make_plan(ids, comm=comm, num_experts=comm.num_ranks)
    return jax_ep.combine(2 * jax_ep.dispatch(x, plan), plan)


@pytest.mark.parametrize("order", ("abc", "cab"))
def test_position_is_the_partition_where_it_can_be(order):
    """Otherwise it costs a GPU a kernel."""
    mesh, x = layers.mesh(SIZES), np.ones((64, 4), np.float32)

    def lowered(axes):
        comm = communicator(mesh, axes, NATIVE)
        f = functools.partial(there_and_back, comm=comm)
        spec = P(tuple(SIZES))
        program = turned(mesh, order)
        f = jax.shard_map(f, mesh=program, in_specs=spec, out_specs=spec)
        return jax.jit(f).lower(x).as_text()

    for axes in (("a",), ("a", "b"), ("b", "c"), ("a", "b", "c")):
        text = lowered(axes)
        # lax.axis_index divides the partition's number.
        assert "partition_id" in text
        assert ("stablehlo.divide" in text) == (order != "abc"), axes
    assert "stablehlo.divide" in lowered(("a", "c" if order == "abc" else "b"))


@pytest.mark.parametrize("known", (True, False), ids=("lowering", "run"))
def test_other_coordinates_are_refused(known):
    """The axes in another order, and devices as if they were not."""
    mesh = layers.mesh(SIZES)
    comm = communicator(mesh, ("c", "a"), NATIVE)
    shape = mesh.devices.shape
    other = Mesh(
        mesh.devices.reshape(shape), ("c", "a", "b"), axis_types=mesh.axis_types
    )
    spec = P(tuple(SIZES))
    f = jax.shard_map(
        functools.partial(there_and_back, comm=comm),
        mesh=other if known else other.abstract_mesh,
        in_specs=spec,
        out_specs=spec,
    )
    x = jax.device_put(np.ones((64, 4), np.float32), NamedSharding(other, spec))
    if known:
        with pytest.raises(ValueError, match="found another order of devices"):
            jax.jit(f)(x)
        return
    if harness.ON_GPU:
        pytest.skip("a trap ends the GPU's context")
    with pytest.raises(jax.errors.JaxRuntimeError, match="of the communicator's"):
        jax.block_until_ready(jax.jit(f)(x))


@pytest.mark.parametrize(
    "axis_name", ((), ("a", "a"), ("a", "z"), ["a"], "z", None), ids=repr
)
def test_axes_that_are_none(axis_name):
    message = (
        "jax_ep.Communicator: axis_name must be one of the mesh's axes "
        f"('a', 'b', 'c'), or a tuple of different ones, found {axis_name!r}"
    )
    assert_raises(
        ValueError, message, jax_ep.Communicator, layers.mesh(SIZES), axis_name
    )


def test_a_tuple_of_one_is_its_axis():
    mesh = layers.mesh(SIZES)
    one, same = (jax_ep.Communicator(mesh, a, backend="xla") for a in ("b", ("b",)))
    assert one == same
    assert same.axis_name == "b"


@pytest.mark.parametrize("context", contexts.NAMES)
@axis_types
@pytest.mark.parametrize("check_vma", (True, False), ids=("vma", "no_vma"))
@pytest.mark.parametrize(
    ("sizes", "axes", "manual"),
    (
        ({"data": 1, "ep": 8, "model": 1}, ("ep",), "ep"),
        ({"data": 8, "ep": 1}, ("ep",), "data"),
        ({"ep": 8, "one": 1}, ("one", "ep"), "ep"),
    ),
    ids=("others", "ranks", "tuple"),
)
def test_axes_of_one_device_left_out(
    sizes, axes, manual, check_vma, axis_type, context
):
    mesh = layers.mesh(sizes, axis_type)
    x = np.arange(64 * 4, dtype=np.float32).reshape(64, 4)
    for backend in harness.BACKENDS:
        f = jax.shard_map(
            functools.partial(there_and_back, comm=communicator(mesh, axes, backend)),
            mesh=mesh,
            in_specs=P(manual),
            out_specs=P(manual),
            axis_names={manual},
            check_vma=check_vma,
        )
        with contexts.under(context, mesh):
            put = jax.device_put(x, NamedSharding(mesh, P(manual)))
            y, gradient = jax.jit(jax.value_and_grad(lambda x, f=f: (f(x) ** 2).sum()))(
                put
            )
        np.testing.assert_array_equal(gradient, 8 * x)
        assert float(y) == float((4 * x.astype(np.float64) ** 2).sum())


# What JAX wants for gradients of nested shard_maps: the inner one's residuals must not
# cross its border, or carry no axes of the outer one.
WAYS = {"unchecked": (False, False), "remat": (True, True)}
# The communicator's axes and the outer ones: ranks inside, outside, on both sides.
NESTED = (("b", "a"), ("b", "bc"), ("ab", "a"))


@pytest.mark.parametrize("context", contexts.NAMES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("backend", "nested"), backends(NESTED, xla=NESTED[2:]))
def test_nested(backend, nested, way, context):
    """Manual over some axes, and inside over the rest."""
    axes, outer = map(tuple, nested)
    check_vma, remat = WAYS[way]
    mesh, args = layers.mesh(SIZES), layer_inputs(8)
    comm = communicator(mesh, axes, backend)
    inner = tuple(a for a in SIZES if a not in outer)
    body = functools.partial(layer, comm=comm)

    def specs(over):
        own = tuple(a for a in axes if a in over)
        return (P(over), P(over), P(over), P(own or None))

    def around(*args):
        return jax.shard_map(
            jax.checkpoint(body) if remat else body,
            in_specs=specs(inner),
            out_specs=P(inner),
            axis_names=set(inner),
            check_vma=check_vma,
        )(*args)

    f = jax.shard_map(
        around,
        mesh=None if context == "set_mesh" else mesh,
        in_specs=specs(outer),
        out_specs=P(outer),
        axis_names=set(outer),
        check_vma=check_vma,
    )
    with contexts.under(context, mesh):
        assert_like_dense(f, args, jax.device_put(args, NamedSharding(mesh, P())))


def test_left_to_the_compiler():
    """The message has the call to write."""
    mesh = layers.mesh(SIZES)
    comm = communicator(mesh, "b", NATIVE)
    f = jax.shard_map(
        functools.partial(there_and_back, comm=comm),
        mesh=mesh,
        in_specs=P("b"),
        out_specs=P("b"),
        axis_names={"b"},
    )
    message = (
        "jax_ep.make_plan: every mesh axis of more than one device must be manual in "
        "the surrounding shard_map, found ['a', 'c'] left to the compiler. Make them "
        "manual where jax_ep is called, with a shard_map inside this one, whose specs "
        "name these axes alone: jax.shard_map(layer, in_specs=..., out_specs=..., "
        "axis_names={'a', 'c'}); or leave out axis_names= of this one"
    )
    x = jax.device_put(np.ones((64, 4), np.float32), NamedSharding(mesh, P("b")))
    assert_raises(ValueError, message, jax.jit(f), x)
