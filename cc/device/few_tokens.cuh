// How dispatch and combine share their rows where tokens are few: rows are cut
// into pieces small enough for the registers of a warp, so that each warp has
// all of its bytes in flight at once, and what needs no peer is loaded before
// the peers have answered. No divisions, no shared memory to fill.
#ifndef JAX_EP_CC_DEVICE_FEW_TOKENS_CUH_
#define JAX_EP_CC_DEVICE_FEW_TOKENS_CUH_

#include <cstddef>
#include <cstdint>

#include "cc/device/items.cuh"
#include "cc/device/rows.cuh"
#include "cc/ops.h"

namespace jax_ep {

// Units of 16 bytes that a lane has of a piece at most.
inline constexpr int kPieceUnits = 8;
inline constexpr int64_t kPieceBytes = kPieceUnits * kWarpSize * 16;
// Tokens are few where no warp has more pieces than these; beyond, bulk copies
// are as fast and leave the link no pauses.
inline constexpr int64_t kFewRounds = 6;

// How a leaf's rows are cut, worked out on the host.
struct PieceCut {
  int32_t items;  // pieces of all tokens
  int32_t parts;  // pieces of a row
  // ceil(2^32 / parts), 0 for 1: exact for items up to 2^16.
  uint32_t reciprocal;
  // Units of 16 bytes in a row and in each of its pieces but the last; 0 where
  // size or address of this rank's rows do not allow such units.
  int32_t row_units;
  int32_t share;

  __device__ int32_t TokenOf(int32_t item) const {
    return reciprocal == 0 ? item
                           : static_cast<int32_t>(__umulhi(item, reciprocal));
  }
};

struct FewParams {
  RowParams rows;
  PieceCut cuts[kMaxLeaves];
};

// Whether tokens are few; if so `few` gets the parameters.
inline bool CutFew(const RowParams& rows, FewParams& few) {
  const int64_t warps = int64_t{rows.op.view.num_sms} * kRowWarps;
  int64_t rounds = 0;
  for (int32_t i = 0; i < rows.num_leaves; ++i) {
    const Leaf& leaf = rows.leaves[i];
    const int64_t parts = (leaf.row_bytes + kPieceBytes - 1) / kPieceBytes;
    const int64_t items = parts * rows.num_tokens;
    rounds += (items + warps - 1) / warps;
    if (parts < 1 || items > 0x10000 || rounds > kFewRounds) return false;
    const uint64_t bits = reinterpret_cast<uint64_t>(leaf.in) |
                          reinterpret_cast<uint64_t>(leaf.out) |
                          static_cast<uint64_t>(leaf.row_bytes);
    const int64_t units = leaf.row_bytes / 16;
    few.cuts[i] = {
        .items = static_cast<int32_t>(items),
        .parts = static_cast<int32_t>(parts),
        .reciprocal =
            parts == 1 ? 0 : static_cast<uint32_t>(0xFFFFFFFFu / parts + 1),
        .row_units = bits % 16 == 0 ? static_cast<int32_t>(units) : 0,
        // Whole warps' worth, as PartOf() has it.
        .share = static_cast<int32_t>((units + parts * kWarpSize - 1) /
                                      (parts * kWarpSize) * kWarpSize),
    };
  }
  few.rows = rows;
  return true;
}

// One of a warp's pieces: leaf by leaf, every `workers.count`-th of each.
struct PieceAt {
  int32_t leaf;
  int32_t item;

  static __device__ PieceAt First(const FewParams& few,
                                  const Workers& workers) {
    PieceAt at = {0, static_cast<int32_t>(workers.index)};
    at.Settle(few, workers);
    return at;
  }
  __device__ bool Exists(const FewParams& few) const {
    return leaf < few.rows.num_leaves;
  }
  __device__ PieceAt Next(const FewParams& few, const Workers& workers) const {
    PieceAt at = {leaf, item + static_cast<int32_t>(workers.count)};
    at.Settle(few, workers);
    return at;
  }

 private:
  __device__ void Settle(const FewParams& few, const Workers& workers) {
    while (Exists(few) && item >= few.cuts[leaf].items) {
      ++leaf;
      item = static_cast<int32_t>(workers.index);
    }
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_DEVICE_FEW_TOKENS_CUH_
