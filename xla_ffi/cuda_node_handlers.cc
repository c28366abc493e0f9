// FFI handlers of operations between nodes, on GPUs.
//
// Not for command buffers: a handler works on two streams and enqueues NCCL's
// operations, whose host threads follow them; XLA captures handlers of which
// that is not known to work in each NCCL.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "cc/nodes/nccl_wire.h"
#include "cc/nodes/node_moves.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/attributes.h"
#include "xla_ffi/cuda_calls.h"
#include "xla_ffi/cuda_row_handlers.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/registry.h"

namespace jax_ep {

namespace ffi = xla::ffi;

// State of a call site of dispatch or combine: the node's, and the rails.
struct CudaNodeSite {
  static ffi::TypeId id;

  CudaCallSite site;
  std::shared_ptr<NcclRails> rails;
};

// State of a call site of an exchange: the rails alone.
struct CudaRailSite {
  static ffi::TypeId id;

  std::shared_ptr<NcclRails> rails;
  int64_t channel;
};

ffi::TypeId CudaNodeSite::id = {};
ffi::TypeId CudaRailSite::id = {};

namespace {

ffi::Error Enqueued(const char* op, const std::string& problem) {
  if (problem.empty()) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jax_ep ") + op + ": " + problem);
}

ffi::ErrorOr<std::unique_ptr<CudaNodeSite>> MakeNodeSite(
    ffi::Dictionary attributes) {
  const auto rail = Integers(attributes, {"rail"});
  if (rail.has_error()) return ffi::Unexpected(rail.error());
  auto site = MakeCallSite(SlotKind::kRows, attributes);
  if (site.has_error()) return ffi::Unexpected(site.error());
  auto rails = Registry<NcclRails>::Get().Find((*rail)[0], "cuda");
  if (rails.has_error()) return ffi::Unexpected(rails.error());
  return std::make_unique<CudaNodeSite>(
      CudaNodeSite{.site = std::move(**site), .rails = *std::move(rails)});
}

ffi::ErrorOr<std::unique_ptr<CudaRailSite>> MakeRailSite(
    ffi::Dictionary attributes) {
  const auto read = ReadSite<NcclRails>(attributes, "cuda");
  if (read.has_error()) return ffi::Unexpected(read.error());
  return std::make_unique<CudaRailSite>(
      CudaRailSite{.rails = read->communicator, .channel = read->channel});
}

ffi::ErrorOr<NcclWire*> WireOn(const NcclRails& rails, int32_t ordinal) {
  NcclWire* const wire = rails.WireOn(ordinal);
  if (wire == nullptr) return ffi::Unexpected(NotOnMesh(ordinal));
  return wire;
}

// Whom wire rows are for: dispatch's `sends`, combine's `places`.
using Sends = ffi::BufferR1<ffi::S32>;
using Places = ffi::BufferR2<ffi::S32>;

// Their number of tokens.
int64_t Add(NodeRows& params, const Sends& sends,
            const ffi::RemainingArgs& in) {
  params.sends = sends.typed_data();
  return in.get<ffi::AnyBuffer>(0)->dimensions()[0];
}
int64_t Add(NodeRows& params, const Places& places, const ffi::RemainingArgs&) {
  params.places = places.typed_data();
  params.places_per_token = static_cast<int32_t>(places.dimensions()[1]);
  return places.dimensions()[0];
}

// Adds to what dispatch and combine know inside a node. Results are the leaves,
// then their staging memory.
ffi::Error Complete(NodeRows& params, const NcclWire& wire, int64_t wire_rows,
                    const ffi::RemainingRets& out,
                    const ffi::Dictionary& attributes) {
  const auto chunks = Integers(attributes, {"chunk_rows", "in_flight"});
  if (chunks.has_error()) return chunks.error();
  params.node = wire.place().node;
  params.num_nodes = wire.place().num_nodes;
  params.node_size = params.rows.op.view.num_ranks;
  params.block = (wire_rows - params.num_tokens) / (params.num_nodes - 1);
  params.chunk_rows = (*chunks)[0];
  params.in_flight = static_cast<int32_t>((*chunks)[1]);
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

struct NodeOperation {
  const char* name;
  const RowOperation& inside;  // a node
  std::string (*enqueue)(const NodeRows&, Wire&, const NodeEvents&,
                         cudaStream_t);
};
constexpr NodeOperation kNodeDispatch = {"node_dispatch", kDispatch,
                                         NodeDispatch};
constexpr NodeOperation kNodeCombine = {"node_combine", kCombine, NodeCombine};

template <const NodeOperation& op, typename Index>
ffi::Error MoveRows(CudaNodeSite* site, int32_t ordinal, cudaStream_t stream,
                    Position position, Routes routes, NumRecv num_recv,
                    RecvSrc arrivals, Index index, ffi::RemainingArgs in,
                    ffi::RemainingRets out, ffi::Dictionary attributes) {
  const ffi::ErrorOr<NcclWire*> wire = WireOn(*site->rails, ordinal);
  if (wire.has_error()) return wire.error();
  const ffi::ErrorOr<RowParams> rows =
      RowsOf(op.inside, site->site, ordinal, position,
             {routes, num_recv, arrivals}, in, out);
  if (rows.has_error()) return rows.error();
  NodeRows params = {};
  params.rows = *rows;
  params.num_tokens = Add(params, index, in);
  const ffi::Error completed =
      Complete(params, **wire, routes.dimensions()[0], out, attributes);
  if (completed.failure()) return completed;
  std::lock_guard<std::timed_mutex> lock((*wire)->mutex());
  (*wire)->Begin(op.name, site->site.channel);
  return Enqueued(op.name,
                  op.enqueue(params, **wire, (*wire)->events(), stream));
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

template <typename Index>
auto BindNodeRows() {
  return BindRouting<CudaNodeSite>()
      .template Arg<Index>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

auto BindExchange() {
  return BindCall<CudaRailSite>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>();
}

const TypeRegistration node_site("jax_ep_cuda_node_site",
                                 static_cast<CudaNodeSite*>(nullptr));
const TypeRegistration rail_site("jax_ep_cuda_rail_site",
                                 static_cast<CudaRailSite*>(nullptr));

const HandlerRegistration node_dispatch(
    "jax_ep_node_dispatch",
    Execute<MoveRows<kNodeDispatch, Sends>, BindNodeRows<Sends>>,
    Instantiate<MakeNodeSite>);
const HandlerRegistration node_combine(
    "jax_ep_node_combine",
    Execute<MoveRows<kNodeCombine, Places>, BindNodeRows<Places>>,
    Instantiate<MakeNodeSite>);
const HandlerRegistration node_exchange("jax_ep_node_exchange",
                                        Execute<Exchange, BindExchange>,
                                        Instantiate<MakeRailSite>);

}  // namespace

}  // namespace jax_ep
