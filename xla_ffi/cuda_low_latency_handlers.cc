// FFI handlers of the low-latency operations, on GPUs. Their call sites belong
// to a buffer, which is registered as a communicator: its control memory are
// the windows.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cc/few_tokens/low_latency.h"
#include "cc/handshake/tag.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/attributes.h"
#include "xla_ffi/cuda_calls.h"
#include "xla_ffi/element.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/low_latency_attributes.h"

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

// `options`: what else all ranks have to agree on.
uint32_t TagOf(const CudaCallSite& site, const char* op,
               const LowLatencyParams& params, uint64_t options) {
  Tag tag(site.channel, site.instance, op);
  tag.Add(options);
  tag.Add(params.num_tokens);
  tag.Add(params.top_k);
  tag.Add(params.hidden);
  tag.Add(params.by_expert);
  return tag.value();
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
        Invalid("jax_ep: a low-latency operation on rows of another dtype"));
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
  params.base.op.tag = TagOf(*site, "low_latency_dispatch", params.base,
                             2 * params.quantize + weighted);
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
  params.base.op.tag = TagOf(*site, "low_latency_combine", params.base, 0);
  return Launched("low_latency_combine",
                  LaunchLowLatencyCombine(params, stream));
}

auto BindAll() {
  return BindCall<CudaCallSite>().RemainingArgs().RemainingRets().Attrs();
}

const HandlerRegistration dispatch(
    "jax_ep_low_latency_dispatch", Execute<Dispatch, BindAll, kInGraphs>,
    Instantiate<MakeCallSiteOf<SlotKind::kNone>>);
const HandlerRegistration combine("jax_ep_low_latency_combine",
                                  Execute<Combine, BindAll, kInGraphs>,
                                  Instantiate<MakeCallSiteOf<SlotKind::kNone>>);

}  // namespace

}  // namespace jax_ep
