"""The operations: one record for each, from which operation.py makes a primitive.

Names are those of exchanges, as users see them in jaxprs and in policies of
jax.checkpoint; targets are those that the native modules register. Records of one
kind stand together; functions of a record that are its own stand in the file that
its name leads to.
"""

from __future__ import annotations

import functools
from typing import Any

from jax_ep._operations import (
    exchanges,
    experts,
    flights,
    fp8_gated,
    fused,
    gated,
    low_latency,
    node_exchanges,
    ragged,
)
from jax_ep._operations.operation import (
    Native,
    Operation,
    define,
    each_element,
    integers_jvp,
    no_derivative,
    one_after_another,
    vmapped,
)

NATIVE = frozenset({"cpu", "cuda"})
ONLY_CUDA = frozenset({"cuda"})
SUMMED_BY_COMBINE = ("dispatch", "combine")


def _comm(params: Any) -> Any:
    return params["comm"]


def _sizes_of_plan(avals: Any, params: Any) -> dict[str, int]:
    del avals
    return {name: params[name] for name in ("num_experts", "expert_alignment")}


# What crosses ranks ----------------------------------------------------------

PLAN = Operation(
    name="ep_plan",
    routing=("topk_idx",),
    results=exchanges.plan_results,
    reference=exchanges.plan_reference,
    native=Native(
        target="jax_ep_plan",
        backends=NATIVE,
        fits=exchanges.has_tokens,
        owner=_comm,
        slot="plan",
        attributes=_sizes_of_plan,
        scratch=exchanges.plan_scratch,
    ),
    collective=True,
    jvp=integers_jvp,
)
DISPATCH = Operation(
    name="ep_dispatch",
    routing=exchanges.ROUTING,
    results=exchanges.rows_of("capacity"),
    reference=exchanges.dispatch_reference,
    native=Native(
        target="jax_ep_dispatch",
        backends=NATIVE,
        fits=exchanges.has_tokens,
        owner=_comm,
        slot="rows",
    ),
    collective=True,
    transpose="ep_combine",
    summed_by=SUMMED_BY_COMBINE,
)
COMBINE = Operation(
    name="ep_combine",
    routing=exchanges.ROUTING,
    results=exchanges.rows_of("num_tokens"),
    reference=exchanges.combine_reference,
    native=Native(
        target="jax_ep_combine",
        backends=NATIVE,
        fits=exchanges.has_tokens,
        owner=_comm,
        slot="rows",
    ),
    collective=True,
    transpose="ep_dispatch",
)

# The same between nodes ------------------------------------------------------

NODE_DISPATCH = Operation(
    name="ep_node_dispatch",
    routing=node_exchanges.ROUTING,
    results=exchanges.rows_of("capacity", len(node_exchanges.ROUTING)),
    reference=node_exchanges.dispatch_reference,
    native=Native(
        target="jax_ep_node_dispatch",
        backends=ONLY_CUDA,
        owner=lambda params: params["comm"]._node,
        slot="rows",
        routing=("_routes", "num_recv", "arrivals", "sends"),
        attributes=node_exchanges.attributes,
        scratch=functools.partial(node_exchanges.staging, wire=False),
    ),
    collective=True,
    transpose="ep_node_combine",
    summed_by=SUMMED_BY_COMBINE,
)
NODE_COMBINE = Operation(
    name="ep_node_combine",
    routing=node_exchanges.ROUTING,
    results=exchanges.rows_of("num_tokens", len(node_exchanges.ROUTING)),
    reference=node_exchanges.combine_reference,
    native=Native(
        target="jax_ep_node_combine",
        backends=ONLY_CUDA,
        owner=lambda params: params["comm"]._node,
        slot="rows",
        routing=("_routes", "num_recv", "arrivals", "places"),
        attributes=node_exchanges.attributes,
        scratch=functools.partial(node_exchanges.staging, wire=True),
    ),
    collective=True,
    transpose="ep_node_dispatch",
)
NODE_EXCHANGE = Operation(
    name="ep_node_exchange",
    results=lambda rows, **_: [rows.update(weak_type=False)],
    reference=node_exchanges.exchange_reference,
    native=Native(
        target="jax_ep_node_exchange",
        backends=ONLY_CUDA,
        owner=lambda params: params["comm"]._rail,
    ),
    collective=True,
    jvp=integers_jvp,
)

# In two halves ---------------------------------------------------------------


