#include <algorithm>
#include <cstdint>
#include <vector>

#include "cc/cpu/expert_ops.h"

namespace jax_ep::cpu {

void ExpertRows(const ExpertRowsParams& params) {
  const int64_t room = params.expert_capacity;
  const int64_t align = params.expert_alignment;
  // An id that is no local expert's, -1 above all, has no place.
  const auto is_here = [&](int32_t expert) {
    return expert >= 0 && expert < params.local_experts;
  };
  std::vector<int64_t> next(params.local_experts, 0);
  for (int64_t pair = 0; pair < params.num_pairs; ++pair) {
    const int32_t expert = params.recv_topk_idx[pair];
    if (is_here(expert)) ++next[expert];
  }
  // From counts to the starts of groups.
  int64_t start = 0;
  int32_t* range = params.empty_ranges;
  for (int64_t& count : next) {
    const int64_t end = start + (count + align - 1) / align * align;
    *range++ = static_cast<int32_t>(std::min(start + count, room));
    *range++ = static_cast<int32_t>(std::min(end, room));
    count = start;
    start = end;
  }
  *range++ = static_cast<int32_t>(std::min(start, room));
  *range++ = static_cast<int32_t>(room);
  for (int64_t pair = 0; pair < params.num_pairs; ++pair) {
    const int32_t expert = params.recv_topk_idx[pair];
    const int64_t place = is_here(expert) ? next[expert]++ : room;
    params.expert_rows[pair] = place < room ? static_cast<int32_t>(place) : -1;
  }
}

}  // namespace jax_ep::cpu
