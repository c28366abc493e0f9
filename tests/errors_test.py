"""Every bad input with its literal message."""

from __future__ import annotations

import functools
import json
import pathlib
import re
import sys

import bad_input
import harness
import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest
from bad_input import (
    CAPACITY,
    EXPERTS,
    HIDDEN,
    NATIVE,
    RANKS,
    TOKENS,
    TOP_K,
    arguments,
    assert_raises,
    dispatch_and_combine,
    plan_of,
    trace,
)
from jax.sharding import Mesh
from processes import run_script

import jax_ep
from jax_ep._data import native

# S of plan_of, in the worst case.
EXPERT_ROWS = min(CAPACITY, RANKS * TOKENS) * TOP_K
MODULE = {"cuda": "_cuda", "cpu": "_host"}[NATIVE]


class TestCommunicator:
    @pytest.mark.parametrize(
        ("kwargs", "error", "message"),
        (
            (
                {"mesh": (1, 2)},
                TypeError,
                "mesh must be a jax.sharding.Mesh, found tuple",
            ),
            (
                {"axis_name": "model"},
                ValueError,
                "axis_name must be one of the mesh's axes ('ep',), or a tuple of "
                "different ones, found 'model'",
            ),
            (
                {"backend": "nccl"},
                ValueError,
                "backend must be one of ('cuda', 'cpu', 'xla') or None, found 'nccl'",
            ),
            (
                {"num_sms": 0},
                ValueError,
                "num_sms must be an integer >= 1 or None, found 0",
            ),
            (
                {"num_sms": 2.5},
                ValueError,
                "num_sms must be an integer >= 1 or None, found 2.5",
            ),
            (
                {"num_channels": 0},
                ValueError,
                "num_channels must be an integer >= 1 or None, found 0",
            ),
            (
                {"staging_bytes": None},
                ValueError,
                "staging_bytes must be an integer >= 1, found None",
            ),
            (
                {"timeout_s": 0},
                ValueError,
                "timeout_s must be seconds above 0 and below 1e6, found 0",
            ),
            (
                {"timeout_s": "1"},
                ValueError,
                "timeout_s must be seconds above 0 and below 1e6, found '1'",
            ),
            (
                {"setup_timeout_s": -2.5},
                ValueError,
                "setup_timeout_s must be seconds above 0 and below 1e6, found -2.5",
            ),
        ),
        ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
    )
    def test_bad_argument(self, kwargs, error, message):
        kwargs = {"mesh": layers.mesh({"ep": RANKS}), "axis_name": "ep"} | kwargs
        message = f"jax_ep.Communicator: {message}"
        assert_raises(error, message, jax_ep.Communicator, **kwargs)

    def test_backend_of_another_platform(self):
        other, here, needed = (
            ("cpu", "gpu", "cpu") if harness.ON_GPU else ("cuda", "cpu", "gpu")
        )
        assert_raises(
            RuntimeError,
            f"jax_ep.Communicator: backend {other!r} needs a mesh of {needed} "
            f"devices, found [{here!r}]",
            jax_ep.Communicator,
            layers.mesh({"ep": RANKS}),
            "ep",
            backend=other,
        )

    def test_too_many_ranks(self):
        mesh = Mesh(np.array([jax.devices()[0]] * 97), ("ep",))
        assert_raises(
            ValueError,
            "jax_ep.Communicator: axis 'ep' must have at most 96 devices, found 97",
            jax_ep.Communicator,
            mesh,
            "ep",
        )

    @pytest.mark.parametrize("backend", (None, NATIVE))
    def test_mesh_of_other_processes(self, backend, monkeypatch):
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        assert_raises(
            ValueError,
            "jax_ep.Communicator: process 1 has no device on the mesh, only "
            "processes [0] have",
            jax_ep.Communicator,
            layers.mesh({"ep": RANKS}),
            "ep",
            backend=backend,
        )


