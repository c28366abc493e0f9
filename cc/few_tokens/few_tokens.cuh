// How dispatch and combine share their rows where tokens are few: rows are cut
// into pieces small enough for a warp to hold, in registers or in its part of
// shared memory, so that each warp has all of its bytes in flight at once, and
// what needs no peer is loaded before the peers have answered. No divisions.
#ifndef JAX_EP_CC_FEW_TOKENS_FEW_TOKENS_CUH_
#define JAX_EP_CC_FEW_TOKENS_FEW_TOKENS_CUH_

#include <cstddef>
#include <cstdint>

#include "cc/handshake/sync.cuh"
#include "cc/layout/control.h"
#include "cc/layout/few_tokens.h"
#include "cc/layout/limits.h"
#include "cc/ops.h"
#include "cc/rows/items.cuh"
#include "cc/rows/rows.cuh"

namespace jax_ep {

// Units of 16 bytes that a lane has of a piece at most: with 24 blocks each
// warp has one piece of 128 rows of 14 KB.
inline constexpr int kPieceUnits = 10;
static_assert(kPieceBytes == kPieceUnits * kWarpSize * 16);

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

// The units of part `part` of a row that a lane has: every kWarpSize-th.
struct UnitsOfLane {
  int32_t first;
  int32_t left;  // units from the first one to the end of the piece

  __device__ UnitsOfLane(const PieceCut& cut, int32_t part)
      : first(part * cut.share + static_cast<int32_t>(threadIdx.x) % kWarpSize),
        left(min((part + 1) * cut.share, cut.row_units) - first) {}

  __device__ bool Has(int i) const { return i * kWarpSize < left; }
};

// Blocks of a launch.
inline int32_t FewBlocks(const PeerView& view) {
  return view.num_sms < ControlLayout::kDoneBlocks ? view.num_sms
                                                   : ControlLayout::kDoneBlocks;
}

struct FewParams {
  RowParams rows;
  PieceCut cuts[kMaxLeaves];
};

// Whether tokens are few; if so `few` gets the parameters, for pieces of
// `piece_units` units of a lane at most.
inline bool CutFew(const RowParams& rows, int64_t piece_units, FewParams& few) {
  static_assert(kFewPieces * kPieceUnits <= 0x10000);
  const int64_t warps = int64_t{FewBlocks(rows.op.view)} * kRowWarps;
  int64_t pieces = 0;
  for (int32_t i = 0; i < rows.num_leaves; ++i) {
    const Leaf& leaf = rows.leaves[i];
    const int64_t least = PiecesOfRow(leaf.row_bytes);
    pieces += least * rows.num_tokens;
    if (least < 1 || least > kFewPieces || pieces > kFewPieces) return false;
    const uint64_t bits = reinterpret_cast<uint64_t>(leaf.in) |
                          reinterpret_cast<uint64_t>(leaf.out) |
                          static_cast<uint64_t>(leaf.row_bytes);
    const int64_t units = leaf.row_bytes / 16;
    // Smaller pieces where there are warps without one.
    const int64_t most = (units + kWarpSize - 1) / kWarpSize;
    const int64_t fewest = (most + piece_units - 1) / piece_units;
    int64_t parts = rows.num_tokens == 0 ? 1 : warps / rows.num_tokens;
    if (parts > most) parts = most;
    if (parts < fewest) parts = fewest;
    if (parts < 1) parts = 1;
    few.cuts[i] = {
        .items = static_cast<int32_t>(parts * rows.num_tokens),
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

// How such an operation closes: every block tells the peers that it is done,
// without first counting the others, and the last of the launch waits for all
// blocks of all peers. Called by all threads at the end of a block's part.
// Release: pairs with the acquire in CloseFew, for all that the block did.
static __device__ __forceinline__ void CloseBlock(const Control& control) {
  __syncthreads();
  const int32_t peer = threadIdx.x;
  if (peer >= control.num_ranks() || peer == control.rank()) return;
  ptx::StoreReleaseSys(control.BlockDone(peer, control.rank(), blockIdx.x),
                       control.Word(gridDim.x));
}

// Called by all threads of the last block. Ends in a barrier.
static __device__ __forceinline__ void CloseFew(const Control& control) {
  constexpr int32_t kBlocks = ControlLayout::kDoneBlocks;
  const int32_t rank = control.rank();
  for (int32_t i = threadIdx.x; i < control.num_ranks() * kBlocks;
       i += blockDim.x) {
    const int32_t peer = i / kBlocks;
    if (peer == rank) continue;
    const uint32_t blocks =
        Wait(control, control.BlockDone(rank, peer, 0), "the end", peer);
    if (i % kBlocks >= blocks) continue;
    Wait(control, control.BlockDone(rank, peer, i % kBlocks), "the end", peer);
  }
  __syncthreads();
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_FEW_TOKENS_FEW_TOKENS_CUH_
