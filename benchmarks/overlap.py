"""Measures how much of dispatch and combine hides behind other work.

    python benchmarks/overlap.py                 # GPUs, else CPU
    python benchmarks/overlap.py --quick         # under 40 seconds on GPUs
    python benchmarks/overlap.py --num-sms 8,16,24 --sizes 4096,8192

Rows travel beside two bfloat16 products of one of --sizes cubed. Each line has the
time of either part alone, of both one after the other, and of both with the products
between start and done; *SMs shared* is what the latter would take if the products
lost just the multiprocessors that rows use, while they use them. On a CPU the table
only shows that the program runs: there a start does everything, and XLA takes the
products out of the chain.
README.md in this folder says how time is taken.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from inputs import Inputs, check_rows, check_sums
from options import add_num_sms, choose_platform, devices_of, positives, with_options
from options import parser as common_parser
from report import FAILURES, Report, machine
from stopwatch import Stopwatch
from timing import AXIS, Chain, Stats, fence, first, link
from workloads import workload_a, workload_cpu

import jax_ep

COLUMNS = {
    "operation": 24,
    "size": 5,
    "SMs": 3,
    "rows us": 9,
    "products us": 11,
    "in turn us": 10,
    "overlapped us": 13,
    "SMs shared us": 13,
    "of the sum": 10,
}


def main() -> int:
    options = _parse()
    choose_platform(options)
    return Benchmark(options, devices_of(options)).run()


class Work:
    """What is timed: rows, products, and both in the two ways."""

    def __init__(self, inputs: Inputs, comm: jax_ep.Communicator, size: int):
        self.inputs = inputs
        self.comm = comm
        self.size = size
        self.opaque = comm.backend == "cuda"

        def draw(seed):
            keys = jax.random.split(jax.random.key(seed[0]))
            return tuple(
                jax.random.normal(key, (size, size), jnp.bfloat16)
                * jnp.bfloat16(size**-0.5)
                for key in keys
            )

        ranks = inputs.workload.num_ranks
        self.matrices = inputs.per_rank(draw)(inputs.put(np.arange(ranks)))

    def plan(self, topk_idx):
        w = self.inputs.workload
        return jax_ep.make_plan(
            topk_idx, comm=self.comm, num_experts=w.num_experts, capacity=w.num_slots
        )

    @staticmethod
    def products(a, w):
        return (a @ w) @ w

    def dispatch(self, x, plan):
        flight = jax_ep.dispatch_start(x, plan)
        return flight, jax_ep.dispatch_done

    def combine(self, y, plan):
        flight = jax_ep.combine_start(y, plan)
        return flight, jax_ep.combine_done

    def lines(self) -> dict[str, tuple[jax.Array, dict[str, Callable]]]:
        """{operation: (its leaf, {part: (leaf, plan, a, w) -> results})}."""

        def one(whole, halves):
            def overlapped(leaf, plan, a, w):
                flight, done = halves(leaf, plan)
                flight, y = jax_ep.overlap(flight, self.products, a, w)
                return done(flight), y

            return {
                "rows": lambda leaf, plan, a, w: whole(leaf, plan),
                "in turn": lambda leaf, plan, a, w: (
                    whole(leaf, plan),
                    self.products(a, w),
                ),
                "overlapped": overlapped,
            }

        return {
            "dispatch": (
                self.inputs.tokens,
                one(jax_ep.dispatch, self.dispatch),
            ),
            "combine": (self.inputs.rows, one(jax_ep.combine, self.combine)),
        }

    def layer(self) -> tuple[jax.Array, dict[str, Callable]]:
        """There and back, four products, and all their gradients."""

        def rows(x, plan):
            return jax_ep.combine(jax_ep.dispatch(x, plan), plan)

        def products(a, w):
            return self.products(self.products(a, w), w)

        def overlapped(x, plan, a, w):
            flight, y = jax_ep.overlap(
                jax_ep.dispatch_start(x, plan), self.products, a, w
            )
            back = jax_ep.combine_start(jax_ep.dispatch_done(flight), plan)
            back, y = jax_ep.overlap(back, self.products, y, w)
            return jax_ep.combine_done(back), y

        def with_gradients(f):
            def run(x, plan, a, w):
                out, pull = jax.vjp(lambda x, a, w: f(x, plan, a, w), x, a, w)
                return out, pull(out)

            return run

        return self.inputs.tokens, {
            "rows": with_gradients(lambda x, plan, a, w: rows(x, plan)),
            "products": with_gradients(lambda x, plan, a, w: products(a, w)),
            "in turn": with_gradients(
                lambda x, plan, a, w: (rows(x, plan), products(a, w))
            ),
            "overlapped": with_gradients(overlapped),
        }

    def chain(self, name: str, leaf: jax.Array, move: Callable) -> Chain:
        """Repeats `move`, each time after the results of the time before.

        The plan's map is linked, and the fence makes every repetition's operands
        new to XLA, which would merge equal products otherwise.
        """

        def start(leaf, topk_idx, a, w):
            plan = fence(self.plan(topk_idx))
            return (plan, leaf, a, w, first(plan._routes)), plan._routes

        def moved(context, routes):
            plan, leaf, a, w, _ = context
            routes, leaf, a, w = fence((routes, leaf, a, w))
            return move(leaf, dataclasses.replace(plan, _routes=routes), a, w)

        return Chain(
            name,
            (leaf, self.inputs.topk_idx, *self.matrices),
            start,
            moved,
            lambda context, routes, result: link(
                routes, context[-1], *jax.tree.leaves(result)
            ),
            linked=self.inputs.routes,
            opaque=self.opaque,
        )

    def check(self) -> None:
        """Raises AssertionError where the halves move rows wrongly."""

        def through(halves):
            def run(leaf, topk_idx, a, w):
                flight, done = halves(leaf, self.plan(topk_idx))
                flight, y = jax_ep.overlap(flight, self.products, a, w)
                return done(fence((flight, y))[0])

            return run

        rest = (self.inputs.topk_idx, *self.matrices)
        check_rows(self.inputs, through(self.dispatch), self.inputs.tokens, *rest).run()
        check_sums(self.inputs, through(self.combine), self.inputs.rows, *rest).run()


class Benchmark:
    """One run: a table of operations, for each number of multiprocessors."""

    def __init__(self, options: argparse.Namespace, devices: list[jax.Device]):
        self.options = options
        self.devices = devices
        self.mesh = jax.make_mesh((len(devices),), (AXIS,), devices=devices)
        self.on_gpu = devices[0].platform == "gpu"
        self.report = Report(options.json)
        quick = options.quick
        self.stopwatch = Stopwatch(
            self.mesh,
            self.on_gpu,
            seconds=0.5 if quick else 3.0,
            few=2 if quick else 5,
        )
        make = workload_a if self.on_gpu else workload_cpu
        self.workload = with_options(make(len(devices)), options)
        self.failed = False

    def run(self) -> int:
        """Everything; the exit status is 1 if a line failed or was wrong."""
        say = self.report.say
        sizes = self.options.sizes or [4096 if self.on_gpu else 256]
        kind = self.devices[0].device_kind
        self.report.record("run", **machine(self.devices), sizes=sizes)
        say(f"{len(self.devices)} x {kind}, jax {jax.__version__}: {self.workload}")
        say("products: two of size x size x size, bfloat16; with gradients 12")
        say("of the sum: overlapped, over rows and products, each alone")
        say("SMs shared: products, and rows by the share of the SMs that they use")
        self.report.head(COLUMNS)
        inputs = Inputs(self.mesh, self.workload)
        backend = "cuda" if self.on_gpu else "cpu"
        for num_sms in self.options.num_sms if self.on_gpu else [None]:
            with jax_ep.Communicator(
                self.mesh, AXIS, backend=backend, num_sms=num_sms
            ) as comm:
                for size in sizes:
                    self._table(Work(inputs, comm, size), num_sms)
        return int(self.failed)

    def _table(self, work: Work, num_sms: int | None) -> None:
        try:
            work.check()
        except FAILURES as e:
            self.failed = True
            self.report.say(f"WRONG RESULT or did not run: {e}"[:300])
            return
        lines = work.lines()
        alone = self._time(
            work, "products", lines["dispatch"][0], lambda leaf, plan, a, w: (a @ w) @ w
        )
        for name, (leaf, parts) in lines.items():
            times = {part: self._time(work, name, leaf, f) for part, f in parts.items()}
            self._line(name, work, num_sms, {"products": alone} | times)
        if not self.options.quick:
            name = "both, with gradients"
            leaf, parts = work.layer()
            times = {part: self._time(work, name, leaf, f) for part, f in parts.items()}
            self._line(name, work, num_sms, times)

    def _time(self, work: Work, name: str, leaf, move: Callable) -> Stats:
        chain = work.chain(name, leaf, move)
        return self.stopwatch.measure_chain(chain, slow=not self.on_gpu)

    def _line(
        self, name: str, work: Work, num_sms: int | None, times: dict[str, Stats]
    ) -> None:
        us = {part: stats.median for part, stats in times.items()}
        share = us["overlapped"] / (us["rows"] + us["products"])
        order = ("rows", "products", "in turn", "overlapped")
        cells = [f"{us[part]:.1f}" for part in order]
        shared = None
        if num_sms is not None:
            shared = us["products"] + us["rows"] * num_sms / self.devices[0].core_count
        cells.append("" if shared is None else f"{shared:.1f}")
        name_and_sizes = [name, str(work.size), str(num_sms or "")]
        self.report.row([*name_and_sizes, *cells, f"{share:.2f}"])
        self.report.record(
            "overlap",
            operation=name,
            size=work.size,
            num_sms=num_sms,
            sms_shared_us=shared and round(shared, 3),
            share_of_sum=round(share, 4),
            workload=self.workload.as_dict(),
            **{
                part.replace(" ", "_"): {
                    "us": round(stats.median, 3),
                    "p95_us": round(stats.p95, 3),
                    "reps": stats.reps,
                    "chain_lengths": [stats.short, stats.long],
                }
                for part, stats in times.items()
            },
        )


def _parse() -> argparse.Namespace:
    parser = common_parser(__doc__, quick="fewer repetitions, no gradients")
    add = parser.add_argument
    add(
        "--sizes",
        type=positives,
        metavar="N[,N...]",
        help="of the products (default: 4096; 256 on a CPU)",
    )
    add_num_sms(parser)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
