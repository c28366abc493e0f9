"""The examples run, give the same on every backend, and come back from files."""

import csv
import dataclasses
import math
import pathlib
import re
import sys

import harness
import jax
import numpy as np
import pytest
from processes import run_script

import jax_ep

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import checkpoint  # noqa: E402
import decode  # noqa: E402
import moe_lm_model  # noqa: E402
import text_data  # noqa: E402
import train_moe_lm  # noqa: E402

# In float32, for which GPUs have no kernels.
pytestmark = [
    pytest.mark.filterwarnings("ignore:jax_ep.ragged_dot. falling back"),
    pytest.mark.filterwarnings("ignore:jax_ep.gated_mlp. multiplying whole batches"),
]

# Small enough to compile in seconds.
MODEL = moe_lm_model.ModelConfig(
    context=16, layers=1, width=32, heads=2, experts=8, expert_width=32
)
TRAINING = train_moe_lm.TrainConfig(steps=6, batch=16)


def train(out, *arguments):
    """Runs train_moe_lm.main on MODEL and TRAINING."""
    options = dataclasses.asdict(MODEL) | dataclasses.asdict(TRAINING) | {"out": out}
    words = [
        word
        for name, value in options.items()
        for word in ("--" + name.replace("_", "-"), str(value))
    ]
    return train_moe_lm.main([*words, *arguments])


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """(directory, history) of one run on the backend that this machine chooses."""
    out = tmp_path_factory.mktemp("native")
    return out, train(out)


@pytest.fixture
def trainer():
    with jax_ep.Communicator(train_moe_lm.make_mesh(None), "ep") as comm:
        yield train_moe_lm.Trainer(MODEL, TRAINING.optimizer(), comm)


def column(history, name):
    return np.array([row[name] for row in history])


def test_training_gives_the_same_losses_on_xla(native, tmp_path):
    _, history = native
    oracle = train(tmp_path, "--backend", "xla")
    tolerance = 2e-2 if harness.ON_GPU else 1e-4  # TF32, and sums in any order
    for name in ("loss", "balance", "dropped"):
        np.testing.assert_allclose(
            column(history, name),
            column(oracle, name),
            rtol=tolerance,
            atol=tolerance,
            err_msg=name,
        )
    assert column(history, "loss")[-1] < column(history, "loss")[0]


