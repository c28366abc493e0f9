// The pieces of dispatch where tokens are few (cc/few_tokens/few_tokens.cuh): a
// warp loads one of its rank's rows into registers, and later stores it to all
// of its targets.
#ifndef JAX_EP_CC_FEW_TOKENS_FEW_DISPATCH_CUH_
#define JAX_EP_CC_FEW_TOKENS_FEW_DISPATCH_CUH_

#include <cstddef>
#include <cstdint>

#include "cc/few_tokens/few_tokens.cuh"
#include "cc/ops.h"
#include "cc/rows/items.cuh"
#include "cc/rows/rows.cuh"

namespace jax_ep {

// The caller's share, that of thread `thread` of `threads`, of the slots from
// `filled` on, to which no row comes.
static __device__ void ZeroEmptySlots(const DispatchParams& params,
                                      int64_t filled, int64_t thread,
                                      int64_t threads) {
  if (params.keeps_empty) return;
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

struct Piece {
  uint4 units[kPieceUnits];
};

static __device__ __forceinline__ void LoadPiece(const FewParams& few,
                                                 const PieceAt& at,
                                                 Piece& piece) {
  if (!at.Exists(few)) return;
  const Leaf& leaf = few.rows.leaves[at.leaf];
  const PieceCut& cut = few.cuts[at.leaf];
  const int32_t token = cut.TokenOf(at.item);
  const UnitsOfLane units(cut, at.item - token * cut.parts);
  const auto* from =
      reinterpret_cast<const uint4*>(leaf.in + token * leaf.row_bytes) +
      units.first;
#pragma unroll
  for (int i = 0; i < kPieceUnits; ++i) {
    if (units.Has(i)) piece.units[i] = LoadUnit(from + i * kWarpSize);
  }
}

// What units of 16 bytes cannot move, with few registers: a piece is in others.
static __device__ __forceinline__ void CopyPart(const std::byte* in,
                                                uint64_t target,
                                                uint32_t targets,
                                                int64_t row_bytes, int32_t part,
                                                int32_t parts) {
  const uint32_t bits = OrOverWarp(
      reinterpret_cast<uint64_t>(in) | static_cast<uint64_t>(row_bytes) |
      (targets >> (threadIdx.x % kWarpSize) & 1 ? target : 0));
  if (UnitBytes(bits) >= 4) {
    CopyUnits<uint32_t, 4>(in, target, targets,
                           PartOf(row_bytes / 4, part, parts));
  } else {
    CopyUnits<uint8_t, 4>(in, target, targets, PartOf(row_bytes, part, parts));
  }
}

// Stores a piece to where its row goes, the peers first. Each lane has one of
// the token's routes, of rank -1 where it has none.
static __device__ __forceinline__ void StorePiece(const FewParams& few,
                                                  std::byte* const* outputs,
                                                  const PieceAt& at, int2 route,
                                                  const Piece& piece) {
  const Leaf& leaf = few.rows.leaves[at.leaf];
  const PieceCut& cut = few.cuts[at.leaf];
  const int32_t token = cut.TokenOf(at.item);
  const int32_t part = at.item - token * cut.parts;
  const uint64_t target = RowAt(few.rows, outputs, at.leaf, route);
  const uint32_t targets = __ballot_sync(kAllLanes, target != 0);
  const uint32_t here =
      __ballot_sync(kAllLanes, target != 0 && route.x == few.rows.op.view.rank);
  if (cut.row_units == 0 || OrOverWarp(target) % 16 != 0) {
    CopyPart(leaf.in + token * leaf.row_bytes, target, targets, leaf.row_bytes,
             part, cut.parts);
    return;
  }
  const UnitsOfLane units(cut, part);
  const auto store = [&](uint32_t left) {
    for (; left != 0; left &= left - 1) {
      uint4* to = reinterpret_cast<uint4*>(AddressOf(target, __ffs(left) - 1)) +
                  units.first;
#pragma unroll
      for (int i = 0; i < kPieceUnits; ++i) {
        if (units.Has(i)) StoreUnit(to + i * kWarpSize, piece.units[i]);
      }
    }
  };
  store(targets & ~here);
  store(here);
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_FEW_TOKENS_FEW_DISPATCH_CUH_
