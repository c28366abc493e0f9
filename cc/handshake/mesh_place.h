// Where a device stands on a mesh. For host and device code.
//
// JAX keeps a lowered program for every mesh of the same shape, so a program
// may run on other devices, or the same in another order, than those that it
// was lowered for. Therefore each call brings along the position that its
// program's mesh has this device at, and compares it with the communicator's
// before anything is written.
#ifndef JAX_EP_CC_HANDSHAKE_MESH_PLACE_H_
#define JAX_EP_CC_HANDSHAKE_MESH_PLACE_H_

#include <cstdint>

#include "cc/layout/limits.h"

namespace jax_ep {

struct MeshPlace {
  uint32_t position;   // among all devices, the last axis first
  uint32_t num_ranks;  // of the communicator's axis
  uint32_t stride;     // positions from one rank to the next

  JAX_EP_HOST_DEVICE constexpr uint32_t RankAt(uint32_t at) const {
    return at / stride % num_ranks;
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_HANDSHAKE_MESH_PLACE_H_
