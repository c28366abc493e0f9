// Sizes of the operations between rows and experts, shared by host and device.
#ifndef JAX_EP_CC_EXPERT_LAYOUT_H_
#define JAX_EP_CC_EXPERT_LAYOUT_H_

#include <cstdint>

#include "cc/layout.h"

namespace jax_ep {

// Experts of one rank: a warp's counters of them fit a block's shared memory.
inline constexpr int kMaxLocalExperts = 2048;

// How the (row, k) pairs of a rank are cut into chunks, a chunk to a warp.
// Scratch of expert_rows is counts [chunks][L], in int32 elements.
struct ExpertRowsChunks {
  static constexpr int64_t kMinPairs = 256;
  // Bounds the counts that every block adds up.
  static constexpr int64_t kMaxCounts = 1 << 16;

  int64_t pairs;   // of a chunk, whole warps' worth
  int64_t chunks;  // at least 1

  JAX_EP_HOST_DEVICE constexpr ExpertRowsChunks(int64_t num_pairs,
                                                int32_t local_experts)
      : pairs(0), chunks(0) {
    const int64_t most =
        kMaxCounts / local_experts > 32 ? kMaxCounts / local_experts : 32;
    const int64_t wanted = (num_pairs + kMinPairs - 1) / kMinPairs;
    const int64_t count = wanted < 1 ? 1 : (wanted < most ? wanted : most);
    pairs = ((num_pairs + count - 1) / count + 31) / 32 * 32;
    chunks = pairs == 0 ? 1 : (num_pairs + pairs - 1) / pairs;
  }
};

JAX_EP_HOST_DEVICE constexpr int64_t ExpertRowsWorkspaceSize(
    int64_t num_pairs, int32_t local_experts) {
  return ExpertRowsChunks(num_pairs, local_experts).chunks * local_experts;
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_EXPERT_LAYOUT_H_
