"""A byte-level transformer whose MLPs are mixtures of experts, on flax.nnx.

The model runs inside jax.shard_map: each rank holds its own sequences, its own
experts and a copy of everything else. Only `MoE` talks to other ranks.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_ep


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that says what the parameters are; checkpoints keep it."""

    vocabulary: int = 256
    context: int = 128  # tokens that attention looks back over
    layers: int = 2
    width: int = 128
    heads: int = 4
    experts: int = 8
    top_k: int = 2
    expert_width: int = 192
    # Room for tokens, as a multiple of what is needed when every expert is equally
    # busy. What finds no room is dropped, and reported.
    capacity_factor: float = 1.5


class Experts(nnx.Module):
    """One gated MLP per expert. Each rank holds a slice of the leading axis.

    In float32, which is exact and small. On GPUs products are fast in bfloat16 alone,
    and a warning says so.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        shape = config.experts, config.width, config.expert_width
        self.w_gate = nnx.Param(init(rngs.params(), shape))
        self.w_up = nnx.Param(init(rngs.params(), shape))
        self.w_down = nnx.Param(init(rngs.params(), (shape[0], shape[2], shape[1])))

    def __call__(self, rows, group_sizes, group_alignment=1):
        """rows [S, H], those of each expert together, group_sizes[e] of expert e."""
        return jax_ep.gated_mlp(
            rows,
            group_sizes,
            self.w_gate[...],
            self.w_up[...],
            self.w_down[...],
            group_alignment=group_alignment,
        )


class MoE(nnx.Module):
    """Router and the layer that jax_ep makes of it."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.router = nnx.Linear(
            config.width, config.experts, use_bias=False, rngs=rngs
        )
        self.experts = Experts(config, rngs)

    def __call__(self, x, comm: jax_ep.Communicator):
        """x [T, H], this rank's tokens -> [T, H], and what happened on the way."""
        probabilities = jax.nn.softmax(self.router(x))
        weights, experts = jax.lax.top_k(probabilities, self.config.top_k)
        weights /= weights.sum(-1, keepdims=True)

        plan = jax_ep.make_plan(
            experts,
            comm=comm,
            num_experts=self.config.experts,
            capacity_factor=self.config.capacity_factor,
            expert_alignment=None,  # what products are fastest with
        )
        # Tokens to their experts and back; the weights travel along, and so does
        # their gradient on the way home.
        y = jax_ep.moe_with_plan(x, weights, self.experts, plan)
        served = jnp.minimum(plan.expert_counts, plan.group_sizes).sum()
        statistics = {
            "balance_loss": balance_loss(probabilities, experts, comm),
            # Choices of the router that found room on the rank and among its rows.
            "served": served / experts.size,
        }
        return y, statistics


def balance_loss(probabilities, experts, comm: jax_ep.Communicator):
    """1 when all experts are equally busy, more when the router has favourites.

    That is E * sum over e of (share of choices that went to e) * (mean probability
    of e), from the Switch Transformer (https://arxiv.org/abs/2101.03961). Shares are
    taken over all tokens of the step: only that tells which rank has too much to do.
    """
    num_experts = probabilities.shape[-1]
    share = jax.nn.one_hot(experts, num_experts).mean((0, 1))
    share = jax.lax.pmean(share, comm.mesh.axis_names)
    return num_experts * (share * probabilities.mean(0)).sum()


class Attention(nnx.Module):
    """Causal attention with rotary positions, each sequence on its own."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.heads = config.heads
        self.qkv = nnx.Linear(config.width, 3 * config.width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(config.width, config.width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        """x [B, S, H] -> [B, S, H]."""
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = jnp.moveaxis(qkv, (2, 3), (0, 2))  # each [B, heads, S, D]
        # jax.nn.dot_product_attention says the same, but takes 5 times as long on CPU.
        scores = rotate(q) @ jnp.swapaxes(rotate(k), -1, -2) / q.shape[-1] ** 0.5
        causal = jnp.tril(jnp.ones((1, 1, length, length), bool))
        attention = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        return self.out(jnp.swapaxes(attention @ v, 1, 2).reshape(x.shape))


def rotate(x):
    """Rotary position embedding of x [..., S, D]."""
    length, depth = x.shape[-2:]
    frequency = 10_000.0 ** -jnp.linspace(0, 1, depth // 2, endpoint=False)
    angle = jnp.arange(length, dtype=x.dtype)[:, None] * frequency[None]
    angle = angle.reshape(*(1,) * (x.ndim - 2), length, depth // 2)
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Block(nnx.Module):
    """Attention, then a mixture of experts, each added to its input."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.norm_attention = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.norm_moe = nnx.RMSNorm(config.width, rngs=rngs)
        self.moe = MoE(config, rngs)

    def __call__(self, x, comm: jax_ep.Communicator):
        x = x + self.attention(self.norm_attention(x))
        tokens = self.norm_moe(x).reshape(
            -1, x.shape[-1]
        )  # sequences do not matter now
        y, statistics = self.moe(tokens, comm)
        return x + y.reshape(x.shape), statistics


class MoELanguageModel(nnx.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(
            config.width, config.vocabulary, use_bias=False, rngs=rngs
        )

    def __call__(self, tokens, comm: jax_ep.Communicator):
        """tokens [B, S] int -> logits [B, S, vocabulary], statistics per layer."""
        x = self.embedding(tokens)
        statistics = []
        for block in self.blocks:
            x, layer_statistics = block(x, comm)
            statistics.append(layer_statistics)
        stack = lambda *leaves: jnp.stack(leaves)  # noqa: E731
        return self.head(self.norm(x)), jax.tree.map(stack, *statistics)


def partition_specs(params) -> nnx.State:
    """How parameters lie on the mesh: experts split over "ep", the rest everywhere.

    Each spec names every axis, as JAX does in results: a step's output then has the
    type of its input to the letter, and the second step does not compile again.
    """

    def spec(path, leaf):
        first = "ep" if "experts" in jax.tree_util.keystr(path) else None
        return P(first, *[None] * (leaf.ndim - 1))

    return jax.tree_util.tree_map_with_path(spec, params)
