"""Trains the language model of train_moe_lm.py with several processes on one host.

    python examples/multi_process.py --processes 4              # starts them itself
    srun -n 4 python examples/multi_process.py                  # under Slurm
    mpirun -n 4 python examples/multi_process.py                # under Open MPI

Under Slurm and Open MPI `jax.distributed.initialize()` finds the other processes (for
Open MPI 5 it wants jax 0.11 and mpi4py).
The ranks of a group lie in all processes, so rows cross between them in every layer.
The losses are those of one process. Process 0 writes loss.csv to --out.
"""

import argparse
import pathlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import text_data
import train_moe_lm
from jax.sharding import AxisType, Mesh
from moe_lm_model import ModelConfig
from train_moe_lm import TrainConfig, Trainer

import jax_ep


def start_processes(count: int, argv: list[str]) -> int:
    """Runs this program `count` times; the first failure ends all of them."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    running = [
        subprocess.Popen([sys.executable, __file__, *argv, f"--place={address},{i}"])
        for i in range(count)
    ]
    try:
        codes: list[int | None] = [None] * count
        while None in codes and not any(codes):
            time.sleep(0.1)
            codes = [process.poll() for process in running]
        return next((code for code in codes if code), 0)
    finally:
        for process in running:
            process.kill()
            process.wait()


def make_mesh() -> Mesh:
    """("data", "ep"), as train_moe_lm.make_mesh, with groups across processes."""
    devices = np.array(jax.devices()).reshape(jax.process_count(), -1)
    groups = 2 if devices.shape[1] % 2 == 0 else 1
    # [process][group][rank in the process] -> [group][process, rank there]
    devices = devices.reshape(len(devices), groups, -1).swapaxes(0, 1)
    kinds = (AxisType.Explicit,) * 2
    return Mesh(devices.reshape(groups, -1), ("data", "ep"), axis_types=kinds)


def train(arguments: argparse.Namespace) -> list[dict]:
    """Trains as every process does; returns each step's statistics."""
    config = TrainConfig(steps=arguments.steps, batch=arguments.batch)
    first = jax.process_index() == 0
    text, _ = text_data.load_text()
    with jax_ep.Communicator(make_mesh(), "ep", backend=arguments.backend) as comm:
        trainer = Trainer(ModelConfig(), config.optimizer(), comm)
        state = trainer.init(config.seed)
        if first:
            print(comm)
        history: list[dict] = []
        start = time.monotonic()
        for step in range(config.steps):
            # Every process makes the whole batch and puts its part on its devices.
            tokens = text_data.random_windows(
                text,
                config.batch,
                trainer.model.context + 1,
                seed=(config.seed, step),
            )
            batch = jax.make_array_from_callback(
                tokens.shape,
                jax.sharding.NamedSharding(comm.mesh, train_moe_lm.BATCH),
                lambda index, tokens=tokens: tokens[index],
            )
            state, statistics = trainer.step(state, batch)
            history.append({name: float(x) for name, x in statistics.items()})
            if first and (step % 10 == 0 or step + 1 == config.steps):
                loss, seconds = history[-1]["loss"], time.monotonic() - start
                print(f"step {step:4}  loss {loss:.3f}  {seconds:.0f} s", flush=True)
    if first:
        arguments.out.mkdir(parents=True, exist_ok=True)
        train_moe_lm.write_csv(arguments.out / "loss.csv", history)
    return history


def main(argv: list[str] | None = None) -> int:
    """Starts the processes, or is one of them."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description="Trains with several processes on one host.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--processes", type=int, help="start so many here; None: a cluster did")
    add("--cpu-devices", type=int, help="of each process; None: 8 in all, or 2")
    add("--backend", choices=("cuda", "cpu", "xla"), help="None: the best one here")
    add("--steps", type=int, default=400)
    add("--batch", type=int, default=16, help="sequences a step, over all devices")
    add("--out", type=pathlib.Path, default=pathlib.Path("out"))
    add("--place", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.processes and not arguments.place:
        return start_processes(arguments.processes, argv)
    count = max(1, train_moe_lm.NUM_CPU_DEVICES // (arguments.processes or 4))
    jax.config.update("jax_num_cpu_devices", arguments.cpu_devices or count)
    if arguments.place:
        address, process = arguments.place.split(",")
        jax.distributed.initialize(
            address,
            arguments.processes,
            int(process),
            local_device_ids=[int(process)],  # a GPU each; virtual devices ignore it
        )
    else:
        jax.distributed.initialize()
    train(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
