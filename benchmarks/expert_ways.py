"""Gated experts by several kinds of grouped products: ours and those of others."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

import jax_ep
from jax_ep._operations.operation import Operation, bind, define, each_element
from jax_ep._operations.ragged import result_aval

OURS = "jax_ep.gated_mlp"
# (rows [S, H], group_sizes, group_alignment, (w_gate, w_up, w_down)) -> [S, H].
Experts = Callable[[Any, Any, int, Any], Any]


def ways(on_gpu: bool) -> dict[str, Experts]:
    """Experts by name, ours first; those that this machine may have."""
    found: dict[str, Experts] = {OURS: _ours, "jax.lax.ragged_dot": _by(lax.ragged_dot)}
    if on_gpu:
        found["JAX's example kernels"] = _by(example_product)
    try:
        tokamax = importlib.import_module("tokamax")
    except ImportError:
        return found
    found["tokamax.ragged_dot"] = _by(
        lambda lhs, rhs, sizes: tokamax.ragged_dot(lhs, rhs, group_sizes=sizes)
    )
    return found


def _ours(rows, group_sizes, group_alignment, experts):
    return jax_ep.gated_mlp(
        rows, group_sizes, *experts, group_alignment=group_alignment
    )


def _by(product: Callable) -> Experts:
    def run(rows, group_sizes, group_alignment, experts):
        del group_alignment
        w_gate, w_up, w_down = experts
        gate, up = (product(rows, w, group_sizes) for w in (w_gate, w_up))
        return product(jax.nn.silu(gate) * up, w_down, group_sizes)

    return run


# JAX's examples: no rules of differentiation, and none of varying axes ----------


def _block(size: int) -> int:
    return math.gcd(size, 128)


def _example_rows(lhs, rhs, group_sizes, *, transpose_rhs):
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    width = rhs.shape[1 if transpose_rhs else 2]
    return [
        ragged_dot_mgpu.ragged_dot(
            lhs,
            rhs,
            group_sizes=group_sizes,
            transpose_rhs=transpose_rhs,
            block_m=128,
            block_n=_block(width),
            block_k=64,
            max_concurrent_steps=4,
            grid_block_n=math.gcd(width // _block(width), 8),
        )
    ]


def _example_weights(lhs, rhs, group_sizes):
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

    columns = rhs.shape[1]
    return [
        transposed_ragged_dot_mgpu.transposed_ragged_dot(
            lhs,
            rhs,
            group_sizes=group_sizes,
            block_m=_block(lhs.shape[1]),
            block_n=_block(columns),
            block_k=64,
            max_concurrent_steps=4,
            grid_block_n=math.gcd(columns // _block(columns), 8),
        )
    ]


def _rows_aval(lhs, rhs, group_sizes, *, transpose_rhs):
    del group_sizes
    shape = (lhs.shape[0], rhs.shape[1 if transpose_rhs else 2])
    return [result_aval(lhs, shape, lhs.dtype)]


def _weights_aval(lhs, rhs, group_sizes):
    shape = (group_sizes.shape[0], lhs.shape[1], rhs.shape[1])
    return [result_aval(lhs, shape, lhs.dtype)]


for _name, _results, _reference in (
    ("example_rows", _rows_aval, _example_rows),
    ("example_weights", _weights_aval, _example_weights),
):
    define(
        Operation(
            name=_name,
            results=_results,
            reference=_reference,
            batch=each_element,
            eager=True,
        )
    )


@jax.custom_vjp
def example_product(lhs, rhs, group_sizes):
    """jax.experimental.pallas.ops.gpu's grouped product; rows of no group are left."""
    (out,) = bind("example_rows", lhs, rhs, group_sizes, transpose_rhs=False)
    return out


def _forward(lhs, rhs, group_sizes):
    return example_product(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _backward(kept, ct):
    lhs, rhs, group_sizes = kept
    (by_rows,) = bind("example_rows", ct, rhs, group_sizes, transpose_rhs=True)
    (by_weights,) = bind("example_weights", lhs, ct, group_sizes)
    return by_rows, by_weights, None


example_product.defvjp(_forward, _backward)


def kinds(product: Callable) -> dict[str, Callable]:
    """A product (lhs, rhs, sizes) and its gradients, (lhs, rhs, sizes, ct) each."""

    def forward(lhs, rhs, sizes, ct):
        del ct
        return product(lhs, rhs, sizes)

    def gradient(lhs, rhs, sizes, ct, by):
        function = functools.partial(_of_one, product, (lhs, rhs), by, sizes)
        return jax.linear_transpose(function, (lhs, rhs)[by])(ct)[0]

    return {
        "forward": forward,
        "gradient by rows": functools.partial(gradient, by=0),
        "gradient by weights": functools.partial(gradient, by=1),
    }


def _of_one(product, factors, by, sizes, factor):
    factors = list(factors)
    factors[by] = factor
    return product(*factors, sizes)
