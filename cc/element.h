// How an element of a leaf is summed.
#ifndef JAX_EP_CC_ELEMENT_H_
#define JAX_EP_CC_ELEMENT_H_

#include <cstdint>

namespace jax_ep {

// kNone: rows of such a leaf are moved, never summed.
enum class Element : int32_t { kNone, kBf16, kF16, kF32, kF64 };

}  // namespace jax_ep

#endif  // JAX_EP_CC_ELEMENT_H_
