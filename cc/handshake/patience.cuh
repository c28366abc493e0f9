// The bound that every wait for a peer has, and a note to the host before.
#ifndef JAX_EP_CC_HANDSHAKE_PATIENCE_CUH_
#define JAX_EP_CC_HANDSHAKE_PATIENCE_CUH_

#include <cstdint>

#include "cc/handshake/peer_view.h"
#include "cc/handshake/wait_note.h"

namespace jax_ep {

static __device__ __forceinline__ void NoteText(volatile char* to,
                                                const char* from) {
#pragma unroll 1
  for (int i = 0; i < WaitNote::kTextBytes - 1; ++i) {
    to[i] = *from;
    if (*from++ == 0) return;
  }
  to[WaitNote::kTextBytes - 1] = 0;
}

// Whether a wait that has lasted `waited` ns has to end. Before that, where it
// takes long, one of the threads that wait for `peer` in this operation tells
// the host, which says so (cc/handshake/wait_notes.h). Inline and without a
// call, so that registers are not saved where waits are short.
static __device__ __forceinline__ bool RanOut(const Operation& op,
                                              const char* name, uint32_t epoch,
                                              uint64_t waited, const char* step,
                                              int32_t peer) {
  const PeerView& view = op.view;
  if (waited <= view.warn_ns) return false;
  if (waited > view.timeout_ns) return true;
  const uint64_t key = uint64_t{epoch} << 32 | op.channel;
  auto* claim = reinterpret_cast<unsigned long long*>(view.noted) + peer;
  if (atomicExch(claim, key) == key) return false;
  volatile WaitNote* note = view.notes + peer;
  note->begin = key;
  __threadfence_system();
  NoteText(note->operation, name);
  NoteText(note->step, step);
  __threadfence_system();
  note->end = key;
  return false;
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_HANDSHAKE_PATIENCE_CUH_
