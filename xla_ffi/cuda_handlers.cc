#include "xla_ffi/cuda_handlers.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "cc/current_device.h"
#include "cc/expert_ops.h"
#include "cc/layout.h"
#include "cc/ops.h"
#include "cc/wait_notes.h"
#include "xla_ffi/element.h"
#include "xla_ffi/registry.h"

namespace jax_ep {

namespace ffi = xla::ffi;

ffi::TypeId CudaCallSite::id = {};
const XLA_FFI_TypeInfo kCudaCallSiteInfo = ffi::MakeTypeInfo<CudaCallSite>();

namespace {

void Unmap(const std::vector<CudaCommunicator::Range>& mapped) {
  static auto* const unmap =
      DriverFunction<CUresult(CUdeviceptr, size_t)>("cuMemUnmap");
  static auto* const free_address =
      DriverFunction<CUresult(CUdeviceptr, size_t)>("cuMemAddressFree");
  if (unmap == nullptr || free_address == nullptr) return;
  for (const CudaCommunicator::Range& range : mapped) {
    // Addresses that are still mapped must not be given to others.
    if (unmap(range.begin, range.bytes) == CUDA_SUCCESS) {
      free_address(range.begin, range.bytes);
    }
  }
}

}  // namespace

CudaCommunicator::~CudaCommunicator() {
  for (const int64_t table : note_tables) WaitNotes::Get().Remove(table);
  if (views.empty()) return;
  const OnDevice current(views.begin()->first);
  // At the end of the process the driver may be gone; then so is the memory.
  if (current.status() != cudaSuccess) return;
  // No kernel of this process may still poll or store in what goes, on any of
  // its GPUs. Those of other processes have mappings of their own, and the
  // physical memory lives as long as the last of them. Waited for before
  // freeing: cudaFree() waits as well, but may keep other threads meanwhile
  // from launching what its device waits for.
  for (const auto& [ordinal, view] : views) {
    if (cudaSetDevice(ordinal) == cudaSuccess) cudaDeviceSynchronize();
  }
  Unmap(mapped);
  for (uint64_t address : allocated) {
    cudaFree(reinterpret_cast<void*>(address));
  }
  if (notes != nullptr) cudaFreeHost(notes);
}

namespace {

std::atomic<int64_t> num_handler_calls{0};

ffi::Error Invalid(std::string message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::move(message));
}

// What ranks compare before rows move: they must be in the same operation of
// the same program, with the same sizes.
class Tag {
 public:
  Tag(const CudaCallSite& site, const char* op) : channel_(site.channel) {
    Add(site.channel);
    Add(site.instance);
    for (; *op != 0; ++op) Add(*op);
  }

  void Add(uint64_t number) {
    hash_ = (hash_ ^ number) * 0x9E3779B97F4A7C15;
    hash_ ^= hash_ >> 32;
  }

  uint32_t value() const {
    return static_cast<uint32_t>(hash_ >> 48 << 16) | (channel_ & 0xffff);
  }

 private:
  uint64_t hash_ = 1;
  uint32_t channel_;
};

// Whether ranks of other processes can reach a buffer of this device.
bool IsExported(const CudaCallSite& site, int32_t ordinal, const void* buffer,
                uint64_t bytes) {
  if (!site.communicator->has_other_processes || bytes == 0) return false;
  const auto found = site.communicator->exported.find(ordinal);
  if (found == site.communicator->exported.end()) return false;
  const auto address = reinterpret_cast<uint64_t>(buffer);
  return std::any_of(found->second.begin(), found->second.end(),
                     [&](const CudaCommunicator::Range& range) {
                       const uint64_t offset = address - range.begin;
                       return offset < range.bytes &&
                              bytes <= range.bytes - offset;
                     });
}

}  // namespace

ffi::ErrorOr<Operation> OperationOn(const CudaCallSite& site, int32_t ordinal,
                                    const Position& position) {
  num_handler_calls.fetch_add(1, std::memory_order_relaxed);
  // XLA's ordinal among the GPUs that this process sees, as set-up has it from
  // JAX's local_hardware_id.
  const auto view = site.communicator->views.find(ordinal);
  if (view == site.communicator->views.end()) {
    return ffi::Unexpected(Invalid("jax_ep: GPU " + std::to_string(ordinal) +
                                   " is not on the communicator's mesh"));
  }
  return Operation{.view = view->second,
                   .slot = site.slot,
                   .channel = site.channel,
                   .tag = 0,
                   .position = position.typed_data()};
}

