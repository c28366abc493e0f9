"""python -m jax_ep.doctor: what to run when jax_ep does not work.

Says what is installed, what this machine has, whether the operations work on all
local devices and how fast rows go between each pair, and in words what is wrong
and what to do about it. The exit status is 0 where nothing is wrong, else 1.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._data import native
from jax_ep._setup import bootstrap, fabric, gpu_memory, links, nvml, reach

# What one rank sends in one step of the measurement, and steps in one program.
_TOKENS, _ROW_FLOATS, _STEPS = 2048, 1024, 8
_CPU_DEVICES = 4


class Report:
    """Prints facts as they come and keeps what is wrong.

    Attributes:
      problems: (what is wrong, what to do about it).
    """

    def __init__(self, write: Callable[[str], Any] = print):
        """`write` gets one line at a time."""
        self._write = write
        self.problems: list[tuple[str, str]] = []

    def section(self, title: str) -> None:
        """Begins a group of facts."""
        self._write(f"\n{title}")

    def fact(self, name: str, value: object) -> None:
        """One line."""
        self._write(f"  {name:28} {value}")

    def problem(self, what: str, remedy: str) -> None:
        """Something that has to be put right."""
        self._write(f"  !! {what}")
        self.problems.append((what, remedy))

    def conclude(self) -> int:
        """Repeats the problems with their remedies; returns the exit status."""
        self.section("Conclusion")
        if not self.problems:
            self._write("  Nothing is wrong.")
            return 0
        for number, (what, remedy) in enumerate(self.problems, 1):
            self._write(f"  {number}. {what}\n     {remedy}")
        return 1


def check_versions(report: Report) -> None:
    """Python, JAX, and XLA's FFI."""
    import jaxlib

    report.section("Versions")
    report.fact("jax_ep", jax_ep.__version__)
    report.fact("jax", jax.__version__)
    report.fact("jaxlib", jaxlib.__version__)
    report.fact("python", f"{platform.python_version()} ({sys.executable})")
    report.fact("system", platform.platform())
    try:
        major, minor = native.installed_ffi_version()
        report.fact("XLA FFI of jaxlib", f"{major}.{minor}")
    except ImportError as error:
        report.problem(str(error), "Install a complete jaxlib: pip install -U jax.")


def check_modules(report: Report, *, gpus: bool) -> None:
    """Which native modules load; a missing CUDA module matters with GPUs only."""
    report.section("Native modules")
    for name, load, needed in (
        ("_host", native.host, True),
        ("_cuda", native.cuda, gpus),
    ):
        try:
            module = load()
        except ImportError as error:
            if needed:
                report.problem(
                    f"{name} does not load: {error}",
                    "docs/building.md says what building it needs.",
                )
            else:
                report.fact(name, "not there, and not needed without GPUs")
            continue
        built = ".".join(map(str, module.ffi_version()))
        report.fact(name, f"loaded, built for XLA FFI {built}: {module.__file__}")
        if name == "_cuda":
            report.fact("compiled for GPUs", module.architectures)


def check_host(report: Report) -> None:
    """What processes of this host need to find each other."""
    report.section("This host, for several processes")
    for name, value in bootstrap.host_identity().items():
        report.fact(name, value)
    report.fact("processes in this job", jax.process_count())
    report.fact("cores this process may use", len(os.sched_getaffinity(0)))
    try:
        memory = links.create_shared_memory(1 << 20, b"doctor")
        os.close(memory)
        links.Links().close()
        report.fact("shared memory and sockets", "work")
    except OSError as error:
        report.problem(
            f"no shared memory or no sockets between processes: {error}",
            "Allow memfd_create and abstract Unix sockets in this container, or "
            "run one process with all devices.",
        )


