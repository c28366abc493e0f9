// What the kernels of a plan share.
#ifndef JAX_EP_CC_PLAN_PLAN_CUH_
#define JAX_EP_CC_PLAN_PLAN_CUH_

#include <cstdint>

#include "cc/layout/limits.h"
#include "cc/ops.h"

namespace jax_ep {

// Where experts live.
struct ExpertMap {
  int32_t num_experts;
  int32_t local_experts;
  // ceil(2^32 / local_experts), 0 for 1: an id's rank by a multiplication,
  // exact for ids and local_experts up to 2^16.
  uint32_t reciprocal;

  __host__ __device__ explicit ExpertMap(const PlanParams& params)
      : num_experts(params.num_experts),
        local_experts(
            LocalExperts(params.num_experts, params.op.view.num_ranks)),
        reciprocal(local_experts == 1 ? 0 : 0xFFFFFFFFu / local_experts + 1) {}

  __device__ bool IsExpert(int32_t id) const {
    return static_cast<uint32_t>(id) < static_cast<uint32_t>(num_experts);
  }
  __device__ int32_t RankOf(int32_t id) const {
    return reciprocal == 0 ? id
                           : static_cast<int32_t>(__umulhi(id, reciprocal));
  }
  // Bit r is set where `id` lives on rank r. For kMaxRanksOfWord ranks.
  __device__ uint64_t RankBit(int32_t id) const {
    return IsExpert(id) ? uint64_t{1} << RankOf(id) : 0;
  }
  // The same of at most 32 ranks, without a branch.
  __device__ uint32_t LowRankBit(int32_t id) const {
    const uint32_t bit = 1u << (RankOf(id) & 31);
    return IsExpert(id) ? bit : 0;
  }
};

// Slots [demand, capacity) of this rank hold no row: the share of thread
// `thread` of `threads`.
static __device__ void FillEmptySlots(const PlanParams& params, int32_t demand,
                                      int64_t thread, int64_t threads) {
  const int64_t filled = min(int64_t{demand}, params.capacity);
  for (int64_t i = filled + thread; i < params.capacity; i += threads) {
    params.recv_src[i] = -1;
  }
  for (int64_t i = filled * params.top_k + thread;
       i < params.capacity * params.top_k; i += threads) {
    params.recv_topk_idx[i] = -1;
  }
}

// The same, called by all threads of all blocks.
static __device__ __forceinline__ void FillEmptySlots(const PlanParams& params,
                                                      int32_t demand) {
  FillEmptySlots(params, demand, int64_t{blockIdx.x} * blockDim.x + threadIdx.x,
                 int64_t{gridDim.x} * blockDim.x);
}

// What follows from received_rows [R] alone: rows that each source has for this
// rank, `demand` in all. Called by one thread.
static __device__ void WriteTotals(const PlanParams& params,
                                   const int32_t* received_rows,
                                   int32_t demand) {
  int64_t before = 0;
  for (int32_t source = 0; source < params.op.view.num_ranks; ++source) {
    const int32_t rows = received_rows[source];
    const int64_t room = max(params.capacity - before, int64_t{0});
    params.recv_counts[source] = static_cast<int32_t>(min(int64_t{rows}, room));
    before += rows;
  }
  *params.num_demand = demand;
  *params.num_recv =
      static_cast<int32_t>(min(int64_t{demand}, params.capacity));
  *params.overflow = demand > params.capacity;
}

static __device__ __forceinline__ void WriteExpertCount(
    const PlanParams& params, int32_t local_expert, int32_t count) {
  params.expert_counts[local_expert] = count;
  params.group_sizes[local_expert] = (count + params.expert_alignment - 1) /
                                     params.expert_alignment *
                                     params.expert_alignment;
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_PLAN_PLAN_CUH_
