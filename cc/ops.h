// Kernels of the CUDA backend: parameters and launchers.
//
// All launchers enqueue one kernel on `stream` of the current device and return
// at once: no allocation, no synchronisation, fit for stream capture. Every
// rank of the group must launch the same operation with the same slot. Shapes
// as in jax_ep.Plan; arrays are row-major and at least aligned to an element.
#ifndef JAX_EP_CC_OPS_H_
#define JAX_EP_CC_OPS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/element.h"
#include "cc/handshake/peer_view.h"
#include "cc/layout/limits.h"
#include "cc/plan/plan_results.h"

namespace jax_ep {

struct PlanInputs {
  Operation op;
  int32_t num_experts;
  int32_t expert_alignment;
  int32_t top_k;
  int64_t num_tokens;
  int64_t capacity;
  const int32_t* topk_idx;  // [T, K]
};

struct PlanParams : PlanInputs, PlanResults {
  int32_t* workspace;  // PlanWorkspaceSize elements
  // Whether other processes can reach recv_topk_idx, recv_src and workspace;
  // looked at only where there are other processes.
  bool exported[3];
};

struct Leaf {
  const std::byte* in;
  std::byte* out;
  int64_t row_bytes;
  Element element;
  // Whether other processes can reach the side of the receive buffer: `out` in
  // dispatch, `in` in combine; looked at only where there are other processes.
  bool exported = false;
};

struct RowParams {
  Operation op;
  int32_t routes_per_token;
  int32_t num_leaves;
  int64_t num_tokens;
  int64_t capacity;
  const int32_t* routes;    // [T, routes_per_token, 2]
  const int32_t* num_recv;  // []
  const int32_t* recv_src;  // [C]
  Leaf leaves[kMaxLeaves];
  // An operation between nodes is several of these, each on some of the tokens
  // (cc/nodes/node_moves.h). recv_src calls token t of rank r
  // (first_source + r) * source_tokens + first_token + t; in the launch of a
  // whole operation it is r * num_tokens + t, for which all of this is 0.
  int32_t first_source = 0;
  int64_t source_tokens = 0;
  int64_t first_token = 0;
  // dispatch: leaves slots that no row comes to as they are.
  bool keeps_empty = false;
};

// Leaves [T, ...] -> [C, ...].
using DispatchParams = RowParams;
// Leaves [C, ...] -> [T, ...].
using CombineParams = RowParams;

// A plan and a dispatch by it: `rows.routes`, `num_recv` and `recv_src` are the
// plan's results. Both hold the same operation.
struct PlanDispatchParams {
  PlanParams plan;
  DispatchParams rows;
};

// Takes the way of LaunchPushedPlan where PushedPlan in cc/layout/pushed_plan.h
// says so.
cudaError_t LaunchPlan(const PlanParams& params, cudaStream_t stream);
cudaError_t LaunchPushedPlan(const PlanParams& params, cudaStream_t stream);
// `begun`, if not nullptr, is recorded when all blocks of the kernel have
// begun.
cudaError_t LaunchDispatch(const DispatchParams& params, cudaStream_t stream,
                           cudaEvent_t begun = nullptr);
cudaError_t LaunchCombine(const CombineParams& params, cudaStream_t stream,
                          cudaEvent_t begun = nullptr);
// What the two above do where tokens are not few
// (cc/few_tokens/few_tokens.cuh).
cudaError_t LaunchGeneralDispatch(const DispatchParams& params,
                                  cudaStream_t stream,
                                  cudaEvent_t begun = nullptr);
cudaError_t LaunchGeneralCombine(const CombineParams& params,
                                 cudaStream_t stream,
                                 cudaEvent_t begun = nullptr);

// Where PlanDispatchFits in cc/layout/few_tokens.h says so, in a control slot
// of a plan.
cudaError_t LaunchPlanDispatch(const PlanDispatchParams& params,
                               cudaStream_t stream);

// The kernels themselves, for loading them ahead of the first launch.
const void* PlanKernelAddress();
std::vector<const void*> PushedPlanKernelAddresses();
std::vector<const void*> PlanDispatchKernelAddresses();
const void* DispatchKernelAddress();
const void* FewDispatchKernelAddress();
const void* CombineKernelAddress();
std::vector<const void*> FewCombineKernelAddresses();

// Dynamic shared memory of the row-moving kernels where view.has_bulk.
inline constexpr int kBulkSharedBytes = 192 << 10;

}  // namespace jax_ep

#endif  // JAX_EP_CC_OPS_H_
