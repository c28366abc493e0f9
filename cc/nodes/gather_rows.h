// Kernels beside the wire between nodes: parameters and launchers.
//
// All are local. They enqueue on `stream` of the current device and return at
// once.
#ifndef JAX_EP_CC_NODES_GATHER_ROWS_H_
#define JAX_EP_CC_NODES_GATHER_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cc/handshake/mesh_place.h"
#include "cc/layout/limits.h"
#include "cc/ops.h"

namespace jax_ep {

struct GatherRowsParams {
  int32_t num_leaves;
  int64_t num_rows;      // of leaves[].out
  const int32_t* index;  // [num_rows]: the row of leaves[].in, -1: none
  Leaf leaves[kMaxLeaves];
};

// Where the wire of a rank stands, in memory of the host that its GPU sees.
// Counts of transfers, from 1 on; a transfer is in the air while they differ.
struct WireProgress {
  uint64_t begun;   // written by the GPU
  uint64_t ended;   // written by the GPU
  uint32_t failed;  // written by the host: what came is not to be used
};

// What is looked at before anything crosses; see Operation.
struct WireCheck {
  const uint32_t* position;
  MeshPlace mesh;
  uint32_t channel;
  int32_t rank;
  bool exchanges;  // an exchange, not a dispatch
};

// out[i] = in[index[i]]; rows without an index are left as they are.
cudaError_t LaunchGatherRows(const GatherRowsParams& params,
                             cudaStream_t stream);
cudaError_t LaunchWireBegun(WireProgress* progress, uint64_t count,
                            cudaStream_t stream);
// Traps where the program's mesh has this device at another position.
cudaError_t LaunchWireCheck(const WireCheck& check, cudaStream_t stream);
// Traps where the wire has failed.
cudaError_t LaunchWireEnded(WireProgress* progress, uint64_t count,
                            cudaStream_t stream);

// The kernels themselves, for loading them ahead of the first launch.
const void* GatherRowsKernelAddress();
const void* WireCheckKernelAddress();
const void* WireBegunKernelAddress();
const void* WireEndedKernelAddress();

}  // namespace jax_ep

#endif  // JAX_EP_CC_NODES_GATHER_ROWS_H_
