// The results of a plan, as jax_ep.Plan has them. Arrays are row-major: T
// tokens of K experts, R ranks, C slots, L local experts.
#ifndef JAX_EP_CC_PLAN_PLAN_RESULTS_H_
#define JAX_EP_CC_PLAN_PLAN_RESULTS_H_

#include <cstdint>

namespace jax_ep {

struct PlanResults {
  int32_t* routes;         // [T, min(K, R), 2]
  int32_t* num_recv;       // []
  int32_t* num_demand;     // []
  bool* overflow;          // []
  int32_t* recv_counts;    // [R]
  int32_t* recv_topk_idx;  // [C, K]
  int32_t* recv_src;       // [C]
  int32_t* expert_counts;  // [L]
  int32_t* group_sizes;    // [L]
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_PLAN_PLAN_RESULTS_H_
