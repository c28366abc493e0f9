"""ragged_dot and its derivatives against float64 products of each group.

With --platform=cuda kernels run where there are some, and a warning that they do
not is an error for what they are for.
"""

from __future__ import annotations

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import product_oracle as oracle
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from product_cases import (
    ALIGNED,
    GROUPS,
    ROUNDING,
    draw,
    exact_products,  # noqa: F401
    falling_back_allowed,
    kernels_serve,
)

import jax_ep


@functools.cache
def program(dtype, alignment, preferred=None):
    """(lhs, rhs, sizes, ct) -> output, and gradients by lhs and rhs."""

    def run(lhs, rhs, sizes, ct):
        def product(lhs, rhs):
            return jax_ep.ragged_dot(
                lhs,
                rhs,
                sizes,
                group_alignment=alignment,
                preferred_element_type=preferred,
            )

        out, pull = jax.vjp(product, lhs, rhs)
        return out, *pull(ct.astype(out.dtype))

    return jax.jit(run)


def assert_products(found, lhs, rhs, sizes, ct, dtype):
    """Output and gradients, where rows without a group hold NaN and infinities."""
    used = sum(sizes)
    rhs_t = oracle.transposed(rhs)
    wanted = (
        oracle.rows(lhs, rhs, sizes),
        oracle.rows(ct, rhs_t, sizes),
        oracle.weights(lhs, ct, sizes),
    )
    magnitudes = (
        oracle.rows(abs(lhs), abs(rhs), sizes),
        oracle.rows(abs(ct), abs(rhs_t), sizes),
        oracle.weights(abs(lhs), abs(ct), sizes),
    )
    for name, got, want, size in zip(
        ("output", "dlhs", "drhs"), found, wanted, magnitudes, strict=True
    ):
        got = np.asarray(got)
        rounding = ROUNDING[got.dtype]
        error = abs(got.astype(np.float64) - want)
        # The result rounds once; sums are of float32 whatever the dtype.
        assert (error <= rounding * abs(want) + 4e-6 * size).all(), name
    # Exactly 0, and not -0.
    for got in found[:2]:
        assert not np.asarray(got)[used:].view(np.uint8).any()
    empty = [group for group, size in enumerate(sizes) if size == 0]
    assert not np.asarray(found[2])[empty].view(np.uint8).any()


SHAPES = [
    # groups, K, N
    (7, 64, 128),
    (7, 72, 200),
    (7, 5, 3),
    (1, 192, 64),
    (256, 64, 64),
]


def assert_every_grouping(groups, k, n, dtype, alignment, groupings, preferred=None):
    dtype = np.dtype(dtype)
    lhs, ct = draw(1, 640, k, dtype=dtype), draw(3, 640, n, dtype=dtype)
    rhs = draw(2, groups, k, n, dtype=dtype)
    serves = kernels_serve(dtype, k, n) and preferred is None
    with falling_back_allowed(not serves):
        for sizes in groupings.values():
            used = sum(sizes)
            for array in (lhs, ct):
                array[used:] = np.nan
                array[used + 1 :: 2] = np.inf
            arrays = (lhs, rhs, np.array(sizes, np.int32), ct)
            run = program(dtype, alignment, preferred)
            found = run(*arrays)
            assert_products(found, lhs, rhs, sizes, ct, dtype)
            for a, b in zip(found, run(*arrays), strict=True):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
            lhs[used:], ct[used:] = 1, 1


