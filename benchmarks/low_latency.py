"""Measures the low-latency operations beside the ordinary ones, for few tokens.

    python benchmarks/low_latency.py               # GPUs, else CPU
    python benchmarks/low_latency.py --quick       # T = 1 and 128, under a minute
    python benchmarks/low_latency.py --tokens 8,64 --H 4096 --E 128

For each T one call of dispatch, combine and both, in both layouts, bfloat16 and
FP8, from chains of up to 200 calls inside one jit, each of which waits for the
result of the one before and for nothing else; then what the ordinary operations
take for the same, the chain's link taken off. floor: the bytes that have to leave
a rank over the link's rate. of ordinary: of plan + dispatch + permute (by expert)
or plan + dispatch (by rank), and of unpermute + combine or combine.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from expert_rows import aligned_plan, fitting_places
from inputs import Inputs
from layer_tables import Tables
from options import choose_platform, devices_of, positive, positives
from options import parser as common_parser
from report import FAILURES, machine
from stopwatch import Stopwatch
from timing import AXIS, Chain, Stats, fence, first, link
from workloads import Workload, workload_a, workload_cpu

import jax_ep

_TOKENS = (1, 8, 32, 64, 128, 256, 512)
_CALLS = 200
# What large copies to a peer reach on an H200's link, bytes a microsecond.
_LINK = 366e3


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
      name: what it shows.
      chain: how it is repeated.
      floor_us: what the link alone would take; 0 where there is none to speak of.
      ordinary: the line of the ordinary operations that does the same, or None.
    """

    name: str
    chain: Chain
    floor_us: float
    ordinary: str | None = None


