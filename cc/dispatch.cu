// dispatch: every rank stores its rows straight into its peers' buffers.
//
// Launch: view.num_sms blocks of kRowThreads.
// Roles:  block 0 publishes the addresses of this rank's outputs; all blocks
//         zero the empty slots of this rank (before they wait), then move
//         items; the last block closes with the peers.
// Reads:  params.routes, num_recv, leaves[].in. Writes: leaves[].out of this
//         rank (empty slots) and of the peers (rows).
// Order:  publish (release) -> the peers' WaitReady (acquire) -> their stores
//         -> their CloseWithPeers (release) -> ours (acquire).
#include <cuda_runtime.h>

#include "cc/device/items.cuh"
#include "cc/device/rows.cuh"
#include "cc/device/sync.cuh"
#include "cc/ops.h"

namespace jax_ep {
namespace {

__device__ void ZeroEmptySlots(const DispatchParams& params) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  const int64_t filled = *params.num_recv;
  for (int32_t i = 0; i < params.num_leaves; ++i) {
    const Leaf& leaf = params.leaves[i];
    std::byte* begin = leaf.out + filled * leaf.row_bytes;
    const int64_t bytes = (params.capacity - filled) * leaf.row_bytes;
    if (UnitBytes(reinterpret_cast<uint64_t>(begin) | bytes) == 16) {
      for (int64_t at = thread; at < bytes / 16; at += threads) {
        StoreUnit(reinterpret_cast<uint4*>(begin) + at, uint4{0, 0, 0, 0});
      }
    } else {
      for (int64_t at = thread; at < bytes; at += threads) {
        begin[at] = std::byte{0};
      }
    }
  }
}

__device__ void MoveItem(const DispatchParams& params,
                         std::byte* const* outputs, int64_t token, int32_t part,
                         int32_t parts) {
  const int32_t num_ranks = params.op.view.num_ranks;
  const int2 route = RouteOf(params, token);
  const uint32_t targets = __ballot_sync(kAllLanes, route.x >= 0);
  if (targets == 0) return;
  for (int32_t i = 0; i < params.num_leaves; ++i) {
    const Leaf& leaf = params.leaves[i];
    const uint64_t target =
        route.x < 0
            ? 0
            : reinterpret_cast<uint64_t>(outputs[i * num_ranks + route.x] +
                                         int64_t{route.y} * leaf.row_bytes);
    CopyRow(leaf.in + token * leaf.row_bytes, target, targets, leaf.row_bytes,
            part, parts);
  }
}

__global__ void __launch_bounds__(kRowThreads)
    DispatchKernel(const __grid_constant__ DispatchParams params) {
  __shared__ std::byte* outputs[kMaxLeaves * kMaxRanks];
  const Control control(params.op, "dispatch");
  if (blockIdx.x == 0) {
    __shared__ std::byte* own[kMaxLeaves];
    if (threadIdx.x < params.num_leaves) {
      own[threadIdx.x] = params.leaves[threadIdx.x].out;
    }
    __syncthreads();
    PublishReady(control, own, params.num_leaves);
  }
  ZeroEmptySlots(params);
  WaitReady(control, outputs, params.num_leaves);
  ForEachItem(params, [&](int64_t token, int32_t part, int32_t parts) {
    MoveItem(params, outputs, token, part, parts);
  });
  if (IsLastBlock(control)) {
    CloseWithPeers(control);
    AdvanceEpoch(control);
  }
}

}  // namespace

cudaError_t LaunchDispatch(const DispatchParams& params, cudaStream_t stream) {
  DispatchKernel<<<params.op.view.num_sms, kRowThreads, 0, stream>>>(params);
  return cudaPeekAtLastError();
}

const void* DispatchKernelAddress() {
  return reinterpret_cast<const void*>(&DispatchKernel);
}

}  // namespace jax_ep
