#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/cpu/ops.h"
#include "cc/cpu/wire.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/attributes.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/host_calls.h"
#include "xla_ffi/plan_results.h"

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

// Everybody's ids come here; then the plan of the ranks here is as with all
// ranks in one process.
void PlanBetweenProcesses(const HostCall& call, const cpu::PlanSizes& sizes) {
  struct Shared {
    std::vector<std::vector<std::byte>> elsewhere;
    std::vector<cpu::PlanBuffers> ranks;
  };
  auto shared = std::make_shared<Shared>();
  shared->ranks = Arrivals<cpu::PlanBuffers>(call);
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
  shares.push_back(cpu::MakePlanMove(call.comm().group_places[call.group],
                                     num_bytes, std::move(ids)));
  Post(call, shape, std::move(shares),
       [shared, sizes, rendezvous = call.rendezvous](const std::string& error) {
         if (!error.empty()) return rendezvous->Finish(false, error);
         // Not on the channel's thread: others' rows wait there.
         rendezvous->Then([shared, sizes, rendezvous] {
           cpu::Plan(sizes, shared->ranks);
           rendezvous->Finish(false);
         });
       });
}

ffi::Future Plan(HostCallSite* site, ffi::RunId run, int32_t ordinal,
                 Position position, ffi::BufferR2<ffi::S32> topk_idx,
                 ffi::RemainingRets out, ffi::Dictionary attributes) {
  const auto numbers =
      Integers(attributes, {"num_experts", "expert_alignment"});
  if (numbers.has_error()) return Failed(numbers.error().message());
  const auto results = ReadPlanResults(out, 1);
  if (results.has_error()) return Failed(results.error().message());
  const cpu::PlanSizes sizes = {
      .num_ranks = site->communicator->num_ranks,
      .num_experts = static_cast<int32_t>((*numbers)[0]),
      .expert_alignment = static_cast<int32_t>((*numbers)[1]),
      .top_k = static_cast<int32_t>(topk_idx.dimensions()[1]),
      .num_tokens = topk_idx.dimensions()[0],
      .capacity = PlanCapacity(out),
  };
  auto buffers = std::make_shared<cpu::PlanBuffers>(
      cpu::PlanBuffers{*results, topk_idx.typed_data()});
  return Meet(site, run, ordinal, position, std::move(buffers),
              [&](const HostCall& call) {
                if (!call.local()) return PlanBetweenProcesses(call, sizes);
                cpu::Plan(sizes, Arrivals<cpu::PlanBuffers>(call));
                call.rendezvous->Finish(/*on_last_ranks_thread=*/true);
              });
}

// Results: those of a plan, its workspace.
auto BindPlan() {
  return BindCall()
      .Arg<ffi::BufferR2<ffi::S32>>()  // topk_idx
      .RemainingRets()
      .Attrs();
}

const HandlerRegistration plan("jax_ep_plan", Execute<Plan, BindPlan>,
                               Instantiate<MakeCallSiteOf<cpu::Op::kPlan>>);

}  // namespace

}  // namespace jax_ep
