"""The table products: grouped products of a layer beside dense ones of its rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from expert_ways import kinds
from inputs import Inputs
from layer_tables import Tables
from timing import Chain, first, link
from whole_layers import inner_width, sizes_of_layers
from workloads import Workload

import jax_ep

_ALIGNMENT = 128
_TFLOPS = 4e8  # floating-point operations a microsecond: about half of an H200


def table(run: Tables, comm: jax_ep.Communicator) -> None:
    """Measures and prints it: microseconds, TFLOP/s, and the rate over dense."""
    del comm
    w = run.workload(sizes_of_layers(run.on_gpu))
    inner = inner_width(run)
    rows = w.num_tokens * w.top_k
    run.report.say(
        f"\nproducts: {rows} rows in {w.local_experts} groups, each aligned to "
        f"{_ALIGNMENT}; TFLOP/s of real rows"
    )
    columns = {"product": 20, "K x N": 14, "kind": 22, "us": 11, "TFLOP/s": 9}
    run.report.head({**columns, "of dense": 9})
    products = Products(Inputs(run.mesh, w), w)
    lines = {}
    for k, n in ((w.hidden, inner), (inner, w.hidden)):
        for kind in kinds(_dense):
            lines[f"dense {k} x {n} {kind}"] = ("dense", k, n, kind)
            lines[f"jax_ep {k} x {n} {kind}"] = ("jax_ep.ragged_dot", k, n, kind)
    dense_us = {}
    found = run.measured(
        {line: products.chain(line, *what) for line, what in lines.items()},
        lambda line: 2 * rows * w.hidden * inner / _TFLOPS,
    )
    for line, stats in found:
        name, k, n, kind = lines[line]
        if name == "dense":
            dense_us[k, n, kind] = stats.median
        share = dense_us.get((k, n, kind), 0) / stats.median
        rate = 2 * rows * k * n / stats.median / 1e6
        run.report.row(
            [
                name,
                f"{k} x {n}",
                kind,
                f"{stats.median:.1f}",
                f"{rate:.0f}",
                f"{share:.2f}" if share else "",
            ]
        )
        run.record(
            "product",
            w,
            stats,
            product=name,
            k=k,
            n=n,
            kind=kind,
            tflops=round(rate, 1),
            of_dense=round(share, 4),
        )


def _dense(lhs, rhs, sizes):
    """One matrix for all rows."""
    del sizes
    return lhs @ rhs


class Products:
    """Rows and matrices of one layer's products."""

    def __init__(self, inputs: Inputs, w: Workload):
        self._inputs = inputs
        self._w = w
        counts = np.bincount(w.topk_idx.ravel(), minlength=w.num_experts)
        counts = counts.reshape(w.num_ranks, -1)
        self._sizes = -(-counts // _ALIGNMENT) * _ALIGNMENT
        self._room = int(self._sizes.sum(-1).max())

    def chain(self, line: str, name: str, k: int, n: int, kind: str) -> Chain:
        """One of them, linked through its rows."""
        dense = name == "dense"
        w = self._w
        rows = w.num_tokens * w.top_k if dense else self._room
        draw = self._inputs.per_rank(functools.partial(_draw, (rows, k), (rows, n)))
        lhs, ct = draw(self._inputs.put(np.arange(w.num_ranks)))
        shape = (k, n) if dense else (w.local_experts, k, n)
        (rhs,) = self._inputs.per_rank(functools.partial(_draw, shape))(
            self._inputs.put(7 + np.arange(w.num_ranks))
        )
        sizes = self._inputs.put(self._sizes.reshape(-1).astype(np.int32))
        ours = functools.partial(jax_ep.ragged_dot, group_alignment=_ALIGNMENT)
        run = kinds(_dense if dense else ours)[kind]
        # The gradient by rows does not read them, so ct is what links it.
        linked = 3 if kind == "gradient by rows" else 0
        args = [lhs, rhs, sizes, ct]
        carried = args.pop(linked)

        def start(carried, *others):
            return (first(carried), others), carried

        def move(fixed, carried):
            operands = list(fixed[1])
            operands.insert(linked, carried)
            return run(*operands)

        return Chain(
            line,
            (carried, *args),
            start,
            move,
            lambda fixed, carried, result: link(carried, fixed[0], result),
            linked=carried,
            opaque=False,
        )


def _draw(*args):
    *shapes, seed = args
    keys = jax.random.split(jax.random.key(seed[0]), len(shapes))
    return tuple(
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    )
