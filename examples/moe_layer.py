"""One mixture-of-experts layer with jax_ep: forward, gradient, and a check.

python examples/moe_layer.py    # on all GPUs, or on 8 virtual CPU devices
"""

import functools

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
T, H, F = 64, 64, 128  # tokens of one rank, their width, an expert's inner width
E, K = 2 * ranks, 2  # experts in all, experts that each token visits


def route(router, x):
    """The K best experts of each token, and how much each of them counts."""
    logits = x.astype(jnp.float32) @ router.astype(jnp.float32)
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits), K)
    return experts, weights / weights.sum(-1, keepdims=True)


def moe_layer(router, w_gate, w_up, w_down, x):
    """What one rank does with its own tokens x [T, H] and its own experts."""
    experts, weights = route(router, x)
    mlps = functools.partial(jax_ep.gated_mlp, w_gate=w_gate, w_up=w_up, w_down=w_down)
    return jax_ep.moe(x, experts, weights, mlps, comm=comm, num_experts=E)


def dense_layer(router, w_gate, w_up, w_down, x):
    """The same layer without jax_ep: every expert sees every token."""
    experts, weights = route(router, x)
    y = jnp.zeros_like(x)
    for e in range(E):
        weight = jnp.where(experts == e, weights, 0).sum(-1, keepdims=True)
        hidden = jax.nn.silu(x @ w_gate[e]) * (x @ w_up[e])
        y += weight * (hidden @ w_down[e])
    return y


def output_and_gradients(layer):
    """Jits the output of a layer and the gradients of sum(output ** 2)."""
    loss = lambda *args: (layer(*args).astype(jnp.float32) ** 2).sum()  # noqa: E731
    gradients = jax.grad(loss, argnums=range(5))
    return jax.jit(lambda *args: (layer(*args), *gradients(*args)))


# The router is on every rank; experts and tokens are split over the ranks.
specs = P(), P("ep"), P("ep"), P("ep"), P("ep")
parallel_layer = jax.shard_map(moe_layer, mesh=mesh, in_specs=specs, out_specs=P("ep"))

shapes = (H, E), (E, H, F), (E, H, F), (E, F, H), (ranks * T, H)
keys = jax.random.split(jax.random.key(0), 5)
args = [jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True)]
args = [(0.2 * a).astype(jnp.bfloat16) for a in args]  # GPUs multiply 16 bits fast
placed = jax.device_put(args, [NamedSharding(mesh, spec) for spec in specs])
ours = output_and_gradients(parallel_layer)(*placed)
ours = [a.astype(jnp.float32) for a in ours]
dense = output_and_gradients(dense_layer)(*(a.astype(jnp.float32) for a in args))

print(
    f"{E} experts on {ranks} {jax.default_backend()} devices, backend {comm.backend!r}"
)
print(f"{'':9} {'shape':14} max |jax_ep - dense| / max |dense|")
for name, a, b in zip(("output", *"router w_gate w_up w_down x".split()), ours, dense):
    print(f"{name:9} {a.shape!s:14} {jnp.abs(a - b).max() / jnp.abs(b).max():.1e}")
