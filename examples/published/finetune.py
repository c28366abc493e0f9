"""Trains a published model further on text, on a mesh of the axes "data" and "ep".

    python examples/published/finetune.py DIR --text notes.txt --data 2 --out out
    python examples/published/finetune.py DIR --text notes.txt --out out --resume

Experts are split over "ep" and copied over "data"; sequences are split over both axes.
The loss is the cross entropy plus a share of the balance loss. Where DIR has a
tokenizer.json it makes tokens of the text (package tokenizers); otherwise a byte is a
token. Without --text the text is the sources of Python's standard library. Parameters
stay float32; --dtype is that of the computation.

Checkpoints are orbax's; --resume goes on from the last, on any number of devices.
loss.csv in --out has one row a step. The share of the machine's arithmetic (MFU) counts
6 operations a token for each parameter that it meets, embeddings left out.
"""

import argparse
import csv
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
import orbax.checkpoint as ocp
import tqdm  # type: ignore[import-untyped]
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import text_data
import weights
from config import UnsupportedModelError
from generate import DTYPES, tokenizer
from model import Model

import jax_ep

SEQUENCES = P(("data", "ep"))
# Dense bfloat16 operations a second, by the beginning of JAX's device_kind.
PEAK_TFLOPS = {"NVIDIA A100": 312, "NVIDIA H100": 989, "NVIDIA H200": 989}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", metavar="DIR", type=pathlib.Path)
    parser.add_argument("--text", type=pathlib.Path, help="a file in UTF-8")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"))
    parser.add_argument("--steps", type=int, default=100, help="in all")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--balance", type=float, default=0.01, help="its weight")
    parser.add_argument("--data", type=int, default=1, help='size of the axis "data"')
    parser.add_argument("--ranks", type=int, help="devices; default: all (CPU: 1)")
    parser.add_argument("--platform", choices=("cpu", "cuda"), help="default: JAX's")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--peak-tflops", type=float, help="of a device, for MFU")
    return parser.parse_args(argv)


class Tuner:
    """A model, its optimizer, and one step of training.

    Attributes:
      state: parameters and optimizer state on the mesh.
      step: (state, token ids [B, S]) -> (state, [cross entropy, balance]).
    """

    def __init__(self, model: Model, args: argparse.Namespace):
        self.model = model
        self.mesh = model.comm.mesh
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(args.learning_rate)
        )
        self._balance = args.balance
        self._dtype = DTYPES[args.dtype]
        self._specs = weights.partition_specs(model.params, "ep")
        with jax.set_mesh(self.mesh):
            optimizer = jax.jit(self.optimizer.init)(model.params)
        self.state = {"params": model.params, "optimizer": optimizer}
        self.step = jax.jit(self._step, donate_argnums=0)

    def put(self, token_ids: np.ndarray) -> jax.Array:
        return jax.device_put(token_ids, NamedSharding(self.mesh, SEQUENCES))

    def _step(self, state, token_ids):
        gradients, parts = jax.grad(self._loss, has_aux=True)(
            state["params"], token_ids
        )
        # optax takes powers of a float by the number of the step, an integer.
        with jax.numpy_dtype_promotion("standard"):
            updates, optimizer = self.optimizer.update(
                gradients, state["optimizer"], state["params"]
            )
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer}, parts

    def _loss(self, params, token_ids):
        params = jax.tree.map(lambda a: a.astype(self._dtype), params)
        entropy, balance = jax.shard_map(
            self.model.loss,
            mesh=self.mesh,
            in_specs=(self._specs, SEQUENCES),
            out_specs=(P(), P()),
        )(params, token_ids)
        return entropy + self._balance * balance, jnp.stack([entropy, balance])


def met_parameters(model: Model) -> float:
    """Parameters that a token meets, embeddings left out."""
    share = model.config.top_k / model.config.experts
    leaves = jax.tree_util.tree_leaves_with_path(model.params)
    met = 0.0
    for path, leaf in leaves:
        if path[0].key != "embed_tokens":
            experts = jax.tree_util.DictKey("experts") in path
            met += leaf.size * (share if experts else 1)
    return met


