// How a launch shares its rows among warps: an item is a part of a token's row.
#ifndef JAX_EP_CC_DEVICE_ITEMS_CUH_
#define JAX_EP_CC_DEVICE_ITEMS_CUH_

#include <cstddef>
#include <cstdint>

#include "cc/device/bulk.cuh"
#include "cc/device/rows.cuh"
#include "cc/ops.h"

namespace jax_ep {

// Threads of a block of a row-moving kernel.
inline constexpr int kRowThreads = 512;
inline constexpr int kRowWarps = kRowThreads / kWarpSize;
// A part is at least this long: enough loads for a warp to have in flight.
inline constexpr int64_t kMinPartBytes = 2048;

// Some of a launch's warps, of which the caller is number `index`.
struct Workers {
  int64_t index;
  int64_t count;
};

// Warps [first, first + count) of each of `blocks` blocks, the caller's among
// them. Neighbours stand in different blocks, so that all blocks end together.
__device__ __forceinline__ Workers WarpsOf(int32_t block, int32_t blocks,
                                           int32_t first, int32_t count) {
  const int32_t warp = threadIdx.x / kWarpSize - first;
  return {int64_t{warp} * blocks + block, int64_t{count} * blocks};
}

// Parts that each row is cut into: with few tokens, enough to give every worker
// some.
__device__ __forceinline__ int32_t PartsPerRow(const Workers& workers,
                                               int64_t num_tokens,
                                               int64_t row_bytes) {
  const int64_t wanted = workers.count / max(num_tokens, int64_t{1});
  const int64_t allowed = (row_bytes + kMinPartBytes - 1) / kMinPartBytes;
  return static_cast<int32_t>(max(min(wanted, allowed), int64_t{1}));
}

// Lane j's route of a token: the rank, or -1, and the slot. A token has at most
// kMaxTopK routes, which fit the lanes of a warp.
__device__ __forceinline__ int2 RouteOf(const RowParams& params,
                                        int64_t token) {
  static_assert(kMaxTopK <= kWarpSize);
  const int32_t j = threadIdx.x % kWarpSize;
  if (j >= params.routes_per_token) return {-1, -1};
  return __ldg(reinterpret_cast<const int2*>(params.routes) +
               token * params.routes_per_token + j);
}

// Tokens whose routes are asked for at a time, while the rows of as many before
// them are on their way: a short row is moved in less time than a route takes
// to come.
inline constexpr int kRoutesAhead = 4;

// The address of lane j's row of leaf `leaf`, 0 where it has none or the peer's
// buffer is out of reach. `peers` as WaitReady() leaves it.
__device__ __forceinline__ uint64_t RowAt(const RowParams& params,
                                          std::byte* const* peers, int32_t leaf,
                                          int2 route) {
  if (route.x < 0) return 0;
  const uint64_t first = reinterpret_cast<uint64_t>(
      peers[leaf * params.op.view.num_ranks + route.x]);
  return first == 0 ? 0
                    : first + int64_t{route.y} * params.leaves[leaf].row_bytes;
}

// Shorter rows are not worth an engine's start.
inline constexpr int64_t kMinBulkBytes = 256;

// Bit i is set where bulk copies can move leaf i: sizes and addresses on all
// ranks are multiples of 16 bytes, and this launch has the shared memory.
__device__ __forceinline__ uint32_t BulkLeaves(const RowParams& params,
                                               std::byte* const* peers) {
  uint32_t leaves = 0;
  if constexpr (bulk::kAvailable) {
    if (!params.op.view.has_bulk) return leaves;
    for (int32_t i = 0; i < params.num_leaves; ++i) {
      const Leaf& leaf = params.leaves[i];
      uint64_t bits = reinterpret_cast<uint64_t>(leaf.in) |
                      reinterpret_cast<uint64_t>(leaf.out) | leaf.row_bytes;
      for (int32_t r = 0; r < params.op.view.num_ranks; ++r) {
        bits |=
            reinterpret_cast<uint64_t>(peers[i * params.op.view.num_ranks + r]);
      }
      if (bits % 16 == 0 && leaf.row_bytes >= kMinBulkBytes) leaves |= 1u << i;
    }
  }
  return leaves;
}

// Sums the rows of leaf `i` through registers: for what bulk copies cannot
// load.
template <typename T, typename Wide>
__device__ void SumPlain(const CombineParams& params, std::byte* const* inputs,
                         int32_t i, const Workers& workers) {
  const Leaf& leaf = params.leaves[i];
  const int32_t parts = PartsPerRow(workers, params.num_tokens, leaf.row_bytes);
  for (int64_t item = workers.index; item < params.num_tokens * parts;
       item += workers.count) {
    const int64_t token = item / parts;
    const int2 route = RouteOf(params, token);
    SumRow<T, Wide>(RowAt(params, inputs, i, route),
                    __ballot_sync(kAllLanes, route.x >= 0),
                    leaf.out + token * leaf.row_bytes, leaf.row_bytes,
                    static_cast<int32_t>(item % parts), parts);
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_DEVICE_ITEMS_CUH_
