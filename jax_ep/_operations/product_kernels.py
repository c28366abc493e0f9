"""What programs for GPUs call: kernels where there are some, and for which groups.

Kernels want groups that start at multiples of 64 rows, in FP8 of 128. Where a caller
does not promise that, rows are copied to places that do, and results back: rows of up
to 63 or 127 more for each group, moved once more each way.

Only lowering rules import this module: Pallas takes time to import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._operations import mosaic_fp8, mosaic_products
from jax_ep._operations.arrays import group_of_rows
from jax_ep._operations.mosaic_kernel import ALIGNMENT, unsupported_reason
from jax_ep._operations.operation import LoweringContext

Pairs = Sequence[tuple[jax.Array, jax.Array]]


def why_none(ctx: LoweringContext, *, only_last: bool = False) -> str | None:
    """Why there is no kernel for a call's operands and results; None: there is one.

    The first operand is group_sizes. All others, and results, are [rows, columns],
    [groups, columns] or [groups, columns, columns]; with `only_last` only the last
    axis of each has to suit the kernels.
    """
    arrays: list[Any] = [*ctx.avals_in[1:], *ctx.avals_out]
    return unsupported_reason(
        compute_capability=_compute_capability(ctx),
        dtypes=list(dict.fromkeys(a.dtype for a in arrays)),
        columns=sorted({n for a in arrays for n in a.shape[-1 if only_last else 1 :]}),
        group_alignment=ALIGNMENT,
    )


def why_no_fp8(ctx: LoweringContext, widths: Sequence[int]) -> str | None:
    """The same of a gated MLP in FP8 with `widths` columns."""
    return mosaic_fp8.unsupported_reason(_compute_capability(ctx), widths)


def _compute_capability(ctx: LoweringContext) -> str:
    # Without a device nobody knows, and Pallas takes it for Hopper, too.
    return getattr(_device(ctx), "compute_capability", "9.0")


def _device(ctx: LoweringContext) -> jax.Device | None:
    """A device that the program is lowered for; None where nobody knows it."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh.devices.flat[0]
    try:
        backend = ctx.module_context.get_backend(optional=True)
    except RuntimeError:  # This machine has no such devices.
        return None
    return None if backend is None else backend.local_devices()[0]


def rows(
    group_sizes: jax.Array, pairs: Pairs, *, group_alignment: int, **options: Any
) -> jax.Array:
    """The sum over pairs (lhs, rhs) of grouped products [M, N]."""
    groups = _Groups(group_sizes, len(pairs[0][0]), group_alignment)
    out = mosaic_products.sum_of_rows(
        [(groups.to(lhs), rhs) for lhs, rhs in pairs],
        groups.sizes,
        group_alignment=groups.alignment,
        **options,
    )
    return groups.back(out)


def weights(
    group_sizes: jax.Array,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    group_alignment: int,
    out_dtype: Any,
) -> jax.Array:
    """lhs.T @ rhs over the rows of each group: [G, K, N]."""
    groups = _Groups(group_sizes, len(lhs), group_alignment)
    return mosaic_products.weights(
        groups.to(lhs),
        groups.to(rhs),
        groups.sizes,
        group_alignment=groups.alignment,
        out_dtype=out_dtype,
    )


def gated(
    group_sizes: jax.Array,
    rows: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *biases: jax.Array,
    glu: Callable,
    keep: bool,
    group_alignment: int,
) -> list[jax.Array]:
    """Hidden values; with `keep` gate and up, too: [M, I] each."""
    groups = _Groups(group_sizes, len(rows), group_alignment)
    bias_gate, bias_up = biases or (None, None)
    found = mosaic_products.gated(
        groups.to(rows),
        w_gate,
        w_up,
        groups.sizes,
        combine=glu,
        bias_gate=bias_gate,
        bias_up=bias_up,
        keep=keep,
        group_alignment=groups.alignment,
    )
    return list(map(groups.back, found))