namespace {

ffi::Error Launched(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jax_ep ") + op +
                              ": launch failed: " + cudaGetErrorString(status));
}

// Results of a plan, as kernels get them.
struct PlanResults {
  ffi::ResultBufferR3<ffi::S32>& routes;
  ffi::ResultBufferR0<ffi::S32>& num_recv;
  ffi::ResultBufferR0<ffi::S32>& num_demand;
  ffi::ResultBufferR0<ffi::PRED>& overflow;
  ffi::ResultBufferR1<ffi::S32>& recv_counts;
  ffi::ResultBufferR2<ffi::S32>& recv_topk_idx;
  ffi::ResultBufferR1<ffi::S32>& recv_src;
  ffi::ResultBufferR1<ffi::S32>& expert_counts;
  ffi::ResultBufferR1<ffi::S32>& group_sizes;
};

// All but op.tag and what other processes can reach.
ffi::ErrorOr<PlanParams> PlanOf(const Operation& op,
                                const ffi::BufferR2<ffi::S32>& topk_idx,
                                const PlanResults& results, int32_t* workspace,
                                const ffi::Dictionary& attributes) {
  const auto num_experts = attributes.get<int64_t>("num_experts");
  const auto alignment = attributes.get<int64_t>("expert_alignment");
  if (num_experts.has_error()) return ffi::Unexpected(num_experts.error());
  if (alignment.has_error()) return ffi::Unexpected(alignment.error());
  return PlanParams{
      .op = op,
      .num_experts = static_cast<int32_t>(*num_experts),
      .expert_alignment = static_cast<int32_t>(*alignment),
      .top_k = static_cast<int32_t>(topk_idx.dimensions()[1]),
      .num_tokens = topk_idx.dimensions()[0],
      .capacity = results.recv_src->dimensions()[0],
      .topk_idx = topk_idx.typed_data(),
      .routes = results.routes->typed_data(),
      .num_recv = results.num_recv->typed_data(),
      .num_demand = results.num_demand->typed_data(),
      .overflow = results.overflow->typed_data(),
      .recv_counts = results.recv_counts->typed_data(),
      .recv_topk_idx = results.recv_topk_idx->typed_data(),
      .recv_src = results.recv_src->typed_data(),
      .expert_counts = results.expert_counts->typed_data(),
      .group_sizes = results.group_sizes->typed_data(),
      .workspace = workspace,
      .exported = {},
  };
}

// The tag of a plan, or of what begins with one.
Tag PlanTag(const CudaCallSite& site, const char* op,
            const PlanParams& params) {
  Tag tag(site, op);
  tag.Add(params.num_experts);
  tag.Add(params.expert_alignment);
  tag.Add(params.top_k);
  tag.Add(params.num_tokens);
  tag.Add(params.capacity);
  return tag;
}

ffi::Error Plan(CudaCallSite* site, int32_t ordinal, cudaStream_t stream,
                Position position, ffi::BufferR2<ffi::S32> topk_idx,
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
  const ffi::ErrorOr<Operation> op = OperationOn(*site, ordinal, position);
  if (op.has_error()) return op.error();
  ffi::ErrorOr<PlanParams> params =
      PlanOf(*op, topk_idx,
             {routes, num_recv, num_demand, overflow, recv_counts,
              recv_topk_idx, recv_src, expert_counts, group_sizes},
             workspace->typed_data(), attributes);
  if (params.has_error()) return params.error();
  const auto exported = [&](auto& buffer) {
    return IsExported(*site, ordinal, buffer->untyped_data(),
                      buffer->size_bytes());
  };
  params->exported[0] = exported(recv_topk_idx);
  params->exported[1] = exported(recv_src);
  params->exported[2] = exported(workspace);
  params->op.tag = PlanTag(*site, "plan", *params).value();
  return Launched("plan", LaunchPlan(*params, stream));
}

