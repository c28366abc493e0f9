// How handlers and state types reach Python: as the capsules that
// jax.ffi.register_ffi_target and jax.ffi.register_ffi_type take.
#ifndef JAX_EP_XLA_FFI_CAPSULES_H_
#define JAX_EP_XLA_FFI_CAPSULES_H_

#include <utility>

#include "nanobind/nanobind.h"
#include "nanobind/stl/pair.h"
#include "xla/ffi/api/c_api.h"

namespace jax_ep {

// The FFI version whose headers the module was built with.
inline std::pair<int, int> FfiVersion() {
  return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
}

inline nanobind::dict Handler(XLA_FFI_Handler* instantiate,
                              XLA_FFI_Handler* execute) {
  nanobind::dict stages;
  stages["instantiate"] =
      nanobind::capsule(reinterpret_cast<void*>(instantiate));
  stages["execute"] = nanobind::capsule(reinterpret_cast<void*>(execute));
  return stages;
}

// A handler without state.
inline nanobind::dict Handler(XLA_FFI_Handler* execute) {
  nanobind::dict stages;
  stages["execute"] = nanobind::capsule(reinterpret_cast<void*>(execute));
  return stages;
}

inline nanobind::dict Type(XLA_FFI_TypeId* id, const XLA_FFI_TypeInfo* info) {
  nanobind::dict type;
  type["type_id"] = nanobind::capsule(static_cast<void*>(id));
  type["type_info"] = nanobind::capsule(static_cast<const void*>(info));
  return type;
}

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_CAPSULES_H_
