// Whether the program's mesh has this device where the communicator's has it.
#ifndef JAX_EP_CC_HANDSHAKE_MESH_CUH_
#define JAX_EP_CC_HANDSHAKE_MESH_CUH_

#include <cstdint>
#include <cstdio>

#include "cc/handshake/mesh_place.h"
#include "cc/handshake/peer_view.h"
#include "cc/ptx.cuh"

namespace jax_ep {

// Whether the caller says why its launch ends: one thread does, where it knows,
// the last one of block 0. The others wait for its trap, because theirs might
// come before its words.
static __device__ bool TellsWhy() {
  const bool tells = threadIdx.x == blockDim.x - 1;
  const uint64_t patience_ns = !tells            ? 1'000'000'000
                               : blockIdx.x != 0 ? 1'000'000
                                                 : 0;
  const uint64_t start = ptx::GlobalTimer();
  while (ptx::GlobalTimer() - start < patience_ns) __nanosleep(1000);
  return tells;
}

// Out of line: keeps printf's stack out of what is common.
[[noreturn]] static __device__ __noinline__ void OnOtherMesh(
    const MeshPlace mesh, uint32_t found, const char* name, uint32_t channel,
    int32_t rank) {
  if (TellsWhy()) {
    printf(
        "jax_ep %s (channel %u): rank %d found its device at position %u (rank "
        "%u) of the program's mesh, but at position %u (rank %u) of the "
        "communicator's; call the program under jax.set_mesh(comm.mesh), or "
        "make a communicator of its mesh\n",
        name, channel, rank, found, mesh.RankAt(found), mesh.position,
        mesh.RankAt(mesh.position));
  }
  __trap();
  __builtin_unreachable();
}

// Where the program has this device: asked for with this, and looked at with
// the next.
static __device__ __forceinline__ uint32_t LoadPosition(const Operation& op) {
  return *static_cast<const volatile uint32_t*>(op.position);
}
static __device__ __forceinline__ void CheckPosition(const Operation& op,
                                                     uint32_t position,
                                                     const char* name) {
  if (position != op.view.mesh.position) {
    OnOtherMesh(op.view.mesh, position, name, op.channel, op.view.rank);
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_HANDSHAKE_MESH_CUH_
