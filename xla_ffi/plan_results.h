// The results of a plan, which are the first of a call's.
#ifndef JAX_EP_XLA_FFI_PLAN_RESULTS_H_
#define JAX_EP_XLA_FFI_PLAN_RESULTS_H_

#include <cstddef>
#include <cstdint>

#include "cc/plan/plan_results.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/attributes.h"

namespace jax_ep {

inline constexpr size_t kNumPlanResults = 9;

// The memory of a result, which has to be of this type.
template <xla::ffi::DataType type, size_t rank, typename T>
xla::ffi::Error ReadResult(const xla::ffi::RemainingRets& from, size_t index,
                           T*& data) {
  auto buffer = from.get<xla::ffi::Buffer<type, rank>>(index);
  if (buffer.has_error()) return buffer.error();
  data = (**buffer).typed_data();
  return xla::ffi::Error::Success();
}

// `behind`: how many results stand behind those of the plan.
inline xla::ffi::ErrorOr<PlanResults> ReadPlanResults(
    const xla::ffi::RemainingRets& from, size_t behind) {
  namespace ffi = xla::ffi;
  if (from.size() != kNumPlanResults + behind) {
    return ffi::Unexpected(
        Invalid("jax_ep plan: as many results must come as a plan has"));
  }
  PlanResults to;
  const ffi::Error errors[kNumPlanResults] = {
      ReadResult<ffi::S32, 3>(from, 0, to.routes),
      ReadResult<ffi::S32, 0>(from, 1, to.num_recv),
      ReadResult<ffi::S32, 0>(from, 2, to.num_demand),
      ReadResult<ffi::PRED, 0>(from, 3, to.overflow),
      ReadResult<ffi::S32, 1>(from, 4, to.recv_counts),
      ReadResult<ffi::S32, 2>(from, 5, to.recv_topk_idx),
      ReadResult<ffi::S32, 1>(from, 6, to.recv_src),
      ReadResult<ffi::S32, 1>(from, 7, to.expert_counts),
      ReadResult<ffi::S32, 1>(from, 8, to.group_sizes),
  };
  for (const ffi::Error& error : errors) {
    if (error.failure()) return ffi::Unexpected(error);
  }
  return to;
}

// Of a plan whose results have been read.
inline int64_t PlanCapacity(const xla::ffi::RemainingRets& results) {
  return (**results.get<xla::ffi::AnyBuffer>(6)).dimensions()[0];
}

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_PLAN_RESULTS_H_
