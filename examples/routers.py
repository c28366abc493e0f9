"""Routers of published models: from logits to (topk_idx, topk_weights).

Each takes this rank's logits [T, E] and returns what jax_ep.moe takes: the
experts of each token, int32 [T, K], and their weights, float32 [T, K], with the
gradient that the model trains by. Shared experts are ordinary layers beside the
mixture: add their output to moe's.

    topk_idx, topk_weights = deepseek_v3(x @ w_router, bias, top_k=8)
    y = jax_ep.moe(x, topk_idx, topk_weights, experts, comm=comm, num_experts=E)
"""

import jax
import jax.numpy as jnp
from jax import lax


def softmax_top_k(logits, top_k, *, normalize=True, scale=1.0):
    """Softmax over all experts, then the best k: Qwen3, DeepSeek-V2, OLMoE, DBRX.

    normalize: weights add up to `scale` (Qwen3, DBRX); OLMoE, Qwen1.5-MoE and
    DeepSeek-V2 keep the probabilities as they are.
    """
    probabilities = jax.nn.softmax(logits.astype(jnp.float32))
    weights, experts = lax.top_k(probabilities, top_k)
    if normalize:
        weights /= weights.sum(-1, keepdims=True)
    return experts, scale * weights


def top_k_softmax(logits, top_k):
    """The best k, then a softmax over those: Mixtral, gpt-oss, Granite.

    The same numbers as softmax_top_k with normalize, computed from fewer.
    gpt-oss adds a bias to its logits first.
    """
    best, experts = lax.top_k(logits.astype(jnp.float32), top_k)
    return experts, jax.nn.softmax(best)


def sigmoid_top_1(logits):
    """The best expert, weighted by the sigmoid of its logit: Llama-4.

    Llama-4 scales the token before the expert, not its output: multiply x by
    topk_weights yourself and give moe weights of 1.
    """
    best, experts = lax.top_k(logits.astype(jnp.float32), 1)
    return experts, jax.nn.sigmoid(best)


def sigmoid_with_bias(
    logits, bias, top_k, *, groups=1, best_groups=1, normalize=True, scale=1.0
):
    """Sigmoid scores; a bias decides who is chosen, not with what weight.

    GLM, MiniMax, Kimi-K2, Step; DeepSeek-V3 with groups. The bias [E] is trained
    by no gradient: after a step it goes up for experts that got too few tokens
    and down for the others, which balances them without a loss.

    groups, best_groups: experts are chosen among those of the best groups only,
    which keeps a token on few ranks. A group counts by the sum of its two best.
    """
    scores = jax.nn.sigmoid(logits.astype(jnp.float32))
    choice = lax.stop_gradient(scores + bias.reshape(1, -1))
    if groups > 1:
        choice = _in_best_groups(choice, groups, best_groups)
    _, experts = lax.top_k(choice, top_k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if normalize:
        weights /= weights.sum(-1, keepdims=True) + 1e-20
    return experts, scale * weights


def deepseek_v3(logits, bias, top_k=8):
    """DeepSeek-V3 and R1: 8 groups, 4 of them, weights that add up to 2.5."""
    return sigmoid_with_bias(logits, bias, top_k, groups=8, best_groups=4, scale=2.5)


def _in_best_groups(choice, groups, best_groups):
    """`choice` with -inf for experts outside the best groups of their token."""
    grouped = choice.reshape(choice.shape[0], groups, -1)
    worth = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
    chosen = jax.nn.one_hot(lax.top_k(worth, best_groups)[1], groups).sum(1) > 0
    return jnp.where(chosen[..., None], grouped, -jnp.inf).reshape(choice.shape)
