#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/cpu/ops.h"
#include "xla_ffi/host_calls.h"
#include "xla_ffi/host_handlers.h"

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

// Everybody's ids come here; then the plan of the ranks here is as with all
// ranks in one process.
void PlanBetweenProcesses(const Met& met, const cpu::PlanSizes& sizes) {
  struct Shared {
    std::vector<std::vector<std::byte>> elsewhere;
    std::vector<cpu::PlanBuffers> ranks;
  };
  auto shared = std::make_shared<Shared>();
  shared->ranks = Arrivals<cpu::PlanBuffers>(met);
  shared->elsewhere.resize(shared->ranks.size());
  const int64_t num_bytes =
      sizes.num_tokens * sizes.top_k * int64_t{sizeof(int32_t)};
  std::vector<std::byte*> ids;
  for (size_t rank = 0; rank < shared->ranks.size(); ++rank) {
    cpu::PlanBuffers& buffers = shared->ranks[rank];
    if (!buffers.here()) {
      shared->elsewhere[rank].resize(num_bytes);
      buffers.topk_idx =
          reinterpret_cast<const int32_t*>(shared->elsewhere[rank].data());
    }
    // Those that are here are only read.
    ids.push_back(
        reinterpret_cast<std::byte*>(const_cast<int32_t*>(buffers.topk_idx)));
  }
  const cpu::CallShape shape = {
      .op = cpu::Op::kPlan,
      .sizes = {sizes.num_tokens, sizes.top_k, sizes.capacity,
                sizes.num_experts, sizes.expert_alignment}};
  std::vector<std::unique_ptr<cpu::Move>> shares;
  shares.push_back(cpu::MakePlanMove(met.comm().group_places[met.group],
                                     num_bytes, std::move(ids)));
  Post(met, shape, std::move(shares),
       [shared, sizes, meeting = met.meeting](const std::string& error) {
         if (!error.empty()) return meeting->Finish(false, error);
         // Not on the channel's thread: others' rows wait there.
         meeting->Then([shared, sizes, meeting] {
           cpu::Plan(sizes, shared->ranks);
           meeting->Finish(false);
         });
       });
}

ffi::Future Plan(HostCallSite* site, ffi::RunId run, int32_t ordinal,
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
                 ffi::ResultBufferR1<ffi::S32> /*workspace*/,
                 ffi::Dictionary attributes) {
  const auto num_experts = attributes.get<int64_t>("num_experts");
  const auto alignment = attributes.get<int64_t>("expert_alignment");
  if (num_experts.has_error()) return Failed(num_experts.error().message());
  if (alignment.has_error()) return Failed(alignment.error().message());
  const cpu::PlanSizes sizes = {
      .num_ranks = site->communicator->num_ranks,
      .num_experts = static_cast<int32_t>(*num_experts),
      .expert_alignment = static_cast<int32_t>(*alignment),
      .top_k = static_cast<int32_t>(topk_idx.dimensions()[1]),
      .num_tokens = topk_idx.dimensions()[0],
      .capacity = recv_src->dimensions()[0],
  };
  auto buffers = std::make_shared<cpu::PlanBuffers>(cpu::PlanBuffers{
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
  });
  return Meet(site, run, ordinal, position, std::move(buffers),
              [&](const Met& met) {
                if (!met.local()) return PlanBetweenProcesses(met, sizes);
                cpu::Plan(sizes, Arrivals<cpu::PlanBuffers>(met));
                met.meeting->Finish(/*on_last_ranks_thread=*/true);
              });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    EpPlanInstantiate,
    [](ffi::Dictionary attributes) {
      return InstantiateHostCall("plan", attributes);
    },
    ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    EpPlan, Plan,
    ffi::Ffi::Bind()
        .Ctx<ffi::State<HostCallSite>>()
        .Ctx<ffi::RunId>()
        .Ctx<ffi::DeviceOrdinal>()
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
        .Attrs());

}  // namespace jax_ep
