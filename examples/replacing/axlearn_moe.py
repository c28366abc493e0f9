"""AXLearn's layer of experts, by jax_ep.

    class Layer(ApproximateTokenDropFreeMoE):
        _dispatch_and_combine = functools.partialmethod(
            axlearn_moe.dispatch_and_combine, comm=comm
        )

takes x [batch, sequence, M] and gives what that method does. `comm` is of the axis
"expert" of the mesh. `glu` stands for the configuration's pair of activations, which is
("nn.silu", "linear") here.

    python examples/replacing/axlearn_moe.py    # compares both, with axlearn
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep


def silu_linear(gate, up):
    return jax.nn.silu(gate) * up


def dispatch_and_combine(self, x, *, comm, glu=silu_linear):
    cfg, params = self.config, self.parameters
    logits = jnp.einsum("bsm,me->bse", x, params["gate_weight"]).astype(jnp.float32)
    gating = self.gating(logits, cfg.seq_load_balance_loss_weight)
    matrices = [params[f"{name}_weight"] for name in ("wi_0", "wi_1", "wo")]
    inputs = x, gating.gate_assignment, gating.expert_weights, matrices
    sizes = limits(cfg, gating.gate_assignment, comm)
    y, stats = jax_ep.sharded_moe(*inputs, functools.partial(experts, glu), **sizes)
    return report(self, gating, stats, y)


def limits(cfg, ids, comm):
    """How tokens are split, and the choices that a rank's experts take."""
    spec = P(*cfg.input_dim_to_partition_spec["bsm"][:2])
    pairs = math.prod(NamedSharding(comm.mesh, spec).shard_shape(ids.shape))
    limit = int(pairs * cfg.expert_parallel_capacity)
    drops = {"expert_limit": limit, "drop_order": "source"}
    return drops | {"comm": comm, "num_experts": cfg.num_experts, "token_spec": spec}


def experts(glu, params, rows, group_sizes, group_alignment):
    """One rank's experts."""
    options = {"glu": glu, "group_alignment": group_alignment}
    return jax_ep.gated_mlp(rows, group_sizes, *params, **options)


def report(self, gating, stats, y):
    """Leaves the auxiliary loss and the count of dropped tokens where AXLearn does."""
    cfg = self.config
    loss = gating.load_balance_loss * cfg.load_balance_loss_weight
    loss += gating.router_z_loss * cfg.router_z_loss_weight
    loss += gating.seq_load_balance_loss * (cfg.seq_load_balance_loss_weight or 0)
    self.add_module_output("aux_loss", loss)
    self.add_summary("ep_dropped_tokens", stats.dropped_pairs)
    return y


def main():
    import compare

    if not compare.installed(
        "axlearn", "'axlearn @ git+https://github.com/apple/axlearn'"
    ):
        return None
    from axlearn.common import mixture_of_experts as moe
    from axlearn.common.module import functional

    mesh = compare.make_mesh(AxisType.Auto, data=2, expert=2, fsdp=1, seq=1, model=1)
    # XLA for CPUs knows no ragged all-to-all: there all experts are on every device.
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    parallel = moe.ApproximateTokenDropFreeMoE
    theirs = moe.TransformerFeedForwardDropFreeMoE if on_cpu else parallel

    class Ours(parallel):
        _dispatch_and_combine = functools.partialmethod(
            dispatch_and_combine, comm=jax_ep.Communicator(mesh, "expert")
        )

    options = {
        "name": "layer",
        "input_dim": 16,
        "hidden_dim": 24,
        "num_experts": 8,
        "num_groups": 1,
        "outer_batch": 1,
        "structure": "nonorm",
        "activation": ("nn.silu", "linear"),
        "gating": moe.TopKDropFreeGating.default_config(),
        "tiling": (8, 8, 8),
        "interpret": on_cpu,
        "preferred_element_type": jnp.float32,
    }
    room = {"expert_parallel_capacity": 2.0}  # for all tokens on one of two ranks
    with mesh:
        layers = [
            kind.default_config().set(**options, **more).instantiate(parent=None)
            for kind, more in ((theirs, {} if on_cpu else room), (Ours, room))
        ]
        params = layers[0].initialize_parameters_recursively(jax.random.key(0))
        runs = [_run(functional, layer) for layer in layers]
        return compare.differences(*runs, compare.normal(1, 4, 8, 16), params)


def _run(functional, layer):
    def run(x, params):
        inputs = {"inputs": x}
        y, _ = functional(layer, jax.random.key(1), params, inputs, is_training=True)
        return y, ()

    return run


if __name__ == "__main__":
    main()
