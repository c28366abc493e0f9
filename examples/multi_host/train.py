"""Trains one mixture-of-experts layer with its experts on all GPUs of several hosts.

    srun python train.py                                   # slurm.sh
    python train.py --coordinator HOST:PORT --processes 2 --process 0      # jobset.yaml
    python train.py --local 4 --node-size 2                # all here, to try it

Set-up finds the nodes: the ranks of one host. Rows cross to a host once, over NCCL.
With --local the processes run on this host and --node-size cuts them into nodes; on 2
GPUs, 4 processes share them crosswise, so that each rail spans both. A student layer
learns what a fixed teacher does; process 0 prints the loss.
"""

import argparse
import os
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

TOKENS, TOP_K, HIDDEN, EXPERTS_A_RANK = 256, 4, 128, 4  # tokens of a rank


def start_here(arguments: argparse.Namespace, argv: list[str]) -> int:
    """Runs this program `arguments.local` times; the first failure ends all."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    environment = {
        **os.environ,
        # Several processes share a GPU's memory.
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3",
        # As between hosts: neither peer memory nor shared memory for NCCL.
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    places = ["--coordinator", address, "--processes", str(arguments.local)]
    running = [
        subprocess.Popen(
            [sys.executable, __file__, *argv, *places, "--process", str(p)],
            env=environment,
        )
        for p in range(arguments.local)
    ]
    try:
        codes: list[int | None] = [None] * len(running)
        while None in codes and not any(codes):
            time.sleep(0.1)
            codes = [process.poll() for process in running]
        return next((code for code in codes if code), 0)
    finally:
        for process in running:
            process.kill()
            process.wait()


def initialize(arguments: argparse.Namespace) -> None:
    """Makes this process one of the job's."""
    if arguments.coordinator is None:
        jax.distributed.initialize()  # Slurm, Open MPI and others are found
        return
    device = None
    if arguments.local:
        # Rank r of node n on GPU (r + n): each rail spans all GPUs.
        node, local = divmod(arguments.process, arguments.node_size or 1)
        device = [(node + local) % arguments.gpus_here]
        jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        arguments.coordinator, arguments.processes, arguments.process, device
    )


def layer(comm: jax_ep.Communicator):
    """(x, router, experts) -> y of this rank's tokens."""

    def run(x, router, experts):
        scores, chosen = jax.lax.top_k(jax.nn.softmax(x @ router), TOP_K)
        return jax_ep.moe(
            x,
            chosen,
            scores / scores.sum(-1, keepdims=True),
            lambda rows, sizes: jax_ep.ragged_dot(jnp.tanh(rows), experts, sizes),
            comm=comm,
            num_experts=EXPERTS_A_RANK * comm.num_ranks,
        )

    return run


def train(arguments: argparse.Namespace) -> list[float]:
    """Trains as every process does; returns the losses."""
    mesh = jax.make_mesh((jax.device_count(),), ("ep",))
    everywhere, split = P(), P("ep")
    with jax_ep.Communicator(mesh, "ep", node_size=arguments.node_size) as comm:
        if jax.process_index() == 0:
            print(comm)
        experts = EXPERTS_A_RANK * comm.num_ranks
        run = layer(comm)

        @jax.jit
        @jax.shard_map(mesh=mesh, in_specs=everywhere, out_specs=(everywhere, split))
        def init(seed):
            keys = jax.random.split(jax.random.key(seed), 2)
            router = jax.random.normal(keys[0], (HIDDEN, experts)) / 4
            mine = jax.random.fold_in(keys[1], jax.lax.axis_index("ep"))
            shape = (EXPERTS_A_RANK, HIDDEN, HIDDEN)
            return router, jax.random.normal(mine, shape) / HIDDEN**0.5

        @jax.jit
        @jax.shard_map(
            mesh=mesh,
            in_specs=(everywhere, everywhere, split, split),
            out_specs=(everywhere, split),
        )
        def step(number, router, teacher, student):
            key = jax.random.fold_in(jax.random.key(1), number)
            key = jax.random.fold_in(key, jax.lax.axis_index("ep"))
            x = jax.random.normal(key, (TOKENS, HIDDEN))
            wanted = run(x, router, teacher)

            def loss(student):
                return ((run(x, router, student) - wanted) ** 2).mean()

            value, gradient = jax.value_and_grad(loss)(student)
            return jax.lax.pmean(value, "ep"), student - 100 * gradient

        router, teacher = init(0)
        _, student = init(2)
        losses = []
        for number in range(arguments.steps):
            number = jax.device_put(jnp.int32(number), NamedSharding(mesh, everywhere))
            loss, student = step(number, router, teacher, student)
            losses.append(float(loss))
            if jax.process_index() == 0 and (len(losses) % 10 == 1):
                print(f"step {len(losses) - 1:4}  loss {losses[-1]:.4f}", flush=True)
        if jax.process_index() == 0:
            print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)
    return losses


def main(argv: list[str] | None = None) -> int:
    """Starts the processes, or is one of them."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description="Trains a layer on several hosts.")
    add = parser.add_argument
    add("--coordinator", help="host:port of process 0; without it JAX looks")
    add("--processes", type=int)
    add("--process", type=int)
    add("--local", type=int, help="start so many processes on this host")
    add("--gpus-here", type=int, default=2, help="with --local: GPUs to share")
    add("--node-size", type=int, help="ranks of a node; without it: of a host")
    add("--steps", type=int, default=100)
    arguments = parser.parse_args(argv)
    if arguments.local and arguments.process is None:
        return start_here(arguments, argv)
    initialize(arguments)
    losses = train(arguments)
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
