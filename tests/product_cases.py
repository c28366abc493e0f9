"""Groups of rows, numbers and tolerances for tests of grouped products."""

from __future__ import annotations

import contextlib
import warnings

import harness
import jax
import ml_dtypes
import numpy as np
import pytest

# Numbers of rows a group, for M = 640: tiles of 128 rows, and those just beside.
GROUPS = {
    1: {"all": [640], "some": [129], "none": [0]},
    7: {
        "tiles": [0, 1, 127, 128, 129, 0, 3],
        "one_group": [0, 0, 0, 640, 0, 0, 0],
        "no_rows": [0] * 7,
        "full": [129, 127, 1, 255, 0, 0, 128],
        "first_and_last": [5, 0, 0, 0, 0, 0, 7],
    },
    256: {"many": [i % 6 for i in range(256)], "last": [0] * 255 + [640]},
}
ALIGNED = {
    7: {
        "tiles": [0, 128, 256, 0, 0, 128, 128],
        "one_group": [0, 0, 640, 0, 0, 0, 0],
        "no_rows": [0] * 7,
        "unused": [128, 0, 0, 0, 0, 0, 256],
    }
}


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROUNDING = {BFLOAT16: 2**-8, np.dtype(np.float16): 2**-11, np.dtype(np.float32): 1e-6}
FALLS_BACK = (
    "jax_ep.(ragged_dot: falling back|gated_mlp: multiplying whole|gated_mlp: copying)"
)
# What the kernels are for: factors of 16 bits, and widths in steps of 64.
KERNELS = harness.ON_GPU and jax.__version_info__ >= (0, 11)


@pytest.fixture(autouse=True)
def exact_products():
    """GPUs would round the factors of float32 products otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


@contextlib.contextmanager
def falling_back_allowed(allowed: bool):
    """No warning of it, where it is no surprise."""
    with warnings.catch_warnings():
        if allowed:
            warnings.filterwarnings("ignore", FALLS_BACK)
        yield


def kernels_serve(dtype, *widths) -> bool:
    """Whether a GPU's kernels are for such products."""
    return KERNELS and dtype.itemsize == 2 and all(w % 64 == 0 for w in widths)


def draw(seed, *shape, dtype=np.float32):
    """About normal numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


# Without a GPU

needs_kernels = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="kernels are for jax 0.11 and newer"
)


def like(*shape, dtype=BFLOAT16):
    return jax.ShapeDtypeStruct(shape, dtype)


def lowered(function, *args, platform="cuda"):
    """(kernels in the program, warnings), without a GPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text = (
            jax.jit(function).trace(*args).lower(lowering_platforms=(platform,))
        ).as_text()
    return text.count("@mosaic_gpu"), {str(w.message) for w in caught}
