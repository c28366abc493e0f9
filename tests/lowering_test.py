"""What the operations become in StableHLO and HLO, for the CPU and for CUDA.

The CUDA lowering needs no GPU: only compiling it would.
"""

from __future__ import annotations

import concurrent.futures
import re
import sys

import jax

if __name__ == "__main__":  # what conftest.py does for pytest
    jax.config.update("jax_platforms", sys.argv[1])
    jax.config.update("jax_num_cpu_devices", 8)

import harness
import jax.numpy as jnp
import layers
import pytest
from jax import lax
from processes import run_script

import jax_ep

RANKS = min(4, jax.device_count())
TOKENS, TOP_K, HIDDEN, EXPERTS = 6, 3, 5, 2 * RANKS + 1
NATIVE = harness.BACKENDS[0]
# What a native program has no use for.
COLLECTIVES = (
    "all[-_]gather",
    "all[-_]reduce",
    "all[-_]to[-_]all",
    "reduce[-_]scatter",
    "collective[-_]permute",
    "collective[-_]broadcast",
    r"\bsend\b",
    r"\brecv\b",
)

platforms = pytest.mark.parametrize("lowered_for", ("cpu", "cuda"))


def shapes(tokens=TOKENS):
    return (
        jax.ShapeDtypeStruct((RANKS * tokens, HIDDEN), jnp.float32),
        jax.ShapeDtypeStruct((RANKS * tokens, TOP_K), jnp.int32),
    )


def program(backend=NATIVE, check_vma=True, wrap=lambda body: body):
    """A jitted round trip, `wrap` around its body of (x, topk_idx)."""
    mesh = layers.mesh({"ep": RANKS})
    comm = layers.communicator(mesh, "ep", backend)

    def body(x, topk_idx):
        plan = jax_ep.make_plan(topk_idx, comm=comm, num_experts=EXPERTS)
        return jax_ep.combine(jnp.sin(jax_ep.dispatch(x, plan)), plan)

    return jax.jit(layers.sharded(wrap(body), mesh, check_vma=check_vma))


def gradient(body):
    """The transpose too, without the psum that a loss would bring."""

    def wrapped(x, topk_idx):
        out, pull = jax.vjp(lambda x: body(x, topk_idx), x)
        return pull(out)[0]

    return wrapped


def lower(f, platform, tokens=TOKENS):
    return f.trace(*shapes(tokens)).lower(lowering_platforms=(platform,)).as_text()


def calls(stablehlo):
    """The lines of our custom calls."""
    return [line for line in stablehlo.splitlines() if "@jax_ep_" in line]


def targets(stablehlo):
    return sorted(
        re.search(r"custom_call @(\w+)", line)[1] for line in calls(stablehlo)
    )


class TestTargets:
    @platforms
    @pytest.mark.parametrize("check_vma", (True, False), ids=("vma", "no_vma"))
    def test_forward(self, lowered_for, check_vma):
        text = lower(program(check_vma=check_vma), lowered_for)
        expected = ["jax_ep_combine", "jax_ep_dispatch", "jax_ep_plan"]
        assert targets(text) == expected

    @platforms
    def test_gradient_shares_the_plan(self, lowered_for):
        text = lower(program(wrap=gradient), lowered_for)
        expected = 2 * ["jax_ep_combine"] + 2 * ["jax_ep_dispatch"]
        assert targets(text) == [*expected, "jax_ep_plan"]

    @platforms
    def test_loop_holds_one_of_each(self, lowered_for):
        def loop(body):
            return lambda x, i: lax.fori_loop(0, 9, lambda _, x: body(x, i), x)

        text = lower(program(wrap=loop), lowered_for)
        assert len(targets(text)) == 3

    @platforms
    def test_batch_over_data_is_one_call(self, lowered_for):
        def batched(body):
            def wrapped(x, topk_idx):
                out = jax.vmap(body, (0, None))(jnp.stack([x, 2 * x]), topk_idx)
                return out.sum(axis=0)

            return wrapped

        assert len(targets(lower(program(wrap=batched), lowered_for))) == 3

    @platforms
    def test_no_tokens_no_calls(self, lowered_for):
        """XLA's GPU compiler does not survive an empty result beside others."""
        text = lower(program(wrap=gradient), lowered_for, tokens=0)
        assert not calls(text)
        assert not [c for c in COLLECTIVES if re.search(c, text)]

    def test_other_platforms_name_the_way_out(self):
        with pytest.raises(RuntimeError) as info:
            lower(program(), "tpu")
        assert str(info.value) == (
            f"jax_ep: backend {NATIVE!r} runs on ['cpu', 'cuda'], found a program for "
            "['tpu']; use backend='xla' there"
        )
        assert "jax_ep" not in "".join(calls(lower(program("xla"), "tpu")))

    def test_xla_backend_has_no_call_of_ours(self):
        for platform in ("cpu", "cuda", "tpu"):
            text = lower(program("xla", wrap=gradient), platform)
            assert not calls(text)
            # One rank has nobody to ask.
            assert ("stablehlo.all_gather" in text) == (harness.most_ranks() > 1)


