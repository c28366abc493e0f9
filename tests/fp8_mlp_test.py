"""Experts in FP8: matrices, gated_mlp and whole layers, against float64."""

from __future__ import annotations

import functools

import cases
import harness
import jax
import jax.numpy as jnp
import layers
import numpy as np
import product_oracle as oracle
import pytest
from fp8_oracle import dequantized, quantized
from product_cases import BFLOAT16, KERNELS, draw, falling_back_allowed
from product_oracle import Mlp

import jax_ep

RANKS = harness.few_ranks()
NATIVE = harness.BACKENDS[0]
E4M3 = np.dtype("float8_e4m3fn")
# For tests of sizes that have no kernel.
any_size = falling_back_allowed(True)


def only_kernels(*widths):
    """No warning on GPUs whose kernels are for such widths."""
    served = KERNELS and all(width % 128 == 0 for width in widths)
    return falling_back_allowed(not served)


def quantized_matrices(w):
    """NumPy's: [G, K, N] in float64 as it is after quantising in 128 x 128."""
    *_, k, n = w.shape
    short = [(0, 0), (0, -k % 128), (0, -n % 128)]
    tiles = np.pad(w.astype(np.float32), short)
    rows, columns = tiles.shape[1] // 128, tiles.shape[2] // 128
    tiles = tiles.reshape(-1, rows, 128, columns, 128).swapaxes(2, 3)
    flat = tiles.reshape(-1, rows, columns, 128 * 128)
    back = dequantized(*quantized(flat, 128 * 128), 128 * 128, np.float64)
    back = back.reshape(tiles.shape).swapaxes(2, 3)
    return back.reshape(-1, rows * 128, columns * 128)[:, :k, :n]


def quantized_rows(x):
    return dequantized(*quantized(x), dtype=np.float64)


def model(x, mlp, sizes):
    """NumPy's model of the MLP in FP8: the same quantisation, float64 otherwise."""
    x = quantized_rows(np.where(np.isfinite(x), x, 0))
    return quantized_mlp(x, map(quantized_matrices, mlp[:3]), sizes)


def same_factors(pair, mlp, sizes):
    """The same with rows and matrices as jax_ep quantised them."""
    rows = dequantized(*map(np.asarray, pair), dtype=np.float64)
    ws = [jax_ep.quantize_weights(w).dequantize(jnp.float32) for w in mlp[:3]]
    return quantized_mlp(rows, [np.asarray(w, np.float64) for w in ws], sizes)


def quantized_mlp(rows, ws, sizes):
    """In float64, but for hidden values."""
    w_gate, w_up, w_down = ws
    gate, up = (oracle.rows(rows, w, sizes) for w in (w_gate, w_up))
    return oracle.rows(quantized_rows(oracle.silu(gate, up)[0]), w_down, sizes)


def parameters(groups, h, i, n, dtype=BFLOAT16):
    shapes = [(groups, h, i), (groups, h, i), (groups, i, n)]
    return Mlp(
        *(
            (draw(s, *shape) * 2 / shape[1] ** 0.5).astype(dtype)
            for s, shape in enumerate(shapes)
        )
    )


def matrices(mlp):
    return dict(zip(("w_gate", "w_up", "w_down"), mlp[:3], strict=True))


def root_mean_square(a):
    return np.sqrt(np.square(np.asarray(a).astype(np.float64)).mean())


