"""Grouped products of rows that stand together by group, on Hopper GPUs.

Rows of group g start at a multiple of `group_alignment`, itself a multiple of
64, and there are group_sizes[g] of them, those of group 0 first. Every group
size has to be a multiple of it, too: where one is not, all results are NaN.
Sums are float32. What stands in rows after the last group is never used.

See `mosaic_kernel` for how, and for `unsupported_reason`, which says what is
served.
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

from jax_ep._operations import inlining
from jax_ep._operations.arrays import running_sums
from jax_ep._operations.mosaic_kernel import (
    ALIGNMENT,
    Config,
    Work,
    call,
    num_blocks,
)

_STEP = 64

Combine = Callable[[jax.Array, jax.Array], jax.Array]


def rows(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    group_alignment: int,
    out_dtype: Any = None,
    config: Config | None = None,
) -> jax.Array:
    """[M, N]: each row of `lhs` times the matrix of its group; 0 after the last.

    Args:
      lhs: [M, K].
      rhs: [G, K, N], or [G, N, K] with transpose_rhs.
      group_sizes: i32[G].
      transpose_rhs: see rhs.
      group_alignment: see the module.
      out_dtype: of the result, 2 bytes wide; lhs.dtype if None.
      config: how to cut the product; chosen by its sizes if None.
    """
    return sum_of_rows(
        [(lhs, rhs)],
        group_sizes,
        transpose_rhs=transpose_rhs,
        group_alignment=group_alignment,
        out_dtype=out_dtype,
        config=config,
    )


def sum_of_rows(
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    group_alignment: int,
    out_dtype: Any = None,
    config: Config | None = None,
) -> jax.Array:
    """The sum of `rows` over pairs (lhs, rhs) of the same shapes, in one kernel."""
    lhs, rhs = pairs[0]
    width = rhs.shape[1 if transpose_rhs else 2]
    low_tiles = _low_tiles(lhs.shape[0], rhs.shape[0], group_alignment)
    config = config or _row_config(low_tiles, width)
    [out] = _row_products(
        pairs,
        group_sizes,
        config,
        group_alignment,
        transpose_rhs=transpose_rhs,
        out_dtypes=[out_dtype or lhs.dtype],
        name="grouped_rows",
    )
    return out


def batches(
    lhs: jax.Array,
    rhs: jax.Array,
    counts: jax.Array,
    *,
    transpose_rhs: bool = False,
    out_dtype: Any = None,
    config: Config | None = None,
) -> jax.Array:
    """[G, M, N]: the first counts[g] rows of lhs[g] times rhs[g]; 0 after them.

    Only tiles that have rows are computed. Whatever stands in rows after the
    counted ones is not used.

    Args:
      lhs: [G, M, K].
      rhs: [G, K, N], or [G, N, K] with transpose_rhs.
      counts: i32[G], at most M.
      transpose_rhs: see rhs.
      out_dtype: of the result, 2 bytes wide; lhs.dtype if None.
      config: how to cut the product; chosen by its sizes if None.
    """
    width = rhs.shape[1 if transpose_rhs else 2]
    [out] = _row_products(
        [(lhs, rhs)],
        counts,
        config or _row_config(_low_batch_tiles(lhs), width),
        None,
        transpose_rhs=transpose_rhs,
        out_dtypes=[out_dtype or lhs.dtype],
        name="grouped_batches",
    )
    return out


def gated_batches(
    lhs: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    counts: jax.Array,
    *,
    combine: Combine,
    bias_gate: jax.Array | None = None,
    bias_up: jax.Array | None = None,
    config: Config | None = None,
) -> jax.Array:
    """[G, M, I]: `gated` of the first counts[g] rows of lhs[g]; 0 after them.

    Args: as for `gated` and `batches`.
    """
    [hidden] = _gated(
        lhs,
        (w_gate, w_up),
        counts,
        combine,
        () if bias_gate is None else (bias_gate, bias_up),
        None,
        False,
        config or _gated_config(_low_batch_tiles(lhs), w_gate.shape[2]),
    )
    return hidden


def gated(
    rows: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    group_sizes: jax.Array,
    *,
    combine: Combine,
    bias_gate: jax.Array | None = None,
    bias_up: jax.Array | None = None,
    group_alignment: int,
    keep: bool = False,
    config: Config | None = None,
) -> tuple[jax.Array, ...]:
    """combine(gate, up) of the products of each row with its two matrices.

    Args:
      rows: [M, K].
      w_gate: [G, K, I].
      w_up: [G, K, I].
      group_sizes: i32[G].
      combine: (gate, up) -> hidden, elementwise, on float32 arrays of any shape.
      bias_gate: [G, I], added to gate before; both or none.
      bias_up: [G, I], added to up before.
      group_alignment: see the module.
      keep: whether gate and up are returned, too, with the biases, for
        `gated_backward`.
      config: how to cut the product; chosen by its sizes if None.

    Returns:
      (hidden,) or (hidden, gate, up), each [M, I]; 0 after the last group.
    """
    (m, _), (groups, _, inner) = rows.shape, w_gate.shape
    low_tiles = _low_tiles(m, groups, group_alignment)
    return tuple(
        _gated(
            rows,
            (w_gate, w_up),
            group_sizes,
            combine,
            () if bias_gate is None else (bias_gate, bias_up),
            group_alignment,
            keep,
            config or _gated_config(low_tiles, inner),
        )
    )


def _gated(lhs, matrices, group_sizes, combine, biases, alignment, keep, config):
    def epilogue(sums, extras, biases):
        gate, up = (s + b for s, b in zip(sums, biases)) if biases else sums  # noqa: B905
        hidden = inlining.inlined(combine, gate, up)
        return (hidden, gate, up) if keep else (hidden,)

    return _row_products(
        [(lhs, *matrices)],
        group_sizes,
        config,
        alignment,
        out_dtypes=[lhs.dtype] * (3 if keep else 1),
        biases=biases,
        epilogue=epilogue,
        name="grouped_gated",
    )


def gated_backward(
    d_out: jax.Array,
    w_down: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    group_sizes: jax.Array,
    *,
    combine: Combine,
    group_alignment: int,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Back through `rows(hidden, w_down)` and `combine` in one kernel.

    Args:
      d_out: [M, H], the cotangent of the rows' outputs.
      w_down: [G, I, H].
      gate: [M, I], as `gated` kept it.
      up: [M, I].
      group_sizes: i32[G].
      combine: as for `gated`.
      group_alignment: see the module.
      config: how to cut the product; chosen by its sizes if None.

    Returns:
      The cotangents of gate and up, and hidden once more, for the gradient by
      w_down; each [M, I], 0 after the last group.
    """

    def differentiate(gate, up, d_hidden):
        hidden, back = jax.vjp(combine, gate, up)
        return (*back(d_hidden), hidden)

    def epilogue(sums, extras, biases):
        return inlining.inlined(differentiate, *extras, *sums)

    m, width = gate.shape
    low_tiles = _low_tiles(m, w_down.shape[0], group_alignment)
    config = config or _row_config(low_tiles, width)
    d_gate, d_up, hidden = _row_products(
        [(d_out, w_down)],
        group_sizes,
        config,
        group_alignment,
        transpose_rhs=True,
        out_dtypes=[gate.dtype] * 3,
        extras=(gate, up),
        epilogue=epilogue,
        name="grouped_gated_backward",
    )
    return d_gate, d_up, hidden


def weights(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    group_alignment: int,
    out_dtype: Any = None,
    config: Config | None = None,
) -> jax.Array:
    """[G, K, N]: lhs.T @ rhs over the rows of each group; 0 where it has none.

    Args:
      lhs: [M, K].
      rhs: [M, N].
      group_sizes: i32[G].
      group_alignment: see the module.
      out_dtype: of the result, 2 bytes wide; lhs.dtype if None.
      config: how to cut the product; chosen by its sizes if None.
    """
    lhs, rhs = padded(lhs), padded(rhs)
    (_, k), n, groups = lhs.shape, rhs.shape[1], group_sizes.shape[0]
    config = config or Config(tile_m=min(128, k), tile_n=_best_width(n))
    tile_m, tile_n = config.tile_m, config.tile_n
    grid = pl.cdiv(k, tile_m), pl.cdiv(n, tile_n)

    def make_work(table, lhs, rhs, out):
        good = table[2, groups - 1] == 0

        def locate(item):
            per_group = jnp.int32(grid[0] * grid[1])
            group = lax.div(item, per_group)
            i, j = plgpu.planar_snake(lax.rem(item, per_group), grid, 1, config.band)
            start = _start(table, 1, group)
            steps = lax.div(table[1, group] - start, jnp.int32(_STEP))
            steps = lax.select(good, steps, jnp.int32(0))
            return {"group": group, "i": i, "j": j, "start": start, "steps": steps}

        def operand(ref, key, width, at, step):
            row = pl.multiple_of(at["start"] + step * _STEP, _STEP)
            return ref.at[pl.ds(row, _STEP), pl.ds(at[key] * width, width)]

        def result(at, row, column):
            high, wide = _piece(tile_n)
            return out.at[
                at["group"],
                pl.ds(at["i"] * tile_m + row, high),
                pl.ds(at["j"] * tile_n + column, wide),
            ]

        left = functools.partial(operand, lhs, "i", tile_m)
        right = functools.partial(operand, rhs, "j", tile_n)
        return Work(
            num_tiles=groups * grid[0] * grid[1],
            locate=locate,
            steps=lambda at: at["steps"],
            resolve=lambda at, loading: at,
            terms=[(left, [right])],
            outs=[result],
            fill=_fill(good),
        )

    [out] = call(
        config,
        make_work,
        (_tables(group_sizes, 128, group_alignment), lhs, rhs),
        [jax.ShapeDtypeStruct((groups, k, n), out_dtype or lhs.dtype)],
        dtype=lhs.dtype,
        lhs_transposed=True,
        name="grouped_weights",
    )
    return out


def _tables(group_sizes, tile_m, alignment):
    """i32[3, G], sums up to each group: tiles, rows, and rows that do not fit."""
    sizes = group_sizes.astype(jnp.int32)
    tiles = lax.div(sizes + (tile_m - 1), jnp.int32(tile_m))
    misfits = lax.rem(sizes, jnp.int32(alignment))
    return running_sums(jnp.stack([tiles, sizes, misfits]))


def _groups_of_tiles(table, num_tiles):
    """i32[num_tiles]: how many groups end at or before each tile."""
    tiles = jnp.arange(num_tiles, dtype=jnp.int32)
    return jnp.sum(table[:1] <= tiles[:, None], axis=1, dtype=jnp.int32)


def _start(table, line, group):
    before = table[line, lax.max(group - 1, 0)]
    return lax.select(group > 0, before, jnp.int32(0))


def _fill(good):
    return lax.select(good, jnp.float32(0), jnp.float32(jnp.nan))


def _piece(width):
    return 64, 64 if width % 64 == 0 else 32


def padded(rows):
    """With as many rows as kernels take: a multiple of 8, and 64 at least."""
    *batch, m, columns = rows.shape
    more = max(ALIGNMENT, -(-m // 8) * 8) - m
    if not more:
        return rows
    return jnp.concatenate([rows, jnp.zeros((*batch, more, columns), rows.dtype)], -2)


def _best_width(n):
    """Columns of a tile: the wider, the less is read for a product; few are waste."""
    cost = {192: 1.0, 128: 1.1, 64: 1.6}
    return min(
        (width for width in cost if width <= n),
        key=lambda width: cost[width] * pl.cdiv(n, width) * width,
    )


def _low_tiles(m, groups, alignment):
    """How many tiles of 64 rows there are; 0: tiles of 128 rows are better.

    Groups of few rows are bound by the bytes of their matrices. m counts pads, too:
    up to 64 rows of a group, and as many again where groups are full.
    """
    return m // 64 if alignment % 128 and m <= 128 * groups else 0


def _low_batch_tiles(lhs):
    # How many rows are counted is not known: a low tile reads the matrix again for
    # every 64 of them, a high one takes a little longer where there are fewer.
    groups, m, _ = lhs.shape
    return groups * pl.cdiv(m, 64) if m <= 128 else 0


def _row_config(low_tiles, n):
    if not low_tiles:
        return Config(tile_n=_best_width(n))
    width = 256 if n % 256 == 0 else _best_width(n)
    return Config(tile_m=64, tile_n=_narrower(width, low_tiles, n))


def _gated_config(low_tiles, inner):
    # A tile must not be wider than the matrix. Sums of gate and up of 128 columns
    # each leave a warpgroup room for 64 rows.
    width = min(128, inner)
    if not low_tiles:
        return Config(tile_n=2 * width, alternate=False)
    return Config(tile_m=64, tile_n=2 * _narrower(width, low_tiles, inner))


def _narrower(width, tiles, n):
    """Half the width where that gives work to blocks that would have none."""
    few = tiles * pl.cdiv(n, width) <= num_blocks() // 2
    return width // 2 if few and width % 128 == 0 else width


def _row_products(
    pairs,
    group_sizes,
    config,
    alignment,
    *,
    transpose_rhs=False,
    out_dtypes,
    extras=(),
    biases=(),
    epilogue=None,
    name,
):
    """Products of rows with the matrices of their groups, and what follows them.

    pairs: (lhs, rhs, ...) whose products are summed, for each rhs apart.
    extras: like lhs with N columns, biases: [G, N], operands of `epilogue`
    (sums, extras, biases), which gives the results' values.
    alignment: None: lhs is [G, M, K], and group_sizes counts the rows of each.
    """
    *_, given, _ = pairs[0][0].shape
    pairs = [(padded(lhs), *all_rhs) for lhs, *all_rhs in pairs]
    extras = [padded(extra) for extra in extras]
    *_, m, _ = pairs[0][0].shape
    groups, k, n = pairs[0][1].shape
    if transpose_rhs:
        k, n = n, k
    num_rhs = len(pairs[0]) - 1
    width = config.tile_n // num_rhs
    steps = pl.cdiv(k, _STEP) * len(pairs)
    place = (Packed if alignment else _Batches)(
        m, groups, pl.cdiv(n, width), config, steps, alignment, bool(biases)
    )
    operands, tree = jax.tree.flatten((list(pairs), list(extras), list(biases)))
    tables = place.tables(group_sizes)

    def make_work(*refs):
        tables_, refs = refs[: len(tables)], refs[len(tables) :]
        pairs, extras, biases = jax.tree.unflatten(tree, refs[: len(operands)])

        def lhs_slice(ref, at, step):
            rows = place.rows(ref, at, 0, config.tile_m)
            return rows.at[:, pl.ds(step * _STEP, _STEP)]

        def rhs_slice(ref, at, step):
            ks, ns = pl.ds(step * _STEP, _STEP), pl.ds(at["j"] * width, width)
            matrix = ref.at[at["group"]]
            return matrix.at[ns, ks] if transpose_rhs else matrix.at[ks, ns]

        def piece(ref, at, row, column):
            high, wide = _piece(width)
            rows = place.rows(ref, at, row, high)
            return rows.at[:, pl.ds(at["j"] * width + column, wide)]

        def finish(sums, extras, at, row, column):
            high, wide = _piece(width)
            here = pl.ds(at["j"] * width + column, wide)
            vectors = [
                # pyrefly: ignore[missing-argument]  # jax before 0.11
                plgpu.load(bias.at[at["group"], here], optimized=False)
                for bias in biases
            ]
            vectors = [
                lax.broadcast_in_dim(v.astype(jnp.float32), (high, wide), (1,))
                for v in vectors
            ]
            assert epilogue is not None
            return epilogue(sums, extras, vectors)

        return Work(
            terms=[
                (
                    functools.partial(lhs_slice, lhs),
                    [functools.partial(rhs_slice, rhs) for rhs in all_rhs],
                )
                for lhs, *all_rhs in pairs
            ],
            outs=[functools.partial(piece, out) for out in refs[len(operands) :]],
            extras=[functools.partial(piece, extra) for extra in extras],
            epilogue=None if epilogue is None else finish,
            **place.work(*tables_),
        )

    shape = (*pairs[0][0].shape[:-1], n)
    outs = call(
        config,
        make_work,
        (*tables, *operands),
        [jax.ShapeDtypeStruct(shape, dtype) for dtype in out_dtypes],
        dtype=operands[0].dtype,
        num_rhs=num_rhs,
        num_extras=len(extras),
        rhs_transposed=transpose_rhs,
        name=name,
    )
    return [out if given == m else out[..., :given, :] for out in outs]


@dataclasses.dataclass(frozen=True)
class Packed:
    """Tiles of rows [M, ...] whose groups stand one after the other."""

    m: int
    groups: int
    columns: int
    config: Config
    num_steps: int
    alignment: int
    needs_group: bool

    @property
    def halves(self) -> bool:
        """Whether a group's last tile may have half the rows."""
        return self.alignment % self.config.tile_m != 0

    @property
    def row_tiles(self) -> int:
        """Tiles one above the other, at most."""
        # Half tiles: up to one for each group, and one behind the last.
        tile_m = self.config.tile_m
        return (self.m + self.halves * ALIGNMENT * self.groups + tile_m - 1) // tile_m

    def tables(self, group_sizes) -> tuple[jax.Array, ...]:
        """What the kernel looks groups up in."""
        table = _tables(group_sizes, self.config.tile_m, self.alignment)
        return table, _groups_of_tiles(table, self.row_tiles)

    def rows(self, ref, at, row, count):
        """`count` rows of a tile from its `row` on."""
        return ref.at[pl.ds(pl.multiple_of(at["row"] + row, ALIGNMENT), count)]

    def work(self, *tables) -> dict[str, Any]:
        """Fields of `Work`: which tiles there are, and where."""
        table, groups_of_tiles = tables
        last, tile_m = self.groups - 1, self.config.tile_m
        good = table[2, last] == 0
        used = lax.select(good, table[0, last], jnp.int32(0))
        grid = self.row_tiles, self.columns

        def locate(number):
            i, j = plgpu.planar_snake(number, grid, 1, self.config.band)
            return {"tile": i, "j": j}

        def resolve(at, loading):
            row = at["tile"] * tile_m
            if not (loading or self.halves or self.needs_group):
                return dict(at, row=row)
            group = groups_of_tiles[at["tile"]]
            half = False
            if self.halves:  # also right behind the last group
                inside = (at["tile"] - _start(table, 0, group)) * tile_m
                row = lax.select(good, _start(table, 1, group) + inside, row)
                left = table[1, lax.min(group, last)] - row
                half = jnp.logical_and(good, left == ALIGNMENT)
            return dict(at, row=row, group=lax.min(group, last), half=half)

        return {
            "num_tiles": grid[0] * grid[1],
            "locate": locate,
            "steps": lambda at: lax.select(
                at["tile"] < used, jnp.int32(self.num_steps), jnp.int32(0)
            ),
            "resolve": resolve,
            "fill": _fill(good),
            "halves": self.halves,
        }


class _Batches(Packed):
    """Tiles of rows [G, M, ...], of which each group has its first ones."""

    def tables(self, group_sizes) -> tuple[jax.Array, ...]:
        return (group_sizes.astype(jnp.int32),)

    def rows(self, ref, at, row, count):
        return ref.at[at["group"], pl.ds(at["row"] + row, count)]

    def work(self, *tables) -> dict[str, Any]:
        (counts,) = tables
        tile_m = self.config.tile_m
        row_tiles = pl.cdiv(self.m, tile_m)

        def locate(number):
            # First tiles first: every block gets its share of those with rows.
            tile = lax.div(number, jnp.int32(self.groups * self.columns))
            number = lax.rem(number, jnp.int32(self.groups * self.columns))
            group = lax.div(number, jnp.int32(self.columns))
            j = lax.rem(number, jnp.int32(self.columns))
            return {"row": tile * tile_m, "group": group, "j": j}

        def rows(at):
            return counts[at["group"]] - at["row"]

        return {
            "num_tiles": row_tiles * self.groups * self.columns,
            "locate": locate,
            "steps": lambda at: lax.select(
                rows(at) > 0, jnp.int32(self.num_steps), jnp.int32(0)
            ),
            "resolve": lambda at, loading: at,
            "fill": jnp.float32(0),
            "rows": rows,
        }
