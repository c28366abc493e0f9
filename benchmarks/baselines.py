"""What JAX itself offers to bring the same tokens to the same ranks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from inputs import Inputs, check_rows
from jax import lax
from operations import Operation
from timing import AXIS, Chain, first, link
from workloads import SUMMABLE, Workload

RAGGED = "ragged_all_to_all"
# Rows for one rank may be given in several pieces; XLA moves a piece at a time.
_PIECES = 64
_XLA_OPTIONS: dict[str, dict[str, Any]] = {
    "no one-shot kernel": {
        "xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel": False
    },
    "no NCCL barrier": {
        "xla_gpu_experimental_ragged_all_to_all_use_barrier_with_nccl": False
    },
    "device kernel": {
        "xla_gpu_experimental_ragged_all_to_all_use_device_kernel": True,
        "xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel": False,
        "xla_gpu_experimental_enable_nccl_symmetric_buffers": True,
    },
    "as a dense one": {"xla_gpu_unsupported_enable_ragged_all_to_all_decomposer": True},
}


def baselines(workload: Workload) -> dict[str, Callable[[Inputs], Operation]]:
    """Makers by name: each makes its inputs when its turn comes."""
    makers: dict[str, Callable[[Inputs], Operation]] = {"all_gather": _all_gather}
    if workload.dtype in SUMMABLE:
        makers["psum_scatter"] = _psum_scatter
    makers["all_to_all, padded"] = _padded_all_to_all
    if workload.num_slots >= workload.num_ranks * workload.num_tokens:
        makers["ragged_all_to_all"] = functools.partial(_ragged_all_to_all, pieces=1)
        name = f"{RAGGED} in {_PIECES} pieces"
        makers[name] = functools.partial(_ragged_all_to_all, pieces=_PIECES)
    return makers


def with_xla_options() -> dict[str, Callable[[Inputs], Operation]]:
    """ragged_all_to_all by the other ways that XLA's GPU backend has.

    An XLA that lacks a flag says so. Some of these ways are experimental and may
    end the process: they come after everything else.
    """
    return {
        f"{RAGGED}, {name}": functools.partial(
            _ragged_all_to_all, pieces=pieces, options=options
        )
        for name, options in _XLA_OPTIONS.items()
        for pieces in (1, _PIECES)
    }


def _chain(name: str, move: Callable, rows: jax.Array) -> Chain:
    """A collective over and over, its rows linked to its result."""

    def link_rows(value, rows, result):
        return link(rows, value, result)

    return Chain(
        name,
        (rows,),
        lambda rows: (first(rows), rows),
        lambda _, rows: move(rows),
        link_rows,
        linked=rows,
        opaque=False,
    )


def _sample(workload: Workload) -> int:
    """Rows of each part that the plain collectives are checked on."""
    return min(workload.num_tokens, 64)


def _expect(right: bool) -> None:
    if not right:
        raise AssertionError("the result differs from NumPy's")


def _all_gather(inputs: Inputs) -> Operation:
    w = inputs.workload
    rows = _sample(w)
    tokens = inputs.bits(inputs.tokens)

    def gather(x):
        return lax.all_gather(x, AXIS, tiled=True)

    def check():
        def parts(x):
            return gather(x).reshape(1, w.num_ranks, -1, w.hidden)[:, :, :rows]

        found = np.asarray(inputs.per_rank(parts)(tokens))
        sent = np.asarray(inputs.per_rank(lambda x: x[None, :rows])(tokens))
        _expect(all(np.array_equal(part, sent) for part in found))

    return Operation(
        "all_gather", _chain("all_gather", gather, tokens), check, ("dispatch",)
    )


def _psum_scatter(inputs: Inputs) -> Operation:
    w = inputs.workload
    rows = _sample(w)
    padded = inputs.random(3, w.num_ranks * w.num_tokens)

    def scatter(y):
        return lax.psum_scatter(y, AXIS, tiled=True)

    def check():
        def parts(y):
            return y.reshape(1, w.num_ranks, -1, w.hidden)[:, :, :rows]

        found = inputs.per_rank(lambda y: scatter(y)[None, :rows])(padded)
        sent = np.asarray(inputs.per_rank(parts)(padded)).astype(np.float32)
        found = np.asarray(found).astype(np.float32)
        _expect(np.allclose(found, sent.sum(axis=0), rtol=0.05, atol=0.1))

    chain = _chain("psum_scatter", scatter, padded)
    if inputs.mesh.devices.flat[0].platform == "cpu" and inputs.dtype.itemsize < 4:
        # XLA makes float32 of it all here, the link included: no telling apart.
        chain = dataclasses.replace(chain, linked=None)
    return Operation("psum_scatter", chain, check, ("combine",))


def _padded_all_to_all(inputs: Inputs) -> Operation:
    """A dense exchange with room for T rows from every rank to every rank."""
    w = inputs.workload
    rows = _sample(w)
    padded = inputs.bits(inputs.random(4, w.num_ranks, w.num_tokens))

    def exchange(x):
        return lax.all_to_all(x, AXIS, 0, 0)

    def check():
        found = inputs.per_rank(lambda x: exchange(x)[None, :, :rows])(padded)
        sent = np.asarray(inputs.per_rank(lambda x: x[None, :, :rows])(padded))
        _expect(np.array_equal(np.asarray(found), sent.swapaxes(0, 1)))

    chain = _chain("all_to_all", exchange, padded)
    return Operation("all_to_all, padded", chain, check, ("dispatch",))


def _ragged_all_to_all(
    inputs: Inputs, pieces: int, options: dict[str, Any] | None = None
) -> Operation:
    """Rows sorted by destination beforehand, outside what is timed.

    Args:
      inputs: of the workload.
      pieces: that the rows for each rank are cut into.
      options: flags of XLA's.
    """
    w = inputs.workload
    num_ranks = w.num_ranks
    starts = np.cumsum(w.counts, axis=1) - w.counts  # [source, destination]
    places = np.cumsum(w.counts, axis=0) - w.counts
    # Which token stands in each row of the packed operand; the rest is unused.
    longest = max(1, int(w.counts.sum(axis=1).max()))
    order = np.zeros((num_ranks, longest), np.int32)
    for s in range(num_ranks):
        tokens = [np.flatnonzero(w.slots[s, :, r] >= 0) for r in range(num_ranks)]
        packed = np.concatenate(tokens)
        order[s, : packed.size] = packed
    pack = inputs.per_rank(lambda x, order: x[order])
    operand = pack(inputs.tokens, inputs.put(order.reshape(-1)))
    edges = w.counts[..., None] * np.arange(pieces + 1) // pieces
    begins, lengths = edges[..., :-1], np.diff(edges)  # [source, destination, piece]
    sizes = tuple(
        inputs.put(a.astype(np.int32).reshape(-1))
        for a in (
            starts[..., None] + begins,
            lengths,
            places[..., None] + begins,
            lengths.swapaxes(0, 1),
        )
    )

    def exchange(operand, output, sizes):
        return lax.ragged_all_to_all(operand, output, *sizes, axis_name=AXIS)

    def start(operand, output, *sizes):
        return (sizes, first(operand)), (operand, output)

    def move(context, carried):
        operand, output = carried
        return exchange(operand, output, context[0])

    def relink(context, carried, result):
        return link(carried[0], context[1], result), result

    def into_zeros(operand, *sizes):
        output = jnp.zeros_like(operand, shape=(w.num_slots, w.hidden))
        return exchange(operand, output, sizes)

    chain = Chain(
        RAGGED,
        (operand, inputs.rows, *sizes),
        start,
        move,
        relink,
        linked=operand,
        opaque=False,
        compiler_options=options,
    )
    check = check_rows(inputs, into_zeros, operand, *sizes)
    return Operation(
        RAGGED,
        chain,
        dataclasses.replace(check, compiler_options=options),
        ("dispatch",),
        slow=True,
    )
