"""A published model on a mesh: prefill, decoding, and the loss of training.

Prefill and training take the ordinary operations (`jax_ep.moe`), decoding the
low-latency ones, inside one jitted step with a cache of keys and values. A rank has
its own sequences; where they are not a multiple of the ranks, idle ones (-1) fill up.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterable
from typing import Any

import decoder
import families
import jax
import jax.numpy as jnp
import numpy as np
import tqdm
import weights
from config import Config, read
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep


class Model:
    """A published model, its experts split over the ranks of a communicator.

    Attributes:
      config: what config.json says.
      params: its parameters on the mesh.
      comm: the communicator; sequences are split over its axis.
    """

    def __init__(self, config: Config, params: Any, comm: jax_ep.Communicator):
        """`params` as weights.load makes them."""
        if config.experts % comm.num_ranks:
            raise ValueError(
                f"ranks must divide the {config.experts} experts, found "
                f"{comm.num_ranks} ranks"
            )
        self.config = config
        self.params = params
        self.comm = comm
        self._specs = weights.partition_specs(params, comm.axis_name)
        self._split = P(comm.axis_name)
        self._prefill = jax.jit(self._on_ranks(self._prefill_rank, 2))
        self._buffers: dict[int, jax_ep.LowLatencyBuffer] = {}

    @classmethod
    def load(
        cls,
        directory: pathlib.Path,
        comm: jax_ep.Communicator,
        dtype: Any = jnp.float32,
        *,
        progress: bool = False,
    ) -> Model:
        """Reads a checkpoint directory; a rank reads its own experts only."""
        raw = read(directory)
        family = families.find(raw)
        config = family.config(raw)
        with weights.Checkpoint(directory, raw) as checkpoint:
            params = weights.load(
                checkpoint,
                config,
                family,
                comm.mesh,
                comm.axis_name,
                dtype,
                progress=progress,
            )
        return cls(config, params, comm)

    def put(self, token_ids: np.ndarray) -> jax.Array:
        """[B, S] -> [B', S] on the mesh, with idle sequences up to a multiple of R."""
        missing = -len(token_ids) % self.comm.num_ranks
        ids = np.pad(
            np.asarray(token_ids, np.int32), ((0, missing), (0, 0)), constant_values=-1
        )
        return jax.device_put(ids, NamedSharding(self.comm.mesh, self._split))

    def logits(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [B, S, vocabulary] of sequences [B, S]; -1 behind shorter ones."""
        return np.asarray(self._prefill(self.params, self.put(token_ids))[0])[
            : len(token_ids)
        ]

    def generate(
        self, token_ids: np.ndarray, new_tokens: int, *, progress: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Greedy continuations: logits of the prompt, and int32 [B, new_tokens].

        Args:
          token_ids: [B, S] prompts; shorter ones end in -1.
          new_tokens: how many follow each.
          progress: whether to show a bar.
        """
        ids = self.put(token_ids)
        logits, caches = self._prefill(self.params, ids)
        tokens, positions, caches = _first_tokens(ids, logits, caches, new_tokens)
        step = self._step(len(ids) // self.comm.num_ranks)
        chosen = [tokens]
        steps: Iterable[int] = range(new_tokens - 1)
        if progress:
            steps = tqdm.tqdm(steps, "generating", unit="token")
        for _ in steps:
            tokens, positions, caches = step(self.params, tokens, positions, caches)
            chosen.append(tokens)
        rows = slice(len(token_ids))
        generated = np.stack([np.asarray(t) for t in chosen], 1)[:, :new_tokens]
        return np.asarray(logits)[rows], generated[rows]

    def loss(self, params: Any, token_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the next token and of the balance, on one rank, inside shard_map.

        token_ids int32 [b, S] are this rank's; both are means over the whole mesh. The
        cross entropy is over all tokens that follow another. The balance, a mean over
        layers, is 1 where all experts are equally busy.
        """
        axes = self.comm.mesh.axis_names
        logits, _, loads = self._forward_rank(params, token_ids)
        follows = token_ids[:, 1:]
        given = jax.nn.log_softmax(logits[:, :-1])
        given = jnp.take_along_axis(given, jnp.maximum(follows, 0)[..., None], -1)
        counted = follows >= 0
        total = -jnp.where(counted, given[..., 0], 0).sum()
        number = jax.lax.psum(counted.sum(), axes).astype(jnp.float32)
        entropy = jax.lax.psum(total, axes) / number
        balance = jnp.float32(0)
        for load in loads:
            counts, shares, tokens = jax.lax.psum(load, axes)
            busy = counts / jnp.maximum(counts.sum(), 1)
            of_layer = self.config.experts * (busy * shares).sum()
            balance += of_layer / tokens.astype(jnp.float32) / len(loads)
        return entropy, balance

    def _on_ranks(self, body, arguments: int):
        """`body` on each rank: parameters first, then arrays that are split."""
        return jax.shard_map(
            body,
            mesh=self.comm.mesh,
            in_specs=(self._specs, *(self._split,) * (arguments - 1)),
            out_specs=self._split,
        )

    # On one rank ---------------------------------------------------------------

    def _forward_rank(self, params, token_ids):
        positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
        return decoder.forward(
            self.config, params, token_ids, positions, self.expert_layer
        )

    def _prefill_rank(self, params, token_ids):
        return self._forward_rank(params, token_ids)[:2]

    def expert_layer(self, experts, x, topk_idx, topk_weights):
        """decoder.ExpertLayer for many tokens."""
        return jax_ep.moe(
            x,
            topk_idx,
            topk_weights,
            functools.partial(jax_ep.gated_mlp, **experts, glu=self.config.activation),
            comm=self.comm,
            num_experts=self.config.experts,
        )

    def _step(self, sequences: int):
        """Takes all sequences one token further; `sequences` of each rank."""
        buffer = self._buffer(sequences)

        def few_tokens(experts, x, topk_idx, topk_weights):
            rows, counts, handle = jax_ep.low_latency_dispatch(
                x, topk_idx, buffer=buffer
            )
            y = jax_ep.gated_mlp(rows, counts, **experts, glu=self.config.activation)
            return jax_ep.low_latency_combine(y, topk_weights, handle)

        def body(params, tokens, positions, caches):
            logits, caches, _ = decoder.forward(
                self.config,
                params,
                tokens[:, None],
                positions[:, None],
                few_tokens,
                caches,
            )
            best = logits[:, 0].argmax(-1).astype(jnp.int32)
            return jnp.where(tokens >= 0, best, -1), positions + 1, caches

        return jax.jit(self._on_ranks(body, 4), donate_argnums=3)

    def _buffer(self, sequences: int) -> jax_ep.LowLatencyBuffer:
        if sequences not in self._buffers:
            self._buffers[sequences] = jax_ep.LowLatencyBuffer(
                self.comm,
                max_tokens=sequences,
                hidden=self.config.hidden,
                num_experts=self.config.experts,
                dtype=self.params["embed_tokens"].dtype,
            )
        return self._buffers[sequences]


@functools.partial(jax.jit, static_argnums=3)
def _first_tokens(ids, logits, caches, room: int):
    """What follows each prompt, where it stands, and caches with room for more."""
    lengths = (ids >= 0).sum(1)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    best = jnp.take_along_axis(logits, last, 1)[:, 0].argmax(-1).astype(jnp.int32)
    # What prefill kept of pads behind shorter prompts is overwritten as they grow.
    caches = jax.tree.map(
        lambda a: jnp.pad(a, ((0, 0), (0, room), (0, 0), (0, 0))), caches
    )
    return jnp.where(lengths > 0, best, -1), lengths, caches
