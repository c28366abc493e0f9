// What the calls of the low-latency operations say beside their buffers, for
// the handlers of both platforms.
#ifndef JAX_EP_XLA_FFI_LOW_LATENCY_ATTRIBUTES_H_
#define JAX_EP_XLA_FFI_LOW_LATENCY_ATTRIBUTES_H_

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

struct LowLatencyAttributes {
  int64_t num_experts;
  int64_t max_tokens;
  int64_t by_expert;  // 0 or 1, as all below
  int64_t weighted;   // operands begin with ids and weights, not ids alone
  int64_t quantize;
  int64_t num_leaves;  // that dispatch moves

  static xla::ffi::ErrorOr<LowLatencyAttributes> Read(
      xla::ffi::Dictionary from) {
    LowLatencyAttributes to = {};
    const auto read = [&](const char* name, int64_t& value) {
      const auto found = from.get<int64_t>(name);
      if (found.has_value()) value = *found;
      return found.has_value();
    };
    if (read("num_experts", to.num_experts) &&
        read("max_tokens", to.max_tokens) && read("by_expert", to.by_expert) &&
        read("weighted", to.weighted) && read("quantize", to.quantize) &&
        read("num_leaves", to.num_leaves)) {
      return to;
    }
    return xla::ffi::Unexpected(
        xla::ffi::Error(xla::ffi::ErrorCode::kInvalidArgument,
                        "jax_ep: a low-latency call lacks an attribute"));
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_LOW_LATENCY_ATTRIBUTES_H_
