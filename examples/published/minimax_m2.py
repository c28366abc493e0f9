"""MiniMax-M2: sigmoid routing with a bias of the choice, norms over all heads.

Only a part of each head is rotated (`rotary_dim`, or `partial_rotary_factor`).
"""

import routers
from config import decoder
from families import Family, SeparateExperts


def config(raw):
    top_k = raw["num_experts_per_tok"]

    def route(logits, correction):
        return routers.sigmoid_with_bias(logits, correction, top_k)

    return decoder(raw, query_key_norm="all", route=route)


FAMILY = Family(
    config=config,
    router={
        "weight": "block_sparse_moe.gate.weight",
        "correction": "block_sparse_moe.e_score_correction_bias",
    },
    experts=SeparateExperts("block_sparse_moe.experts.{}", "w1", "w3", "w2"),
)
