// What a kernel tells the host of a wait that takes long, through memory of the
// host: printf's words would come when the kernel has ended.
#ifndef JAX_EP_CC_HANDSHAKE_WAIT_NOTE_H_
#define JAX_EP_CC_HANDSHAKE_WAIT_NOTE_H_

#include <cstdint>

namespace jax_ep {

// A rank's wait for one peer. `begin` is written first and `end` last, both
// (epoch << 32 | channel), which tells one operation from the next.
struct WaitNote {
  static constexpr int kTextBytes = 24;

  uint64_t begin;
  char operation[kTextBytes];  // ends with a 0
  char step[kTextBytes];       // the same
  uint64_t end;
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_HANDSHAKE_WAIT_NOTE_H_
