// Sizes and offsets shared by host and device code, computed in one place.
//
// Units are bytes unless a name says otherwise. Everything is 64-bit: buffers
// past 2^31 elements are ordinary.
#ifndef JAX_EP_CC_LAYOUT_H_
#define JAX_EP_CC_LAYOUT_H_

#include <cstdint>

#if defined(__CUDACC__)
#define JAX_EP_HOST_DEVICE __host__ __device__
#else
#define JAX_EP_HOST_DEVICE
#endif

namespace jax_ep {

// Ranks of one group. The only limit on R; masks of ranks are 64-bit words.
inline constexpr int kMaxRanks = 64;
// Experts that a token may name: the routes of a token fit a warp's lanes.
inline constexpr int kMaxTopK = 32;
// Leaves that one launch carries.
inline constexpr int kMaxLeaves = 16;

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

// Scratch of a plan, in int32 elements: received [R][L], what each source sends
// to each local expert, added up there by the sources themselves.
JAX_EP_HOST_DEVICE constexpr int64_t PlanWorkspaceSize(int32_t num_ranks,
                                                       int32_t num_experts) {
  return int64_t{num_ranks} * LocalExperts(num_experts, num_ranks);
}

// Control memory of one rank: kSlots control slots, one for each call site in
// flight. Words written by peers hold (epoch << 32 | payload), so that they are
// never reset. A slot is cut as
//   epoch     u32 of the last finished operation, advanced by its last block
//   finished  u32, blocks of the running operation that are done
//   ready     [R][kReadyWords] u64 that a peer publishes before rows may move:
//             its channel, then both halves of each of its addresses
//   done      [R] u64, a peer's last row has landed
//   counts    [R][R] u64, rows from source to destination (plan)
struct ControlLayout {
  static constexpr int64_t kSlots = 1024;
  static constexpr int32_t kReadyWords = 1 + 2 * kMaxLeaves;

  int64_t epoch;
  int64_t finished;
  int64_t ready;
  int64_t done;
  int64_t counts;
  int64_t slot_bytes;

  JAX_EP_HOST_DEVICE constexpr explicit ControlLayout(int32_t num_ranks)
      : epoch(0),
        finished(4),
        ready(8),
        done(ready + int64_t{num_ranks} * kReadyWords * 8),
        counts(done + num_ranks * 8),
        slot_bytes((counts + int64_t{num_ranks} * num_ranks * 8 + 127) / 128 *
                   128) {}

  JAX_EP_HOST_DEVICE constexpr int64_t size() const {
    return kSlots * slot_bytes;
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_LAYOUT_H_