class TestNothingElse:
    @platforms
    @pytest.mark.parametrize("check_vma", (True, False), ids=("vma", "no_vma"))
    @pytest.mark.parametrize(
        "wrap", (lambda body: body, gradient), ids=("forward", "gradient")
    )
    def test_no_collective_in_stablehlo(self, lowered_for, check_vma, wrap):
        text = lower(program(check_vma=check_vma, wrap=wrap), lowered_for)
        found = [c for c in COLLECTIVES if re.search(c, text)]
        assert not found

    @pytest.mark.parametrize("check_vma", (True, False), ids=("vma", "no_vma"))
    def test_no_collective_in_hlo(self, check_vma):
        """Nor do XLA's partitioners add one; the rank is asked for once for all."""
        f = program(check_vma=check_vma, wrap=gradient)
        hlo = f.lower(*shapes()).compile().as_text()
        found = [c for c in COLLECTIVES if re.search(c, hlo)]
        assert not found
        assert hlo.count('custom_call_target="jax_ep_') == 5
        assert len(re.findall(r"= u32\[\]\S* partition-id\(\)", hlo)) == 1

    def test_unused_calls_go(self):
        """The calls are pure: XLA drops those whose results nobody reads."""

        def wasteful(body):
            def wrapped(x, topk_idx):
                body(2 * x, topk_idx)
                return x + 1

            return wrapped

        hlo = program(wrap=wasteful).lower(*shapes()).compile().as_text()
        assert "jax_ep_" not in hlo

    @platforms
    def test_no_side_effect(self, lowered_for):
        text = lower(program(wrap=gradient), lowered_for)
        assert calls(text)
        assert not [c for c in calls(text) if "has_side_effect = true" in c]


class TestAttributes:
    """HLO holds sizes and ids: nothing that differs from process to process."""

    @platforms
    def test_integers_are_small(self, lowered_for):
        text = lower(program(wrap=gradient), lowered_for)
        for call in calls(text):
            config = re.search(
                r"(backend_config|mhlo.backend_config) = \{(.*?)\}", call
            )
            assert config, call
            entries = dict(entry.split(" = ") for entry in config[2].split(", "))
            assert {"comm", "channel"} <= set(entries)
            for value in entries.values():
                number = re.fullmatch(r"(\d+) : i64", value)
                assert number, entries
                assert int(number[1]) < 2**20, entries

    @platforms
    def test_no_constant_beside(self, lowered_for):
        """No table is baked in, neither as an attribute nor as an operand."""
        text = lower(program(), lowered_for)
        for constant in re.findall(r"stablehlo.constant dense<(.*?)>", text):
            assert "," not in constant
            assert "0x" not in constant
        assert not re.search(r"\d{8,}", "".join(calls(text)))

    @platforms
    def test_channels_are_distinct(self, lowered_for):
        def several(body):
            return lambda x, i: sum(gradient(body)(k * x, i) for k in range(1, 4))

        text = lower(program(wrap=several), lowered_for)
        channels = re.findall(r"channel = (\d+)", "".join(calls(text)))
        assert len(channels) == 15
        assert len(set(channels)) == len(channels)
        assert len(set(re.findall(r"comm = (\d+)", text))) == 1

    @platforms
    def test_channels_differ_from_those_of_collectives(self, lowered_for):
        def beside(body):
            return lambda x, i: body(x, i) + lax.psum(x, "ep")

        text = lower(program(wrap=beside), lowered_for)
        ours = set(re.findall(r"channel = (\d+)", "".join(calls(text))))
        theirs = set(re.findall(r"channel_handle<handle = (\d+)", text))
        assert len(ours) == 3
        assert theirs
        assert not ours & theirs


