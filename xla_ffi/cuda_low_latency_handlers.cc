#include "xla_ffi/cuda_low_latency_handlers.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "cc/low_latency.h"
#include "xla_ffi/cuda_handlers.h"
#include "xla_ffi/element.h"
#include "xla_ffi/low_latency_attributes.h"

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

// Equal on all ranks in the same operation; see Operation::tag.
uint32_t TagOf(const CudaCallSite& site, const LowLatencyParams& params,
               uint64_t kind) {
  uint64_t hash = 1;
  for (const uint64_t number : {uint64_t{site.channel}, uint64_t{site.instance},
                                kind, static_cast<uint64_t>(params.num_tokens),
                                static_cast<uint64_t>(params.top_k),
                                static_cast<uint64_t>(params.hidden),
                                static_cast<uint64_t>(params.by_expert)}) {
    hash = (hash ^ number) * 0x9E3779B97F4A7C15;
    hash ^= hash >> 32;
  }
  return static_cast<uint32_t>(hash >> 48 << 16) | (site.channel & 0xffff);
}

// `hidden` and `element` are those of x or y.
ffi::ErrorOr<LowLatencyParams> Params(const CudaCallSite& site, int32_t ordinal,
                                      const Position& position,
                                      const LowLatencyAttributes& attributes,
                                      const ffi::AnyBuffer& topk_idx,
                                      const ffi::AnyBuffer& rows) {
  const ffi::ErrorOr<Operation> op = OperationOn(site, ordinal, position);
  if (op.has_error()) return ffi::Unexpected(op.error());
  const Element element = ElementOf(rows.element_type());
  if (element == Element::kNone || element == Element::kF64) {
    return ffi::Unexpected(
        ffi::Error(ffi::ErrorCode::kInvalidArgument,
                   "jax_ep: a low-latency operation on rows of another dtype"));
  }
  const int64_t hidden = rows.dimensions().back();
  const int64_t num_tokens = topk_idx.dimensions()[0];
  const int64_t bytes = element == Element::kF32 ? 4 : 2;
  return LowLatencyParams{
      .op = *op,
      .layout = LowLatencyLayout(op->view.num_ranks, attributes.max_tokens,
                                 hidden, bytes),
      .num_experts = static_cast<int32_t>(attributes.num_experts),
      .top_k = static_cast<int32_t>(topk_idx.dimensions()[1]),
      .num_tokens = static_cast<int32_t>(num_tokens),
      .hidden = static_cast<int32_t>(hidden),
      .element = element,
      .by_expert = attributes.by_expert != 0,
      .stride = static_cast<int32_t>(
          attributes.by_expert != 0 ? num_tokens : attributes.max_tokens),
      .topk_idx = topk_idx.typed_data<int32_t>(),
  };
}

ffi::Error Launched(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jax_ep ") + op +
                              ": launch failed: " + cudaGetErrorString(status));
}

// Operands: topk_idx, weights where there are any, x. Results: rows, scales
// where it quantises, counts by expert, places, weights.
ffi::Error Dispatch(CudaCallSite* site, int32_t ordinal, cudaStream_t stream,
                    Position position, ffi::RemainingArgs in,
                    ffi::RemainingRets out, ffi::Dictionary dictionary) {
  const auto attributes = LowLatencyAttributes::Read(dictionary);
  if (attributes.has_error()) return attributes.error();
  const size_t weighted = attributes->weighted != 0 ? 1 : 0;
  const ffi::AnyBuffer x = *in.get<ffi::AnyBuffer>(1 + weighted);
  ffi::ErrorOr<LowLatencyParams> base = Params(
      *site, ordinal, position, *attributes, *in.get<ffi::AnyBuffer>(0), x);
  if (base.has_error()) return base.error();
  LowLatencyDispatchParams params = {.base = *base};
  params.quantize = attributes->quantize != 0;
  params.x = static_cast<const std::byte*>(x.untyped_data());
  size_t result = 0;
  const auto next = [&] { return **out.get<ffi::AnyBuffer>(result++); };
  params.rows = static_cast<std::byte*>(next().untyped_data());
  if (params.quantize) params.scales = next().typed_data<float>();
  if (base->by_expert) params.counts = next().typed_data<int32_t>();
  params.places = next().typed_data<int32_t>();
  if (weighted != 0) {
    params.topk_weights = in.get<ffi::AnyBuffer>(1)->typed_data<float>();
    params.recv_weights = next().typed_data<float>();
  }
  params.base.op.tag =
      TagOf(*site, params.base, 2 + 4 * params.quantize + weighted);
  return Launched("low_latency_dispatch",
                  LaunchLowLatencyDispatch(params, stream));
}

// Operands: topk_idx, weights by expert, places, y. Result: [T, H].
ffi::Error Combine(CudaCallSite* site, int32_t ordinal, cudaStream_t stream,
                   Position position, ffi::RemainingArgs in,
                   ffi::RemainingRets out, ffi::Dictionary dictionary) {
  const auto attributes = LowLatencyAttributes::Read(dictionary);
  if (attributes.has_error()) return attributes.error();
  const size_t weighted = attributes->weighted != 0 ? 1 : 0;
  const ffi::AnyBuffer y = *in.get<ffi::AnyBuffer>(2 + weighted);
  ffi::ErrorOr<LowLatencyParams> base = Params(
      *site, ordinal, position, *attributes, *in.get<ffi::AnyBuffer>(0), y);
  if (base.has_error()) return base.error();
  LowLatencyCombineParams params = {.base = *base};
  params.y = static_cast<const std::byte*>(y.untyped_data());
  if (weighted != 0) {
    params.topk_weights = in.get<ffi::AnyBuffer>(1)->typed_data<float>();
  }
  params.places = in.get<ffi::AnyBuffer>(1 + weighted)->typed_data<int32_t>();
  params.out =
      static_cast<std::byte*>((**out.get<ffi::AnyBuffer>(0)).untyped_data());
  params.base.op.tag = TagOf(*site, params.base, 1);
  return Launched("low_latency_combine",
                  LaunchLowLatencyCombine(params, stream));
}

auto BindAll() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::State<CudaCallSite>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<Position>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    EpLowLatencyInstantiate,
    [](ffi::Dictionary attributes) {
      return MakeCallSite(SlotKind::kNone, attributes);
    },
    ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpLowLatencyDispatch, Dispatch, BindAll(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpLowLatencyCombine, Combine, BindAll(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep
