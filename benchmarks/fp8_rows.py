"""The table fp8: dispatch of bfloat16 rows and of FP8 rows with their scales."""

from __future__ import annotations

import dataclasses

import jax
from inputs import Inputs
from layer_tables import Tables
from operations import expected_us
from timing import Chain, fence, first, link
from workloads import workload_a, workload_cpu

import jax_ep

# The line that the others are held against.
_BFLOAT16 = "dispatch bf16"


def table(run: Tables, comm: jax_ep.Communicator) -> None:
    """Measures and prints it, each line over the first, bfloat16."""
    w = run.workload(workload_a if run.on_gpu else workload_cpu)
    run.report.say(f"\nfp8: {w}, one float32 scale for 128 columns")
    run.report.head({"operation": 34, "us": 10, "p95": 10, "of bf16": 8})
    chains = dict(fp8_lines(Inputs(run.mesh, w), comm))
    base = None
    for name, stats in run.measured(chains, lambda name: expected_us(w)):
        if name == _BFLOAT16:
            base = stats.median
        share = stats.median / base if base else None
        run.report.row(
            [
                name,
                f"{stats.median:.1f}",
                f"{stats.p95:.1f}",
                "" if share is None else f"{share:.2f}",
            ]
        )
        run.record(
            "fp8", w, stats, operation=name, share_of_bf16=share and round(share, 4)
        )


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

    yield _BFLOAT16, chain("bf16", lambda p, x: jax_ep.dispatch(x, p), x)
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
