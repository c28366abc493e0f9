// The pieces of combine where tokens are few (cc/few_tokens/few_tokens.cuh):
// bulk copies bring all rows of one into a warp's slice of shared memory, from
// which the warp sums them.
#ifndef JAX_EP_CC_FEW_TOKENS_FEW_COMBINE_CUH_
#define JAX_EP_CC_FEW_TOKENS_FEW_COMBINE_CUH_

#include <cstddef>
#include <cstdint>

#include "cc/few_tokens/few_tokens.cuh"
#include "cc/ops.h"
#include "cc/rows/bulk.cuh"
#include "cc/rows/items.cuh"
#include "cc/rows/rows.cuh"
#include "cc/rows/unit_sum.cuh"

namespace jax_ep {

// Rows of a token at most.
inline constexpr int kFewRows = 8;
// Shared memory of a warp.
inline constexpr int kSliceBytes = kBulkSharedBytes / kRowWarps / 128 * 128;

// Units of a lane in a piece, so that all rows of the piece fit a slice.
constexpr int PieceUnits(int rows) {
  const int room = kSliceBytes / (rows * kWarpSize * 16);
  return room < kPieceUnits ? room : kPieceUnits;
}
static_assert(PieceUnits(2) == kPieceUnits && PieceUnits(kFewRows) >= 1);

// A part of all rows of a token. Lane j knows the row of route j.
struct PieceOfRows {
  int2 route;
  uint32_t rows;  // bit j: there is a row of route j
  int32_t token;
  int32_t first;  // byte of the row
  int32_t bytes;  // 0 where bulk copies cannot load it, as this rank sees it

  // Called by all lanes.
  static __device__ __forceinline__ PieceOfRows Of(const FewParams& few,
                                                   const PieceAt& at) {
    const PieceCut& cut = few.cuts[at.leaf];
    PieceOfRows piece;
    piece.token = cut.TokenOf(at.item);
    piece.route = RouteOf(few.rows, piece.token);
    piece.rows = __ballot_sync(kAllLanes, piece.route.x >= 0);
    const int32_t unit = (at.item - piece.token * cut.parts) * cut.share;
    piece.first = unit * 16;
    const bool can_load = bulk::kAvailable && few.rows.op.view.has_bulk &&
                          few.rows.leaves[at.leaf].row_bytes >= kMinBulkBytes;
    piece.bytes =
        can_load ? max(min(cut.share, cut.row_units - unit), 0) * 16 : 0;
    return piece;
  }
};

// A warp's shared memory, with the rows of a piece one after the other. They
// come in two halves, this rank's row and the peers', either of which may be
// none. All functions are called by all lanes.
struct Slice {
  std::byte* rows;
  uint64_t* landed;  // mbarrier, of this warp alone: both halves are there
  uint32_t parity;

#if JAX_EP_HAS_BULK
  __device__ __forceinline__ void Init() {
    if (threadIdx.x % kWarpSize == 0) {
      bulk::InitBarrier(landed, 2);
      bulk::FenceBarrierInit();
    }
    __syncwarp();
  }

  // Asks for a half: the rows, at `row`, of the lanes that ask.
  __device__ __forceinline__ void Load(const PieceOfRows& piece, bool asks,
                                       uint64_t row) {
    const int32_t lane = threadIdx.x % kWarpSize;
    asks = asks && piece.bytes != 0;
    const uint32_t asking = __ballot_sync(kAllLanes, asks);
    if (lane == 0) {
      bulk::ArriveExpecting(landed, piece.bytes * __popc(asking));
    }
    __syncwarp();
    if (!asks) return;
    const int32_t place = __popc(piece.rows & ((1u << lane) - 1));
    bulk::Load(rows + place * piece.bytes,
               reinterpret_cast<const std::byte*>(row) + piece.first,
               piece.bytes, landed);
  }

  __device__ __forceinline__ void Await() {
    bulk::WaitBarrier(landed, parity);
    parity ^= 1;
  }

  // Between the peers' addresses and the first rows from them: those were
  // written by ordinary stores and acquired as such.
  __device__ __forceinline__ void FenceRows() { bulk::FenceProxyGlobal(); }

  // Before a next piece takes the place of what was read here.
  __device__ __forceinline__ void Free() {
    bulk::FenceProxyShared();
    __syncwarp();
  }
#else
  __device__ void Init() {}
  __device__ void Load(const PieceOfRows&, bool, uint64_t) {}
  __device__ void Await() {}
  __device__ void FenceRows() {}
  __device__ void Free() {}
#endif

  // Stores the piece's sum to its place in the row at `out`.
  template <typename T>
  __device__ __forceinline__ void Sum(const PieceOfRows& piece,
                                      std::byte* out) const {
    const int32_t count = __popc(piece.rows);
    const int32_t units = piece.bytes / 16;
    const auto* from = reinterpret_cast<const uint4*>(rows);
    auto* to = reinterpret_cast<uint4*>(out + piece.first);
    int32_t at = threadIdx.x % kWarpSize;
    if (count == 2) at = SumPairs<T>(from, at, units, to);
#pragma unroll 1
    for (; at < units; at += kWarpSize) {
      auto sum = UnitSum<T>::Of(UnitSum<T>::Neutral(count != 0));
#pragma unroll 4
      for (int32_t s = 0; s < count; ++s) sum += from[at + s * units];
      StoreUnit(to + at, sum.Rounded());
    }
  }

  // Sums units of two rows as long as there are several to read before the
  // first is stored. Returns the lane's next unit.
  template <typename T>
  static __device__ __forceinline__ int32_t SumPairs(const uint4* from,
                                                     int32_t at, int32_t units,
                                                     uint4* to) {
    constexpr int kAtOnce = kPieceUnits / 2;
#pragma unroll 1
    for (; at + (kAtOnce - 1) * kWarpSize < units; at += kAtOnce * kWarpSize) {
      uint4 first[kAtOnce], second[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        first[i] = from[at + i * kWarpSize];
        second[i] = from[at + i * kWarpSize + units];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        auto sum = UnitSum<T>::Of(first[i]);
        sum += second[i];
        StoreUnit(to + at + i * kWarpSize, sum.Rounded());
      }
    }
    return at;
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_FEW_TOKENS_FEW_COMBINE_CUH_
