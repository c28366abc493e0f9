"""One operation as NVIDIA Nsight Compute sees it: bytes that its GPU moves, and time.

    python benchmarks/under_ncu.py dispatch
    python benchmarks/under_ncu.py combine --num-sms 16 --metrics lts__t_bytes.sum
    python benchmarks/under_ncu.py dispatch --ranks 1 --metrics \
        group:smsp__pcsamp_warp_stall_reasons

A kernel that waits for its peers can neither run while ncu holds up theirs nor be run
again by itself. So each GPU has a process of its own, ncu looks at the first alone, at
a chain of calls and not at kernels (ncu's app-range), and for metrics that take
several passes all processes start anew. With one rank nobody waits, and ncu looks at
one kernel, which is what reasons for stalls need.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

# A graph's kernels would be looked at as one, and memory that is not needed saved.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import layouts
from inputs import Inputs
from operations import jax_ep_operations
from options import add_num_sms, with_options
from options import parser as common_parser
from timing import AXIS, lower_chain
from workloads import workload_a

import jax_ep
from jax_ep._setup import gpu_memory
from jax_ep._setup.gpu_memory import call

_METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "nvltx__bytes.sum",
    "nvlrx__bytes.sum",
)
_KERNELS = {
    "plan": "PushedPlanKernel",
    "dispatch": "DispatchKernel",
    "combine": "CombineKernel",
}
# Operations of a chain; of one kernel, those left out before it.
_CALLS, _LEFT_OUT = 64, 8


def main() -> int:
    options = _parse()
    if options.place:
        return _run_rank(options)
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    if options.ranks == 1:
        kernel = _KERNELS[options.operation]
        what = ["--profile-from-start", "off", "--kernel-name", kernel]
        what += ["--launch-skip", str(_LEFT_OUT), "--launch-count", "1"]
    else:
        what = ["--replay-mode", "app-range"]
    return subprocess.run(
        [
            *(ncu, "--target-processes", "application-only", "--clock-control"),
            *("none", *what, "--metrics", options.metrics),
            *(sys.executable, *sys.argv, "--place=first"),
        ],
        check=False,
    ).returncode


def _run_rank(options: argparse.Namespace) -> int:
    """One of the processes; the first, which ncu looks at, starts the others."""
    others, place = [], options.place
    if place == "first":
        at, ranks = layouts.free_address(), options.ranks
        place, *theirs = [f"{at},{rank},{ranks},{ranks}" for rank in range(ranks)]
        # Without what ncu has put into the environment to find its process.
        environment = {k: v for k, v in os.environ.items() if not _is_of_ncu(k)}
        others = [
            subprocess.Popen(
                [sys.executable, *sys.argv[:-1], f"--place={other}"], env=environment
            )
            for other in theirs
        ]
    try:
        if options.ranks > 1:
            layouts.join(place, on_gpu=True)
        _run(options)
        if options.ranks > 1:
            # The others do not end before.
            jax.distributed.shutdown()
        return next(filter(None, [other.wait() for other in others]), 0)
    finally:
        for other in others:
            other.kill()


def _is_of_ncu(variable: str) -> bool:
    return variable == "LD_PRELOAD" or "INJECTION" in variable or "NV_" in variable


def _run(options: argparse.Namespace) -> None:
    devices = jax.devices()[: options.ranks]
    mesh = jax.make_mesh((len(devices),), (AXIS,), devices=devices)
    inputs = Inputs(mesh, with_options(workload_a(len(devices)), options))
    with jax_ep.Communicator(mesh, AXIS, num_sms=options.num_sms[0]) as comm:
        operations = {op.name: op for op in jax_ep_operations(inputs, comm)}
        chain = operations[options.operation].chain
        program = lower_chain(mesh, chain, _CALLS, delay=False).compile()
        jax.block_until_ready(chain.args)
        if jax.process_index() > 0:
            jax.block_until_ready(program(*chain.args))
            return
        driver = gpu_memory.driver()
        context = call(
            driver.cuDevicePrimaryCtxRetain,
            call(driver.cuDeviceGet, devices[0].local_hardware_id),
        )
        with gpu_memory.Current(driver, context):
            call(driver.cuProfilerStart)
            jax.block_until_ready(program(*chain.args))
            call(driver.cuProfilerStop)
        looked_at = f"{_CALLS} calls" if options.ranks > 1 else "one kernel"
        print(
            f"{looked_at} of {options.operation}, {options.num_sms[0]} SMs, "
            f"{inputs.workload}"
        )


def _parse() -> argparse.Namespace:
    parser = common_parser(__doc__, quick="no effect here")
    parser.add_argument("operation", choices=list(_KERNELS))
    parser.add_argument("--metrics", default=",".join(_METRICS), help="for ncu")
    parser.add_argument("--place", help=argparse.SUPPRESS)  # one of the processes
    add_num_sms(parser)
    parser.set_defaults(ranks=2)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
