"""Mixtral: the plainest of them; w1 is gate, w3 up, w2 down."""

import routers
from config import decoder
from families import Family, SeparateExperts


def config(raw):
    top_k = raw["num_experts_per_tok"]
    return decoder(raw, route=lambda logits, _: routers.top_k_softmax(logits, top_k))


FAMILY = Family(
    config=config,
    router={"weight": "block_sparse_moe.gate.weight"},
    experts=SeparateExperts("block_sparse_moe.experts.{}", "w1", "w3", "w2"),
)
