// XLA's data types as the kernels see them.
#ifndef JAX_EP_XLA_FFI_ELEMENT_H_
#define JAX_EP_XLA_FFI_ELEMENT_H_

#include "cc/element.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// Complex numbers are summed as pairs of reals.
inline Element ElementOf(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::BF16:
      return Element::kBf16;
    case xla::ffi::F16:
      return Element::kF16;
    case xla::ffi::F32:
    case xla::ffi::C64:
      return Element::kF32;
    case xla::ffi::F64:
    case xla::ffi::C128:
      return Element::kF64;
    default:
      return Element::kNone;
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_ELEMENT_H_
