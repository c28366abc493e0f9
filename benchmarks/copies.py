"""What the machine allows: copy kernels on GPUs, memcpy on a CPU.

On GPUs copy_bench.cu is built with nvcc into a folder of the user's cache and
called through ctypes.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import hashlib
import itertools
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

# Kinds of copy_bench.cu, in its order.
STORE, STORE_LOCAL, SUM, LAUNCH, HANDSHAKE, HANDSHAKE_TWICE = range(6)
NAMES = {
    STORE: "store to peers",
    STORE_LOCAL: "store to peers + local store",
    SUM: "load peers + local, add, write",
    LAUNCH: "empty kernel",
    HANDSHAKE: "handshake",
    HANDSHAKE_TWICE: "two handshakes",
}
# Copied at least in one timing of memcpy.
_LEAST_BYTES = 16 * 2**20
_SOURCES = ("copy_bench.cu", "copy_kernels.cuh")


class CeilingError(RuntimeError):
    """The ceilings cannot be measured here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of a copy on the slowest GPU, over `reps` timings.

    `variant`: the launch shape that was best, or the number of threads.
    """

    median: float
    p95: float
    best: float
    reps: int
    variant: int


class CopyBench:
    """The copy kernels over `devices`, `bytes_per_peer` to each peer.

    A context manager: it holds GPU memory outside XLA's.
    """

    def __init__(
        self, devices: Sequence[jax.Device], bytes_per_peer: int, local_bytes: int
    ):
        self._library = _load(_build(devices))
        ordinals = [d.local_hardware_id for d in devices]
        self._handle = self._library.CopyBenchOpen(
            len(ordinals),
            (ctypes.c_int * len(ordinals))(*ordinals),
            bytes_per_peer,
            local_bytes,
        )
        if not self._handle:
            raise CeilingError(self._error())

    def __enter__(self) -> CopyBench:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._library.CopyBenchClose(self._handle)
        self._handle = None

    def _error(self) -> str:
        return self._library.CopyBenchError().decode()

    def run(self, kind: int, num_sms: int, *, launches: int, reps: int) -> Timing:
        """The best of the kernel's launch shapes at this number of SMs."""
        shapes = self._library.CopyBenchNumVariants() if kind <= SUM else 1
        results = []
        for variant in range(shapes):
            us = (ctypes.c_float * reps)()
            if not self._library.CopyBenchRun(
                self._handle, kind, variant, num_sms, launches, reps, us
            ):
                raise CeilingError(f"{NAMES[kind]}: {self._error()}")
            if kind <= SUM:
                self._check(kind)
            times = np.array(us)
            results.append(
                Timing(
                    median=float(np.median(times)),
                    p95=float(np.percentile(times, 95)),
                    best=float(times.min()),
                    reps=reps,
                    variant=variant,
                )
            )
        return min(results, key=lambda c: c.median)

    def _check(self, kind: int) -> None:
        wrong = self._library.CopyBenchCheck(self._handle, kind)
        if wrong < 0:
            raise CeilingError(self._error())
        if wrong:
            raise CeilingError(f"{NAMES[kind]}: {wrong} words are wrong")


def _build(devices: Sequence[jax.Device]) -> pathlib.Path:
    """Compiles the kernels for the devices, once for each state of the source."""
    architectures = sorted({d.compute_capability.replace(".", "") for d in devices})
    flags = ["-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC"]
    flags += ["-cudart", "static"]
    for a in architectures:
        flags += ["-gencode", f"arch=compute_{a},code=sm_{a}"]
    here = pathlib.Path(__file__).parent
    digest = hashlib.sha256(" ".join(flags).encode())
    for name in _SOURCES:
        digest.update((here / name).read_bytes())
    folder = pathlib.Path.home() / ".cache" / "jax_ep_benchmarks"
    library = folder / f"copy_bench-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    # Built beside and moved: two runs at once do not see half a file.
    handle, part = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    command = [_nvcc(), *flags, str(here / _SOURCES[0]), "-o", part]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        os.unlink(part)
        raise CeilingError(f"{' '.join(command)}\n{done.stderr}")
    os.replace(part, library)
    return library


