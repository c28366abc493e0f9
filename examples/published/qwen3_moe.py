"""Qwen3-MoE: norms of queries and keys by head, softmax over all experts."""

import functools

import routers
from config import UnsupportedModelError, decoder
from families import Family, SeparateExperts


def config(raw):
    """Some layers may have one feed-forward block in place of experts."""
    layers = raw["num_hidden_layers"]
    every = raw.get("decoder_sparse_step", 1)
    without = raw.get("mlp_only_layers") or ()
    if raw.get("use_sliding_window"):
        raise UnsupportedModelError(
            "config.json: use_sliding_window must be false in a qwen3_moe model"
        )
    maps = "qkvo" if raw.get("attention_bias") else ""
    return decoder(
        raw,
        windows=(None,) * layers,
        dense=tuple(i in without or (i + 1) % every != 0 for i in range(layers)),
        expert_width=raw["moe_intermediate_size"],
        query_key_norm="head",
        biased=frozenset(f"self_attn.{name}_proj" for name in maps),
        route=functools.partial(_route, raw),
    )


def _route(raw, logits, _):
    return routers.softmax_top_k(
        logits,
        raw["num_experts_per_tok"],
        normalize=raw.get("norm_topk_prob", False),
    )


FAMILY = Family(
    config=config,
    router={"weight": "mlp.gate.weight"},
    experts=SeparateExperts("mlp.experts.{}"),
)
