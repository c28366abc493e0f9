"""Grouped products of FP8 rows on Hopper GPUs, in Pallas (Mosaic GPU).

Rows and matrices are float8_e4m3fn. A row has one scale for every 128 of its
columns, a matrix one for every 128 x 128 of its numbers. The tensor cores add up
128 columns, to which they keep fewer bits than float32 has; what comes of it is
scaled and added in float32 by ordinary instructions, before the next 128.

A tile has 128 rows of one group and 128 columns of each of two matrices, or 256
of one. Two warpgroups take 64 rows each: while one adds what came of its 128
columns of the contraction, the other keeps the tensor cores busy. A third loads.

Groups are as in `mosaic_products`, aligned to 128 rows. Scales of rows are
transposed, [K / 128, M], so that those of a tile's rows stand together. Matrices are
[G, N, K]: in 8 bits tensor cores take operands along K alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep._operations import inlining, mosaic_kernel
from jax_ep._operations.mosaic_kernel import (
    ALIGNMENT,
    Config,
    after,
    load,
    num_blocks,
    swizzled,
)
from jax_ep._operations.mosaic_products import Packed

# Rows of a tile, columns of it by one matrix, and columns of a step.
BLOCK = 128
_HALF = 64  # rows of a warpgroup
_FP8 = jnp.float8_e4m3fn
_LARGEST = 448.0
_FLOOR = 1e-4

Matrices = tuple[jax.Array, jax.Array]  # [G, N, K], scales [G, N / 128, K / 128]


@dataclasses.dataclass(frozen=True)
class _Product:
    """Tiles of a product, and what becomes of their sums.

    Attributes:
      columns: (j, i) -> which 128 columns of matrix i the tile of column j has.
      num_columns: tiles side by side.
      store: (at, sums, wg, outs, staged) stores the tiles' results, or, where sums is
        None, what rows of no group get.
      out_types: of the results.
      staged: shared memory for results on their way out.
    """

    columns: Callable[..., Any]
    num_columns: int
    store: Callable[..., None]
    out_types: Sequence[jax.ShapeDtypeStruct]
    staged: Any
    name: str


def unsupported_reason(compute_capability: str, columns: Sequence[int]) -> str | None:
    """Why these kernels do not serve products of so many columns, or None."""
    reason = mosaic_kernel.unsupported_reason(
        compute_capability=compute_capability,
        dtypes=[jnp.bfloat16],
        columns=[],
        group_alignment=ALIGNMENT,
    )
    if reason is None and any(size % BLOCK or not size for size in columns):
        return f"of the sizes {tuple(columns)}, one is not a multiple of {BLOCK}"
    return reason


def rows(
    values: jax.Array,
    scales: jax.Array,
    matrices: Matrices,
    group_sizes: jax.Array,
    *,
    group_alignment: int,
    out_dtype: Any = jnp.bfloat16,
) -> jax.Array:
    """[M, N]: each row times the matrix of its group; 0 after the last.

    Args:
      values: float8_e4m3fn [M, K].
      scales: float32 [K / 128, M or more].
      matrices: float8_e4m3fn [G, N, K] and float32 [G, N / 128, K / 128].
      group_sizes: i32[G].
      group_alignment: a multiple of 128.
      out_dtype: of the result, 2 bytes wide.
    """
    width = matrices[0].shape[1]
    piece = 64

    def store(at, sums, wg, outs, staged):
        (out,), (buffers,) = outs, staged
        for number in range(2 * BLOCK // piece):
            i, column = divmod(number * piece, BLOCK)
            if sums is None:
                value = jnp.full((_HALF, piece), at["fill"])
            else:
                value = sums[i][:, column : column + piece]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            buffer = buffers.at[wg, number % 2]
            buffer[...] = value.astype(out_dtype)
            plgpu.commit_smem()
            here = pl.ds(at["j"] * (2 * BLOCK) + number * piece, piece)
            plgpu.copy_smem_to_gmem(buffer, out.at[pl.ds(_row(at, wg), _HALF), here])

    product = _Product(
        columns=lambda j, i: 2 * j + i,
        num_columns=pl.cdiv(width, 2 * BLOCK),
        store=store,
        out_types=[jax.ShapeDtypeStruct((_padded(len(values)), width), out_dtype)],
        staged=[
            plgpu.SMEM((2, 2, _HALF, piece), out_dtype, transforms=swizzled(out_dtype))
        ],
        name="grouped_fp8_rows",
    )
    (out,) = _call(
        product, values, scales, 2 * [matrices], group_sizes, group_alignment
    )
    return out[: len(values)]


def gated(
    values: jax.Array,
    scales: jax.Array,
    gate: Matrices,
    up: Matrices,
    group_sizes: jax.Array,
    *,
    combine: Callable,
    group_alignment: int,
) -> tuple[jax.Array, jax.Array]:
    """combine(gate, up) of the products of each row, quantised again.

    Args:
      values: float8_e4m3fn [M, K].
      scales: float32 [K / 128, M or more].
      gate: float8_e4m3fn [G, I, K] and float32 [G, I / 128, K / 128].
      up: likewise.
      group_sizes: i32[G].
      combine: (gate, up) -> hidden, elementwise, on float32 arrays of any shape.
      group_alignment: a multiple of 128.

    Returns:
      (values [M, I], scales [I / 128, M or more]) as `rows` takes them; without a
      meaning after the last group.
    """
    m, width = _padded(len(values)), gate[0].shape[1]

    def store(at, sums, wg, outs, staged):
        if sums is None:
            return
        hidden = inlining.inlined(combine, *sums)
        largest = lax.max(hidden, -hidden).max(axis=1)
        scale = lax.max(largest, jnp.full((_HALF,), _FLOOR)) * (1 / _LARGEST)
        # Not a division for each number: it takes ten times as long.
        inverse = lax.broadcast_in_dim(1 / scale, hidden.shape, (0,))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for buffer, value in zip(staged, (hidden * inverse, scale), strict=True):
            buffer = buffer.at[wg]
            buffer[...] = value.astype(buffer.dtype)
        plgpu.commit_smem()
        here = pl.ds(_row(at, wg), _HALF)
        targets = (
            outs[0].at[here, pl.ds(at["j"] * BLOCK, BLOCK)],
            outs[1].at[at["j"], here],
        )
        for buffer, target in zip(staged, targets, strict=True):
            plgpu.copy_smem_to_gmem(buffer.at[wg], target)

    product = _Product(
        columns=lambda j, i: j,
        num_columns=width // BLOCK,
        store=store,
        out_types=[
            jax.ShapeDtypeStruct((m, width), _FP8),
            # Stores of one line are not cut off at its end, so there all tiles fit.
            jax.ShapeDtypeStruct((width // BLOCK, _in_tiles(m)), jnp.float32),
        ],
        staged=[
            plgpu.SMEM((2, _HALF, BLOCK), _FP8, transforms=swizzled(_FP8)),
            plgpu.SMEM((2, _HALF), jnp.float32),
        ],
        name="grouped_fp8_gated",
    )
    found = _call(product, values, scales, [gate, up], group_sizes, group_alignment)
    return found[0][: len(values)], found[1]


def _padded(num_rows: int) -> int:
    """Rows that kernels take: a multiple of 8, and a tile's at least."""
    return max(BLOCK, -(-num_rows // 8) * 8)


def _in_tiles(num_rows: int) -> int:
    """The rows of as many whole tiles as hold them."""
    return -(-num_rows // BLOCK) * BLOCK


def _row(at, wg):
    return pl.multiple_of(at["row"] + wg * _HALF, _HALF)


def _call(product, values, scales, matrices, group_sizes, alignment):
    """The results, with as many rows as kernels take."""
    if more := _padded(len(values)) - len(values):
        rest = jnp.zeros((more, values.shape[1]), values.dtype)
        values = jnp.concatenate([values, rest])
    if scales.shape[1] < len(values):
        more = len(values) - scales.shape[1]
        scales = jnp.pad(scales, ((0, 0), (0, more)))
    config = Config(BLOCK, 2 * BLOCK, alternate=False, stages=4)
    groups, _, k = matrices[0][0].shape
    place = Packed(
        len(values),
        groups,
        product.num_columns,
        config,
        pl.cdiv(k, BLOCK),
        alignment,
        needs_group=True,
    )
    tables = place.tables(group_sizes)
    stages = config.stages

    def body(*refs):
        pl.run_scoped(
            functools.partial(_run, config, product, place, refs),
            operands=[
                plgpu.SMEM((stages, BLOCK, BLOCK), _FP8, transforms=swizzled(_FP8))
                for _ in range(3)
            ],
            scales=plgpu.SMEM((stages, BLOCK), jnp.float32),
            staged=product.staged,
            full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            full_second=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            collective_axes="wg",
        )

    kernel = plgpu.kernel(
        body,
        out_type=list(product.out_types),
        grid=(num_blocks(),),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=product.name,
    )
    return kernel(*tables, values, scales, *matrices[0], *matrices[1])


def _run(config, product, place, refs, **smem):
    """One block's tiles, in its three roles."""
    *tables, lhs, lhs_scales, w0, s0, w1, s1 = refs[:8]
    work = place.work(*tables)
    block, blocks = lax.axis_index("block"), num_blocks()
    rest = (block < work["num_tiles"] % blocks).astype(jnp.int32)
    count = jnp.int32(work["num_tiles"] // blocks) + rest
    wg = lax.axis_index("wg")

    def locate(turn):
        return work["locate"](block + turn * blocks)

    def rows_of(at, step):
        return place.rows(lhs, at, 0, BLOCK).at[:, pl.ds(step * BLOCK, BLOCK)]

    def scales_of(at, step):
        return lhs_scales.at[step, pl.ds(pl.multiple_of(at["row"], BLOCK), BLOCK)]

    def columns_of(i, ref, at, step):
        columns = pl.ds(product.columns(at["j"], i) * BLOCK, BLOCK)
        return ref.at[at["group"], columns, pl.ds(step * BLOCK, BLOCK)]

    matrices = [functools.partial(columns_of, i, w) for i, w in enumerate((w0, w1))]
    loads = _Loads(
        terms=[(rows_of, [*matrices, scales_of])],
        steps=work["steps"],
        resolve=work["resolve"],
    )

    def load_tiles():
        lhs_smem, *rhs_smem = smem["operands"]
        load(
            config,
            loads,
            locate,
            count,
            lhs_smem=lhs_smem,
            rhs_smem=[*rhs_smem, smem["scales"]],
            full=smem["full"],
            empty=smem["empty"],
            rhs_full=[smem["full"], smem["full_second"], smem["full"]],
        )

    def multiply_tiles():
        _multiply(config, product, work, locate, count, wg, (s0, s1), refs[8:], **smem)

    lax.cond(wg == 2, load_tiles, multiply_tiles)


@dataclasses.dataclass(frozen=True)
class _Loads:
    """What the loader needs to know, see `mosaic_kernel.Work`."""

    terms: Sequence[Any]
    steps: Callable[..., Any]
    resolve: Callable[..., Any]


def _multiply(
    config, product, work, locate, count, wg, matrix_scales, outs, *, staged, **smem
):
    """A multiplying warpgroup: its 64 rows of every tile."""
    plgpu.set_max_registers(232, action="increase")
    for slot in range(config.stages):  # all are free at the start
        plgpu.barrier_arrive(smem["empty"].at[slot])

    def scales_of_matrices(at, number):
        found = []
        for i, ref in enumerate(matrix_scales):
            last = jnp.int32(ref.shape[1] - 1)
            column = lax.min(product.columns(at["j"], i), last)
            found.append(ref[at["group"], column, number])
        return found

    def tile(turn, slot):
        at = work["resolve"](locate(turn), False)
        at = dict(at, fill=work["fill"])
        steps = work["steps"](at)

        def step(number, carry):
            slot, *sums = carry
            factors = scales_of_matrices(at, number)
            sums = _step(wg, slot, factors, sums, **smem)
            return (after(slot, config.stages), *sums)

        zeros = plgpu.layout_cast(
            jnp.zeros((_HALF, BLOCK), jnp.float32), plgpu.Layout.WGMMA
        )
        slot, *sums = lax.fori_loop(0, steps, step, (slot, zeros, zeros))

        @pl.when(steps > 0)
        def _():
            product.store(at, sums, wg, outs, staged)

        @pl.when(steps == 0)
        def _():
            product.store(at, None, wg, outs, staged)

        return slot

    lax.fori_loop(0, count, tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _step(wg, slot, factors, sums, *, operands, scales, full, full_second, empty):
    """The sums with 128 columns more, one matrix after the other.

    Each matrix is waited for by itself. Without the wait between the two ptxas mixes
    the instructions of both, and has not registers enough: what it then spilled to
    memory made the kernel up to 2.5 times as slow.
    """
    own = pl.ds(wg * _HALF, _HALF)
    lhs, *all_rhs = (operand.at[slot] for operand in operands)
    found = []
    arrived = full, full_second
    for rhs, factor, total, barrier in zip(
        all_rhs, factors, sums, arrived, strict=True
    ):
        plgpu.barrier_wait(barrier.at[slot])

        def multiply(acc, rhs=rhs):
            plgpu.wgmma(acc, lhs.at[own], rhs.transpose((1, 0)))
            # While the tensor cores are at work.
            # pyrefly: ignore[missing-argument]  # jax before 0.11
            row_scales = plgpu.load(
                scales.at[slot, own],
                layout=plgpu.Layout.WGMMA.reduce(1),
                optimized=False,
            )
            return acc[...], row_scales

        acc = plgpu.ACC((_HALF, BLOCK), jnp.float32)
        part, row_scales = pl.run_scoped(multiply, acc)
        if rhs is all_rhs[-1]:
            plgpu.barrier_arrive(empty.at[slot])
        factor = lax.broadcast_in_dim(row_scales * factor, part.shape, (0,))
        found.append(total + part * factor)
    return found