def check_gpus(report: Report) -> None:
    """Driver, GPUs, and which of them reach each other."""
    report.section("GPUs")
    try:
        driver = gpu_memory.driver()
        version = gpu_memory.call(driver.cuDriverGetVersion)
        count = gpu_memory.call(driver.cuDeviceGetCount)
    except (ImportError, RuntimeError) as error:
        report.problem(
            f"the CUDA driver cannot be asked: {error}",
            "Install cuda-bindings of the driver's major version: pip install "
            "'jax_ep[cuda12]' or 'jax_ep[cuda13]'.",
        )
        return
    report.fact("CUDA of the driver", f"{version // 1000}.{version % 1000 // 10}")
    devices = [gpu_memory.call(driver.cuDeviceGet, i) for i in range(count)]
    for ordinal, device in enumerate(devices):
        report.fact(f"GPU {ordinal}", _gpu(driver, device))
    pairs = list(itertools.permutations(range(count), 2))
    missing = list(reach.pairs_out_of_reach(driver, pairs))
    for kind, pairs in missing:
        report.problem(
            f"no {kind} between GPUs {', '.join(map(str, pairs))}",
            "Give a communicator only GPUs that reach each other (one NVLink or "
            "PCIe domain), or use backend='xla'. In a virtual machine peer access "
            "has to be allowed by the hypervisor.",
        )
    if count > 1 and not missing:
        report.fact("peer access", "between all pairs, with atomic operations")
    buses = [gpu_memory.bus_id(driver, ordinal) for ordinal in range(count)]
    joined, reason = nvml.links(list(itertools.permutations(buses, 2)))
    apart = [pair for pair, link in joined.items() if not link.nvlink]
    if apart:
        names = ", ".join(f"({buses.index(a)}, {buses.index(b)})" for a, b in apart)
        report.fact("NVLink", f"not between GPUs {names}: no LowLatencyBuffer there")
    elif count > 1:
        report.fact("NVLink", reason or "between all pairs")


def check_fabric(report: Report, devices: list[jax.Device]) -> None:
    """Whether GPUs of other hosts can be of the same node."""
    report.section("NVLink between hosts")
    try:
        found = fabric.note(devices)
    except (ImportError, RuntimeError) as error:
        report.fact("cannot be asked about", error)
        return
    report.fact("domain", found["domain"] or "none: NVLink ends at this host")
    if found["problem"]:
        report.problem(
            f"hosts of the domain do not count as one node: {found['problem']}",
            "Memory is shared there by fabric handles: the IMEX service has to run on "
            "all hosts, and each needs a channel that this user may open (NVIDIA's "
            "IMEX guide: nvidia-caps-imex-channels). Rows cross by NCCL until then.",
        )


def check_arenas(report: Report, devices: list[jax.Device]) -> None:
    """Whether other processes can store straight into JAX's memory."""
    report.section("JAX's memory, for several processes")
    for device in devices:
        try:
            driver = gpu_memory.driver()
            gpu = gpu_memory.call(driver.cuDeviceGet, device.local_hardware_id)
            context = gpu_memory.call(driver.cuDevicePrimaryCtxRetain, gpu)
            arenas = gpu_memory.arenas(driver, device, context)
            with gpu_memory.Current(driver, context):
                sizes = [
                    size for at, size in arenas if gpu_memory.exportable(driver, at)
                ]
        except (ImportError, RuntimeError) as error:
            report.fact(str(device), f"cannot be asked about: {error}")
            continue
        if sizes:
            meaning = f"{sum(sizes) / 2**30:.1f} GiB exported: rows go straight"
        else:
            meaning = (
                "cannot be exported: rows are staged, which is slower; JAX's default "
                "allocator with preallocation can"
            )
        report.fact(str(device), meaning)


