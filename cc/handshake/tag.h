// What ranks compare before rows move: they must be in the same operation of
// the same program, with the same sizes.
#ifndef JAX_EP_CC_HANDSHAKE_TAG_H_
#define JAX_EP_CC_HANDSHAKE_TAG_H_

#include <cstdint>

namespace jax_ep {

class Tag {
 public:
  // `instance`: which of the program's call sites that share the channel.
  Tag(uint32_t channel, uint32_t instance, const char* op) : channel_(channel) {
    Add(channel);
    Add(instance);
    for (; *op != 0; ++op) Add(*op);
  }

  void Add(uint64_t number) {
    hash_ = (hash_ ^ number) * 0x9E3779B97F4A7C15;
    hash_ ^= hash_ >> 32;
  }

  // The channel in the low half, the hash in the high half.
  uint32_t value() const {
    return static_cast<uint32_t>(hash_ >> 48 << 16) | (channel_ & 0xffff);
  }

 private:
  uint64_t hash_ = 1;
  uint32_t channel_;
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_HANDSHAKE_TAG_H_
