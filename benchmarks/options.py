"""Command-line options that all benchmarks share, and what follows from them."""

from __future__ import annotations

import argparse
import dataclasses

import jax
from workloads import ROUTINGS, Workload


def positive(text: str) -> int:
    """An option's value, an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {value}")
    return value


def positives(text: str) -> list[int]:
    """An option's value, "N[,N...]"."""
    return [positive(n) for n in text.split(",")]


def parser(description: str | None, quick: str) -> argparse.ArgumentParser:
    """The shared options; `quick` says what --quick does."""
    shared = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = shared.add_argument
    add("--quick", action="store_true", help=quick)
    add("--json", metavar="PATH", help="append one JSON line for each number")
    add("--platform", choices=("auto", "gpu", "cpu"), default="auto")
    add("--ranks", type=positive, help="devices to use (default: all; 8 on a CPU)")
    add("--T", type=positive, help="tokens a rank")
    add("--H", type=positive, help="numbers in a row")
    add("--K", type=positive, help="experts a token chooses")
    add("--E", type=positive, help="experts")
    add("--routing", choices=ROUTINGS)
    return shared


def add_num_sms(of: argparse.ArgumentParser) -> None:
    """--num-sms, for benchmarks that go through several numbers."""
    of.add_argument(
        "--num-sms",
        type=positives,
        default=[24],
        metavar="N[,N...]",
        help="SMs that an operation of ours uses on a GPU (default: 24)",
    )


def choose_platform(options: argparse.Namespace) -> None:
    """Before JAX's devices are asked for."""
    if options.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.ranks or 8)


def devices_of(options: argparse.Namespace) -> list[jax.Device]:
    """Those to measure on; ends the program where the machine lacks them."""
    devices = jax.devices()
    ranks = options.ranks or len(devices)
    if len(devices) < ranks:
        raise SystemExit(f"--ranks {ranks}: this machine has {len(devices)} devices")
    if options.platform == "gpu" and devices[0].platform != "gpu":
        raise SystemExit("--platform gpu: JAX sees no GPU here")
    return devices[:ranks]


_SIZES = {"num_tokens": "T", "hidden": "H", "top_k": "K", "num_experts": "E"}


def with_options(workload: Workload, options: argparse.Namespace) -> Workload:
    """`workload` with what was asked for."""
    names = _SIZES | {n: n for n in ("dtype", "routing", "capacity", "seed")}
    given = {field: getattr(options, name, None) for field, name in names.items()}
    return dataclasses.replace(
        workload, **{k: v for k, v in given.items() if v is not None}
    )
