"""The kernels of products in FP8: interpreted, and what programs for GPUs hold."""

from __future__ import annotations

import functools
import warnings

import harness
import jax
import jax.numpy as jnp
import numpy as np
import product_oracle as oracle
import pytest
from fp8_oracle import dequantized
from product_cases import draw, like, lowered, needs_kernels

import jax_ep

E4M3 = np.dtype("float8_e4m3fn")


def glu(gate, up):
    return jax.nn.silu(gate) * up


def interpreted(function, *arrays):
    """function(mosaic_fp8, product_kernels, ...) in Pallas' interpreter."""
    from jax.experimental.pallas import mosaic_gpu

    from jax_ep._operations import mosaic_fp8, product_kernels

    with (
        mosaic_gpu.force_gpu_interpret_mode(),
        # The interpreter itself promotes ranks.
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        patch.setattr(mosaic_fp8, "num_blocks", lambda: 3)
        run = functools.partial(function, mosaic_fp8, product_kernels)
        found = jax.jit(run)(*arrays)
        return jax.tree.map(lambda a: np.asarray(a).astype(np.float64), found)


def rows_in_fp8(m, k):
    """Values and scales of rows, and what they stand for."""
    values = draw(1, m, k, dtype=E4M3)
    scales = np.exp(draw(2, m, k // 128) / 2).astype(np.float32)
    return values, scales, dequantized(values, scales, dtype=np.float64)


def matrices(seed, groups, k, n):
    """Values [G, N, K] and scales, and the matrices [G, K, N] that they stand for."""
    values = draw(seed, groups, n, k, dtype=E4M3)
    scales = np.exp(draw(seed + 9, groups, n // 128, k // 128) / 2).astype(np.float32)
    wide = np.repeat(np.repeat(scales.astype(np.float64), 128, 1), 128, 2)
    wide *= values.astype(np.float64)
    return (values, scales), wide.swapaxes(1, 2)


def assert_close(got, want, tolerance):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.skipif(harness.ON_GPU, reason="GPUs run the kernels themselves")
@needs_kernels
class TestInterpreted:
    SIZES = np.array([128, 0, 256], np.int32)

    def test_rows(self):
        """An odd number of 128 columns, and rows behind the last group."""
        values, scales, wide = rows_in_fp8(520, 256)
        given, full = matrices(3, 3, 256, 384)
        found = interpreted(
            lambda fp8, _, *a: fp8.rows(*a, group_alignment=128),
            values,
            scales.T,
            given,
            self.SIZES,
        )
        assert_close(found, oracle.rows(wide, full, self.SIZES), 2**-8)
        assert not found[384:].any()

    def test_gated_rows_are_quantised_again(self):
        values, scales, wide = rows_in_fp8(500, 128)
        gate, full_gate = matrices(3, 3, 128, 256)
        up, full_up = matrices(4, 3, 128, 256)
        got, got_scales = interpreted(
            lambda fp8, _, *a: fp8.gated(*a, combine=glu, group_alignment=128),
            values,
            scales.T,
            gate,
            up,
            self.SIZES,
        )
        want, *_ = oracle.silu(
            *(oracle.rows(wide, w, self.SIZES) for w in (full_gate, full_up))
        )
        want = want[:384]
        got_scales = got_scales[:, :500]
        largest = np.abs(want.reshape(384, 2, 128)).max(-1)
        np.testing.assert_allclose(got_scales.T[:384], largest / 448, rtol=1e-4)
        found = dequantized(got[:384], got_scales.T[:384], dtype=np.float64)
        step = np.maximum(np.abs(want) / 14, np.repeat(largest, 128, 1) * 2**-18)
        assert (np.abs(found - want) <= step).all()

    def test_groups_that_are_not_aligned(self):
        sizes = np.array([3, 0, 130], np.int32)
        values, scales, wide = rows_in_fp8(160, 128)
        values[133:], scales[133:] = np.nan, np.nan
        pairs = [matrices(seed, 3, 128, 128) for seed in (3, 4, 5)]
        (found,) = interpreted(
            lambda _, kernels, sizes, *a: kernels.fp8_gated_mlp(
                sizes, *a, glu=glu, group_alignment=1
            ),
            sizes,
            values,
            scales,
            *(a for given, _ in pairs for a in given),
        )
        gate, up = (oracle.rows(wide, full, sizes) for _, full in pairs[:2])
        want = oracle.rows(oracle.silu(gate, up)[0], pairs[2][1], sizes)
        assert_close(found, want, 2**-4)
        assert not found[133:].any()

    def test_a_broken_promise_is_seen(self):
        values, scales, _ = rows_in_fp8(256, 128)
        given, _ = matrices(3, 2, 128, 128)
        found = interpreted(
            lambda fp8, _, *a: fp8.rows(*a, group_alignment=128),
            values,
            scales.T,
            given,
            np.array([128, 5], np.int32),
        )
        assert np.isnan(found).all()


# Programs for GPUs, lowered here -----------------------------------------------


def arguments(h, i, n, groups=3):
    """Rows, sizes and matrices in FP8 of a gated MLP."""
    matrix = functools.partial(jax.eval_shape, jax_ep.quantize_weights)
    return (
        (like(640, h, dtype=E4M3), like(640, -(-h // 128), dtype=np.float32)),
        like(groups, dtype=np.int32),
        *(matrix(like(groups, *shape)) for shape in ((h, i), (h, i), (i, n))),
    )


@needs_kernels
class TestProgramsForGpus:
    @pytest.mark.parametrize("alignment", (1, 128))
    def test_two_kernels(self, alignment):
        mlp = functools.partial(jax_ep.gated_mlp, group_alignment=alignment)
        assert lowered(mlp, *arguments(256, 128, 384)) == (2, set())

    def test_matrices_in_bfloat16(self):
        """Quantised here; backward those of bfloat16, gate and up computed again."""
        pair, sizes, *_ = arguments(256, 128, 256)
        plain = [like(3, 256, 128), like(3, 256, 128), like(3, 128, 256)]

        def gradient(pair, sizes, *given):
            run = lambda *w: jax_ep.gated_mlp(pair, sizes, *w)  # noqa: E731
            out, pull = jax.vjp(run, *given)
            return out, pull(out)

        assert lowered(jax_ep.gated_mlp, pair, sizes, *plain) == (2, set())
        kernels, told = lowered(gradient, pair, sizes, *plain)
        assert told == set()
        # Two in FP8; gate and up; back through down; w_down, w_gate and w_up.
        assert kernels == 7

    def test_no_copy_in_another_dtype(self):
        """Rows and matrices reach the kernels as they are."""
        mlp = functools.partial(jax_ep.gated_mlp, group_alignment=128)
        program = jax.jit(mlp).trace(*arguments(256, 128, 256))
        text = program.lower(lowering_platforms=("cuda",)).as_text()
        converts = [line for line in text.splitlines() if "stablehlo.convert" in line]
        assert not [line for line in converts if "f8E4M3" in line]


SLOWER = (
    "jax_ep.gated_mlp: copying FP8 rows and matrices to bfloat16 for its products, "
    "which takes memory and is slower: the FP8 kernels do not serve: "
)


@needs_kernels
@pytest.mark.parametrize(
    ("widths", "options", "reason", "kernels"),
    [
        (
            (192, 128, 256),
            {},
            "of the sizes (192, 128, 256), one is not a multiple of 128",
            3,
        ),
        (
            (128, 128, 256),
            {"activation": jax.nn.softmax},
            "the activation is not made of elementwise operations that they know",
            3,
        ),
    ],
    ids=("width", "activation"),
)
def test_without_a_kernel_a_warning_says_why(widths, options, reason, kernels):
    mlp = functools.partial(jax_ep.gated_mlp, **options)
    assert lowered(mlp, *arguments(*widths)) == (kernels, {SLOWER + reason})


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="for jax before 0.11")
def test_before_jax_0_11_a_warning_says_so():
    reason = f"jax {jax.__version__} is older than 0.11"
    _, told = lowered(jax_ep.gated_mlp, *arguments(128, 128, 128))
    assert SLOWER + reason in told


def test_other_gpus():
    _, told = lowered(jax_ep.gated_mlp, *arguments(128, 128, 128), platform="rocm")
    assert SLOWER + "the kernels are for NVIDIA GPUs" in told


def test_no_warning_where_there_is_no_gpu():
    found = lowered(jax_ep.gated_mlp, *arguments(128, 128, 128), platform="cpu")
    assert found == (0, set())


@needs_kernels
def test_other_compute_capabilities():
    from jax_ep._operations.mosaic_fp8 import unsupported_reason

    assert unsupported_reason("9.0", (128, 2048)) is None
    assert "10.0" in (unsupported_reason("10.0", (128,)) or "")


def test_the_gradient_keeps_rows_in_fp8():
    """Between the passes stand rows of 8 bits, and no hidden values."""
    pair = jnp.zeros((16, 128), E4M3), jnp.ones((16, 1))
    sizes = np.array([16], np.int32)
    ws = [jnp.ones((1, 128, 256), jnp.bfloat16)] * 2
    ws.append(jnp.ones((1, 256, 128), jnp.bfloat16))
    _, pull = jax.vjp(lambda *w: jax_ep.gated_mlp(pair, sizes, *w), *ws)
    kept = {(a.shape, a.dtype.name) for a in jax.tree.leaves(pull)}
    assert ((16, 128), "float8_e4m3fn") in kept
    assert not any(shape[:1] == (16,) and name == "bfloat16" for shape, name in kept)