def _start(whole: str, rows: str, **options: Any) -> Operation:
    return Operation(
        name=f"{whole}_start",
        routing=exchanges.ROUTING,
        results=flights.start_results(rows),
        reference=flights.start_reference(whole),
        native=Native(target=f"jax_{whole}_start", backends=ONLY_CUDA),
        collective=True,
        lowering=flights.start_lowering,
        jvp=flights.start_jvp,
        transposed=flights.start_transposed,
        batch=flights.start_batch,
        **options,
    )


def _done(whole: str, **options: Any) -> Operation:
    return Operation(
        name=f"{whole}_done",
        routing=exchanges.ROUTING,
        results=flights.done_results,
        reference=flights.done_reference,
        native=Native(target=f"jax_{whole}_done", backends=ONLY_CUDA),
        collective=True,
        lowering=flights.done_lowering,
        jvp=flights.done_jvp,
        transposed=flights.done_transposed,
        batch=flights.done_batch,
        **options,
    )


HALVES = (
    _start("ep_dispatch", "capacity"),
    _done("ep_dispatch", summed_by=SUMMED_BY_COMBINE),
    _start("ep_combine", "num_tokens"),
    _done("ep_combine"),
)
TIE = Operation(
    name="ep_tie",
    results=lambda *avals, **_: list(avals),
    reference=lambda *operands, **_: list(operands),
    lowering=flights.tie_lowering,
    jvp=flights.tie_jvp,
    transposed=flights.tie_transposed,
    batch=flights.tie_batch,
    dce=flights.tie_dce,
)

# Between rows and experts ----------------------------------------------------

EXPERT_ROWS = Operation(
    name="ep_expert_rows",
    routing=("recv_topk_idx",),
    results=experts.expert_rows_results,
    reference=experts.expert_rows_reference,
    native=Native(
        target="jax_ep_expert_rows",
        backends=NATIVE,
        attributes=experts.expert_rows_attributes,
        scratch=experts.expert_rows_scratch,
    ),
    jvp=integers_jvp,
)
PERMUTE = Operation(
    name="ep_permute",
    routing=experts.ROUTING,
    results=experts.permute_results,
    reference=experts.permute_reference,
    native=Native(target="jax_ep_permute", backends=NATIVE),
    transpose="ep_unpermute",
    summed_by=("permute", "unpermute"),
    jvp=experts.permute_jvp,
    transposed=experts.permute_transposed,
)
UNPERMUTE = Operation(
    name="ep_unpermute",
    routing=experts.ROUTING,
    results=experts.unpermute_results,
    reference=experts.unpermute_reference,
    native=Native(target="jax_ep_unpermute", backends=NATIVE, routing=("places",)),
    transpose="ep_permute",
    jvp=experts.permute_jvp,
    transposed=experts.permute_transposed,
)
ROW_DOTS = Operation(
    name="ep_row_dots",
    routing=experts.ROUTING,
    results=experts.row_dots_results,
    reference=experts.row_dots_reference,
    native=Native(target="jax_ep_row_dots", backends=NATIVE, routing=("places",)),
    jvp=experts.row_dots_jvp,
    transposed=experts.row_dots_transposed,
    batch=each_element,
)

# Two in one launch -----------------------------------------------------------

PLAN_DISPATCH = Operation(
    name="ep_plan_dispatch",
    routing=("topk_idx",),
    num_fields=len(exchanges.PLAN_FIELDS),
    results=fused.plan_dispatch_results,
    reference=fused.plan_dispatch_reference,
    native=Native(
        target="jax_ep_plan_dispatch",
        backends=ONLY_CUDA,
        fits=fused.plan_dispatch_fits,
        owner=_comm,
        slot="plan",
        attributes=_sizes_of_plan,
        scratch=exchanges.plan_scratch,
    ),
    collective=True,
    move=fused.plan_dispatch_move,
    back=fused.plan_dispatch_back,
    summed_by=SUMMED_BY_COMBINE,
)
DISPATCH_PERMUTE = Operation(
    name="ep_dispatch_permute",
    routing=fused.DISPATCH_PERMUTE_ROUTING,
    results=fused.dispatch_permute_results,
    reference=fused.dispatch_permute_reference,
    native=Native(
        target="jax_ep_dispatch_permute",
        backends=ONLY_CUDA,
        fits=fused.dispatch_permute_fits,
        owner=_comm,
        slot="rows",
        # num_recv serves the transpose only.
        routing=("_routes", "recv_counts", "recv_src", *experts.ROUTING),
        scratch=fused.dispatch_permute_scratch,
    ),
    collective=True,
    move=fused.dispatch_permute_move,
    back=fused.dispatch_permute_back,
    summed_by=SUMMED_BY_COMBINE,
)

