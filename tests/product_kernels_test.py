"""Kernels for GPUs on any machine: interpreted, and what programs for GPUs hold."""

from __future__ import annotations

import functools
import warnings

import harness
import jax
import numpy as np
import product_oracle as oracle
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from product_cases import BFLOAT16, draw, like, lowered, needs_kernels

import jax_ep

ROWS, GROUPS, WIDTH, INNER = 192, 3, 64, 128
SIZES = {128: [0, 128, 0], 64: [64, 0, 128], 1: [3, 0, 101]}


def interpreted(function, *arrays):
    """function(product_kernels, ...) by Pallas' interpreter, on two blocks."""
    from jax.experimental.pallas import mosaic_gpu

    from jax_ep._operations import mosaic_kernel, product_kernels

    with (
        mosaic_gpu.force_gpu_interpret_mode(),
        # The interpreter itself promotes ranks.
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        patch.setattr(mosaic_kernel, "num_blocks", lambda: 2)
        return jax.jit(functools.partial(function, product_kernels))(*arrays)


def assert_close(got, want, tolerance=2**-7):
    got = np.asarray(got).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


def arrays(alignment):
    """Sizes; rows with NaN behind the last group; matrices [G, WIDTH, INNER]."""
    sizes = np.array(SIZES[alignment], np.int32)
    rows = draw(1, ROWS, WIDTH, dtype=BFLOAT16)
    rows[sizes.sum() :] = np.nan
    return sizes, rows, draw(2, GROUPS, WIDTH, INNER, dtype=BFLOAT16)


@pytest.mark.skipif(harness.ON_GPU, reason="GPUs run the kernels themselves")
@needs_kernels
class TestInterpreted:
    @pytest.mark.parametrize("alignment", (128, 1))
    def test_rows(self, alignment):
        sizes, rows, matrices = arrays(alignment)
        found = interpreted(
            lambda kernels, sizes, rows, rhs: kernels.rows(
                sizes, [(rows, rhs)], group_alignment=alignment
            ),
            sizes,
            rows,
            matrices,
        )
        assert_close(found, oracle.rows(rows, matrices, sizes))

    def test_a_sum_of_products_by_transposed_matrices(self):
        sizes, rows, matrices = arrays(1)
        rhs = oracle.transposed(matrices).copy()
        found = interpreted(
            lambda kernels, sizes, rows, rhs: kernels.rows(
                sizes,
                [(rows, rhs), (2 * rows, rhs)],
                group_alignment=1,
                transpose_rhs=True,
            ),
            sizes,
            rows,
            rhs,
        )
        assert_close(found, 3 * oracle.rows(rows, matrices, sizes))

    def test_weights(self):
        sizes, rows, _ = arrays(1)
        other = draw(3, ROWS, INNER, dtype=BFLOAT16)
        other[sizes.sum() :] = np.inf
        found = interpreted(
            lambda kernels, *arrays: kernels.weights(
                *arrays, group_alignment=1, out_dtype=BFLOAT16
            ),
            sizes,
            rows,
            other,
        )
        assert_close(found, oracle.weights(rows, other, sizes))

    def test_gated_there_and_back(self):
        sizes, rows, w_gate = arrays(1)
        w_up, biases = w_gate[:, ::-1].copy(), draw(4, 2, GROUPS, INNER, dtype=BFLOAT16)
        w_down = draw(5, GROUPS, INNER, WIDTH, dtype=BFLOAT16)
        ct = draw(6, ROWS, WIDTH, dtype=BFLOAT16)
        glu = lambda gate, up: jax.nn.silu(gate) * up  # noqa: E731
        options = {"glu": glu, "group_alignment": 1}

        def run(kernels, sizes, rows, w_gate, w_up, w_down, biases, ct):
            hidden, gate, up = kernels.gated(
                sizes, rows, w_gate, w_up, *biases, keep=True, **options
            )
            d = kernels.gated_down_vjp(
                sizes, gate, up, w_down, ct, by_weights=True, **options
            )
            return hidden, *d

        found = interpreted(run, sizes, rows, w_gate, w_up, w_down, biases, ct)
        wide = [a.astype(np.float64) for a in (w_gate, w_up, w_down, *biases)]
        gate, up = (
            oracle.rows(rows, w, sizes)
            + np.repeat(np.vstack([b, 0 * b[:1]]), [*sizes, ROWS - sizes.sum()], axis=0)
            for w, b in zip(wide[:2], wide[3:], strict=True)
        )
        hidden, by_gate, by_up = oracle.silu(gate, up)
        d_hidden = oracle.rows(ct, oracle.transposed(wide[2]), sizes)
        wanted = (
            hidden,
            d_hidden * by_gate,
            d_hidden * by_up,
            oracle.weights(hidden, ct, sizes),
        )
        for got, want in zip(found, wanted, strict=True):
            assert_close(got, want, 2**-6)

    def test_a_broken_promise_is_seen(self):
        """Groups that are not aligned as was said: NaN, not rows of other groups."""
        _, rows, matrices = arrays(64)
        found = interpreted(
            lambda kernels, sizes, rows, rhs: kernels.rows(
                sizes, [(rows, rhs)], group_alignment=64
            ),
            np.array([64, 3, 61], np.int32),
            np.nan_to_num(rows),
            matrices,
        )
        assert np.isnan(np.asarray(found).astype(np.float32)).all()


# Programs for GPUs, lowered here -----------------------------------------------


PRODUCT = (like(640, 64), like(7, 64, 128), like(7, dtype=np.int32))
MLP = (
    like(640, 64),
    like(7, dtype=np.int32),
    like(7, 64, 128),
    like(7, 64, 128),
    like(7, 128, 64),
)


def gradients(function, *argnums):
    """The result, and the gradients of its sum."""

    def run(*args):
        def loss(*chosen):
            full = list(args)
            for i, a in zip(argnums, chosen, strict=True):
                full[i] = a
            return function(*full)

        out, pull = jax.vjp(loss, *(args[i] for i in argnums))
        return out, pull(out)

    return run


@needs_kernels
class TestProgramsForGpus:
    @pytest.mark.parametrize("alignment", (1, 128))
    def test_products(self, alignment):
        product = functools.partial(jax_ep.ragged_dot, group_alignment=alignment)
        assert lowered(product, *PRODUCT) == (1, set())
        assert lowered(gradients(product, 0, 1), *PRODUCT) == (3, set())

    @pytest.mark.parametrize(("alignment", "gelu"), [(128, False), (1, True)])
    def test_gated(self, alignment, gelu):
        """Two kernels; with gradients seven, one of them for both of gate and up."""
        mlp = functools.partial(jax_ep.gated_mlp, group_alignment=alignment)
        if gelu:
            exact = functools.partial(jax.nn.gelu, approximate=False)
            mlp = functools.partial(mlp, activation=exact)
        assert lowered(mlp, *MLP) == (2, set())
        assert lowered(gradients(mlp, 0, 2, 3, 4), *MLP) == (7, set())

    def test_an_activation_that_is_no_kernels(self):
        """Not number by number: products by kernels, the rest by XLA."""
        mlp = functools.partial(jax_ep.gated_mlp, activation=jax.nn.softmax)
        assert lowered(mlp, *MLP) == (3, set())

    def test_batches(self):
        """Two kernels, whatever the number of rows; none says so."""
        batches = (like(7, 37, 64), *MLP[1:])
        assert lowered(jax_ep.gated_mlp, *batches) == (2, set())
        slow = (
            "jax_ep.gated_mlp: multiplying whole batches, rows without a token "
            "included, which is slow on GPUs: the kernels do not serve: "
        )
        mlp = functools.partial(jax_ep.gated_mlp, activation=jax.nn.softmax)
        number, (told,) = lowered(mlp, *batches)
        assert number == 0 and told == (
            f"{slow}the activation is not made of elementwise operations that they know"
        )
        wide = [like(*a.shape, dtype=np.float32) for a in batches]
        number, (told,) = lowered(jax_ep.gated_mlp, wide[0], batches[1], *wide[2:])
        assert number == 0 and told.startswith(slow)

    def test_biases_need_no_products(self):
        def mlp(rows, sizes, w_gate, w_up, w_down, b_gate, b_up, b_down):
            return jax_ep.gated_mlp(
                rows,
                sizes,
                w_gate,
                w_up,
                w_down,
                b_gate=b_gate,
                b_up=b_up,
                b_down=b_down,
            )

        args = (*MLP, like(7, 128), like(7, 128), like(7, 64))
        assert lowered(mlp, *args) == (2, set())
        assert lowered(gradients(mlp, 0, *range(2, 8)), *args) == (7, set())

    @pytest.mark.parametrize("check_vma", (True, False))
    def test_inside_shard_map(self, check_vma):
        mesh = jax.make_mesh((1,), ("ep",), (AxisType.Auto,), devices=jax.devices()[:1])
        split = P("ep")

        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(split, P(), split),
            out_specs=split,
            check_vma=check_vma,
        )
        def product(lhs, rhs, sizes):
            return jax_ep.ragged_dot(lhs, rhs, sizes)

        program = gradients(product, 0, 1)
        assert lowered(program, *PRODUCT) == (3, set())


