#include "xla_ffi/cuda_node_handlers.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

#include "cc/node_moves.h"
#include "xla_ffi/registry.h"

namespace jax_ep {

namespace ffi = xla::ffi;

ffi::TypeId CudaNodeSite::id = {};
ffi::TypeId CudaRailSite::id = {};
const XLA_FFI_TypeInfo kCudaNodeSiteInfo = ffi::MakeTypeInfo<CudaNodeSite>();
const XLA_FFI_TypeInfo kCudaRailSiteInfo = ffi::MakeTypeInfo<CudaRailSite>();

namespace {

ffi::Error Invalid(std::string message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::move(message));
}

ffi::Error Enqueued(const char* op, const std::string& problem) {
  if (problem.empty()) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jax_ep ") + op + ": " + problem);
}

ffi::ErrorOr<std::unique_ptr<CudaNodeSite>> InstantiateNode(
    ffi::Dictionary attributes) {
  const auto rail = attributes.get<int64_t>("rail");
  if (rail.has_error()) return ffi::Unexpected(rail.error());
  ffi::ErrorOr<std::unique_ptr<CudaCallSite>> site =
      MakeCallSite(SlotKind::kRows, attributes);
  if (site.has_error()) return ffi::Unexpected(site.error());
  std::shared_ptr<NcclRails> rails = Registry<NcclRails>::Get().Find(*rail);
  if (rails == nullptr) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                                      UnknownCommunicator(*rail, "cuda")));
  }
  return std::make_unique<CudaNodeSite>(
      CudaNodeSite{.site = std::move(**site), .rails = std::move(rails)});
}

ffi::ErrorOr<std::unique_ptr<CudaRailSite>> InstantiateRail(
    ffi::Dictionary attributes) {
  const auto read = ReadSite<NcclRails>(attributes, "cuda");
  if (read.has_error()) return ffi::Unexpected(read.error());
  return std::make_unique<CudaRailSite>(
      CudaRailSite{.rails = read->communicator, .channel = read->channel});
}

ffi::ErrorOr<NcclWire*> WireOn(const NcclRails& rails, int32_t ordinal) {
  NcclWire* const wire = rails.WireOn(ordinal);
  if (wire == nullptr) {
    return ffi::Unexpected(Invalid("jax_ep: GPU " + std::to_string(ordinal) +
                                   " is not on the communicator's mesh"));
  }
  return wire;
}

// Adds to what dispatch and combine know inside a node. Results are the leaves,
// then their staging memory.
ffi::Error Complete(NodeRows& params, const NcclWire& wire,
                    const ffi::BufferR3<ffi::S32>& routes, int64_t num_tokens,
                    const ffi::RemainingRets& out, ffi::Dictionary attributes) {
  const auto chunk_rows = attributes.get<int64_t>("chunk_rows");
  const auto in_flight = attributes.get<int64_t>("in_flight");
  if (chunk_rows.has_error()) return chunk_rows.error();
  if (in_flight.has_error()) return in_flight.error();
  params.node = wire.place().node;
  params.num_nodes = wire.place().num_nodes;
  params.node_size = params.rows.op.view.num_ranks;
  params.num_tokens = num_tokens;
  params.block = (routes.dimensions()[0] - num_tokens) / (params.num_nodes - 1);
  params.chunk_rows = *chunk_rows;
  params.in_flight = static_cast<int32_t>(*in_flight);
  const int32_t leaves = params.rows.num_leaves;
  if (params.chunk_rows < 1 || params.in_flight < 1 ||
      params.in_flight > kMaxInFlight ||
      out.size() != 2 * static_cast<size_t>(leaves)) {
    return Invalid("jax_ep: staging memory between nodes is cut wrongly");
  }
  for (int32_t i = 0; i < leaves; ++i) {
    params.staging[i] = static_cast<std::byte*>(
        (**out.get<ffi::AnyBuffer>(leaves + i)).untyped_data());
  }
  return ffi::Error::Success();
}

