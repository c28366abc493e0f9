// How a launch shares its rows among warps: an item is a part of a token's row.
#ifndef JAX_EP_CC_DEVICE_ITEMS_CUH_
#define JAX_EP_CC_DEVICE_ITEMS_CUH_

#include <cstdint>

#include "cc/device/rows.cuh"
#include "cc/ops.h"

namespace jax_ep {

// Threads of a block of a row-moving kernel.
inline constexpr int kRowThreads = 512;
// A part is at least this long: enough loads for a warp to have in flight.
inline constexpr int64_t kMinPartBytes = 2048;

// Parts that each row is cut into: with few tokens, enough to give every warp
// of the launch some.
__device__ __forceinline__ int32_t PartsPerRow(const RowParams& params) {
  int64_t longest = 0;
  for (int32_t i = 0; i < params.num_leaves; ++i) {
    longest = max(longest, params.leaves[i].row_bytes);
  }
  const int64_t warps = int64_t{gridDim.x} * (kRowThreads / kWarpSize);
  const int64_t wanted = warps / max(params.num_tokens, int64_t{1});
  const int64_t allowed = (longest + kMinPartBytes - 1) / kMinPartBytes;
  return static_cast<int32_t>(max(min(wanted, allowed), int64_t{1}));
}

// Calls `move(token, part, parts)` in every warp for its share of the items.
template <typename Move>
__device__ __forceinline__ void ForEachItem(const RowParams& params,
                                            const Move& move) {
  const int32_t parts = PartsPerRow(params);
  const int64_t items = params.num_tokens * parts;
  const int64_t warps = int64_t{gridDim.x} * (kRowThreads / kWarpSize);
  // Neighbouring items go to different blocks, so that all blocks end together.
  const int64_t first =
      int64_t{threadIdx.x / kWarpSize} * gridDim.x + blockIdx.x;
  for (int64_t item = first; item < items; item += warps) {
    move(item / parts, static_cast<int32_t>(item % parts), parts);
  }
}

// Lane j's route of a token: the rank, or -1, and the slot. A token has at most
// kMaxTopK routes, which fit the lanes of a warp.
__device__ __forceinline__ int2 RouteOf(const RowParams& params,
                                        int64_t token) {
  static_assert(kMaxTopK <= kWarpSize);
  const int32_t j = threadIdx.x % kWarpSize;
  if (j >= params.routes_per_token) return {-1, -1};
  return reinterpret_cast<const int2*>(
      params.routes)[token * params.routes_per_token + j];
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_DEVICE_ITEMS_CUH_