// What dispatch and combine share; `capacity_is_out` says on which side the
// receive buffer stands.
ffi::ErrorOr<RowParams> Rows(const CudaCallSite& site, int32_t ordinal,
                             const Position& position, const Routing& routing,
                             const ffi::RemainingArgs& in,
                             const ffi::RemainingRets& out,
                             bool capacity_is_out) {
  const ffi::ErrorOr<Operation> op = OperationOn(site, ordinal, position);
  if (op.has_error()) return ffi::Unexpected(op.error());
  if (in.size() > kMaxLeaves) {
    return ffi::Unexpected(Invalid("jax_ep: too many leaves in one call"));
  }
  RowParams params = {};
  Tag tag(site, capacity_is_out ? "dispatch" : "combine");
  params.op = *op;
  params.routes_per_token =
      static_cast<int32_t>(routing.routes.dimensions()[1]);
  params.num_leaves = static_cast<int32_t>(in.size());
  params.num_tokens = routing.routes.dimensions()[0];
  params.routes = routing.routes.typed_data();
  params.num_recv = routing.num_recv.typed_data();
  params.recv_src = routing.recv_src.typed_data();
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
        .exported =
            IsExported(site, ordinal, rows.untyped_data(), rows.size_bytes()),
    };
    tag.Add(params.leaves[i].row_bytes);
    tag.Add(static_cast<uint64_t>(params.leaves[i].element));
  }
  tag.Add(params.routes_per_token);
  tag.Add(params.num_tokens);
  tag.Add(params.capacity);
  params.op.tag = tag.value();
  return params;
}

ffi::Error Dispatch(CudaCallSite* site, int32_t ordinal, cudaStream_t stream,
                    Position position, ffi::BufferR3<ffi::S32> routes,
                    ffi::BufferR0<ffi::S32> num_recv,
                    ffi::BufferR1<ffi::S32> recv_src, ffi::RemainingArgs in,
                    ffi::RemainingRets out) {
  const ffi::ErrorOr<RowParams> params = DispatchRows(
      *site, ordinal, position, {routes, num_recv, recv_src}, in, out);
  if (params.has_error()) return params.error();
  return Launched("dispatch", LaunchDispatch(*params, stream));
}

ffi::Error Combine(CudaCallSite* site, int32_t ordinal, cudaStream_t stream,
                   Position position, ffi::BufferR3<ffi::S32> routes,
                   ffi::BufferR0<ffi::S32> num_recv,
                   ffi::BufferR1<ffi::S32> recv_src, ffi::RemainingArgs in,
                   ffi::RemainingRets out) {
  const ffi::ErrorOr<RowParams> params = CombineRows(
      *site, ordinal, position, {routes, num_recv, recv_src}, in, out);
  if (params.has_error()) return params.error();
  return Launched("combine", LaunchCombine(*params, stream));
}

// Results: those of a plan, N leaves [C, ...], the plan's workspace.
ffi::Error PlanDispatch(CudaCallSite* site, int32_t ordinal,
                        cudaStream_t stream, Position position,
                        ffi::BufferR2<ffi::S32> topk_idx, ffi::RemainingArgs in,
                        ffi::ResultBufferR3<ffi::S32> routes,
                        ffi::ResultBufferR0<ffi::S32> num_recv,
                        ffi::ResultBufferR0<ffi::S32> num_demand,
                        ffi::ResultBufferR0<ffi::PRED> overflow,
                        ffi::ResultBufferR1<ffi::S32> recv_counts,
                        ffi::ResultBufferR2<ffi::S32> recv_topk_idx,
                        ffi::ResultBufferR1<ffi::S32> recv_src,
                        ffi::ResultBufferR1<ffi::S32> expert_counts,
                        ffi::ResultBufferR1<ffi::S32> group_sizes,
                        ffi::RemainingRets out, ffi::Dictionary attributes) {
  if (in.size() < 1 || out.size() != in.size() + 1) {
    return Invalid("jax_ep plan_dispatch: as many leaves must come as go");
  }
  const ffi::ErrorOr<RowParams> rows = DispatchRows(
      *site, ordinal, position, {*routes, *num_recv, *recv_src}, in, out);
  if (rows.has_error()) return rows.error();
  void* const workspace = (**out.get<ffi::AnyBuffer>(in.size())).untyped_data();
  const ffi::ErrorOr<PlanParams> plan =
      PlanOf(rows->op, topk_idx,
             {routes, num_recv, num_demand, overflow, recv_counts,
              recv_topk_idx, recv_src, expert_counts, group_sizes},
             static_cast<int32_t*>(workspace), attributes);
  if (plan.has_error()) return plan.error();
  Tag tag = PlanTag(*site, "plan_dispatch", *plan);
  tag.Add(rows->op.tag);  // knows the leaves
  PlanDispatchParams params = {.plan = *plan, .rows = *rows};
  params.plan.op.tag = params.rows.op.tag = tag.value();
  return Launched("plan_dispatch", LaunchPlanDispatch(params, stream));
}

