// What the operations between rows and experts bind on both platforms: first
// `Context`, where they run.
#ifndef JAX_EP_XLA_FFI_EXPERT_CALLS_H_
#define JAX_EP_XLA_FFI_EXPERT_CALLS_H_

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

using ExpertRowsBuffer = xla::ffi::BufferR2<xla::ffi::S32>;
using EmptyRangesBuffer = xla::ffi::BufferR2<xla::ffi::S32>;

template <typename Context>
auto BindExpertRows() {
  namespace ffi = xla::ffi;
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<ffi::BufferR2<ffi::S32>>()  // topk_idx
      .template Ret<ExpertRowsBuffer>()
      .template Ret<EmptyRangesBuffer>()
      .template Ret<ffi::BufferR1<ffi::S32>>()  // workspace
      .template Attr<int64_t>("expert_alignment")
      .template Attr<int64_t>("expert_capacity");
}

template <typename Context>
auto BindUnpermute() {
  return xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<ExpertRowsBuffer>()
      .RemainingArgs()
      .RemainingRets();
}

template <typename Context>
auto BindPermute() {
  return xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<ExpertRowsBuffer>()
      .template Arg<EmptyRangesBuffer>()
      .RemainingArgs()
      .RemainingRets();
}

template <typename Context>
auto BindRowDots() {
  return xla::ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<ExpertRowsBuffer>()
      .RemainingArgs()
      .template Ret<xla::ffi::AnyBuffer>();
}

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_EXPERT_CALLS_H_
