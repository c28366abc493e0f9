// What one rank knows of its peers: filled once by set-up, only read by the
// data path. Plain data, passed to kernels by value.
#ifndef JAX_EP_CC_PEER_VIEW_H_
#define JAX_EP_CC_PEER_VIEW_H_

#include <cstddef>
#include <cstdint>

#include "cc/layout.h"

namespace jax_ep {

struct PeerView {
  int32_t rank;
  int32_t num_ranks;
  int32_t num_sms;  // blocks of a row-moving kernel
  bool has_bulk;    // the GPU has bulk copies and the shared memory for them
  uint64_t timeout_ns;  // a wait for a peer ends after this
  // Control memory of each rank (cc/layout.h, ControlLayout), at addresses that
  // this rank's device can use. control[rank] is its own.
  std::byte* control[kMaxRanks];
};

// One operation of one call site.
struct Operation {
  PeerView view;
  int32_t slot;      // control slot, in [0, ControlLayout::kSlots)
  uint32_t channel;  // for messages, and to tell operations apart
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_PEER_VIEW_H_
