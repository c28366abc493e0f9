"""jax_ep.communicator: one communicator for each mesh, axes and options."""

from __future__ import annotations

import concurrent.futures
import functools

import contexts
import harness
import jax
import jax.numpy as jnp
import launch
import layers
import numpy as np
import pytest
from bad_input import assert_raises
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

NATIVE = harness.BACKENDS[0]
ROWS = 4 * jax.device_count()

pytestmark = pytest.mark.skipif(
    harness.PROCESSES > 1 or jax.device_count() < 2 or layers.between_nodes(),
    reason="needs two devices of one process",
)


def mesh_of_two_axes(axis_type=AxisType.Auto):
    return layers.mesh({"data": 1, "ep": jax.device_count()}, axis_type)


def there_and_back(x, comm):
    ids = jnp.arange(len(x), dtype=jnp.int32)[:, None] % comm.num_ranks
    plan = jax_ep.make_plan(ids, comm=comm, num_experts=comm.num_ranks)
    return jax_ep.combine(3 * jax_ep.dispatch(x, plan), plan)


def layer(x, comm, mesh=None):
    """Of global arrays; `comm` is a communicator or gives one inside shard_map."""

    def body(x):
        return there_and_back(x, comm() if callable(comm) else comm)

    axes = P(("data", "ep"))
    return jax.shard_map(body, mesh=mesh, in_specs=axes, out_specs=axes)(x)


def rows(mesh):
    x = np.ones((ROWS, 2), np.float32)
    return jax.device_put(x, NamedSharding(mesh, P(("data", "ep"))))


@pytest.mark.parametrize("context", contexts.NAMES[1:])
@pytest.mark.parametrize("axes", ("ep", ("ep", "data")), ids=str)
def test_made_while_jax_traces(context, axes):
    """First inside of shard_map, remat, scan and grad, then found outside."""
    mesh, found = mesh_of_two_axes(), []

    def get():
        found.append(jax_ep.communicator(axes, backend=NATIVE, timeout_s=61.0))
        return found[-1]

    @jax.jit
    @jax.grad
    def f(x):
        given = None if context == "set_mesh" else mesh
        step = jax.checkpoint(lambda x, _: (layer(x, get, given), None))
        return jax.lax.scan(step, x, None, length=2)[0].sum()

    with contexts.under(context, mesh):
        gradient = f(rows(mesh))
        jax.jit(lambda x: (get(), x)[1])(1)
        get()
    np.testing.assert_array_equal(gradient, np.full((ROWS, 2), 9))
    assert len(found) > 2
    assert {id(comm) for comm in found} == {id(found[0])}
    assert found[0].mesh == mesh
    found[0].close()


def test_what_makes_it_another_one():
    mesh = mesh_of_two_axes()
    get = functools.partial(jax_ep.communicator, mesh=mesh, backend="xla")
    comm = get("ep")
    # An equal mesh, defaults spelled out, numbers of another type.
    same = Mesh(mesh.devices.copy(), mesh.axis_names, axis_types=mesh.axis_types)
    assert (
        get(("ep",), mesh=same, timeout_s=300, staging_bytes=np.int64(16 << 20)) is comm
    )
    others = [
        get("ep", timeout_s=299.0),
        get("ep", num_channels=2),
        get(("data", "ep")),
        get(("ep", "data")),
        get("ep", mesh=mesh_of_two_axes(AxisType.Explicit)),
    ]
    for other in others:
        assert other is not comm
        assert other != comm


