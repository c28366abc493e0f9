// What both native modules give to Python.
#ifndef JAX_EP_XLA_FFI_MODULE_H_
#define JAX_EP_XLA_FFI_MODULE_H_

#include <cstdint>
#include <tuple>
#include <utility>

#include "cc/handshake/mesh_place.h"
#include "cc/layout/staging.h"
#include "nanobind/nanobind.h"
#include "nanobind/stl/pair.h"
#include "nanobind/stl/tuple.h"
#include "xla/ffi/api/c_api.h"
#include "xla_ffi/handlers.h"

namespace jax_ep {

// As jax.ffi.register_ffi_target takes them.
inline nanobind::dict Handlers() {
  const auto capsule = [](XLA_FFI_Handler* handler) {
    return nanobind::capsule(reinterpret_cast<void*>(handler));
  };
  nanobind::dict handlers;
  for (const HandlerRegistration* handler : HandlerRegistration::All()) {
    nanobind::dict stages;
    stages["execute"] = capsule(handler->execute);
    if (handler->instantiate != nullptr) {
      stages["instantiate"] = capsule(handler->instantiate);
    }
    handlers[handler->target] = stages;
  }
  return handlers;
}

// As jax.ffi.register_ffi_type takes them.
inline nanobind::dict Types() {
  nanobind::dict types;
  for (const TypeRegistration* type : TypeRegistration::All()) {
    nanobind::dict entry;
    entry["type_id"] = nanobind::capsule(static_cast<void*>(type->id));
    entry["type_info"] =
        nanobind::capsule(static_cast<const void*>(&type->info));
    types[type->name] = entry;
  }
  return types;
}

// MeshPlace: (position, num_ranks, stride).
using Mesh = std::tuple<uint32_t, uint32_t, uint32_t>;

inline MeshPlace MeshPlaceOf(const Mesh& mesh) {
  const auto [position, num_ranks, stride] = mesh;
  return {position, num_ranks, stride};
}

// Bytes of staging memory that an owner holds, 0 where staging_bytes is too
// small, and the least staging_bytes.
inline std::pair<int64_t, int64_t> StagingSize(int64_t staging_bytes,
                                               int64_t num_channels,
                                               int64_t num_owners) {
  const StagingLayout layout(staging_bytes, num_channels, num_owners);
  return {layout.Valid() ? layout.size() : 0,
          StagingLayout::MinBytes(num_channels, num_owners)};
}

inline void DefineShared(nanobind::module_& m) {
  // That of the headers the module was built with.
  m.def("ffi_version",
        [] { return std::pair(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  m.def("handlers", &Handlers);
  m.def("types", &Types);
  m.def("staging_size", &StagingSize, nanobind::arg("staging_bytes"),
        nanobind::arg("num_channels"), nanobind::arg("num_owners"));
}

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_MODULE_H_