FALLS_BACK = (
    "jax_ep.ragged_dot: falling back to jax.lax.ragged_dot, which is slow on GPUs: "
)


@needs_kernels
@pytest.mark.parametrize(
    ("args", "options", "reason"),
    [
        (
            (like(640, 64, dtype=np.float32), like(7, 64, 128, dtype=np.float32)),
            {},
            "the operands' dtypes are float32, not all bfloat16 or all float16",
        ),
        (
            (like(640, 72), like(7, 72, 128)),
            {},
            "of the sizes (72, 128), one is not a multiple of 64",
        ),
        (
            PRODUCT[:2],
            {"preferred_element_type": np.float32},
            "the operands' dtypes are bfloat16, float32, not all bfloat16 or all "
            "float16",
        ),
    ],
    ids=("dtype", "width", "result"),
)
def test_without_a_kernel_a_warning_says_why(args, options, reason):
    product = functools.partial(jax_ep.ragged_dot, **options)
    assert lowered(product, *args, PRODUCT[2]) == (0, {FALLS_BACK + reason})


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="for jax before 0.11")
def test_before_jax_0_11_a_warning_says_so():
    reason = f"jax {jax.__version__} is older than 0.11"
    assert lowered(jax_ep.ragged_dot, *PRODUCT) == (0, {FALLS_BACK + reason})


def test_other_gpus():
    reason = "the kernels are for NVIDIA GPUs"
    found = lowered(jax_ep.ragged_dot, *PRODUCT, platform="rocm")
    assert found == (0, {FALLS_BACK + reason})


def test_python_shows_one_warning_of_a_program():
    """Also where several products have no kernel."""
    args = (
        like(640, 72, dtype=np.float32),
        like(7, 72, 8, dtype=np.float32),
        PRODUCT[2],
    )
    program = gradients(lambda *a: jax_ep.ragged_dot(*a) + 1, 0, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        jax.jit(program).trace(*args).lower(lowering_platforms=("cuda",))
    assert len(caught) == 1


def test_no_warning_where_there_is_no_gpu():
    assert lowered(jax_ep.ragged_dot, *PRODUCT, platform="cpu") == (0, set())
