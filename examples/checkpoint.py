"""Pytrees of arrays in one .npz file, beside a few words about them."""

import json
import os
import pathlib
from typing import Any

import jax
import numpy as np

_ABOUT = "about"


def save(path: pathlib.Path, tree: Any, about: dict) -> None:
    """Writes `tree`, and `about` as JSON; a crash leaves the old file or the new."""
    arrays: dict[str, Any] = {
        name: np.asarray(leaf) for name, leaf in _named_leaves(tree)
    }
    arrays[_ABOUT] = np.array(json.dumps(about))
    beside = path.with_name(path.name + ".partial")
    with beside.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def read_about(path: pathlib.Path) -> dict:
    """What `save` was told about the tree."""
    with np.load(path) as arrays:
        return json.loads(str(arrays[_ABOUT]))


def load(path: pathlib.Path, like: Any) -> Any:
    """The saved leaves in the structure, and on the devices, of `like`.

    `like` may be a part of what was saved, such as {"params": ...} alone.
    """
    leaves = []
    with np.load(path) as arrays:
        for name, leaf in _named_leaves(like):
            if name not in arrays:
                raise ValueError(f"{path} has no array {name!r}")
            found = arrays[name]
            if (found.shape, found.dtype) != (leaf.shape, leaf.dtype):
                raise ValueError(
                    f"{path}: {name!r} is {found.dtype}{found.shape}, but"
                    f" {leaf.dtype}{leaf.shape} is wanted"
                )
            leaves.append(jax.device_put(found, leaf.sharding))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _named_leaves(tree: Any) -> list[tuple[str, jax.Array]]:
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
