// What one rank knows of its peers: filled once by set-up, only read by the
// data path. Plain data, passed to kernels by value.
#ifndef JAX_EP_CC_HANDSHAKE_PEER_VIEW_H_
#define JAX_EP_CC_HANDSHAKE_PEER_VIEW_H_

#include <cstddef>
#include <cstdint>

#include "cc/handshake/mesh_place.h"
#include "cc/handshake/wait_note.h"
#include "cc/layout/limits.h"

namespace jax_ep {

// Memory of a rank of another process, as set-up mapped it for this rank.
struct Region {
  uint64_t begin;  // in the owner's addresses
  uint64_t bytes;  // 0: no region
  uint64_t here;   // where this rank's device sees it
};

// A set of ranks.
struct RankSet {
  static constexpr int kWordBits = 32;
  static constexpr int kWords = kMaxRanks / kWordBits;
  static_assert(kMaxRanks % kWordBits == 0);

  uint32_t words[kWords];

  // A loop over all words: on a GPU the set then may stand in registers.
  JAX_EP_HOST_DEVICE void Add(int32_t rank) {
    for (int word = 0; word < kWords; ++word) {
      if (rank / kWordBits == word) words[word] |= 1u << rank % kWordBits;
    }
  }
  JAX_EP_HOST_DEVICE bool Has(int32_t rank) const {
    return Has(rank / kWordBits, rank % kWordBits);
  }
  // Whether the rank of this bit of a word is in it.
  JAX_EP_HOST_DEVICE bool Has(int word, int32_t bit) const {
    return words[word] >> bit & 1;
  }
};

struct PeerView {
  int32_t rank;
  int32_t num_ranks;
  int32_t num_sms;  // blocks of a row-moving kernel
  bool has_bulk;    // the GPU has bulk copies and the shared memory for them
  uint64_t timeout_ns;  // a wait for a peer ends after this
  // One that lasts longer than this says so in notes[peer], memory of the host,
  // once for each value of noted[peer], memory of the device. Never where it is
  // not below timeout_ns.
  uint64_t warn_ns;
  WaitNote* notes;
  uint64_t* noted;
  MeshPlace mesh;  // of this rank's device, on the communicator's mesh
  // Control memory of each rank (cc/layout/control.h, ControlLayout), at
  // addresses that this rank's device can use. control[rank] is its own.
  std::byte* control[kMaxRanks];
  // What follows serves groups of several processes. Ranks of this rank's
  // process, whose addresses are good as they are.
  RankSet same_process;
  // [R][kMaxRegions] in this device's memory, those of rank r from
  // r * kMaxRegions on; nullptr where all ranks belong to one process.
  const Region* regions;
  // How staging memory is cut, from ControlLayout::size() on in each rank's
  // control memory. Equal on all ranks, and no more channels than num_sms of
  // any rank: a channel is a block. 0 where all ranks belong to one process.
  int32_t num_channels;
  int64_t staging_bytes;
};

// One operation of one call site.
struct Operation {
  PeerView view;
  int32_t slot;      // control slot, in [0, ControlLayout::kSlots)
  uint32_t channel;  // for messages
  // Equal on all ranks in the same operation: its channel in the low half, a
  // hash of what else tells operations apart, sizes included, in the high half.
  uint32_t tag;
  // In this device's memory: its position on the program's mesh.
  const uint32_t* position;
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_HANDSHAKE_PEER_VIEW_H_
