"""gated_mlp, alone and as the experts of moe, against float64 dense ones."""

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
from jax.test_util import check_grads
from product_cases import (
    ALIGNED,
    BFLOAT16,
    GROUPS,
    ROUNDING,
    draw,
    exact_products,  # noqa: F401
    falling_back_allowed,
    kernels_serve,
)
from product_oracle import Mlp

import jax_ep

BIASES = ("b_gate", "b_up", "b_down")


def gpt_oss(gate, up):
    """Clamped, with a factor in the sigmoid, as gpt-oss has it."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


GLUS = {"silu": (None, oracle.silu), "gpt_oss": (gpt_oss, oracle.gpt_oss)}


def parameters(groups, width, inner, dtype, biased, out=None):
    """Of gated MLPs, so that hidden values and outputs are about 1."""
    out = width if out is None else out
    shapes = [(groups, width, inner)] * 2 + [(groups, inner, out)]
    arrays = [
        (draw(i, *shape) * 2 / shape[1] ** 0.5).astype(dtype)
        for i, shape in enumerate(shapes)
    ]
    if biased:
        arrays += [
            draw(5 + i, groups, n).astype(dtype)
            for i, n in enumerate((inner, inner, out))
        ]
    return Mlp(*arrays)


def apply(rows, sizes, mlp, glu=None, alignment=1):
    biases = {name: getattr(mlp, name) for name in BIASES}
    return jax_ep.gated_mlp(
        rows, sizes, *mlp[:3], glu=glu, group_alignment=alignment, **biases
    )


@functools.cache
def program(glu, alignment):
    """(rows, sizes, mlp, ct) -> output, and gradients by rows and mlp."""

    def run(rows, sizes, mlp, ct):
        out, pull = jax.vjp(
            lambda rows, mlp: apply(rows, sizes, mlp, glu, alignment), rows, mlp
        )
        return out, *pull(ct)

    return jax.jit(run)


def assert_close(got, want, dtype, name="", outliers=0.0):
    """Each result has rounded hidden values and cotangents behind it.

    outliers: how many may be off, where a slope jumps and values round across.
    """
    error = np.abs(np.asarray(got).astype(np.float64) - want)
    assert np.isfinite(error).all(), name
    allowed = 4 * ROUNDING[dtype] * np.abs(want).max(initial=1e-30)
    assert (error > allowed).mean() <= outliers, (name, error.max(), allowed)


@pytest.mark.parametrize("biased", (False, True), ids=("", "biased"))
@pytest.mark.parametrize("glu", GLUS)
@pytest.mark.parametrize(
    ("dtype", "alignment", "width", "inner"),
    [("bfloat16", 128, 64, 192), ("bfloat16", 1, 64, 64), ("float32", 1, 20, 7)],
    ids=str,
)
def test_every_grouping(dtype, alignment, width, inner, glu, biased):
    dtype = jnp.dtype(dtype)
    glu, reference = GLUS[glu]
    mlp = parameters(7, width, inner, dtype, biased)
    wide = Mlp(*(None if a is None else a.astype(np.float64) for a in mlp))
    groupings = GROUPS[7] if alignment == 1 else ALIGNED[7]
    jumps = 1e-2 if glu is gpt_oss and dtype == BFLOAT16 else 0.0
    run = program(glu, alignment)
    with falling_back_allowed(not kernels_serve(dtype, width, inner)):
        for name, sizes in groupings.items():
            used = sum(sizes)
            x, ct = (draw(9 + i, 640, width, dtype=dtype) for i in range(2))
            x[used:], ct[used:] = np.nan, np.inf
            arrays = (x, np.array(sizes, np.int32), mlp, ct)
            found = run(*arrays)
            again = run(*arrays)
            wanted = oracle.gated_mlp(
                x.astype(np.float64), sizes, wide, ct.astype(np.float64), reference
            )
            for got, want, same in zip(
                *map(jax.tree.leaves, (found, wanted, again)), strict=True
            ):
                assert_close(got, want, dtype, name, jumps)
                assert np.asarray(got).tobytes() == np.asarray(same).tobytes()
            for got in found[:2]:
                assert not np.asarray(got)[used:].view(np.uint8).any()
            empty = [group for group, size in enumerate(sizes) if size == 0]
            for got in jax.tree.leaves(found[2]):
                assert not np.asarray(got)[empty].view(np.uint8).any()


SIZES = np.array([4, 0, 6])


@pytest.fixture
def doubles():
    """rows and parameters in float64, which has no kernels."""
    with jax.enable_x64(True), falling_back_allowed(True):
        yield draw(1, 13, 5, dtype=float), parameters(3, 5, 6, float, True, out=4)


@pytest.mark.parametrize("biased", (False, True), ids=("", "biased"))
def test_derivatives_of_every_mode_and_order(biased, doubles):
    rows, mlp = doubles
    glu = (lambda gate, up: jnp.sin(gate) * up) if biased else None
    mlp = mlp if biased else Mlp(*mlp[:3])
    f = jax.jit(lambda rows, mlp: apply(rows, SIZES, mlp, glu))
    check_grads(f, (rows, mlp), order=2)


def test_an_activation_with_a_slope_of_its_own(doubles):
    """What the activation closes over has a gradient, too."""
    rows, mlp = doubles
    slope = np.linspace(0.5, 2, 6)

    def f(rows, mlp, slope):
        return jax_ep.gated_mlp(
            rows, SIZES, *mlp[:3], activation=lambda g: jnp.tanh(slope[None] * g)
        )

    check_grads(jax.jit(f), (rows, Mlp(*mlp[:3]), slope), order=1)
    _, pull = jax.vjp(f, rows, mlp, slope)
    assert _kept_hidden(pull, len(rows), 6) == 0


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 0)], ids=str)
def test_vmap(axes, doubles):
    rows, mlp = doubles

    def stack(a, axis):
        return a if axis is None else np.stack([a, np.cos(a)], axis)

    rows = stack(rows, axes[0])
    mlp = Mlp(*(stack(a, axes[1]) for a in mlp))
    f = jax.jit(lambda rows, mlp: apply(rows, SIZES, mlp))
    g = jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1)))
    got = jax.vmap(f, axes)(rows, mlp), jax.vmap(g, axes)(rows, mlp)
    for i in range(2):
        one = rows if axes[0] is None else rows.take(i, axes[0])
        own = mlp if axes[1] is None else Mlp(*(a[i] for a in mlp))
        want = f(one, own), g(one, own)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-12, atol=1e-12)


def _kept_hidden(pull, num_rows, inner):
    """How many arrays of hidden width and all rows a backward pass keeps."""
    kept = [a for a in jax.tree.leaves(pull) if getattr(a, "ndim", 0) == 2]
    return sum(a.shape[0] == num_rows and a.shape[1] >= inner for a in kept)


def test_what_a_backward_pass_keeps(doubles):
    """Of hidden width gate and up, and nothing under remat."""
    rows, mlp = doubles
    _, pull = jax.vjp(lambda *a: apply(a[0], SIZES, a[1]), rows, mlp)
    assert _kept_hidden(pull, len(rows), 6) == 2
    both = jax.checkpoint(lambda *a: apply(a[0], SIZES, a[1]))
    _, pull = jax.vjp(both, rows, mlp)
    assert _kept_hidden(pull, len(rows), 6) == 0


# As experts ------------------------------------------------------------------

HIDDEN, INNER = 64, 64


def dense_layer(x, ids, weights, mlp, kept, ct):
    """(output, dx, dweights, dmlp) of all ranks' tokens [N, H], in float64."""
    experts = len(mlp.w_gate)
    token, k = np.nonzero(kept)
    order = np.argsort(ids[token, k], kind="stable")
    token, k = token[order], k[order]
    sizes = np.bincount(ids[token, k], minlength=experts)
    scale = weights[token, k][:, None]
    y, drows, dmlp = oracle.gated_mlp(
        x[token], sizes, mlp, scale * ct[token], oracle.silu
    )
    out, dx, dweights = np.zeros_like(x), np.zeros_like(x), np.zeros(weights.shape)
    np.add.at(out, token, scale * y)
    np.add.at(dx, token, drows)
    dweights[token, k] = (y * ct[token]).sum(-1)
    return out, dx, dweights, dmlp


