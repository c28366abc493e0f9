// permute: every row to the places of its experts, all other places zeroed.
//
// Launch: a warp to a row or a part of one (cc/experts/expert_items.cuh).
// Roles:  first the blocks share out the empty ranges, then every warp reads
//         its row once and stores it to each of its places, times the weight of
//         the choice where there are weights.
// Reads:  params.expert_rows, empty_ranges, weights, leaves[].in. Writes:
//         leaves[].out, every byte once.
#include <cuda_runtime.h>

#include "cc/experts/expert_items.cuh"
#include "cc/experts/expert_ops.h"
#include "cc/rows/rows.cuh"
#include "cc/rows/weighted_rows.cuh"
#include "cc/rows/zero.cuh"

namespace jax_ep {
namespace {

__device__ void ZeroRange(const PermuteParams& params, int32_t range,
                          int64_t thread, int64_t threads) {
  const int32_t begin = params.empty_ranges[2 * range];
  const int32_t end = params.empty_ranges[2 * range + 1];
  if (begin >= end) return;
  for (int32_t i = 0; i < params.num_leaves; ++i) {
    const Leaf& leaf = params.leaves[i];
    ZeroBytes(leaf.out + begin * leaf.row_bytes, (end - begin) * leaf.row_bytes,
              thread, threads);
  }
}

// The pads of each group to a block; the rest after the last group to all.
__device__ void ZeroEmpty(const PermuteParams& params) {
  const int32_t last = params.num_ranges - 1;
  for (int32_t range = blockIdx.x; range < last; range += gridDim.x) {
    ZeroRange(params, range, threadIdx.x, kExpertThreads);
  }
  ZeroRange(params, last, int64_t{blockIdx.x} * kExpertThreads + threadIdx.x,
            int64_t{gridDim.x} * kExpertThreads);
}

template <typename T, typename Wide>
__device__ __forceinline__ void ScaleRow(const PermuteParams& params,
                                         const Leaf& leaf, int64_t row,
                                         uint64_t target, uint32_t targets,
                                         int32_t part, int32_t parts) {
  const Wide weight =
      WeightOf<Wide>(params.weights, params.top_k, row, target != 0);
  const std::byte* in = leaf.in + row * leaf.row_bytes;
  if (WideUnits(target, in, leaf.row_bytes)) {
    ScaleUnits<T, Wide, uint4, 4>(in, target, weight, targets,
                                  PartOf(leaf.row_bytes / 16, part, parts));
  } else {
    ScaleUnits<T, Wide, T, 4>(
        in, target, weight, targets,
        PartOf(leaf.row_bytes / static_cast<int64_t>(sizeof(T)), part, parts));
  }
}

__device__ void MoveLeaf(const PermuteParams& params, const Leaf& leaf,
                         int64_t row, uint64_t target, uint32_t targets,
                         int32_t part, int32_t parts) {
  if (params.weights == nullptr) {
    return CopyRow(leaf.in + row * leaf.row_bytes, target, targets,
                   leaf.row_bytes, part, parts);
  }
  switch (leaf.element) {
    case Element::kBf16:
      return ScaleRow<Bf16, float>(params, leaf, row, target, targets, part,
                                   parts);
    case Element::kF16:
      return ScaleRow<F16, float>(params, leaf, row, target, targets, part,
                                  parts);
    case Element::kF32:
      return ScaleRow<float, float>(params, leaf, row, target, targets, part,
                                    parts);
    case Element::kF64:
      return ScaleRow<double, double>(params, leaf, row, target, targets, part,
                                      parts);
    case Element::kNone:
      return;
  }
}

__global__ void __launch_bounds__(kExpertThreads)
    PermuteKernel(const __grid_constant__ PermuteParams params,
                  const int32_t parts) {
  ZeroEmpty(params);
  ForEachExpertItem(params.capacity, parts, [&](int64_t row, int32_t part) {
    const int32_t place = ExpertRowOf(params.expert_rows, params.top_k, row);
    const uint32_t targets = __ballot_sync(kAllLanes, place >= 0);
    if (targets == 0) return;
    for (int32_t i = 0; i < params.num_leaves; ++i) {
      const Leaf& leaf = params.leaves[i];
      const uint64_t target =
          place < 0
              ? 0
              : reinterpret_cast<uint64_t>(leaf.out + place * leaf.row_bytes);
      MoveLeaf(params, leaf, row, target, targets, part, parts);
    }
  });
}

}  // namespace

cudaError_t LaunchPermute(const PermuteParams& params, cudaStream_t stream) {
  int64_t longest = 0;
  for (int32_t i = 0; i < params.num_leaves; ++i) {
    longest = std::max(longest, params.leaves[i].row_bytes);
  }
  ExpertGrid grid;
  const cudaError_t status = ExpertGridFor(params.capacity, longest, &grid);
  if (status != cudaSuccess) return status;
  PermuteKernel<<<grid.blocks, kExpertThreads, 0, stream>>>(params, grid.parts);
  return cudaPeekAtLastError();
}

const void* PermuteKernelAddress() {
  return reinterpret_cast<const void*>(&PermuteKernel);
}

}  // namespace jax_ep