def read_tokens(args: argparse.Namespace, vocabulary: int) -> np.ndarray:
    """The text as token ids."""
    if args.text is None:
        tokens = text_data.load_text()[0]
    elif (args.directory / "tokenizer.json").exists():
        text = args.text.read_text(encoding="utf-8")
        tokens = np.array(tokenizer(args.directory).encode(text).ids)
    else:
        tokens = np.frombuffer(args.text.read_bytes(), np.uint8)
    if len(tokens) < args.length or tokens.max() >= vocabulary:
        raise SystemExit(
            f"the text must have at least {args.length} tokens below {vocabulary}, "
            f"found {len(tokens)}, the largest {tokens.max(initial=0)}"
        )
    return tokens


def make_mesh(args: argparse.Namespace) -> jax.sharding.Mesh:
    devices = jax.devices()[: args.ranks]
    if args.batch % len(devices) or len(devices) % args.data:
        raise SystemExit(
            f"{len(devices)} devices must divide --batch {args.batch} and be a "
            f"multiple of --data {args.data}"
        )
    shape = (args.data, len(devices) // args.data)
    return jax.make_mesh(shape, ("data", "ep"), devices=devices)


def peak_flops(args: argparse.Namespace) -> float | None:
    """Operations a second of all devices together, where known."""
    kind = jax.devices()[0].device_kind
    known = (v for k, v in PEAK_TFLOPS.items() if kind.startswith(k))
    tflops = args.peak_tflops or next(known, None)
    return tflops and tflops * 1e12 * len(jax.devices()[: args.ranks])


def main(argv: list[str] | None = None) -> list[list[float]]:
    args = arguments(argv)
    if args.platform:
        jax.config.update("jax_platforms", args.platform)
    jax.config.update("jax_num_cpu_devices", args.ranks or 1)
    args.out.mkdir(parents=True, exist_ok=True)
    with jax_ep.Communicator(make_mesh(args), "ep") as comm:
        try:
            model = Model.load(args.directory, comm, progress=True)
        except (weights.CheckpointError, UnsupportedModelError) as error:
            raise SystemExit(f"{error}") from error
        tokens = read_tokens(args, model.config.vocabulary)
        return train(Tuner(model, args), tokens, args)


def train(
    tuner: Tuner, tokens: np.ndarray, args: argparse.Namespace
) -> list[list[float]]:
    """Takes the steps that are left; returns [cross entropy, balance] of each."""
    manager = ocp.CheckpointManager(
        (args.out / "checkpoints").resolve(),
        options=ocp.CheckpointManagerOptions(max_to_keep=2),
    )
    first = 0
    if args.resume:
        first = manager.latest_step() or 0
        if not first:
            raise SystemExit(f"{args.out / 'checkpoints'}: there is nothing to resume")
        restore = ocp.args.StandardRestore(jax.tree.map(_like, tuner.state))
        tuner.state = dict(manager.restore(first, args=restore))
    history: list[list[float]] = []
    begin = time.perf_counter()
    for step in tqdm.tqdm(range(first, args.steps), "training", unit="step"):
        batch = text_data.random_windows(
            tokens, args.batch, args.length, seed=(0, step)
        )
        tuner.state, parts = tuner.step(tuner.state, tuner.put(batch))
        history.append(np.asarray(parts).tolist())
        if step == first:  # compiled now
            begin = time.perf_counter()
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            manager.save(step + 1, args=ocp.args.StandardSave(tuner.state))
    seconds = (time.perf_counter() - begin) / max(len(history) - 1, 1)
    manager.wait_until_finished()
    manager.close()
    with (args.out / "loss.csv").open("a" if args.resume else "w") as file:
        rows = csv.writer(file)
        if not args.resume:
            rows.writerow(["step", "loss", "balance"])
        rows.writerows([first + i, *parts] for i, parts in enumerate(history))
    report(tuner, seconds, history, args)
    return history


def _like(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def report(tuner: Tuner, seconds: float, history: Any, args: argparse.Namespace):
    count = args.batch * args.length
    print(
        f"loss {history[0][0]:.4f} to {history[-1][0]:.4f}, balance "
        f"{history[-1][1]:.3f}; {count / seconds:,.0f} tokens/s"
    )
    peak = peak_flops(args)
    if peak is None:
        print("MFU: the peak of these devices is not known, give --peak-tflops")
    else:
        rate = 6 * met_parameters(tuner.model) * count / seconds
        print(f"MFU: {rate / peak:.1%} of {peak / 1e12:,.0f} TFLOP/s")


if __name__ == "__main__":
    main()