def layer_program(comm, num_experts, expert_fn=None, **options):
    """(ids, x, weights, mlp, ct) -> output and gradients of the layer."""

    def body(comm, ids, x, weights, mlp, ct):
        def layer(x, weights, mlp):
            experts = functools.partial(
                jax_ep.gated_mlp, w_gate=mlp.w_gate, w_up=mlp.w_up, w_down=mlp.w_down
            )
            if expert_fn is not None:
                experts = expert_fn(experts)
            return jax_ep.moe(
                x, ids, weights, experts, comm=comm, num_experts=num_experts, **options
            )

        out, pull = jax.vjp(layer, x, weights, mlp)
        return out, *pull(ct)

    return harness.Program(body, comm)


def layer_inputs(ids, local, dtype=np.float32):
    """x, weights, parameters and a cotangent of all ranks."""
    ranks, tokens, _ = ids.shape
    mlp = parameters(ranks * local, HIDDEN, INNER, dtype, biased=False)
    mlp = jax.tree.map(lambda a: a.reshape(ranks, local, *a.shape[1:]), mlp)
    x, ct = (draw(i, ranks, tokens, HIDDEN, dtype=dtype) for i in (21, 22))
    return x, np.abs(draw(23, *ids.shape)), mlp, ct


def assert_layer(found, ids, x, weights, mlp, ct, dtype, kept=None):
    kept = ids >= 0 if kept is None else kept
    flat = lambda a: a.reshape(-1, *a.shape[2:]).astype(np.float64)  # noqa: E731
    args = map(flat, (x, weights))
    x, weights = args
    wanted = dense_layer(
        x,
        ids.reshape(-1, ids.shape[-1]),
        weights,
        jax.tree.map(flat, mlp),
        kept.reshape(-1, ids.shape[-1]),
        flat(ct),
    )
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_close(np.asarray(got).reshape(want.shape), want, np.dtype(dtype))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize(
    ("backend", "ranks"),
    [(harness.BACKENDS[0], r) for r in (1, 2, 4)] + [(harness.BACKENDS[-1], 2)],
)
def test_layer(backend, ranks, dtype):
    """moe with gated_mlp, as it comes, and with groups aligned by hand."""
    if ranks > harness.most_ranks():
        pytest.skip(f"needs {ranks} devices; this machine has {jax.device_count()}")
    local, dtype = 3, jnp.dtype(dtype)
    ids = cases.holes(ranks, 17, 3, local * ranks).astype(np.int32)
    args = layer_inputs(ids, local, dtype)
    comm = harness.communicator(backend, ranks)
    by_hand = (1, 128) if ranks == 2 and dtype == BFLOAT16 else ()
    for alignment in (None, *by_hand):
        run = layer_program(comm, local * ranks, expert_alignment=alignment)
        with falling_back_allowed(not kernels_serve(dtype, HIDDEN, INNER)):
            found = run(ids, *args)
        assert_layer(found, ids, *args, dtype)


def test_nothing_comes_from_pads_and_dropped_rows():
    """Dropped tokens are NaN, and experts put NaN into pads and behind groups."""
    ranks, local = min(2, harness.most_ranks()), 3
    ids = cases.holes(ranks, 17, 3, local * ranks).astype(np.int32)
    x, weights, mlp, ct = layer_inputs(ids, local)
    flat = ids.reshape(-1, 3)
    kept = layers.kept_pairs(
        flat, num_ranks=ranks, num_experts=local * ranks, capacity=11
    )
    lost = ~kept.any(-1).reshape(ranks, -1)
    assert lost.any()
    x[lost], ct[lost] = np.nan, np.inf

    def spoiled(experts):
        def expert_fn(rows, group_sizes):
            y = experts(rows, group_sizes)
            # Where no token stands a row is 0: a pad, or behind the last group.
            return jnp.where((rows == 0).all(-1, keepdims=True), jnp.nan, y)

        return expert_fn

    comm = harness.communicator(harness.BACKENDS[0], ranks)
    run = layer_program(comm, local * ranks, spoiled, capacity=11, expert_alignment=8)
    with falling_back_allowed(True):
        found = run(ids, x, weights, mlp, ct)
    clean = [np.where(lost[..., None], 0, a) for a in (x, ct)]
    assert_layer(
        found,
        ids,
        clean[0],
        weights,
        mlp,
        clean[1],
        np.float32,
        kept.reshape(ids.shape),
    )


