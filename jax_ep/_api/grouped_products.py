"""Products of rows by the matrices of their groups: what users call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._data import checks
from jax_ep._operations import fp8, fp8_gated, gated, ragged

_FLOATS = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32", "float64")))


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    group_alignment: int = 1,
    preferred_element_type: Any = None,
) -> jax.Array:
    """`jax.lax.ragged_dot`, on NVIDIA GPUs as fast as dense products.

    The rows of group g stand behind those of group g - 1, group_sizes[g] of them::

        output[i] = lhs[i] @ rhs[g]    for the rows i of group g
        output[i] = 0                  behind the last group

    What lhs holds behind the last group is not read.

    Args:
      lhs: [M, K], bfloat16, float16, float32 or float64.
      rhs: [G, K, N], of the same dtype.
      group_sizes: int[G], none negative, at most M together.
      group_alignment: a promise that each size is a multiple of it, as it is for
        those of a plan with plan.expert_alignment. With a multiple of 128 kernels
        are fastest. Without effect on results.
      preferred_element_type: dtype of the result, by default that of lhs. Products
        are summed in float32 (float64 for float64) and rounded once.

    Returns:
      [M, N].

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.

    Warns:
      UserWarning: the program is for a GPU and jax.lax.ragged_dot has to be used
        there, with the reason. Kernels are for bfloat16 and float16, gradients
        included where the result has their dtype.

    Derivative: of every kind and order, in lhs and rhs. The gradient of lhs is 0
    behind the last group, that of the matrix of a group without rows is 0.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    _check_array("ragged_dot", "lhs", lhs, "M, K", (None, None))
    _check_array(
        "ragged_dot", "rhs", rhs, "G, K, N", (None, lhs.shape[1], None), lhs.dtype
    )
    sizes = _checked_sizes("ragged_dot", group_sizes, rhs.shape[0])
    return ragged.rows(
        sizes,
        lhs,
        rhs,
        group_alignment=_checked_alignment("ragged_dot", group_alignment),
        precision=default_precision(),
        dtype=_checked_result("ragged_dot", preferred_element_type, lhs.dtype),
    )


