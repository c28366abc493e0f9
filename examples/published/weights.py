"""Reads published checkpoints: every rank its own experts, nobody more than it needs.

A checkpoint directory holds config.json and safetensors, in one file or in several
that model.safetensors.index.json lists. All names, shapes and file sizes are checked
before memory is taken. Matrices in FP8 with scales for blocks (DeepSeek, MiniMax) and
in MXFP4 (gpt-oss) are widened while they are read.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
import safetensors
import tqdm
from config import Config
from families import Family
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
# Longest header that the format allows.
MAX_HEADER_BYTES = 100_000_000
# safetensors' name of float8_e4m3fn.
FP8 = "F8_E4M3"
# Numbers that MXFP4 writes in four bits.
FP4_VALUES = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read: file, tensor, and what was expected."""


class Checkpoint:
    """The tensors of a checkpoint directory, by name.

    Attributes:
      shapes: of each tensor as it lies in its file.
      dtypes: safetensors' names of their dtypes.
    """

    def __init__(self, directory: pathlib.Path, raw: Mapping[str, Any]):
        """Reads the headers of the files; `raw` is config.json."""
        self.directory = directory
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._offsets: dict[str, int] = {}
        self.quantization: Mapping[str, Any] = raw.get("quantization_config") or {}
        self._file_of = self._files()
        for file in sorted(set(self._file_of.values())):
            self._read_header(directory / file)
        self._open = contextlib.ExitStack()
        self._handles: dict[str, Any] = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def _files(self) -> dict[str, str]:
        index = self.directory / INDEX
        if index.exists():
            return json.loads(index.read_text())["weight_map"]
        if (self.directory / ONE_FILE).exists():
            with _named(self.directory / ONE_FILE):
                header, _ = _header(self.directory / ONE_FILE)
            return dict.fromkeys(header, ONE_FILE)
        raise CheckpointError(
            f"{self.directory}: must hold {ONE_FILE} or {INDEX}, found neither"
        )

    def _read_header(self, path: pathlib.Path) -> None:
        with _named(path):
            header, begin = _header(path)
            size = path.stat().st_size
        for name, entry in header.items():
            end = begin + entry["data_offsets"][1]
            if end > size:
                raise CheckpointError(
                    f"{path}: is cut short: {name} ends at byte {end:,}, the file has "
                    f"{size:,}"
                )
            self.shapes[name] = tuple(entry["shape"])
            self.dtypes[name] = entry["dtype"]
            self._offsets[name] = begin + entry["data_offsets"][0]

    def where(self, name: str) -> str:
        """The file of a tensor, for messages."""
        return str(self.directory / self._file_of.get(name, INDEX))

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """CheckpointError where there is no such tensor of that shape."""
        if name not in self.shapes:
            method = self.quantization.get("quant_method")
            quantized = "" if method is None else f" (config.json: {method!r} weights)"
            raise CheckpointError(
                f"{self.where(name)}: {name} {list(shape)} is missing{quantized}"
            )
        if self.shapes[name] != shape:
            raise CheckpointError(
                f"{self.where(name)}: {name} must be {list(shape)} as config.json "
                f"says, found {list(self.shapes[name])}"
            )
        scales = f"{name}_scale_inv"
        if self.dtypes[name] == FP8:
            rows, columns = self._block()
            self.check(scales, (-(-shape[0] // rows), -(-shape[1] // columns)))

    def _block(self) -> tuple[int, int]:
        block = self.quantization.get("weight_block_size")
        if self.quantization.get("quant_method") != "fp8" or block is None:
            raise CheckpointError(
                f"{self.directory / 'config.json'}: FP8 weights are read with "
                "quant_method 'fp8' and a weight_block_size, found "
                f"{dict(self.quantization)}"
            )
        return tuple(block)

    def read(self, name: str, part: slice = slice(None)) -> np.ndarray:
        """A tensor, or a part of its first axis; FP8 matrices whole and widened."""
        with _named(self.where(name)):
            if self.dtypes[name] != FP8:
                return self._slice(name)[part]
            array = self._fp8(name)
            scales = self._slice(f"{name}_scale_inv")[:]
        rows, columns = self._block()
        scales = np.repeat(np.repeat(scales, rows, 0), columns, 1)
        return array.astype(np.float32) * scales[: array.shape[0], : array.shape[1]]

    def read_mxfp4(self, name: str, part: slice) -> np.ndarray:
        """[E, out, in]: blocks [E, out, g, 16] of numbers and scales [E, out, g]."""
        with _named(self.where(f"{name}_blocks")):
            pairs = self._slice(f"{name}_blocks")[part]
            exponents = self._slice(f"{name}_scales")[part]
        values = np.stack([FP4_VALUES[pairs & 15], FP4_VALUES[pairs >> 4]], -1)
        scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
        values = values.reshape(*pairs.shape[:-1], -1) * scales[..., None]
        return values.reshape(*values.shape[:-2], -1)

    def _fp8(self, name: str) -> np.ndarray:
        """A matrix as it lies in the file; safetensors gives NumPy no FP8 arrays."""
        return np.memmap(
            self.directory / self._file_of[name],
            ml_dtypes.float8_e4m3fn,
            mode="r",
            offset=self._offsets[name],
            shape=self.shapes[name],
        )

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        if file not in self._handles:
            self._handles[file] = self._open.enter_context(
                safetensors.safe_open(self.directory / file, framework="numpy")
            )
        return self._handles[file].get_slice(name)


@contextlib.contextmanager
def _named(path: pathlib.Path | str) -> Iterator[None]:
    """Names the file in errors of reading it."""
    try:
        yield
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _header(path: pathlib.Path) -> tuple[dict[str, Any], int]:
    """The tensors that a safetensors file lists, and where their bytes begin."""
    with path.open("rb") as file:
        length = file.read(8)
        size = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
        if not 2 <= size <= MAX_HEADER_BYTES:
            raise CheckpointError(f"{path}: is not a safetensors file")
        text = file.read(size)
    if len(text) < size:
        raise CheckpointError(
            f"{path}: is cut short: its header has {size:,} bytes, found {len(text):,}"
        )
    header = json.loads(text)
    header.pop("__metadata__", None)
    return header, 8 + size


# What a model needs, by name -------------------------------------------------


def layer_shapes(config: Config, family: Family, layer: int) -> dict[str, tuple]:
    """Shapes of a layer's tensors but its experts', by name behind the layer's."""
    hidden = config.hidden
    maps = _attention_maps(config)
    shapes: dict[str, tuple] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.query_key_norm:
        by_head = config.query_key_norm == "head"
        for name, heads in ("q", config.heads), ("k", config.kv_heads):
            size = config.head * (1 if by_head else heads)
            shapes[f"self_attn.{name}_norm.weight"] = (size,)
    if config.sinks:
        shapes["self_attn.sinks"] = (config.heads,)
    if config.latent:
        shapes["self_attn.kv_a_layernorm.weight"] = (config.latent.key_value,)
        if config.latent.query:
            shapes["self_attn.q_a_layernorm.weight"] = (config.latent.query,)
    if config.dense[layer]:
        maps |= _gated("mlp", hidden, config.dense_width)
    elif config.shared_width:
        maps |= _gated("mlp.shared_experts", hidden, config.shared_width)
    for name, (outputs, inputs) in maps.items():
        shapes[f"{name}.weight"] = (outputs, inputs)
        if name in config.biased:
            shapes[f"{name}.bias"] = (outputs,)
    if not config.dense[layer]:
        for part, name in family.router.items():
            shapes[name] = (config.experts, hidden)[: 2 if part == "weight" else 1]
    return shapes


def _attention_maps(config: Config) -> dict[str, tuple[int, int]]:
    hidden, heads, latent = config.hidden, config.heads, config.latent
    if latent is None:
        width = {"q": heads, "k": config.kv_heads, "v": config.kv_heads}
        maps = {
            f"self_attn.{name}_proj": (count * config.head, hidden)
            for name, count in width.items()
        }
        return maps | {"self_attn.o_proj": (hidden, heads * config.head)}
    query = heads * (latent.plain + latent.rotated)
    key_value = heads * (latent.plain + latent.value)
    maps = {
        "self_attn.kv_a_proj_with_mqa": (latent.key_value + latent.rotated, hidden),
        "self_attn.kv_b_proj": (key_value, latent.key_value),
        "self_attn.o_proj": (hidden, heads * latent.value),
    }
    if latent.query is None:
        return maps | {"self_attn.q_proj": (query, hidden)}
    return maps | {
        "self_attn.q_a_proj": (latent.query, hidden),
        "self_attn.q_b_proj": (query, latent.query),
    }


def _gated(name: str, hidden: int, width: int) -> dict[str, tuple[int, int]]:
    return {
        f"{name}.gate_proj": (width, hidden),
        f"{name}.up_proj": (width, hidden),
        f"{name}.down_proj": (hidden, width),
    }


def all_shapes(config: Config, family: Family) -> dict[str, tuple]:
    """Shapes of every tensor but the experts', by their names in the file."""
    shapes = {
        "model.embed_tokens.weight": (config.vocabulary, config.hidden),
        "model.norm.weight": (config.hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocabulary, config.hidden)
    for layer in range(config.layers):
        for name, shape in layer_shapes(config, family, layer).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def check(checkpoint: Checkpoint, config: Config, family: Family) -> None:
    """Compares all tensors with what config.json says, before any is read."""
    expected = all_shapes(config, family)
    for name, shape in expected.items():
        checkpoint.check(name, shape)
    known = set(expected)
    for layer in range(config.layers):
        if not config.dense[layer]:
            prefix = f"model.layers.{layer}"
            known |= set(family.experts.check(checkpoint, config, prefix))
    known |= {f"{name}_scale_inv" for name in known}
    unknown = sorted(
        name for name in set(checkpoint.shapes) - known if not _is_extra(name, config)
    )
    if unknown:
        raise CheckpointError(
            f"{checkpoint.where(unknown[0])}: {unknown[0]} "
            f"{list(checkpoint.shapes[unknown[0]])} is not of the model that "
            f"config.json describes, nor are {len(unknown) - 1} others"
        )


def _is_extra(name: str, config: Config) -> bool:
    """Whether a tensor is left out on purpose: nothing of the decoder needs it."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if name == "lm_head.weight":
        return config.tied
    # Layers behind the last predict tokens further ahead (DeepSeek).
    parts = name.split(".")
    return parts[:2] == ["model", "layers"] and int(parts[2]) >= config.layers


# Reading ---------------------------------------------------------------------


def load(
    checkpoint: Checkpoint,
    config: Config,
    family: Family,
    mesh: jax.sharding.Mesh,
    axis: str | tuple[str, ...],
    dtype: Any,
    *,
    progress: bool = False,
) -> dict[str, Any]:
    """Parameters on `mesh`: experts split over `axis`, all others on every device.

    Routers stay float32; all others get `dtype`.
    """
    check(checkpoint, config, family)

    def everywhere(name: str, to: Any = dtype) -> jax.Array:
        array = checkpoint.read(name).astype(to)
        sharding = NamedSharding(mesh, P())
        return jax.make_array_from_callback(array.shape, sharding, lambda _: array)

    def experts(prefix: str) -> dict[str, jax.Array]:
        shapes = family.experts.shapes(config)
        read: dict[tuple, dict[str, np.ndarray]] = {}

        def part(name: str, index: tuple) -> np.ndarray:
            # The parts of one rank are read at a time: a file may hold them as one.
            first, last, _ = index[0].indices(config.experts)
            if (first, last) not in read:
                read[first, last] = family.experts.read(
                    checkpoint, config, prefix, range(first, last)
                )
            return read[first, last][name].astype(dtype)

        sharding = NamedSharding(mesh, P(axis))
        return {
            name: jax.make_array_from_callback(
                shape,
                sharding,
                lambda index, name=name: part(name, index),  # type: ignore[arg-type]
            )
            for name, shape in shapes.items()
        }

    def layer(number: int) -> dict[str, Any]:
        prefix = f"model.layers.{number}"
        routers = {} if config.dense[number] else family.router
        result: dict[str, Any] = {
            name: everywhere(f"{prefix}.{name}")
            for name in layer_shapes(config, family, number)
            if name not in routers.values()
        }
        if routers:
            result["router"] = {
                part: everywhere(f"{prefix}.{name}", np.float32)
                for part, name in routers.items()
            }
            result["experts"] = experts(prefix)
        return result

    numbers: Iterable[int] = range(config.layers)
    if progress:
        numbers = tqdm.tqdm(numbers, "reading", unit="layer")
    embedding = everywhere("model.embed_tokens.weight")
    return {
        "embed_tokens": embedding,
        "norm": everywhere("model.norm.weight"),
        "lm_head": embedding if config.tied else everywhere("lm_head.weight"),
        "layers": [layer(number) for number in numbers],
    }


def partition_specs(
    params: dict[str, Any], axis: str | tuple[str, ...]
) -> dict[str, Any]:
    """PartitionSpecs of what `load` returns."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: P(axis) if jax.tree_util.DictKey("experts") in path else P(),
        params,
    )
