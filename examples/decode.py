"""Generates text with the model that train_moe_lm.py trained, a byte at a time.

    python examples/train_moe_lm.py && python examples/decode.py

Greedy, with a cache of keys and values; all sequences take their steps together, a
few tokens a rank. The layers' tokens travel once by jax_ep's low-latency operations,
once by the ordinary ones: the text is the same, the tokens per second are not.
"""

import argparse
import pathlib
import time
from collections.abc import Callable

import checkpoint
import jax
import jax.numpy as jnp
import numpy as np
import text_data
from flax import nnx
from jax.sharding import NamedSharding
from moe_lm_model import ModelConfig, MoELanguageModel, partition_specs
from train_moe_lm import BATCH, NUM_CPU_DEVICES, make_mesh

import jax_ep

LAYERS = ("low latency", "ordinary")
WEIGHTS = ("w_gate", "w_up", "w_down")


class Decoder:
    """The model as it generates: one token of every sequence at a time.

    Attributes:
      buffer: for the low-latency layers, whatever the number of layers.
    """

    def __init__(
        self, model: ModelConfig, comm: jax_ep.Communicator, sequences: int, layer: str
    ):
        """`sequences` over all devices; `layer` is one of LAYERS."""
        self.model = model
        self.comm = comm
        self.layer = layer
        self.rank_sequences = sequences // comm.mesh.size
        self.graph, self.params = nnx.split(
            nnx.eval_shape(lambda: MoELanguageModel(model, rngs=nnx.Rngs(0))), nnx.Param
        )
        self.specs = partition_specs(self.params)
        self.buffer = jax_ep.LowLatencyBuffer(
            comm,
            max_tokens=self.rank_sequences,
            hidden=model.width,
            num_experts=model.experts,
            dtype=jnp.float32,
        )
        self.generate = jax.jit(self._generate, static_argnums=2)
        self.logits = jax.jit(self._logits)

    def load(self, path: pathlib.Path):
        """The parameters of a checkpoint, laid out on the mesh."""

        def place(leaf, spec):
            sharding = NamedSharding(self.comm.mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        like = jax.tree.map(place, self.params, self.specs)
        return checkpoint.load(path, {"params": like})["params"]

    def put(self, tokens: np.ndarray) -> jax.Array:
        """[B, S] sequences, split over the devices."""
        return jax.device_put(tokens, NamedSharding(self.comm.mesh, BATCH))

    def _generate(self, params, prompt, count):
        """[B, S] bytes -> [B, count], what follows."""
        length = prompt.shape[1] + count - 1

        def body(params, prompt):
            def choose(position, logits):
                given = prompt[:, jnp.minimum(position + 1, prompt.shape[1] - 1)]
                best = logits.argmax(-1).astype(prompt.dtype)
                return jnp.where(position + 1 < prompt.shape[1], given, best)

            chosen, _ = self._run(params, prompt[:, 0], length, choose)
            return chosen[:, -count:]

        return self._on_ranks(body)(params, prompt)

    def _logits(self, params, tokens):
        """[B, S] bytes -> [B, S, vocabulary], each after the bytes before it."""

        def body(params, tokens):
            length = tokens.shape[1]

            def choose(position, logits):
                return tokens[:, jnp.minimum(position + 1, length - 1)]

            return self._run(params, tokens[:, 0], length, choose)[1]

        return self._on_ranks(body)(params, tokens)

    def _on_ranks(self, body):
        return jax.shard_map(
            body, mesh=self.comm.mesh, in_specs=(self.specs, BATCH), out_specs=BATCH
        )

    def _run(self, params, token, steps: int, choose: Callable):
        """Takes steps from `token` [B]; choose(position, logits) is the next one.

        Returns what was chosen [B, steps], and all logits [B, steps, vocabulary].
        """
        model = nnx.merge(self.graph, params)
        depth = self.model.width // self.model.heads
        shape = (2, len(token), self.model.heads, steps, depth)
        varies = self.comm.mesh.axis_names
        caches = [
            jax.lax.pcast(jnp.zeros(shape), varies, to="varying")
            for _ in range(self.model.layers)
        ]

        def step(state, position):
            token, caches = state
            x = model.embedding(token)
            kept = []
            for block, cache in zip(model.blocks, caches, strict=True):
                y, cache = attend(
                    block.attention, block.norm_attention(x), cache, position
                )
                x = x + y
                x = x + self._moe(block.moe, block.norm_moe(x))
                kept.append(cache)
            logits = model.head(model.norm(x))
            token = choose(position, logits)
            return (token, kept), (token, logits)

        _, found = jax.lax.scan(step, (token, caches), jnp.arange(steps))
        return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1), found)

    def _moe(self, moe, x):
        probabilities = jax.nn.softmax(moe.router(x))
        weights, experts = jax.lax.top_k(probabilities, self.model.top_k)
        weights /= weights.sum(-1, keepdims=True)
        if self.layer == "ordinary":
            return jax_ep.moe(
                x,
                experts,
                weights,
                moe.experts,
                comm=self.comm,
                num_experts=self.model.experts,
            )
        # rows [L, R * T, H]: counts[e] tokens of expert e in front, anything behind.
        rows, counts, handle = jax_ep.low_latency_dispatch(
            x, experts, buffer=self.buffer
        )
        parameters = (getattr(moe.experts, name)[...] for name in WEIGHTS)
        y = jax_ep.gated_mlp(rows, counts, *parameters)
        return jax_ep.low_latency_combine(y, weights, handle)