def test_what_experts_are_told():
    """The plan's alignment, where expert_fn has a parameter for it."""
    seen = {}
    comm = harness.communicator(harness.BACKENDS[0], 1)
    few, many = (64, 128) if harness.ON_GPU else (1, 1)

    def told(rows, group_sizes, group_alignment):
        seen[len(rows)] = group_alignment
        return rows

    def in_fp8(rows, group_sizes, group_alignment):
        assert group_alignment == many  # however few rows there are
        return rows.values.astype(jnp.bfloat16)

    def untold(rows, group_sizes, **others):
        assert not others
        return rows

    def body(comm, ids, x, weights):
        sizes = {"comm": comm, "num_experts": 2}
        outputs = [
            jax_ep.moe(x, ids, weights, told, **sizes, **options)
            for options in ({}, {"expert_alignment": 8}, {"expert_capacity": 20})
        ]
        outputs.append(jax_ep.moe(x, ids, weights, untold, **sizes))
        for tokens, best in ((48, few), (49, many)):  # two pairs each, two experts
            more = jnp.zeros((tokens, 2), jnp.int32)
            plan = jax_ep.make_plan(more, **sizes, expert_alignment=None)
            assert plan.expert_alignment == best
        assert jax_ep.make_plan(ids, **sizes).expert_alignment == 1
        jax_ep.moe(jnp.ones((4, 128)), ids, weights, in_fp8, **sizes, quantize="fp8")
        return outputs

    ids = np.zeros((1, 4, 2), np.int32)
    x, weights = np.ones((1, 4, 3), np.float32), np.ones((1, 4, 2), np.float32)
    found = harness.run(body, comm, ids, x, weights)
    for y in found:
        np.testing.assert_array_equal(y, 2 * x)
    room = (8 + 2 * (few - 1)) // few * few
    assert seen == {room: few, 16: 8, 20: 1}


# Bad input -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"w_up": np.ones((3, 5, 7), np.float32)},
            "ValueError: jax_ep.gated_mlp: w_up must be [G, H, I] with G = 3, H = 5, "
            "I = 6, found float32[3,5,7]",
        ),
        (
            {"w_gate": np.ones((5, 6), np.float32)},
            "ValueError: jax_ep.gated_mlp: w_gate must be [G, H, I] with G = 5, "
            "H = 5, I = 6, found float32[5,6]",
        ),
        (
            {"w_down": np.ones((3, 6, 5), np.float16)},
            "TypeError: jax_ep.gated_mlp: all operands must have one dtype, found "
            "w_down float16[3,6,5] beside float32",
        ),
        (
            {"b_gate": np.ones((3, 6), np.float32)},
            "ValueError: jax_ep.gated_mlp: give both of b_gate and b_up or none, found "
            "one",
        ),
        (
            {"b_down": np.ones((3, 6), np.float32)},
            "ValueError: jax_ep.gated_mlp: b_down must be [G, N] with G = 3, N = 5, "
            "found float32[3,6]",
        ),
        (
            {"glu": gpt_oss, "activation": jax.nn.gelu},
            "ValueError: jax_ep.gated_mlp: give activation or glu, not both",
        ),
        (
            {"activation": "silu"},
            "TypeError: jax_ep.gated_mlp: activation must be a function, found str",
        ),
        (
            {"glu": lambda gate, up: gate > 0},
            "ValueError: jax_ep.gated_mlp: glu must return float32[13, 6] as it gets, "
            "found bool[13, 6]",
        ),
        (
            {"rows": np.ones((13, 5), np.int8)},
            "TypeError: jax_ep.gated_mlp: rows must be bfloat16, float16, float32 or "
            "float64, found int8[13,5]",
        ),
        (
            {"group_sizes": np.ones(2, np.int32)},
            "ValueError: jax_ep.gated_mlp: group_sizes must be [G] with G = 3, found "
            "int32[2]",
        ),
        (
            {"group_alignment": 1.0},
            "TypeError: jax_ep.gated_mlp: group_alignment must be a Python integer, "
            "found float",
        ),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_bad_argument(change, message):
    mlp = parameters(3, 5, 6, np.float32, biased=False)
    kwargs = {
        "rows": np.ones((13, 5), np.float32),
        "group_sizes": SIZES.astype(np.int32),
        "w_gate": mlp.w_gate,
        "w_up": mlp.w_up,
        "w_down": mlp.w_down,
    }
    with pytest.raises((TypeError, ValueError)) as info:
        jax_ep.gated_mlp(**kwargs | change)
    assert f"{info.type.__name__}: {info.value}" == message


