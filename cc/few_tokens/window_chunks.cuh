// Rows in windows, in chunks.
//
// A chunk is eight lines: two instructions of a warp. A protocol says which
// units of 16 bytes a lane holds: UnitOf(lane, i) of [0, kUnits) for i <
// kPerLane, kNoUnit where it holds none. `left` are the units of the row from
// the chunk's first on; lines that lie behind are neither stored nor waited
// for. Units that the lane does not hold may be anything.
//
// A line is whole only if its eight lanes ask for it at once. So no lane may
// leave a loop that waits before the others of its warp: such a loop yields,
// lanes that are out of it go on meanwhile, and __syncwarp() joins them for no
// longer than itself. Lanes that had nothing to wait for would look at their
// parts of a line before the one that sees its epoch.
#ifndef JAX_EP_CC_FEW_TOKENS_WINDOW_CHUNKS_CUH_
#define JAX_EP_CC_FEW_TOKENS_WINDOW_CHUNKS_CUH_

#include <cstddef>
#include <cstdint>

#include "cc/few_tokens/low_latency.h"
#include "cc/few_tokens/window.cuh"
#include "cc/ptx.cuh"
#include "cc/rows/rows.cuh"

namespace jax_ep {

inline constexpr int32_t kNoUnit = 1 << 30;
// Units, and words of 16 bytes, of a lane in a chunk.
inline constexpr int kPerLane = 2;
static_assert(kPerLane * kWarpSize * 16 == LowLatencyLayout::kChunkBytes);
using Units = uint4[kPerLane];

// Lines of 7 units and a half. Eight lanes have 15 in two of them: lanes 0 to 6
// one in each, and lane 7 one whose halves stand beside the two epochs.
struct Lines {
  static constexpr int32_t kUnits = 60;
  static_assert(kUnits >= LowLatencyLayout::kMinChunkUnits);

  static __device__ __forceinline__ int32_t FirstOf(int32_t lane, int i) {
    return lane / 8 * 15 + i * 7;
  }
  static __device__ __forceinline__ int32_t UnitOf(int32_t lane, int i) {
    if (lane % 8 < 7) return FirstOf(lane, i) + lane % 8;
    return i == 0 ? FirstOf(lane, i) + 14 : kNoUnit;
  }
  // The line holds something of the row.
  static __device__ __forceinline__ bool Holds(int32_t lane, int i,
                                               int32_t left) {
    return FirstOf(lane, i) < left;
  }
  // The lane's word of line i, but for the epoch.
  static __device__ __forceinline__ uint4 Pack(int32_t lane, const Units& u,
                                               int i) {
    if (lane % 8 < 7) return u[i];
    return i == 0 ? uint4{u[0].x, u[0].y, 0, 0} : uint4{u[0].z, u[0].w, 0, 0};
  }
  static __device__ __forceinline__ void Unpack(int32_t lane, const Units& w,
                                                Units& u) {
    u[0] = lane % 8 < 7 ? w[0] : uint4{w[0].x, w[0].y, w[1].x, w[1].y};
    u[1] = w[1];
  }
};

// Lines of 7 units and a scale. A scale is that of eight units; the eighths of
// the first seven lines are in the last one. Lane 7 of eight has scale
// ScaleOf(lane, i) in its unit i.
struct ScaledLines {
  static constexpr int32_t kUnits = 56;
  static constexpr int32_t kScales = kUnits / 8;
  static_assert(kUnits >= LowLatencyLayout::kMinChunkUnits);

