"""Measures the way from rows to experts, FP8 dispatch, and whole layers.

    python benchmarks/moe_layer.py                 # GPUs, else CPU
    python benchmarks/moe_layer.py --quick
    python benchmarks/moe_layer.py --only layers --T 4096 --H 2048 --E 128 --inner 768

Four tables. local: expert_rows, permute, unpermute and what they need backward,
in bytes read and written over time, against a plain copy of as many bytes. fused:
dispatch and permute one after the other against the one kernel for both. fp8:
dispatch in FP8 against bfloat16, with and without quantising. layers: forward,
and forward + backward, of jax_ep.moe, of the same layer made of all_gather and
psum_scatter, and of jax_ep.moe in plain JAX, with the temporary memory that XLA
asks for. README.md in this folder says how time is taken.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from inputs import Inputs, as_bits, check_rows
from jax import lax
from jax.sharding import PartitionSpec as P
from options import parser as common_parser
from options import positive
from report import FAILURES, Report, machine
from stopwatch import Stopwatch
from timing import AXIS, Chain, Stats, fence, first, link
from workloads import Workload, workload_a, workload_cpu

import jax_ep
from jax_ep import expert_primitives, fused_primitives, xla_backend

SECTIONS = ("local", "fused", "fp8", "layers")


def main() -> int:
    options = _parse()
    if options.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.ranks or 8)
    if options.pallas:
        jax.config.update("jax_ragged_dot_use_gpu_pallas_triton_lowering", True)
    devices = jax.devices()
    ranks = options.ranks or len(devices)
    return Benchmark(options, devices[:ranks]).run()


class Benchmark:
    """One run: the tables that were asked for."""

    def __init__(self, options: argparse.Namespace, devices: list[jax.Device]):
        self.options = options
        self.devices = devices
        self.mesh = jax.make_mesh((len(devices),), (AXIS,), devices=devices)
        self.on_gpu = devices[0].platform == "gpu"
        self.native = "cuda" if self.on_gpu else "cpu"
        self.report = Report(options.json)
        quick = options.quick
        self.stopwatch = Stopwatch(
            self.mesh,
            self.on_gpu,
            seconds=0.5 if quick else 3.0,
            few=2 if quick else 5,
        )
        self.failed = False

    def run(self) -> int:
        """Everything; the exit status is 1 if a line of ours failed."""
        self.report.record("run", **machine(self.devices))
        kind = self.devices[0].device_kind
        self.report.say(f"{len(self.devices)} x {kind}, jax {jax.__version__}")
        with jax_ep.Communicator(self.mesh, AXIS, backend=self.native) as comm:
            if "local" in self.options.only:
                self._local(comm)
            if "fused" in self.options.only:
                self._fused(comm)
            if "fp8" in self.options.only:
                self._fp8(comm)
            if "layers" in self.options.only:
                self._layers(comm)
        return int(self.failed)

    def _workload(self, make: Callable[[int], Workload]) -> Workload:
        o = self.options
        given = {"num_tokens": o.T, "hidden": o.H, "top_k": o.K, "num_experts": o.E}
        given |= {"routing": o.routing}
        return dataclasses.replace(
            make(len(self.devices)), **{k: v for k, v in given.items() if v is not None}
        )

    def _measure(self, name: str, make: Callable[[], Chain]) -> Stats | None:
        """None, and a line that says why, where it cannot run."""
        try:
            return self.stopwatch.measure_chain(make(), slow=not self.on_gpu)
        except FAILURES as e:
            reason = " ".join(str(e).split())
            self.report.say(f"{name} did not run: {reason[:300]}")
            self.report.record("failure", operation=name, why=reason)
            self.failed |= not name.startswith(("xla", "all_gather"))
            return None

    # From rows to experts ----------------------------------------------------

    def _local(self, comm: jax_ep.Communicator) -> None:
        w = self._workload(workload_a if self.on_gpu else workload_cpu)
        local = Local(self.mesh, w, comm, self.options.alignment)
        say = self.report.say
        say(
            f"\nlocal: {w}: {local.rows} rows, {local.pairs} expert rows on the "
            f"busiest rank, alignment {self.options.alignment}, S = {local.places}"
        )
        say("GB/s: bytes read + written, 1 GB = 10^9; of copy: a copy of as many bytes")
        local.check()
        columns = {"operation": 30, "us": 10, "p95": 10, "MB": 9, "GB/s": 9}
        self.report.head(columns | {"of copy": 8})
        rates: dict[str, float] = {}
        for name, chain, size in local.lines():
            stats = self._measure(name, chain)
            if stats is None:
                continue
            rate = size / stats.median / 1e3
            rates[name] = rate
            share = rate / rates["copy"] if "copy" in rates and size else None
            self.report.row(
                [
                    name,
                    f"{stats.median:.1f}",
                    f"{stats.p95:.1f}",
                    f"{size / 1e6:.1f}",
                    f"{rate:.0f}" if size else "",
                    "" if share is None else f"{share:.2f}",
                ]
            )
            self.report.record(
                "local",
                operation=name,
                us=round(stats.median, 3),
                p95_us=round(stats.p95, 3),
                bytes=size,
                share_of_copy=share,
                workload=w.as_dict(),
            )

    # Dispatch and permute in one kernel --------------------------------------

    def _fused(self, comm: jax_ep.Communicator) -> None:
        w = self._workload(workload_a if self.on_gpu else workload_cpu)
        # Few tokens too, unless a number was asked for.
        fewer = dataclasses.replace(w, num_tokens=max(1, w.num_tokens // 4))
        for workload in (w,) if self.options.T else (w, fewer):
            fused = Fused(self.mesh, workload, comm, self.options.alignment)
            self.report.say(
                f"\nfused: {workload}, alignment {self.options.alignment}, "
                f"S = {fused.places}; both sides number the expert rows"
            )
            try:
                fused.check()
            except FAILURES as e:
                self.report.say(f"dispatch_permute is not right: {e}")
                self.failed = True
                continue
            columns = {"operation": 44, "us": 10, "p95": 10, "of two steps": 12}
            self.report.head(columns)
            two_steps: dict[bool, float] = {}
            for name, chain, weighted in fused.lines(with_weights=workload is w):
                stats = self._measure(name, lambda chain=chain: chain)
                if stats is None:
                    continue
                if name.startswith("dispatch, "):
                    two_steps[weighted] = stats.median
                base = two_steps.get(weighted)
                share = None if base is None else stats.median / base
                self.report.row(
                    [
                        name,
                        f"{stats.median:.1f}",
                        f"{stats.p95:.1f}",
                        "" if share is None else f"{share:.3f}",
                    ]
                )
                self.report.record(
                    "fused",
                    operation=name,
                    us=round(stats.median, 3),
                    p95_us=round(stats.p95, 3),
                    share_of_two_steps=share and round(share, 4),
                    workload=workload.as_dict(),
                )

    # FP8 ---------------------------------------------------------------------

    def _fp8(self, comm: jax_ep.Communicator) -> None:
        w = self._workload(workload_a if self.on_gpu else workload_cpu)
        self.report.say(f"\nfp8: {w}, one float32 scale for 128 columns")
        self.report.head({"operation": 34, "us": 10, "p95": 10, "of bf16": 8})
        base = None
        for name, chain in fp8_lines(Inputs(self.mesh, w), comm):
            stats = self._measure(name, lambda chain=chain: chain)
            if stats is None:
                continue
            base = base or stats.median
            share = stats.median / base
            self.report.row(
                [name, f"{stats.median:.1f}", f"{stats.p95:.1f}", f"{share:.2f}"]
            )
            self.report.record(
                "fp8",
                operation=name,
                us=round(stats.median, 3),
                p95_us=round(stats.p95, 3),
                share_of_bf16=round(share, 4),
                workload=w.as_dict(),
            )

    # Layers ------------------------------------------------------------------

    def _layers(self, comm: jax_ep.Communicator) -> None:
        w = self._workload(_layer_gpu if self.on_gpu else _layer_cpu)
        inner = self.options.inner or (768 if self.on_gpu else 64)
        layers = Layers(
            self.mesh,
            w,
            inner,
            self.options.capacity_factor,
            self.options.alignment,
        )
        self.report.say(
            f"\nlayers: {w}, experts {w.hidden} x {inner} x {w.hidden} by ragged_dot, "
            f"capacity factor {self.options.capacity_factor}"
        )
        columns = {"layer": 28, "pass": 18, "us": 11, "p95": 11, "temporary MB": 13}
        self.report.head(columns)
        reference = jax_ep.Communicator(self.mesh, AXIS, backend="xla")
        variants = {
            f"jax_ep.moe ({comm.backend})": layers.moe(comm),
            "all_gather + psum_scatter": layers.gathered(),
            "xla: jax_ep.moe": layers.moe(reference),
        }
        if not self.options.quick:
            variants["jax_ep.moe, experts of no cost"] = layers.moe(comm, free=True)
        for name, layer in variants.items():
            for what, chain, one in (
                ("forward", layers.forward(layer), layers.forward_once(layer)),
                ("forward + backward", layers.both(layer), layers.both_once(layer)),
            ):
                stats = self._measure(f"{name} {what}", lambda chain=chain: chain)
                if stats is None:
                    continue
                megabytes = layers.temporary_bytes(one) / 1e6
                self.report.row(
                    [
                        name,
                        what,
                        f"{stats.median:.0f}",
                        f"{stats.p95:.0f}",
                        f"{megabytes:.0f}",
                    ]
                )
                self.report.record(
                    "layer",
                    layer=name,
                    what=what,
                    us=round(stats.median, 3),
                    p95_us=round(stats.p95, 3),
                    temporary_mb=round(megabytes, 1),
                    inner=inner,
                    workload=w.as_dict(),
                )
        reference.close()


def pairs_per_rank(w: Workload) -> list[int]:
    """(token, k) pairs of each rank's experts."""
    local = w.topk_idx.reshape(-1, w.top_k) // w.local_experts
    return [int((local == r).sum()) for r in range(w.num_ranks)]