def attend(attention, x, cache, position):
    """One token's attention x [B, H] over the cache [2, B, heads, S, D] and itself."""
    batch, width = x.shape
    depth = cache.shape[-1]
    q, k, v = jnp.moveaxis(attention.qkv(x).reshape(batch, 3, -1, depth), 1, 0)
    new = jnp.stack([rotate(k, position), v])[:, :, :, None]
    cache = jax.lax.dynamic_update_slice_in_dim(cache, new, position, axis=3)
    keys, values = cache
    scores = jnp.einsum("bhd,bhsd->bhs", rotate(q, position), keys) / depth**0.5
    seen = jnp.arange(cache.shape[3])[None, None] <= position
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    y = jnp.einsum("bhs,bhsd->bhd", weights, values).reshape(batch, width)
    return attention.out(y), cache


def rotate(x, position):
    """Rotary embedding of x [..., D] at one position, as in moe_lm_model.rotate."""
    depth = x.shape[-1]
    frequency = 10_000.0 ** -jnp.linspace(0, 1, depth // 2, endpoint=False)
    angle = position.astype(x.dtype) * frequency
    angle = angle.reshape(*(1,) * (x.ndim - 1), depth // 2)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def main(argv: list[str] | None = None) -> dict[str, np.ndarray]:
    """Generates with both kinds of layer; returns the text of each, [B, count]."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--backend", choices=("cuda", "cpu", "xla"), help="default: the best one here")
    add("--out", type=pathlib.Path, default=pathlib.Path("out"))
    add("--sequences", type=int, default=16, help="over all devices (16)")
    add("--prompt", type=int, default=32, help="bytes of held-out text (32)")
    add("--count", type=int, default=64, help="bytes to generate (64)")
    arguments = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
    mesh = make_mesh(arguments.backend)
    path = arguments.out / "checkpoint.npz"
    if not path.exists():
        raise SystemExit(f"no {path}: run examples/train_moe_lm.py first")
    model = ModelConfig(**checkpoint.read_about(path)["model"])
    if arguments.sequences % mesh.size or arguments.sequences < 1:
        raise SystemExit(
            f"--sequences {arguments.sequences}: wanted is a multiple of {mesh.size}"
        )
    if arguments.prompt + arguments.count > model.context:
        raise SystemExit(f"prompt and count: at most {model.context} bytes together")
    _, held_out = text_data.load_text()
    prompts = text_data.random_windows(
        held_out, arguments.sequences, arguments.prompt, seed=(1,)
    )
    texts = {}
    with jax_ep.Communicator(mesh, "ep", backend=arguments.backend) as comm:
        print(f"mesh {dict(mesh.shape)}, backend {comm.backend!r}")
        for layer in LAYERS:
            decoder = Decoder(model, comm, arguments.sequences, layer)
            params, tokens = decoder.load(path), decoder.put(prompts)
            jax.block_until_ready(decoder.generate(params, tokens, arguments.count))
            start = time.perf_counter()
            texts[layer] = np.asarray(decoder.generate(params, tokens, arguments.count))
            seconds = time.perf_counter() - start
            steps = arguments.prompt + arguments.count - 1
            print(
                f"{layer:12} {arguments.sequences * steps / seconds:10,.0f} tokens/s, "
                f"{seconds / steps * 1e6:.0f} us a step"
            )
            decoder.buffer.close()
    for prompt, text in zip(prompts[:2], texts[LAYERS[0]][:2], strict=True):
        print(repr(bytes(prompt.tolist()).decode(errors="replace")), "->")
        print(f"    {bytes(text.tolist()).decode(errors='replace')!r}")
    return texts


if __name__ == "__main__":
    main()