class TestFallback:
    """backend=None without a native module that works: plain JAX, and why."""

    def check(self, reason):
        mesh = layers.mesh({"ep": RANKS})
        with pytest.warns(UserWarning) as caught:
            comm = jax_ep.Communicator(mesh, "ep")
        (text,) = {str(warning.message) for warning in caught}
        assert text.startswith(
            "jax_ep.Communicator: falling back to backend 'xla', which is slow: "
        )
        assert reason in text
        assert comm.backend == "xla"
        body = functools.partial(dispatch_and_combine, comm=comm)
        rows, sums = jax.jit(layers.sharded(body, mesh))(*arguments())
        # All to expert 0, which has room for so many.
        received = min(CAPACITY, RANKS * TOKENS)
        assert np.asarray(rows).sum() == received * HIDDEN
        assert np.asarray(sums).sum() == received * HIDDEN
        comm.close()

    def test_not_built(self, monkeypatch):
        monkeypatch.setattr(native, "_load", native._load.__wrapped__)
        monkeypatch.setitem(sys.modules, f"jax_ep.{MODULE}", None)
        self.check(f"the native module {MODULE} was not built; install jax_ep again")
        named = layers.mesh({"ep": RANKS}), "ep"
        with pytest.raises(RuntimeError, match="cannot work here: jax_ep: the native"):
            jax_ep.Communicator(*named, backend=NATIVE)

    def test_built_for_a_newer_jax(self, monkeypatch):
        monkeypatch.setattr(native, "_load", native._load.__wrapped__)
        monkeypatch.setattr(native, "installed_ffi_version", lambda: (0, 1))
        self.check(f"{MODULE} was built with XLA FFI 0.")


class TestMakePlan:
    @pytest.mark.parametrize(
        ("change", "error", "message"),
        (
            (
                lambda idx: idx.astype(jnp.float32),
                TypeError,
                "topk_idx must have an integer dtype, found float32",
            ),
            (
                lambda idx: idx.astype(bool),
                TypeError,
                "topk_idx must have an integer dtype, found bool",
            ),
            (
                lambda idx: idx[:, 0],
                ValueError,
                f"topk_idx must be [T, K] with 1 <= K <= 32, found shape ({TOKENS},)",
            ),
            (
                lambda idx: idx[..., None],
                ValueError,
                "topk_idx must be [T, K] with 1 <= K <= 32, found shape "
                f"({TOKENS}, {TOP_K}, 1)",
            ),
            (
                lambda idx: idx[:, :0],
                ValueError,
                f"topk_idx must be [T, K] with 1 <= K <= 32, found shape ({TOKENS}, 0)",
            ),
            (
                lambda idx: jnp.tile(idx, 11),
                ValueError,
                "topk_idx must be [T, K] with 1 <= K <= 32, found shape "
                f"({TOKENS}, 33)",
            ),
        ),
        ids=("float", "bool", "one_axis", "three_axes", "no_choice", "33_choices"),
    )
    def test_bad_topk_idx(self, change, error, message):
        def body(x, topk_idx, rows):
            return plan_of(change(topk_idx)).recv_src

        assert_raises(error, f"jax_ep.make_plan: {message}", trace, body)

    @pytest.mark.parametrize(
        ("kwargs", "error", "message"),
        (
            ({"num_experts": 0}, ValueError, "num_experts must be >= 1, found 0"),
            ({"num_experts": -3}, ValueError, "num_experts must be >= 1, found -3"),
            (
                {"num_experts": 8.0},
                TypeError,
                "num_experts must be a Python integer, found float",
            ),
            (
                {"num_experts": True},
                TypeError,
                "num_experts must be a Python integer, found bool",
            ),
            (
                {"num_experts": 2**16 + 1},
                ValueError,
                "num_experts must be <= 65536, found 65537",
            ),
            ({"capacity": 0}, ValueError, "capacity must be >= 1, found 0"),
            ({"capacity": -1}, ValueError, "capacity must be >= 1, found -1"),
            (
                {"capacity": 1.5},
                TypeError,
                "capacity must be a Python integer, found float",
            ),
            (
                {"capacity": 2**31},
                ValueError,
                "capacity and R * T must be below 2**31, found capacity "
                f"2147483648 and R * T = {RANKS * TOKENS}",
            ),
            (
                {"expert_alignment": 0},
                ValueError,
                "expert_alignment must be >= 1, found 0",
            ),
            (
                {"expert_alignment": 2**17},
                ValueError,
                "expert_alignment must be <= 65536, found 131072",
            ),
            (
                {"expert_alignment": "8"},
                TypeError,
                "expert_alignment must be a Python integer, found str",
            ),
            (
                {"comm": "ep"},
                TypeError,
                "comm must be a jax_ep.Communicator, found str",
            ),
        ),
        ids=lambda value: (
            "_".join(f"{k}={v}" for k, v in value.items())
            if isinstance(value, dict)
            else ""
        ),
    )
    def test_bad_argument(self, kwargs, error, message):
        def body(x, topk_idx, rows):
            return plan_of(topk_idx, **kwargs).recv_src

        assert_raises(error, f"jax_ep.make_plan: {message}", trace, body)

    def test_numpy_integers_are_integers(self):
        def body(x, topk_idx, rows):
            plan = plan_of(
                topk_idx,
                num_experts=np.int64(EXPERTS),
                capacity=np.array(7, np.int32),
                expert_alignment=np.uint8(2),
                expert_capacity=np.uint16(4),
                node_capacity=np.int8(3),
            )
            for name in ("num_experts", "capacity", "expert_alignment"):
                assert type(getattr(plan, name)) is int, name
            assert type(plan.expert_capacity) is type(plan.node_capacity) is int
            return plan.recv_src

        assert trace(body).shape == (RANKS * 7,)

    @pytest.mark.parametrize(
        ("size", "found"),
        ((np.True_, "bool"), (np.array([8]), "ndarray"), (np.float32(8), "float32")),
    )
    def test_what_is_no_integer(self, size, found):
        def body(x, topk_idx, rows):
            return plan_of(topk_idx, num_experts=size).recv_src

        message = "num_experts must be a Python integer, found "
        with pytest.raises(TypeError, match=f"{message}.*{found}"):
            trace(body)

    @pytest.mark.parametrize(
        "name",
        (
            "num_experts",
            "capacity",
            "capacity_factor",
            "expert_alignment",
            "expert_capacity",
            "node_capacity",
        ),
    )
    @pytest.mark.parametrize("op", ("make_plan", "plan_dispatch", "moe"))
    def test_traced_size(self, op, name):
        def body(x, topk_idx, rows):
            sizes = {"num_experts": EXPERTS, name: topk_idx[0, 0]}
            call = {
                "make_plan": lambda **sizes: plan_of(topk_idx, **sizes).recv_src,
                "plan_dispatch": functools.partial(jax_ep.plan_dispatch, x, topk_idx),
                "moe": functools.partial(
                    *(jax_ep.moe, x, topk_idx, jnp.ones(topk_idx.shape)),
                    lambda rows, _: rows,
                ),
            }
            return call[op](comm=bad_input.comm(), **sizes)

        message = (
            f"jax_ep.make_plan: {name} is static, found a traced int32[]; give a "
            "number that is known while JAX traces: one that the function closes "
            "over, or an argument that jax.jit(..., static_argnames=...) names"
        )
        assert_raises(TypeError, message, trace, body)