def gated_mlp(
    rows: jax.Array,
    group_sizes: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    glu: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    b_down: jax.Array | None = None,
    group_alignment: int = 1,
) -> jax.Array:
    """Gated MLPs, one for each group of rows: the experts of most models.

    For the rows i of group g (and 0 behind the last group)::

        gate, up = rows[i] @ w_gate[g] + b_gate[g], rows[i] @ w_up[g] + b_up[g]
        output[i] = (activation(gate) * up) @ w_down[g] + b_down[g]

    The activation is applied in float32 (float64 for float64). gate and up round to
    the dtype of rows before it, unless one kernel does both, and so do hidden values.

    `moe` takes it as it is: functools.partial(gated_mlp, w_gate=..., w_up=...,
    w_down=...). On GPUs gate, up and activation are one kernel where the activation
    is made of elementwise operations; the products are those of `ragged_dot`.

    Or of batches, as `low_latency_dispatch` gives them: rows [G, M, H], of which group
    g has the first group_sizes[g] of rows[g]. What stands behind those is not read,
    and the results there are 0. On GPUs only tiles that have rows are computed.

    Or in FP8: rows are `Fp8Rows`, as `moe` with quantize="fp8" gives them, or (values
    [M, H], scales [M, ceil(H / 128)]) as of `dispatch_fp8`, and the matrices are
    `Fp8Weights`, or arrays that are quantised here, at every call. The products take
    them as they are. Sums of 128 columns are scaled and added in float32, and hidden
    values are quantised again before the second product, 128 columns a scale. The
    result is bfloat16. There are no biases, and no batches.

    Args:
      rows: [M, H] or [G, M, H], bfloat16, float16, float32 or float64; or in FP8.
      group_sizes: int[G], see `ragged_dot`; of batches, at most M each.
      w_gate: [G, H, I], of the dtype of rows, as all weights and biases; or in FP8.
      w_up: [G, H, I].
      w_down: [G, I, N].
      activation: applied to gate.
      glu: (gate, up) -> hidden, all [M, I], instead of activation(gate) * up.
        gpt-oss, for one::

            def glu(gate, up):
                gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
                return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)

      b_gate: [G, I], or None. Both of b_gate and b_up, or none.
      b_up: [G, I], or None.
      b_down: [G, N], or None.
      group_alignment: see `ragged_dot`; of no meaning to batches.

    Returns:
      [M, N] or [G, M, N], of the dtype of rows.

    Raises:
      TypeError, ValueError: a bad argument, with the rule and what was found.

    Warns:
      UserWarning: as `ragged_dot`; in FP8 also where a GPU has no kernel for that.

    Derivative: of every kind and order. Reverse mode keeps rows, gate and up, and
    computes hidden values again; under jax.checkpoint it keeps rows alone and
    computes gate and up again: eleven products in place of nine. In FP8
    reverse mode only, straight through: the gradient of the MLP in bfloat16 at the
    dequantised rows, and at the matrices as they were given (`Fp8Weights`:
    dequantised, and without a gradient of their own). It keeps rows in FP8, and
    computes gate and up again.
    """
    if isinstance(rows, fp8.Fp8Rows | tuple | list):
        weights = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
        if not (b_gate is None and b_up is None and b_down is None):
            raise ValueError("jax_ep.gated_mlp: there are no biases with rows in FP8")
        return _fp8_mlp(rows, group_sizes, weights, activation, glu, group_alignment)
    rows = jnp.asarray(rows)
    if any(isinstance(w, fp8.Fp8Weights) for w in (w_gate, w_up, w_down)):
        raise TypeError(
            "jax_ep.gated_mlp: matrices in FP8 multiply rows in FP8, found rows "
            f"{_found(rows)}"
        )
    num_groups = jnp.shape(w_gate)[0] if jnp.ndim(w_gate) else None
    if rows.ndim == 3:
        _check_array("gated_mlp", "rows", rows, "G, M, H", (num_groups, None, None))
    else:
        _check_array("gated_mlp", "rows", rows, "M, H", (None, None))
    inner = jnp.shape(w_gate)[-1] if jnp.ndim(w_gate) else None
    width = jnp.shape(w_down)[-1] if jnp.ndim(w_down) else None
    wanted = {
        "w_gate": (w_gate, "G, H, I", (num_groups, rows.shape[-1], inner)),
        "w_up": (w_up, "G, H, I", (num_groups, rows.shape[-1], inner)),
        "w_down": (w_down, "G, I, N", (num_groups, inner, width)),
        "b_gate": (b_gate, "G, I", (num_groups, inner)),
        "b_up": (b_up, "G, I", (num_groups, inner)),
        "b_down": (b_down, "G, N", (num_groups, width)),
    }
    arrays = {}
    for name, (value, letters, sizes) in wanted.items():
        if value is None and name.startswith("b_"):
            continue
        arrays[name] = jnp.asarray(value)
        _check_array("gated_mlp", name, arrays[name], letters, sizes, rows.dtype)
    biases = tuple(arrays[name] for name in ("b_gate", "b_up") if name in arrays)
    if len(biases) == 1:
        raise ValueError(
            "jax_ep.gated_mlp: give both of b_gate and b_up or none, found one"
        )
    sizes = _checked_sizes("gated_mlp", group_sizes, arrays["w_gate"].shape[0])
    options = {
        "group_alignment": _checked_alignment("gated_mlp", group_alignment),
        "precision": default_precision(),
    }
    shape = (*rows.shape[:-1], arrays["w_gate"].shape[2])
    glu, closed = _checked_glu("gated_mlp", activation, glu, shape, rows.dtype)
    weights = [arrays[name] for name in ("w_gate", "w_up", "w_down")]
    if rows.ndim == 3:
        return _batches(
            sizes, rows, weights, biases, arrays.get("b_down"), glu, closed, options
        )
    output = _mlp(sizes, rows, weights, biases, glu, closed, options)
    if b_down is None:
        return output
    dtype = ragged.wide(rows.dtype)
    bias = ragged.bias_rows(sizes, arrays["b_down"], len(rows), dtype)
    return (output.astype(dtype) + bias).astype(rows.dtype)


