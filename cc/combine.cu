// combine: every rank gathers its tokens' rows from its peers and sums them.
//
// Launch: view.num_sms blocks of kRowThreads.
// Roles:  block 0 publishes the addresses of this rank's inputs; all blocks
//         move items; the last block closes with the peers.
// Reads:  params.routes, leaves[].in of this rank and of the peers. Writes:
//         leaves[].out of this rank, every row once.
// Order:  publish (release; this rank's rows were written before it in stream
//         order) -> the peers' WaitReady (acquire) -> their loads -> their
//         CloseWithPeers (release) -> ours (acquire): only then may the rows be
//         overwritten.
#include <cuda_runtime.h>

#include "cc/device/items.cuh"
#include "cc/device/rows.cuh"
#include "cc/device/sync.cuh"
#include "cc/ops.h"

namespace jax_ep {
namespace {

__device__ void SumLeaf(const Leaf& leaf, uint64_t source, uint32_t sources,
                        std::byte* out, int32_t part, int32_t parts) {
  switch (leaf.element) {
    case Element::kBf16:
      return SumRow<Bf16, float>(source, sources, out, leaf.row_bytes, part,
                                 parts);
    case Element::kF16:
      return SumRow<F16, float>(source, sources, out, leaf.row_bytes, part,
                                parts);
    case Element::kF32:
      return SumRow<float, float>(source, sources, out, leaf.row_bytes, part,
                                  parts);
    case Element::kF64:
      return SumRow<double, double>(source, sources, out, leaf.row_bytes, part,
                                    parts);
    case Element::kNone:
      return;
  }
}

__device__ void SumItem(const CombineParams& params, std::byte* const* inputs,
                        int64_t token, int32_t part, int32_t parts) {
  const int32_t num_ranks = params.op.view.num_ranks;
  const int2 route = RouteOf(params, token);
  const uint32_t sources = __ballot_sync(kAllLanes, route.x >= 0);
  for (int32_t i = 0; i < params.num_leaves; ++i) {
    const Leaf& leaf = params.leaves[i];
    const uint64_t source =
        route.x < 0
            ? 0
            : reinterpret_cast<uint64_t>(inputs[i * num_ranks + route.x] +
                                         int64_t{route.y} * leaf.row_bytes);
    SumLeaf(leaf, source, sources, leaf.out + token * leaf.row_bytes, part,
            parts);
  }
}

__global__ void __launch_bounds__(kRowThreads)
    CombineKernel(const __grid_constant__ CombineParams params) {
  __shared__ std::byte* inputs[kMaxLeaves * kMaxRanks];
  const Control control(params.op, "combine");
  if (blockIdx.x == 0) {
    __shared__ std::byte* own[kMaxLeaves];
    if (threadIdx.x < params.num_leaves) {
      own[threadIdx.x] = const_cast<std::byte*>(params.leaves[threadIdx.x].in);
    }
    __syncthreads();
    PublishReady(control, own, params.num_leaves);
  }
  WaitReady(control, inputs, params.num_leaves);
  ForEachItem(params, [&](int64_t token, int32_t part, int32_t parts) {
    SumItem(params, inputs, token, part, parts);
  });
  if (IsLastBlock(control)) {
    CloseWithPeers(control);
    AdvanceEpoch(control);
  }
}

}  // namespace

cudaError_t LaunchCombine(const CombineParams& params, cudaStream_t stream) {
  CombineKernel<<<params.op.view.num_sms, kRowThreads, 0, stream>>>(params);
  return cudaPeekAtLastError();
}

const void* CombineKernelAddress() {
  return reinterpret_cast<const void*>(&CombineKernel);
}

}  // namespace jax_ep
