"""What holds native state is one thing: copies are itself, and files cannot have it."""

from __future__ import annotations

import copy
import pickle
import re

import harness
import jax
import layers
import numpy as np
import pytest
from bad_input import NATIVE, RANKS, arguments, assert_raises, plan_of, trace

import jax_ep


def communicator():
    return jax_ep.Communicator(layers.mesh({"ep": RANKS}), "ep", backend=NATIVE)


@pytest.fixture(params=("Communicator", "LowLatencyBuffer"))
def held(request):
    with communicator() as comm:
        if request.param == "Communicator":
            yield comm
            return
        with jax_ep.LowLatencyBuffer(
            comm, max_tokens=2, hidden=16, num_experts=RANKS
        ) as buffer:
            yield buffer


@pytest.mark.parametrize("make", (copy.copy, copy.deepcopy))
def test_copies_are_itself(held, make):
    assert make(held) is held
    assert make([held, {"a": held}])[0] is held
    assert not held.closed


def test_pickle_says_why_not(held):
    message = (
        f"jax_ep.{type(held).__name__}: it holds memory of this process and its "
        "devices and cannot be pickled; leave it out of what is saved or sent, and "
        "make one in each process that needs it"
    )
    assert_raises(TypeError, message, pickle.dumps, held)
    assert_raises(TypeError, message, pickle.dumps, {"model": [held]})


def test_deepcopy_of_a_plan_and_of_a_module():
    nnx = pytest.importorskip("flax.nnx")

    def body(x, topk_idx, rows):
        plan = plan_of(topk_idx)
        assert copy.deepcopy(plan).comm is plan.comm
        return plan.recv_src

    trace(body)

    class Layer(nnx.Module):
        def __init__(self, comm, rngs):
            self.comm = comm
            self.linear = nnx.Linear(2, 3, rngs=rngs)

    with communicator() as comm:
        layer = Layer(comm, nnx.Rngs(0))
        other = copy.deepcopy(layer)
        assert other.comm is comm
        assert other.linear is not layer.linear
        np.testing.assert_array_equal(
            other.linear.kernel[...], layer.linear.kernel[...]
        )
        del layer, other
        assert not comm.closed


def test_trace_that_holds_a_closed_communicator():
    """JAX reuses the trace of an inner function; the new outer one compiles it."""
    mesh = layers.mesh({"ep": RANKS})
    comms = [communicator()]

    def body(x, topk_idx, rows):
        return jax_ep.dispatch(x, plan_of(topk_idx, comm=comms[-1]))

    inner = jax.jit(layers.sharded(body, mesh))
    want = np.asarray(inner(*arguments()))
    closed = comms[0].id
    comms[0].close()
    comms.append(communicator())
    with pytest.raises((RuntimeError, jax.errors.JaxRuntimeError)) as info:
        jax.block_until_ready(jax.jit(lambda *args: 1 * inner(*args))(*arguments()))
    assert re.search(
        rf"jax_ep: communicator {closed} is closed or was not set up for platform \w+; "
        r"an executable has to be compiled while its communicator is open\. Where "
        "there is a new communicator, an old trace holds the closed one: make the "
        r"jitted function anew, or call jax\.clear_caches\(\)",
        str(info.value),
    )
    # Both ways out.
    anew = jax.jit(layers.sharded(lambda *args: body(*args), mesh))
    np.testing.assert_array_equal(jax.jit(lambda *a: 1 * anew(*a))(*arguments()), want)
    jax.clear_caches()
    np.testing.assert_array_equal(jax.jit(lambda *a: 1 * inner(*a))(*arguments()), want)
    comms[-1].close()


def test_traced_sizes_of_other_functions():
    calls = {
        "LowLatencyBuffer: max_tokens": lambda n, comm: jax_ep.LowLatencyBuffer(
            comm, max_tokens=n, hidden=16, num_experts=4
        ),
        "LowLatencyBuffer: hidden": lambda n, comm: jax_ep.LowLatencyBuffer(
            comm, max_tokens=2, hidden=n, num_experts=4
        ),
        "quantize_fp8: block": lambda n, _: jax_ep.quantize_fp8(np.ones((2, 8)), n),
    }
    with communicator() as comm:
        for name, call in calls.items():
            message = (
                f"jax_ep.{name} is static, found a traced int32[]; give a number that "
                "is known while JAX traces: one that the function closes over, or an "
                "argument that jax.jit(..., static_argnames=...) names"
            )
            traced = jax.jit(lambda n, call=call: call(n, comm))
            assert_raises(TypeError, message, traced, 8)


def test_numpy_integers_are_sizes():
    ranks = np.int64(harness.most_ranks())
    mesh = layers.mesh({"ep": int(ranks)})
    with jax_ep.Communicator(
        mesh,
        "ep",
        backend="xla",
        num_sms=np.int32(3),
        num_channels=np.array(2),
        staging_bytes=np.int64(1 << 20),
        node_size=ranks,
    ) as comm:
        assert type(comm.node_size) is int
        buffer = jax_ep.LowLatencyBuffer(
            comm, max_tokens=np.int64(2), hidden=np.uint8(16), num_experts=ranks
        )
        assert type(buffer.max_tokens) is type(buffer.hidden) is int
        buffer.close()
    sizes = {"num_ranks": 4, "max_tokens": 8, "hidden": 16}
    assert jax_ep.LowLatencyBuffer.bytes_for(
        **jax.tree.map(np.int64, sizes)
    ) == jax_ep.LowLatencyBuffer.bytes_for(**sizes)
    x = np.ones((2, 256), np.float32)
    q, scales = jax_ep.quantize_fp8(x, np.int64(128))
    np.testing.assert_array_equal(jax_ep.dequantize_fp8(q, scales, np.uint8(128)), x)
