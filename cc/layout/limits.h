// Limits, and sizes that all families share, for host and device code.
//
// Units are bytes unless a name says otherwise. Everything is 64-bit: buffers
// past 2^31 elements are ordinary.
#ifndef JAX_EP_CC_LAYOUT_LIMITS_H_
#define JAX_EP_CC_LAYOUT_LIMITS_H_

#include <cstdint>

#if defined(__CUDACC__)
#define JAX_EP_HOST_DEVICE __host__ __device__
#else
#define JAX_EP_HOST_DEVICE
#endif

namespace jax_ep {

// Ranks of one group: an NVLink domain has up to 72. A multiple of a warp's
// lanes.
inline constexpr int kMaxRanks = 96;
// Where a set of ranks is one 64-bit word.
inline constexpr int kMaxRanksOfWord = 64;
// Experts that a token may name: the routes of a token fit a warp's lanes.
inline constexpr int kMaxTopK = 32;
// Leaves that one launch carries.
inline constexpr int kMaxLeaves = 16;
// Pieces of memory that a rank can share with other processes: the arenas in
// which XLA's buffers lie.
inline constexpr int kMaxRegions = 8;
// Set in a published address that lies in no such piece: ranks of other
// processes cannot reach it. No address has this bit.
inline constexpr uint64_t kNotExported = uint64_t{1} << 63;

// Experts that a rank owns at most: expert e lives on rank e / that number.
JAX_EP_HOST_DEVICE constexpr int32_t LocalExperts(int32_t num_experts,
                                                  int32_t num_ranks) {
  return (num_experts + num_ranks - 1) / num_ranks;
}

// Pairs (rank, slot) that a plan keeps for each token.
JAX_EP_HOST_DEVICE constexpr int32_t RoutesPerToken(int32_t top_k,
                                                    int32_t num_ranks) {
  return top_k < num_ranks ? top_k : num_ranks;
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_LAYOUT_LIMITS_H_
