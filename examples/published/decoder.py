"""The decoder that all families share: norms, attention, and layers of experts.

Everything here runs inside `jax.shard_map`: a rank has its own sequences, its own
experts and a copy of all other parameters. Linear maps are [out, in], as in the
files; those of experts are [E, in, out], as grouped products take them.

Letters: b sequences of this rank, s tokens of each in this call, t = b * s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from config import Config, Rotary

Params = dict[str, Any]
# Keys and values of one layer, [b, positions, heads, size] each.
Cache = tuple[jax.Array, jax.Array]
# (experts of the layer, x [t, H], topk_idx [t, K], topk_weights [t, K]) -> [t, H]
ExpertLayer = Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]


class Load(NamedTuple):
    """How busy the experts of a layer are, by this rank's tokens.

    Attributes:
      counts: int32 [E], choices of each expert.
      shares: float32 [E], each expert's softmax share of the tokens, summed.
      tokens: int32 [], how many they are.
    """

    counts: jax.Array
    shares: jax.Array
    tokens: jax.Array


def linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    """x [..., in] by the map `name` [out, in], and its bias where it has one."""
    y = x @ params[f"{name}.weight"].T
    bias = params.get(f"{name}.bias")
    return y if bias is None else y + along_last(bias, y)


def along_last(vector: jax.Array, x: jax.Array) -> jax.Array:
    """vector [n] as an array that adds to or multiplies x [..., n]."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


def norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + epsilon)
    return (wide * along_last(weight.astype(jnp.float32), x)).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array, rotary: Rotary) -> jax.Array:
    """Rotates pairs of x [b, s, heads, size] by their positions [b, s]."""
    frequencies = jnp.array(rotary.frequencies, jnp.float32)
    positions = positions.astype(jnp.float32)[:, :, None, None]
    angles = positions * along_last(frequencies, positions)
    cos, sin = rotary.scale * jnp.cos(angles), rotary.scale * jnp.sin(angles)
    size = 2 * len(rotary.frequencies)
    turned, rest = x[..., :size].astype(jnp.float32), x[..., size:]
    if rotary.neighbours:
        a, b = turned[..., ::2], turned[..., 1::2]
    else:
        a, b = jnp.split(turned, 2, axis=-1)
    # Queries and keys come out in one order, so their products do not tell which.
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return jnp.concatenate([turned.astype(x.dtype), rest], -1)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of query [b, s, heads, d] to key and value [b, j, groups, ...].

    Token j of a sequence stands at position j. `sinks` [heads] are logits that take
    their share of the softmax and give nothing. Returns [b, s, heads, ...].
    """
    b, s, heads, size = query.shape
    groups = key.shape[2]
    query = query.reshape(b, s, groups, heads // groups, size)
    logits = jnp.einsum("bsghd,bjgd->bsghj", query, key).astype(jnp.float32) * scale
    ahead = positions[:, :, None] - jnp.arange(key.shape[1])[None, None]  # [b, s, j]
    seen = ahead >= 0
    if window is not None:
        seen &= ahead < window
    logits = jnp.where(seen[:, :, None, None], logits, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(
            sinks.astype(jnp.float32).reshape(groups, -1, 1), (*logits.shape[:-1], 1)
        )
        shares = jax.nn.softmax(jnp.concatenate([logits, sink], -1))[..., :-1]
    else:
        shares = jax.nn.softmax(logits)
    y = jnp.einsum("bsghj,bjgd->bsghd", shares.astype(value.dtype), value)
    return y.reshape(b, s, heads, -1)


def remember(
    cache: Cache | None, key: jax.Array, value: jax.Array, positions: jax.Array
) -> Cache:
    """The cache with these tokens in it; without one, just these tokens.

    Positions outside the cache, where idle sequences and pads stand, are left out.
    """
    if cache is None:
        return key, value
    row = jnp.arange(len(positions))[:, None]
    return tuple(  # type: ignore[return-value]
        old.at[row, positions].set(new.astype(old.dtype), mode="drop")
        for old, new in zip(cache, (key, value))
    )


def grouped_attention(
    config: Config,
    params: Params,
    x: jax.Array,
    positions: jax.Array,
    cache: Cache | None,
    window: int | None,
) -> tuple[jax.Array, Cache]:
    """Attention of several query heads to each head of keys: all but DeepSeek."""
    b, s, _ = x.shape

    def heads(name: str, count: int, kind: str | None = None) -> jax.Array:
        y = linear(params, f"self_attn.{name}_proj", x)
        scale = f"self_attn.{name}_norm.weight"
        if kind == "all":
            y = norm(y, params[scale], config.epsilon)
        y = y.reshape(b, s, count, config.head)
        return norm(y, params[scale], config.epsilon) if kind == "head" else y

    query = heads("q", config.heads, config.query_key_norm)
    key = heads("k", config.kv_heads, config.query_key_norm)
    query, key = (rotate(y, positions, config.rotary) for y in (query, key))
    cache = remember(cache, key, heads("v", config.kv_heads), positions)
    y = attend(
        query,
        *cache,
        positions,
        scale=config.attention_scale,
        window=window,
        sinks=params.get("self_attn.sinks"),
    )
    return linear(params, "self_attn.o_proj", y.reshape(b, s, -1)), cache


def latent_attention(
    config: Config,
    params: Params,
    x: jax.Array,
    positions: jax.Array,
    cache: Cache | None,
    window: int | None,
) -> tuple[jax.Array, Cache]:
    """DeepSeek's: keys and values of all heads are maps of one latent vector.

    The maps are moved to the queries and to the result, so that attention itself, and
    the cache, see one head: the latent vector and the part that is rotated.
    """
    b, s, _ = x.shape
    latent = config.latent
    assert latent is not None
    # These two norms have an epsilon of their own, whatever config.json says.
    epsilon = 1e-6
    if latent.query is None:
        query = linear(params, "self_attn.q_proj", x)
    else:
        query = linear(params, "self_attn.q_a_proj", x)
        query = norm(query, params["self_attn.q_a_layernorm.weight"], epsilon)
        query = linear(params, "self_attn.q_b_proj", query)
    query = query.reshape(b, s, config.heads, -1)
    query, turned = jnp.split(query, [latent.plain], axis=-1)
    maps = params["self_attn.kv_b_proj.weight"].reshape(
        config.heads, latent.plain + latent.value, latent.key_value
    )
    to_key, to_value = jnp.split(maps, [latent.plain], axis=1)
    query = jnp.einsum("bshn,hnr->bshr", query, to_key)
    query = jnp.concatenate([query, rotate(turned, positions, config.rotary)], -1)

    both = linear(params, "self_attn.kv_a_proj_with_mqa", x)[:, :, None]
    vector, turned = jnp.split(both, [latent.key_value], axis=-1)
    vector = norm(vector, params["self_attn.kv_a_layernorm.weight"], epsilon)
    key = jnp.concatenate([vector, rotate(turned, positions, config.rotary)], -1)
    cache = remember(cache, key, vector, positions)
    y = attend(query, *cache, positions, scale=config.attention_scale, window=window)
    y = jnp.einsum("bshr,hvr->bshv", y, to_value)
    return linear(params, "self_attn.o_proj", y.reshape(b, s, -1)), cache


def feed_forward(params: Params, name: str, config: Config, x: jax.Array) -> jax.Array:
    """A gated block that every token goes through."""
    gate = linear(params, f"{name}.gate_proj", x)
    up = linear(params, f"{name}.up_proj", x)
    return linear(params, f"{name}.down_proj", config.activation(gate, up))


def route(
    config: Config, params: Params, x: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array, Load]:
    """topk_idx and topk_weights [t, K] of x [t, H]; -1 where no token is."""
    router = params["router"]
    logits = x.astype(jnp.float32) @ router["weight"].astype(jnp.float32).T
    if "bias" in router:
        logits += along_last(router["bias"].astype(jnp.float32), logits)
    topk_idx, topk_weights = config.route(logits, router.get("correction"))
    topk_idx = jnp.where(valid[:, None], topk_idx, -1)
    load = Load(
        jax.nn.one_hot(topk_idx, config.experts, dtype=jnp.int32).sum((0, 1)),
        jnp.where(valid[:, None], jax.nn.softmax(logits), 0).sum(0),
        valid.sum(),
    )
    return topk_idx, topk_weights, load


def forward(
    config: Config,
    params: Params,
    token_ids: jax.Array,
    positions: jax.Array,
    expert_layer: ExpertLayer,
    caches: list[Cache] | None = None,
) -> tuple[jax.Array, list[Cache], list[Load]]:
    """Logits float32 [b, s, vocabulary] of token_ids [b, s] at positions [b, s].

    An id of -1 is no token: it visits no expert, and its logits mean nothing. With
    `caches`, tokens also see those of earlier calls.
    """
    valid = token_ids >= 0
    positions = jnp.where(valid, positions, jnp.iinfo(jnp.int32).max)
    attention = latent_attention if config.latent else grouped_attention
    x = params["embed_tokens"][jnp.maximum(token_ids, 0)]
    remembered, loads = [], []
    for number, layer in enumerate(params["layers"]):
        y = norm(x, layer["input_layernorm.weight"], config.epsilon)
        y, cache = attention(
            config,
            layer,
            y,
            positions,
            caches[number] if caches else None,
            config.windows[number],
        )
        remembered.append(cache)
        x += y
        y = norm(x, layer["post_attention_layernorm.weight"], config.epsilon)
        y, load = mixture(config, layer, y, valid, expert_layer)
        x += y
        loads += [] if load is None else [load]
    x = norm(x, params["norm"], config.epsilon)
    return (x @ params["lm_head"].T).astype(jnp.float32), remembered, loads


def mixture(
    config: Config,
    layer: Params,
    x: jax.Array,
    valid: jax.Array,
    expert_layer: ExpertLayer,
) -> tuple[jax.Array, Load | None]:
    """The feed-forward block of a layer: experts, or one for all."""
    if "experts" not in layer:
        return feed_forward(layer, "mlp", config, x), None
    flat = x.reshape(-1, x.shape[-1])
    topk_idx, topk_weights, load = route(config, layer, flat, valid.reshape(-1))
    y = expert_layer(layer["experts"], flat, topk_idx, topk_weights).reshape(x.shape)
    if config.shared_width:
        y += feed_forward(layer, "mlp.shared_experts", config, x)
    return y, load