@pytest.mark.parametrize(("groups", "k", "n"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_every_grouping(groups, k, n, dtype):
    assert_every_grouping(groups, k, n, jnp.dtype(dtype), 1, GROUPS[groups])


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize(("k", "n"), ((64, 128), (192, 320)), ids=str)
def test_aligned_groups(k, n, dtype):
    assert_every_grouping(7, k, n, jnp.dtype(dtype), 128, ALIGNED[7])


def test_a_wider_result():
    """Also its gradients, whose cotangents are wider than the other factor."""
    assert_every_grouping(
        7, 64, 128, jnp.bfloat16, 128, ALIGNED[7], jnp.dtype(jnp.float32)
    )


@pytest.mark.parametrize("shape", ((0, 4, 3), (6, 0, 3), (6, 4, 0)), ids=str)
def test_nothing_to_do(shape):
    m, k, n = shape
    lhs, rhs = jnp.ones((m, k)), jnp.ones((2, k, n))
    out, pull = jax.vjp(lambda *a: jax_ep.ragged_dot(*a, jnp.array([m, 0])), lhs, rhs)
    assert out.shape == (m, n)
    assert not out.any()
    assert [d.shape for d in pull(out)] == [lhs.shape, rhs.shape]


def test_no_groups():
    with falling_back_allowed(True):
        out = jax_ep.ragged_dot(
            jnp.ones((3, 4)), jnp.ones((0, 4, 5)), jnp.zeros(0, jnp.int32)
        )
    assert not out.any()
    assert out.shape == (3, 5)


# Transformations, of float64 numbers: kernels or not, the rules are the same -----

SIZES = np.array([4, 0, 6])


@pytest.fixture
def doubles():
    """float64, which has no kernels."""
    with jax.enable_x64(True), falling_back_allowed(True):
        yield draw(1, 13, 5, dtype=float), draw(2, 3, 5, 4, dtype=float)


def test_derivatives_of_every_mode_and_order(doubles):
    check_grads(lambda *a: jax_ep.ragged_dot(*a, SIZES), doubles, order=2)


def test_gradients_of_what_is_not_differentiated(doubles):
    """Only one operand, or a constant one: no other product is made."""
    lhs, rhs = doubles
    for argnum, names in ((0, ["ep_ragged_rows"]), (1, ["ep_ragged_weights"])):
        f = jax.grad(lambda *a: jax_ep.ragged_dot(*a, SIZES).sum(), argnum)
        found = [e.primitive.name for e in jax.make_jaxpr(f)(lhs, rhs).eqns]
        assert [n for n in found if n.startswith("ep_")] == ["ep_ragged_rows", *names]


@pytest.mark.parametrize(
    "axes",
    [
        (0, None, None),
        (1, None, None),
        (None, 0, None),
        (None, 2, None),
        (None, None, 0),
        (0, 1, None),
        (0, 3, 1),
    ],
    ids=str,
)
def test_vmap(axes, doubles):
    """Output and gradients are those of each element."""
    operands = [
        a if axis is None else np.stack([a, 2 * a[::-1]], axis)
        for a, axis in zip((*doubles, SIZES), axes, strict=True)
    ]
    operands[2] = np.asarray(operands[2]) // (1 if axes[2] is None else 2)

    def batch(lhs, rhs):
        return jax.vmap(jax_ep.ragged_dot, axes)(lhs, rhs, operands[2])

    def one_by_one(lhs, rhs):
        arrays = (lhs, rhs, operands[2])
        return jnp.stack(
            [
                jax_ep.ragged_dot(
                    *(
                        a if axis is None else jnp.take(a, i, axis)
                        for a, axis in zip(arrays, axes, strict=True)
                    )
                )
                for i in range(2)
            ]
        )

    wanted = found = ()
    for function in (batch, one_by_one):
        out, pull = jax.vjp(function, *operands[:2])
        found = (out, *pull(jnp.sin(out)))
        if function is batch:
            wanted = found
    for got, want in zip(wanted, found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_vmap_of_nothing(doubles):
    lhs, rhs = doubles
    empty = jnp.zeros((0, *lhs.shape))
    out = jax.vmap(lambda lhs: jax_ep.ragged_dot(lhs, rhs, SIZES))(empty)
    assert out.shape == (0, 13, 4)


def test_one_product_for_a_batch_of_one_operand(doubles):
    lhs, rhs = doubles
    for axes, operands in (
        ((0, None), (lhs[None], rhs)),
        ((None, 0), (lhs, rhs[None])),
    ):
        f = jax.vmap(lambda *a: jax_ep.ragged_dot(*a, SIZES), axes)
        operands = [
            jnp.concatenate([a] * 3) if a.ndim > b else a
            for a, b in zip(operands, (2, 3))
        ]
        assert str(jax.make_jaxpr(f)(*operands)).count("ep_ragged_rows[") == 1


def test_remat_scan_and_hessian(doubles):
    lhs, rhs = doubles
    square = rhs[:, :, :1] * rhs[:, :1]  # [3, 5, 4]
    square = np.concatenate([square, square[..., :1]], -1)  # [3, 5, 5]

    def body(x, _):
        return jnp.tanh(jax_ep.ragged_dot(x, square, SIZES)), None

    def loss(body, x):
        return (jax.lax.scan(body, x, None, length=3)[0] ** 2).sum()

    plain = jax.jit(jax.value_and_grad(functools.partial(loss, body)))(lhs)
    again = jax.jit(jax.value_and_grad(functools.partial(loss, jax.checkpoint(body))))
    for a, b in zip(plain, again(lhs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    f = functools.partial(loss, body)
    x, v = lhs[:, :5], np.cos(lhs[:, :5])
    forward_over_reverse = jax.jvp(jax.grad(f), (x,), (v,))[1]
    reverse_over_forward = jax.grad(lambda x: jax.jvp(f, (x,), (v,))[1])(x)
    np.testing.assert_allclose(forward_over_reverse, reverse_over_forward, rtol=1e-9)


@pytest.mark.parametrize("check_vma", (True, False))
def test_inside_shard_map(check_vma, doubles):
    """Matrices that are the same on all ranks get the sum of their gradients."""
    ranks = min(2, harness.most_ranks())
    mesh = harness.mesh(ranks)
    lhs, rhs = doubles
    stacked = np.concatenate([lhs * (r + 1) for r in range(ranks)])
    spec = P("ep")

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(spec, P()),
        out_specs=spec,
        check_vma=check_vma,
    )
    def product(lhs, rhs):
        return jax_ep.ragged_dot(lhs, rhs, SIZES)

    def alone(lhs, rhs):
        parts = jnp.split(lhs, ranks)
        return jnp.concatenate([jax_ep.ragged_dot(p, rhs, SIZES) for p in parts])

    place = functools.partial(jax.sharding.NamedSharding, mesh)
    args = jax.device_put((stacked, rhs), (place(spec), place(P())))
    for got, want in zip(
        jax.jit(jax.grad(lambda *a: (product(*a) ** 2).sum(), (0, 1)))(*args),
        jax.grad(lambda *a: (alone(*a) ** 2).sum(), (0, 1))(stacked, rhs),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-12)


# Bad input -------------------------------------------------------------------


def _refused(*args, **kwargs):
    with pytest.raises((TypeError, ValueError)) as info:
        jax_ep.ragged_dot(*args, **kwargs)
    return f"{info.type.__name__}: {info.value}"


LHS, RHS = np.ones((6, 4), np.float32), np.ones((3, 4, 5), np.float32)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (LHS.astype(np.int32), RHS, SIZES),
            {},
            "TypeError: jax_ep.ragged_dot: lhs must be bfloat16, float16, float32 or "
            "float64, found int32[6,4]",
        ),
        (
            (LHS[0], RHS, SIZES),
            {},
            "ValueError: jax_ep.ragged_dot: lhs must be [M, K], found float32[4]",
        ),
        (
            (LHS, RHS.astype(np.float16), SIZES),
            {},
            "TypeError: jax_ep.ragged_dot: all operands must have one dtype, found "
            "rhs float16[3,4,5] beside float32",
        ),
        (
            (LHS, RHS[:, :3], SIZES),
            {},
            "ValueError: jax_ep.ragged_dot: rhs must be [G, K, N] with K = 4, found "
            "float32[3,3,5]",
        ),
        (
            (LHS, RHS, SIZES.astype(np.float32)),
            {},
            "TypeError: jax_ep.ragged_dot: group_sizes must have an integer dtype, "
            "found float32[3]",
        ),
        (
            (LHS, RHS, SIZES[:2]),
            {},
            "ValueError: jax_ep.ragged_dot: group_sizes must be [G] with G = 3, found "
            "int32[2]",
        ),
        (
            (LHS, RHS, SIZES),
            {"group_alignment": 0},
            "ValueError: jax_ep.ragged_dot: group_alignment must be >= 1, found 0",
        ),
        (
            (LHS, RHS, SIZES),
            {"preferred_element_type": jnp.int32},
            "TypeError: jax_ep.ragged_dot: preferred_element_type must be bfloat16, "
            "float16, float32, float64 or None, found int32",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_argument(args, kwargs, message):
    args = [a.astype(np.int32) if a.dtype == np.int64 else a for a in args]
    assert _refused(*args, **kwargs) == message


def test_arrays_split_over_a_mesh():
    """XLA would gather them around a kernel without a word."""
    mesh = harness.mesh(min(2, harness.most_ranks()))
    if mesh.size < 2:
        pytest.skip("needs 2 devices")
    lhs = jax.device_put(LHS, jax.sharding.NamedSharding(mesh, P("ep")))
    assert _refused(lhs, RHS, SIZES) == (
        "ValueError: jax_ep.ragged_dot: lhs must not be split over mesh axes, found "
        "['ep']; call it inside jax.shard_map, with what each device has"
    )
