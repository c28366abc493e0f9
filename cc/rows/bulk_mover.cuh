// How a warp moves rows by bulk copies through shared memory (sm_90 and newer).
#ifndef JAX_EP_CC_ROWS_BULK_MOVER_CUH_
#define JAX_EP_CC_ROWS_BULK_MOVER_CUH_

#include <cstddef>
#include <cstdint>

#include "cc/ops.h"
#include "cc/rows/bulk.cuh"
#include "cc/rows/rows.cuh"

namespace jax_ep {

// Warps of a block that do so.
inline constexpr int kBulkWarps = 4;

#if JAX_EP_HAS_BULK

inline constexpr int kStageBytes = 8192;
inline constexpr int kStages = kBulkSharedBytes / kBulkWarps / kStageBytes;
// Loads that a bulk warp has in flight; the other stages are being stored.
inline constexpr int kLoads = kStages / 2;

// A piece of a row in shared memory and where it goes.
struct Stage {
  uint64_t targets[kWarpSize];
  uint32_t mask;
  uint32_t bytes;
  uint64_t loaded;  // mbarrier
};

// One warp's ring of stages. Pieces are loaded in turn and stored kLoads turns
// later; lane 0 asks for all copies.
class BulkMover {
 public:
  __device__ BulkMover(Stage* stages, std::byte* bytes)
      : stages_(stages), bytes_(bytes), lane_(threadIdx.x % kWarpSize) {
    if (lane_ == 0) {
      for (int i = 0; i < kStages; ++i) {
        bulk::InitBarrier(&stages_[i].loaded, 1);
      }
      bulk::FenceBarrierInit();
    }
    // Peers' buffers were acquired as ordinary memory.
    bulk::FenceProxy();
    __syncwarp();
  }

  // Moves `bytes` from `in` to the rows of all lanes in `mask`.
  __device__ void Move(const std::byte* in, uint32_t bytes, uint64_t target,
                       uint32_t mask) {
    Stage& stage = stages_[loading_];
    if (lane_ == 0) {
      // The piece that was here kStages turns ago has left shared memory.
      bulk::WaitStoresRead<kStages - kLoads - 1>();
      stage.mask = mask;
      stage.bytes = bytes;
      bulk::ArriveExpecting(&stage.loaded, bytes);
      bulk::Load(bytes_ + loading_ * kStageBytes, in, bytes, &stage.loaded);
    }
    stage.targets[lane_] = target;
    __syncwarp();
    loading_ = loading_ + 1 == kStages ? 0 : loading_ + 1;
    if (turn_++ >= kLoads) StorePiece();
  }

  // Stores what is left and waits until all rows have landed.
  __device__ void Finish() {
    while (storing_ != loading_) StorePiece();
    if (lane_ == 0) {
      bulk::WaitStores();
      bulk::FenceProxy();
    }
    __syncwarp();
  }

  // Pieces so far. All but the last kLoads of them have been asked to be
  // stored, each by a group of its own.
  __device__ uint32_t turn() const { return turn_; }

 private:
  __device__ void StorePiece() {
    if (lane_ == 0) {
      Stage& stage = stages_[storing_];
      bulk::WaitBarrier(&stage.loaded, round_);
      const uint32_t bytes = stage.bytes;
      const std::byte* from = bytes_ + storing_ * kStageBytes;
      for (uint32_t left = stage.mask; left != 0; left &= left - 1) {
        bulk::Store(reinterpret_cast<void*>(stage.targets[__ffs(left) - 1]),
                    from, bytes);
      }
      bulk::CommitStores();
    }
    __syncwarp();
    if (++storing_ == kStages) {
      storing_ = 0;
      round_ ^= 1;
    }
  }

  Stage* stages_;
  std::byte* bytes_;
  int32_t lane_;
  uint32_t turn_ = 0;
  uint32_t loading_ = 0;  // stage
  uint32_t storing_ = 0;  // stage, kLoads before the other at most
  uint32_t round_ = 0;    // of storing_, its parity
};

#endif  // JAX_EP_HAS_BULK

}  // namespace jax_ep

#endif  // JAX_EP_CC_ROWS_BULK_MOVER_CUH_