// Operands: N leaves [T, ...]. Results: G leaves [S, ...] and N - G leaves
// [C, ...]; then scratch, [C, ...] for each of the first G and the workspace.
ffi::Error DispatchPermute(CudaCallSite* site, int32_t ordinal,
                           cudaStream_t stream, Position position,
                           ffi::BufferR3<ffi::S32> routes,
                           ffi::BufferR1<ffi::S32> recv_counts,
                           ffi::BufferR1<ffi::S32> recv_src,
                           ffi::BufferR2<ffi::S32> expert_rows,
                           ffi::BufferR2<ffi::S32> empty_ranges,
                           ffi::RemainingArgs in, ffi::RemainingRets out) {
  const ffi::ErrorOr<Operation> op = OperationOn(*site, ordinal, position);
  if (op.has_error()) return op.error();
  const size_t leaves = in.size();
  if (leaves >= kMaxLeaves || out.size() <= leaves ||
      out.size() > 2 * leaves + 1) {
    return Invalid("jax_ep: too many leaves in one call");
  }
  const size_t grouped = out.size() - leaves - 1;
  Tag tag(*site, "dispatch_permute");
  DispatchPermuteParams params = {};
  params.rows.op = *op;
  params.rows.routes_per_token = static_cast<int32_t>(routes.dimensions()[1]);
  params.rows.num_leaves = static_cast<int32_t>(leaves);
  params.rows.num_tokens = routes.dimensions()[0];
  params.rows.capacity = recv_src.dimensions()[0];
  params.rows.routes = routes.typed_data();
  params.num_grouped = static_cast<int32_t>(grouped);
  params.top_k = static_cast<int32_t>(expert_rows.dimensions()[1]);
  params.num_ranges = static_cast<int32_t>(empty_ranges.dimensions()[0]);
  params.recv_counts = recv_counts.typed_data();
  params.recv_src = recv_src.typed_data();
  params.expert_rows = expert_rows.typed_data();
  params.empty_ranges = empty_ranges.typed_data();
  params.workspace = static_cast<uint64_t*>(
      (**out.get<ffi::AnyBuffer>(out.size() - 1)).untyped_data());
  for (size_t i = 0; i < leaves; ++i) {
    const bool is_grouped = i < grouped;
    const ffi::AnyBuffer landing =
        **out.get<ffi::AnyBuffer>(is_grouped ? leaves + i : i);
    params.rows.leaves[i] = {
        .in = static_cast<const std::byte*>(
            in.get<ffi::AnyBuffer>(i)->untyped_data()),
        .out = static_cast<std::byte*>(landing.untyped_data()),
        .row_bytes =
            static_cast<int64_t>(landing.size_bytes()) / params.rows.capacity,
        .element = Element::kNone,
    };
    if (is_grouped) {
      params.grouped[i] = static_cast<std::byte*>(
          (**out.get<ffi::AnyBuffer>(i)).untyped_data());
    }
    tag.Add(params.rows.leaves[i].row_bytes);
  }
  tag.Add(params.rows.num_tokens);
  tag.Add(params.rows.capacity);
  params.rows.op.tag = tag.value();
  return Launched("dispatch_permute", LaunchDispatchPermute(params, stream));
}

}  // namespace