def test_a_closed_one_is_made_again():
    mesh = mesh_of_two_axes()
    get = functools.partial(jax_ep.communicator, "ep", mesh, backend=NATIVE)
    f = jax.jit(lambda x, comm: layer(x, comm, mesh), static_argnums=1)
    comm, x = get(timeout_s=63.0), rows(mesh)
    expected = f(x, comm)
    comm.close()
    again = get(timeout_s=63.0)
    assert again is not comm
    assert again != comm
    assert hash(again) == hash(comm)
    assert not again.closed
    # What was compiled keeps working; what is traced takes the new one.
    np.testing.assert_array_equal(f(x, comm), expected)
    np.testing.assert_array_equal(f(x[: ROWS // 2], again), expected[: ROWS // 2])
    message = (
        "jax_ep.make_plan: the communicator is closed; create a new one (executables "
        "compiled before close() keep working)"
    )
    assert_raises(RuntimeError, message, f, x[: ROWS // 2], comm)
    again.close()


def test_equal_ones_are_traced_once():
    mesh, traced = mesh_of_two_axes(), []

    def f(x, comm):
        traced.append(comm)
        return layer(x, comm, mesh)

    f = jax.jit(f, static_argnums=1)
    one, two = (jax_ep.Communicator(mesh, "ep", backend=NATIVE) for _ in range(2))
    other = jax_ep.Communicator(mesh, "ep", backend=NATIVE, timeout_s=64.0)
    assert one == two
    assert one != other
    assert one != "ep"
    np.testing.assert_array_equal(f(rows(mesh), one), f(rows(mesh), two))
    assert traced == [one]
    f(rows(mesh), other)
    # The first one's program serves until it is closed.
    one.close()
    np.testing.assert_array_equal(f(rows(mesh), two), 3 * rows(mesh))
    assert list(map(id, traced)) == [id(one), id(other), id(two)]
    for comm in (two, other):
        comm.close()


def test_attribute_of_a_module():
    linen = pytest.importorskip("flax.linen")
    nnx = pytest.importorskip("flax.nnx")
    mesh, traced = mesh_of_two_axes(), []
    get = functools.partial(jax_ep.communicator, "ep", mesh, backend=NATIVE)

    class Nnx(nnx.Module):
        def __init__(self):
            self.comm = get()
            self.scale = nnx.Param(jnp.full((), 2.0))

        def __call__(self, x):
            traced.append("nnx")
            return self.scale[...] * layer(x, self.comm, mesh)

    class Linen(linen.Module):
        comm: jax_ep.Communicator

        @linen.compact
        def __call__(self, x):
            traced.append("linen")
            return layer(x, self.comm, mesh)

    x = rows(mesh)
    f = nnx.jit(lambda module, x: module(x))
    for _ in range(2):
        module = nnx.merge(*nnx.split(nnx.clone(Nnx())))
        assert module.comm is get()
        np.testing.assert_array_equal(f(module, x), 6 * x)
    g = jax.jit(lambda module, x: module.apply({}, x), static_argnums=0)
    for _ in range(2):
        np.testing.assert_array_equal(g(Linen(get()), x), 3 * x)
    assert traced == ["nnx", "linen"]


def test_attribute_of_an_equinox_module():
    equinox = pytest.importorskip("equinox")
    mesh, traced = mesh_of_two_axes(), []

    class Layer(equinox.Module):
        scale: jax.Array
        comm: jax_ep.Communicator = equinox.field(static=True)

        def __call__(self, x):
            traced.append(self.comm)
            return self.scale * layer(x, self.comm, mesh)

    f, x = equinox.filter_jit(lambda module, x: module(x)), rows(mesh)
    for _ in range(2):
        comm = jax_ep.communicator("ep", mesh, backend=NATIVE)
        np.testing.assert_array_equal(f(Layer(jnp.full((), 2.0), comm), x), 6 * x)
    assert len(traced) == 1


def test_threads_get_the_same():
    mesh = mesh_of_two_axes()

    def get(_):
        with jax.set_mesh(mesh):
            return jax_ep.communicator("ep", backend=NATIVE, timeout_s=65.0)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        comms = list(pool.map(get, range(8)))
    assert {id(comm) for comm in comms} == {id(comms[0])}
    comms[0].close()


def test_bad_input():
    message = (
        "jax_ep.communicator: there is no mesh with devices in the context; call the "
        "program under jax.set_mesh(mesh), or give mesh="
    )
    assert_raises(ValueError, message, jax_ep.communicator, "ep")
    assert_raises(ValueError, message, jax.jit(lambda: jax_ep.communicator("ep")))
    abstract = mesh_of_two_axes().abstract_mesh
    with jax.sharding.use_abstract_mesh(abstract):
        assert_raises(ValueError, message, jax_ep.communicator, "ep")
    message = (
        "jax_ep.Communicator: mesh must be a jax.sharding.Mesh, found AbstractMesh"
    )
    assert_raises(TypeError, message, jax_ep.communicator, "ep", abstract)
    with pytest.raises(
        TypeError, match=r"the options are \['backend', .*found \['size'"
    ):
        jax_ep.communicator("ep", mesh_of_two_axes(), size=3)


@pytest.mark.skipif(harness.ON_GPU, reason="on CPUs")
@pytest.mark.parametrize("node_size", (4, 2))
def test_over_processes(tmp_path, node_size):
    """A tuple of axes of two processes, made while they trace."""
    with launch.Job(
        "axes_program.py", 2, tmp_path, devices=4, arguments=[str(node_size)]
    ) as job:
        logs = job.wait()
    assert all(log.endswith("END\n") for log in logs), logs