@pytest.mark.parametrize("shape", [(256, 384), (130, 5), (3, 128, 256)])
@pytest.mark.parametrize("dtype", (BFLOAT16, np.float32))
def test_quantize_weights(shape, dtype):
    w = draw(1, *shape, dtype=dtype)
    found = jax.jit(jax_ep.quantize_weights)(w)
    *batch, k, n = shape
    assert found.values.dtype == E4M3 and found.scales.dtype == np.float32
    assert found.values.shape == (*batch, n, k)
    assert found.scales.shape == (*batch, -(-n // 128), -(-k // 128))
    assert found.shape == shape
    got = np.asarray(found.dequantize(jnp.float32))
    want = quantized_matrices(w.reshape(-1, k, n)).reshape(shape)
    # Ties may fall either way.
    assert (np.abs(got - want) > 1e-6).mean() < 0.005
    np.testing.assert_allclose(got, w.astype(np.float32), rtol=0.07, atol=2e-2)


@pytest.mark.parametrize("already", (True, False), ids=("fp8_weights", "bf16_weights"))
@pytest.mark.parametrize(
    ("sizes", "alignment", "h", "i", "n"),
    [
        ((128, 0, 256, 0, 128), 128, 256, 384, 128),
        ((1, 127, 0, 129, 3), 1, 384, 128, 256),
        ((0, 0, 512, 0, 0), 128, 128, 128, 384),
        ((0, 0, 0, 0, 0), 1, 128, 128, 128),
        ((5, 60, 0, 7, 100), 1, 72, 200, 40),
    ],
    ids=("aligned", "unaligned", "one_group", "no_rows", "short_blocks"),
)
def test_error_is_that_of_quantising(sizes, alignment, h, i, n, already):
    mlp = parameters(5, h, i, n)
    x = draw(7, 640, h, dtype=BFLOAT16)
    sizes = np.array(sizes, np.int32)
    used = sizes.sum()
    x[used:] = np.nan
    given = matrices(mlp)
    if already:
        given = jax.tree.map(jax.jit(jax_ep.quantize_weights), given)
    run = jax.jit(functools.partial(jax_ep.gated_mlp, group_alignment=alignment))
    pair = jax_ep.quantize_fp8(jnp.asarray(x))
    with only_kernels(h, i, n):
        found = run(pair, sizes, **given)
        again = run(pair, sizes, **given)
    assert found.dtype == BFLOAT16
    assert np.asarray(found).tobytes() == np.asarray(again).tobytes()
    found = np.asarray(found).astype(np.float64)
    assert not found[used:].any()
    if used == 0:
        return
    wide = [w.astype(np.float64) for w in mlp[:3]]
    exact = np.where(np.isfinite(x), x, 0).astype(np.float64)
    gate, up = (oracle.rows(exact, w, sizes) for w in wide[:2])
    exact = oracle.rows(oracle.silu(gate, up)[0], wide[2], sizes)
    of_model = model(x, mlp, sizes)
    ours = root_mean_square(found[:used] - exact[:used])
    allowed = 1.5 * root_mean_square(of_model[:used] - exact[:used])
    assert 0 < ours <= allowed
    # And it is the same arithmetic. Ties among hidden values may fall either way.
    close = root_mean_square(found[:used] - same_factors(pair, mlp, sizes)[:used])
    assert close <= 0.2 * allowed, (close, allowed)


def test_nan_and_infinity_stay_in_their_rows():
    sizes, mlp = np.array([128, 256], np.int32), parameters(2, 128, 128, 128)
    x = draw(3, 512, 128, dtype=BFLOAT16)
    x[5, 7], x[200, 100], x[400:] = np.nan, np.inf, np.nan
    run = functools.partial(jax_ep.gated_mlp, group_alignment=128)
    pair = jax_ep.quantize_fp8(jnp.asarray(x))
    with only_kernels(128):
        found = jax.jit(run)(pair, sizes, **matrices(mlp))
    bad = np.isnan(np.asarray(found).astype(np.float32))
    assert bad[[5, 200]].all() and bad.sum() == 2 * 128


@any_size
@pytest.mark.parametrize("already", (True, False), ids=("fp8_weights", "bf16_weights"))
def test_gradient_is_that_of_the_dequantised_layer(already):
    """In bfloat16, at rows as they arrived and matrices as they were given."""
    sizes, mlp = np.array([3, 0, 9], np.int32), parameters(3, 130, 40, 24)
    x = jnp.asarray(draw(3, 16, 130, dtype=BFLOAT16))
    ct = jnp.asarray(draw(4, 16, 24, dtype=BFLOAT16))
    values, scales = jax_ep.quantize_fp8(x)
    carrier = jnp.zeros(x.shape, BFLOAT16)
    given = matrices(mlp)
    if already:
        given = {k: jax_ep.quantize_weights(w) for k, w in given.items()}

    def in_fp8(carrier, given):
        rows = jax_ep.Fp8Rows(values, scales, carrier)
        return jax_ep.gated_mlp(rows, sizes, **given)

    _, pull = jax.vjp(in_fp8, carrier, given)
    d_rows, d_given = jax.jit(pull)(ct)
    rows = jax_ep.dequantize_fp8(values, scales)
    plain = {k: w.dequantize() if already else jnp.asarray(w) for k, w in given.items()}
    _, pull = jax.vjp(lambda r, w: jax_ep.gated_mlp(r, sizes, **w), rows, plain)
    want_rows, want_given = jax.jit(pull)(ct)
    np.testing.assert_array_equal(d_rows, want_rows)
    for name in given:
        if already:
            leaves = jax.tree.leaves(d_given[name])
            assert not any(np.asarray(a).astype(np.float32).any() for a in leaves)
        else:
            assert d_given[name].dtype == BFLOAT16
            np.testing.assert_array_equal(d_given[name], want_given[name])


@any_size
def test_vmap_and_checkpoint():
    sizes = np.array([3, 0, 9], np.int32)
    mlp = parameters(3, 130, 40, 24)
    x = jnp.asarray(draw(3, 2, 16, 130, dtype=BFLOAT16))
    weights = {k: jax_ep.quantize_weights(w) for k, w in matrices(mlp).items()}

    @jax.checkpoint
    def run(x):
        return jax_ep.gated_mlp(jax_ep.quantize_fp8(x), sizes, **weights)

    found = jax.jit(jax.vmap(run))(x)
    for one, batch in zip(x, found, strict=True):
        np.testing.assert_array_equal(jax.jit(run)(one), batch)


# Layers ----------------------------------------------------------------------


def layer_case(hidden):
    ids = cases.holes(RANKS, 7, 3, 2 * RANKS).astype(np.int32)
    x = draw(5, RANKS * 7, hidden, dtype=BFLOAT16)
    gates = np.abs(draw(6, RANKS * 7, 3))
    mlp = parameters(2 * RANKS, hidden, 48, hidden)
    return ids.reshape(-1, 3), x, gates, matrices(mlp)


def program(backend, check_vma=True, **options):
    """(x, ids, gates, matrices) -> y, all split over ranks."""
    mesh = layers.mesh({"ep": RANKS})
    comm = layers.communicator(mesh, "ep", backend)

    def body(x, ids, gates, given):
        experts = functools.partial(jax_ep.gated_mlp, **given)
        return jax_ep.moe(
            x, ids, gates, experts, comm=comm, num_experts=2 * RANKS, **options
        )

    return layers.sharded(body, mesh, check_vma=check_vma)


@any_size
@pytest.mark.parametrize("check_vma", (True, False), ids=("vma", "no_vma"))
@harness.on_each_backend
def test_layer(backend, check_vma):
    ids, x, gates, given = layer_case(130)
    layer = program(backend, check_vma, quantize="fp8")
    found = np.asarray(jax.jit(layer)(x, ids, gates, given)).astype(np.float64)
    wide = {k: w.astype(np.float64) for k, w in given.items()}
    rows = {
        "exact": (x.astype(np.float64), wide, lambda h: h),
        "model": (
            quantized_rows(x),
            {k: quantized_matrices(w) for k, w in given.items()},
            quantized_rows,
        ),
    }
    outputs = {}
    for name, (rows_, w, again) in rows.items():
        y = np.zeros(x.shape)
        for token, expert in np.ndindex(len(x), 3):
            e = ids[token, expert]
            if not 0 <= e < 2 * RANKS:
                continue
            gate, up = rows_[token] @ w["w_gate"][e], rows_[token] @ w["w_up"][e]
            hidden = again(oracle.silu(gate, up)[0][None])[0]
            y[token] += gates[token, expert] * (hidden @ w["w_down"][e])
        outputs[name] = y
    ours = root_mean_square(found - outputs["exact"])
    allowed = 1.5 * root_mean_square(outputs["model"] - outputs["exact"])
    assert 0 < ours <= allowed, (ours, allowed)


@any_size
@pytest.mark.parametrize("check_vma", (True, False), ids=("vma", "no_vma"))
@harness.on_each_backend
def test_gradients_of_a_layer(backend, check_vma):
    """By tokens, router weights and matrices: near those of the layer in bfloat16."""
    ids, x, gates, given = layer_case(130)

    def gradients(**options):
        layer = program(backend, check_vma, **options)

        def loss(x, gates, given):
            y = layer(x, ids, gates, given).astype(jnp.float32)
            return (y * y).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, gates, given)

    in_fp8, plain = gradients(quantize="fp8"), gradients()
    for got, want in zip(*map(jax.tree.leaves, (in_fp8, plain)), strict=True):
        assert got.dtype == want.dtype
        got, want = (np.asarray(a).astype(np.float64) for a in (got, want))
        assert root_mean_square(got - want) < 0.2 * root_mean_square(want)


def test_experts_of_ones_own():
    """They see Fp8Rows, and their gradient finds its way to the tokens."""
    ids, x, gates, _ = layer_case(130)
    mesh = layers.mesh({"ep": RANKS})
    comm = layers.communicator(mesh, "ep", NATIVE)

    def body(x, ids, gates, quantize):
        def experts(rows, sizes):
            if quantize:
                assert isinstance(rows, jax_ep.Fp8Rows)
                rows = rows.dequantize()
            return 2 * rows

        return jax_ep.moe(
            x,
            ids,
            gates,
            experts,
            comm=comm,
            num_experts=2 * RANKS,
            quantize=quantize,
        )

    def gradient(quantize):
        layer = layers.sharded(functools.partial(body, quantize=quantize), mesh)
        loss = lambda x: layer(x, ids, gates).astype(jnp.float32).sum()  # noqa: E731
        return jax.jit(jax.grad(loss))(x)

    np.testing.assert_array_equal(gradient("fp8"), gradient(None))


# Arguments -------------------------------------------------------------------

ROWS = (jnp.zeros((4, 130), E4M3), jnp.ones((4, 2)))
SIZES = np.array([2, 2], np.int32)
W = matrices(parameters(2, 130, 40, 24))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: jax_ep.quantize_weights(jnp.ones((3,))),
            TypeError,
            "jax_ep.quantize_weights: weights must be bfloat16, float16 or float32 "
            "[..., K, N], found float32[3]",
        ),
        (
            lambda: jax_ep.gated_mlp((*ROWS, 1), SIZES, **W),
            TypeError,
            "jax_ep.gated_mlp: rows in FP8 must be (values, scales) or jax_ep.Fp8Rows, "
            "found 3 values",
        ),
        (
            lambda: jax_ep.gated_mlp(ROWS[::-1], SIZES, **W),
            TypeError,
            "jax_ep.gated_mlp: values of rows in FP8 must be float8_e4m3fn [M, H], "
            "found float32[4,2]",
        ),
        (
            lambda: jax_ep.gated_mlp((ROWS[0], ROWS[1][:, :1]), SIZES, **W),
            ValueError,
            "jax_ep.gated_mlp: scales of rows in FP8 must be float32 [M, ceil(H / 128)]"
            " = [4, 2], found float32[4,1]",
        ),
        (
            lambda: jax_ep.gated_mlp(
                ROWS,
                SIZES,
                **W | {"w_up": jax_ep.quantize_weights(W["w_up"][:, :3])},
            ),
            ValueError,
            "jax_ep.gated_mlp: w_up in FP8 must be [G, H, I] = [2, 130, 40] with "
            "scales [2, 1, 2], found [2, 3, 40] with [2, 1, 1]",
        ),
        (
            lambda: jax_ep.gated_mlp(ROWS, SIZES, **W, b_down=jnp.ones((2, 24))),
            ValueError,
            "jax_ep.gated_mlp: there are no biases with rows in FP8",
        ),
        (
            lambda: jax_ep.gated_mlp(
                jnp.ones((4, 130)),
                SIZES,
                **W | {"w_up": jax_ep.quantize_weights(W["w_up"])},
            ),
            TypeError,
            "jax_ep.gated_mlp: matrices in FP8 multiply rows in FP8, found rows "
            "float32[4,130]",
        ),
        (
            lambda: jax_ep.moe_with_plan(1, 2, 3, None, quantize="int8"),
            ValueError,
            "jax_ep.moe: quantize must be None or 'fp8', found 'int8'",
        ),
        (
            lambda: jax_ep.moe_with_plan((1, 2), 2, 3, None, quantize="fp8"),
            TypeError,
            "jax_ep.moe: with quantize='fp8' x must be one array [T, H], found a tree "
            "of 2 leaves",
        ),
        (
            lambda: jax_ep.moe_with_plan(ROWS[0], 2, 3, None, quantize="fp8"),
            TypeError,
            "jax_ep.moe: with quantize='fp8' x must be bfloat16, float16 or float32 "
            "[T, H], found float8_e4m3fn[4, 130]",
        ),
    ],
    ids=(
        "weights",
        "triple",
        "values",
        "scales",
        "matrix",
        "bias",
        "rows",
        "quantize",
        "tree",
        "dtype",
    ),
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error) as info:
        call()
    assert str(info.value) == message


def test_an_activation_that_closes_over_traced_arrays():
    def run(slope):
        return jax_ep.gated_mlp(ROWS, SIZES, **W, activation=lambda gate: slope * gate)

    with pytest.raises(ValueError, match="must not close over traced arrays"):
        jax.jit(run)(2.0)
