"""Grouped matrix products on Hopper GPUs, in Pallas (Mosaic GPU).

A grouped product multiplies rows that stand together by group with the matrix
of their group. Every group starts at a multiple of 64 rows, and a tile has 128 or
64 rows of one group. So a grouped product is a dense one whose second operand
depends on the tile: nothing is masked.

One kernel serves all products. A block holds three warpgroups: two multiply,
one only loads. The loader runs ahead over all tiles of its block and never
stops between them. Either the two others take tiles in turn, so that one
stores its results while the other keeps the tensor cores busy, or each does
half of the rows of every tile, which lets the tile be larger.

The functions here are pure and know nothing of communicators. They do not
check shapes: `unsupported_reason` says what they serve.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Rows of a group start at a multiple of this, and a step along the contraction
# takes so many columns: 128 bytes, the widest that shared memory swizzles.
ALIGNMENT = 64
_STEP = 64
_PIECE_ROWS = 64
_SHARED_MEMORY = 227 * 1024
_OLDEST_JAX = (0, 11)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is cut into tiles.

    Attributes:
      tile_m: rows of a block's tile of the result.
      tile_n: its columns, those of all right-hand sides together.
      alternate: the two multiplying warpgroups take tiles in turn; otherwise
        each does half of the rows of every tile.
      pieces: pieces of the result in shared memory per warpgroup, on their way
        out; fewer where a tile's pieces are no multiple of it.
      stages: pairs of operand tiles in shared memory; 0: as many as fit.
      band: columns of tiles that blocks walk through together, for the L2.
      swizzle: bytes of a row of an operand's tile in shared memory.
    """

    tile_m: int = 128
    tile_n: int = 192
    alternate: bool = True
    pieces: int = 2
    stages: int = 0
    band: int = 8
    swizzle: int = 128


@dataclasses.dataclass(frozen=True)
class Work:
    """What a kernel computes: tiles, their operands and their results.

    A tile is described twice. `locate(number)` gives what follows from its
    number alone. `resolve(at)` adds what is read from memory, as a dict:
    "half" where it has only the first 64 of its rows, and what the slices need.

    Attributes:
      num_tiles: how many there are, at most.
      locate: tile number -> at.
      steps: at -> steps along the contraction; 0: the result is `fill`.
      resolve: (at, loading) -> at; `loading` in the loader, which alone needs
        all of it.
      terms: (lhs, [rhs, ...]), functions of (at, step), for each product that
        the same sums take; all have the same number of steps.
      outs, extras: functions of (at, row, column), the position of a piece in
        the tile -> a piece of a result, of an operand of the epilogue.
      epilogue: (sums, extras, at, row, column) -> a value for each result.
      fill: what rows of no group are.
      rows: at -> how many of the tile's rows are some group's; None: all.
      halves: whether there are tiles of half the rows.
    """

    num_tiles: int
    locate: Callable[..., Any]
    steps: Callable[..., Any]
    resolve: Callable[..., Any]
    terms: Sequence[tuple[Callable[..., Any], Sequence[Callable[..., Any]]]]
    outs: Sequence[Callable[..., Any]]
    fill: Any
    extras: Sequence[Callable[..., Any]] = ()
    epilogue: Callable[..., Any] | None = None
    rows: Callable[..., Any] | None = None
    halves: bool = False


def unsupported_reason(
    *,
    compute_capability: str,
    dtypes: Sequence[Any],
    columns: Sequence[int],
    group_alignment: int,
) -> str | None:
    """Why these kernels do not serve a product, or None.

    Args:
      compute_capability: of the GPU, such as "9.0".
      dtypes: of all operands.
      columns: the sizes of all dimensions but rows and groups.
      group_alignment: what every group size is a multiple of.
    """
    if jax.__version_info__[:2] < _OLDEST_JAX:
        return f"jax {jax.__version__} is older than 0.11"
    if compute_capability != "9.0":
        return f"compute capability {compute_capability} is not 9.0 (Hopper)"
    dtype = jnp.dtype(dtypes[0])
    if dtype not in (jnp.bfloat16, jnp.float16) or any(d != dtype for d in dtypes):
        names = ", ".join(jnp.dtype(d).name for d in dtypes)
        return f"the operands' dtypes are {names}, not all bfloat16 or all float16"
    if any(size % _STEP or not size for size in columns):
        return f"of the sizes {tuple(columns)}, one is not a multiple of {_STEP}"
    if group_alignment % ALIGNMENT:
        return f"group_alignment {group_alignment} is not a multiple of {ALIGNMENT}"
    return None


def num_blocks() -> int:
    """Multiprocessors of the GPU, one block each."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    cores = getattr(abstract, "num_cores", None)
    if cores is None:
        gpus = [d for d in jax.devices() if d.platform == "gpu"]
        cores = getattr(gpus[0], "core_count", None) if gpus else None
    return cores or 132


def swizzled(dtype: Any, swizzle: int = 128) -> tuple[Any, ...]:
    """How tiles lie in shared memory for the tensor cores."""
    elements = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(swizzle)


def call(
    config: Config,
    make_work: Callable[..., Work],
    operands: Sequence[jax.Array],
    out_types: Sequence[jax.ShapeDtypeStruct],
    *,
    dtype: Any,
    num_rhs: int = 1,
    num_extras: int = 0,
    lhs_transposed: bool = False,
    rhs_transposed: bool = False,
    name: str,
) -> list[jax.Array]:
    """Runs the kernel over the tiles of make_work(*operands, *results)."""
    width = config.tile_n // num_rhs
    shapes = _Shapes(
        lhs=_turned((config.tile_m, _STEP), lhs_transposed),
        rhs=_turned((_STEP, width), rhs_transposed),
        rows=config.tile_m if config.alternate else config.tile_m // 2,
        width=width,
        piece=(_PIECE_ROWS, 64 if width % 64 == 0 else 32),
        num_rhs=num_rhs,
        num_outs=len(out_types),
        lhs_transposed=lhs_transposed,
        rhs_transposed=rhs_transposed,
        blocks=num_blocks(),
    )
    out_dtype = out_types[0].dtype
    # The order of the buffers begins anew with every tile.
    pieces = math.gcd(config.pieces, shapes.num_pieces)
    config = dataclasses.replace(config, pieces=pieces)
    stages = config.stages or shapes.stages_that_fit(config, num_extras, out_dtype)
    config = dataclasses.replace(config, stages=stages)

    def operand_tiles(shape):
        return plgpu.SMEM(
            (stages, *shape), dtype, transforms=swizzled(dtype, config.swizzle)
        )

    def piece_buffers(count, dtype):
        swizzle = min(128, shapes.piece[1] * jnp.dtype(dtype).itemsize)
        return plgpu.SMEM(
            (2, count, *shapes.piece), dtype, transforms=swizzled(dtype, swizzle)
        )

    def body(*refs):
        pl.run_scoped(
            functools.partial(_run, config, shapes, make_work(*refs)),
            lhs_smem=operand_tiles(shapes.lhs),
            rhs_smem=[operand_tiles(shapes.rhs) for _ in range(num_rhs)],
            out_smem=piece_buffers(config.pieces, out_dtype),
            extra_smem=piece_buffers(num_extras, dtype) if num_extras else None,
            full=plgpu.Barrier(
                num_arrivals=1 + num_rhs,
                num_barriers=stages * (2 if config.alternate else 1),
            ),
            empty=plgpu.Barrier(
                num_arrivals=1 if config.alternate else 2, num_barriers=stages
            ),
            extra_full=plgpu.Barrier(num_arrivals=num_extras, num_barriers=2)
            if num_extras
            else None,
            collective_axes="wg",
        )

    kernel = plgpu.kernel(
        body,
        out_type=list(out_types),
        grid=(shapes.blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
    )
    return kernel(*operands)


def _turned(shape, transposed):
    return shape[::-1] if transposed else shape


@dataclasses.dataclass(frozen=True)
class _Shapes:
    lhs: tuple[int, int]
    rhs: tuple[int, int]
    rows: int  # of one warpgroup's sums
    width: int  # their columns
    piece: tuple[int, int]
    num_rhs: int
    num_outs: int
    lhs_transposed: bool
    rhs_transposed: bool
    blocks: int

    @property
    def num_pieces(self) -> int:
        across = self.width // self.piece[1]
        return self.num_outs * across * (self.rows // self.piece[0])

    def stages_that_fit(self, config: Config, num_extras: int, out_dtype: Any) -> int:
        piece = 2 * self.piece[0] * self.piece[1]
        buffers = config.pieces * jnp.dtype(out_dtype).itemsize + num_extras * 2
        stage = 2 * _STEP * (config.tile_m + config.tile_n)
        return min(8, (_SHARED_MEMORY - 512 - piece * buffers) // stage)


def _run(config, shapes, work, **smem):
    """One block's tiles, in its three roles."""
    block = lax.axis_index("block")
    rest = (block < work.num_tiles % shapes.blocks).astype(jnp.int32)
    count = jnp.int32(work.num_tiles // shapes.blocks) + rest
    wg = lax.axis_index("wg")

    def locate(turn):
        return work.locate(block + turn * shapes.blocks)

    lax.cond(
        wg == 2,
        lambda: load(config, work, locate, count, **smem),
        lambda: _multiply(config, shapes, work, locate, count, wg, **smem),
    )


def after(slot, stages):
    """The slot that is filled next."""
    return lax.select(slot == stages - 1, jnp.int32(0), slot + 1)


def _before(slot, stages):
    return lax.select(slot == 0, jnp.int32(stages - 1), slot - 1)


def load(
    config, work, locate, count, *, lhs_smem, rhs_smem, full, empty, rhs_full=None, **_
):
    """The loading warpgroup: operands of all tiles, one after the other.

    rhs_full: what the arrival of each rhs is told, where that is not `full`.
    """
    plgpu.set_max_registers(40, action="decrease")
    stages = config.stages

    def load_tile(turn, slot):
        at = work.resolve(locate(turn), True)
        # A warpgroup waits for its own tiles only, so each has barriers of its own.
        first = lax.rem(turn, 2) * stages if config.alternate else 0

        def load_step(lhs, all_rhs, step, slot):
            plgpu.barrier_wait(empty.at[slot])
            arrived = full.at[first + slot]
            plgpu.copy_gmem_to_smem(lhs(at, step), lhs_smem.at[slot], arrived)
            for i, (rhs, smem) in enumerate(zip(all_rhs, rhs_smem, strict=True)):
                own = arrived if rhs_full is None else rhs_full[i].at[first + slot]
                plgpu.copy_gmem_to_smem(rhs(at, step), smem.at[slot], own)
            return after(slot, stages)

        steps = lax.div(work.steps(at), jnp.int32(len(work.terms)))
        for term in work.terms:
            slot = lax.fori_loop(0, steps, functools.partial(load_step, *term), slot)
        return slot

    lax.fori_loop(0, count, load_tile, jnp.int32(0))
    for slot in range(stages):  # leave no arrival behind
        plgpu.barrier_wait(empty.at[slot])


def _multiply(config, shapes, work, locate, count, wg, *, empty, **smem):
    """A multiplying warpgroup: every other tile, or its rows of every tile."""
    plgpu.set_max_registers(232, action="increase")
    stages = config.stages
    turns = 2 if config.alternate else 1

    # All slots are free at the start: the loader waits for each without asking.
    @pl.when(jnp.logical_or(wg == 0, not config.alternate))
    def _():
        for slot in range(stages):
            plgpu.barrier_arrive(empty.at[slot])

    def multiply_tiles(round_, slot):
        first = round_ * turns
        ats = [locate(lax.min(first + w, count - 1)) for w in range(turns)]
        steps = [
            lax.select(first + w < count, work.steps(at), jnp.int32(0))
            for w, at in enumerate(ats)
        ]
        if config.alternate:  # the other warpgroup's tile takes slots, too
            mine = jax.tree.map(lambda a, b: lax.select(wg == 0, a, b), *ats)
            own_steps = lax.select(wg == 0, *steps)
            own_slot = lax.rem(slot + wg * steps[0], jnp.int32(stages))
        else:
            mine, own_steps, own_slot = ats[0], steps[0], slot

        @pl.when(first + (wg if config.alternate else 0) < count)
        def _():
            at = work.resolve(mine, False)
            slots = (own_steps, own_slot)
            _multiply_tile(config, shapes, work, at, *slots, wg, empty=empty, **smem)

        return lax.rem(slot + sum(steps), jnp.int32(stages))

    rounds = lax.div(count + (turns - 1), jnp.int32(turns))
    lax.fori_loop(0, rounds, multiply_tiles, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _multiply_tile(
    config,
    shapes,
    work,
    at,
    steps,
    slot,
    wg,
    *,
    lhs_smem,
    rhs_smem,
    full,
    empty,
    out_smem,
    **extra,
):
    """The sums of one tile, then its epilogue."""
    stages = config.stages
    first = wg * stages if config.alternate else 0
    half = at["half"] if work.halves else None

    def step(accs, rows, step, slot):
        """One step for the first `rows` rows of the warpgroup's sums."""
        plgpu.barrier_wait(full.at[first + slot])
        if rows:
            own = pl.ds(0 if config.alternate else wg * shapes.rows, rows)
            lhs = lhs_smem.at[slot]
            lhs = (
                lhs.at[:, own].transpose((1, 0))
                if shapes.lhs_transposed
                else lhs.at[own]
            )
            for acc, smem in zip(accs, rhs_smem, strict=True):
                rhs = smem.at[slot]
                plgpu.wgmma(
                    acc if rows == shapes.rows else acc.at[0:rows],
                    lhs,
                    rhs.transpose((1, 0)) if shapes.rhs_transposed else rhs,
                )
            plgpu.wgmma_wait(shapes.num_rhs)  # the step before is done

        @pl.when(step > 0)
        def _():
            plgpu.barrier_arrive(empty.at[_before(slot, stages)])

        return after(slot, stages)

    def scoped(*accs):
        runs = [(shapes.rows, steps)]
        if half is not None:
            fewer = shapes.rows // 2 if config.alternate else 0
            short = half if config.alternate else jnp.logical_and(half, wg == 1)
            runs = [
                (shapes.rows, lax.select(short, jnp.int32(0), steps)),
                (fewer, lax.select(short, steps, jnp.int32(0))),
            ]
        end = slot
        for rows, count in runs:
            end = lax.fori_loop(0, count, functools.partial(step, accs, rows), end)
        sums = [acc[...] for acc in accs]
        plgpu.barrier_arrive(empty.at[_before(end, stages)])
        finish = functools.partial(_finished, work, at, sums, wg, **extra)
        _store(config, shapes, work, at, half, wg, finish, out_smem)

    @pl.when(steps > 0)
    def _():
        size = (shapes.rows, shapes.width)
        accs = [plgpu.ACC(size, jnp.float32) for _ in range(shapes.num_rhs)]
        pl.run_scoped(scoped, *accs)

    @pl.when(steps == 0)
    def _():
        def fill(*_):
            return [jnp.full(shapes.piece, work.fill)] * len(work.outs)

        _store(config, shapes, work, at, half, wg, fill, out_smem)


def _finished(work, at, sums, wg, row, column, shape, *, extra_smem, extra_full):
    """The results' values of one piece of the sums."""
    first, row = row
    high, wide = shape
    values = [s[first : first + high, column : column + wide] for s in sums]
    extras = []
    for i, extra in enumerate(work.extras):
        plgpu.copy_gmem_to_smem(
            extra(at, row, column), extra_smem.at[wg, i], extra_full.at[wg]
        )
    if work.extras:
        plgpu.barrier_wait(extra_full.at[wg])
        extras = [
            extra_smem[wg, i].astype(jnp.float32) for i in range(len(work.extras))
        ]
    if work.epilogue is not None:
        values = work.epilogue(values, extras, at, row, column)
    if work.rows is None:
        return values
    index = plgpu.layout_cast(
        lax.broadcasted_iota(jnp.int32, shape, 0), plgpu.Layout.WGMMA
    )
    fill = jnp.full(shape, work.fill)
    return [lax.select(index + row < work.rows(at), v, fill) for v in values]


def _store(config, shapes, work, at, half, wg, values_of, out_smem):
    """Stores a tile's results, piece by piece through shared memory."""
    buffer = 0
    high, wide = shapes.piece
    top = 0 if config.alternate else wg * shapes.rows
    for first in range(0, shapes.rows, high):
        row = top + first
        present = None
        if half is not None:
            present = jnp.logical_or(jnp.logical_not(half), row == 0)
        for column in range(0, shapes.width, wide):
            values = values_of((first, row), column, shapes.piece)
            for out, value in zip(work.outs, values, strict=True):
                plgpu.wait_smem_to_gmem(config.pieces - 1, wait_read_only=True)
                staged = out_smem.at[wg, buffer % config.pieces]
                staged[...] = value.astype(out_smem.dtype)
                plgpu.commit_smem()
                target = out(at, row, column)
                if present is None:
                    plgpu.copy_smem_to_gmem(staged, target)
                else:  # a group all the same: buffers are waited for by count

                    @pl.when(present)
                    def _(staged=staged, target=target):
                        plgpu.copy_smem_to_gmem(staged, target, commit_group=False)

                    plgpu.commit_smem_to_gmem_group()
                buffer += 1