def test_training_leaves_its_files(native):
    out, history = native
    assert len(history) == TRAINING.steps
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    with (out / "loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == column(history, "loss").tolist()
    about = checkpoint.read_about(out / "checkpoint.npz")
    assert moe_lm_model.ModelConfig(**about["model"]) == MODEL
    assert about["history"] == history


def test_resumed_run_ends_as_the_uninterrupted_one(native, trainer, tmp_path):
    out, history = native
    text, _ = text_data.load_text()
    path = tmp_path / "checkpoint.npz"
    half = []

    class BrokenOff(Exception):
        pass

    def save_and_break_off(state):
        if len(half) == 3:
            about = checkpoint.read_about(out / "checkpoint.npz")
            checkpoint.save(path, state, about | {"history": half})
            raise BrokenOff

    state = trainer.init(TRAINING.seed)
    with pytest.raises(BrokenOff):
        train_moe_lm.train(trainer, state, half, TRAINING, text, save_and_break_off)
    assert trainer.step._cache_size() == 1, "a later step compiled again"

    resumed = train(tmp_path, "--resume")
    assert len(resumed) == TRAINING.steps
    tolerance = 2e-2 if harness.ON_GPU else 1e-6
    np.testing.assert_allclose(
        column(resumed, "loss"), column(history, "loss"), rtol=tolerance
    )


def test_resume_refuses_another_run(native):
    out, _ = native
    with pytest.raises(
        SystemExit, match=r"was made with .*'seed': 0.*, not .*'seed': 1"
    ):
        train(out, "--resume", "--seed", "1")


@pytest.mark.parametrize("bad", [("--steps", "0"), ("--batch", "9")])
def test_sizes_that_do_not_fit_are_refused(bad, tmp_path):
    if bad[0] == "--batch" and 9 % jax.device_count() == 0:
        pytest.skip(f"a batch of 9 fits {jax.device_count()} devices")
    with pytest.raises(SystemExit, match="wanted are at least 1 step and a batch"):
        train(tmp_path, *bad)


def test_experts_that_do_not_fit_the_mesh_are_refused(trainer):
    ranks = trainer.comm.num_ranks
    if ranks == 1:
        pytest.skip("any number of experts fits one rank")
    model = dataclasses.replace(MODEL, experts=ranks + 1)
    with pytest.raises(ValueError, match=f"take a multiple of {ranks}"):
        train_moe_lm.Trainer(model, TRAINING.optimizer(), trainer.comm)


def test_checkpoint_round_trip(tmp_path):
    tree = {
        "a": [jax.numpy.arange(6.0).reshape(2, 3), jax.numpy.int32(7)],
        "b": {"c": jax.numpy.array([True, False])},
    }
    path = tmp_path / "checkpoint.npz"
    checkpoint.save(path, tree, {"steps": 3, "loss": 0.1})
    checkpoint.save(path, tree, {"steps": 4, "loss": 0.1})  # over the old one
    assert checkpoint.read_about(path) == {"steps": 4, "loss": 0.1}
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.npz"]

    zeros = jax.tree.map(jax.numpy.zeros_like, tree)
    jax.tree.map(np.testing.assert_array_equal, checkpoint.load(path, zeros), tree)
    part = checkpoint.load(path, {"b": zeros["b"]})
    np.testing.assert_array_equal(part["b"]["c"], tree["b"]["c"])

    with pytest.raises(ValueError, match="has no array 'd'"):
        checkpoint.load(path, {"d": zeros["b"]["c"]})
    with pytest.raises(
        ValueError, match=r"'b/c' is bool\(2,\), but bool\(3,\) is wanted"
    ):
        checkpoint.load(path, {"b": {"c": jax.numpy.zeros(3, bool)}})


def test_text_is_fixed_and_split():
    text, held_out = text_data.load_text()
    again, _ = text_data.load_text()
    np.testing.assert_array_equal(text, again)
    assert text.dtype == held_out.dtype == np.uint8
    assert 0 < held_out.size < text.size
    windows = text_data.random_windows(text, 4, 32, seed=(1, 2))
    assert windows.shape == (4, 32)
    same = text_data.random_windows(text, 4, 32, seed=(1, 2))
    np.testing.assert_array_equal(windows, same)
    assert (windows != text_data.random_windows(text, 4, 32, seed=(1, 3))).any()


def test_unigram_entropy_of_known_texts():
    one_byte = np.zeros(10, np.uint8)
    all_bytes = np.arange(256, dtype=np.uint8)
    assert text_data.unigram_entropy(one_byte) == 0
    assert text_data.unigram_entropy(all_bytes) == pytest.approx(math.log(256))


def test_decoder_says_what_the_model_says():
    """With its cache, a token at a time, by either kind of layer."""
    from flax import nnx

    # Room for every token: the decoder drops none.
    config = dataclasses.replace(MODEL, layers=2, capacity_factor=8.0)
    mesh = train_moe_lm.make_mesh(None)
    with jax_ep.Communicator(mesh, "ep") as comm:
        trainer = train_moe_lm.Trainer(config, TRAINING.optimizer(), comm)
        params = trainer.init(3)["params"]
        tokens = text_data.random_windows(
            text_data.load_text()[0], 2 * mesh.size, 12, seed=(5,)
        )

        def whole(params, tokens):
            return nnx.merge(trainer.graph, params)(tokens, comm)[0]

        want = jax.jit(
            jax.shard_map(
                whole,
                mesh=mesh,
                in_specs=(trainer.specs, train_moe_lm.BATCH),
                out_specs=train_moe_lm.BATCH,
            )
        )(params, trainer.put(tokens))
        tolerance = 5e-2 if harness.ON_GPU else 2e-4
        for layer in decode.LAYERS:
            decoder = decode.Decoder(config, comm, len(tokens), layer)
            found = decoder.logits(params, decoder.put(tokens))
            np.testing.assert_allclose(
                found, want, rtol=tolerance, atol=tolerance, err_msg=layer
            )


def test_decoding_by_either_layer(native, capsys):
    out, _ = native
    devices = jax.device_count()
    texts = decode.main(
        [
            "--out",
            str(out),
            "--sequences",
            str(devices),
            "--prompt",
            "5",
            "--count",
            "9",
        ]
    )
    assert texts["low latency"].shape == (devices, 9)
    if not harness.ON_GPU:
        np.testing.assert_array_equal(texts["low latency"], texts["ordinary"])
    assert capsys.readouterr().out.count("tokens/s") == 2


def test_decoding_needs_a_checkpoint(tmp_path):
    with pytest.raises(SystemExit, match=r"run examples/train_moe_lm\.py first"):
        decode.main(["--out", str(tmp_path)])


def run_example(name):
    """The lines that it prints after the first two."""
    platform = {} if harness.ON_GPU else {"JAX_PLATFORMS": "cpu"}
    result = run_script(str(ROOT / "examples" / name), timeout=240, **platform)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[2:]


@pytest.mark.parametrize(
    ("name", "results", "tolerance"),
    # In bfloat16 beside float32, and twice in float32.
    (("moe_layer.py", 6, 3e-2), ("shared_expert.py", 7, 1e-5)),
)
def test_layer_agrees_with_its_reference(name, results, tolerance):
    errors = [float(line.split()[-1]) for line in run_example(name)]
    assert len(errors) == results
    assert max(errors) < tolerance


def test_redundant_experts_balance_the_ranks():
    """The example itself compares copies with each other after each phase."""
    result = run_script(
        str(ROOT / "examples" / "redundant_experts.py"),
        **({} if harness.ON_GPU else {"JAX_PLATFORMS": "cpu"}),
    )
    assert result.returncode == 0, result.stderr
    if harness.ON_GPU and jax.device_count() == 1:
        return  # one rank is as busy as the average
    busiest = result.stdout.splitlines()[1]
    before, after = map(float, re.findall(r"\d\.\d+", busiest))
    assert after < 1.2 < 2 < before, busiest


@pytest.mark.parametrize(
    ("name", "lines"), (("moe_layer.py", 80), ("shared_expert.py", 100))
)
def test_examples_are_short(name, lines):
    assert len((ROOT / "examples" / name).read_text().splitlines()) < lines