class TestLeaves:
    @pytest.mark.parametrize(
        ("leaf", "found"),
        (
            (lambda x: x[:-1], f"float32[{TOKENS - 1},{HIDDEN}]"),
            (lambda x: x[0, 0], "float32[]"),
            (lambda x: {"ok": x, "bad": x[:1, 0]}, "float32[1] at ['bad']"),
            (lambda x: (x, [x, x[1:]]), f"float32[{TOKENS - 1},{HIDDEN}] at [1][1]"),
            (lambda x: 3, "int32[]"),
        ),
        ids=("too_short", "scalar", "in_a_tree", "deep", "number"),
    )
    def test_dispatch_of_wrong_size(self, leaf, found):
        def body(x, topk_idx, rows):
            return jax_ep.dispatch(leaf(x), plan_of(topk_idx))

        message = (
            f"jax_ep.dispatch: leaves must be [T, ...] with T = {TOKENS} as in "
            f"the plan, found {found}"
        )
        assert_raises(ValueError, message, trace, body)

    @pytest.mark.parametrize(
        ("leaf", "found"),
        (
            (lambda x, rows: rows[:-1], f"float32[{CAPACITY - 1},{HIDDEN}]"),
            (lambda x, rows: x, f"float32[{TOKENS},{HIDDEN}]"),
            (lambda x, rows: [rows, rows[0, 0]], "float32[] at [1]"),
        ),
        ids=("too_short", "tokens", "in_a_tree"),
    )
    def test_combine_of_wrong_size(self, leaf, found):
        def body(x, topk_idx, rows):
            return jax_ep.combine(leaf(x, rows), plan_of(topk_idx))

        message = (
            f"jax_ep.combine: leaves must be [C, ...] with C = {CAPACITY} as in "
            f"the plan, found {found}"
        )
        assert_raises(ValueError, message, trace, body)

    @pytest.mark.parametrize(
        "dtype", ("int32", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "int4")
    )
    def test_combine_of_what_has_no_sum(self, dtype):
        def body(x, topk_idx, rows):
            return jax_ep.combine([rows, rows.astype(dtype)], plan_of(topk_idx))

        message = (
            "jax_ep.combine: leaves must be bfloat16, float16, float32, float64 "
            f"or complex, found {dtype}[{CAPACITY},{HIDDEN}] at [1]"
        )
        assert_raises(TypeError, message, trace, body)

    @pytest.mark.parametrize("dtype", ("float8_e4m3fn", "float8_e5m2"))
    def test_gradient_of_float8_rows(self, dtype):
        """combine would have to sum them."""

        def body(x, topk_idx, rows):
            plan = plan_of(topk_idx)

            def loss(x):
                rows = jax_ep.dispatch({"x": x.astype(dtype), "y": x}, plan)
                return sum(leaf.astype(jnp.float32).sum() for leaf in rows.values())

            return jax.grad(loss)(x)

        message = (
            f"jax_ep.dispatch: a leaf of dtype {dtype} has no gradient: combine "
            "cannot sum it; dispatch a wider dtype, or say with jax.custom_vjp "
            "what the gradient is"
        )
        assert_raises(TypeError, message, trace, body)

    @pytest.mark.parametrize(
        ("call", "message"),
        (
            (
                lambda x, ids, rows, plan: jax_ep.permute({"a": {"b": x}}, plan),
                f"permute: leaves must be [C, ...] with C = {CAPACITY} as in the plan, "
                f"found float32[{TOKENS},{HIDDEN}] at ['a']['b']",
            ),
            (
                lambda x, ids, rows, plan: jax_ep.unpermute((rows, rows), plan),
                f"unpermute: leaves must be [S, ...] with S = {EXPERT_ROWS} as in "
                f"the plan, found float32[{CAPACITY},{HIDDEN}] at [0]",
            ),
            (
                lambda x, ids, rows, plan: jax_ep.unpermute(
                    {"z": jnp.zeros((EXPERT_ROWS, 2), complex)},
                    plan,
                    jnp.ones((CAPACITY, TOP_K)),
                ),
                "unpermute: weights apply to real leaves, found "
                f"complex64[{EXPERT_ROWS},2] at ['z']",
            ),
            (
                lambda x, ids, rows, plan: jax_ep.combine_start([rows > 0], plan),
                "combine_start: leaves must be bfloat16, float16, float32, float64 or "
                f"complex, found bool[{CAPACITY},{HIDDEN}] at [0]",
            ),
            (
                lambda x, ids, rows, plan: jax_ep.dispatch_start([x, "b"], plan),
                "dispatch_start: leaves must be arrays, found str at [1]",
            ),
            (
                lambda x, ids, rows, plan: jax_ep.moe_with_plan(
                    {"a": x, "b": rows}, jnp.ones(ids.shape), lambda y, _: y, plan
                ),
                f"dispatch: leaves must be [T, ...] with T = {TOKENS} as in the plan, "
                f"found float32[{CAPACITY},{HIDDEN}] at ['b']",
            ),
            (
                lambda x, ids, rows, plan: jax_ep.moe_with_plan(
                    x, jnp.ones(ids.shape), lambda y, _: {"y": y > 0}, plan
                ),
                "unpermute: leaves must be bfloat16, float16, float32, float64 or "
                f"complex, found bool[{EXPERT_ROWS},{HIDDEN}] at ['y']",
            ),
            (
                lambda x, ids, rows, plan: jax_ep.plan_dispatch(
                    [x, rows], ids, comm=plan.comm, num_experts=EXPERTS
                ),
                f"dispatch: leaves must be [T, ...] with T = {TOKENS} as in the plan, "
                f"found float32[{CAPACITY},{HIDDEN}] at [1]",
            ),
            (
                lambda x, ids, rows, plan: jax_ep.dispatch_fp8(rows, plan),
                f"dispatch: leaves must be [T, ...] with T = {TOKENS} as in the plan, "
                f"found float32[{CAPACITY},{HIDDEN}]",
            ),
        ),
        ids=lambda value: "",
    )
    def test_which_leaf(self, call, message):
        def body(x, topk_idx, rows):
            return call(x, topk_idx, rows, plan_of(topk_idx))

        assert_raises(
            ValueError if "with" in message else TypeError,
            f"jax_ep.{message}",
            trace,
            body,
        )

    @pytest.mark.parametrize("op", ("dispatch", "combine"))
    def test_typed_keys(self, op):
        rows = TOKENS if op == "dispatch" else CAPACITY

        def body(x, topk_idx, _):
            keys = jax.random.split(jax.random.key(0), rows)
            return jax.random.key_data(getattr(jax_ep, op)(keys, plan_of(topk_idx)))

        message = (
            f"jax_ep.{op}: typed key arrays cannot travel, found key<fry>[{rows}]; "
            "pass jax.random.key_data(keys) and wrap the result again"
        )
        assert_raises(TypeError, message, trace, body)

    @pytest.mark.parametrize("op", ("dispatch", "combine"))
    def test_no_plan(self, op):
        def body(x, topk_idx, rows):
            return getattr(jax_ep, op)(x, topk_idx)

        message = f"jax_ep.{op}: plan must be a jax_ep.Plan, found "
        with pytest.raises(TypeError) as info:
            trace(body)
        # The rest names a class of JAX's tracers.
        assert str(info.value).startswith(message)


