"""The training examples in processes of their own, and the losses they leave."""

import csv
import pathlib

from processes import run_script

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"
OPTIONS = ("--batch=8", "--steps=3")


def read_losses(out):
    with (out / "loss.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def train(program, *arguments, out, **variables):
    """Runs an example for three steps; returns its losses."""
    done = run_script(
        str(EXAMPLES / program),
        *OPTIONS,
        *arguments,
        f"--out={out}",
        timeout=400,
        **variables,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_losses(out)
