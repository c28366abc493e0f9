// What the working warps of low-latency operations have in common: their place,
// and which rank and which of its experts an id means.
#ifndef JAX_EP_CC_FEW_TOKENS_WINDOW_WORKER_CUH_
#define JAX_EP_CC_FEW_TOKENS_WINDOW_WORKER_CUH_

#include <cstdint>

#include "cc/few_tokens/window.cuh"
#include "cc/layout/limits.h"
#include "cc/rows/rows.cuh"

namespace jax_ep {

// An expert id's rank and number there.
struct Experts {
  int32_t num_experts;
  int32_t local_experts;
  Divisor divide;

  __host__ __device__ Experts(int32_t experts, int32_t num_ranks)
      : num_experts(experts),
        local_experts(LocalExperts(experts, num_ranks)),
        divide(static_cast<uint32_t>(local_experts)) {}

  __device__ bool IsExpert(int32_t id) const {
    return static_cast<uint32_t>(id) < static_cast<uint32_t>(num_experts);
  }
  // -1 for no expert.
  __device__ int32_t RankOf(int32_t id) const {
    return IsExpert(id) ? static_cast<int32_t>(divide.Divide(id)) : -1;
  }
  // -1 for an expert elsewhere.
  __device__ int32_t LocalOn(int32_t rank, int32_t id) const {
    const int32_t local = id - rank * local_experts;
    return IsExpert(id) && local >= 0 && local < local_experts ? local : -1;
  }
};

// OR over the warp of the bits of the lanes' ranks.
__device__ __forceinline__ uint64_t RanksOfWarp(int32_t rank,
                                                int32_t num_ranks) {
  const uint64_t bit = rank < 0 ? 0 : uint64_t{1} << rank;
  uint64_t ranks = __reduce_or_sync(kAllLanes, static_cast<uint32_t>(bit));
  if (num_ranks > 32) {
    ranks |=
        uint64_t{__reduce_or_sync(kAllLanes, static_cast<uint32_t>(bit >> 32))}
        << 32;
  }
  return ranks;
}

// What every working warp of an operation knows. `Launch` is its launch, with
// params, experts and row_bytes.
template <typename Launch>
struct WindowWorker {
  const Launch& launch;
  const decltype(Launch::params)& params;
  Window& window;
  const Experts& experts;
  int32_t me;
  int32_t num_ranks;
  int32_t num_tokens;
  int32_t top_k;
  int32_t num_units;  // of a row
  int32_t warp;
  int32_t lane;

  __device__ WindowWorker(const Launch& l, Window& w)
      : launch(l),
        params(l.params),
        window(w),
        experts(l.experts),
        me(w.rank()),
        num_ranks(w.num_ranks()),
        num_tokens(l.params.base.num_tokens),
        top_k(l.params.base.top_k),
        num_units(l.row_bytes / 16),
        warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize) {}
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_FEW_TOKENS_WINDOW_WORKER_CUH_
