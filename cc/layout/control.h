// Control memory of a rank: sizes and offsets, shared by host and device code.
#ifndef JAX_EP_CC_LAYOUT_CONTROL_H_
#define JAX_EP_CC_LAYOUT_CONTROL_H_

#include <cstdint>

#include "cc/layout/limits.h"
#include "cc/layout/pushed_plan.h"

namespace jax_ep {

// Control memory of one rank: kSlots control slots, one for each call site in
// flight, the first kPlanSlots of them for plans, which have two windows each
// behind all slots. Words written by peers hold (epoch << 32 | payload), so
// that they are never reset. A slot is cut as
//   epoch     u32 of the last finished operation, advanced by its last block
//   user      u32, the tag of the running operation, 0 for none; read and
//             written together with the epoch
//   finished  u32, blocks of the running operation that are done
//   ticket    u32, parts of the running operation that blocks have taken, or
//             blocks that have begun (combine of few tokens)
//   ready     [R][kReadyWords] u64 that a peer publishes before rows may move:
//             its tag, then both halves of each of its addresses
//   done      [R] u64, a peer's last row has landed
//   counts    [R][R] u64, rows from source to destination (plan)
//   turn      u64, rank 0 says that staging memory is this operation's
//   blocks    [R][kDoneBlocks] u64, a block of a peer is done (few tokens);
//             says how many blocks there are
// and a window, which takes turns with its twin from epoch to epoch (plan by
// pushed ids), as
//   ids       [R - 1][num_words][T] u64, from the peers in order: two ids each
//   counts    [num_parts][R][R] u64, as above, for each part of the tokens
//   tags      [R] u64
struct ControlLayout {
  static constexpr int64_t kSlots = 1024;
  static constexpr int64_t kPlanSlots = 128;
  // The last slot serves all flights: they follow each other on a stream of
  // their own, beside which the other slots are used.
  static constexpr int64_t kFlightSlot = kSlots - 1;
  static constexpr int32_t kReadyWords = 1 + 2 * kMaxLeaves;
  // Blocks of an operation on few tokens at most.
  static constexpr int32_t kDoneBlocks = 32;

  int64_t epoch;
  int64_t finished;
  int64_t ticket;
  int64_t ready;
  int64_t done;
  int64_t counts;
  int64_t turn;
  int64_t blocks;
  int64_t slot_bytes;
  int64_t windows;
  int64_t window_counts;
  int64_t window_tags;
  int64_t window_bytes;

  JAX_EP_HOST_DEVICE constexpr explicit ControlLayout(int32_t num_ranks)
      : epoch(0),
        finished(8),
        ticket(12),
        ready(16),
        done(ready + int64_t{num_ranks} * kReadyWords * 8),
        counts(done + num_ranks * 8),
        turn(counts + int64_t{num_ranks} * num_ranks * 8),
        blocks(turn + 8),
        slot_bytes((blocks + int64_t{num_ranks} * kDoneBlocks * 8 + 127) / 128 *
                   128),
        windows(kSlots * slot_bytes),
        window_counts(num_ranks > 1 ? PushedPlan::kIdWords * 8 : 0),
        window_tags(window_counts +
                    int64_t{PushedPlan::CountWords(num_ranks)} * 8),
        window_bytes((window_tags + num_ranks * 8 + 127) / 128 * 128) {}

  // Of a plan's slot at this epoch.
  JAX_EP_HOST_DEVICE constexpr int64_t window(int32_t slot,
                                              uint32_t epoch) const {
    return windows + (int64_t{slot} * 2 + epoch % 2) * window_bytes;
  }
  JAX_EP_HOST_DEVICE constexpr int64_t size() const {
    return windows + 2 * kPlanSlots * window_bytes;
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_LAYOUT_CONTROL_H_