def _fp8_mlp(rows, group_sizes, weights, activation, glu, alignment) -> jax.Array:
    """The MLPs of rows in FP8."""
    rows = _checked_fp8_rows("gated_mlp", rows)
    h, i = rows.values.shape[1], weights["w_down"].shape[-2]
    groups, n = weights["w_gate"].shape[0], weights["w_down"].shape[-1]
    weights = [
        _checked_fp8_weights("gated_mlp", name, weights[name], letters, shape)
        for name, letters, shape in (
            ("w_gate", "G, H, I", (groups, h, i)),
            ("w_up", "G, H, I", (groups, h, i)),
            ("w_down", "G, I, N", (groups, i, n)),
        )
    ]
    shape = (rows.values.shape[0], i)
    glu, closed = _checked_glu("gated_mlp", activation, glu, shape, jnp.float32)
    if not closed:
        raise ValueError(
            "jax_ep.gated_mlp: with rows in FP8 the activation must not close over "
            "traced arrays; dequantise the rows and call gated_mlp without FP8"
        )
    return fp8_gated.gated_mlp(
        _checked_sizes("gated_mlp", group_sizes, groups),
        rows,
        weights,
        glu=glu,
        group_alignment=_checked_alignment("gated_mlp", alignment),
        precision=default_precision(),
    )


def _mlp(sizes, rows, weights, biases, glu, closed: bool, options) -> jax.Array:
    """The MLPs without the last bias."""
    if closed:
        return gated.gated_mlp(sizes, rows, weights, biases, glu=glu, **options)
    # It closes over what may have a gradient of its own, such as a slope.
    function = functools.partial(gated.by_products, glu=glu, **options)
    return jax.checkpoint(function)(sizes, rows, *weights, *biases)[0]


def _batches(sizes, rows, weights, biases, b_down, glu, closed, options) -> jax.Array:
    """The MLPs of batches."""
    options = {"glu": glu, "precision": options["precision"]}
    if closed:
        output = gated.gated_batches(sizes, rows, weights, biases, **options)
    else:
        (output,) = gated.plain_batches(sizes, rows, *weights, *biases, **options)
    if b_down is None:
        return output
    inside = jnp.arange(rows.shape[1])[None] < sizes[:, None]
    dtype = ragged.wide(rows.dtype)
    output = output.astype(dtype) + b_down.astype(dtype)[:, None]
    return jnp.where(inside[:, :, None], output, 0).astype(rows.dtype)


# Checks ----------------------------------------------------------------------


def default_precision() -> Any:
    """What jax.default_matmul_precision says here, as lax's products take it."""
    config: Any = jax.config
    return config.jax_default_matmul_precision


def _found(array: jax.Array) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _check_array(
    op: str,
    name: str,
    array: jax.Array,
    letters: str,
    sizes: Sequence[int | None],
    dtype: Any = None,
) -> None:
    """Raises unless `array` is [letters] with these sizes, where they are known."""
    if array.dtype not in _FLOATS:
        raise TypeError(
            f"jax_ep.{op}: {name} must be bfloat16, float16, float32 or float64, "
            f"found {_found(array)}"
        )
    if dtype is not None and array.dtype != dtype:
        raise TypeError(
            f"jax_ep.{op}: all operands must have one dtype, found {name} "
            f"{_found(array)} beside {dtype}"
        )
    shape = array.shape
    if len(shape) != len(sizes) or any(
        want not in (None, have) for want, have in zip(sizes, shape, strict=True)
    ):
        named = zip(letters.split(", "), sizes, strict=True)
        known = ", ".join(f"{letter} = {n}" for letter, n in named if n is not None)
        raise ValueError(
            f"jax_ep.{op}: {name} must be [{letters}]{' with ' * bool(known)}{known}, "
            f"found {_found(array)}"
        )
    spec = [axes for axes in jax.typeof(array).sharding.spec if axes is not None]
    if spec:
        raise ValueError(
            f"jax_ep.{op}: {name} must not be split over mesh axes, found {spec}; "
            "call it inside jax.shard_map, with what each device has"
        )