class TestClosed:
    @pytest.mark.parametrize("op", ("make_plan", "dispatch", "combine"))
    def test_closed_communicator(self, op):
        comm = jax_ep.Communicator(layers.mesh({"ep": RANKS}), "ep", backend=NATIVE)

        def body(x, topk_idx, rows):
            if op == "make_plan":
                comm.close()
            plan = plan_of(topk_idx, comm=comm)
            comm.close()
            return getattr(jax_ep, op)(x if op == "dispatch" else rows, plan)

        message = (
            f"jax_ep.{op}: the communicator is closed; create a new one "
            "(executables compiled before close() keep working)"
        )
        assert_raises(RuntimeError, message, trace, body)

    def test_closed_before_it_is_compiled(self):
        """Traced with an open communicator, compiled with a closed one."""
        mesh = layers.mesh({"ep": RANKS})
        comm = jax_ep.Communicator(mesh, "ep", backend=NATIVE)
        f = layers.sharded(functools.partial(dispatch_and_combine, comm=comm), mesh)
        lowered = jax.jit(f).lower(*arguments())
        identity = comm.id
        comm.close()
        with pytest.raises((RuntimeError, jax.errors.JaxRuntimeError)) as info:
            jax.block_until_ready(lowered.compile()(*arguments()))
        assert re.search(
            rf"jax_ep: communicator {identity} is closed or was not set up for "
            r"platform \w+; an executable has to be compiled while its "
            "communicator is open",
            str(info.value),
        )


