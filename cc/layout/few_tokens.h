// What counts as few tokens: from shapes alone, so that all ranks agree.
#ifndef JAX_EP_CC_LAYOUT_FEW_TOKENS_H_
#define JAX_EP_CC_LAYOUT_FEW_TOKENS_H_

#include <cstdint>

#include "cc/layout/limits.h"
#include "cc/layout/pushed_plan.h"

namespace jax_ep {

// Where tokens are few (cc/few_tokens/few_tokens.cuh) rows are cut into pieces
// of at most so many bytes, and a rank has no more than so many pieces: 256
// tokens of 14 KB. All ranks have to agree, so it is a matter of sizes alone.
inline constexpr int64_t kPieceBytes = 5120;
inline constexpr int64_t kFewPieces = 768;
JAX_EP_HOST_DEVICE constexpr int64_t PiecesOfRow(int64_t row_bytes) {
  return (row_bytes + kPieceBytes - 1) / kPieceBytes;
}

// Ranks of plan_dispatch at most: a lane each.
inline constexpr int32_t kPlanDispatchRanks = 32;

// Whether one launch makes a plan by pushed ids and dispatches `num_leaves`
// leaves, of row_bytes [num_leaves] a row (cc/few_tokens/plan_dispatch.cu).
constexpr bool PlanDispatchFits(int32_t num_ranks, int64_t num_tokens,
                                int32_t top_k, int32_t num_experts,
                                const int64_t* row_bytes, int64_t num_leaves) {
  if (num_ranks > kPlanDispatchRanks || num_tokens < 1) return false;
  if (num_leaves < 1 || num_leaves > kMaxLeaves) return false;
  int64_t pieces = 0;
  for (int64_t i = 0; i < num_leaves; ++i) {
    const int64_t of_row = PiecesOfRow(row_bytes[i]);
    if (of_row < 1 || of_row > kFewPieces) return false;
    pieces += of_row * num_tokens;
    if (pieces > kFewPieces) return false;
  }
  return PushedPlan(num_ranks, num_tokens, top_k, num_experts).fits;
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_LAYOUT_FEW_TOKENS_H_