class Calls:
    """The chains of one T."""

    def __init__(self, mesh, w: Workload, comm: jax_ep.Communicator):
        self.w = w
        self.comm = comm
        self.inputs = Inputs(mesh, w)
        self.buffer = jax_ep.LowLatencyBuffer(
            comm, max_tokens=w.num_tokens, hidden=w.hidden, num_experts=w.num_experts
        )
        self.weights = self.inputs.put(
            np.random.default_rng(1)
            .random((w.num_ranks * w.num_tokens, w.top_k))
            .astype(np.float32)
        )
        self.args = (self.inputs.tokens, self.inputs.topk_idx, self.weights)

    def _dispatch(self, args, after, layout, quantize=None):
        x, ids, _ = args
        return jax_ep.low_latency_dispatch(
            x, ids, buffer=self.buffer, layout=layout, quantize=quantize, after=after
        )

    def _combine(self, args, rows, handle, after=None):
        weights = args[2] if handle.layout == "expert" else None
        return jax_ep.low_latency_combine(rows, weights, handle, after=after)

    def check(self) -> None:
        """A token comes back as often as it left, by rank."""
        w = self.w

        def wrong(x, ids, weights):
            rows, _, handle = self._dispatch((x, ids, weights), None, "rank")
            out = self._combine((x, ids, weights), rows, handle)
            ranks = jnp.arange(w.num_ranks, dtype=jnp.int32)[None, None]
            to = (ids // w.local_experts)[:, :, None] == ranks
            times = to.any(1).sum(1, keepdims=True).astype(jnp.float32)
            want = (x.astype(jnp.float32) * times).astype(x.dtype)
            return (fence(out) != want).any(1).sum()

        self.inputs.count_wrong("combined", wrong, *self.args).run()

    def lines(self) -> Iterator[Line]:
        """All lines, the ordinary operations first."""
        yield from self._ordinary()
        quantized = (self.w.hidden + 4 * -(-self.w.hidden // 128)) / self.w.row_bytes
        wire_us = self.w.wire_bytes / _LINK
        for layout in ("rank", "expert"):
            there, back, both = (
                f"{name}, by {layout}" for name in ("forth", "back", "forth and back")
            )
            for name, quantize, share in (("bf16", None, 1), ("fp8", "fp8", quantized)):
                yield Line(
                    f"dispatch {name}, {layout}",
                    self._dispatches(layout, quantize),
                    wire_us * share,
                    there,
                )
            yield Line(f"combine, {layout}", self._combines(layout), wire_us, back)
            yield Line(
                f"dispatch + combine, {layout}", self._pairs(layout), 2 * wire_us, both
            )

    def _dispatches(self, layout, quantize) -> Chain:
        return Chain(
            "dispatch",
            self.args,
            lambda *args: (args, args[1]),
            lambda args, after: self._dispatch(args, after, layout, quantize),
            lambda args, after, result: result[1],
            max_length=_CALLS + 4,
        )

    def _combines(self, layout) -> Chain:
        def start(*args):
            rows, _, handle = self._dispatch(args, None, layout)
            return (args, rows, handle), args[0]

        return Chain(
            "combine",
            self.args,
            start,
            lambda context, after: self._combine(*context, after=after),
            lambda context, after, result: result,
            max_length=_CALLS + 4,
        )

    def _pairs(self, layout) -> Chain:
        def move(args, after):
            rows, _, handle = self._dispatch(args, after, layout)
            return self._combine(args, rows, handle)

        return Chain(
            "pair",
            self.args,
            lambda *args: (args, args[0]),
            move,
            lambda args, after, result: result,
            max_length=_CALLS + 4,
        )

    # What the ordinary operations take: ids, or a plan's routes, are linked.

    def _ordinary(self) -> Iterator[Line]:
        w = self.w
        wire_us = w.wire_bytes / _LINK
        places = fitting_places(w, 1)

        def plan_of(ids):
            return aligned_plan(ids, self.comm, w, 1, places)

        def forth(by_expert, x, ids):
            plan = plan_of(ids)
            rows = jax_ep.dispatch(x, plan)
            return jax_ep.permute(rows, plan) if by_expert else rows, plan

        def back(by_expert, rows, weights, plan):
            if by_expert:
                rows = jax_ep.unpermute(rows, plan, weights)
            return jax_ep.combine(rows, plan)

        def by_ids(move):
            def start(x, ids, weights):
                return (x, weights, first(ids)), ids

            return Chain(
                "ordinary",
                self.args,
                start,
                move,
                lambda context, ids, result: link(
                    ids, context[2], jax.tree.leaves(result)[0]
                ),
                linked=self.inputs.topk_idx,
            )

        def received(plan, weights):
            return jax_ep.dispatch(weights, plan)

        for layout in ("rank", "expert"):
            by_expert = layout == "expert"

            def go(context, ids, by_expert=by_expert):
                return forth(by_expert, context[0], ids)[0]

            def both(context, ids, by_expert=by_expert):
                rows, plan = forth(by_expert, context[0], ids)
                return back(by_expert, rows, received(plan, context[1]), plan)

            def start(x, ids, weights, by_expert=by_expert):
                rows, plan = fence(forth(by_expert, x, ids))
                context = rows, fence(received(plan, weights)), plan
                return (*context, first(plan._routes)), plan._routes

            def come(context, routes, by_expert=by_expert):
                rows, weights, plan, _ = context
                # Both steps wait for the link: unpermute by its weights.
                weights = link(weights, fence(first(weights)), routes)
                plan = dataclasses.replace(plan, _routes=routes)
                return back(by_expert, rows, weights, plan)

            yield Line(f"forth, by {layout}", by_ids(go), wire_us)
            yield Line(
                f"back, by {layout}",
                Chain(
                    "back",
                    self.args,
                    start,
                    come,
                    lambda context, routes, result: link(routes, context[3], result),
                    linked=self.inputs.routes,
                    links=2 if by_expert else 1,
                ),
                wire_us,
            )
            yield Line(f"forth and back, by {layout}", by_ids(both), 2 * wire_us)


def table(run: Tables, comm: jax_ep.Communicator, w: Workload) -> None:
    """Measures and prints one T."""
    calls = Calls(run.mesh, w, comm)
    run.report.say(f"\n{w}, buffer {calls.buffer.size_bytes / 2**20:.1f} MiB a rank")
    calls.check()
    columns = {"operation": 28, "us": 8, "p95": 8, "floor us": 9, "of ordinary": 11}
    run.report.head(columns)
    lines = {line.name: line for line in calls.lines()}
    found: dict[str, Stats] = {}
    chains = {name: line.chain for name, line in lines.items()}
    guess = 20 + w.wire_bytes / _LINK
    for name, stats in run.measured(chains, lambda name: guess):
        found[name] = stats
        line = lines[name]
        base = found.get(line.ordinary or "")
        share = stats.median / base.median if base else None
        run.report.row(
            [
                name,
                f"{stats.median:.1f}",
                f"{stats.p95:.1f}",
                f"{line.floor_us:.1f}",
                "" if share is None else f"{share:.2f}",
            ]
        )
        run.record(
            "low_latency",
            w,
            stats,
            operation=name,
            floor_us=round(line.floor_us, 3),
            of_ordinary=share and round(share, 4),
        )
    calls.buffer.close()


def main() -> int:
    """The exit status is 1 if a line of ours failed or was wrong."""
    options = _parse()
    choose_platform(options)
    run = Tables(options, devices_of(options))
    run.stopwatch = Stopwatch(
        run.mesh,
        run.on_gpu,
        seconds=0.3 if options.quick else 2.0,
        few=3 if options.quick else 5,
        longest=_CALLS,
    )
    run.report.record("run", **machine(run.devices))
    kind = run.devices[0].device_kind
    run.report.say(f"{len(run.devices)} x {kind}, jax {jax.__version__}")
    w = run.workload(workload_a if run.on_gpu else workload_cpu)
    tokens = options.tokens or ((1, 128) if options.quick else _TOKENS)
    with jax_ep.Communicator(
        run.mesh, AXIS, backend=run.native, num_sms=options.num_sms
    ) as comm:
        for count in [options.T] if options.T else tokens:
            try:
                table(run, comm, dataclasses.replace(w, num_tokens=count))
            except FAILURES as e:
                run.failure(f"T={count}", e)
    return int(run.failed)


def _parse() -> argparse.Namespace:
    parser = common_parser(__doc__, quick="T = 1 and 128, fewer repetitions")
    parser.add_argument(
        "--tokens",
        type=positives,
        metavar="T[,T...]",
        help=f"default: {','.join(map(str, _TOKENS))}",
    )
    parser.add_argument(
        "--num-sms",
        type=positive,
        help="SMs that all operations use (default: 32 low-latency, 24 ordinary)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