  static __device__ __forceinline__ bool IsLast(int32_t lane, int i) {
    return i == 1 && lane >= 24;
  }
  static __device__ __forceinline__ int32_t UnitOf(int32_t lane, int i) {
    if (lane % 8 == 7) return kNoUnit;
    return IsLast(lane, i) ? (lane - 24) * 8 + 7 : i * kWarpSize + lane;
  }
  static __device__ __forceinline__ bool Holds(int32_t lane, int i,
                                               int32_t left) {
    return (IsLast(lane, i) ? 7 : i * kWarpSize + lane / 8 * 8) < left;
  }
  // kNoUnit where the lane has none.
  static __device__ __forceinline__ int32_t ScaleOf(int32_t lane, int i) {
    return lane % 8 < 7 || IsLast(lane, i) ? kNoUnit : i * 4 + lane / 8;
  }
  static __device__ __forceinline__ uint4 Pack(int32_t, const Units& u, int i) {
    return u[i];
  }
  static __device__ __forceinline__ void Unpack(int32_t, const Units& w,
                                                Units& u) {
    for (int i = 0; i < kPerLane; ++i) u[i] = w[i];
  }
};

template <typename Protocol>
__device__ __forceinline__ void StoreChunk(std::byte* chunk, const Units& u,
                                           int32_t left, uint32_t epoch) {
  const int32_t lane = threadIdx.x % kWarpSize;
  uint4* to = reinterpret_cast<uint4*>(chunk) + lane;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    uint4 word = Protocol::Pack(lane, u, i);
    if (lane % 8 == 7) word.w = epoch;
    if (Protocol::Holds(lane, i, left)) {
      ptx::StoreLine(to + i * kWarpSize, word);
    }
  }
}

// A first look at a chunk.
template <typename Protocol>
__device__ __forceinline__ void LookAt(const std::byte* chunk, int32_t left,
                                       Units& w) {
  const int32_t lane = threadIdx.x % kWarpSize;
  const uint4* from = reinterpret_cast<const uint4*>(chunk) + lane;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    w[i] = uint4{};
    if (Protocol::Holds(lane, i, left)) {
      w[i] = ptx::LoadLine(from + i * kWarpSize);
    }
  }
}

template <typename Protocol>
__device__ __forceinline__ bool Arrived(const Units& w, int32_t left,
                                        uint32_t epoch) {
  const int32_t lane = threadIdx.x % kWarpSize;
  bool all = true;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    all &= w[i].w == epoch || !Protocol::Holds(lane, i, left);
  }
  return all || lane % 8 < 7;
}

// Looks again until all has come; then the lane's units. All lanes of a warp.
template <typename Protocol, bool kNotes = true>
__device__ __forceinline__ void WaitChunk(const Window& window,
                                          const std::byte* chunk, int32_t left,
                                          int32_t peer, Units& w, Units& u) {
  Patience patience = {"the rows", peer};
  while (true) {
    const uint32_t waiting =
        __ballot_sync(kAllLanes, !Arrived<Protocol>(w, left, window.epoch));
    if (waiting == 0) break;
    // What a lane that has an epoch has seen instead of it.
    const uint32_t seen = w[0].w == window.epoch ? w[1].w : w[0].w;
    if constexpr (kNotes) {
      patience.Look(window, seen, IsFirstOf(waiting));
    } else {
      patience.LookWithoutNote(window, seen, IsFirstOf(waiting));
    }
    LookAt<Protocol>(chunk, left, w);
  }
  Protocol::Unpack(threadIdx.x % kWarpSize, w, u);
}

inline int32_t ElementBytes(Element element) {
  return element == Element::kF32 ? 4 : 2;
}

// Rows in XLA's buffers ------------------------------------------------------

// Rows and their sizes are multiples of 16 bytes.

// The lane's units of a chunk that begins at unit `first` of a row.
template <typename Protocol>
__device__ __forceinline__ void LoadRow(const std::byte* row, int32_t first,
                                        int32_t left, Units& u) {
  const int32_t lane = threadIdx.x % kWarpSize;
  const auto* from = reinterpret_cast<const uint4*>(row) + first;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int32_t unit = Protocol::UnitOf(lane, i);
    u[i] = uint4{};
    if (unit < left) u[i] = LoadUnit(from + unit);
  }
}

template <typename Protocol>
__device__ __forceinline__ void StoreRow(std::byte* row, int32_t first,
                                         int32_t left, const Units& u) {
  const int32_t lane = threadIdx.x % kWarpSize;
  auto* to = reinterpret_cast<uint4*>(row) + first;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int32_t unit = Protocol::UnitOf(lane, i);
    if (unit < left) StoreUnit(to + unit, u[i]);
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_FEW_TOKENS_WINDOW_CHUNKS_CUH_
