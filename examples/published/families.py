"""What differs between the published families: names, routers, attention, experts.

Each has a module of its own with a `Family`; `find` takes the one of config.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from config import Config, UnsupportedModelError

if TYPE_CHECKING:
    from weights import Checkpoint


class Experts(Protocol):
    """How a family's files hold the experts of a layer."""

    def check(self, checkpoint: Checkpoint, config: Config, prefix: str) -> list[str]:
        """Names of all tensors of a layer's experts, after comparing their shapes."""
        ...

    def shapes(self, config: Config) -> dict[str, tuple[int, ...]]:
        """Of the arrays that `read` makes, for all experts."""
        ...

    def read(
        self, checkpoint: Checkpoint, config: Config, prefix: str, experts: range
    ) -> dict[str, np.ndarray]:
        """w_gate and w_up [e, H, I], w_down [e, I, H], and biases where there are."""
        ...


@dataclasses.dataclass(frozen=True)
class Family:
    """A published architecture.

    Attributes:
      config: reads what config.json says.
      router: names of the router's tensors in a layer: "weight", "bias" of its
        logits, "correction" of its choice.
      experts: how files hold them.
    """

    config: Callable[[Mapping[str, Any]], Config]
    router: Mapping[str, str]
    experts: Experts


@dataclasses.dataclass(frozen=True)
class SeparateExperts:
    """Three matrices [out, in] for each expert: all families but gpt-oss.

    Attributes:
      name: of expert {} in a layer.
      gate, up, down: names of its matrices.
    """

    name: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def check(self, checkpoint: Checkpoint, config: Config, prefix: str) -> list[str]:
        names = []
        wide = (config.expert_width, config.hidden)
        for expert in range(config.experts):
            for matrix in self.gate, self.up, self.down:
                name = self._tensor(prefix, expert, matrix)
                checkpoint.check(name, wide[::-1] if matrix == self.down else wide)
                names.append(name)
        return names

    def shapes(self, config: Config) -> dict[str, tuple[int, ...]]:
        wide = (config.experts, config.hidden, config.expert_width)
        down = (config.experts, config.expert_width, config.hidden)
        return {"w_gate": wide, "w_up": wide, "w_down": down}

    def read(
        self, checkpoint: Checkpoint, config: Config, prefix: str, experts: range
    ) -> dict[str, np.ndarray]:
        del config
        return {
            f"w_{part}": np.stack(
                [
                    checkpoint.read(self._tensor(prefix, expert, matrix)).T
                    for expert in experts
                ]
            )
            for part, matrix in (
                ("gate", self.gate),
                ("up", self.up),
                ("down", self.down),
            )
        }

    def _tensor(self, prefix: str, expert: int, matrix: str) -> str:
        return f"{prefix}.{self.name.format(expert)}.{matrix}.weight"


def find(raw: Mapping[str, Any]) -> Family:
    """The family of config.json; UnsupportedModelError where it is another."""
    import deepseek_v3
    import gpt_oss
    import minimax_m2
    import mixtral
    import qwen3_moe

    known = {
        "qwen3_moe": qwen3_moe.FAMILY,
        "mixtral": mixtral.FAMILY,
        "deepseek_v3": deepseek_v3.FAMILY,
        "gpt_oss": gpt_oss.FAMILY,
        "minimax_m2": minimax_m2.FAMILY,
    }
    kind = raw.get("model_type")
    if kind not in known:
        raise UnsupportedModelError(
            f"config.json: model_type must be one of {sorted(known)}, found {kind!r}"
        )
    return known[kind]
