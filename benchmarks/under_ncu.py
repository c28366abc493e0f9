"""One operation's kernel on one GPU, as NVIDIA Nsight Compute sees it.

    python benchmarks/under_ncu.py dispatch
    python benchmarks/under_ncu.py combine --metrics lts__t_bytes.sum --num-sms 16

A kernel that waits for its peers can neither run while theirs are held up nor be run
again by itself. So there is a process for each GPU and ncu looks at the first one
alone, in one pass: metrics that take several end in a time-out. The kernel looked at
begins late and finds its peers waiting; its time has nothing of theirs in it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys

# A graph's kernels would be looked at as one.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
)

import jax
import layouts
from inputs import Inputs
from operations import jax_ep_operations
from options import add_num_sms, devices_of, with_options
from options import parser as common_parser
from timing import AXIS, lower_chain
from workloads import workload_a

import jax_ep

_METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "nvltx__bytes.sum",
    "nvlrx__bytes.sum",
)
_KERNELS = {"plan": "PushedPlanKernel"}  # else after the operation
_SKIP = 4  # the first calls load and warm up


def main() -> int:
    options = _parse()
    if options.place:
        return run(options)
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    kernel = _KERNELS.get(options.operation, f"{options.operation.title()}Kernel")
    ranks = options.ranks or 2
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    looked_at = [
        *(ncu, "--kernel-name", kernel, "--launch-skip", str(_SKIP)),
        *("--launch-count", "1", "--metrics", options.metrics),
    ]
    running = [
        subprocess.Popen(
            [
                *(looked_at if rank == 0 else []),
                *(sys.executable, *sys.argv, f"--ranks={ranks}"),
                f"--place={address},{rank},{ranks},{ranks}",
            ]
        )
        for rank in range(ranks)
    ]
    try:
        return next(filter(None, [process.wait() for process in running]), 0)
    finally:
        for process in running:
            process.kill()


def run(options: argparse.Namespace) -> int:
    """In one of the processes: a chain of calls."""
    layouts.join(options.place, on_gpu=True)
    devices = devices_of(options)
    mesh = jax.make_mesh((len(devices),), (AXIS,), devices=devices)
    inputs = Inputs(mesh, with_options(workload_a(len(devices)), options))
    with jax_ep.Communicator(
        mesh, AXIS, num_sms=options.num_sms[0], timeout_s=10.0
    ) as comm:
        operations = {op.name: op for op in jax_ep_operations(inputs, comm)}
        chain = operations[options.operation].chain
        program = lower_chain(mesh, chain, 2 * _SKIP, delay=False).compile()
        jax.block_until_ready(program(*chain.args))
    if jax.process_index() == 0:
        print(f"{options.operation}, {options.num_sms[0]} SMs, {inputs.workload}")
    return 0


def _parse() -> argparse.Namespace:
    parser = common_parser(__doc__, quick="no effect here")
    parser.add_argument("operation", help="plan, dispatch or combine")
    parser.add_argument("--metrics", default=",".join(_METRICS), help="for ncu")
    parser.add_argument("--place", help=argparse.SUPPRESS)  # one of the processes
    add_num_sms(parser)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
