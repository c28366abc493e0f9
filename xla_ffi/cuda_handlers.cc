#include "xla_ffi/cuda_handlers.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <utility>

#include "cc/layout.h"
#include "cc/ops.h"
#include "xla_ffi/element.h"
#include "xla_ffi/registry.h"

namespace jax_ep {

namespace ffi = xla::ffi;

ffi::TypeId CudaCallSite::id = {};
const XLA_FFI_TypeInfo kCudaCallSiteInfo = ffi::MakeTypeInfo<CudaCallSite>();

CudaCommunicator::~CudaCommunicator() {
  // cudaFree waits for the device, so no kernel still polls this memory. At the
  // end of the process the driver may be gone; then so is the memory.
  for (const auto& [ordinal, view] : views) {
    cudaFree(view.control[view.rank]);
  }
}

namespace {

std::atomic<int64_t> num_handler_calls{0};

ffi::Error Invalid(std::string message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::move(message));
}

ffi::ErrorOr<std::unique_ptr<CudaCallSite>> Instantiate(
    ffi::Dictionary attributes) {
  const auto comm = attributes.get<int64_t>("comm");
  const auto channel = attributes.get<int64_t>("channel");
  if (comm.has_error()) return ffi::Unexpected(comm.error());
  if (channel.has_error()) return ffi::Unexpected(channel.error());
  std::shared_ptr<CudaCommunicator> communicator =
      Registry<CudaCommunicator>::Get().Find(*comm);
  if (communicator == nullptr) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                                      UnknownCommunicator(*comm, "cuda")));
  }
  const uint32_t site = communicator->num_sites.fetch_add(1);
  return std::make_unique<CudaCallSite>(CudaCallSite{
      .communicator = std::move(communicator),
      .slot = static_cast<int32_t>(site % ControlLayout::kSlots),
      .channel = static_cast<uint32_t>(*channel),
  });
}

// The operation of `site` on the device with this ordinal.
ffi::ErrorOr<Operation> OperationOn(const CudaCallSite& site, int32_t ordinal) {
  num_handler_calls.fetch_add(1, std::memory_order_relaxed);
  const auto view = site.communicator->views.find(ordinal);
  if (view == site.communicator->views.end()) {
    return ffi::Unexpected(Invalid("jax_ep: GPU " + std::to_string(ordinal) +
                                   " is not on the communicator's mesh"));
  }
  return Operation{
      .view = view->second, .slot = site.slot, .channel = site.channel};
}

ffi::Error Launched(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jax_ep ") + op +
                              ": launch failed: " + cudaGetErrorString(status));
}

ffi::Error Plan(CudaCallSite* site, int32_t ordinal, cudaStream_t stream,
                ffi::BufferR2<ffi::S32> topk_idx,
                ffi::ResultBufferR3<ffi::S32> routes,
                ffi::ResultBufferR0<ffi::S32> num_recv,
                ffi::ResultBufferR0<ffi::S32> num_demand,
                ffi::ResultBufferR0<ffi::PRED> overflow,
                ffi::ResultBufferR1<ffi::S32> recv_counts,
                ffi::ResultBufferR2<ffi::S32> recv_topk_idx,
                ffi::ResultBufferR1<ffi::S32> recv_src,
                ffi::ResultBufferR1<ffi::S32> expert_counts,
                ffi::ResultBufferR1<ffi::S32> group_sizes,
                ffi::ResultBufferR1<ffi::S32> workspace,
                ffi::Dictionary attributes) {
  const auto num_experts = attributes.get<int64_t>("num_experts");
  const auto alignment = attributes.get<int64_t>("expert_alignment");
  const ffi::ErrorOr<Operation> op = OperationOn(*site, ordinal);
  if (num_experts.has_error()) return num_experts.error();
  if (alignment.has_error()) return alignment.error();
  if (op.has_error()) return op.error();
  const PlanParams params = {
      .op = *op,
      .num_experts = static_cast<int32_t>(*num_experts),
      .expert_alignment = static_cast<int32_t>(*alignment),
      .top_k = static_cast<int32_t>(topk_idx.dimensions()[1]),
      .num_tokens = topk_idx.dimensions()[0],
      .capacity = recv_src->dimensions()[0],
      .topk_idx = topk_idx.typed_data(),
      .routes = routes->typed_data(),
      .num_recv = num_recv->typed_data(),
      .num_demand = num_demand->typed_data(),
      .overflow = overflow->typed_data(),
      .recv_counts = recv_counts->typed_data(),
      .recv_topk_idx = recv_topk_idx->typed_data(),
      .recv_src = recv_src->typed_data(),
      .expert_counts = expert_counts->typed_data(),
      .group_sizes = group_sizes->typed_data(),
      .workspace = workspace->typed_data(),
  };
  return Launched("plan", LaunchPlan(params, stream));
}

