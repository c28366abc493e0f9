// How a launch shares its rows among warps: an item is a part of a token's row.
#ifndef JAX_EP_CC_ROWS_ITEMS_CUH_
#define JAX_EP_CC_ROWS_ITEMS_CUH_

#include <cstddef>
#include <cstdint>

#include "cc/ops.h"
#include "cc/rows/bulk.cuh"
#include "cc/rows/rows.cuh"

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

// Tokens of a batch: as many as have their routes in the lanes of a warp.
__device__ __forceinline__ uint32_t TokensOfBatch(const RowParams& params) {
  static_assert(kMaxTopK <= kWarpSize);
  return kWarpSize / static_cast<uint32_t>(params.routes_per_token);
}

// A warp's tokens `first`, `first + step`, ... in batches: calls use(begin,
// address, lanes) for each, whose first token is `begin`. With W routes a token
// lane l has route l % W of the batch's token l / W; `address` is what
// address_of(route) makes of it, 0 for none, and `lanes` are those with one.
// What each token costs is spent by one warp, and short rows do not hide it: so
// addresses are made for all lanes at once, while the routes of the next batch
// are on their way.
template <typename AddressOf, typename Use>
__device__ __forceinline__ void ForEachBatch(const RowParams& params,
                                             uint32_t first, uint32_t step,
                                             const AddressOf& address_of,
                                             const Use& use) {
  const auto num_tokens = static_cast<uint32_t>(params.num_tokens);
  const auto width = static_cast<uint32_t>(params.routes_per_token);
  const uint32_t lane = threadIdx.x % kWarpSize;
  const uint32_t tokens = TokensOfBatch(params);
  const uint32_t mine = lane / width;
  const uint32_t route = lane - mine * width;
  const auto* routes = reinterpret_cast<const int2*>(params.routes);
  const auto ask = [&](uint32_t begin) {
    const uint32_t token = begin + mine * step;
    if (mine >= tokens || token >= num_tokens) return int2{-1, -1};
    return __ldg(routes + uint64_t{token} * width + route);
  };
  int2 next = ask(first);
  for (uint32_t begin = first; begin < num_tokens; begin += tokens * step) {
    const uint64_t address = address_of(next);
    next = ask(begin + tokens * step);
    use(begin, address, __ballot_sync(kAllLanes, address != 0));
  }
}

// The same, token by token: use(token, address, lanes), with those of its lanes
// that have an address.
template <typename AddressOf, typename Use>
__device__ __forceinline__ void ForEachTokenOfWarp(const RowParams& params,
                                                   uint32_t first,
                                                   uint32_t step,
                                                   const AddressOf& address_of,
                                                   const Use& use) {
  const auto num_tokens = static_cast<uint32_t>(params.num_tokens);
  const auto width = static_cast<uint32_t>(params.routes_per_token);
  const uint32_t tokens = TokensOfBatch(params);
  ForEachBatch(params, first, step, address_of,
               [&](uint32_t token, uint64_t address, uint32_t all) {
                 uint32_t lanes = kAllLanes >> (kWarpSize - width);
                 for (uint32_t i = 0; i < tokens && token < num_tokens; ++i) {
                   use(token, address, all & lanes);
                   lanes = lanes << (width - 1) << 1;  // by 32 at most
                   token += step;
                 }
               });
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

#endif  // JAX_EP_CC_ROWS_ITEMS_CUH_
