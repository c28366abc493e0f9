#include <algorithm>
#include <bitset>
#include <cstdint>
#include <vector>

#include "cc/cpu/ops.h"
#include "cc/layout/limits.h"

namespace jax_ep::cpu {
namespace {

// Bit r is set where a token with these ids goes to rank r.
std::bitset<kMaxRanks> RanksOf(const int32_t* ids, const PlanSizes& sizes,
                               int32_t local_experts) {
  std::bitset<kMaxRanks> ranks;
  for (int32_t k = 0; k < sizes.top_k; ++k) {
    if (ids[k] >= 0 && ids[k] < sizes.num_experts) {
      ranks.set(ids[k] / local_experts);
    }
  }
  return ranks;
}

// Writes what receiver `rank` learns of a row that lands in `slot`.
void WriteReceived(const PlanSizes& sizes, const PlanBuffers& to, int32_t rank,
                   int32_t local_experts, const int32_t* ids, int64_t slot,
                   int32_t source) {
  to.recv_src[slot] = source;
  for (int32_t k = 0; k < sizes.top_k; ++k) {
    const int32_t local = ids[k] - rank * local_experts;
    const bool here = ids[k] >= 0 && ids[k] < sizes.num_experts && local >= 0 &&
                      local < local_experts;
    to.recv_topk_idx[slot * sizes.top_k + k] = here ? local : -1;
    if (here) ++to.expert_counts[local];
  }
}

void FillEmpty(const PlanSizes& sizes, const PlanBuffers& to, int64_t demand) {
  const int64_t recv = std::min(demand, sizes.capacity);
  *to.num_demand = static_cast<int32_t>(demand);
  *to.num_recv = static_cast<int32_t>(recv);
  *to.overflow = demand > sizes.capacity;
  std::fill(to.recv_src + recv, to.recv_src + sizes.capacity, -1);
  std::fill(to.recv_topk_idx + recv * sizes.top_k,
            to.recv_topk_idx + sizes.capacity * sizes.top_k, -1);
}

}  // namespace

void Plan(const PlanSizes& sizes, const std::vector<PlanBuffers>& ranks) {
  const int32_t local_experts =
      LocalExperts(sizes.num_experts, sizes.num_ranks);
  const int32_t width = RoutesPerToken(sizes.top_k, sizes.num_ranks);
  for (const PlanBuffers& to : ranks) {
    if (!to.here()) continue;
    std::fill_n(to.expert_counts, local_experts, 0);
    std::fill_n(to.recv_counts, sizes.num_ranks, 0);
  }
  // Rows so far for each receiver: sources in order, tokens in order.
  std::vector<int64_t> demand(sizes.num_ranks, 0);
  for (int32_t source = 0; source < sizes.num_ranks; ++source) {
    const PlanBuffers& from = ranks[source];
    if (from.here()) std::fill_n(from.routes, sizes.num_tokens * width * 2, -1);
    for (int64_t token = 0; token < sizes.num_tokens; ++token) {
      const int32_t* ids = from.topk_idx + token * sizes.top_k;
      const std::bitset<kMaxRanks> targets = RanksOf(ids, sizes, local_experts);
      int32_t* route = from.here() ? from.routes + token * width * 2 : nullptr;
      for (int32_t rank = 0; rank < sizes.num_ranks; ++rank) {
        if (!targets[rank]) continue;
        const int64_t slot = demand[rank]++;
        if (slot < sizes.capacity && route != nullptr) {
          route[0] = rank;
          route[1] = static_cast<int32_t>(slot);
        }
        if (slot < sizes.capacity && ranks[rank].here()) {
          ++ranks[rank].recv_counts[source];
          WriteReceived(
              sizes, ranks[rank], rank, local_experts, ids, slot,
              static_cast<int32_t>(source * sizes.num_tokens + token));
        }
        if (route != nullptr) route += 2;
      }
    }
  }
  for (int32_t rank = 0; rank < sizes.num_ranks; ++rank) {
    const PlanBuffers& to = ranks[rank];
    if (!to.here()) continue;
    FillEmpty(sizes, to, demand[rank]);
    for (int32_t e = 0; e < local_experts; ++e) {
      const int32_t a = sizes.expert_alignment;
      to.group_sizes[e] = (to.expert_counts[e] + a - 1) / a * a;
    }
  }
}

}  // namespace jax_ep::cpu
