"""Experts and choices of published models; the hidden size a 32nd of theirs."""

import cases
import harness
import ml_dtypes
import numpy as np
import oracle
import payloads
import pytest

import jax_ep

# (model, experts, top k, hidden size on the wire, dtype on the wire), from the
# models' released configurations.
FP8 = "float8_e4m3fn"
MODELS = (
    ("DeepSeek-V3", 256, 8, 7168, FP8),
    ("DeepSeek-V4-Flash", 256, 6, 4096, FP8),
    ("DeepSeek-V4-Pro", 384, 6, 7168, FP8),
    ("DeepSeek-V2", 160, 6, 5120, "bfloat16"),
    ("DeepSeek-V2-Lite", 64, 6, 2048, "bfloat16"),
    ("Kimi-K2", 384, 8, 7168, FP8),
    ("Kimi-K3", 896, 16, 3584, "bfloat16"),
    ("Qwen3-235B", 128, 8, 4096, FP8),
    ("Qwen3-Coder-480B", 160, 8, 6144, "bfloat16"),
    ("Qwen3-Next-80B", 512, 10, 2048, "bfloat16"),
    ("Qwen1.5-MoE-A2.7B", 60, 4, 2048, "bfloat16"),
    ("Mixtral-8x7B", 8, 2, 4096, "bfloat16"),
    ("gpt-oss-120b", 128, 4, 2880, "bfloat16"),
    ("gpt-oss-20b", 32, 4, 2880, "bfloat16"),
    ("Llama-4-Maverick", 128, 1, 5120, "bfloat16"),
    ("Llama-4-Scout", 16, 1, 5120, "bfloat16"),
    ("Step-3.7-Flash", 288, 8, 4096, FP8),
    ("Nemotron-3-Nano", 128, 6, 2688, FP8),
    ("Nemotron-3-Super", 512, 22, 1024, FP8),
    ("Nemotron-3-Ultra", 512, 22, 2048, "bfloat16"),
    ("Gemma-4-26B", 128, 8, 2816, "bfloat16"),
    ("OLMoE-1B-7B", 64, 8, 2048, "bfloat16"),
    ("DBRX", 16, 4, 6144, "bfloat16"),
    ("Phi-3.5-MoE", 16, 2, 4096, "bfloat16"),
    ("Granite-3-1B", 32, 8, 1024, "bfloat16"),
    ("Granite-3-3B", 40, 8, 1536, "bfloat16"),
    ("Granite-4-tiny", 62, 6, 1536, "bfloat16"),
    ("Switch", 64, 1, 8192, "bfloat16"),
)
# Several models a program: most of the time would go to XLA otherwise. Plain
# JAX gets the ones whose experts do not divide, and the widest choice.
_GROUPS = tuple(MODELS[start : start + 7] for start in range(0, len(MODELS), 7))
_ODD = tuple(m for m in MODELS if m[1] in (60, 62) or m[2] > 10)
PROGRAMS = [
    *((harness.BACKENDS[0], group) for group in _GROUPS),
    ("xla", _ODD),
]
HIDDEN_SIZES = sorted({hidden for *_, hidden, _ in MODELS})


@pytest.mark.parametrize(
    ("backend", "models"), PROGRAMS, ids=lambda v: v if isinstance(v, str) else v[0][0]
)
def test_layers_of_published_models(backend, models):
    """FP8 rows travel with their scales, one for 128 columns, in one call."""
    ranks, tokens = harness.most_ranks(), 6
    capacity = ranks * tokens
    ids, x, y = {}, {}, {}
    for name, experts, top_k, hidden, dtype in models:
        ids[name] = cases.uniform(ranks, tokens, top_k, experts).astype(np.int32)
        width = hidden // 32
        x[name] = [payloads.payload((ranks, tokens, width), np.dtype(dtype))]
        if dtype == FP8:
            scales = (ranks, tokens, -(-width // 128))
            x[name].append(payloads.payload(scales, np.float32))
        y[name] = payloads.numbers((ranks, capacity, width), ml_dtypes.bfloat16)

    def body(comm, ids, x, y):
        results = {}
        for name, experts, *_ in models:
            plan = jax_ep.make_plan(ids[name], comm=comm, num_experts=experts)
            results[name] = (
                harness.plan_fields(plan),
                jax_ep.dispatch(x[name], plan),
                jax_ep.combine(y[name], plan),
            )
        return results

    found = harness.run(body, harness.communicator(backend, ranks), ids, x, y)
    for name, experts, *_ in models:
        plan, received, combined = found[name]
        right = oracle.plan(ids[name], experts, capacity)
        payloads.assert_same_trees(plan, right.fields, name)
        for got, sent in zip(received, x[name], strict=True):
            payloads.assert_same_rows(got, right.dispatch(sent), name, sent)
        payloads.assert_same_rows(combined, right.combine(y[name]), name)


@harness.on_each_backend
def test_hidden_sizes_of_published_models(backend):
    """Whole rows, 2 to 16 KB each."""
    ids = cases.uniform(2, 3, 2, 6).astype(np.int32)
    right = oracle.plan(ids, 6, 6)
    x = {
        str(hidden): payloads.numbers((2, 3, hidden), ml_dtypes.bfloat16)
        for hidden in HIDDEN_SIZES
    }

    def body(comm, ids, x):
        plan = jax_ep.make_plan(ids, comm=comm, num_experts=6)
        rows = jax_ep.dispatch(x, plan)
        return rows, jax_ep.combine(rows, plan)

    rows, out = harness.run(body, harness.communicator(backend, 2), ids, x)
    for hidden, sent in x.items():
        want = right.dispatch(sent)
        payloads.assert_same_rows(rows[hidden], want, hidden, sent)
        payloads.assert_same_rows(out[hidden], right.combine(want), hidden)
