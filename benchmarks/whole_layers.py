"""The table layers: jax_ep.moe by several products, others, and what bounds it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from expert_ways import OURS, Experts, ways
from inputs import Inputs
from jax import lax
from layer_tables import Tables
from operations import expected_us
from timing import AXIS, Chain, first, link
from workloads import Workload

import jax_ep

_GATHERED = "all_gather + psum_scatter"
_PLAIN = "xla: jax_ep.moe"
_FP8 = "jax_ep.gated_mlp in FP8"
_FREE = "experts of no cost"
_DENSE = "floor: dense products"
_COPY = "floor: rows copied twice"
_FORWARD, _BOTH = "forward", "forward + backward"


def inner_width(run: Tables) -> int:
    """An expert's inner width."""
    return run.options.inner or (768 if run.on_gpu else 64)


def table(run: Tables, comm: jax_ep.Communicator) -> None:
    """Measures and prints it: microseconds and temporary memory."""
    w = run.workload(sizes_of_layers(run.on_gpu))
    o = run.options
    inner = inner_width(run)
    layers = Layers(run.mesh, w, inner, o.capacity_factor, o.alignment)
    run.report.say(
        f"\nlayers: {w}, gated experts {w.hidden} x {inner} x {w.hidden}, "
        f"capacity factor {o.capacity_factor}"
    )
    columns = {"layer": 30, "pass": 18, "us": 11, "p95": 11, "temporary MB": 13}
    run.report.head(columns)
    with jax_ep.Communicator(run.mesh, AXIS, backend="xla") as plain:
        by_name = ways(run.on_gpu)
        variants = {
            name: layers.moe(comm, experts)
            for name, experts in by_name.items()
            if name in ("JAX's example kernels", OURS) or not o.quick
        }
        variants[_FREE] = layers.moe(comm, None)
        variants[_DENSE], variants[_COPY] = layers.dense, layers.copied
        if not o.quick:
            variants[_GATHERED] = layers.gathered(by_name[OURS])
            variants[_PLAIN] = layers.moe(plain, by_name[OURS])
        # By a line's name: of which layer, which pass, and the pass itself.
        lines = {}
        for name, layer in variants.items():
            lines[f"{name}, {_FORWARD}"] = name, _FORWARD, layer
            if name != _COPY:
                lines[f"{name}, {_BOTH}"] = name, _BOTH, layers.with_gradients(layer)
        # Forward of matrices in FP8; a training step quantises them.
        lines[f"{_FP8}, {_FORWARD}"] = _FP8, _FORWARD, layers.in_fp8(comm)
        if not o.quick:
            both = layers.with_gradients(layers.in_fp8(comm))
            lines[f"{_FP8}, {_BOTH}"] = _FP8, _BOTH, both
        passes = {line: pass_ for line, (*_, pass_) in lines.items()}
        # XLA tries kernels for products on the GPU and remembers which was best.
        # Programs compiled at the same time would all try them, in turn: so first
        # those with all the products that there are.
        first_of_all = [f"{OURS}, {_BOTH}"]
        memory = _temporary_bytes(run, layers, passes, first_of_all)

        def guess_us(line: str) -> float:
            name, what, _ = lines[line]
            moving_us = 4 * expected_us(w)
            products_us = layers.product_us(name)
            return (moving_us + products_us) * (1 if what == _FORWARD else 3)

        found = run.measured(
            {line: layers.chain(line, pass_) for line, pass_ in passes.items()},
            guess_us,
            others=[
                line for line in lines if lines[line][0] not in (OURS, _FP8, _FREE)
            ],
        )
        for line, stats in found:
            name, what, _ = lines[line]
            size = memory[line]
            run.report.row(
                [
                    name,
                    what,
                    f"{stats.median:.0f}",
                    f"{stats.p95:.0f}",
                    "" if size is None else f"{size / 1e6:.0f}",
                ]
            )
            run.record(
                "layer",
                w,
                stats,
                layer=name,
                what=what,
                temporary_mb=None if size is None else round(size / 1e6, 1),
                inner=inner,
            )


