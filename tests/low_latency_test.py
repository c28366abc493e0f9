"""The low-latency operations against the oracle, on every backend."""

from __future__ import annotations

import functools

import cases
import harness
import jax
import jax.numpy as jnp
import low_latency_oracle
import low_latency_steps
import ml_dtypes
import numpy as np
import payloads
import pytest

import jax_ep

LAYOUTS = ("expert", "rank")
on_each_layout = pytest.mark.parametrize("layout", LAYOUTS)
# 17 units of 16 bytes, two blocks of columns with a scale each.
HIDDEN = 136


@functools.cache
def buffer(backend, ranks, max_tokens, experts, hidden=HIDDEN, dtype="bfloat16"):
    """One buffer for each of these, kept for all tests."""
    return jax_ep.LowLatencyBuffer(
        harness.communicator(backend, ranks),
        max_tokens=max_tokens,
        hidden=hidden,
        num_experts=experts,
        dtype=dtype,
    )


@functools.cache
def pair_program(over, layout, weighted=False, quantize=None):
    """(ids, x, weights, y) -> what dispatch returns, and combine(y)."""

    def body(comm, ids, x, weights, y):
        del comm
        rows, who, handle = jax_ep.low_latency_dispatch(
            x,
            ids,
            buffer=over,
            layout=layout,
            quantize=quantize,
            topk_weights=weights if weighted else None,
        )
        out = jax_ep.low_latency_combine(
            y, weights if layout == "expert" else None, handle
        )
        return rows, who, out

    return harness.Program(body, over.comm)


def assert_rows(got, right, x, layout, what):
    """Rows that something came to are x's; the others may be anything."""
    used = low_latency_oracle.used_rows(right, layout)
    want = right.dispatch(x, layout, 0)
    assert got.shape == want.shape, what
    got = np.where(used.reshape(*used.shape, *[1] * (x.ndim - 2)), got, want)
    ranks = len(x)
    payloads.assert_same_rows(
        got.reshape(ranks, -1, *x.shape[2:]),
        want.reshape(ranks, -1, *x.shape[2:]),
        what,
        x,
    )


def check(backend, ids, experts, layout, *, hidden=HIDDEN, dtype="bfloat16", spare=3):
    """Runs a dispatch and a combine and compares them."""
    ranks, tokens, top_k = ids.shape
    dtype = jnp.dtype(dtype)
    over = buffer(backend, ranks, tokens + spare, experts, hidden, dtype.name)
    right = low_latency_oracle.oracle(ids, experts, tokens + spare)
    x = payloads.payload((ranks, tokens, hidden), dtype)
    weights = payloads.numbers((ranks, tokens, top_k), np.float32, seed=5)
    y = low_latency_oracle.numbers_of(right, layout, hidden, dtype)
    weighted = layout == "rank"
    rows, who, out = pair_program(over, layout, weighted)(ids, x, weights, y)
    assert_rows(rows, right, x, layout, f"{layout} rows")
    low_latency_oracle.assert_who(who, right, layout, weights if weighted else None)
    want = right.combine(y, weights, layout)
    if over.backend == "xla" and layout == "expert":
        # XLA may contract a product and a sum.
        np.testing.assert_allclose(
            out.astype(np.float32),
            want.astype(np.float32),
            rtol=2 * float(jnp.finfo(dtype).eps),
            atol=1e-2 if dtype.itemsize == 2 else 1e-3,
        )
    else:
        payloads.assert_same_sums(out, want, f"{layout} sums")


# A large T is what the other operations are for.
FEW_TOKENS = [case for case in cases.CASES if case.tokens <= 200]


@on_each_layout
@harness.on_each_combination_of(FEW_TOKENS)
def test_every_case(backend, case, ranks, layout):
    routing = case.routing(ranks)
    check(backend, routing.topk_idx, routing.num_experts, layout)


@on_each_layout
@harness.on_each_backend
@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [
        (1, "float32"),
        (7, "bfloat16"),
        (136, "float16"),
        (520, "float32"),
        (2880, "bfloat16"),
    ],
)
def test_row_sizes_and_dtypes(backend, hidden, dtype, layout):
    ranks = harness.few_ranks()
    ids = cases.holes(ranks, 9, 4, 4 * ranks).astype(np.int32)
    check(backend, ids, 4 * ranks, layout, hidden=hidden, dtype=dtype, spare=0)