ffi::Error Dispatch(CudaNodeSite* site, int32_t ordinal, cudaStream_t stream,
                    Position position, ffi::BufferR3<ffi::S32> routes,
                    ffi::BufferR0<ffi::S32> num_recv,
                    ffi::BufferR1<ffi::S32> arrivals,
                    ffi::BufferR1<ffi::S32> sends, ffi::RemainingArgs in,
                    ffi::RemainingRets out, ffi::Dictionary attributes) {
  const ffi::ErrorOr<NcclWire*> wire = WireOn(*site->rails, ordinal);
  if (wire.has_error()) return wire.error();
  const ffi::ErrorOr<RowParams> rows = DispatchRows(
      site->site, ordinal, position, {routes, num_recv, arrivals}, in, out);
  if (rows.has_error()) return rows.error();
  NodeRows params = {};
  params.rows = *rows;
  params.sends = sends.typed_data();
  const ffi::Error completed =
      Complete(params, **wire, routes,
               in.get<ffi::AnyBuffer>(0)->dimensions()[0], out, attributes);
  if (completed.failure()) return completed;
  std::lock_guard<std::timed_mutex> lock((*wire)->mutex());
  (*wire)->Begin("node_dispatch", site->site.channel);
  return Enqueued("node_dispatch",
                  NodeDispatch(params, **wire, (*wire)->events(), stream));
}

ffi::Error Combine(CudaNodeSite* site, int32_t ordinal, cudaStream_t stream,
                   Position position, ffi::BufferR3<ffi::S32> routes,
                   ffi::BufferR0<ffi::S32> num_recv,
                   ffi::BufferR1<ffi::S32> arrivals,
                   ffi::BufferR2<ffi::S32> places, ffi::RemainingArgs in,
                   ffi::RemainingRets out, ffi::Dictionary attributes) {
  const ffi::ErrorOr<NcclWire*> wire = WireOn(*site->rails, ordinal);
  if (wire.has_error()) return wire.error();
  const ffi::ErrorOr<RowParams> rows = CombineRows(
      site->site, ordinal, position, {routes, num_recv, arrivals}, in, out);
  if (rows.has_error()) return rows.error();
  NodeRows params = {};
  params.rows = *rows;
  params.places = places.typed_data();
  params.places_per_token = static_cast<int32_t>(places.dimensions()[1]);
  const ffi::Error completed =
      Complete(params, **wire, routes, places.dimensions()[0], out, attributes);
  if (completed.failure()) return completed;
  std::lock_guard<std::timed_mutex> lock((*wire)->mutex());
  (*wire)->Begin("node_combine", site->site.channel);
  return Enqueued("node_combine",
                  NodeCombine(params, **wire, (*wire)->events(), stream));
}

ffi::Error Exchange(CudaRailSite* site, int32_t ordinal, cudaStream_t stream,
                    Position position, ffi::AnyBuffer in,
                    ffi::Result<ffi::AnyBuffer> out) {
  const ffi::ErrorOr<NcclWire*> wire = WireOn(*site->rails, ordinal);
  if (wire.has_error()) return wire.error();
  const WirePlace& place = (*wire)->place();
  std::lock_guard<std::timed_mutex> lock((*wire)->mutex());
  (*wire)->Begin("node_exchange", site->channel);
  return Enqueued("node_exchange",
                  NodeExchange(static_cast<const std::byte*>(in.untyped_data()),
                               static_cast<std::byte*>(out->untyped_data()),
                               static_cast<int64_t>(in.size_bytes()) /
                                   (place.num_nodes - 1),
                               place.node, place.num_nodes,
                               {.position = position.typed_data(),
                                .mesh = place.mesh,
                                .channel = static_cast<uint32_t>(site->channel),
                                .rank = place.rank,
                                .exchanges = true},
                               **wire, (*wire)->events(), stream));
}

// As BindRows(), with one more routing operand and attributes.
template <typename Index>
auto BindNodeRows() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::State<CudaNodeSite>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<Position>()
      .Arg<ffi::BufferR3<ffi::S32>>()  // routes
      .Arg<ffi::BufferR0<ffi::S32>>()  // num_recv
      .Arg<ffi::BufferR1<ffi::S32>>()  // arrivals
      .template Arg<Index>()           // sends or places
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EpNodeInstantiate, InstantiateNode,
                              ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpRailInstantiate, InstantiateRail,
                              ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpNodeDispatch, Dispatch,
                              BindNodeRows<ffi::BufferR1<ffi::S32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpNodeCombine, Combine,
                              BindNodeRows<ffi::BufferR2<ffi::S32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpNodeExchange, Exchange,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CudaRailSite>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Position>()
                                  .Arg<ffi::AnyBuffer>()    // rows
                                  .Ret<ffi::AnyBuffer>());  // rows

}  // namespace jax_ep