def _gpu(driver: Any, device: Any) -> str:
    attribute = driver.CUdevice_attribute

    def ask(name: str) -> int:
        wanted = getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return gpu_memory.call(driver.cuDeviceGetAttribute, wanted, device)

    name = gpu_memory.call(driver.cuDeviceGetName, 96, device)
    name = name.split(b"\0")[0].decode()
    exports = ask("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
    return (
        f"{name}, sm_{ask('COMPUTE_CAPABILITY_MAJOR')}"
        f"{ask('COMPUTE_CAPABILITY_MINOR')}, "
        f"{ask('MULTIPROCESSOR_COUNT')} multiprocessors, memory "
        + ("can" if exports else "cannot")
        + " be exported to other processes"
    )


# Self-test ---------------------------------------------------------------------


def check_operations(report: Report, devices: list[jax.Device]) -> None:
    """Plan, dispatch and combine on all local devices, and GB/s of each pair."""
    report.section(f"Self-test on {len(devices)} {devices[0].platform} devices")
    backend = {"cpu": "cpu", "gpu": "cuda"}.get(devices[0].platform, "xla")
    try:
        wrong = _wrong_rows(devices, backend)
        report.fact(f"backend {backend!r}", wrong or "rows arrive")
        if wrong:
            report.problem(
                f"backend {backend!r} gave wrong rows: {wrong}",
                "This is a bug: report it with this output. backend='xla' works.",
            )
            return
        for a, b in itertools.combinations(devices, 2):
            rate = _gigabytes_per_second([a, b], backend)
            report.fact(f"devices {a.id} and {b.id}", f"{rate:.1f} GB/s each way")
    except Exception as error:
        traceback.print_exc()
        report.problem(
            f"backend {backend!r} does not work: {error}",
            "docs/errors.md lists every message and what to do; backend='xla' "
            "works wherever JAX does.",
        )


def _programs(devices: list[jax.Device], backend: str):
    """(communicator, puts arrays on ranks, makes a program of a body)."""
    mesh = Mesh(np.array(devices), ("ep",), axis_types=(AxisType.Explicit,))
    # Whoever asks does not want to wait for minutes.
    comm = jax_ep.Communicator(mesh, "ep", backend=backend, timeout_s=30.0)
    split = NamedSharding(mesh, P("ep"))

    def compiled(body, *args):
        mapped = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        return jax.jit(mapped), jax.device_put(args, split)

    return comm, compiled


def _wrong_rows(devices: list[jax.Device], backend: str) -> str | None:
    comm, compiled = _programs(devices, backend)
    with comm:
        ranks, tokens = len(devices), 8
        token = np.arange(ranks * tokens)
        ids = np.stack([token % ranks, (token * 3 + 1) % ranks], -1).astype(np.int32)
        x = (token[:, None] * 4 + np.arange(4)).astype(np.float32)

        def body(ids, x):
            plan = jax_ep.make_plan(ids, comm=comm, num_experts=ranks)
            return jax_ep.combine(jax_ep.dispatch(x, plan), plan)

        program, args = compiled(body, ids, x)
        out = np.asarray(program(*args))
    rows = np.where(ids[:, 0] == ids[:, 1], 1, 2)[:, None]
    wrong = np.nonzero((out != x * rows).any(-1))[0]
    return f"{len(wrong)} of {len(x)} rows differ" if len(wrong) else None


def _gigabytes_per_second(devices: list[jax.Device], backend: str) -> float:
    """Rate at which each of two ranks sends all its rows to the other."""
    comm, compiled = _programs(devices, backend)
    with comm:
        ids = np.repeat([1, 0], _TOKENS)[:, None].astype(np.int32)
        x = np.zeros((2 * _TOKENS, _ROW_FLOATS), np.float32)

        def body(ids, x):
            plan = jax_ep.make_plan(ids, comm=comm, num_experts=2, capacity=_TOKENS)
            rows = lax.fori_loop(0, _STEPS, lambda _, x: jax_ep.dispatch(x, plan), x)
            return jnp.sum(rows)[None]

        program, args = compiled(body, ids, x)
        jax.block_until_ready(program(*args))
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            seconds.append(time.perf_counter() - start)
    return x.nbytes / 2 * _STEPS / min(seconds) / 1e9


def main(argv: list[str] | None = None, write: Callable[[str], Any] = print) -> int:
    """Examines this machine; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_ep.doctor", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument(
        "--skip-self-test", action="store_true", help="only look, run nothing"
    )
    skip = parser.parse_args(argv).skip_self_test
    if argv is None:
        jax.config.update("jax_num_cpu_devices", _CPU_DEVICES)
    report = Report(write)
    check_versions(report)
    report.section("JAX's devices")
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        report.problem(
            f"JAX finds no device: {error}",
            "Nothing of jax_ep works before JAX does: see JAX's installation page.",
        )
        return report.conclude()
    report.fact("platform", jax.default_backend())
    report.fact("devices here", ", ".join(map(str, devices)))
    gpus = devices[0].platform == "gpu"
    driver_there = os.path.exists("/proc/driver/nvidia/version")
    if driver_there and not gpus:
        report.problem(
            "this machine has an NVIDIA driver, but JAX does not use it",
            "Install JAX for CUDA: pip install 'jax_ep[cuda12]' or "
            "'jax_ep[cuda13]', and look at JAX_PLATFORMS.",
        )
    check_modules(report, gpus=gpus or driver_there)
    check_host(report)
    if gpus or driver_there:
        check_gpus(report)
    if gpus:
        check_fabric(report, devices)
        check_arenas(report, devices)
    if not skip:
        check_operations(report, devices)
    return report.conclude()


if __name__ == "__main__":
    sys.exit(main())