@harness.on_each_backend
def test_long_rows_of_many_tokens(backend):
    """As many bytes as rows go in lines for, on GPUs, and in several chunks."""
    ids = cases.uniform(2, 33, 8, 16).astype(np.int32)
    for layout in LAYOUTS:
        check(backend, ids, 16, layout, hidden=7168)


def quantized(x):
    """What quantize_fp8 makes of [R, T, H]."""
    q, scales = jax.jit(jax_ep.quantize_fp8)(x)
    return np.asarray(q), np.asarray(scales)


@on_each_layout
@harness.on_each_backend
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("hidden", [136, 2880])
def test_fp8(backend, layout, hidden, dtype):
    ranks = harness.few_ranks()
    experts = 4 * ranks - 1
    ids = cases.holes(ranks, 7, 3, experts).astype(np.int32)
    over = buffer(backend, ranks, 10, experts, hidden, dtype)
    right = low_latency_oracle.oracle(ids, experts, 10)
    x = payloads.numbers((ranks, 7, hidden), jnp.dtype(dtype))
    # Whole blocks of zeros and of what has no scale.
    x[:, 1, :128] = 0
    x[:, 2, 3] = np.nan
    x[:, 3, hidden - 1] = np.inf
    y = low_latency_oracle.numbers_of(right, layout, hidden, jnp.dtype(dtype))
    weights = payloads.numbers(ids.shape, np.float32)
    program = pair_program(over, layout, quantize="fp8")
    (rows, scales), _, _ = program(ids, x, weights, y)
    want, want_scales = quantized(x)
    assert rows.dtype == want.dtype
    used = low_latency_oracle.used_rows(right, layout)
    got_scales = scales[used]
    want_scales = right.dispatch(want_scales, layout, 0)[used]
    got = rows[used].astype(np.float32)
    want = right.dispatch(want, layout, 0)[used].astype(np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    if backend != "cuda":
        np.testing.assert_array_equal(got_scales, want_scales)
        np.testing.assert_array_equal(got, want)
        return
    # XLA may divide as it likes: the last bit, and where it makes a tie.
    np.testing.assert_allclose(got_scales, want_scales, rtol=2e-7)
    step = np.maximum(np.abs(want) / 8, 2**-9)
    different = ~((got == want) | np.isnan(want))
    assert (np.abs(got - want) <= step)[different].all()
    assert different.mean() < 0.005


@harness.on_each_backend
def test_many_shapes_share_a_buffer(backend):
    """Several T and K in one program, whose order is theirs alone."""
    ranks = harness.few_ranks()
    comm, experts = harness.communicator(backend, ranks), 2 * ranks
    over = buffer(backend, ranks, 12, experts)
    shapes = [(12, 2), (1, 4), (7, 1), (12, 3), (5, 2)]
    ids = [
        cases.uniform_at(i)(ranks, *shape, experts).astype(np.int32)
        for i, shape in enumerate(shapes)
    ]
    x = [
        payloads.payload((ranks, tokens, HIDDEN), ml_dtypes.bfloat16, i)
        for i, (tokens, _) in enumerate(shapes)
    ]

    def body(comm, ids, x):
        results, after = [], None
        for i, (topk_idx, tokens) in enumerate(zip(ids, x)):
            rows, who, _ = jax_ep.low_latency_dispatch(
                tokens,
                topk_idx,
                buffer=over,
                layout=LAYOUTS[i % 2],
                after=after,
            )
            results.append((rows, who))
            after = who
        return results

    for i, (rows, who) in enumerate(harness.run(body, comm, ids, x)):
        right = low_latency_oracle.oracle(ids[i], experts, 12)
        assert_rows(rows, right, x[i], LAYOUTS[i % 2], f"shape {i}")
        low_latency_oracle.assert_who(who, right, LAYOUTS[i % 2])


@on_each_layout
@harness.on_each_backend
def test_handles_outlive_each_other(backend, layout):
    """Three dispatches, then their combines in another order, under scan."""
    ranks = harness.few_ranks()
    experts, tokens, steps = 2 * ranks, 6, 3
    over = buffer(backend, ranks, tokens, experts)
    ids = np.stack(
        [
            cases.uniform_at(i)(ranks, tokens, 2, experts).astype(np.int32)
            for i in range(3)
        ],
        axis=1,
    )
    x = cases.lattice(ranks, tokens, HIDDEN).astype(ml_dtypes.bfloat16)
    weights = np.full((ranks, tokens, 2), 0.5, np.float32)

    def body(comm, ids, x, weights):
        def step(x, _):
            sent, after = [], x
            for i in range(3):
                rows, _, handle = jax_ep.low_latency_dispatch(
                    x, ids[i], buffer=over, layout=layout, after=after
                )
                sent.append((rows, handle))
                after = rows
            outs = [x] * 3
            for i in (2, 0, 1):
                rows, handle = sent[i]
                outs[i] = after = jax_ep.low_latency_combine(
                    rows,
                    weights if layout == "expert" else None,
                    handle,
                    after=after,
                )
            return x, jnp.stack(outs)

        return jax.lax.scan(step, x, None, length=steps)[1]

    found = harness.run(body, over.comm, ids, x, weights)
    for i in range(3):
        right = low_latency_oracle.oracle(ids[:, i], experts, tokens)
        y = right.dispatch(x, layout, 0)
        want = right.combine(y, weights, layout)
        for step in range(steps):
            payloads.assert_same_rows(found[:, step, i], want, f"{i} in step {step}", x)


def run_exact_pairs(backend, layout, steps, idle):
    ranks = harness.few_ranks()
    over = buffer(backend, ranks, 8, 3 * ranks, 1040)
    x, weights = low_latency_steps.inputs(ranks, 8, 1040)
    delays = (cases.mix(9, *cases.grid(ranks, 16)) % np.uint64(40)).astype(np.int32)
    zero = np.zeros((ranks,), np.int32)

    def body(comm, x, weights, delays, zero):
        def delay(sent, step):
            return harness.delayed(sent, delays[step % len(delays)], zero)

        return low_latency_steps.chained(
            over,
            layout,
            steps,
            x,
            weights,
            idle=idle,
            **({"delay": delay} if idle else {}),
        )

    wrong = harness.run(body, over.comm, x, weights, delays, zero)
    assert not wrong.any(), f"wrong rows by rank: {wrong.tolist()}"


@on_each_layout
@harness.on_each_backend
def test_pairs_back_to_back(backend, layout):
    run_exact_pairs(backend, layout, 400 if backend != "xla" else 20, idle=False)


@on_each_layout
@harness.on_each_backend
def test_idle_ranks_and_random_delays(backend, layout):
    run_exact_pairs(backend, layout, 200 if backend != "xla" else 20, idle=True)


@harness.on_each_backend
def test_vmap_is_one_call_after_the_other(backend):
    ranks = harness.few_ranks()
    experts = 2 * ranks
    over = buffer(backend, ranks, 5, experts)
    ids = np.stack(
        [cases.uniform_at(i)(ranks, 5, 2, experts) for i in range(3)], axis=1
    ).astype(np.int32)
    x = payloads.numbers((ranks, 3, 5, HIDDEN), ml_dtypes.bfloat16)

    def body(comm, ids, x):
        def one(x, ids):
            rows, who, handle = jax_ep.low_latency_dispatch(
                x, ids, buffer=over, layout="rank"
            )
            return rows, who, jax_ep.low_latency_combine(rows, None, handle)

        return jax.vmap(one)(x, ids)

    rows, who, _ = harness.run(body, over.comm, ids, x)
    for i in range(3):
        right = low_latency_oracle.oracle(ids[:, i], experts, 5)
        assert_rows(rows[:, i], right, x[:, i], "rank", f"element {i}")
        low_latency_oracle.assert_who(who[:, i], right, "rank")


# T, max_tokens and E of a model's size, H = 7168.
#  - 40 of 41: the lanes of a warp that have ids to wait for stop in the middle of a
#    line.
#  - 3 of 8, and 37 of 64: a warp counts ids of several ranks at a time.
MODEL_SIZES = [
    pytest.param(1, 256, 256, None, False, id="1"),
    pytest.param(128, 256, 256, None, False, id="128"),
    pytest.param(256, 256, 256, None, False, id="256"),
    pytest.param(40, 41, 6, None, False, id="40"),
    *(
        pytest.param(*sizes, quantize, True, id=f"{sizes[0]}_{quantize or 'bf16'}")
        for sizes in ((3, 8, 16), (37, 64, 256))
        for quantize in (None, "fp8")
    ),
]


@pytest.mark.gpu(count=2)
@on_each_layout
@pytest.mark.parametrize(
    ("tokens", "max_tokens", "experts", "quantize", "idle"), MODEL_SIZES
)
def test_pairs_of_a_models_size(layout, tokens, max_tokens, experts, quantize, idle):
    """https://github.com/deepseek-ai/DeepEP/issues/700: 400 pairs, every row.

    With `idle` all ranks but one have no tokens in every other pair.
    """
    ranks = harness.most_ranks()
    over = buffer("cuda", ranks, max_tokens, experts, 7168)
    x, weights = low_latency_steps.inputs(ranks, tokens, 7168)

    def body(comm, x, weights):
        return low_latency_steps.chained(
            over, layout, 400, x, weights, idle=idle, quantize=quantize
        )

    wrong = harness.run(body, over.comm, x, weights)
    assert not wrong.any(), f"wrong rows by rank: {wrong.tolist()}"


@on_each_layout
@harness.on_each_backend
@pytest.mark.parametrize("idle", [False, True], ids=["all_send", "one_is_idle"])
@pytest.mark.parametrize(
    ("tokens", "max_tokens", "experts"),
    [(3, 8, 16), (37, 64, 256 if harness.ON_GPU else 32)],
    ids=["3", "37"],
)
def test_fp8_bit_for_bit(backend, tokens, max_tokens, experts, idle, layout):
    """Of rows that FP8 holds without an error, at a model's width."""
    ranks = harness.most_ranks() if backend == "cuda" else min(2, harness.most_ranks())
    over = buffer(backend, ranks, max_tokens, experts, 7168)
    ids = cases.uniform(ranks, tokens, 8, experts).astype(np.int32)
    if idle:
        ids[ranks - 1] = -1
    right = low_latency_oracle.oracle(ids, experts, max_tokens)
    bits = payloads.payload((ranks, tokens, 7168), np.uint8)
    x, q, scales = low_latency_steps.in_fp8(bits)
    # Of each received row, who sent it: compared there, because they are many.
    number = np.arange(ranks * tokens, dtype=np.int32).reshape(ranks, tokens)
    sender = right.dispatch(number, layout, -1)
    everybody = [
        np.broadcast_to(
            a.reshape(1, -1, a.shape[-1]), (ranks, number.size, a.shape[-1])
        )
        for a in (q.view(np.uint8), scales)
    ]

    def body(comm, ids, x, sender, everybody):
        rows, who, _ = jax_ep.low_latency_dispatch(
            x, ids, buffer=over, layout=layout, quantize="fp8"
        )
        rows = jax.lax.bitcast_convert_type(rows[0], jnp.uint8), rows[1]
        wrong = [
            (got != sent[sender]).any(-1) & (sender >= 0)
            for got, sent in zip(rows, everybody, strict=True)
        ]
        return [w.sum(dtype=jnp.int32) for w in wrong], who

    wrong, who = harness.run(body, over.comm, ids, x, sender, everybody)
    assert not np.any(wrong), f"rows and scales that are wrong by rank: {wrong}"
    low_latency_oracle.assert_who(who, right, layout)


# Sizes and errors ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_tokens", "hidden", "ranks"),
    [(2048, 5120, 16), (1840, 5120, 16), (128, 7168, 8), (1, 1, 1), (512, 2880, 64)],
)
def test_bytes(max_tokens, hidden, ranks):
    units = -(-hidden // 16) * 2
    chunks = (units + 95) // 96
    token = 2 * 2048 * chunks + 3 * 32 * 8
    found = jax_ep.LowLatencyBuffer.bytes_for(
        num_ranks=ranks, max_tokens=max_tokens, hidden=hidden
    )
    assert found == 4096 + 2 * ranks * max_tokens * token


def test_bytes_are_counted_in_64_bits():
    """Of the sizes at which others' buffers passed 32 GiB."""
    found = [
        jax_ep.LowLatencyBuffer.bytes_for(num_ranks=16, max_tokens=tokens, hidden=5120)
        for tokens in (2048, 1840)
    ]
    assert found == [1929383936, 1733431296]
    assert (
        jax_ep.LowLatencyBuffer.bytes_for(
            num_ranks=64, max_tokens=8192, hidden=7168, dtype=jnp.float32
        )
        > 2**36
    )


def test_the_largest_max_tokens_is_named():
    comm = harness.communicator(harness.BACKENDS[0], 2)
    with pytest.raises(ValueError, match="at most 16777215 fit"):
        jax_ep.LowLatencyBuffer(comm, max_tokens=1 << 24, hidden=8, num_experts=128)


def call(*, layout="expert", tokens=4, top_k=2, into=None, **changed):
    """Traces a dispatch and a combine with some arguments changed."""
    over = into or buffer(harness.BACKENDS[0], 2, 4, 8)
    options = {"buffer": over, "layout": layout}
    options |= {k: changed.pop(k) for k in ("quantize", "topk_weights") if k in changed}
    x = changed.pop("x", jnp.zeros((tokens, HIDDEN), jnp.bfloat16))
    ids = changed.pop("ids", jnp.zeros((tokens, top_k), jnp.int32))
    if "buffer" in changed:
        options["buffer"] = changed.pop("buffer")

    def body(comm):
        rows, _, handle = jax_ep.low_latency_dispatch(x, ids, **options)
        weights = jnp.ones(ids.shape) if layout == "expert" else None
        return jax_ep.low_latency_combine(
            changed.get("y", rows),
            changed.get("weights", weights),
            changed.get("handle", handle),
        )

    comm = harness.communicator(harness.BACKENDS[0], 2)
    shard = jax.shard_map(
        lambda: body(comm)[None],
        mesh=comm.mesh,
        in_specs=(),
        out_specs=jax.sharding.PartitionSpec("ep"),
        check_vma=False,
    )
    return jax.eval_shape(shard)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": np.zeros((4, HIDDEN), np.float32)}, ValueError, "x must be bfloat16"),
        (
            {"x": np.zeros((4, 8), "bfloat16")},
            ValueError,
            r"x must be bfloat16\[T, 136",
        ),
        ({"tokens": 5}, ValueError, "at most the buffer's max_tokens 4, found 5"),
        ({"ids": np.zeros((4, 2), np.float32)}, TypeError, "an integer dtype"),
        ({"ids": np.zeros((3, 2), np.int32)}, ValueError, "T = 4 as in x"),
        ({"ids": np.zeros((4, 33), np.int32)}, ValueError, "1 <= K <= 32"),
        ({"quantize": "fp4"}, ValueError, "None or 'fp8', found 'fp4'"),
        ({"layout": "row"}, ValueError, "'expert' or 'rank', found 'row'"),
        ({"topk_weights": np.ones((4, 2))}, ValueError, "'rank' alone"),
        (
            {"layout": "rank", "topk_weights": np.ones((4, 2), int)},
            TypeError,
            "topk_weights must be floating",
        ),
        (
            {"layout": "rank", "topk_weights": np.ones((4, 3), np.float32)},
            ValueError,
            r"\[T, K\] = \[4, 2\]",
        ),
        ({"buffer": 3}, TypeError, "must be a jax_ep.LowLatencyBuffer, found int"),
        ({"handle": 3}, TypeError, "what low_latency_dispatch returned, found int"),
        ({"weights": None}, ValueError, "'expert' needs topk_weights"),
        (
            {"layout": "rank", "weights": np.ones((4, 2), np.float32)},
            ValueError,
            "topk_weights must be None",
        ),
        (
            {"y": np.zeros((4, 8, 3), "bfloat16")},
            ValueError,
            r"y must be bfloat16\[4, 8",
        ),
    ],
)
def test_bad_arguments(changed, error, message):
    with pytest.raises(error, match=message):
        call(**changed)


