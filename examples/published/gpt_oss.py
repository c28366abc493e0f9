"""gpt-oss: sinks and windows in attention, biases everywhere, a clamped activation.

Its files hold the experts of a layer together: [E, in, out], gate and up in turn along
the last axis; or, in MXFP4, [E, out, in] in blocks of 32 numbers with one scale.
"""

import jax
import jax.numpy as jnp
import routers
from config import decoder
from families import Family


def config(raw):
    top_k = raw["num_experts_per_tok"]
    kinds = raw.get("layer_types") or [
        "full_attention" if i % 2 else "sliding_attention"
        for i in range(raw["num_hidden_layers"])
    ]
    alpha, limit = raw.get("swiglu_alpha", 1.702), raw.get("swiglu_limit", 7.0)

    def activation(gate, up):
        gate = jnp.minimum(gate, limit)
        up = jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)

    return decoder(
        raw,
        windows=tuple(
            raw["sliding_window"] if kind == "sliding_attention" else None
            for kind in kinds
        ),
        sinks=True,
        biased=frozenset(f"self_attn.{name}_proj" for name in "qkvo"),
        activation=activation,
        route=lambda logits, _: routers.top_k_softmax(logits, top_k),
    )


class FusedExperts:
    """All experts of a layer in one tensor, as floats or in MXFP4."""

    def check(self, checkpoint, config, prefix):
        """See families.Experts."""
        experts, hidden, width = config.experts, config.hidden, config.expert_width
        prefix = f"{prefix}.mlp.experts"
        shapes: dict[str, tuple[int, ...]] = {
            "gate_up_proj_bias": (experts, 2 * width),
            "down_proj_bias": (experts, hidden),
        }
        for name, inputs, outputs in (
            ("gate_up_proj", hidden, 2 * width),
            ("down_proj", width, hidden),
        ):
            if _is_mxfp4(checkpoint):
                blocks = -(-inputs // 32)
                shapes[f"{name}_blocks"] = (experts, outputs, blocks, 16)
                shapes[f"{name}_scales"] = (experts, outputs, blocks)
            else:
                shapes[name] = (experts, inputs, outputs)
        for name, shape in shapes.items():
            checkpoint.check(f"{prefix}.{name}", shape)
        return [f"{prefix}.{name}" for name in shapes]

    def shapes(self, config) -> dict[str, tuple[int, ...]]:
        """See families.Experts."""
        experts, hidden, width = config.experts, config.hidden, config.expert_width
        return {
            "w_gate": (experts, hidden, width),
            "w_up": (experts, hidden, width),
            "w_down": (experts, width, hidden),
            "b_gate": (experts, width),
            "b_up": (experts, width),
            "b_down": (experts, hidden),
        }

    def read(self, checkpoint, config, prefix, experts):
        """See families.Experts."""
        part = slice(experts.start, experts.stop)
        prefix = f"{prefix}.mlp.experts"

        def matrix(name, inputs):
            if not _is_mxfp4(checkpoint):
                return checkpoint.read(f"{prefix}.{name}", part)
            wide = checkpoint.read_mxfp4(f"{prefix}.{name}", part)
            return wide[..., :inputs].swapaxes(1, 2)

        both = matrix("gate_up_proj", config.hidden)
        bias = checkpoint.read(f"{prefix}.gate_up_proj_bias", part)
        return {
            "w_gate": both[..., ::2],
            "w_up": both[..., 1::2],
            "w_down": matrix("down_proj", config.expert_width),
            "b_gate": bias[..., ::2],
            "b_up": bias[..., 1::2],
            "b_down": checkpoint.read(f"{prefix}.down_proj_bias", part),
        }


def _is_mxfp4(checkpoint):
    return checkpoint.quantization.get("quant_method") == "mxfp4"


FAMILY = Family(
    config=config,
    router={"weight": "mlp.router.weight", "bias": "mlp.router.bias"},
    experts=FusedExperts(),
)
