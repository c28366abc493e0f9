// What the calls of the low-latency operations say beside their buffers, for
// the handlers of both platforms.
#ifndef JAX_EP_XLA_FFI_LOW_LATENCY_ATTRIBUTES_H_
#define JAX_EP_XLA_FFI_LOW_LATENCY_ATTRIBUTES_H_

#include <cstdint>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/attributes.h"

namespace jax_ep {

struct LowLatencyAttributes {
  int64_t num_experts;
  int64_t max_tokens;
  int64_t by_expert;  // 0 or 1, as all below
  int64_t weighted;   // operands begin with ids and weights, not ids alone
  int64_t quantize;
  int64_t num_leaves;  // that dispatch moves

  static xla::ffi::ErrorOr<LowLatencyAttributes> Read(
      const xla::ffi::Dictionary& from) {
    const auto found = Integers(from, {"num_experts", "max_tokens", "by_expert",
                                       "weighted", "quantize", "num_leaves"});
    if (found.has_error()) return xla::ffi::Unexpected(found.error());
    const auto [num_experts, max_tokens, by_expert, weighted, quantize,
                num_leaves] = *found;
    return LowLatencyAttributes{num_experts, max_tokens, by_expert,
                                weighted,    quantize,   num_leaves};
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_LOW_LATENCY_ATTRIBUTES_H_
