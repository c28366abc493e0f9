// FFI handlers of the operations between rows and experts, on GPUs. They are
// local to a device: no state, no handshake.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cc/experts/expert_ops.h"
#include "cc/layout/limits.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/attributes.h"
#include "xla_ffi/cuda_calls.h"
#include "xla_ffi/expert_calls.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/leaves.h"

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

ffi::Error ExpertRows(cudaStream_t stream,
                      ffi::BufferR2<ffi::S32> recv_topk_idx,
                      ffi::ResultBufferR2<ffi::S32> expert_rows,
                      ffi::ResultBufferR2<ffi::S32> empty_ranges,
                      ffi::ResultBufferR1<ffi::S32> workspace,
                      int64_t expert_alignment, int64_t expert_capacity) {
  const ExpertRowsParams params = {
      .local_experts = static_cast<int32_t>(empty_ranges->dimensions()[0] - 1),
      .expert_alignment = static_cast<int32_t>(expert_alignment),
      .num_pairs = static_cast<int64_t>(recv_topk_idx.element_count()),
      .expert_capacity = expert_capacity,
      .recv_topk_idx = recv_topk_idx.typed_data(),
      .expert_rows = expert_rows->typed_data(),
      .empty_ranges = empty_ranges->typed_data(),
      .workspace = workspace->typed_data(),
  };
  return Launched("expert_rows", LaunchExpertRows(params, stream));
}

// What permute and unpermute share: operands are the weights, if there are any,
// and the leaves.
ffi::ErrorOr<PermuteParams> Params(const ffi::BufferR2<ffi::S32>& expert_rows,
                                   const ffi::RemainingArgs& in,
                                   const ffi::RemainingRets& out,
                                   bool may_be_any_dtype) {
  if (out.size() > kMaxLeaves) {
    return ffi::Unexpected(Invalid("jax_ep: too many leaves in one call"));
  }
  const size_t num_weights = in.size() - out.size();
  PermuteParams params = {};
  params.top_k = static_cast<int32_t>(expert_rows.dimensions()[1]);
  params.num_leaves = static_cast<int32_t>(out.size());
  params.capacity = expert_rows.dimensions()[0];
  params.expert_rows = expert_rows.typed_data();
  if (num_weights > 0) {
    params.weights = in.get<ffi::AnyBuffer>(0)->untyped_data();
  }
  for (size_t i = 0; i < out.size(); ++i) {
    params.leaves[i] = LeafOf<Leaf>(in, num_weights + i, out, i);
    if (params.leaves[i].element == Element::kNone &&
        (num_weights > 0 || !may_be_any_dtype)) {
      return ffi::Unexpected(
          Invalid("jax_ep: a leaf's dtype takes no weights and no sums"));
    }
  }
  return params;
}

ffi::Error Permute(cudaStream_t stream, ffi::BufferR2<ffi::S32> expert_rows,
                   ffi::BufferR2<ffi::S32> empty_ranges, ffi::RemainingArgs in,
                   ffi::RemainingRets out) {
  ffi::ErrorOr<PermuteParams> params =
      Params(expert_rows, in, out, /*may_be_any_dtype=*/true);
  if (params.has_error()) return params.error();
  params->num_ranges = static_cast<int32_t>(empty_ranges.dimensions()[0]);
  params->empty_ranges = empty_ranges.typed_data();
  return Launched("permute", LaunchPermute(*params, stream));
}

ffi::Error Unpermute(cudaStream_t stream, ffi::BufferR2<ffi::S32> expert_rows,
                     ffi::RemainingArgs in, ffi::RemainingRets out) {
  const ffi::ErrorOr<PermuteParams> params =
      Params(expert_rows, in, out, /*may_be_any_dtype=*/false);
  if (params.has_error()) return params.error();
  return Launched("unpermute", LaunchUnpermute(*params, stream));
}

ffi::Error RowDots(cudaStream_t stream, ffi::BufferR2<ffi::S32> expert_rows,
                   ffi::RemainingArgs in, ffi::Result<ffi::AnyBuffer> dots) {
  const size_t count = in.size() / 2;
  if (count > kMaxLeaves) {
    return Invalid("jax_ep: too many leaves in one call");
  }
  RowDotsParams params = {};
  params.top_k = static_cast<int32_t>(expert_rows.dimensions()[1]);
  params.num_leaves = static_cast<int32_t>(count);
  params.capacity = expert_rows.dimensions()[0];
  params.expert_rows = expert_rows.typed_data();
  params.dots = dots->untyped_data();
  for (size_t i = 0; i < count; ++i) {
    params.leaves[i] = PairOf<RowDotsParams::Pair>(in, i, count);
    if (params.leaves[i].element == Element::kNone) {
      return Invalid("jax_ep row_dots: a leaf's dtype cannot be summed");
    }
  }
  return Launched("row_dots", LaunchRowDots(params, stream));
}

using OnStream = ffi::PlatformStream<cudaStream_t>;

const HandlerRegistration expert_rows(
    "jax_ep_expert_rows",
    Execute<ExpertRows, BindExpertRows<OnStream>, kInGraphs>);
const HandlerRegistration permute(
    "jax_ep_permute", Execute<Permute, BindPermute<OnStream>, kInGraphs>);
const HandlerRegistration unpermute(
    "jax_ep_unpermute", Execute<Unpermute, BindUnpermute<OnStream>, kInGraphs>);
const HandlerRegistration row_dots(
    "jax_ep_row_dots", Execute<RowDots, BindRowDots<OnStream>, kInGraphs>);

}  // namespace

}  // namespace jax_ep