def test_good_arguments():
    assert call().shape == (2, 4, HIDDEN)
    assert call(layout="rank", quantize=None).shape == (2, 4, HIDDEN)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"comm": 3}, TypeError, "comm must be a jax_ep.Communicator, found int"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be >= 1, found 0"),
        ({"hidden": 1.5}, TypeError, "hidden must be a Python integer, found float"),
        ({"num_experts": 0}, ValueError, "num_experts must be >= 1, found 0"),
        (
            {"dtype": "float64"},
            TypeError,
            "dtype must be bfloat16, float16 or float32",
        ),
    ],
)
def test_bad_buffers(changed, error, message):
    good = {
        "comm": harness.communicator(harness.BACKENDS[0], 2),
        "max_tokens": 4,
        "hidden": 8,
        "num_experts": 4,
    }
    options = good | changed
    with pytest.raises(error, match=message):
        jax_ep.LowLatencyBuffer(options.pop("comm"), **options)


def test_too_many_ranks():
    mesh = jax.sharding.Mesh(np.array([jax.devices()[0]] * 65), ("ep",))
    with (
        jax_ep.Communicator(mesh, "ep", backend="xla") as comm,
        pytest.raises(ValueError, match="must have at most 64 ranks, found 65"),
    ):
        jax_ep.LowLatencyBuffer(comm, max_tokens=4, hidden=8, num_experts=65)