# Batches ---------------------------------------------------------------------


@pytest.mark.parametrize("biased", (False, True), ids=("", "biased"))
@pytest.mark.parametrize("glu", GLUS)
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_batches(dtype, glu, biased):
    """[G, M, H] of which each group has its first rows; NaN behind them."""
    dtype = jnp.dtype(dtype)
    glu, reference = GLUS[glu]
    mlp = parameters(5, 64, 128, dtype, biased)
    wide = Mlp(*(None if a is None else a.astype(np.float64) for a in mlp))
    jumps = 1e-2 if glu is gpt_oss and dtype == BFLOAT16 else 0.0
    counts = [0, 1, 40, 17, 39]
    x, ct = (draw(9 + i, 5, 40, 64, dtype=dtype) for i in range(2))
    for g, count in enumerate(counts):
        x[g, count:], ct[g, count:] = np.nan, np.inf
    packed = [np.concatenate([a[g, :c] for g, c in enumerate(counts)]) for a in (x, ct)]
    x64, ct64 = (a.astype(np.float64) for a in packed)
    wanted = oracle.gated_mlp(x64, counts, wide, ct64, reference)
    with falling_back_allowed(True):
        arrays = (x, np.array(counts, np.int32), mlp, ct)
        out, dx, gradients = program(glu, 1)(*arrays)
    for found, name, want in (out, "output", wanted[0]), (dx, "dx", wanted[1]):
        found = np.asarray(found)
        for g, count in enumerate(counts):
            assert not found[g, count:].any(), name
        rows = np.concatenate([found[g, :c] for g, c in enumerate(counts)])
        assert_close(rows, want, dtype, name, jumps)
    for got, want in zip(*map(jax.tree.leaves, (gradients, wanted[2])), strict=True):
        assert_close(got, want, dtype, "gradient", jumps)


@pytest.mark.filterwarnings("ignore:jax_ep.gated_mlp. multiplying whole batches")
def test_batches_of_several():
    """vmap of batches, and an activation that closes over what is differentiated."""
    mlp = parameters(3, 16, 8, np.dtype(np.float32), False)
    x = draw(1, 2, 3, 4, 16)
    counts = np.array([[1, 4, 0], [2, 2, 2]], np.int32)

    def apply(slope, x, counts):
        glu = lambda gate, up: jnp.tanh(slope * gate) * up  # noqa: E731
        return jax_ep.gated_mlp(x, counts, *mlp[:3], glu=glu)

    one_by_one = jnp.stack([apply(0.5, a, c) for a, c in zip(x, counts)])
    batched = jax.vmap(apply, in_axes=(None, 0, 0))(0.5, x, counts)
    np.testing.assert_allclose(batched, one_by_one, rtol=1e-5, atol=1e-6)
    check_grads(lambda s: apply(s, x[0], counts[0]).sum(), (0.5,), 1, rtol=1e-2)
