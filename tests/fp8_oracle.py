"""Quantising by blocks of columns, in NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def in_blocks(x, block):
    short = -x.shape[-1] % block
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)])
    return padded.reshape(*x.shape[:-1], -1, block)


def quantized(x, block=128, scale="float32"):
    """NumPy's (q, scales), scales as float32."""
    x = x.astype(np.float32)
    with np.errstate(all="ignore"):
        amax = np.abs(in_blocks(x, block)).max(-1)
        scales = np.maximum(amax, np.float32(1e-4)) / np.float32(448)
        if scale == "ue8m0":
            scales = np.exp2(np.ceil(np.log2(scales.astype(np.float64))))
        scales = np.where(np.isfinite(amax), scales, np.nan).astype(np.float32)
        q = np.clip(in_blocks(x, block) / scales[..., None], -448, 448).astype(E4M3)
    return q.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]], scales


def dequantized(q, scales, block=128, dtype=np.float32):
    blocks = in_blocks(q.astype(np.float32), block) * scales[..., None]
    return blocks.reshape(*q.shape[:-1], -1)[..., : q.shape[-1]].astype(dtype)