class TestSites:
    """The numbers that control slots come from: counted up from 0 in each module."""

    @staticmethod
    def numbers(text):
        """The sites of each kind, in the order of the program's text."""
        found = {}
        for call in calls(text):
            target = re.search(r"custom_call @(\w+)", call)[1]
            kind = "plans" if "plan" in target else "rows"
            found.setdefault(kind, []).append(int(re.search(r"site = (\d+)", call)[1]))
        return found

    @platforms
    def test_count_each_kind(self, lowered_for):
        def several(body):
            return lambda x, i: sum(gradient(body)(k * x, i) for k in range(1, 4))

        found = self.numbers(lower(program(wrap=several), lowered_for))
        assert sorted(found["plans"]) == list(range(3))
        assert sorted(found["rows"]) == list(range(12))

    @platforms
    def test_collectives_do_not_count(self, lowered_for):
        def beside(body):
            def wrapped(x, i):
                for _ in range(3):
                    x = body(x + lax.psum(x, "ep"), i)
                return x

            return wrapped

        found = self.numbers(lower(program(wrap=beside), lowered_for))
        assert sorted(found["plans"]) == list(range(3))
        assert sorted(found["rows"]) == list(range(6))

    @platforms
    def test_inner_functions_count_with_the_others(self, lowered_for):
        """Remat, scan and an inner jit, which is lowered once and called twice."""

        def nested(body):
            def wrapped(x, i):
                inner = jax.jit(lambda x: body(x, i))
                x = inner(inner(x)) + body(x, i)
                again = jax.checkpoint(lambda x: body(jnp.sin(x), i))
                x, _ = lax.scan(lambda x, _: (again(x), None), x, None, length=2)
                return x

            return gradient(wrapped)

        text = lower(program(wrap=nested), lowered_for)
        for sites in self.numbers(text).values():
            assert sorted(sites) == list(range(len(sites)))
        assert text == lower(program(wrap=nested), lowered_for)

    @platforms
    def test_each_communicator_counts_for_itself(self, lowered_for):
        mesh = layers.mesh({"ep": RANKS})
        comms = [jax_ep.Communicator(mesh, "ep", backend=NATIVE) for _ in range(2)]

        def body(x, topk_idx):
            for comm in comms:
                plan = jax_ep.make_plan(topk_idx, comm=comm, num_experts=EXPERTS)
                x = jax_ep.dispatch(x, plan)[: x.shape[0]]
            return x

        f = jax.jit(layers.sharded(body, mesh))
        found = self.numbers(lower(f, lowered_for))
        assert found == {"plans": [0, 0], "rows": [0, 0]}
        for comm in comms:
            comm.close()


class TestSameEverywhere:
    @platforms
    def test_lowered_twice(self, lowered_for):
        first, second = (lower(program(wrap=gradient), lowered_for) for _ in range(2))
        assert first == second

    def test_in_another_process(self):
        """With another seed for Python's hashes."""
        platform = "cuda" if harness.ON_GPU else "cpu"

        def output(seed):
            done = run_script(__file__, platform, PYTHONHASHSEED=seed)
            assert done.returncode == 0, done.stderr
            return done.stdout

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            first, second = pool.map(output, ("1", "2"))
        assert "jax_ep_plan" in first
        assert ("stablehlo.all_gather" in first) == (harness.most_ranks() > 1)
        assert first == second


def print_all():
    """What two processes print alike."""
    for backend in harness.BACKENDS:
        for platform in ("cpu", "cuda"):
            print(lower(program(backend, wrap=gradient), platform))


if __name__ == "__main__":
    print_all()
