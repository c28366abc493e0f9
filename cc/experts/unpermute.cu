// unpermute: every row as the (weighted) sum of what its experts made of it.
//
// Launch: a warp to a row or a part of one (cc/experts/expert_items.cuh). Each
//         gathers the places of its row in the order of the choices, adds in
//         float32 (float64 for float64), rounds once and writes the row once;
//         a row without places becomes zero.
// Reads:  params.expert_rows, weights, leaves[].in. Writes: leaves[].out.
#include <cuda_runtime.h>

#include "cc/experts/expert_items.cuh"
#include "cc/experts/expert_ops.h"
#include "cc/rows/rows.cuh"
#include "cc/rows/weighted_rows.cuh"

namespace jax_ep {
namespace {

template <typename T, typename Wide>
__device__ __forceinline__ void SumPlaces(const UnpermuteParams& params,
                                          const Leaf& leaf, int64_t row,
                                          uint64_t source, uint32_t sources,
                                          int32_t part, int32_t parts) {
  std::byte* out = leaf.out + row * leaf.row_bytes;
  if (params.weights == nullptr) {
    return SumRow<T, Wide>(source, sources, out, leaf.row_bytes, part, parts);
  }
  const Wide weight =
      WeightOf<Wide>(params.weights, params.top_k, row, source != 0);
  if (WideUnits(source, out, leaf.row_bytes)) {
    WeightedSumUnits<T, Wide, uint4, 2>(
        source, weight, sources, out, PartOf(leaf.row_bytes / 16, part, parts));
  } else {
    WeightedSumUnits<T, Wide, T, 4>(
        source, weight, sources, out,
        PartOf(leaf.row_bytes / static_cast<int64_t>(sizeof(T)), part, parts));
  }
}

__device__ void SumLeaf(const UnpermuteParams& params, const Leaf& leaf,
                        int64_t row, uint64_t source, uint32_t sources,
                        int32_t part, int32_t parts) {
  switch (leaf.element) {
    case Element::kBf16:
      return SumPlaces<Bf16, float>(params, leaf, row, source, sources, part,
                                    parts);
    case Element::kF16:
      return SumPlaces<F16, float>(params, leaf, row, source, sources, part,
                                   parts);
    case Element::kF32:
      return SumPlaces<float, float>(params, leaf, row, source, sources, part,
                                     parts);
    case Element::kF64:
      return SumPlaces<double, double>(params, leaf, row, source, sources, part,
                                       parts);
    case Element::kNone:
      return;
  }
}

__global__ void __launch_bounds__(kExpertThreads)
    UnpermuteKernel(const __grid_constant__ UnpermuteParams params,
                    const int32_t parts) {
  ForEachExpertItem(params.capacity, parts, [&](int64_t row, int32_t part) {
    const int32_t place = ExpertRowOf(params.expert_rows, params.top_k, row);
    const uint32_t sources = __ballot_sync(kAllLanes, place >= 0);
    for (int32_t i = 0; i < params.num_leaves; ++i) {
      const Leaf& leaf = params.leaves[i];
      const uint64_t source =
          place < 0
              ? 0
              : reinterpret_cast<uint64_t>(leaf.in + place * leaf.row_bytes);
      SumLeaf(params, leaf, row, source, sources, part, parts);
    }
  });
}

}  // namespace

cudaError_t LaunchUnpermute(const UnpermuteParams& params,
                            cudaStream_t stream) {
  int64_t longest = 0;
  for (int32_t i = 0; i < params.num_leaves; ++i) {
    longest = std::max(longest, params.leaves[i].row_bytes);
  }
  ExpertGrid grid;
  const cudaError_t status = ExpertGridFor(params.capacity, longest, &grid);
  if (status != cudaSuccess) return status;
  UnpermuteKernel<<<grid.blocks, kExpertThreads, 0, stream>>>(params,
                                                              grid.parts);
  return cudaPeekAtLastError();
}

const void* UnpermuteKernelAddress() {
  return reinterpret_cast<const void*>(&UnpermuteKernel);
}

}  // namespace jax_ep
