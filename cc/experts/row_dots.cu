// row_dots: the product of every row with each of its places: what the weights
// of unpermute get as their gradient.
//
// Launch: a warp to a row (cc/experts/expert_items.cuh). A lane adds up its
//         columns, the warp the lanes, in an order that never changes; choices
//         without a place get exactly 0.
// Reads:  params.expert_rows, leaves[]. Writes: params.dots.
#include <cuda_runtime.h>

#include "cc/experts/expert_items.cuh"
#include "cc/experts/expert_ops.h"
#include "cc/rows/rows.cuh"
#include "cc/rows/weighted_rows.cuh"

namespace jax_ep {
namespace {

// Lane k adds the product with the k-th choice to `dot`.
template <typename T, typename Wide>
__device__ __forceinline__ void AddDots(const RowDotsParams::Pair& leaf,
                                        int64_t row, int32_t place,
                                        uint32_t places, Wide& dot) {
  const std::byte* left = leaf.row + row * leaf.row_bytes;
  const uint64_t own = place < 0
                           ? 0
                           : reinterpret_cast<uint64_t>(leaf.expert_row +
                                                        place * leaf.row_bytes);
  const bool wide = WideUnits(own, left, leaf.row_bytes);
  for (uint32_t todo = places; todo != 0; todo &= todo - 1) {
    const int k = __ffs(todo) - 1;
    const auto* right = reinterpret_cast<const std::byte*>(AddressOf(own, k));
    Wide sum =
        wide ? DotUnits<T, Wide, uint4, 4>(left, right, leaf.row_bytes / 16)
             : DotUnits<T, Wide, T, 4>(
                   left, right,
                   leaf.row_bytes / static_cast<int64_t>(sizeof(T)));
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    if (threadIdx.x % kWarpSize == k) dot += sum;
  }
}

template <typename Wide>
__device__ __forceinline__ void Store(const RowDotsParams& params, int64_t row,
                                      Wide dot) {
  const int32_t k = threadIdx.x % kWarpSize;
  if (k < params.top_k) {
    static_cast<Wide*>(params.dots)[row * params.top_k + k] = dot;
  }
}

__device__ void DotRow(const RowDotsParams& params, int64_t row) {
  const int32_t place = ExpertRowOf(params.expert_rows, params.top_k, row);
  const uint32_t places = __ballot_sync(kAllLanes, place >= 0);
  // All leaves of a call are float64, or none is.
  if (params.leaves[0].element == Element::kF64) {
    double dot = 0;
    for (int32_t i = 0; i < params.num_leaves; ++i) {
      AddDots<double, double>(params.leaves[i], row, place, places, dot);
    }
    return Store(params, row, dot);
  }
  float dot = 0;
  for (int32_t i = 0; i < params.num_leaves; ++i) {
    const RowDotsParams::Pair& leaf = params.leaves[i];
    switch (leaf.element) {
      case Element::kBf16:
        AddDots<Bf16, float>(leaf, row, place, places, dot);
        break;
      case Element::kF16:
        AddDots<F16, float>(leaf, row, place, places, dot);
        break;
      case Element::kF32:
        AddDots<float, float>(leaf, row, place, places, dot);
        break;
      case Element::kF64:
      case Element::kNone:
        break;
    }
  }
  Store(params, row, dot);
}

__global__ void __launch_bounds__(kExpertThreads)
    RowDotsKernel(const __grid_constant__ RowDotsParams params) {
  ForEachExpertItem(params.capacity, 1,
                    [&](int64_t row, int32_t) { DotRow(params, row); });
}

}  // namespace

cudaError_t LaunchRowDots(const RowDotsParams& params, cudaStream_t stream) {
  ExpertGrid grid;
  const cudaError_t status = ExpertGridFor(params.capacity, 0, &grid);
  if (status != cudaSuccess) return status;
  RowDotsKernel<<<grid.blocks, kExpertThreads, 0, stream>>>(params);
  return cudaPeekAtLastError();
}

const void* RowDotsKernelAddress() {
  return reinterpret_cast<const void*>(&RowDotsKernel);
}

}  // namespace jax_ep
