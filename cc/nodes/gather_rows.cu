// Rows that leave the node, packed one after the other, what is checked before
// the first of them leaves, and the marks around each transfer of the wire.
//
// Launch: gather_rows: a warp to a row or a part of one
//         (cc/experts/expert_items.cuh). The others: one thread.
// Reads:  index, leaves[].in. Writes: leaves[].out, rows with an index once.
//         The marks write host memory, for the thread that watches the wire.
// Order:  a mark follows what stands before it on its stream. One that finds
//         `failed` traps: nothing behind it sees rows that did not come.
#include <cuda_runtime.h>

#include <cstdio>

#include "cc/experts/expert_items.cuh"
#include "cc/handshake/mesh.cuh"
#include "cc/nodes/gather_rows.h"
#include "cc/rows/rows.cuh"

namespace jax_ep {
namespace {

__global__ void __launch_bounds__(kExpertThreads)
    GatherRowsKernel(const __grid_constant__ GatherRowsParams params,
                     const int32_t parts) {
  ForEachExpertItem(params.num_rows, parts, [&](int64_t row, int32_t part) {
    const int64_t from = params.index[row];
    if (from < 0) return;
    for (int32_t i = 0; i < params.num_leaves; ++i) {
      const Leaf& leaf = params.leaves[i];
      // Lane 0 holds the only target.
      const uint64_t target =
          threadIdx.x % kWarpSize == 0
              ? reinterpret_cast<uint64_t>(leaf.out + row * leaf.row_bytes)
              : 0;
      CopyRow(leaf.in + from * leaf.row_bytes, target, 1, leaf.row_bytes, part,
              parts);
    }
  });
}

__global__ void WireCheckKernel(const WireCheck check) {
  const uint32_t position =
      *static_cast<const volatile uint32_t*>(check.position);
  if (position == check.mesh.position) return;
  OnOtherMesh(check.mesh, position,
              check.exchanges ? "node_exchange" : "node_dispatch",
              check.channel, check.rank);
}

__global__ void WireBegunKernel(WireProgress* progress, uint64_t count) {
  *static_cast<volatile uint64_t*>(&progress->begun) = count;
  __threadfence_system();
}

__global__ void WireEndedKernel(WireProgress* progress, uint64_t count) {
  if (*static_cast<volatile uint32_t*>(&progress->failed) != 0) {
    printf(
        "jax_ep: the wire between nodes has failed; see the host's message\n");
    __trap();
  }
  *static_cast<volatile uint64_t*>(&progress->ended) = count;
  __threadfence_system();
}

}  // namespace

cudaError_t LaunchGatherRows(const GatherRowsParams& params,
                             cudaStream_t stream) {
  int64_t longest = 0;
  for (int32_t i = 0; i < params.num_leaves; ++i) {
    longest = std::max(longest, params.leaves[i].row_bytes);
  }
  ExpertGrid grid;
  const cudaError_t status = ExpertGridFor(params.num_rows, longest, &grid);
  if (status != cudaSuccess) return status;
  GatherRowsKernel<<<grid.blocks, kExpertThreads, 0, stream>>>(params,
                                                               grid.parts);
  return cudaPeekAtLastError();
}

cudaError_t LaunchWireCheck(const WireCheck& check, cudaStream_t stream) {
  WireCheckKernel<<<1, 1, 0, stream>>>(check);
  return cudaPeekAtLastError();
}

cudaError_t LaunchWireBegun(WireProgress* progress, uint64_t count,
                            cudaStream_t stream) {
  WireBegunKernel<<<1, 1, 0, stream>>>(progress, count);
  return cudaPeekAtLastError();
}

cudaError_t LaunchWireEnded(WireProgress* progress, uint64_t count,
                            cudaStream_t stream) {
  WireEndedKernel<<<1, 1, 0, stream>>>(progress, count);
  return cudaPeekAtLastError();
}

const void* GatherRowsKernelAddress() {
  return reinterpret_cast<const void*>(&GatherRowsKernel);
}

const void* WireCheckKernelAddress() {
  return reinterpret_cast<const void*>(&WireCheckKernel);
}

const void* WireBegunKernelAddress() {
  return reinterpret_cast<const void*>(&WireBegunKernel);
}

const void* WireEndedKernelAddress() {
  return reinterpret_cast<const void*>(&WireEndedKernel);
}

}  // namespace jax_ep
