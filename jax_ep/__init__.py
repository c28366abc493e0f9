"""Expert parallelism for JAX: native collectives and kernels for MoE layers."""

from jax_ep._api.choices import combine_choices, permute_weights
from jax_ep._api.fp8_dispatch import dispatch_fp8
from jax_ep._api.grouped_products import gated_mlp, ragged_dot
from jax_ep._api.low_latency import (
    LowLatencyHandle,
    low_latency_combine,
    low_latency_dispatch,
)
from jax_ep._api.moe import moe, moe_with_plan
from jax_ep._api.ops import combine, dispatch, permute, plan_dispatch, unpermute
from jax_ep._api.overlap import (
    Flight,
    combine_done,
    combine_start,
    dispatch_done,
    dispatch_start,
    overlap,
)
from jax_ep._api.plan_options import PlanOptions
from jax_ep._api.planning import make_plan
from jax_ep._api.sharded_moe import MoeStats, sharded_moe
from jax_ep._data.plan import Plan
from jax_ep._operations.fp8 import (
    Fp8Rows,
    Fp8Weights,
    dequantize_fp8,
    quantize_fp8,
    quantize_weights,
)
from jax_ep._setup.communicator import Communicator
from jax_ep._setup.context import communicator
from jax_ep._setup.low_latency_buffer import LowLatencyBuffer

__version__ = "0.1.0"

__all__ = [
    "Communicator",
    "Flight",
    "Fp8Rows",
    "Fp8Weights",
    "LowLatencyBuffer",
    "LowLatencyHandle",
    "MoeStats",
    "Plan",
    "PlanOptions",
    "combine",
    "combine_choices",
    "combine_done",
    "combine_start",
    "communicator",
    "dequantize_fp8",
    "dispatch",
    "dispatch_done",
    "dispatch_fp8",
    "dispatch_start",
    "gated_mlp",
    "low_latency_combine",
    "low_latency_dispatch",
    "make_plan",
    "moe",
    "moe_with_plan",
    "overlap",
    "permute",
    "permute_weights",
    "plan_dispatch",
    "quantize_fp8",
    "quantize_weights",
    "ragged_dot",
    "sharded_moe",
    "unpermute",
]