def fitting_places(w: Workload, alignment: int) -> int:
    """S that fits every group's pads, with nothing left over but for them."""
    most = max(pairs_per_rank(w)) + w.local_experts * (alignment - 1)
    return -(-most // alignment) * alignment


class Local:
    """expert_rows, permute, unpermute, row_dots of one workload as chains.

    What is linked along a chain is the integer array that an operation reads;
    rows stay as they are (see operations.py).
    """

    def __init__(self, mesh, w: Workload, comm: jax_ep.Communicator, alignment: int):
        self.mesh = mesh
        self.comm = comm
        self.inputs = Inputs(mesh, w)
        self.w = w
        self.alignment = alignment
        per_rank = pairs_per_rank(w)
        busiest = int(np.argmax(per_rank))
        self.pairs = per_rank[busiest]
        self.rows = int(w.counts[:, busiest].sum())
        self.places = fitting_places(w, alignment)
        prepare = self.inputs.per_rank(self._prepare)
        prepared = prepare(self.inputs.topk_idx)
        self.recv_topk_idx, self.expert_rows, self.ranges = prepared
        self.x = self.inputs.rows
        self.y = self.inputs.random(7, self.places)
        self.weights = self.inputs.put(
            np.random.default_rng(1)
            .random((w.num_ranks * w.num_slots, w.top_k))
            .astype(np.float32)
        )

    def _plan(self, topk_idx):
        return jax_ep.make_plan(
            topk_idx,
            comm=self.comm,
            num_experts=self.w.num_experts,
            capacity=self.w.num_slots,
            expert_alignment=self.alignment,
            expert_capacity=self.places,
        )

    def _prepare(self, topk_idx):
        plan = self._plan(topk_idx)
        return plan.recv_topk_idx, *expert_primitives.expert_rows(plan)

    def _params(self):
        return {"backend": self.comm.backend, "expert_capacity": self.places}

    def _bind(self, primitive, routing, weights, leaves):
        return expert_primitives._bind(
            primitive, routing, weights, leaves, **self._params()
        )

    def check(self) -> None:
        """permute and unpermute against plain JAX, bit for bit."""

        def wrong(expert_rows, ranges, x, y):
            routing = (expert_rows, ranges)
            (rows,) = self._bind(expert_primitives.permute_p, routing, None, [x])
            (sums,) = self._bind(expert_primitives.unpermute_p, routing, None, [y])
            (right,) = xla_backend.permute(
                expert_rows, None, x, expert_capacity=self.places
            )
            bad = (rows != right).any(1).sum()
            (right,) = xla_backend.unpermute(expert_rows, None, y)
            return jnp.stack([bad, (sums != right).any(1).sum()])[None]

        bad = np.asarray(
            self.inputs.per_rank(wrong)(self.expert_rows, self.ranges, self.x, self.y)
        ).sum(0)
        if bad.any():
            raise AssertionError(f"permute, unpermute: {bad.tolist()} rows are wrong")

    def _chain(self, name, move, *context) -> Chain:
        """move(expert_rows, *context), its expert_rows linked to its result."""

        def start(expert_rows, *context):
            return (first(expert_rows), context), expert_rows

        return Chain(
            name,
            (self.expert_rows, *context),
            start,
            lambda fixed, expert_rows: move(expert_rows, *fixed[1]),
            lambda fixed, carried, result: link(
                carried, fixed[0], *jax.tree.leaves(result)
            ),
            linked=self.expert_rows,
        )

    def _rows_chain(self, name, primitive, weights, leaf) -> Chain:
        if weights is None:
            return self._chain(
                name,
                lambda e, ranges, x: self._bind(primitive, (e, ranges), None, [x]),
                self.ranges,
                leaf,
            )
        return self._chain(
            name,
            lambda e, ranges, w, x: self._bind(primitive, (e, ranges), w, [x]),
            self.ranges,
            weights,
            leaf,
        )

    def _copy(self, size: int) -> Chain:
        """Writes as many bytes as it reads, `size` in all."""
        rows = max(1, size // 2 // self.w.row_bytes)
        x = self.inputs.bits(self.inputs.random(9, rows))

        def relink(value, x, result):
            return link(x, value, result)

        return Chain(
            "copy",
            (x,),
            lambda x: (first(x), x),
            lambda _, x: x ^ jnp.array(1, x.dtype),
            relink,
            linked=x,
            opaque=False,
        )

    def lines(self):
        """(name, maker of a chain, bytes read and written on the busiest rank)."""
        row = self.w.row_bytes
        slots, index = self.w.num_slots, self.w.num_slots * self.w.top_k * 4
        permuted = (self.rows + self.places) * row + index
        summed = (self.pairs + slots) * row + index
        p = expert_primitives

        def numbered(context, carried):
            plan = dataclasses.replace(self._plan(context[1]), recv_topk_idx=carried)
            return expert_primitives.expert_rows(plan)

        def numbering() -> Chain:
            return Chain(
                "expert_rows",
                (self.recv_topk_idx, self.inputs.topk_idx),
                lambda idx, topk_idx: ((first(idx), topk_idx), idx),
                numbered,
                lambda fixed, carried, result: link(carried, fixed[0], *result),
                linked=self.recv_topk_idx,
            )

        def dots(expert_rows, ranges, x, y):
            return p.row_dots_p.bind(expert_rows, ranges, x, y, **self._params())

        return [
            ("copy", lambda: self._copy(permuted), permuted // 2 // row * row * 2),
            ("expert_rows", numbering, 2 * index),
            (
                "permute",
                lambda: self._rows_chain("permute", p.permute_p, None, self.x),
                permuted,
            ),
            (
                "unpermute",
                lambda: self._rows_chain("unpermute", p.unpermute_p, None, self.y),
                summed,
            ),
            (
                "unpermute, weighted",
                lambda: self._rows_chain(
                    "unpermute", p.unpermute_p, self.weights, self.y
                ),
                summed + index,
            ),
            (
                "its backward: permute, weighted",
                lambda: self._rows_chain("permute", p.permute_p, self.weights, self.x),
                permuted + index,
            ),
            (
                "its backward: row_dots",
                lambda: self._chain("row_dots", dots, self.ranges, self.x, self.y),
                (self.rows + self.pairs) * row + 2 * index,
            ),
        ]


class Fused:
    """dispatch, expert_rows and permute, and dispatch_permute, as chains.

    All chains are linked in the same way, through both arrays that decide where
    rows go: a plan's routes, and recv_topk_idx, without which XLA would number
    the expert rows once for all repetitions.
    """

    def __init__(self, mesh, w: Workload, comm: jax_ep.Communicator, alignment: int):
        self.comm = comm
        self.w = w
        self.alignment = alignment
        self.places = fitting_places(w, alignment)
        self.inputs = Inputs(mesh, w)
        weights = np.random.default_rng(1).random((w.num_ranks * w.num_tokens, w.top_k))
        self.weights = self.inputs.put(weights.astype(np.float32))

    def _plan(self, topk_idx):
        return jax_ep.make_plan(
            topk_idx,
            comm=self.comm,
            num_experts=self.w.num_experts,
            capacity=self.w.num_slots,
            expert_alignment=self.alignment,
            expert_capacity=self.places,
        )

    @staticmethod
    def _two_steps(plan, x, *others):
        rows, *received = jax_ep.dispatch((x, *others), plan)
        return jax_ep.permute(rows, plan), *received

    @staticmethod
    def _one_step(plan, x, *others):
        rows, received = fused_primitives.dispatch_permute([x], others, plan)
        return *rows, *received

    def check(self) -> None:
        """What dispatch brings against NumPy; then both ways, bit for bit."""

        def wrong(topk_idx, x, weights):
            plan = self._plan(topk_idx)
            both = self._two_steps(plan, x, weights), self._one_step(plan, x, weights)
            pairs = zip(*(map(as_bits, way) for way in both), strict=True)
            return sum((a != b).any(1).sum() for a, b in pairs)

        x, topk_idx = self.inputs.tokens, self.inputs.topk_idx
        check_rows(
            self.inputs,
            lambda x, topk_idx: jax_ep.dispatch(x, self._plan(topk_idx)),
            x,
            topk_idx,
        ).run()
        self.inputs.count_wrong(
            "dispatched and permuted", wrong, topk_idx, x, self.weights
        ).run()

    def _chain(self, name, move, *leaves) -> Chain:
        def start(topk_idx, *leaves):
            plan = fence(self._plan(topk_idx))
            carried = plan._routes, plan.recv_topk_idx
            return (plan, leaves, tuple(map(first, carried))), carried

        def moved(context, carried):
            plan, leaves, _ = context
            routes, recv_topk_idx = carried
            plan = dataclasses.replace(
                plan, _routes=routes, recv_topk_idx=recv_topk_idx
            )
            return move(plan, *leaves)

        def relink(context, carried, result):
            sources = jax.tree.leaves(result)
            return tuple(
                link(array, value, *sources)
                for array, value in zip(carried, context[2], strict=True)
            )

        return Chain(
            name,
            (self.inputs.topk_idx, *leaves),
            start,
            moved,
            relink,
            linked=self.inputs.routes,
            links=2,
        )

    def lines(self, with_weights: bool):
        """(name, chain, whether the router's weights travel along)."""
        x, rows, weights = self.inputs.tokens, self.inputs.rows, self.weights
        yield (
            "dispatch",
            self._chain("dispatch", lambda p, x: jax_ep.dispatch(x, p), x),
            False,
        )
        permute = lambda p, rows: jax_ep.permute(rows, p)  # noqa: E731
        yield "expert_rows, permute", self._chain("permute", permute, rows), False
        for more, leaves in (("", (x,)), (" with weights", (x, weights))):
            for name, move in (
                ("dispatch, expert_rows, permute", self._two_steps),
                ("expert_rows, dispatch_permute", self._one_step),
            ):
                yield name + more, self._chain(name, move, *leaves), bool(more)
            if not with_weights:
                break


def fp8_lines(inputs: Inputs, comm: jax_ep.Communicator):
    """(name, chain) of dispatch in bfloat16 and in FP8; plans are linked."""
    w = inputs.workload

    def plan_of(topk_idx):
        return jax_ep.make_plan(
            topk_idx, comm=comm, num_experts=w.num_experts, capacity=w.num_slots
        )

    quantized = inputs.per_rank(jax_ep.quantize_fp8)(inputs.tokens)
    x = inputs.tokens

    def chain(name, move, *leaves) -> Chain:
        def start(topk_idx, *leaves):
            plan = fence(plan_of(topk_idx))
            return (plan, leaves, first(plan._routes)), plan._routes

        def moved(context, routes):
            plan, leaves, _ = context
            return move(dataclasses.replace(plan, _routes=routes), *leaves)

        return Chain(
            name,
            (inputs.topk_idx, *leaves),
            start,
            moved,
            lambda context, carried, result: link(
                carried, context[2], *jax.tree.leaves(result)
            ),
            linked=inputs.routes,
        )

    # Quantising does not depend on what is linked, and would be done once: its
    # input is tied to the routes.
    def tied(x, plan):
        return link(x, fence(first(x)), plan._routes)

    yield "dispatch bf16", chain("bf16", lambda p, x: jax_ep.dispatch(x, p), x)
    yield (
        "dispatch (q, scales)",
        chain("fp8", lambda p, *pair: jax_ep.dispatch(pair, p), *quantized),
    )
    yield (
        "quantize + dispatch",
        chain(
            "quantize",
            lambda p, x: jax_ep.dispatch_fp8(tied(x, p), p, dequantize=False),
            x,
        ),
    )
    yield (
        "quantize + dispatch + dequantize",
        chain("dispatch_fp8", lambda p, x: jax_ep.dispatch_fp8(tied(x, p), p), x),
    )


class Layers:
    """One layer's inputs, and layers (x, topk_idx, weights, experts) -> y."""

    def __init__(self, mesh, w: Workload, inner: int, factor: float, alignment: int):
        self.mesh = mesh
        self.w = w
        self.factor = factor
        self.alignment = alignment
        inputs = Inputs(mesh, w)
        self.inputs = inputs
        self.x = inputs.tokens
        rng = np.random.default_rng(2)
        weights = rng.random((w.num_ranks * w.num_tokens, w.top_k)).astype(np.float32)
        self.weights = inputs.put(weights / weights.sum(-1, keepdims=True))

        def draw(seed):
            keys = jax.random.split(jax.random.key(seed[0]))
            shapes = (
                (w.local_experts, w.hidden, inner),
                (w.local_experts, inner, w.hidden),
            )
            return tuple(
                jax.random.normal(key, shape, jnp.bfloat16)
                * jnp.bfloat16(shape[1] ** -0.5)
                for key, shape in zip(keys, shapes)
            )

        self.experts = inputs.per_rank(draw)(inputs.put(np.arange(w.num_ranks)))

    def _mlp(self, rows, sizes, experts, free=False):
        if free:
            return rows * jnp.bfloat16(0.5)
        hidden = jax.nn.silu(lax.ragged_dot(rows, experts[0], sizes))
        return lax.ragged_dot(hidden, experts[1], sizes)

    def moe(self, comm: jax_ep.Communicator, free: bool = False) -> Callable:
        def layer(x, topk_idx, weights, experts):
            return jax_ep.moe(
                x,
                topk_idx,
                weights,
                lambda rows, sizes: self._mlp(rows, sizes, experts, free),
                comm=comm,
                num_experts=self.w.num_experts,
                capacity_factor=self.factor,
                expert_alignment=self.alignment,
            )

        return layer

    def gathered(self) -> Callable:
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
            y = self._mlp(everywhere(x)[token], sizes, experts)
            gate = jnp.where(here, everywhere(weights).ravel(), 0)[order]
            y = jnp.where(gate[:, None] != 0, y * gate[:, None].astype(y.dtype), 0)
            total = jnp.zeros((w.num_ranks * w.num_tokens, w.hidden), y.dtype)
            return lax.psum_scatter(total.at[token].add(y), AXIS, tiled=True)

        return layer

    def _args(self):
        return self.x, self.inputs.topk_idx, self.weights, self.experts

    def forward(self, layer: Callable) -> Chain:
        return self._chain("forward", layer)

    def both(self, layer: Callable) -> Chain:
        return self._chain("forward + backward", self._value_and_gradients(layer))

    def forward_once(self, layer: Callable) -> Callable:
        return layer

    def both_once(self, layer: Callable) -> Callable:
        return self._value_and_gradients(layer)

    def _value_and_gradients(self, layer):
        def run(x, topk_idx, weights, experts):
            y, pull = jax.vjp(
                lambda *args: layer(args[0], topk_idx, *args[1:]), x, weights, experts
            )
            return y, pull(y)

        return run

    def _chain(self, name: str, run: Callable) -> Chain:
        def start(x, *others):
            return (first(x), others), x

        return Chain(
            name,
            self._args(),
            start,
            lambda fixed, x: run(x, *fixed[1]),
            lambda fixed, x, result: link(x, fixed[0], *jax.tree.leaves(result)),
            linked=self.x,
            opaque=False,
        )

    def temporary_bytes(self, run: Callable) -> int:
        """What XLA allocates on a device beside arguments and results."""
        mapped = jax.shard_map(run, mesh=self.mesh, in_specs=P(AXIS), out_specs=P(AXIS))
        analysis: Any = jax.jit(mapped).lower(*self._args()).compile().memory_analysis()
        return analysis.temp_size_in_bytes


def _layer_gpu(num_ranks: int) -> Workload:
    """The sizes of Qwen3-30B-A3B."""
    return Workload(4096, 2048, 8, 128, num_ranks)


def _layer_cpu(num_ranks: int) -> Workload:
    return Workload(128, 128, 4, 2 * num_ranks, num_ranks, dtype="bf16")


def _parse() -> argparse.Namespace:
    parser = common_parser(__doc__, quick="fewer repetitions")
    add = parser.add_argument
    add("--inner", type=positive, help="an expert's inner width (layers)")
    add("--alignment", type=positive, default=1, help="expert_alignment")
    add("--capacity-factor", type=float, default=1.25, help="of the layers")
    add(
        "--pallas",
        action="store_true",
        help="ragged_dot by JAX's Pallas kernel on GPUs",
    )
    add(
        "--only",
        type=lambda text: text.split(","),
        default=SECTIONS,
        metavar="NAME[,NAME]",
        help="tables: local, fused, fp8, layers",
    )
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
