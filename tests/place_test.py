"""Where the operations may be called: each wrong place with its literal message."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest
from bad_input import (
    CAPACITY,
    NATIVE,
    RANKS,
    SIZES,
    TOKENS,
    arguments,
    assert_raises,
    dispatch_and_combine,
    needs_two_devices,
    plan_of,
    trace,
)
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep


class TestPlace:
    """Where the operations may be called."""

    @pytest.mark.parametrize("how", ("eager", "jit", "vmap"))
    def test_outside_shard_map(self, how):
        topk_idx = arguments()[1]
        wrap = {"eager": lambda f: f, "jit": jax.jit, "vmap": jax.vmap}[how]
        topk_idx = topk_idx[None] if how == "vmap" else topk_idx
        message = (
            "jax_ep.make_plan: call it inside jax.shard_map over the "
            f"communicator's mesh {SIZES}; found no manual mesh axis here"
        )
        assert_raises(ValueError, message, wrap(plan_of), topk_idx)

    def test_plan_outside_shard_map(self):
        """A plan that left shard_map is data; its operations stay inside."""

        def body(x, topk_idx, rows):
            return layers.wrap_plan(plan_of(topk_idx))

        plan = jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), trace(body))
        for op, rows in (("dispatch", TOKENS), ("combine", CAPACITY)):
            message = (
                f"jax_ep.{op}: call it inside jax.shard_map over the "
                f"communicator's mesh {SIZES}; found no manual mesh axis here"
            )
            f = functools.partial(getattr(jax_ep, op), jnp.ones((rows, 2)))
            assert_raises(ValueError, message, f, plan)

    @needs_two_devices
    @pytest.mark.parametrize("set_mesh", (True, False))
    @pytest.mark.parametrize(
        "shape",
        ({"expert": RANKS}, {"ep": RANKS // 2}, {"data": 1, "ep": RANKS}),
        ids=str,
    )
    def test_under_another_mesh(self, shape, set_mesh):
        mesh = layers.mesh(shape)
        message = (
            "jax_ep.make_plan: the surrounding shard_map must use the "
            f"communicator's mesh {SIZES}, found {shape}"
        )
        if set_mesh:
            with jax.set_mesh(mesh):
                assert_raises(ValueError, message, trace, dispatch_and_combine, mesh)
        else:
            assert_raises(ValueError, message, trace, dispatch_and_combine, mesh)

    @needs_two_devices
    @pytest.mark.parametrize("op", ("dispatch", "combine"))
    def test_plan_of_another_communicator(self, op):
        """There is one way to get it wrong: a plan under another mesh."""
        other = layers.mesh({"data": 1, "ep": RANKS})
        plan = jax.tree.map(
            lambda a: jnp.zeros(a.shape, a.dtype),
            trace(lambda x, idx, rows: layers.wrap_plan(plan_of(idx))),
        )

        def body(x, topk_idx, rows):
            leaf = x if op == "dispatch" else rows
            mine = jax.tree.map(lambda a: a[0], plan)
            return getattr(jax_ep, op)(leaf, mine)

        message = (
            f"jax_ep.{op}: the surrounding shard_map must use the communicator's "
            f"mesh {SIZES}, found {{'data': 1, 'ep': {RANKS}}}"
        )
        assert_raises(ValueError, message, trace, body, other)

    @needs_two_devices
    def test_plans_of_two_communicators_do_not_mix(self):
        mesh = layers.mesh({"ep": RANKS})
        other = jax_ep.Communicator(mesh, "ep", backend=NATIVE, timeout_s=9.0)

        def body(x, topk_idx, rows):
            plan = jax.lax.cond(
                True,
                lambda: plan_of(topk_idx),
                lambda: plan_of(topk_idx, comm=other),
            )
            return jax_ep.dispatch(x, plan)

        with pytest.raises(TypeError, match="must have the same pytree"):
            trace(body)
        other.close()

    @needs_two_devices
    @pytest.mark.parametrize("how", ("mesh_argument", "set_mesh"))
    @pytest.mark.parametrize("axis_type", (AxisType.Auto, AxisType.Explicit), ids=str)
    def test_other_order_of_devices(self, axis_type, how):
        """The same sizes, but other devices at the ranks' places.

        Where this can only be seen when the program runs: other_mesh_test.py.
        """
        devices = jax.devices()[:RANKS]
        mine = layers.mesh({"ep": RANKS}, axis_type, devices=devices)
        comm = layers.communicator(mine, "ep", NATIVE)
        other = Mesh(devices[::-1], ("ep",), axis_types=(axis_type,))
        body = functools.partial(dispatch_and_combine, comm=comm)
        args = arguments(other)
        kwargs = {"in_specs": P("ep"), "out_specs": P("ep")}
        ids = [d.id for d in devices]
        message = (
            "jax_ep: the surrounding shard_map must use the communicator's mesh, "
            f"found another order of devices: {ids[::-1]} instead of {ids}"
        )
        if how == "set_mesh":
            with jax.set_mesh(other):
                f = jax.jit(jax.shard_map(body, **kwargs))
                assert_raises(ValueError, message, f, *args)
            return
        f = jax.jit(jax.shard_map(body, mesh=other, **kwargs))
        assert_raises(ValueError, message, f, *args)

    @needs_two_devices
    def test_nested(self):
        """JAX does not tell an inner shard_map its devices; the run does."""
        mesh = layers.mesh({"data": 1, "ep": RANKS})
        comm = layers.communicator(mesh, "ep", NATIVE)

        def outer(*args):
            inner = functools.partial(dispatch_and_combine, comm=comm)
            return jax.shard_map(
                inner, in_specs=P("ep"), out_specs=P("ep"), axis_names={"ep"}
            )(*args)

        f = jax.jit(
            jax.shard_map(
                outer,
                mesh=mesh,
                in_specs=P("data"),
                out_specs=P("data"),
                axis_names={"data"},
            )
        )
        args = jax.device_put(arguments(), NamedSharding(mesh, P(("data", "ep"))))
        alone = jax.block_until_ready(f(*args))
        with jax.set_mesh(mesh):
            jax.tree.map(np.testing.assert_array_equal, f(*args), alone)

    @needs_two_devices
    def test_other_devices(self):
        if jax.device_count() < 2 * RANKS:
            pytest.skip(f"needs {2 * RANKS} devices")
        devices = jax.devices()[RANKS : 2 * RANKS]
        other = layers.mesh({"ep": RANKS}, devices=devices)
        f = jax.jit(layers.sharded(dispatch_and_combine, other, out_specs=P("ep")))
        ids = [d.id for d in devices], list(range(RANKS))
        message = (
            "jax_ep: the surrounding shard_map must use the communicator's mesh, "
            f"found another order of devices: {ids[0]} instead of {ids[1]}"
        )
        assert_raises(ValueError, message, f, *arguments(other))


EXPLICIT_LEFT_OUT = (
    "jax_ep.make_plan: every mesh axis of more than one device must be manual in the "
    "surrounding shard_map, found Explicit ['{axis}'] left out. jax.vmap over a batch "
    "that is split over an Explicit axis leaves it out: call jax.vmap inside "
    "shard_map, whose specs then name the axis for the batch, or make the axis Auto "
    "and call jax.vmap(..., spmd_axis_name='{axis}'). Without vmap, leave out "
    "axis_names= or name all axes"
)


class TestSplitBatch:
    """A batch that is split over another axis than the experts'."""

    RANKS, BATCH, TOKENS = 2, 4, 6

    def parts(self, axis_type):
        mesh = layers.mesh({"stage": 2, "ep": self.RANKS}, axis_type)
        comm = layers.communicator(mesh, "ep", NATIVE)

        def layer(x, ids):
            plan = jax_ep.make_plan(ids, comm=comm, num_experts=4)
            return jax_ep.combine(2 * jax_ep.dispatch(x, plan), plan)

        shape = self.BATCH, self.RANKS * self.TOKENS
        x = np.arange(4.0 * np.prod(shape), dtype=np.float32).reshape(*shape, 4)
        # Each element of the batch has a routing of its own.
        ids = np.arange(np.prod(shape), dtype=np.int32).reshape(*shape, 1) % 3
        split = NamedSharding(mesh, P("stage", "ep"))
        return mesh, layer, jax.device_put((x, ids), split)

    def check(self, mesh, f, args):
        def loss(x, ids):
            return (f(x, ids) ** 2).sum()

        with jax.set_mesh(mesh):
            y = jax.jit(f)(*args)
            gradient = jax.jit(jax.grad(loss))(*args)
        np.testing.assert_array_equal(y, 2 * np.asarray(args[0]))
        np.testing.assert_array_equal(gradient, 8 * np.asarray(args[0]))
        assert y.sharding.is_equivalent_to(args[0].sharding, 3)

    def test_vmap_of_the_layer(self):
        mesh, layer, args = self.parts(AxisType.Explicit)
        f = jax.vmap(jax.shard_map(layer, in_specs=P("ep"), out_specs=P("ep")))
        with jax.set_mesh(mesh):
            message = EXPLICIT_LEFT_OUT.format(axis="stage")
            assert_raises(ValueError, message, jax.jit(f), *args)

    @pytest.mark.parametrize("axis_type", (AxisType.Auto, AxisType.Explicit), ids=str)
    def test_vmap_inside(self, axis_type):
        mesh, layer, args = self.parts(axis_type)
        spec = P("stage", "ep")
        f = jax.shard_map(jax.vmap(layer), mesh=mesh, in_specs=spec, out_specs=spec)
        self.check(mesh, f, args)

    def test_spmd_axis_name(self):
        mesh, layer, args = self.parts(AxisType.Auto)
        f = jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        self.check(mesh, jax.vmap(f, spmd_axis_name="stage"), args)