# A rank that never calls. In a process of its own: an error while a program
# runs must not reach the other tests.


@pytest.mark.skipif(
    harness.ON_GPU, reason="a missing rank ends the CUDA context: tested apart"
)
def test_missing_rank():
    program = pathlib.Path(__file__).with_name("missing_rank_program.py")
    done = run_script(program)
    assert done.returncode == 0, done.stderr
    messages = json.loads(done.stdout.splitlines()[-1])
    assert messages.pop("patient") == [""] * 4
    # Once a wait, while it lasts.
    (channel,) = re.findall(
        r"^jax_ep dispatch \(channel (\d+)\): ranks 0, 1, 2 have waited 1\.0 s and "
        r"will wait 60\.0 s in all; missing ranks: 3$",
        done.stderr,
        re.MULTILINE,
    )
    assert done.stderr.count(f"dispatch (channel {channel}): rank") == 1, done.stderr
    *others, late = messages.pop("late")
    assert re.search(
        r"jax_ep dispatch \(channel \d+\): rank 3 came after its peers had given up: "
        r"waiting ranks: 0, 1, 2, for 0\.5 s; it came \d+\.\d s later",
        late,
    )
    for rank, other in enumerate(others):
        assert f"rank {rank} waited 0.5 s; missing ranks: 3" in other
    expected = {
        "plan": ("1|2|3", "0"),
        "dispatch": ("0|1|3", "2"),
        "combine": ("0|2", "1, 3"),
    }
    assert messages.keys() == expected.keys()
    for op, (waiting, missing) in expected.items():
        pattern = (
            rf"jax_ep {op} \(channel \d+\): rank ({waiting}) waited 0\.5 s; "
            rf"missing ranks: {missing}\b"
        )
        assert re.search(pattern, messages[op]), messages[op]
