// Sizes of the operations between rows and experts, shared by host and device.
#ifndef JAX_EP_CC_LAYOUT_EXPERTS_H_
#define JAX_EP_CC_LAYOUT_EXPERTS_H_

#include <cstdint>

#include "cc/layout/limits.h"

namespace jax_ep {

// Experts of one rank: a warp's counters of them fit a block's shared memory.
inline constexpr int kMaxLocalExperts = 2048;

// How the (row, k) pairs of a rank are cut into chunks, a chunk to a warp.
// Scratch of expert_rows is counts [chunks][L], in int32 elements.
struct ExpertRowsChunks {
  // With few pairs chunks are short, so that no warp has many to number in
  // turn; with many they are long, so that there are few counts to add up.
  static constexpr int64_t kFewPairs = 64;
  static constexpr int64_t kManyPairs = 256;
  static constexpr int64_t kFewChunks = 128;
  // Bounds the counts that every block adds up.
  static constexpr int64_t kMaxCounts = 1 << 16;

  int64_t pairs;   // of a chunk, whole warps' worth
  int64_t chunks;  // at least 1

  JAX_EP_HOST_DEVICE constexpr ExpertRowsChunks(int64_t num_pairs,
                                                int32_t local_experts)
      : pairs(0), chunks(0) {
    const int64_t most =
        kMaxCounts / local_experts > 32 ? kMaxCounts / local_experts : 32;
    const int64_t shortest =
        num_pairs <= kFewChunks * kFewPairs ? kFewPairs : kManyPairs;
    const int64_t wanted = (num_pairs + shortest - 1) / shortest;
    const int64_t count = wanted < 1 ? 1 : (wanted < most ? wanted : most);
    pairs = ((num_pairs + count - 1) / count + 31) / 32 * 32;
    chunks = pairs == 0 ? 1 : (num_pairs + pairs - 1) / pairs;
  }
};

JAX_EP_HOST_DEVICE constexpr int64_t ExpertRowsWorkspaceSize(
    int64_t num_pairs, int32_t local_experts) {
  return ExpertRowsChunks(num_pairs, local_experts).chunks * local_experts;
}

// Scratch of dispatch_permute on each rank: words that say how far its peers'
// movers are, (epoch << 32 | payload), and two of claims here. Many blocks poll
// them, so that each word has a line of its own.
struct ProgressLayout {
  // Blocks of a rank that move rows to its peers: a warp looks at all of them.
  static constexpr int32_t kMaxMovers = 32;
  static constexpr int64_t kLineWords = 16;  // u64

  int32_t num_ranks;

  JAX_EP_HOST_DEVICE constexpr explicit ProgressLayout(int32_t ranks)
      : num_ranks(ranks) {}

  // Offsets in u64 words. The number of movers of a source,
  JAX_EP_HOST_DEVICE constexpr int64_t movers(int32_t source) const {
    return int64_t{source} * (1 + kMaxMovers) * kLineWords;
  }
  // how many of its tokens a mover is done with,
  JAX_EP_HOST_DEVICE constexpr int64_t done(int32_t source,
                                            int32_t mover) const {
    return movers(source) + (1 + mover) * kLineWords;
  }
  // the rows that were claimed for copying,
  JAX_EP_HOST_DEVICE constexpr int64_t claimed() const {
    return movers(num_ranks);
  }
  // and those that are left to the second launch.
  JAX_EP_HOST_DEVICE constexpr int64_t unclaimed() const {
    return claimed() + kLineWords;
  }
  JAX_EP_HOST_DEVICE constexpr int64_t size() const {
    return unclaimed() + kLineWords;
  }
};

// The same in int32 elements.
JAX_EP_HOST_DEVICE constexpr int64_t DispatchPermuteWorkspaceSize(
    int32_t num_ranks) {
  return 2 * ProgressLayout(num_ranks).size();
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_LAYOUT_EXPERTS_H_
