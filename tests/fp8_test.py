"""FP8 rows: quantising against NumPy, dispatch and its gradient."""

from __future__ import annotations

import cases
import harness
import jax
import jax.numpy as jnp
import layers
import ml_dtypes
import numpy as np
import oracle
import payloads
import pytest
from fp8_oracle import E4M3, dequantized, in_blocks, quantized

import jax_ep

RANKS = harness.few_ranks()
NATIVE = harness.BACKENDS[0]
UE8M0 = np.dtype("float8_e8m0fnu")
scales_of_both_kinds = pytest.mark.parametrize("scale", ("float32", "ue8m0"))


def as_float32(scales):
    return np.asarray(scales).astype(np.float32)


def assert_quantized(x, block=128, scale="float32"):
    q, scales = jax.jit(jax_ep.quantize_fp8, static_argnums=(1, 2))(x, block, scale)
    _, want_scales = quantized(np.asarray(x), block, scale)
    assert q.dtype == E4M3
    assert scales.dtype == (UE8M0 if scale == "ue8m0" else np.float32)
    assert (
        scales.shape == want_scales.shape == (*x.shape[:-1], -(-x.shape[-1] // block))
    )
    got_scales = as_float32(scales)
    # XLA may divide by 448 as it likes: the last bit.
    np.testing.assert_allclose(got_scales, want_scales, rtol=2e-7)
    # Ties may fall either way: XLA may multiply by 1 / scale.
    mine, right = as_float32(q), as_float32(quantized_with(x, got_scales, block))
    np.testing.assert_array_equal(np.isnan(mine), np.isnan(right))
    step = np.maximum(np.abs(right) / 8, 2**-9)
    different = ~((mine == right) | np.isnan(right))
    assert (np.abs(mine - right) <= step)[different].all()
    assert different.mean() < 0.005
    return np.asarray(q), got_scales


def quantized_with(x, scales, block):
    """q of NumPy for scales as they came out."""
    with np.errstate(all="ignore"):
        blocks = in_blocks(np.asarray(x).astype(np.float32), block)
        q = np.clip(blocks / scales[..., None], -448, 448).astype(E4M3)
    return q.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


@scales_of_both_kinds
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("hidden", (1, 127, 128, 129, 2880, 7168))
def test_quantize(hidden, dtype, scale):
    x = payloads.numbers((3, hidden), jnp.dtype(dtype))
    q, scales = assert_quantized(x, scale=scale)
    found = np.asarray(jax_ep.dequantize_fp8(q, jnp.asarray(scales), dtype=jnp.float32))
    # Half a step of three mantissa bits, or of the smallest numbers.
    step = np.maximum(np.abs(x.astype(np.float32)) / 16, in_columns(scales, x) * 2**-10)
    assert (np.abs(found - x.astype(np.float32)) <= step * 1.001).all()


def in_columns(scales, x, block=128):
    return np.repeat(scales, block, axis=-1)[..., : x.shape[-1]]


@pytest.mark.parametrize("block", (1, 32, 100))
def test_other_blocks(block):
    assert_quantized(payloads.numbers((2, 3, 250), np.float32), block)


def test_zero_blocks_and_the_floor():
    """All zero, and far below the floor: no division by zero, scales by the rule."""
    x = np.zeros((4, 256), np.float32)
    x[1, 3] = 1e-40  # subnormal
    x[2, 128:] = 1e-5
    x[3, :128] = -448.0
    q, scales = assert_quantized(x)
    np.testing.assert_allclose(scales[0], 2.2321429e-07, rtol=1e-6)
    np.testing.assert_allclose(scales[2, 1], 2.2321429e-07, rtol=1e-6)
    assert scales[3, 0] == 1.0
    assert (q[3, :128].astype(np.float32) == -448).all()
    assert not q[0].view(np.uint8).any()
    q, scales = assert_quantized(x, scale="ue8m0")
    assert (scales[0] == 2.0**-22).all()
    assert scales[3, 0] == 1.0
    assert np.isfinite(q.astype(np.float32)).all()


def test_powers_of_two_are_rounded_up_before_quantising():
    amax = 448.0 * 2.0 ** np.array([0, 1e-6, 0.5, 0.999, 1])
    x = np.zeros((5, 128), np.float32)
    x[:, 7] = amax
    q, scales = assert_quantized(x, scale="ue8m0")
    np.testing.assert_array_equal(scales[:, 0], [1, 2, 2, 2, 2])
    assert (np.abs(q.astype(np.float32)) <= 448).all()


def test_largest_numbers():
    """bfloat16's largest: the scale is large, nothing overflows."""
    x = np.full((1, 130), ml_dtypes.finfo(ml_dtypes.bfloat16).max, ml_dtypes.bfloat16)
    for scale in ("float32", "ue8m0"):
        q, scales = assert_quantized(x, scale=scale)
        assert np.isfinite(q.astype(np.float32)).all()
        assert np.isfinite(scales).all()


@scales_of_both_kinds
def test_infinities_and_nan_stay_in_their_block(scale):
    x = payloads.numbers((4, 2880), np.float32)
    clean_q, clean_scales = assert_quantized(x, scale=scale)
    x[0, 5], x[1, 200], x[2, 2879] = np.nan, np.inf, -np.inf
    q, scales = assert_quantized(x, scale=scale)
    hit = np.zeros(scales.shape, bool)
    hit[0, 0] = hit[1, 1] = hit[2, 22] = True
    assert np.isnan(scales[hit]).all()
    np.testing.assert_array_equal(scales[~hit], clean_scales[~hit])
    columns = in_columns(hit, x)
    back = np.asarray(jax_ep.dequantize_fp8(q, jnp.asarray(scales), dtype=jnp.float32))
    assert np.isnan(back[columns]).all()
    np.testing.assert_array_equal(
        q[~columns].view(np.uint8), clean_q[~columns].view(np.uint8)
    )


@scales_of_both_kinds
def test_dequantize(scale):
    x = payloads.numbers((5, 300), ml_dtypes.bfloat16)
    q, scales = jax_ep.quantize_fp8(x, 128, scale)
    for dtype in ("bfloat16", "float16", "float32"):
        found = jax_ep.dequantize_fp8(q, scales, dtype=dtype)
        want = dequantized(np.asarray(q), as_float32(scales), dtype=jnp.dtype(dtype))
        np.testing.assert_array_equal(np.asarray(found), want)


# Dispatch --------------------------------------------------------------------


def routing(hidden):
    ids = cases.holes(RANKS, 7, 3, 2 * RANKS).astype(np.int32)
    x = payloads.numbers((RANKS, 7, hidden), ml_dtypes.bfloat16)
    return ids, x, oracle.plan(ids, 2 * RANKS, RANKS * 7)


@scales_of_both_kinds
@harness.on_each_backend
def test_rows_arrive_as_they_were_quantized(backend, scale):
    ids, x, right = routing(2880)
    gy = payloads.numbers((RANKS, RANKS * 7, 2880), ml_dtypes.bfloat16, 3)

    def body(comm, ids, x, gy):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=2 * RANKS)
        q, scales = jax_ep.quantize_fp8(x, scale=scale)
        pair = jax_ep.dispatch_fp8(x, plan, scale=scale, dequantize=False)
        rows, pull = jax.vjp(lambda x: jax_ep.dispatch_fp8(x, plan, scale=scale), x)
        return (q, scales), pair, rows, pull(gy)[0]

    comm = harness.communicator(backend, RANKS)
    (q, scales), (got_q, got_scales), rows, gradient = harness.run(
        body, comm, ids, x, gy
    )
    payloads.assert_same_rows(gradient, right.combine(gy), "gradient")
    assert got_q.shape == (RANKS, RANKS * 7, 2880)
    assert got_scales.shape == (RANKS, RANKS * 7, 23)
    payloads.assert_same_rows(got_q, right.dispatch(q), "q", q)
    payloads.assert_same_rows(got_scales, right.dispatch(scales), "scales", scales)
    assert rows.dtype == x.dtype
    want = dequantized(
        right.dispatch(q),
        as_float32(right.dispatch(scales)),
        dtype=x.dtype,
    )
    want[np.arange(RANKS * 7)[None] >= right.fields["num_recv"][:, None]] = 0
    np.testing.assert_array_equal(rows, want)


@pytest.mark.parametrize("check_vma", (True, False), ids=("vma", "no_vma"))
@harness.on_each_backend
def test_gradient_goes_straight_through(backend, check_vma):
    """The cotangents come home by combine in x's dtype, as bfloat16 here."""
    ids, x, right = routing(130)
    gy = payloads.numbers((RANKS, RANKS * 7, 130), ml_dtypes.bfloat16, 3)
    mesh = layers.mesh({"ep": RANKS})
    comm = layers.communicator(mesh, "ep", backend)

    def body(x, ids, gy):
        plan = jax_ep.make_plan(ids[0], comm=comm, num_experts=2 * RANKS)
        rows, pull = jax.vjp(lambda x: jax_ep.dispatch_fp8(x[0], plan), x)
        return rows[None], pull(gy[0])[0]

    f = jax.jit(layers.sharded(body, mesh, check_vma=check_vma))
    _, gradient = f(x, ids, gy)
    assert gradient.dtype == x.dtype
    payloads.assert_same_rows(gradient, right.combine(gy), "gradient")

    def pair(x, ids):
        plan = jax_ep.make_plan(ids[0], comm=comm, num_experts=2 * RANKS)
        q, scales = jax_ep.dispatch_fp8(x[0], plan, dequantize=False)
        return (q.astype(jnp.float32).sum() + scales.sum())[None]

    mapped = layers.sharded(pair, mesh, check_vma=check_vma)
    gradient = jax.jit(jax.grad(lambda x: mapped(x, ids).sum()))(x)
    assert not np.asarray(gradient).astype(np.float32).any()


def test_layer_in_fp8_under_remat():
    """A layer trains with FP8 on the wire: gradients near those of bfloat16."""
    ids, x, _ = routing(256)
    mesh = layers.mesh({"ep": RANKS})
    comm = layers.communicator(mesh, "ep", NATIVE)

    def layer(x, ids, send):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=2 * RANKS)
        return jax_ep.combine(jnp.tanh(send(x, plan)), plan)

    def loss(x, send):
        body = jax.checkpoint(lambda x, ids: layer(x[0], ids[0], send)[None])
        out = layers.sharded(body, mesh)(x, ids)
        return (out.astype(jnp.float32) ** 2).sum()

    x = (x.astype(np.float32) / 64).astype(x.dtype)
    plain = jax.jit(jax.grad(lambda x: loss(x, jax_ep.dispatch)))(x)
    fp8 = jax.jit(jax.grad(lambda x: loss(x, jax_ep.dispatch_fp8)))(x)
    plain, fp8 = (np.asarray(g).astype(np.float32) for g in (plain, fp8))
    assert np.abs(plain - fp8).max() < 0.1 * np.abs(plain).max()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: jax_ep.quantize_fp8(jnp.ones((2, 3), jnp.int32)),
            TypeError,
            "jax_ep.quantize_fp8: x must be bfloat16, float16 or float32 [..., H], "
            "found int32[2, 3]",
        ),
        (
            lambda: jax_ep.quantize_fp8(jnp.ones((2, 3)), 0),
            ValueError,
            "jax_ep.quantize_fp8: block must be >= 1, found 0",
        ),
        (
            lambda: jax_ep.quantize_fp8(jnp.ones((2, 3)), scale="e5m2"),
            ValueError,
            "jax_ep.quantize_fp8: scale must be 'float32' or 'ue8m0', found 'e5m2'",
        ),
        (
            lambda: jax_ep.dequantize_fp8(jnp.ones((2, 3)), jnp.ones((2, 1))),
            TypeError,
            "jax_ep.dequantize_fp8: q must be float8_e4m3fn and scales float32 or "
            "float8_e8m0fnu, found float32 and float32",
        ),
        (
            lambda: jax_ep.dequantize_fp8(jnp.ones((2, 3), E4M3), jnp.ones((2, 2))),
            ValueError,
            "jax_ep.dequantize_fp8: q must be [..., H] and scales [..., ceil(H / "
            "128)], found [2, 3] and [2, 2]",
        ),
        (
            lambda: jax_ep.dispatch_fp8(jnp.ones((2, 3, 4)), None),
            TypeError,
            "jax_ep.dispatch_fp8: x must be bfloat16, float16 or float32 [T, H], "
            "found float32[2, 3, 4]",
        ),
        (
            lambda: jax_ep.dispatch_fp8(jnp.ones((2, 3)), None),
            TypeError,
            "jax_ep.dispatch: plan must be a jax_ep.Plan, found NoneType",
        ),
    ],
    ids=("dtype", "block", "scale", "q", "scales", "rank", "plan"),
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error) as info:
        call()
    assert str(info.value) == message
