"""The kernels of grouped products themselves, in Pallas' interpreter.

What programs call is in product_kernels_test.py. Here are tiles of all kinds, batches
with counts, and functions that kernels take.
"""

from __future__ import annotations

import functools

import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import product_oracle as oracle
import pytest
from product_cases import draw

from jax_ep._operations import inlining

needs_kernels = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="kernels are for jax 0.11 and newer"
)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def glu(gate, up):
    return jax.nn.silu(gate) * up


def interpreted(function, *arrays):
    """function(mosaic_products, ...) on three blocks."""
    from jax.experimental.pallas import mosaic_gpu

    from jax_ep._operations import mosaic_kernel, mosaic_products

    with (
        mosaic_gpu.force_gpu_interpret_mode(),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(mosaic_kernel, "num_blocks", lambda: 3)
        found = jax.jit(functools.partial(function, mosaic_products))(*arrays)
        return jax.tree.map(lambda a: np.asarray(a).astype(np.float64), found)


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=2**-7 * np.abs(want).max())


@pytest.mark.skipif(harness.ON_GPU, reason="GPUs run the kernels themselves")
@needs_kernels
class TestTiles:
    # More columns than a tile is wide, and tiles of half their rows: 3 * 64, 1 * 64.
    SIZES = np.array([192, 0, 64, 128], np.int32)

    def arrays(self):
        rows = draw(1, 448, 64, dtype=BFLOAT16)
        rows[self.SIZES.sum() :] = np.nan
        return rows, draw(2, 4, 64, 256, dtype=BFLOAT16)

    @pytest.mark.parametrize("alternate", (True, False))
    def test_half_tiles(self, alternate):
        from jax_ep._operations.mosaic_kernel import Config

        rows, rhs = self.arrays()
        found = interpreted(
            lambda products, *a: products.rows(
                *a, group_alignment=64, config=Config(tile_n=192, alternate=alternate)
            ),
            rows,
            rhs,
            self.SIZES,
        )
        assert_close(found, oracle.rows(rows, rhs, self.SIZES))

    def test_weights_of_narrow_rows(self):
        rows, _ = self.arrays()
        other = draw(3, 448, 256, dtype=BFLOAT16)
        found = interpreted(
            lambda products, *a: products.weights(*a, group_alignment=64),
            rows,
            other,
            self.SIZES,
        )
        assert_close(found, oracle.weights(rows, other, self.SIZES))
        assert not found[1].any()

    def test_sizes_that_break_the_promise_give_nan_alone(self):
        rows, rhs = self.arrays()
        sizes = np.array([192, 0, 60, 128], np.int32)
        found = interpreted(
            lambda products, *a: products.rows(*a, group_alignment=64),
            rows,
            rhs,
            sizes,
        )
        assert np.isnan(found).all()


@pytest.mark.skipif(harness.ON_GPU, reason="GPUs run the kernels themselves")
@needs_kernels
@pytest.mark.parametrize("held, counts", ((136, [0, 70, 136]), (3, [3, 0, 1])))
def test_batches_with_counts(held, counts):
    lhs = draw(1, 3, held, 64, dtype=BFLOAT16)
    w_gate, w_up = draw(2, 2, 3, 64, 64, dtype=BFLOAT16)
    counted = (np.arange(held) < np.array(counts)[:, None])[..., None]
    lhs = np.where(counted, lhs, np.array(np.nan, BFLOAT16))
    plain, hidden = interpreted(
        lambda products, lhs, w_gate, w_up, counts: (
            products.batches(lhs, w_gate, counts),
            products.gated_batches(lhs, w_gate, w_up, counts, combine=glu),
        ),
        lhs,
        w_gate,
        w_up,
        np.array(counts, np.int32),
    )
    wide = [np.where(counted, lhs, 0).astype(np.float64)]
    wide += [a.astype(np.float64) for a in (w_gate, w_up)]
    gate, up = wide[0] @ wide[1], wide[0] @ wide[2]
    assert_close(plain, gate)
    assert_close(hidden, oracle.silu(gate, up)[0])


class TestInlined:
    @pytest.mark.parametrize(
        "function",
        (
            jax.nn.silu,
            jax.nn.relu,
            jax.nn.sigmoid,
            functools.partial(jax.nn.gelu, approximate=False),
            jax.nn.gelu,
        ),
    )
    def test_values_and_derivatives_stay(self, function):
        x = jnp.linspace(-100.0, 100.0, 4001, dtype=jnp.float32)

        def both(x):
            value, back = jax.vjp(function, x)
            return value, *back(jnp.ones_like(x))

        for got, want in zip(inlining.inlined(both, x), both(x), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)

    def test_calls_are_gone(self):
        x = jnp.ones(3)
        text = str(jax.make_jaxpr(lambda x: inlining.inlined(jax.nn.relu, x))(x))
        assert "custom_jvp" not in text and "jit" not in text


@pytest.mark.parametrize(
    "change, part",
    (
        ({"compute_capability": "10.0"}, "10.0"),
        ({"dtypes": [jnp.bfloat16, jnp.float32]}, "bfloat16, float32"),
        ({"columns": [64, 100]}, "100"),
        ({"group_alignment": 32}, "32"),
    ),
)
@needs_kernels
def test_why_a_product_has_no_kernel(change, part):
    from jax_ep._operations.mosaic_kernel import unsupported_reason

    served = {
        "compute_capability": "9.0",
        "dtypes": [jnp.bfloat16] * 2,
        "columns": [64, 2880],
        "group_alignment": 64,
    }
    assert unsupported_reason(**served) is None
    assert part in unsupported_reason(**served | change)
