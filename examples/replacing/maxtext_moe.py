"""MaxText's `RoutedMoE.sparse_matmul`, by jax_ep.

    RoutedMoE.sparse_matmul = functools.partialmethod(
        maxtext_moe.sparse_matmul, comm=jax_ep.Communicator(mesh, "expert")
    )

takes the arguments of that method and gives its results, in every layer from then on.
The batch is split over the whole mesh.

    python examples/replacing/maxtext_moe.py    # compares both, with maxtext
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import jax_ep

KERNELS = ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")


def sparse_matmul(
    self,
    inputs,  # [batch, sequence, H]
    gate_logits,  # [batch, sequence, E]
    pre_bias_logits,
    *kernels,  # of gate, up and down; then biases or None
    comm,
    **routing,  # input_ids, forced_routed_experts
):
    topk_weights, topk_idx = self.get_topk(gate_logits, pre_bias_logits, **routing)
    params = dict(zip(KERNELS, kernels, strict=True))
    x, params = jax.tree.map(lambda a: a.astype(self.dtype), (inputs, params))
    layer = functools.partial(jax_ep.sharded_moe, x, topk_idx, topk_weights, params)
    sizes = {"num_experts": self.num_experts} | capacity(self, topk_idx, comm)
    y, stats = layer(functools.partial(experts, self), comm=comm, **sizes)
    loss = balance_loss(self, topk_idx, gate_logits)
    return y, loss, bias_updates(self, stats)


def experts(self, params, rows, group_sizes, group_alignment):
    """One rank's experts, with the activation that the configuration names."""

    def glu(gate, up):
        return self.apply_ffn_activation(gate, up).astype(gate.dtype)

    options = params | {"group_alignment": group_alignment}
    return jax_ep.gated_mlp(rows, group_sizes, glu=glu, **options)


def capacity(self, topk_idx, comm) -> dict[str, Any]:
    """Rows of a rank's experts: as many as ragged_buffer_factor says, if it does."""
    factor = self.config.ragged_buffer_factor
    if factor <= 0:
        return {}
    pairs = topk_idx.size // comm.mesh.size
    order = "expert" if self.config.use_ring_of_experts else "source"
    return {"expert_limit": int(pairs * factor), "drop_order": order}


def balance_loss(self, topk_idx, gate_logits):
    if self.config.load_balance_loss_weight <= 0:
        return None
    probabilities = jax.nn.softmax(gate_logits.astype(jnp.float32)).astype(self.dtype)
    return self.load_balance_loss(topk_idx, probabilities)


def bias_updates(self, stats):
    """Up for experts that got too little, down for the others."""
    if not self.should_update_load_balance():
        return None
    counts = stats.expert_counts.astype(jnp.float32)
    return self.config.routed_bias_update_rate * jnp.sign(counts.mean() - counts)


def main():
    import compare

    if not compare.installed("maxtext", "maxtext"):
        return None
    jax.config.update("jax_num_cpu_devices", 4)
    from flax import nnx
    from maxtext.configs import pyconfig
    from maxtext.layers import initializers, moe
    from maxtext.utils import maxtext_utils

    config = pyconfig.initialize(
        ["", str(pathlib.Path(pyconfig.__file__).with_name("base.yml"))],
        run_name="compare",
        enable_checkpointing=False,
        decoder_block="mixtral",
        base_emb_dim=16,
        base_mlp_dim=24,
        base_moe_mlp_dim=24,
        num_experts=8,
        num_experts_per_tok=2,
        max_target_length=8,
        per_device_batch_size=2,
        dtype="float32",
        matmul_precision="highest",
        sparse_matmul=True,
        megablox=False,
        # XLA for CPUs knows no ragged all-to-all, and the kernels are for TPUs.
        use_ring_of_experts=True,
        use_ragged_sort=True,
        ragged_gather_fallback=True,
        ragged_gather_reduce_fallback=True,
        load_balance_loss_weight=0.01,
        ici_fsdp_parallelism=2,
        ici_expert_parallelism=2,
    )
    mesh = Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    layer = moe.RoutedMoE(
        config=config,
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        mesh=mesh,
        kernel_init=initializers.nd_dense_init(1.0, "fan_in", "truncated_normal"),
        kernel_axes=("embed", "mlp"),
        intermediate_dim=24,
        rngs=nnx.Rngs(0),
    )
    args = [compare.normal(1, 8, 8, 16), compare.normal(2, 8, 8, 8)]
    args += [kernel[...] for kernel in (layer.wi_0, layer.wi_1, layer.wo)]

    parts = nnx.split(layer)  # theirs leaves statistics in the layer

    def run(function):
        def method(x, gate_logits, *kernels):
            inputs = x, gate_logits, None, *kernels, None, None, None
            return function(nnx.merge(*parts), *inputs)[:2]

        return method

    ours = functools.partial(sparse_matmul, comm=jax_ep.Communicator(mesh, "expert"))
    with mesh:
        theirs = moe.RoutedMoE.sparse_matmul
        return compare.differences(run(theirs), run(ours), *args)


if __name__ == "__main__":
    main()