// What dispatch and combine share; `capacity_is_out` says on which side the
// receive buffer stands.
ffi::ErrorOr<RowParams> Rows(const CudaCallSite& site, int32_t ordinal,
                             const ffi::BufferR3<ffi::S32>& routes,
                             const ffi::RemainingArgs& in,
                             const ffi::RemainingRets& out,
                             bool capacity_is_out) {
  const ffi::ErrorOr<Operation> op = OperationOn(site, ordinal);
  if (op.has_error()) return ffi::Unexpected(op.error());
  if (in.size() > kMaxLeaves) {
    return ffi::Unexpected(Invalid("jax_ep: too many leaves in one call"));
  }
  RowParams params = {};
  params.op = *op;
  params.routes_per_token = static_cast<int32_t>(routes.dimensions()[1]);
  params.num_leaves = static_cast<int32_t>(in.size());
  params.num_tokens = routes.dimensions()[0];
  params.routes = routes.typed_data();
  for (size_t i = 0; i < in.size(); ++i) {
    const ffi::AnyBuffer from = *in.get<ffi::AnyBuffer>(i);
    const ffi::AnyBuffer to = **out.get<ffi::AnyBuffer>(i);
    // The capacity is never 0, the number of tokens may be.
    const ffi::AnyBuffer& rows = capacity_is_out ? to : from;
    params.capacity = rows.dimensions()[0];
    params.leaves[i] = {
        .in = static_cast<const std::byte*>(from.untyped_data()),
        .out = static_cast<std::byte*>(to.untyped_data()),
        .row_bytes = static_cast<int64_t>(rows.size_bytes()) / params.capacity,
        .element = ElementOf(from.element_type()),
    };
  }
  return params;
}

ffi::Error Dispatch(CudaCallSite* site, int32_t ordinal, cudaStream_t stream,
                    ffi::BufferR3<ffi::S32> routes,
                    ffi::BufferR0<ffi::S32> num_recv, ffi::RemainingArgs in,
                    ffi::RemainingRets out) {
  ffi::ErrorOr<RowParams> params =
      Rows(*site, ordinal, routes, in, out, /*capacity_is_out=*/true);
  if (params.has_error()) return params.error();
  params->num_recv = num_recv.typed_data();
  return Launched("dispatch", LaunchDispatch(*params, stream));
}

ffi::Error Combine(CudaCallSite* site, int32_t ordinal, cudaStream_t stream,
                   ffi::BufferR3<ffi::S32> routes, ffi::RemainingArgs in,
                   ffi::RemainingRets out) {
  const ffi::ErrorOr<RowParams> params =
      Rows(*site, ordinal, routes, in, out, /*capacity_is_out=*/false);
  if (params.has_error()) return params.error();
  for (int32_t i = 0; i < params->num_leaves; ++i) {
    if (params->leaves[i].element == Element::kNone) {
      return Invalid("jax_ep combine: a leaf's dtype cannot be summed");
    }
  }
  return Launched("combine", LaunchCombine(*params, stream));
}

}  // namespace

ffi::ErrorOr<std::unique_ptr<CudaCallSite>> MakeCallSite(
    ffi::Dictionary attributes) {
  return Instantiate(std::move(attributes));
}

ffi::ErrorOr<RowParams> RowsOfCall(const CudaCallSite& site, int32_t ordinal,
                                   const ffi::BufferR3<ffi::S32>& routes,
                                   const ffi::RemainingArgs& in,
                                   const ffi::RemainingRets& out,
                                   bool capacity_is_out) {
  return Rows(site, ordinal, routes, in, out, capacity_is_out);
}

int64_t NumHandlerCalls() {
  return num_handler_calls.load(std::memory_order_relaxed);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(EpInstantiate, Instantiate,
                              ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    EpPlan, Plan,
    ffi::Ffi::Bind()
        .Ctx<ffi::State<CudaCallSite>>()
        .Ctx<ffi::DeviceOrdinal>()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::BufferR2<ffi::S32>>()   // topk_idx
        .Ret<ffi::BufferR3<ffi::S32>>()   // routes
        .Ret<ffi::BufferR0<ffi::S32>>()   // num_recv
        .Ret<ffi::BufferR0<ffi::S32>>()   // num_demand
        .Ret<ffi::BufferR0<ffi::PRED>>()  // overflow
        .Ret<ffi::BufferR1<ffi::S32>>()   // recv_counts
        .Ret<ffi::BufferR2<ffi::S32>>()   // recv_topk_idx
        .Ret<ffi::BufferR1<ffi::S32>>()   // recv_src
        .Ret<ffi::BufferR1<ffi::S32>>()   // expert_counts
        .Ret<ffi::BufferR1<ffi::S32>>()   // group_sizes
        .Ret<ffi::BufferR1<ffi::S32>>()   // workspace
        .Attrs(),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpDispatch, Dispatch,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CudaCallSite>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::BufferR3<ffi::S32>>()  // routes
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // num_recv
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpCombine, Combine,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CudaCallSite>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::BufferR3<ffi::S32>>()  // routes
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep
