"""Trains a mixture-of-experts language model with jax_ep, on real text.

    python examples/train_moe_lm.py             # all GPUs, or 8 virtual CPU devices
    python examples/train_moe_lm.py --resume    # goes on from the last checkpoint

The mesh has two axes. Sequences are split over both. Experts are split over "ep" and
copied over "data": each "data" coordinate is a group of ranks that exchange tokens.
Writes checkpoint.npz, loss.csv and loss.png to --out.
"""

import argparse
import csv
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable

import checkpoint
import jax
import matplotlib.figure
import numpy as np
import optax  # type: ignore[import-untyped]
import text_data
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from moe_lm_model import ModelConfig, MoELanguageModel, partition_specs
from tqdm import tqdm  # type: ignore[import-untyped]

import jax_ep

NUM_CPU_DEVICES = 8
BALANCE_WEIGHT = 0.02  # of the load-balancing loss beside the cross entropy
VALIDATION_BATCHES = 8
BATCH = P(("data", "ep"))  # sequences are split over all devices


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What, beside the number of devices, decides the loss curve."""

    steps: int = 400
    batch: int = 16  # sequences a step, over all devices
    learning_rate: float = 3e-3
    seed: int = 0

    def optimizer(self) -> optax.GradientTransformation:
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=min(20, self.steps // 10),
            decay_steps=self.steps,
        )
        return optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99)
        )


class Trainer:
    """The model on its mesh: how it starts, and what one step does.

    Attributes:
      step: (state, tokens [B, S + 1]) -> (state, statistics of the step).
      evaluate: (state, tokens) -> statistics.
    """

    def __init__(
        self,
        model: ModelConfig,
        optimizer: optax.GradientTransformation,
        comm: jax_ep.Communicator,
    ):
        """Compiles nothing yet: the first call of `step` does."""
        if model.experts % comm.num_ranks:
            raise ValueError(
                f"{model.experts} experts cannot be split over {comm.num_ranks} ranks:"
                f" take a multiple of {comm.num_ranks}"
            )
        self.model = model
        self.optimizer = optimizer
        self.comm = comm
        self.graph, params = nnx.split(nnx.eval_shape(self._new_model), nnx.Param)
        self.specs = partition_specs(params)
        self.step = jax.jit(self._step, donate_argnums=0)
        self.evaluate = jax.jit(lambda state, x: self._loss(state["params"], x)[1])

    def init(self, seed: int) -> dict:
        """New parameters and optimizer state, laid out on the mesh."""
        shardings = jax.tree.map(self._sharding, self.specs)
        params = jax.jit(
            lambda: nnx.state(self._new_model(seed), nnx.Param), out_shardings=shardings
        )()
        with jax.set_mesh(self.comm.mesh):
            optimizer = jax.jit(self.optimizer.init)(params)
        return {"params": params, "optimizer": optimizer}

    def put(self, tokens: np.ndarray) -> jax.Array:
        """A batch of sequences, split over the devices."""
        return jax.device_put(tokens, self._sharding(BATCH))

    def _new_model(self, seed: int = 0) -> MoELanguageModel:
        return MoELanguageModel(self.model, rngs=nnx.Rngs(seed))

    def _sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.comm.mesh, spec)

    def _step(self, state, tokens):
        gradients, statistics = jax.grad(self._loss, has_aux=True)(
            state["params"], tokens
        )
        # optax takes powers of a float by the number of the step, an integer.
        with jax.numpy_dtype_promotion("standard"):
            updates, optimizer = self.optimizer.update(
                gradients, state["optimizer"], state["params"]
            )
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer}, statistics

    def _loss(self, params, tokens):
        """What training makes small, and statistics, of a whole batch."""
        return jax.shard_map(
            self._rank_loss,
            mesh=self.comm.mesh,
            in_specs=(self.specs, BATCH),
            out_specs=P(),
        )(params, tokens)

    def _rank_loss(self, params, tokens):
        """The same, seen from one rank: its sequences, its experts.

        JAX sees that the loss is a mean over ranks, and which parameters each rank
        has a copy of: it sums their gradients over the ranks by itself.
        """
        model = nnx.merge(self.graph, params)
        logits, layers = model(tokens[:, :-1], self.comm)
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()
        balance = layers["balance_loss"].mean()
        statistics = {
            "loss": cross_entropy,
            "balance": balance,
            "dropped": 1 - layers["served"].mean(),
        }
        loss = cross_entropy + BALANCE_WEIGHT * balance
        return jax.lax.pmean((loss, statistics), self.comm.mesh.axis_names)


def make_mesh(backend: str | None) -> jax.sharding.Mesh:
    """("data", "ep"), two groups where there are devices enough."""
    devices = jax.devices("cpu" if backend == "cpu" else None)
    groups = 2 if len(devices) >= 4 and len(devices) % 2 == 0 else 1
    shape = groups, len(devices) // groups
    return jax.make_mesh(shape, ("data", "ep"), devices=devices)


def train(
    trainer: Trainer,
    state: dict,
    history: list[dict],
    config: TrainConfig,
    text: np.ndarray,
    after_step: Callable[[dict], None],
) -> dict:
    """Takes the steps that `history` lacks, and appends each one's statistics."""
    tokens_per_step = config.batch * trainer.model.context
    with tqdm(
        total=config.steps * tokens_per_step,
        initial=len(history) * tokens_per_step,
        desc="training",
        unit="tok",
        unit_scale=True,
        mininterval=0.5,
        dynamic_ncols=True,
    ) as bar:
        for step in range(len(history), config.steps):
            tokens = text_data.random_windows(
                text,
                config.batch,
                trainer.model.context + 1,
                seed=(config.seed, step),
            )
            state, statistics = trainer.step(state, trainer.put(tokens))
            # Waits for the step: virtual devices share a few cores, and a second
            # step in flight would only stand in the first one's way.
            history.append({name: float(x) for name, x in statistics.items()})
            shown = {"loss": "{loss:.3f}", "dropped": "{dropped:.1%}"}
            shown = {name: form.format(**history[-1]) for name, form in shown.items()}
            bar.set_postfix(shown, refresh=False)
            bar.update(tokens_per_step)
            after_step(state)
    return state


def validation_loss(trainer: Trainer, state: dict, text: np.ndarray, batch: int):
    """Mean cross entropy over some pieces of text, in nats per byte."""
    losses = []
    for i in range(VALIDATION_BATCHES):
        tokens = text_data.random_windows(
            text, batch, trainer.model.context + 1, seed=(i,)
        )
        losses.append(float(trainer.evaluate(state, trainer.put(tokens))["loss"]))
    return float(np.mean(losses))


def describe(trainer: Trainer, state: dict) -> str:
    model, comm = trainer.model, trainer.comm
    num_params = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    platform = comm.mesh.devices.flat[0].platform
    return (
        f"{num_params:,} parameters, {model.experts} experts, top-{model.top_k};"
        f" mesh {dict(comm.mesh.shape)} of {platform} devices, backend {comm.backend!r}"
    )


def summary(history: list[dict], entropy: float, validation: float) -> str:
    def last(name):
        return np.mean([row[name] for row in history[-20:]])

    losses = {
        "unigram entropy of the text": entropy,
        "training loss, last 20 steps": last("loss"),
        "validation loss": validation,
    }
    lines = [
        f"{name:28} {nats:.3f} nats = {nats / math.log(2):.3f} bits per byte"
        for name, nats in losses.items()
    ]
    dropped = f"{last('dropped'):.2%} of the router's choices"
    return "\n".join([*lines, f"{'dropped, last 20 steps':28} {dropped}"])


def write_csv(path: pathlib.Path, history: list[dict]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", *history[0]])
        writer.writeheader()
        writer.writerows({"step": i, **row} for i, row in enumerate(history))


def plot(path: pathlib.Path, history: list[dict], entropy: float, validation: float):
    figure = matplotlib.figure.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(
        xlabel="step", ylabel="cross entropy, nats per byte", title="train_moe_lm.py"
    )
    axes.plot([row["loss"] for row in history], label="training")
    axes.axhline(entropy, color="gray", ls="--", label="unigram entropy of the text")
    axes.plot(len(history) - 1, validation, "o", color="C1", label="validation")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a mixture-of-experts language model with jax_ep.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--backend", choices=("cuda", "cpu", "xla"), help="None: the best one here")
    add("--out", type=pathlib.Path, default=pathlib.Path("out"))
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--checkpoint-every", type=int, default=100, help="steps")
    for group in (TrainConfig, ModelConfig):
        for field in dataclasses.fields(group):
            option = "--" + field.name.replace("_", "-")
            add(option, type=type(field.default), default=field.default, help=" ")
    return parser.parse_args(argv)


def take(kind: type, arguments: argparse.Namespace):
    """The arguments that are fields of the dataclass `kind`."""
    return kind(
        **{f.name: getattr(arguments, f.name) for f in dataclasses.fields(kind)}
    )


def history_of(path: pathlib.Path, model: ModelConfig, config: TrainConfig):
    """The history in a checkpoint, which must be of a run with these options."""
    about = checkpoint.read_about(path)
    asked = {"model": dataclasses.asdict(model), "train": dataclasses.asdict(config)}
    for part, options in asked.items():
        if about[part] != options:
            raise SystemExit(f"{path} was made with {about[part]}, not {options}")
    return about["history"]


def main(argv: list[str] | None = None) -> list[dict]:
    """Trains, writes the files, and returns each step's statistics."""
    start = time.monotonic()
    arguments = parse_arguments(argv)
    jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "checkpoint.npz"
    model, config = take(ModelConfig, arguments), take(TrainConfig, arguments)
    mesh = make_mesh(arguments.backend)
    if config.steps < 1 or config.batch < 1 or config.batch % mesh.size:
        raise SystemExit(
            f"--steps {config.steps} --batch {config.batch}: wanted are at least 1 step"
            f" and a batch that can be split over {mesh.size} devices"
        )

    history = history_of(path, model, config) if arguments.resume else []
    text, held_out = text_data.load_text()
    entropy = text_data.unigram_entropy(text)
    with jax_ep.Communicator(mesh, "ep", backend=arguments.backend) as comm:
        trainer = Trainer(model, config.optimizer(), comm)
        state = trainer.init(config.seed)
        if arguments.resume:
            state = checkpoint.load(path, like=state)
        print(describe(trainer, state))
        print(
            f"{text.size:,} bytes of the standard library to train on,"
            f" {held_out.size:,} to validate"
        )

        def after_step(state):
            if (
                len(history) % arguments.checkpoint_every
                and len(history) < config.steps
            ):
                return
            about = {
                "model": dataclasses.asdict(model),
                "train": dataclasses.asdict(config),
                "history": history,
            }
            checkpoint.save(path, state, about)

        state = train(trainer, state, history, config, text, after_step)
        validation = validation_loss(trainer, state, held_out, config.batch)

    write_csv(arguments.out / "loss.csv", history)
    plot(arguments.out / "loss.png", history, entropy, validation)
    print(summary(history, entropy, validation))
    print(f"{time.monotonic() - start:.0f} s in all; see {arguments.out}/")
    return history


if __name__ == "__main__":
    main()
