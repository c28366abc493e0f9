"""A mixture-of-experts layer whose shared expert runs while rows travel.

python examples/shared_expert.py    # on all GPUs, or on 8 virtual CPU devices
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

jax.config.update("jax_num_cpu_devices", 8)  # has to come before the first array
jax.config.update("jax_default_matmul_precision", "highest")  # for the check below

mesh = jax.make_mesh((jax.device_count(),), ("ep",))
comm = jax_ep.Communicator(mesh, "ep")

ranks = comm.num_ranks
T, H, F = 64, 32, 128  # tokens of one rank, their width, an expert's inner width
E, K = 2 * ranks, 2  # experts in all, experts that each token visits


def mlp(w_in, w_out, x):
    return jax.nn.gelu(x @ w_in) @ w_out


def routed(w_in, w_out, rows, plan, weights):
    """What this rank's experts make of the rows that came."""

    def experts(rows, group_sizes):
        hidden = jax.nn.gelu(jax_ep.ragged_dot(rows, w_in, group_sizes))
        return jax_ep.ragged_dot(hidden, w_out, group_sizes)

    rows = experts(jax_ep.permute(rows, plan), plan.group_sizes)
    return jax_ep.unpermute(rows, plan, weights)


def route(router, x):
    weights, experts = jax.lax.top_k(jax.nn.softmax(x @ router), K)
    return jax_ep.make_plan(experts, comm=comm, num_experts=E), weights


def overlapped_layer(router, shared_in, shared_out, w_in, w_out, x):
    plan, weights = route(router, x)
    # Rows leave; the first half of the shared expert runs; rows are there.
    flight = jax_ep.dispatch_start((x, weights), plan)
    flight, hidden = jax_ep.overlap(
        flight, lambda w, x: jax.nn.gelu(x @ w), shared_in, x
    )
    rows, row_weights = jax_ep.dispatch_done(flight)
    y = routed(w_in, w_out, rows, plan, row_weights)
    # The same on the way home, with the second half.
    flight = jax_ep.combine_start(y, plan)
    flight, shared = jax_ep.overlap(flight, jnp.matmul, hidden, shared_out)
    return jax_ep.combine_done(flight) + shared


def plain_layer(router, shared_in, shared_out, w_in, w_out, x):
    """The same without overlap."""
    plan, weights = route(router, x)
    rows, row_weights = jax_ep.dispatch((x, weights), plan)
    y = routed(w_in, w_out, rows, plan, row_weights)
    return jax_ep.combine(y, plan) + mlp(shared_in, shared_out, x)


# Router and shared expert are on every rank; experts and tokens are split.
specs = P(), P(), P(), P("ep"), P("ep"), P("ep")
shapes = (H, E), (H, F), (F, H), (E, H, F), (E, F, H), (ranks * T, H)
keys = jax.random.split(jax.random.key(0), len(shapes))
args = [0.2 * jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True)]
args = jax.device_put(args, [NamedSharding(mesh, spec) for spec in specs])


def output_and_gradients(layer):
    layer = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("ep"))
    loss = lambda *args: (layer(*args) ** 2).sum()  # noqa: E731
    gradients = jax.grad(loss, argnums=range(6))
    return jax.jit(lambda *args: (layer(*args), *gradients(*args)))(*args)


print(f"{ranks} {jax.default_backend()} devices, backend {comm.backend!r}")
print(f"{'':10} max |overlapped - plain| / max |plain|")
names = ("output", *"router shared_in shared_out w_in w_out x".split())
pairs = zip(output_and_gradients(overlapped_layer), output_and_gradients(plain_layer))
for name, (a, b) in zip(names, pairs, strict=True):
    print(f"{name:10} {jnp.abs(a - b).max() / jnp.abs(b).max():.1e}")