def test_too_many_experts_to_count():
    over = buffer(
        "xla" if "xla" in harness.BACKENDS else harness.BACKENDS[0], 2, 4, 5000
    )
    if over.comm is not harness.communicator(harness.BACKENDS[0], 2):
        over = buffer(harness.BACKENDS[0], 2, 4, 5000)
    with pytest.raises(ValueError, match="at most 4096 experts, found 5000"):
        call(into=over)
    assert call(into=over, layout="rank").shape == (2, 4, HIDDEN)


def test_closed_buffers():
    comm = harness.communicator(harness.BACKENDS[0], 2)
    with jax_ep.LowLatencyBuffer(
        comm, max_tokens=4, hidden=HIDDEN, num_experts=8
    ) as over:
        assert not over.closed
    over.close()
    assert "closed" in repr(over)
    with pytest.raises(RuntimeError, match="the buffer is closed"):
        call(into=over)


def shaped(over, shape, dtype):
    spec = jax.sharding.PartitionSpec("ep")
    sharding = jax.sharding.NamedSharding(over.mesh, spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_no_derivative(op):
    over = buffer(harness.BACKENDS[0], 2, 4, 8)

    def loss(x, comm):
        ids = jnp.zeros((4, 2), jnp.int32)
        held = x if op == "dispatch" else jax.lax.stop_gradient(x)
        rows, _, handle = jax_ep.low_latency_dispatch(held, ids, buffer=over)
        if op == "combine":
            rows = rows * x[0, 0]
        out = jax_ep.low_latency_combine(rows, jnp.ones((4, 2)), handle)
        return out.astype(jnp.float32).sum()

    def shard(x):
        return jax.grad(loss)(x[0], over.comm)[None]

    mapped = jax.shard_map(
        shard,
        mesh=over.mesh,
        in_specs=jax.sharding.PartitionSpec("ep"),
        out_specs=jax.sharding.PartitionSpec("ep"),
    )
    x = shaped(over, (2, 4, HIDDEN), jnp.bfloat16)
    message = f"low_latency_{op}: it has no derivative; use make_plan and jax_ep.{op}"
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(mapped, x)


def test_nothing_to_differentiate():
    """Inside a function that is differentiated by something else."""
    over = buffer(harness.BACKENDS[0], 2, 4, 8)

    def shard(x, scale):
        def loss(scale):
            ids = jnp.zeros((4, 2), jnp.int32)
            rows, _, handle = jax_ep.low_latency_dispatch(x[0], ids, buffer=over)
            out = jax_ep.low_latency_combine(rows, jnp.ones((4, 2)), handle)
            return (out.astype(jnp.float32) * scale).sum()

        return jax.grad(loss)(scale[0])[None]

    spec = jax.sharding.PartitionSpec("ep")
    mapped = jax.shard_map(shard, mesh=over.mesh, in_specs=spec, out_specs=spec)
    x = shaped(over, (2, 4, HIDDEN), jnp.bfloat16)
    scale = shaped(over, (2,), jnp.float32)
    assert jax.eval_shape(mapped, x, scale).shape == (2,)
