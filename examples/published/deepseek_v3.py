"""DeepSeek-V3: latent attention, groups of experts, an expert that all tokens visit."""

import functools

import routers
from config import Latent, decoder, rope_parameters, rotary, yarn_mscale
from families import Family, SeparateExperts


def config(raw):
    layers = raw["num_hidden_layers"]
    plain, rotated = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"]
    scale = (plain + rotated) ** -0.5
    rope = rope_parameters(raw)
    if rope["rope_type"] != "default" and rope.get("mscale_all_dim"):
        # Once for queries and once for keys.
        scale *= yarn_mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
    maps = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
    return decoder(
        raw,
        attention_scale=scale,
        rotary=rotary(raw, rotated, neighbours=raw.get("rope_interleave", True)),
        windows=(None,) * layers,
        dense=tuple(i < raw["first_k_dense_replace"] for i in range(layers)),
        expert_width=raw["moe_intermediate_size"],
        shared_width=raw["moe_intermediate_size"] * (raw.get("n_shared_experts") or 0),
        latent=Latent(
            query=raw.get("q_lora_rank"),
            key_value=raw["kv_lora_rank"],
            plain=plain,
            rotated=rotated,
            value=raw["v_head_dim"],
        ),
        biased=frozenset(
            f"self_attn.{name}" for name in maps if raw.get("attention_bias")
        ),
        route=functools.partial(_route, raw),
    )


def _route(raw, logits, correction):
    return routers.sigmoid_with_bias(
        logits,
        correction,
        raw["num_experts_per_tok"],
        groups=raw["n_group"],
        best_groups=raw["topk_group"],
        normalize=raw.get("norm_topk_prob", True),
        scale=raw["routed_scaling_factor"],
    )


FAMILY = Family(
    config=config,
    router={
        "weight": "mlp.gate.weight",
        "correction": "mlp.gate.e_score_correction_bias",
    },
    experts=SeparateExperts("mlp.experts.{}"),
)