ffi::ErrorOr<std::unique_ptr<CudaCallSite>> MakeCallSite(
    SlotKind kind, ffi::Dictionary attributes) {
  const auto read = ReadSite<CudaCommunicator>(attributes, "cuda");
  if (read.has_error()) return ffi::Unexpected(read.error());
  int64_t number = 0;
  if (IsNumbered(kind)) {
    const ffi::ErrorOr<int64_t> found = attributes.get<int64_t>("site");
    if (found.has_error()) return ffi::Unexpected(found.error());
    number = *found;
  }
  const auto channel = static_cast<uint32_t>(read->channel);
  const ControlSlots::Site site = read->communicator->slots.Take(
      kind, static_cast<uint32_t>(number), channel);
  return std::make_unique<CudaCallSite>(CudaCallSite{
      .communicator = read->communicator,
      .slot = site.slot,
      .channel = channel,
      .instance = site.instance,
  });
}

ffi::ErrorOr<RowParams> DispatchRows(const CudaCallSite& site, int32_t ordinal,
                                     const Position& position,
                                     const Routing& routing,
                                     const ffi::RemainingArgs& in,
                                     const ffi::RemainingRets& out) {
  return Rows(site, ordinal, position, routing, in, out,
              /*capacity_is_out=*/true);
}

ffi::ErrorOr<RowParams> CombineRows(const CudaCallSite& site, int32_t ordinal,
                                    const Position& position,
                                    const Routing& routing,
                                    const ffi::RemainingArgs& in,
                                    const ffi::RemainingRets& out) {
  ffi::ErrorOr<RowParams> params = Rows(site, ordinal, position, routing, in,
                                        out, /*capacity_is_out=*/false);
  if (params.has_error()) return params;
  for (int32_t i = 0; i < params->num_leaves; ++i) {
    if (params->leaves[i].element == Element::kNone) {
      return ffi::Unexpected(
          Invalid("jax_ep combine: a leaf's dtype cannot be summed"));
    }
  }
  return params;
}

int64_t NumHandlerCalls() {
  return num_handler_calls.load(std::memory_order_relaxed);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    EpPlanInstantiate,
    [](ffi::Dictionary attributes) {
      return MakeCallSite(SlotKind::kPlan, attributes);
    },
    ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    EpRowsInstantiate,
    [](ffi::Dictionary attributes) {
      return MakeCallSite(SlotKind::kRows, attributes);
    },
    ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    EpPlan, Plan,
    ffi::Ffi::Bind()
        .Ctx<ffi::State<CudaCallSite>>()
        .Ctx<ffi::DeviceOrdinal>()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<Position>()
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
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpDispatch, Dispatch, BindRows<CudaCallSite>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpCombine, Combine, BindRows<CudaCallSite>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    EpPlanDispatch, PlanDispatch,
    ffi::Ffi::Bind()
        .Ctx<ffi::State<CudaCallSite>>()
        .Ctx<ffi::DeviceOrdinal>()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<Position>()
        .Arg<ffi::BufferR2<ffi::S32>>()  // topk_idx
        .RemainingArgs()
        .Ret<ffi::BufferR3<ffi::S32>>()   // routes
        .Ret<ffi::BufferR0<ffi::S32>>()   // num_recv
        .Ret<ffi::BufferR0<ffi::S32>>()   // num_demand
        .Ret<ffi::BufferR0<ffi::PRED>>()  // overflow
        .Ret<ffi::BufferR1<ffi::S32>>()   // recv_counts
        .Ret<ffi::BufferR2<ffi::S32>>()   // recv_topk_idx
        .Ret<ffi::BufferR1<ffi::S32>>()   // recv_src
        .Ret<ffi::BufferR1<ffi::S32>>()   // expert_counts
        .Ret<ffi::BufferR1<ffi::S32>>()   // group_sizes
        .RemainingRets()
        .Attrs(),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    EpDispatchPermute, DispatchPermute,
    ffi::Ffi::Bind()
        .Ctx<ffi::State<CudaCallSite>>()
        .Ctx<ffi::DeviceOrdinal>()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<Position>()
        .Arg<ffi::BufferR3<ffi::S32>>()  // routes
        .Arg<ffi::BufferR1<ffi::S32>>()  // recv_counts
        .Arg<ffi::BufferR1<ffi::S32>>()  // recv_src
        .Arg<ffi::BufferR2<ffi::S32>>()  // expert_rows
        .Arg<ffi::BufferR2<ffi::S32>>()  // empty_ranges
        .RemainingArgs()
        .RemainingRets(),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep
