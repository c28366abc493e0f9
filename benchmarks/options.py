"""Command-line options that all benchmarks share."""

from __future__ import annotations

import argparse

from workloads import ROUTINGS


def positive(text: str) -> int:
    """An option's value, an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {value}")
    return value


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
