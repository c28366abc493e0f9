// How a launch of permute, unpermute or row_dots is shared among warps, and a
// lane's part of a row's choices. These kernels are local: the whole GPU is
// theirs, and the hardware deals out the blocks.
#ifndef JAX_EP_CC_EXPERTS_EXPERT_ITEMS_CUH_
#define JAX_EP_CC_EXPERTS_EXPERT_ITEMS_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cc/layout/limits.h"
#include "cc/rows/rows.cuh"

namespace jax_ep {

inline constexpr int kExpertThreads = 256;
inline constexpr int kExpertWarps = kExpertThreads / kWarpSize;
// A part of a row is at least this long: two loads of 16 bytes for every lane.
// A warp of few rows waits for memory once for every two places, not for more.
inline constexpr int64_t kMinExpertPartBytes = 1024;

// Blocks and parts of a row.
struct ExpertGrid {
  unsigned int blocks;
  int32_t parts;
};

// A warp to a row; with few rows, parts of rows, so that every SM has work.
inline cudaError_t ExpertGridFor(int64_t rows, int64_t longest_row_bytes,
                                 ExpertGrid* grid) {
  int device = 0, num_sms = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status =
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  const int64_t full = int64_t{8} * num_sms * kExpertWarps;
  const int64_t wanted = full / std::max<int64_t>(rows, 1);
  const int64_t allowed =
      (longest_row_bytes + kMinExpertPartBytes - 1) / kMinExpertPartBytes;
  const int64_t parts =
      std::max<int64_t>(1, std::min<int64_t>(wanted, allowed));
  const int64_t blocks = (rows * parts + kExpertWarps - 1) / kExpertWarps;
  grid->parts = static_cast<int32_t>(parts);
  grid->blocks = static_cast<unsigned int>(
      std::clamp<int64_t>(blocks, int64_t{2} * num_sms, 1 << 20));
  return cudaSuccess;
}

// Calls `move(row, part)` in every warp for its share of the rows' parts.
template <typename Move>
__device__ __forceinline__ void ForEachExpertItem(int64_t rows, int32_t parts,
                                                  const Move& move) {
  const int64_t items = rows * parts;
  const int64_t warps = int64_t{gridDim.x} * kExpertWarps;
  for (int64_t item =
           int64_t{blockIdx.x} * kExpertWarps + threadIdx.x / kWarpSize;
       item < items; item += warps) {
    move(item / parts, static_cast<int32_t>(item % parts));
  }
}

// Lane k's expert row of a row's k-th choice, -1 where there is none.
__device__ __forceinline__ int32_t ExpertRowOf(const int32_t* expert_rows,
                                               int32_t top_k, int64_t row) {
  static_assert(kMaxTopK <= kWarpSize);
  const int32_t k = threadIdx.x % kWarpSize;
  return k < top_k ? expert_rows[row * top_k + k] : -1;
}

// Lane k's weight of a row's k-th choice; not read where there is none.
template <typename Wide>
__device__ __forceinline__ Wide WeightOf(const void* weights, int32_t top_k,
                                         int64_t row, bool present) {
  const int32_t k = threadIdx.x % kWarpSize;
  return present ? static_cast<const Wide*>(weights)[row * top_k + k] : Wide(0);
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_EXPERTS_EXPERT_ITEMS_CUH_
