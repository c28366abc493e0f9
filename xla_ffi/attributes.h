// Attributes of a call, and the errors of those that are not jax_ep's.
#ifndef JAX_EP_XLA_FFI_ATTRIBUTES_H_
#define JAX_EP_XLA_FFI_ATTRIBUTES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

inline xla::ffi::Error Invalid(std::string message) {
  return xla::ffi::Error(xla::ffi::ErrorCode::kInvalidArgument,
                         std::move(message));
}

inline xla::ffi::Error FailedPrecondition(std::string message) {
  return xla::ffi::Error(xla::ffi::ErrorCode::kFailedPrecondition,
                         std::move(message));
}

// The integers of these names, or what is wrong with the first that is not
// there.
template <size_t count>
xla::ffi::ErrorOr<std::array<int64_t, count>> Integers(
    const xla::ffi::Dictionary& attributes, const char* const (&names)[count]) {
  std::array<int64_t, count> values = {};
  for (size_t i = 0; i < count; ++i) {
    const auto value = attributes.get<int64_t>(names[i]);
    if (value.has_error()) return xla::ffi::Unexpected(value.error());
    values[i] = *value;
  }
  return values;
}

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_ATTRIBUTES_H_
