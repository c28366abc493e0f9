// How plans are cut, and their scratch: shared by host and device code.
#ifndef JAX_EP_CC_LAYOUT_PUSHED_PLAN_H_
#define JAX_EP_CC_LAYOUT_PUSHED_PLAN_H_

#include <cstdint>

#include "cc/layout/limits.h"

namespace jax_ep {

// How a plan by pushed ids (cc/plan/pushed_plan.cu) is cut, from shapes alone,
// so that all ranks agree. Each rank's tokens stand in `num_parts` parts: one
// where a block can take the tokens of all ranks at once, else enough to keep
// several blocks busy.
struct PushedPlan {
  // Parts, and so blocks, at most.
  static constexpr int32_t kMaxParts = 32;
  // Words of ids that a rank has room for, from all of its peers.
  static constexpr int64_t kIdWords = 16384;
  // Tokens of all ranks that one block takes, and what it gets of more.
  static constexpr int64_t kTokensOfOneBlock = 1024;
  static constexpr int64_t kTokensPerBlock = 512;
  // A part's tokens, so that each has a thread; rows that it counts, warps
  // times ranks.
  static constexpr int64_t kMaxPartTokens = 1024;
  static constexpr int32_t kMaxPartRows = 1024;
  // Local experts that a block counts in shared memory.
  static constexpr int32_t kMaxLocalExperts = 2048;
  // What stands for "no expert" among 16-bit ids.
  static constexpr int32_t kNoExpert = 0xFFFF;

  bool fits;          // else the plan is made by cc/plan/plan.cu
  int32_t num_words;  // of a token: two ids each
  int32_t num_parts;
  int32_t part_tokens;  // a multiple of 32; the last part may have fewer

  // Words for counts: [num_parts][R][R] fits.
  JAX_EP_HOST_DEVICE static constexpr int32_t CountWords(int32_t num_ranks) {
    constexpr int32_t kMost = kMaxRanksOfWord * kMaxRanksOfWord;
    const int32_t wanted = kMaxParts * num_ranks * num_ranks;
    return wanted < kMost ? wanted : kMost;
  }

  JAX_EP_HOST_DEVICE constexpr PushedPlan(int32_t num_ranks, int64_t num_tokens,
                                          int32_t top_k, int32_t num_experts)
      : fits(false), num_words((top_k + 1) / 2), num_parts(1), part_tokens(32) {
    const int64_t peers = num_ranks > 1 ? num_ranks - 1 : 1;
    if (num_ranks > kMaxRanksOfWord) return;
    if (num_tokens * num_words * peers > kIdWords) return;
    if (num_experts > kNoExpert) return;
    if (LocalExperts(num_experts, num_ranks) > kMaxLocalExperts) return;
    const int64_t tokens = num_tokens * num_ranks;
    int64_t parts = tokens <= kTokensOfOneBlock
                        ? 1
                        : (tokens + kTokensPerBlock - 1) / kTokensPerBlock;
    if (parts > kMaxParts) parts = kMaxParts;
    const int32_t room = CountWords(num_ranks) / (num_ranks * num_ranks);
    if (parts > room) parts = room;
    const int64_t share = (num_tokens + parts * 32 - 1) / (parts * 32) * 32;
    if (share > kMaxPartTokens || share / 32 * num_ranks > kMaxPartRows) return;
    fits = true;
    if (share == 0) return;
    part_tokens = static_cast<int32_t>(share);
    num_parts = static_cast<int32_t>((num_tokens + share - 1) / share);
  }
};

// Scratch of a plan, in int32 elements. By pushed ids: counts of the local
// experts by each block. Else received [R][L], what each source sends to each
// local expert, added up there by the sources themselves.
JAX_EP_HOST_DEVICE constexpr int64_t PlanWorkspaceSize(int32_t num_ranks,
                                                       int32_t num_experts) {
  const int32_t local_experts = LocalExperts(num_experts, num_ranks);
  const bool pushed = local_experts <= PushedPlan::kMaxLocalExperts;
  const int32_t rows = pushed && num_ranks < PushedPlan::kMaxParts
                           ? PushedPlan::kMaxParts
                           : num_ranks;
  return int64_t{rows} * local_experts;
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_LAYOUT_PUSHED_PLAN_H_
