"""What a published model's config.json says, in one form for all families.

Files of transformers 5 (`rope_parameters`, `num_local_experts`, `dtype`) and older
ones (`rope_theta`, `rope_scaling`, `num_experts`, `torch_dtype`) give the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


class UnsupportedModelError(ValueError):
    """A checkpoint that these examples do not read, and why."""


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of the first 2 * len(frequencies) numbers of a head.

    Attributes:
      frequencies: angle of each pair for one position, in radians.
      scale: of sines and cosines (yarn's attention factor).
      neighbours: pairs are (0, 1), (2, 3), ...; otherwise (0, n), (1, n + 1), ...
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    neighbours: bool = False


@dataclasses.dataclass(frozen=True)
class Latent:
    """Widths of DeepSeek's multi-head latent attention."""

    query: int | None
    key_value: int
    plain: int
    rotated: int
    value: int


@dataclasses.dataclass(frozen=True)
class Config:
    """A decoder. Widths are numbers a token; `windows` and `dense` go by layer.

    Attributes:
      attention_scale: of the products of queries and keys, before the softmax.
      windows: how many tokens a layer looks back, itself included; None: all.
      dense: whether a layer has one feed-forward block in place of experts.
      shared_width: of the expert that every token visits; 0 where there is none.
      route: (logits [T, E], correction bias [E] or None) -> (topk_idx, topk_weights).
      activation: (gate, up) -> the hidden values of an expert.
      biased: names of linear maps that have a bias.
      query_key_norm: norms of queries and keys: "head" by head, "all" over all heads
        before they part, or None.
      sinks: whether each head has a logit that takes its share of the softmax.
      tied: whether the output layer is the embedding.
    """

    vocabulary: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    epsilon: float
    rotary: Rotary
    attention_scale: float
    windows: tuple[int | None, ...]
    dense: tuple[bool, ...]
    dense_width: int
    experts: int
    top_k: int
    expert_width: int
    route: Callable[[jax.Array, jax.Array | None], tuple[jax.Array, jax.Array]]
    activation: Callable[[jax.Array, jax.Array], jax.Array]
    shared_width: int = 0
    latent: Latent | None = None
    biased: frozenset[str] = frozenset()
    query_key_norm: str | None = None
    sinks: bool = False
    tied: bool = False

    @property
    def layers(self) -> int:
        return len(self.windows)


def read(directory: pathlib.Path) -> dict[str, Any]:
    """config.json of a checkpoint directory."""
    path = directory / "config.json"
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UnsupportedModelError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise UnsupportedModelError(f"{path}: is not JSON: {error}") from error


def either(raw: dict[str, Any], *names: str) -> Any:
    """The first of these entries that is there."""
    for name in names:
        if raw.get(name) is not None:
            return raw[name]
    raise UnsupportedModelError(
        f"config.json: has no {' or '.join(map(repr, names))}, which a "
        f"{raw['model_type']} model needs"
    )


def decoder(raw: dict[str, Any], **family: Any) -> Config:
    """What all families share, and what `family` says otherwise."""
    layers = raw["num_hidden_layers"]
    heads = raw["num_attention_heads"]
    head = raw.get("head_dim") or raw["hidden_size"] // heads
    fields: dict[str, Any] = {
        "vocabulary": raw["vocab_size"],
        "hidden": raw["hidden_size"],
        "heads": heads,
        "kv_heads": raw.get("num_key_value_heads") or heads,
        "head": head,
        "epsilon": raw["rms_norm_eps"],
        "rotary": rotary(raw, head),
        "attention_scale": head**-0.5,
        "windows": (raw.get("sliding_window"),) * layers,
        "dense": (False,) * layers,
        "dense_width": raw["intermediate_size"],
        "experts": either(raw, "num_local_experts", "num_experts", "n_routed_experts"),
        "top_k": raw["num_experts_per_tok"],
        "expert_width": raw["intermediate_size"],
        "activation": lambda gate, up: jax.nn.silu(gate) * up,
        "tied": raw.get("tie_word_embeddings", False),
    }
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(
            f"config.json: hidden_act must be 'silu', found {raw['hidden_act']!r}"
        )
    return Config(**fields | family)


def rotary(raw: dict[str, Any], head: int, *, neighbours: bool = False) -> Rotary:
    """The embedding that config.json describes, for heads of `head` numbers."""
    rope = rope_parameters(raw)
    part = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    size = raw.get("rotary_dim") or int(head * part)
    theta = rope["rope_theta"]
    frequencies = theta ** -(np.arange(0, size, 2) / size)
    kind = rope["rope_type"]
    if kind == "default":
        return Rotary(tuple(frequencies), neighbours=neighbours)
    if kind != "yarn":
        raise UnsupportedModelError(
            f"config.json: rope_type must be 'default' or 'yarn', found {kind!r}"
        )
    slow = _slow_share(rope, raw, size)
    frequencies *= slow / rope["factor"] + (1 - slow)
    return Rotary(tuple(frequencies), yarn_scale(rope), neighbours)


def rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, or what older files say in two places."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return rope


def yarn_scale(rope: dict[str, Any]) -> float:
    """Yarn's factor of sines and cosines."""
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        every = yarn_mscale(rope["factor"], rope["mscale_all_dim"])
        return yarn_mscale(rope["factor"], rope["mscale"]) / every
    return yarn_mscale(rope["factor"], 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Yarn's correction of attention for contexts `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _slow_share(rope: dict[str, Any], raw: dict[str, Any], size: int) -> np.ndarray:
    """For each pair, how far it is slowed down: 0 (turns often) to 1 (seldom)."""
    context = (
        rope.get("original_max_position_embeddings") or raw["max_position_embeddings"]
    )

    def pair_of(turns: float) -> float:
        """The pair that turns so often within the original context."""
        position = math.log(context / (turns * 2 * math.pi))
        return size * position / (2 * math.log(rope["rope_theta"]))

    low = pair_of(rope.get("beta_fast") or 32)
    high = pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = (high - low) or 0.001
    return np.clip((np.arange(size // 2) - low) / width, 0, 1)
