"""The published models: logits, routing, tokens and gradients of the reference.

tests/golden has small random checkpoints with what transformers 5.24 computes from them
in float32 (golden/README.md).
"""

import json
import pathlib
import struct
import sys

import harness
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from processes import run_script
from safetensors.numpy import load_file, save_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "published")]

import config as model_config  # noqa: E402
import decoder  # noqa: E402
import families  # noqa: E402
import weights  # noqa: E402
from model import Model  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
LOGITS, LAYER = 3e-5, 1e-5  # tolerances

# In float32, for which GPUs have no kernels.
pytestmark = [
    pytest.mark.filterwarnings("ignore:jax_ep.ragged_dot. falling back"),
    pytest.mark.filterwarnings("ignore:jax_ep.gated_mlp. multiplying whole batches"),
]
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def float32_products():
    with jax.default_matmul_precision("highest"):
        yield


def golden(family):
    with np.load(GOLDEN / family / "golden.npz") as file:
        return dict(file)


def load(directory, ranks=2, backend=None):
    comm = harness.communicator(backend or harness.BACKENDS[0], ranks)
    return Model.load(pathlib.Path(directory), comm)


def on_ranks(model, body, *arguments):
    """`body` of the parameters and of arrays that are split over the ranks."""
    split = NamedSharding(model.comm.mesh, P("ep"))
    arguments = jax.device_put(arguments, split)
    return jax.jit(model._on_ranks(body, 1 + len(arguments)))(model.params, *arguments)


@each_family
@pytest.mark.parametrize(
    ("ranks", "backend"),
    [(1, None), (2, None), (4, None), (2, "xla")],
    ids=["1", "2", "4", "2-xla"],
)
def test_logits_and_tokens(family, ranks, backend):
    expected = golden(family)
    model = load(GOLDEN / family, ranks, backend)
    logits, generated = model.generate(expected["input_ids"], 12)
    np.testing.assert_array_equal(generated, expected["generated"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=LOGITS)


@each_family
def test_layers(family):
    """Each layer by itself: from what goes into it to its routing and its result."""
    expected = golden(family)
    model = load(GOLDEN / family)

    def layer_of(number):
        def layer(params, x):
            valid = np.ones(x.shape[:2], bool)
            one = params["layers"][number]
            flat = x.reshape(-1, x.shape[-1])
            routing = decoder.route(model.config, one, flat, valid.reshape(-1))
            y, _ = decoder.mixture(model.config, one, x, valid, model.expert_layer)
            return *routing[:2], y

        return layer

    numbers = [i for i, dense in enumerate(model.config.dense) if not dense]
    assert f"layer{numbers[-1]}.moe_in" in expected
    for i in numbers:
        ids, weights_, y = on_ranks(model, layer_of(i), expected[f"layer{i}.moe_in"])
        np.testing.assert_array_equal(ids, expected[f"layer{i}.topk_ids"])
        for found, name in (weights_, "topk_weights"), (y, "moe_out"):
            np.testing.assert_allclose(
                found, expected[f"layer{i}.{name}"], rtol=0, atol=LAYER
            )


@each_family
def test_gradients(family):
    expected = golden(family)
    model = load(GOLDEN / family)
    ids = model.put(expected["input_ids"])
    loss = jax.shard_map(
        lambda *args: model.loss(*args)[0],
        mesh=model.comm.mesh,
        in_specs=(model._specs, P("ep")),
        out_specs=P(),
    )
    found, gradients = jax.jit(jax.value_and_grad(loss))(model.params, ids)
    np.testing.assert_allclose(found, expected["loss"], rtol=1e-5)
    names = [name for name in expected if name.startswith("grad.")]
    assert len(names) >= 4
    for name in names:
        of_name = gradient(gradients["layers"][1], name, expected["grad_expert"])
        error = np.abs(of_name - expected[name]).max()
        assert error < 1e-5 * np.abs(expected[name]).max(), name


def gradient(layer, name, expert):
    """The gradient of a tensor of a layer under its name in the file."""
    *_, owner, part = name.split(".")
    if "experts" not in name:
        return np.asarray(layer["router"][part])
    of_expert = {k: np.asarray(v)[expert] for k, v in layer["experts"].items()}
    if part == "weight":  # [out, in] of one expert
        kind = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up"}
        return of_expert[f"w_{kind.get(owner, 'down')}"].T
    letter = "b" if part.endswith("_bias") else "w"
    if part.startswith("down_proj"):
        return of_expert[f"{letter}_down"]
    both = np.stack([of_expert[f"{letter}_gate"], of_expert[f"{letter}_up"]], -1)
    return both.reshape(*both.shape[:-2], -1)


def test_prompts_of_several_lengths():
    """Shorter prompts end in -1, and continue as they do alone."""
    expected = golden("qwen3_moe")
    model = load(GOLDEN / "qwen3_moe", ranks=4)
    ids = np.array(expected["input_ids"])
    ids = np.concatenate([ids, ids, ids[:1]])
    ids[2, 17:] = -1
    ids[3] = -1  # idle
    logits, generated = model.generate(ids, 6)
    alone = model.generate(ids[2:3, :17], 6)
    whole = expected["generated"][[0, 1, 0], :6]
    np.testing.assert_array_equal(generated[[0, 1, 4]], whole)
    np.testing.assert_array_equal(generated[2:3], alone[1])
    np.testing.assert_allclose(logits[2, :17], alone[0][0], rtol=0, atol=LOGITS)
    assert (generated[3] == -1).all()


def test_each_rank_reads_its_own_experts(monkeypatch):
    read = []
    original = families.SeparateExperts.read

    def watched(self, checkpoint, config, prefix, experts):
        read.append((prefix, experts))
        return original(self, checkpoint, config, prefix, experts)

    monkeypatch.setattr(families.SeparateExperts, "read", watched)
    load(GOLDEN / "qwen3_moe", ranks=4)
    for layer in range(2):
        of_layer = [e for prefix, e in read if prefix == f"model.layers.{layer}"]
        assert sorted(of_layer, key=min) == [range(n, n + 4) for n in range(0, 16, 4)]


# Forms of checkpoints ---------------------------------------------------------


class Copy:
    """A checkpoint to change: its tensors and its config.json."""

    def __init__(self, family):
        self.tensors = load_file(GOLDEN / family / "model.safetensors")
        self.raw = json.loads((GOLDEN / family / "config.json").read_text())

    def write(self, path, files=1):
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.raw))
        if files == 1:
            save_file(self.tensors, path / "model.safetensors")
            return path
        index = {}
        for i in range(files):
            name = f"model-{i + 1:05}-of-{files:05}.safetensors"
            part = dict(list(self.tensors.items())[i::files])
            save_file(part, path / name)
            index |= dict.fromkeys(part, name)
        text = json.dumps({"metadata": {}, "weight_map": index})
        (path / weights.INDEX).write_text(text)
        return path