def _checked_fp8_rows(op: str, rows: Any) -> fp8.Fp8Rows:
    if not isinstance(rows, fp8.Fp8Rows):
        if len(rows) != 2:
            raise TypeError(
                f"jax_ep.{op}: rows in FP8 must be (values, scales) or "
                f"jax_ep.Fp8Rows, found {len(rows)} values"
            )
        rows = fp8.Fp8Rows(*map(jnp.asarray, rows))
    values, scales = rows.values, rows.scales
    if values.dtype != jnp.float8_e4m3fn or values.ndim != 2:
        raise TypeError(
            f"jax_ep.{op}: values of rows in FP8 must be float8_e4m3fn [M, H], found "
            f"{_found(values)}"
        )
    wanted = (values.shape[0], -(-values.shape[1] // 128))
    if scales.dtype != jnp.float32 or scales.shape != wanted:
        raise ValueError(
            f"jax_ep.{op}: scales of rows in FP8 must be float32 [M, ceil(H / 128)] = "
            f"{list(wanted)}, found {_found(scales)}"
        )
    return rows


def _checked_fp8_weights(
    op: str, name: str, weights: Any, letters: str, shape: tuple[int, ...]
) -> Any:
    if not isinstance(weights, fp8.Fp8Weights):
        weights = jnp.asarray(weights)
        _check_array(op, name, weights, letters, shape)
        return weights
    *batch, k, n = shape
    blocks = (*batch, -(-n // 128), -(-k // 128))
    if weights.shape != shape or weights.scales.shape != blocks:
        raise ValueError(
            f"jax_ep.{op}: {name} in FP8 must be [{letters}] = {list(shape)} with "
            f"scales {list(blocks)}, found {list(weights.shape)} with "
            f"{list(weights.scales.shape)}"
        )
    return weights


def _checked_sizes(op: str, group_sizes: jax.Array, num_groups: int) -> jax.Array:
    group_sizes = jnp.asarray(group_sizes)
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(
            f"jax_ep.{op}: group_sizes must have an integer dtype, found "
            f"{_found(group_sizes)}"
        )
    if group_sizes.shape != (num_groups,):
        raise ValueError(
            f"jax_ep.{op}: group_sizes must be [G] with G = {num_groups}, found "
            f"{_found(group_sizes)}"
        )
    return group_sizes.astype(jnp.int32)


def _checked_alignment(op: str, group_alignment: int) -> int:
    return checks.check_small_integer(op, "group_alignment", group_alignment)


def _checked_result(op: str, preferred: Any, dtype: Any) -> Any:
    if preferred is None:
        return dtype
    preferred = jnp.dtype(preferred)
    if preferred not in _FLOATS:
        raise TypeError(
            f"jax_ep.{op}: preferred_element_type must be bfloat16, float16, float32, "
            f"float64 or None, found {preferred}"
        )
    return preferred


def _checked_glu(
    op: str, activation: Any, glu: Any, shape: tuple[int, ...], dtype: Any
) -> tuple[gated.Glu, bool]:
    """(gate, up) -> hidden, and whether it closes over no traced array."""
    if glu is not None and activation is not jax.nn.silu:
        raise ValueError(f"jax_ep.{op}: give activation or glu, not both")
    name, function = ("activation", activation) if glu is None else ("glu", glu)
    if not callable(function):
        raise TypeError(
            f"jax_ep.{op}: {name} must be a function, found {type(function).__name__}"
        )
    glu = gated.Gated(function) if glu is None else glu
    traced = gated.glu_jaxpr(glu, shape, dtype)
    found = [f"{a.dtype}{list(a.shape)}" for a in traced.out_avals]
    wanted = f"{ragged.wide(dtype)}{list(shape)}"
    if found != [wanted]:
        raise ValueError(
            f"jax_ep.{op}: {name} must return {wanted} as it gets, found "
            f"{', '.join(found) or None}"
        )
    closed = not any(isinstance(c, jax.core.Tracer) for c in traced.consts)
    return glu, closed
