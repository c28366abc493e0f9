"""Grouped products and gated MLPs, with their gradients, in float64 NumPy.

Reads no row that belongs to no group.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


def slices(sizes):
    """The rows of each group."""
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def rows(lhs, rhs, sizes):
    """[M, K] by [G, K, N] -> [M, N]."""
    out = np.zeros((len(lhs), rhs.shape[2]))
    for group, here in enumerate(slices(sizes)):
        out[here] = lhs[here].astype(np.float64) @ rhs[group].astype(np.float64)
    return out


def weights(lhs, rhs, sizes):
    """[M, K] and [M, N] -> [G, K, N]."""
    out = np.zeros((len(sizes), lhs.shape[1], rhs.shape[1]))
    for group, here in enumerate(slices(sizes)):
        out[group] = lhs[here].astype(np.float64).T @ rhs[here].astype(np.float64)
    return out


def transposed(rhs):
    """Each matrix."""
    return rhs.swapaxes(1, 2)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(gate, up):
    """(value, derivative by gate, derivative by up) of silu(gate) * up."""
    s = sigmoid(gate)
    return gate * s * up, up * (s + gate * s * (1 - s)), gate * s


def gpt_oss(gate, up):
    """The same of gpt-oss's clamped glu."""
    g, u = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    s = sigmoid(1.702 * g)
    by_gate = (u + 1) * (s + g * 1.702 * s * (1 - s)) * (gate < 7.0)
    return (u + 1) * g * s, by_gate, g * s * (np.abs(up) < 7.0)


class Mlp(NamedTuple):
    """Parameters of gated MLPs, or their gradients; biases may be None."""

    w_gate: np.ndarray
    w_up: np.ndarray
    w_down: np.ndarray
    b_gate: np.ndarray | None = None
    b_up: np.ndarray | None = None
    b_down: np.ndarray | None = None


def gated_mlp(x, sizes, mlp, ct, glu):
    """(output, gradient by x, gradients as an Mlp) for the output's cotangent ct."""

    def bias(b):
        if b is None:
            return 0
        out = np.zeros((len(x), b.shape[1]))
        for group, here in enumerate(slices(sizes)):
            out[here] = b[group]
        return out

    def bias_gradient(b, d):
        if b is None:
            return None
        return np.array([d[here].sum(0) for here in slices(sizes)], np.float64)

    gate = rows(x, mlp.w_gate, sizes) + bias(mlp.b_gate)
    up = rows(x, mlp.w_up, sizes) + bias(mlp.b_up)
    hidden, by_gate, by_up = glu(gate, up)
    output = rows(hidden, mlp.w_down, sizes) + bias(mlp.b_down)
    d_hidden = rows(ct, transposed(mlp.w_down), sizes)
    d_gate, d_up = d_hidden * by_gate, d_hidden * by_up
    dx = rows(d_gate, transposed(mlp.w_gate), sizes)
    dx += rows(d_up, transposed(mlp.w_up), sizes)
    gradients = Mlp(
        weights(x, d_gate, sizes),
        weights(x, d_up, sizes),
        weights(hidden, ct, sizes),
        bias_gradient(mlp.b_gate, d_gate),
        bias_gradient(mlp.b_up, d_up),
        None if mlp.b_down is None else bias_gradient(mlp.b_down, ct),
    )
    return output, dx, gradients
