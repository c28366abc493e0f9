#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cc/handshake/tag.h"
#include "cc/layout/pushed_plan.h"
#include "cc/ops.h"
#include "xla_ffi/attributes.h"
#include "xla_ffi/cuda_calls.h"
#include "xla_ffi/cuda_row_handlers.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/plan_results.h"

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

using TopkIdx = ffi::BufferR2<ffi::S32>;

// All but op.tag and what other processes can reach. `workspace`: which result.
ffi::ErrorOr<PlanParams> PlanOf(const Operation& op, const TopkIdx& topk_idx,
                                const PlanResults& results,
                                const ffi::RemainingRets& out, size_t workspace,
                                const ffi::Dictionary& attributes) {
  const auto sizes = Integers(attributes, {"num_experts", "expert_alignment"});
  if (sizes.has_error()) return ffi::Unexpected(sizes.error());
  PlanParams params = {};
  static_cast<PlanInputs&>(params) = {
      .op = op,
      .num_experts = static_cast<int32_t>((*sizes)[0]),
      .expert_alignment = static_cast<int32_t>((*sizes)[1]),
      .top_k = static_cast<int32_t>(topk_idx.dimensions()[1]),
      .num_tokens = topk_idx.dimensions()[0],
      .capacity = PlanCapacity(out),
      .topk_idx = topk_idx.typed_data(),
  };
  static_cast<PlanResults&>(params) = results;
  const ffi::Error error =
      ReadResult<ffi::S32, 1>(out, workspace, params.workspace);
  if (error.failure()) return ffi::Unexpected(error);
  return params;
}

// The tag of a plan, or of what begins with one.
Tag PlanTag(const CudaCallSite& site, const char* op,
            const PlanParams& params) {
  Tag tag(site.channel, site.instance, op);
  tag.Add(params.num_experts);
  tag.Add(params.expert_alignment);
  tag.Add(params.top_k);
  tag.Add(params.num_tokens);
  tag.Add(params.capacity);
  return tag;
}

ffi::Error Plan(CudaCallSite* site, int32_t ordinal, cudaStream_t stream,
                Position position, TopkIdx topk_idx, ffi::RemainingRets out,
                ffi::Dictionary attributes) {
  const ffi::ErrorOr<Operation> op = OperationOn(*site, ordinal, position);
  if (op.has_error()) return op.error();
  const ffi::ErrorOr<PlanResults> results = ReadPlanResults(out, 1);
  if (results.has_error()) return results.error();
  ffi::ErrorOr<PlanParams> params =
      PlanOf(*op, topk_idx, *results, out, kNumPlanResults, attributes);
  if (params.has_error()) return params.error();
  const auto exported = [&](const int32_t* array, int64_t size) {
    return IsExported(*site, ordinal, array, size * sizeof(int32_t));
  };
  params->exported[0] =
      exported(params->recv_topk_idx, params->capacity * params->top_k);
  params->exported[1] = exported(params->recv_src, params->capacity);
  params->exported[2] =
      exported(params->workspace,
               PlanWorkspaceSize(op->view.num_ranks, params->num_experts));
  params->op.tag = PlanTag(*site, "plan", *params).value();
  return Launched("plan", LaunchPlan(*params, stream));
}

// Results: those of a plan, N leaves [C, ...], the plan's workspace.
ffi::Error PlanDispatch(CudaCallSite* site, int32_t ordinal,
                        cudaStream_t stream, Position position,
                        TopkIdx topk_idx, ffi::RemainingArgs in,
                        ffi::RemainingRets out, ffi::Dictionary attributes) {
  if (in.size() < 1) return Invalid("jax_ep plan_dispatch: no leaf came");
  const ffi::ErrorOr<PlanResults> results = ReadPlanResults(out, in.size() + 1);
  if (results.has_error()) return results.error();
  const ffi::AnyBuffer routes = **out.get<ffi::AnyBuffer>(0);
  const ffi::ErrorOr<RowParams> rows =
      RowsOf(kDispatch, *site, ordinal, position,
             {*results, routes.dimensions()[0],
              static_cast<int32_t>(routes.dimensions()[1])},
             in, out, kNumPlanResults);
  if (rows.has_error()) return rows.error();
  const ffi::ErrorOr<PlanParams> plan =
      PlanOf(rows->op, topk_idx, *results, out, out.size() - 1, attributes);
  if (plan.has_error()) return plan.error();
  Tag tag = PlanTag(*site, "plan_dispatch", *plan);
  tag.Add(rows->op.tag);  // knows the leaves
  PlanDispatchParams params = {.plan = *plan, .rows = *rows};
  params.plan.op.tag = params.rows.op.tag = tag.value();
  return Launched("plan_dispatch", LaunchPlanDispatch(params, stream));
}

auto BindPlan() {
  return BindCall<CudaCallSite>().Arg<TopkIdx>().RemainingRets().Attrs();
}

auto BindPlanDispatch() {
  return BindCall<CudaCallSite>()
      .Arg<TopkIdx>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

const HandlerRegistration plan("jax_ep_plan",
                               Execute<Plan, BindPlan, kInGraphs>,
                               Instantiate<MakeCallSiteOf<SlotKind::kPlan>>);
const HandlerRegistration plan_dispatch(
    "jax_ep_plan_dispatch", Execute<PlanDispatch, BindPlanDispatch, kInGraphs>,
    Instantiate<MakeCallSiteOf<SlotKind::kPlan>>);

}  // namespace

}  // namespace jax_ep