def gated_batches(
    counts: jax.Array,
    rows: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *biases: jax.Array,
    glu: Callable,
) -> list[jax.Array]:
    """The MLP of the first counts[g] of rows[g]: [G, M, N]."""
    bias_gate, bias_up = biases or (None, None)
    hidden = mosaic_products.gated_batches(
        rows,
        w_gate,
        w_up,
        counts,
        combine=glu,
        bias_gate=bias_gate,
        bias_up=bias_up,
    )
    return [mosaic_products.batches(hidden, w_down, counts)]


def gated_down_vjp(
    group_sizes: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    w_down: jax.Array,
    ct: jax.Array,
    *,
    glu: Callable,
    by_weights: bool,
    group_alignment: int,
) -> list[jax.Array]:
    """Cotangents of gate and up; with `by_weights` that of w_down, too."""
    groups = _Groups(group_sizes, len(gate), group_alignment)
    ct = groups.to(ct)
    d_gate, d_up, hidden = mosaic_products.gated_backward(
        ct,
        w_down,
        groups.to(gate),
        groups.to(up),
        groups.sizes,
        combine=glu,
        group_alignment=groups.alignment,
    )
    found = [groups.back(d_gate), groups.back(d_up)]
    if by_weights:
        found.append(
            mosaic_products.weights(
                hidden, ct, groups.sizes, group_alignment=groups.alignment
            )
        )
    return found


def fp8_gated_mlp(
    group_sizes: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    *matrices: jax.Array,
    glu: Callable,
    group_alignment: int,
) -> list[jax.Array]:
    """The MLP in FP8: [M, N] in bfloat16.

    matrices: values and scales of w_gate, w_up and w_down, as quantised.
    """
    gate, up, down = zip(matrices[::2], matrices[1::2], strict=True)
    groups = _Groups(group_sizes, len(values), group_alignment, mosaic_fp8.BLOCK)
    options = {"group_alignment": groups.alignment}
    hidden, hidden_scales = mosaic_fp8.gated(
        groups.to(values),
        groups.to(scales).T,
        gate,
        up,
        groups.sizes,
        combine=glu,
        **options,
    )
    out = mosaic_fp8.rows(hidden, hidden_scales, down, groups.sizes, **options)
    return [groups.back(out)]


class _Groups:
    """Groups as kernels take them, and the way of rows there and back.

    Attributes:
      sizes: i32[G], multiples of alignment.
      alignment: a multiple of `wanted`.
    """

    def __init__(
        self,
        group_sizes: jax.Array,
        num_rows: int,
        alignment: int,
        wanted: int = ALIGNMENT,
    ):
        self._copies = alignment % wanted != 0
        self.sizes = group_sizes
        self.alignment = alignment
        if not self._copies:
            return
        self.alignment = wanted
        self.sizes = -(-group_sizes // wanted) * wanted
        most = num_rows + min(num_rows, len(group_sizes)) * (wanted - 1)
        room = most // wanted * wanted
        ends, room_ends = jnp.cumsum(group_sizes), jnp.cumsum(self.sizes)
        group, inside = group_of_rows(room_ends, room)
        before = (room_ends - self.sizes)[group]
        offset = jnp.arange(room, dtype=jnp.int32) - before
        inside &= offset < group_sizes[group]
        source = (ends - group_sizes)[group] + offset
        self._source = jnp.where(inside, source, num_rows)
        group, inside = group_of_rows(ends, num_rows)
        target = (
            jnp.arange(num_rows, dtype=jnp.int32)
            + (room_ends - self.sizes - ends + group_sizes)[group]
        )
        self._target = jnp.where(inside, target, room)

    def to(self, rows: jax.Array) -> jax.Array:
        """[M, ...] to where the kernels want them, zeros between the groups."""
        if not self._copies:
            return rows
        return rows.at[self._source].get(mode="fill", fill_value=0)

    def back(self, rows: jax.Array) -> jax.Array:
        """[M, ...] of the kernels' results, 0 behind the last group."""
        if not self._copies:
            return rows
        return rows.at[self._target].get(mode="fill", fill_value=0)