def parameters(directory):
    return jax.tree.map(np.asarray, load(directory).params)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_several_files(tmp_path):
    directory = Copy("mixtral").write(tmp_path, files=3)
    assert_equal(parameters(directory), parameters(GOLDEN / "mixtral"))


def test_older_config(tmp_path):
    """What transformers before 5 wrote means the same."""
    for family, experts in ("qwen3_moe", "num_experts"), ("deepseek_v3", None):
        copy = Copy(family)
        new = families.find(copy.raw).config(copy.raw)
        rope = copy.raw.pop("rope_parameters")
        copy.raw["rope_theta"] = rope.pop("rope_theta")
        copy.raw["torch_dtype"] = copy.raw.pop("dtype")
        kind = rope.pop("rope_type")
        copy.raw["rope_scaling"] = None if kind == "default" else rope | {"type": kind}
        if experts:
            copy.raw[experts] = copy.raw.pop("num_local_experts")
        old = families.find(copy.raw).config(copy.raw)
        for name in ("rotary", "attention_scale", "experts", "latent", "windows"):
            assert getattr(old, name) == getattr(new, name), name


def test_fp8(tmp_path):
    """Matrices e4m3 with a float32 scale for each block of 128 x 128."""
    copy = Copy("deepseek_v3")
    wide = dict(copy.tensors)
    random = np.random.default_rng(0)
    for name, tensor in copy.tensors.copy().items():
        if tensor.ndim < 2 or "embed" in name or "head" in name or "mlp.gate" in name:
            continue
        blocks = tuple(-(-n // 16) for n in tensor.shape)
        scales = random.uniform(0.5, 2, blocks).astype(np.float32)
        q = (tensor.astype(np.float32) * 8).astype(ml_dtypes.float8_e4m3fn)
        copy.tensors[name] = q
        copy.tensors[f"{name}_scale_inv"] = scales
        spread = np.kron(scales, np.ones((16, 16), np.float32))
        wide[name] = q.astype(np.float32) * spread[: q.shape[0], : q.shape[1]]
    copy.raw["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [16, 16],
    }
    found = parameters(copy.write(tmp_path / "fp8"))
    copy.tensors = wide
    assert_equal(found, parameters(copy.write(tmp_path / "wide")))


def test_mxfp4(tmp_path):
    """Blocks of 32 numbers of four bits, two in a byte, with one exponent."""
    copy = Copy("gpt_oss")
    copy.raw["intermediate_size"] = 64
    random = np.random.default_rng(0)
    wide = Copy("gpt_oss")
    wide.raw["intermediate_size"] = 64
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = np.array(values + [-v for v in values], np.float32)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        for name, outputs in ("gate_up_proj", 128), ("down_proj", 64):
            del copy.tensors[f"{prefix}.{name}"]
            codes = random.integers(0, 16, (8, outputs, 64), np.uint8)
            exponents = random.integers(120, 130, (8, outputs, 2), np.uint8)
            pairs = codes[..., ::2] | codes[..., 1::2] << 4
            copy.tensors[f"{prefix}.{name}_blocks"] = pairs.reshape(8, outputs, 2, 16)
            copy.tensors[f"{prefix}.{name}_scales"] = exponents
            scales = 2.0 ** (exponents.astype(np.float32) - 127)
            full = values[codes] * np.repeat(scales, 32, -1)
            full = np.ascontiguousarray(full.swapaxes(1, 2), np.float32)
            wide.tensors[f"{prefix}.{name}"] = full
            bias = random.normal(size=(8, outputs)).astype(np.float32)
            copy.tensors[f"{prefix}.{name}_bias"] = bias
            wide.tensors[f"{prefix}.{name}_bias"] = bias
    copy.raw["quantization_config"] = {"quant_method": "mxfp4"}
    found = parameters(copy.write(tmp_path / "mxfp4"))
    assert_equal(found, parameters(wide.write(tmp_path / "wide")))


# What cannot be read ----------------------------------------------------------


def refused(directory, *parts):
    errors = weights.CheckpointError, model_config.UnsupportedModelError
    with pytest.raises(errors) as e:
        load(directory)
    for part in parts:
        assert part in str(e.value)


def test_unknown_family(tmp_path):
    copy = Copy("mixtral")
    copy.raw["model_type"] = "llama"
    refused(copy.write(tmp_path), "model_type", "'llama'", "'mixtral'")


def test_missing_tensor(tmp_path):
    copy = Copy("mixtral")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    del copy.tensors[name]
    refused(copy.write(tmp_path), name, "[64, 32]", "missing")


def test_other_shape(tmp_path):
    copy = Copy("qwen3_moe")
    name = "model.layers.0.self_attn.k_norm.weight"
    copy.tensors[name] = copy.tensors[name][:8].copy()
    refused(copy.write(tmp_path), "model.safetensors", name, "[32]", "[8]")


def test_tensor_of_another_model(tmp_path):
    copy = Copy("qwen3_moe")
    name = "model.layers.0.self_attn.q_proj.bias"
    copy.tensors[name] = np.zeros(128, np.float32)
    refused(copy.write(tmp_path), name, "[128]")


def test_file_that_is_cut_short(tmp_path):
    directory = Copy("gpt_oss").write(tmp_path)
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    refused(directory, str(path), "cut short", f"{len(whole) - 100:,}")
    size = struct.unpack("<Q", whole[:8])[0]
    path.write_bytes(whole[: 8 + size // 2])
    refused(directory, str(path), "cut short", "header")
    path.write_bytes(b"not it")
    refused(directory, str(path), "not a safetensors file")


def test_other_quantization(tmp_path):
    copy = Copy("mixtral")
    copy.raw["quantization_config"] = {"quant_method": "awq"}
    for name in list(copy.tensors):
        if ".w1." in name:
            del copy.tensors[name]
    refused(copy.write(tmp_path), "missing", "'awq'")


def test_program(tmp_path):
    """As a user starts it, on devices of its own."""
    expected = golden("mixtral")
    np.save(tmp_path / "ids.npy", expected["input_ids"])
    out = tmp_path / "out.npz"
    words = f"{GOLDEN}/mixtral --input-ids {tmp_path}/ids.npy --out {out}"
    options = "--new-tokens 3 --ranks 2 --platform cpu"
    program = ROOT / "examples" / "published" / "generate.py"
    result = run_script(str(program), *words.split(), *options.split())
    assert result.returncode == 0, result.stderr
    assert "6 tokens of 2 sequences" in result.stdout
    assert "reading: 100%" in result.stderr
    with np.load(out) as found:
        np.testing.assert_array_equal(found["generated"], expected["generated"][:, :3])
        assert found["generated"].dtype == np.int32
        assert found["logits"].dtype == np.float32


def test_finetuning_resumes_on_other_ranks(tmp_path):
    """Losses of a run that went on with half the devices are those of one run."""
    program = str(ROOT / "examples" / "published" / "finetune.py")
    options = "--batch 4 --length 16 --learning-rate 1e-3 --platform cpu".split()

    def train(out, *more):
        where = [str(GOLDEN / "mixtral"), "--out", str(tmp_path / out)]
        result = run_script(program, *where, *options, *more)
        assert result.returncode == 0, result.stderr
        return np.loadtxt(tmp_path / out / "loss.csv", delimiter=",", skiprows=1)

    whole = train("whole", *"--steps 4 --ranks 4 --data 2".split())
    train("parts", *"--steps 2 --ranks 4 --data 2".split())
    parts = train("parts", *"--steps 4 --ranks 2 --resume".split())
    assert whole.shape == (4, 3)
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
    assert whole[-1, 1] < whole[0, 1]
