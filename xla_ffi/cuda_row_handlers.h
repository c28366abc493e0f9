// What dispatch and combine bind and hand to their kernels, whole, in two
// halves and between nodes.
#ifndef JAX_EP_XLA_FFI_CUDA_ROW_HANDLERS_H_
#define JAX_EP_XLA_FFI_CUDA_ROW_HANDLERS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cc/ops.h"
#include "cc/plan/plan_results.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/cuda_calls.h"

namespace jax_ep {

struct RowOperation {
  const char* name;
  bool capacity_is_out;  // on which side the receive buffer stands
  cudaError_t (*launch)(const RowParams&, cudaStream_t, cudaEvent_t);
};
inline constexpr RowOperation kDispatch = {"dispatch", true, LaunchDispatch};
inline constexpr RowOperation kCombine = {"combine", false, LaunchCombine};

// What they know of a plan.
using Routes = xla::ffi::BufferR3<xla::ffi::S32>;
using NumRecv = xla::ffi::BufferR0<xla::ffi::S32>;
using RecvSrc = xla::ffi::BufferR1<xla::ffi::S32>;
struct Routing {
  Routing(const Routes& from, const NumRecv& rows, const RecvSrc& sources)
      : routes(from.typed_data()),
        num_recv(rows.typed_data()),
        recv_src(sources.typed_data()),
        num_tokens(from.dimensions()[0]),
        routes_per_token(static_cast<int32_t>(from.dimensions()[1])) {}
  Routing(const PlanResults& plan, int64_t tokens, int32_t width)
      : routes(plan.routes),
        num_recv(plan.num_recv),
        recv_src(plan.recv_src),
        num_tokens(tokens),
        routes_per_token(width) {}

  const int32_t* routes;
  const int32_t* num_recv;
  const int32_t* recv_src;
  int64_t num_tokens;
  int32_t routes_per_token;
};

// What they bind: that of every call, the routing, then the leaves.
template <typename Site>
auto BindRouting() {
  return BindCall<Site>()
      .template Arg<Routes>()
      .template Arg<NumRecv>()
      .template Arg<RecvSrc>();
}
template <typename Site>
auto BindRows() {
  return BindRouting<Site>().RemainingArgs().RemainingRets();
}

// What the kernels get. The leaves' results begin at `first_result`; those
// after them are not looked at.
xla::ffi::ErrorOr<RowParams> RowsOf(const RowOperation& op,
                                    const CudaCallSite& site, int32_t ordinal,
                                    const Position& position,
                                    const Routing& routing,
                                    const xla::ffi::RemainingArgs& in,
                                    const xla::ffi::RemainingRets& out,
                                    size_t first_result = 0);

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_CUDA_ROW_HANDLERS_H_
