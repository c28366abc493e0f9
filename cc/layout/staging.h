// Staging memory, and how rows fill it: shared by host and device code.
#ifndef JAX_EP_CC_LAYOUT_STAGING_H_
#define JAX_EP_CC_LAYOUT_STAGING_H_

#include <cstdint>

#include "cc/layout/limits.h"

namespace jax_ep {

// Staging memory: what the peers of its owner write and the owner reads, cut as
// [channel][peer][slot]. On the host the owner is a process, in shared memory;
// on GPUs it is a rank, behind its control memory. Every word has a cache line
// of its own, so that channels never contend. It begins with a header of one
// line: what set-up writes (host), or in rank 0's memory the word that says
// which operation's turn it is (GPUs). A channel is cut as
//   asleep  u32, the reader's thread sleeps on this futex (host)
//   tail    [peer] u64, slots filled so far; the peer is the producer
//   head    [peer] u64, slots drained so far: host, of what the owner consumes;
//           GPUs, of what it produces, so that it polls its own memory
//   slots   [peer][num_slots][slot_bytes]
// On GPUs the second word of a tail's line is the owner's own: slots drained so
// far. Peers are the other owners in order: p of P stands at p in the memory of
// those below it, and at p - 1 in the memory of those above.
struct StagingLayout {
  static constexpr int64_t kLine = 128;
  // A call is announced in one slot.
  static constexpr int64_t kMinSlotBytes = 1024;
  static constexpr int64_t kMaxSlotBytes = 64 << 10;
  static constexpr int64_t kMinSlots = 2;

  int64_t num_channels;
  int64_t num_peers;
  int64_t num_slots;
  int64_t slot_bytes;
  int64_t channel_bytes;

  // Shares `staging_bytes` out over channels and peers. Large slots first: they
  // cost the least; then as many as there is room for.
  JAX_EP_HOST_DEVICE constexpr StagingLayout(int64_t staging_bytes,
                                             int64_t channels,
                                             int64_t num_owners)
      : num_channels(channels),
        num_peers(num_owners > 1 ? num_owners - 1 : 1),
        num_slots(0),
        slot_bytes(0),
        channel_bytes(0) {
    const int64_t ring_bytes = staging_bytes / (num_channels * num_peers);
    slot_bytes = ring_bytes / kMinSlots / kLine * kLine;
    if (slot_bytes > kMaxSlotBytes) slot_bytes = kMaxSlotBytes;
    num_slots = slot_bytes > 0 ? ring_bytes / slot_bytes : 0;
    channel_bytes =
        kLine * (1 + 2 * num_peers) + num_peers * num_slots * slot_bytes;
  }

  // The least staging_bytes that Valid() accepts.
  static constexpr int64_t MinBytes(int64_t channels, int64_t num_owners) {
    const int64_t peers = num_owners > 1 ? num_owners - 1 : 1;
    return channels * peers * kMinSlots * kMinSlotBytes;
  }

  constexpr bool Valid() const { return slot_bytes >= kMinSlotBytes; }
  constexpr int64_t size() const {
    return kLine + num_channels * channel_bytes;
  }

  // Where `peer` stands in the memory of `owner`.
  JAX_EP_HOST_DEVICE static constexpr int64_t PeerIndex(int64_t owner,
                                                        int64_t peer) {
    return peer < owner ? peer : peer - 1;
  }

  JAX_EP_HOST_DEVICE constexpr int64_t asleep(int64_t channel) const {
    return kLine + channel * channel_bytes;
  }
  JAX_EP_HOST_DEVICE constexpr int64_t tail(int64_t channel,
                                            int64_t peer) const {
    return asleep(channel) + kLine * (1 + peer);
  }
  JAX_EP_HOST_DEVICE constexpr int64_t drained(int64_t channel,
                                               int64_t peer) const {
    return tail(channel, peer) + 8;
  }
  JAX_EP_HOST_DEVICE constexpr int64_t head(int64_t channel,
                                            int64_t peer) const {
    return asleep(channel) + kLine * (1 + num_peers + peer);
  }
  JAX_EP_HOST_DEVICE constexpr int64_t slot(int64_t channel, int64_t peer,
                                            int64_t i) const {
    return asleep(channel) + kLine * (1 + 2 * num_peers) +
           (peer * num_slots + i) * slot_bytes;
  }
};

// How rows fill the slots of a ring on GPUs. Rows that fit stand whole, as many
// to a slot as there is room for; a larger one is cut into about equal pieces,
// a piece to a slot. Both ends know it from the sizes alone.
struct RowCut {
  int64_t row_bytes;
  int64_t pieces;       // of a row
  int64_t piece_bytes;  // from piece to piece, a multiple of 16
  int64_t per_slot;     // pieces; 1 where rows are cut

  // `slot_bytes` is a multiple of 16.
  JAX_EP_HOST_DEVICE constexpr RowCut(int64_t row, int64_t slot_bytes)
      : row_bytes(row),
        pieces((row + slot_bytes - 1) / slot_bytes),
        piece_bytes(((row + pieces - 1) / pieces + 15) / 16 * 16),
        per_slot(slot_bytes / piece_bytes) {}

  // The first byte of piece `part` in its row, and its size.
  JAX_EP_HOST_DEVICE constexpr int64_t begin(int64_t part) const {
    return part * piece_bytes;
  }
  JAX_EP_HOST_DEVICE constexpr int64_t bytes(int64_t part) const {
    return part < pieces - 1 ? piece_bytes : row_bytes - begin(part);
  }
  // Slots that so many pieces take.
  JAX_EP_HOST_DEVICE constexpr int64_t slots(int64_t count) const {
    return (count + per_slot - 1) / per_slot;
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_LAYOUT_STAGING_H_
