"""Run by errors_test in a process of its own: programs that some ranks skip.

Prints one line of JSON: what each operation raised, and in "late" what each rank of
a dispatch got to which one comes when the others have given up, in "patient" where they
wait longer.
"""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

import jax_ep  # noqa: E402
from jax_ep._setup import request  # noqa: E402

RANKS, TOKENS, EXPERTS = 4, 6, 8
ABSENT = {"plan": (0,), "dispatch": (2,), "combine": (1, 3)}


def program(comm, last, absent):
    """A program that ends with the operation `last`, which `absent` skip."""

    def body(x, topk_idx):
        def make_plan():
            return jax_ep.make_plan(topk_idx, comm=comm, num_experts=EXPERTS)

        plan = None if last == "plan" else make_plan()

        def rest(x):
            if last == "plan":
                return x + make_plan().num_recv.astype(x.dtype)
            if last == "dispatch":
                return x + jax_ep.dispatch(x, plan)[:TOKENS]
            return x + jax_ep.combine(jnp.tile(x, (RANKS, 1)), plan)

        skip = jnp.isin(lax.axis_index("ep"), jnp.array(absent, jnp.int32))
        return lax.cond(skip, lambda x: x, rest, x)

    spec = P("ep")
    return jax.jit(jax.shard_map(body, mesh=comm.mesh, in_specs=spec, out_specs=spec))


def late_program(comm, late, seconds):
    """A dispatch to which the rank `late` comes `seconds` after the others."""

    def sleep(x):
        time.sleep(seconds)
        return np.asarray(x)

    def body(x, topk_idx):
        plan = jax_ep.make_plan(topk_idx, comm=comm, num_experts=EXPERTS)
        x = lax.cond(
            lax.axis_index("ep") == late,
            lambda x: jax.pure_callback(sleep, x, x),
            lambda x: x,
            x,
        )
        return jax_ep.dispatch(x, plan)

    spec = P("ep")
    return jax.jit(
        jax.shard_map(
            body, mesh=comm.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    )


def message(shard):
    try:
        jax.block_until_ready(shard.data)
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


def main():
    mesh = jax.make_mesh((RANKS,), ("ep",), axis_types=(AxisType.Auto,))
    comm = jax_ep.Communicator(mesh, "ep", backend="cpu", timeout_s=0.5)
    x = np.arange(RANKS * TOKENS * 2, dtype=np.float32).reshape(-1, 2)
    topk_idx = (np.arange(RANKS * TOKENS, dtype=np.int32) % EXPERTS)[:, None]
    healthy = program(comm, "combine", ())
    before = np.asarray(healthy(x, topk_idx))
    messages = {}
    for last, absent in ABSENT.items():
        try:
            jax.block_until_ready(program(comm, last, absent)(x, topk_idx))
        except jax.errors.JaxRuntimeError as error:
            messages[last] = str(error)
        # The process goes on, and so does the communicator.
        np.testing.assert_array_equal(healthy(x, topk_idx), before)
    rows = late_program(comm, late=3, seconds=1.5)(x, topk_idx)
    messages["late"] = [message(shard) for shard in rows.addressable_shards]
    np.testing.assert_array_equal(healthy(x, topk_idx), before)
    request._WARN_AFTER_S = 1.0
    patient = jax_ep.Communicator(mesh, "ep", backend="cpu", timeout_s=60.0)
    rows = late_program(patient, late=3, seconds=3.0)(x, topk_idx)
    messages["patient"] = [message(shard) for shard in rows.addressable_shards]
    print(json.dumps(messages))


if __name__ == "__main__":
    main()