# Few tokens ------------------------------------------------------------------

LOW_LATENCY_DISPATCH = Operation(
    name="ep_low_latency_dispatch",
    results=low_latency.dispatch_results,
    reference=low_latency.dispatch_reference,
    native=Native(
        target="jax_ep_low_latency_dispatch",
        backends=NATIVE,
        fits=exchanges.has_tokens,
        owner=lambda params: params["buffer"],
        attributes=low_latency.attributes,
    ),
    collective=True,
    jvp=no_derivative("dispatch"),
    batch=one_after_another,
)
LOW_LATENCY_COMBINE = Operation(
    name="ep_low_latency_combine",
    results=low_latency.combine_results,
    reference=low_latency.combine_reference,
    native=Native(
        target="jax_ep_low_latency_combine",
        backends=NATIVE,
        fits=exchanges.has_tokens,
        owner=lambda params: params["buffer"],
        attributes=low_latency.attributes,
    ),
    collective=True,
    jvp=no_derivative("combine"),
    batch=one_after_another,
)

# Products: kernels in Pallas, where they serve -------------------------------


def _of_ragged(kernel: Any) -> dict[str, Any]:
    return {"cuda": ragged.on_cuda(kernel), "rocm": ragged.on_rocm}


RAGGED_ROWS = Operation(
    name="ep_ragged_rows",
    results=ragged.rows_results,
    reference=ragged.rows_reference,
    platforms=_of_ragged(ragged.rows_kernel),
    jvp=ragged.rows_jvp,
    transposed=ragged.rows_transposed,
    batch=ragged.rows_batch,
    eager=True,
)
RAGGED_WEIGHTS = Operation(
    name="ep_ragged_weights",
    results=ragged.weights_results,
    reference=ragged.weights_reference,
    platforms=_of_ragged(ragged.weights_kernel),
    jvp=ragged.weights_jvp,
    transposed=ragged.weights_transposed,
    batch=ragged.weights_batch,
    eager=True,
)
GATED_MLP = Operation(
    name="ep_gated_mlp",
    results=gated.mlp_results,
    reference=gated.by_products,
    platforms={"cuda": gated.on_cuda(gated.mlp_kernel)},
    jvp=gated.mlp_jvp,
    batch=vmapped,
    eager=True,
)
GATED_BATCHES = Operation(
    name="ep_gated_batches",
    results=gated.batches_results,
    reference=gated.plain_batches,
    platforms={"cuda": gated.on_cuda(gated.batches_kernel)},
    jvp=gated.batches_jvp,
    batch=vmapped,
    eager=True,
)
GATED = Operation(
    name="ep_gated",
    results=gated.gated_results,
    reference=gated.gated_reference,
    platforms={"cuda": gated.on_cuda(gated.gated_kernel)},
    jvp=gated.gated_jvp,
    batch=vmapped,
    eager=True,
)
GATED_DOWN_JVP = Operation(
    name="ep_gated_down_jvp",
    results=gated.down_jvp_results,
    reference=gated.down_jvp_reference,
    jvp=gated.down_jvp,
    transposed=gated.down_jvp_transposed,
    batch=vmapped,
    eager=True,
)
GATED_DOWN_VJP = Operation(
    name="ep_gated_down_vjp",
    results=gated.down_vjp_results,
    reference=gated.down_vjp_reference,
    platforms={"cuda": gated.on_cuda(gated.down_vjp_kernel)},
    jvp=gated.down_jvp,
    transposed=gated.down_vjp_transposed,
    batch=vmapped,
    eager=True,
)
FP8_GATED_MLP = Operation(
    name="ep_fp8_gated_mlp",
    results=fp8_gated.results,
    reference=fp8_gated.reference,
    platforms={"cuda": fp8_gated.on_cuda, "rocm": fp8_gated.on_rocm},
    batch=each_element,
    eager=True,
)

OPERATIONS = (
    *(PLAN, DISPATCH, COMBINE, NODE_DISPATCH, NODE_COMBINE, NODE_EXCHANGE),
    *(*HALVES, TIE, EXPERT_ROWS, PERMUTE, UNPERMUTE, ROW_DOTS),
    *(PLAN_DISPATCH, DISPATCH_PERMUTE, LOW_LATENCY_DISPATCH, LOW_LATENCY_COMBINE),
    *(RAGGED_ROWS, RAGGED_WEIGHTS, GATED_MLP, GATED_BATCHES, GATED),
    *(GATED_DOWN_JVP, GATED_DOWN_VJP, FP8_GATED_MLP),
)
for _operation in OPERATIONS:
    define(_operation)
