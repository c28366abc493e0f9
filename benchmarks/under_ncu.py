"""Repeats one operation for NVIDIA Nsight Compute to look at one GPU's kernel.

    ncu --devices 0 --kernel-name DispatchKernel --launch-skip 4 --launch-count 1 \\
        --replay-mode application --metrics dram__bytes_read.sum,nvltx__bytes.sum \\
        python benchmarks/under_ncu.py dispatch

A kernel that waits for its peers cannot be run again by itself: --replay-mode
application runs the whole program for every pass, and --devices 0 leaves the kernels
of the others alone. The one that is looked at begins late, so it finds its peers
waiting; its time has nothing of theirs in it.
"""

from __future__ import annotations

import argparse
import os

# A graph's kernels would be looked at as one.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
)

import jax
from inputs import Inputs
from operations import jax_ep_operations
from options import add_num_sms, devices_of, with_options
from options import parser as common_parser
from timing import AXIS, lower_chain
from workloads import workload_a

import jax_ep


def main() -> None:
    options = _parse()
    devices = devices_of(options)
    mesh = jax.make_mesh((len(devices),), (AXIS,), devices=devices)
    inputs = Inputs(mesh, with_options(workload_a(len(devices)), options))
    with jax_ep.Communicator(mesh, AXIS, num_sms=options.num_sms[0]) as comm:
        operations = {op.name: op for op in jax_ep_operations(inputs, comm)}
        chain = operations[options.operation].chain
        program = lower_chain(mesh, chain, options.length, delay=False).compile()
        jax.block_until_ready(program(*chain.args))
    print(f"{options.length} x {options.operation}, {inputs.workload}")


def _parse() -> argparse.Namespace:
    parser = common_parser(__doc__, quick="no effect here")
    parser.add_argument("operation", help='such as "dispatch" or "combine"')
    parser.add_argument("--length", type=int, default=8, help="calls")
    add_num_sms(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