def _temporary_bytes(
    run: Tables,
    layers: Layers,
    passes: Mapping[str, Callable],
    first_of_all: Sequence[str],
) -> dict[str, int | None]:
    """What XLA allocates on a device beside arguments and results, by line.

    None: the program cannot be compiled, which its measurement will tell.
    """
    found: dict[str, int | None] = {}
    rest = [line for line in passes if line not in first_of_all]
    for group in (first_of_all, rest):
        programs = run.stopwatch.compiled(
            [lambda line=line: layers.lower(passes[line]) for line in group]
        )
        for line, program in zip(group, programs, strict=True):
            analysis: Any = program and program.memory_analysis()
            found[line] = analysis and analysis.temp_size_in_bytes
    return found


class Layers:
    """One layer's inputs, and layers (x, topk_idx, weights, experts) -> y."""

    def __init__(self, mesh, w: Workload, inner: int, factor: float, alignment=None):
        self.mesh = mesh
        self.w = w
        self.inner = inner
        self.factor = factor
        self.alignment = alignment
        inputs = Inputs(mesh, w)
        self.inputs = inputs
        self.x = inputs.tokens
        self._takes_fp8: list[Callable] = []
        self.rows = inputs.random(3, w.num_tokens * w.top_k)
        rng = np.random.default_rng(2)
        weights = rng.random((w.num_ranks * w.num_tokens, w.top_k)).astype(np.float32)
        self.weights = inputs.put(weights / weights.sum(-1, keepdims=True))

        def draw(seed):
            keys = jax.random.split(jax.random.key(seed[0]), 3)
            shapes = (
                (w.local_experts, w.hidden, inner),
                (w.local_experts, w.hidden, inner),
                (w.local_experts, inner, w.hidden),
            )
            return tuple(
                jax.random.normal(key, shape, jnp.bfloat16)
                * jnp.bfloat16(shape[1] ** -0.5)
                for key, shape in zip(keys, shapes)
            )

        self.experts = inputs.per_rank(draw)(inputs.put(np.arange(w.num_ranks)))

        def quantize(*experts):
            return tuple(map(jax_ep.quantize_weights, experts))

        self.fp8_experts = inputs.per_rank(quantize)(*self.experts)

    def product_us(self, name: str) -> float:
        """About what the experts' products take forward on GPUs.

        XLA's own ragged_dot makes 10 TFLOP/s of them; it only chooses the length of
        chains.
        """
        w = self.w
        if name in (_FREE, _COPY):
            return 0.0
        rate = {"jax.lax.ragged_dot": 1e7, _FP8: 8e8}.get(name, 4e8)
        return 6 * w.num_tokens * w.top_k * w.hidden * self.inner / rate

    def in_fp8(self, comm: jax_ep.Communicator) -> Callable:
        """jax_ep.moe in FP8, of matrices in FP8 or not."""

        def experts_by(rows, sizes, group_alignment, experts):
            return jax_ep.gated_mlp(
                rows, sizes, *experts, group_alignment=group_alignment
            )

        layer = self.moe(comm, experts_by, quantize="fp8")
        self._takes_fp8.append(layer)
        return layer

    def moe(
        self,
        comm: jax_ep.Communicator,
        experts_by: Experts | None,
        quantize: Literal["fp8"] | None = None,
    ) -> Callable:
        """jax_ep.moe; None: experts of no cost."""

        def layer(x, topk_idx, weights, experts):
            def expert_fn(rows, sizes, group_alignment):
                if experts_by is None:
                    return rows * jnp.bfloat16(0.5)
                return experts_by(rows, sizes, group_alignment, experts)

            return jax_ep.moe(
                x,
                topk_idx,
                weights,
                expert_fn,
                comm=comm,
                num_experts=self.w.num_experts,
                capacity_factor=self.factor,
                expert_alignment=self.alignment,
                quantize=quantize,
            )

        return layer

    @staticmethod
    def dense(rows, topk_idx, weights, experts):
        """The MLPs on all rows by one expert: products, and glu between them."""
        del topk_idx, weights
        w_gate, w_up, w_down = (w[0] for w in experts)
        return (jax.nn.silu(rows @ w_gate) * (rows @ w_up)) @ w_down

    @staticmethod
    def copied(rows, topk_idx, weights, experts):
        """All rows read and written twice: to the experts, and home."""
        del topk_idx, weights, experts
        return -lax.optimization_barrier(-rows)

    def gathered(self, experts_by: Experts) -> Callable:
        """Every token to every rank, as layers in JAX do without ragged exchange."""
        w = self.w
        pairs = w.num_ranks * w.num_tokens * w.top_k
        room = min(pairs, int(np.ceil(self.factor * pairs / w.num_ranks)))

        def layer(x, topk_idx, weights, experts):
            everywhere = lambda a: lax.all_gather(a, AXIS, tiled=True)  # noqa: E731
            rank = lax.axis_index(AXIS)
            expert = everywhere(topk_idx).ravel() - rank * w.local_experts
            here = (expert >= 0) & (expert < w.local_experts)
            expert = jnp.where(here, expert, w.local_experts)
            order = jnp.argsort(expert, stable=True)[:room]
            ends = jnp.cumsum(jnp.bincount(expert, length=w.local_experts + 1)[:-1])
            sizes = jnp.diff(jnp.minimum(ends, room), prepend=0).astype(jnp.int32)
            token = order // w.top_k
            y = experts_by(everywhere(x)[token], sizes, 1, experts)
            gate = jnp.where(here, everywhere(weights).ravel(), 0)[order]
            y = jnp.where(gate[:, None] != 0, y * gate[:, None].astype(y.dtype), 0)
            total = jnp.zeros((w.num_ranks * w.num_tokens, w.hidden), y.dtype)
            return lax.psum_scatter(total.at[token].add(y), AXIS, tiled=True)

        return layer

    def _args(self, run: Callable):
        x = self.rows if self.takes_rows(run) else self.x
        experts = self.fp8_experts if run in self._takes_fp8 else self.experts
        return x, self.inputs.topk_idx, self.weights, experts

    def takes_rows(self, run: Callable) -> bool:
        """Whether it works on as many rows as experts get, not on tokens."""
        run = getattr(run, "__wrapped__", run)
        return run in (self.dense, self.copied)

    @staticmethod
    def with_gradients(layer: Callable) -> Callable:
        """Its result, and the gradients of all that has some."""

        @functools.wraps(layer)
        def run(x, topk_idx, weights, experts):
            y, pull = jax.vjp(
                lambda *args: layer(args[0], topk_idx, *args[1:]), x, weights, experts
            )
            return y, pull(y)

        return run

    def chain(self, name: str, run: Callable) -> Chain:
        """`run` of the same arguments, again and again."""

        def start(x, *others):
            return (first(x), others), x

        return Chain(
            name,
            self._args(run),
            start,
            lambda fixed, x: run(x, *fixed[1]),
            lambda fixed, x, result: link(x, fixed[0], *jax.tree.leaves(result)),
            linked=self._args(run)[0],
            opaque=False,
        )

    def lower(self, run: Callable) -> jax.stages.Lowered:
        """One call of it, not repeated."""
        program: Any = self.inputs.per_rank(run)
        return program.lower(*self._args(run))


def sizes_of_layers(on_gpu: bool) -> Callable[[int], Workload]:
    """A workload by the number of ranks: on GPUs the sizes of Qwen3-30B-A3B."""

    def sizes(num_ranks: int) -> Workload:
        if on_gpu:
            # 64 experts on one GPU, as on each of two.
            return Workload(4096, 2048, 8, max(64, 128 * (num_ranks > 1)), num_ranks)
        return Workload(128, 128, 4, 2 * num_ranks, num_ranks, dtype="bf16")

    return sizes
