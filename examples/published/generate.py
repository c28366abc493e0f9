"""Generates text with a published model, its experts split over the devices.

    python examples/published/generate.py DIR --input-ids ids.npy --new-tokens 12 \
        --out out.npz

DIR is a checkpoint directory as it lies on the hub: config.json and safetensors of
Qwen3-MoE, Mixtral, DeepSeek-V3, gpt-oss or MiniMax-M2. The prompt runs through the
ordinary operations, new tokens through the low-latency ones. Continuations are greedy.

ids.npy holds int [B, S] token ids; a shorter prompt ends in -1. --text takes a prompt
in words instead, where DIR has a tokenizer.json and the package tokenizers is there.

out.npz gets `logits`, float32 [B, S, vocabulary] of the prompt, and `generated`,
int32 [B, new tokens].
"""

import argparse
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))  # routers.py

from config import UnsupportedModelError
from model import Model
from weights import CheckpointError

import jax_ep

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", metavar="DIR", type=pathlib.Path)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--input-ids", type=pathlib.Path, metavar="IDS.npy")
    prompt.add_argument("--text", help="a prompt; needs DIR/tokenizer.json")
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N")
    parser.add_argument("--out", type=pathlib.Path, metavar="OUT.npz")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="devices; default: all (CPU: 1)"
    )
    parser.add_argument("--platform", choices=("cpu", "cuda"), help="default: JAX's")
    parser.add_argument(
        "--backend", choices=("cpu", "cuda", "xla"), help="of jax_ep; default: the best"
    )
    parser.add_argument(
        "--dtype",
        choices=sorted(DTYPES),
        help="of the computation; default: float32 on CPUs, bfloat16 on GPUs",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    found = parser.parse_args(argv)
    if found.new_tokens < 1:
        parser.error(f"--new-tokens must be at least 1, found {found.new_tokens}")
    if found.ranks is not None and found.ranks < 1:
        parser.error(f"--ranks must be at least 1, found {found.ranks}")
    return found


def tokenizer(directory: pathlib.Path):
    """DIR/tokenizer.json, read by the package tokenizers."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise SystemExit(f"--text needs {path}, which is not there; use --input-ids")
    try:
        import tokenizers
    except ImportError:
        raise SystemExit("--text needs tokenizers: pip install tokenizers") from None
    return tokenizers.Tokenizer.from_file(str(path))


def read_ids(path: pathlib.Path) -> np.ndarray:
    """Token ids [B, S] of a file."""
    try:
        ids = np.load(path)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: cannot be read: {error}") from error
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or 0 in ids.shape:
        raise SystemExit(
            f"{path}: must hold integers [B, S], found {ids.dtype}{list(ids.shape)}"
        )
    return ids


def make_mesh(ranks: int | None) -> jax.sharding.Mesh:
    devices = jax.devices()
    if ranks is not None and ranks > len(devices):
        raise SystemExit(f"--ranks {ranks}: there are only {len(devices)} devices")
    return jax.make_mesh((ranks or len(devices),), ("ep",), devices=devices[:ranks])


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.platform:
        jax.config.update("jax_platforms", args.platform)
    jax.config.update("jax_num_cpu_devices", args.ranks or 1)
    words = tokenizer(args.directory) if args.text else None
    ids = np.array([words.encode(args.text).ids]) if words else read_ids(args.input_ids)
    mesh = make_mesh(args.ranks)
    on_cpu = jax.default_backend() == "cpu"
    dtype = DTYPES[args.dtype or ("float32" if on_cpu else "bfloat16")]
    if dtype == jnp.float32:
        jax.config.update("jax_default_matmul_precision", "highest")
    with jax_ep.Communicator(mesh, "ep", backend=args.backend) as comm:
        try:
            model = Model.load(args.directory, comm, dtype, progress=not args.quiet)
        except (CheckpointError, UnsupportedModelError) as error:
            raise SystemExit(f"{error}") from error
        if ids.max() >= model.config.vocabulary:
            raise SystemExit(
                f"token ids must be below {model.config.vocabulary}, found {ids.max()}"
            )
        begin = time.perf_counter()
        logits, generated = model.generate(
            ids, args.new_tokens, progress=not args.quiet
        )
    seconds = time.perf_counter() - begin
    print(
        f"{generated.size} tokens of {len(ids)} sequences in {seconds:.1f} s "
        f"({generated.size / seconds:.1f} tokens/s, compilation included) on "
        f"{comm.num_ranks} ranks, backend {comm.backend!r}"
    )
    if args.out:
        np.savez(args.out, logits=logits, generated=generated)
        print(f"logits and generated are in {args.out}")
    if words:
        print(args.text + words.decode(generated[0].tolist()))
    elif not args.out:
        print(generated)


if __name__ == "__main__":
    main()
