"""Measures a decode step of a published model's shape, with random parameters.

    python benchmarks/decode_step.py                # Qwen3-30B-A3B; on CPUs a small one
    python benchmarks/decode_step.py --layers 4 --sequences 128 --context 4096

The model is that of examples/published: every sequence gets one token further, with a
cache of keys and values. The same step is measured with experts of no cost, and without
expert layers; differences are what products and rows take. The rest is attention, norms
and router, and the embedding and the output layer, which a step with no layer shows.
Tokens and caches are random and the same in every step: what a random model makes of
its own output soon visits the same few experts in all sequences.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
sys.path.append(sys.path[-1] + "/published")

import decoder
import jax
import jax.numpy as jnp
import numpy as np
import qwen3_moe
import weights
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from options import positive

import jax_ep

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
SMALL = QWEN3_30B_A3B | {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 64,
    "num_experts": 8,
}
AXIS = "ep"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layers", type=positive, help="default: all 48; on CPUs 2")
    add("--sequences", type=positive, default=64, help="of each rank")
    add("--context", type=positive, default=1024, help="tokens in the cache")
    add("--steps", type=positive, default=20, help="how many are timed")
    return parser.parse_args()


def random_params(config, mesh) -> dict:
    """Parameters as weights.load makes them, drawn on the devices."""
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    dtype = jnp.bfloat16 if on_gpu else jnp.float32

    def draw(key, shape, dtype):
        values = jax.random.normal(key, shape, dtype)
        return values if len(shape) == 1 else values * dtype(max(shape[-2:]) ** -0.5)

    draws = {
        spec: jax.jit(
            draw, static_argnums=(1, 2), out_shardings=NamedSharding(mesh, spec)
        )
        for spec in (P(), P(AXIS))
    }
    keys = iter(jax.random.split(jax.random.key(0), 64 * (config.layers + 1)))

    def array(shape, spec=P(), dtype=dtype):
        return draws[spec](next(keys), tuple(shape), dtype)

    family = qwen3_moe.FAMILY
    routers = family.router
    layers = []
    for number in range(config.layers):
        shapes = weights.layer_shapes(config, family, number)
        layer: dict[str, Any] = {
            name: array(shape)
            for name, shape in shapes.items()
            if name not in routers.values()
        }
        layer["router"] = {
            part: array(shapes[name], dtype=jnp.float32)
            for part, name in routers.items()
        }
        layer["experts"] = {
            name: array(shape, P(AXIS))
            for name, shape in family.experts.shapes(config).items()
        }
        layers.append(layer)
    table = config.vocabulary, config.hidden
    return {
        "embed_tokens": array((config.vocabulary, 1, config.hidden))[:, 0] * 30,
        "norm": array((config.hidden,)),
        "lm_head": array(table),
        "layers": layers,
    }


class Steps:
    """A decode step, and what is left of it without some of its parts."""

    def __init__(self, options, config, comm):
        self.config = config
        self.comm = comm
        self.context = options.context
        self.sequences = options.sequences
        self.params = random_params(config, comm.mesh)
        self.dtype = self.params["embed_tokens"].dtype
        self.buffer = jax_ep.LowLatencyBuffer(
            comm,
            max_tokens=options.sequences,
            hidden=config.hidden,
            num_experts=config.experts,
            dtype=self.dtype,
        )

        shape = (
            comm.num_ranks * options.sequences,
            options.context,
            config.kv_heads,
            config.head,
        )
        self._draw = jax.jit(
            lambda key: jax.random.normal(key, shape, self.dtype),
            out_shardings=NamedSharding(comm.mesh, P(AXIS)),
        )

    def low_latency(self, experts, x, topk_idx, topk_weights, *, free=False):
        """The experts' layer as examples/published decodes with it."""
        rows, counts, handle = jax_ep.low_latency_dispatch(
            x, topk_idx, buffer=self.buffer
        )
        if free:
            y = rows
        else:
            y = jax_ep.gated_mlp(rows, counts, **experts, glu=self.config.activation)
        return jax_ep.low_latency_combine(y, topk_weights, handle)

    def ordinary(self, experts, x, topk_idx, topk_weights):
        """The experts' layer by the ordinary operations."""
        return jax_ep.moe(
            x,
            topk_idx,
            topk_weights,
            functools.partial(jax_ep.gated_mlp, **experts, glu=self.config.activation),
            comm=self.comm,
            num_experts=self.config.experts,
        )

    def variants(self) -> dict:
        """Compiled steps by name: (parameters, tokens, caches) -> results of `body`."""
        free = functools.partial(self.low_latency, free=True)
        none = lambda experts, x, ids, w: x  # noqa: E731
        bodies = {
            "step": (self.low_latency, self.params),
            "step, ordinary operations": (self.ordinary, self.params),
            "step, experts of no cost": (free, self.params),
            "step without expert layers": (none, self.params),
            "step without layers": (none, self.params | {"layers": []}),
        }
        lowered = [self._lower(*body) for body in bodies.values()]
        with ThreadPoolExecutor(len(lowered)) as pool:
            programs = pool.map(lambda step: step.compile(), lowered)
        return {
            name: (program, params)
            for (name, (_, params)), program in zip(
                bodies.items(), programs, strict=True
            )
        }

    def state(self, layers: int):
        """Tokens of all sequences, and caches of `layers` layers, nearly full."""
        ranks = self.comm.num_ranks
        split = NamedSharding(self.comm.mesh, P(AXIS))
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, self.config.vocabulary, ranks * self.sequences)
        keys = jax.random.split(jax.random.key(1), (layers, 2))
        caches = [tuple(self._draw(key) for key in pair) for pair in keys]
        return jax.device_put(np.int32(tokens), split), caches

    def _lower(self, expert_layer, params):
        def body(params, tokens, caches):
            positions = jnp.full((len(tokens), 1), self.context - 1)
            logits, caches, loads = decoder.forward(
                self.config, params, tokens[:, None], positions, expert_layer, caches
            )
            busy = [(jax.lax.psum(load.counts, AXIS) > 0).sum() for load in loads]
            return logits[:, 0].argmax(-1), busy, caches

        specs = weights.partition_specs(params, AXIS)
        step = jax.shard_map(
            body,
            mesh=self.comm.mesh,
            in_specs=(specs, P(AXIS), P(AXIS)),
            out_specs=(P(AXIS), P(), P(AXIS)),
        )
        state = jax.eval_shape(lambda: self.state(len(params["layers"])))
        split = NamedSharding(self.comm.mesh, P(AXIS))
        state = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=split), state
        )
        return jax.jit(step, donate_argnums=2).lower(params, *state)


