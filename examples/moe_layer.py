"""One mixture-of-experts layer with jax_ep: forward, gradient, and a check.

python examples/moe_layer.py    # on all GPUs, or on 8 virtual CPU devices
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


def route(router, x):
    """The K best experts of each token, and how much each of them counts."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(x @ router), K)
    return experts, weights / weights.sum(-1, keepdims=True)


def expert_sum(w_in, w_out, x, experts, weights):
    """Sum over k of weights[:, k] * MLP of expert experts[:, k]; -1 is no expert."""
    y = jnp.zeros_like(x)
    for e in range(w_in.shape[0]):
        weight = jnp.where(experts == e, weights, 0).sum(-1, keepdims=True)
        y += weight * (jax.nn.gelu(x @ w_in[e]) @ w_out[e])
    return y


def moe_layer(router, w_in, w_out, x):
    """What one rank does with its own tokens x [T, H] and its own experts."""
    experts, weights = route(router, x)
    plan = jax_ep.make_plan(experts, comm=comm, num_experts=E)  # who goes where
    rows, row_weights = jax_ep.dispatch((x, weights), plan)  # tokens for my experts
    y = expert_sum(w_in, w_out, rows, plan.recv_topk_idx, row_weights)
    return jax_ep.combine(y, plan)  # back home, summed over the ranks: [T, H]


def dense_layer(router, w_in, w_out, x):
    """The same layer without jax_ep: every expert sees every token."""
    return expert_sum(w_in, w_out, x, *route(router, x))


def output_and_gradients(layer):
    """Jits the output of a layer and the gradients of sum(output ** 2)."""
    loss = lambda *args: (layer(*args) ** 2).sum()  # noqa: E731
    gradients = jax.grad(loss, argnums=range(4))
    return jax.jit(lambda *args: (layer(*args), *gradients(*args)))


# The router is on every rank; experts and tokens are split over the ranks.
specs = P(), P("ep"), P("ep"), P("ep")
parallel_layer = jax.shard_map(moe_layer, mesh=mesh, in_specs=specs, out_specs=P("ep"))

shapes = (H, E), (E, H, F), (E, F, H), (ranks * T, H)
keys = jax.random.split(jax.random.key(0), 4)
args = [0.2 * jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True)]
placed = jax.device_put(args, [NamedSharding(mesh, spec) for spec in specs])
ours = output_and_gradients(parallel_layer)(*placed)
dense = output_and_gradients(dense_layer)(*args)

print(
    f"{E} experts on {ranks} {jax.default_backend()} devices, backend {comm.backend!r}"
)
print(f"{'':9} {'shape':14} max |jax_ep - dense| / max |dense|")
for name, a, b in zip(("output", *"router w_in w_out x".split()), ours, dense):
    print(f"{name:9} {a.shape!s:14} {jnp.abs(a - b).max() / jnp.abs(b).max():.1e}")
