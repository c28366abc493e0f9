"""Measures the way from rows to experts, FP8 dispatch, and whole layers.

    python benchmarks/moe_layer.py                 # GPUs, else CPU
    python benchmarks/moe_layer.py --quick
    python benchmarks/moe_layer.py --only products,layers
    python benchmarks/moe_layer.py --only layers --H 7168 --E 32 --inner 2048

Five tables. local: expert_rows, permute, unpermute and what they need backward,
in bytes read and written over time, against a plain copy of as many bytes. fused:
dispatch and permute one after the other against the one kernel for both. fp8:
dispatch in FP8 against bfloat16, with and without quantising. products: grouped
products and their gradients against dense ones. layers: forward, and forward +
backward, of jax_ep.moe with gated experts by our products, in FP8 too, and those of
others, of dense products and of rows copied, which bound them, of the layer made of
all_gather and psum_scatter, and of jax_ep.moe in plain JAX, with the temporary
memory that XLA asks for. README.md in this folder says how time is taken.
"""

from __future__ import annotations

import argparse

import expert_rows
import fp8_rows
import fused_rows
import jax
import layer_products
import whole_layers
from layer_tables import Tables
from options import choose_platform, devices_of, positive
from options import parser as common_parser
from report import FAILURES, machine
from timing import AXIS

import jax_ep

# In this order, whatever --only says.
TABLES = {
    "local": expert_rows.table,
    "fused": fused_rows.table,
    "fp8": fp8_rows.table,
    "products": layer_products.table,
    "layers": whole_layers.table,
}


def main() -> int:
    """The exit status is 1 if a line of ours failed or was wrong."""
    options = _parse()
    choose_platform(options)
    run = Tables(options, devices_of(options))
    run.report.record("run", **machine(run.devices))
    kind = run.devices[0].device_kind
    run.report.say(f"{len(run.devices)} x {kind}, jax {jax.__version__}")
    with jax_ep.Communicator(run.mesh, AXIS, backend=run.native) as comm:
        for name, table in TABLES.items():
            if name not in options.only:
                continue
            try:
                table(run, comm)
            except FAILURES as e:
                run.failure(name, e)
    return int(run.failed)


def _parse() -> argparse.Namespace:
    parser = common_parser(__doc__, quick="fewer repetitions")
    add = parser.add_argument
    add("--inner", type=positive, help="an expert's inner width (layers)")
    add("--alignment", type=positive, help="expert_alignment (default: of moe)")
    add("--capacity-factor", type=float, default=1.25, help="of the layers")
    add(
        "--only",
        type=lambda text: text.split(","),
        default=list(TABLES),
        metavar="NAME[,NAME]",
        help=f"tables: {', '.join(TABLES)}",
    )
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