def measured(program, params, state, steps: int) -> tuple[float, float]:
    """Median us of a step, one after the other, and experts visited in a layer."""
    tokens, caches = state
    times, busy = [], []
    for _ in range(steps + 2):
        begin = time.perf_counter()
        chosen, busy, caches = program(params, tokens, caches)
        jax.block_until_ready(chosen)
        times.append(1e6 * (time.perf_counter() - begin))
    visited = statistics.mean(map(int, busy)) if busy else 0.0
    return statistics.median(times[2:]), visited


def main() -> None:
    options = parse()
    on_gpu = jax.default_backend() == "gpu"
    raw = QWEN3_30B_A3B if on_gpu else SMALL
    if options.layers:
        raw = raw | {"num_hidden_layers": options.layers}
    config = qwen3_moe.config(raw)
    mesh = jax.make_mesh((len(jax.devices()),), (AXIS,))
    with jax_ep.Communicator(mesh, AXIS) as comm:
        print(
            f"{comm.num_ranks} x {jax.devices()[0].device_kind}, "
            f"jax {jax.__version__}, backend {comm.backend!r}: "
            f"{config.layers} layers of {config.hidden}, "
            f"{config.experts} experts, {options.sequences} sequences a rank, "
            f"{options.context} tokens in the cache"
        )
        steps = Steps(options, config, comm)
        found = {}
        for name, (program, params) in steps.variants().items():
            state = steps.state(len(params["layers"]))
            us, visited = measured(program, params, state, options.steps)
            found[name] = us
            print(
                f"{name:30}{us:10.0f} us"
                f"{comm.num_ranks * options.sequences / us * 1e6:10.0f} tokens/s"
                f"{visited:10.1f} experts visited in a layer",
                flush=True,
            )
    whole, free, none, ends = (
        found[name]
        for name in (
            "step",
            "step, experts of no cost",
            "step without expert layers",
            "step without layers",
        )
    )
    parts = {
        "layer": whole - ends,
        "attention, norms, router": none - ends,
        "rows": free - none,
        "products": whole - free,
    }
    for name, us in parts.items():
        print(f"{name:30}{us / config.layers:10.1f} us a layer")


if __name__ == "__main__":
    main()