def _nvcc() -> str:
    candidates = [shutil.which("nvcc")]
    candidates += [
        os.path.join(root, "bin", "nvcc")
        for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda")
        if root
    ]
    for path in candidates:
        if path and os.access(path, os.X_OK):
            return path
    raise CeilingError("nvcc was not found: put CUDA's bin folder on the PATH")


def _load(path: pathlib.Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.CopyBenchError.restype = ctypes.c_char_p
    library.CopyBenchNumVariants.restype = ctypes.c_int
    library.CopyBenchOpen.restype = ctypes.c_void_p
    library.CopyBenchOpen.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_int),
        ctypes.c_uint64,
        ctypes.c_uint64,
    ]
    library.CopyBenchClose.restype = None
    library.CopyBenchClose.argtypes = [ctypes.c_void_p]
    library.CopyBenchRun.restype = ctypes.c_int
    library.CopyBenchRun.argtypes = [
        ctypes.c_void_p,
        *[ctypes.c_int] * 5,
        ctypes.POINTER(ctypes.c_float),
    ]
    library.CopyBenchCheck.restype = ctypes.c_int64
    library.CopyBenchCheck.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return library


def memcpy(source_bytes: int, total_bytes: int, threads: int, reps: int) -> Timing:
    """Copies source_bytes over and over until total_bytes are written.

    The footprint of a dispatch of all ranks: each token is read, and written
    once for each rank that it goes to.
    """
    libc = ctypes.CDLL(None)
    libc.memcpy.restype = ctypes.c_void_p
    libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    rng = np.random.default_rng(0)
    source = rng.integers(1, 256, source_bytes, dtype=np.uint8)
    target = np.ones(total_bytes, np.uint8)
    edges = np.linspace(0, total_bytes, threads + 1).astype(np.int64)
    # Pieces that stop where the source ends.
    work: list[list[tuple[int, int, int]]] = []
    for start, stop in itertools.pairwise(edges):
        pieces = []
        at = int(start)
        while at < stop:
            offset = at % source_bytes
            size = min(source_bytes - offset, int(stop) - at)
            pieces.append((target.ctypes.data + at, source.ctypes.data + offset, size))
            at += size
        work.append(pieces)

    def copy(pieces: list[tuple[int, int, int]]) -> None:
        for to, of, size in pieces:
            libc.memcpy(to, of, size)

    timing = _threaded(copy, work, total_bytes, reps)
    if not np.array_equal(target[: source.size], source[: target.size]):
        raise CeilingError("memcpy: the copy is wrong")
    return timing


def memset(total_bytes: int, threads: int, reps: int) -> Timing:
    """Zeroes total_bytes."""
    libc = ctypes.CDLL(None)
    libc.memset.restype = ctypes.c_void_p
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    target = np.ones(total_bytes, np.uint8)
    edges = np.linspace(0, total_bytes, threads + 1).astype(np.int64)

    def fill(part: tuple[int, int]) -> None:
        libc.memset(target.ctypes.data + part[0], 0, part[1] - part[0])

    return _threaded(fill, list(itertools.pairwise(edges.tolist())), total_bytes, reps)


def _threaded(work: Callable, parts: Sequence, total_bytes: int, reps: int) -> Timing:
    """Times work(part) for all parts at once, each on a thread of its own."""
    # Small ones are repeated, or starting the threads would be what is timed.
    rounds = max(1, _LEAST_BYTES // total_bytes)

    def repeat(part) -> None:
        for _ in range(rounds):
            work(part)

    times = []
    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(reps + 1):
            start = time.perf_counter()
            list(pool.map(repeat, parts))
            times.append((time.perf_counter() - start) * 1e6 / rounds)
    kept = np.array(times[1:])
    return Timing(
        median=float(np.median(kept)),
        p95=float(np.percentile(kept, 95)),
        best=float(kept.min()),
        reps=reps,
        variant=len(parts),
    )
