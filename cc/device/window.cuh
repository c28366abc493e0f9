// Windows of a low-latency buffer as the blocks of one launch use them.
//
// Nothing is announced and nothing is reset: whatever a peer stores here tells
// by itself that it belongs to this operation, by the operation's epoch. Expert
// ids, weights and scales are words (epoch << 32 | value). Rows travel in
// chunks, in one of two ways:
//
//   Words  16-byte words of 12 bytes of a row and the epoch. A 128-bit access
//          is seen whole or not at all, so a word needs no order with others.
//   Lines  128-byte lines of 120 bytes of a row and the epoch, stored and
//          loaded by eight neighbouring lanes in one instruction each. PTX does
//          not promise that a line is seen whole; GPUs with NVLink do, and
//          NCCL's protocol LL128 rests on it.
//
// Both save the fence that a flag behind a row would need, which waits until
// all stores so far have crossed the link. Lines carry 15 sixteenths of what
// they cost on the wire, words three quarters.
//
// Two windows, for odd and even epochs, are enough: see docs/design.md.
#ifndef JAX_EP_CC_DEVICE_WINDOW_CUH_
#define JAX_EP_CC_DEVICE_WINDOW_CUH_

#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "cc/device/ptx.cuh"
#include "cc/device/rows.cuh"
#include "cc/low_latency.h"

namespace jax_ep {

// Warps of a block that work on rows; one more, the clerk, keeps the launch in
// step with others.
inline constexpr int kWorkWarps = 15;
inline constexpr int kWorkThreads = kWorkWarps * kWarpSize;
inline constexpr int kWindowThreads = kWorkThreads + kWarpSize;
// Barriers of a block beside __syncthreads().
inline constexpr int kEpochBarrier = 1;
inline constexpr int kWorkBarrier = 2;

// Division of numbers below 2^32 by one that the host knows.
class Divisor {
 public:
  Divisor() = default;
  __host__ __device__ explicit Divisor(uint32_t divisor)
      : divisor_(divisor),
        reciprocal_(divisor > 1 ? ~uint64_t{0} / divisor + 1 : 0) {}

  __device__ uint32_t Divide(uint32_t n) const {
    return divisor_ > 1 ? static_cast<uint32_t>(__umul64hi(n, reciprocal_)) : n;
  }
  __device__ uint32_t divisor() const { return divisor_; }

 private:
  uint32_t divisor_;
  uint64_t reciprocal_;  // ceil(2^64 / divisor)
};

// One operation's windows of all ranks.
struct Window {
  const LowLatencyParams& params;
  const char* name;  // of the operation, for messages
  WindowKind kind;
  uint32_t last;       // epoch of the operation before
  uint32_t epoch = 0;  // from Begin() on, as all that depends on it
  uint32_t parity = 0;

  // All threads of a block construct it first of all. The epoch is then on its
  // way, and other loads may follow it.
  __device__ Window(const LowLatencyParams& p, const char* operation_name,
                    WindowKind window_kind)
      : params(p), name(operation_name), kind(window_kind) {
    last = *reinterpret_cast<volatile uint32_t*>(&State()->epoch);
  }

  // Waits for the epoch. Once by every warp; those that work on rows say so.
  __device__ __forceinline__ void Begin(bool works = true) {
    // Words that nobody has written hold epoch 0; and odd and even have to take
    // turns, so 1 is left out as well when the count begins again.
    epoch = last + 1 == 0 ? 2 : last + 1;
    parity = epoch & 1;
    if (works) ptx::ArriveThreads(kEpochBarrier, kWindowThreads);
  }

  __device__ int32_t rank() const { return params.op.view.rank; }
  __device__ int32_t num_ranks() const { return params.op.view.num_ranks; }
  __device__ uint64_t Word(uint32_t value) const {
    return uint64_t{epoch} << 32 | value;
  }

  __device__ std::byte* At(int32_t owner, int64_t offset) const {
    return params.op.view.control[owner] + offset;
  }
  __device__ LowLatencyState* State() const {
    return reinterpret_cast<LowLatencyState*>(
        At(rank(), LowLatencyLayout::state(kind)));
  }
  // What `from` keeps on `owner`.
  __device__ uint64_t* Head(int32_t owner, int32_t from) const {
    return reinterpret_cast<uint64_t*>(
               At(owner, LowLatencyLayout::heads(kind, parity))) +
           from;
  }
  // Words [T * K]: ids in dispatch, weights in combine.
  __device__ uint64_t* Words(int32_t owner, int32_t from) const {
    return reinterpret_cast<uint64_t*>(
               At(owner, params.layout.words(kind, parity))) +
           from * params.layout.max_tokens * kMaxTopK;
  }
  // The router's weights, of dispatch.
  __device__ uint64_t* Weights(int32_t owner, int32_t from) const {
    return reinterpret_cast<uint64_t*>(
               At(owner, params.layout.weights(parity))) +
           from * params.layout.max_tokens * kMaxTopK;
  }
  __device__ uint64_t* Scales(int32_t owner, int32_t from,
                              int32_t token) const {
    return reinterpret_cast<uint64_t*>(
               At(owner, params.layout.scales(parity))) +
           (from * params.layout.max_tokens + token) * params.layout.num_scales;
  }
  __device__ std::byte* Chunk(int32_t owner, int32_t from, int32_t token,
                              int32_t chunk) const {
    return At(owner, params.layout.rows(kind, parity)) +
           (from * params.layout.max_tokens + token) * params.layout.row_bytes +
           chunk * LowLatencyLayout::kChunkBytes;
  }
};

// Out of line: keeps printf's stack out of the waiting code.
static __device__ __noinline__ void TimedOut(const Window& window,
                                             const char* step, int32_t peer,
                                             uint32_t seen) {
  printf(
      "jax_ep %s (channel %u): rank %d waited %.1f s for %s of rank %d: "
      "expected epoch %u, seen %u\n",
      window.name, window.params.op.channel, window.rank(),
      static_cast<double>(window.params.op.view.timeout_ns) * 1e-9, step, peer,
      window.epoch, seen);
  __trap();
}

static __device__ __noinline__ void OtherOperation(const Window& window,
                                                   int32_t peer, uint32_t tag) {
  printf(
      "jax_ep %s (channel %u): rank %d found rank %d in another operation "
      "(channel %u)\n",
      window.name, window.params.op.channel, window.rank(), peer, tag & 0xffff);
  __trap();
}

static __device__ __noinline__ void TwoAtOnce(const Window& window) {
  printf(
      "jax_ep %s (channel %u): rank %d found another operation of this buffer "
      "under way; make one depend on the other, or use two buffers\n",
      window.name, window.params.op.channel, window.rank());
  __trap();
}

// The patience of one wait, which begins with its first look in vain.
struct Patience {
  const char* step;
  int32_t peer;
  uint64_t start = 0;

  __device__ void Look(const Window& window, uint32_t seen) {
    const uint64_t now = ptx::GlobalTimer();
    if (start == 0) start = now;
    if (now - start > window.params.op.view.timeout_ns) {
      TimedOut(window, step, peer, seen);
    }
  }
};

// A word's value, once it has come. `seen` is a first look at it.
static __device__ __forceinline__ uint32_t WaitWord(const Window& window,
                                                    const uint64_t* word,
                                                    uint64_t seen,
                                                    const char* step,
                                                    int32_t peer) {
  Patience patience = {step, peer};
  while (static_cast<uint32_t>(seen >> 32) != window.epoch) {
    patience.Look(window, static_cast<uint32_t>(seen >> 32));
    seen = ptx::LoadRelaxedSys(word);
  }
  return static_cast<uint32_t>(seen);
}

static __device__ __forceinline__ uint32_t WaitWord(const Window& window,
                                                    const uint64_t* word,
                                                    const char* step,
                                                    int32_t peer) {
  return WaitWord(window, word, ptx::LoadRelaxedSys(word), step, peer);
}

// Keeping step
// -----------------------------------------------------------------

// Every working warp, at its end.
static __device__ __forceinline__ void WarpDone(const Window& window) {
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) {
    ptx::AddRelaxedGpu(&window.State()->done[window.parity], 1);
  }
}

// The clerk of a block. Block 0's tells the peers that this operation has begun
// here; that of block `first_receiver` waits until it has begun on all ranks,
// so that no rank ends an operation that a peer has not begun. Release and
// acquire: a rank that writes into a window in its operation after the next has
// seen that its reader was through with it.
//
// The last block to begin advances the epoch, for then all have read it. That
// nothing else uses the windows meanwhile is a rule for callers; it is told
// from the counts where one breaks it.
static __device__ void KeepStep(Window& window, int32_t first_receiver) {
  window.Begin(/*works=*/false);
  const int32_t lane = threadIdx.x % kWarpSize;
  LowLatencyState* state = window.State();
  if (blockIdx.x == 0) {
    for (int32_t peer = lane; peer < window.num_ranks(); peer += kWarpSize) {
      ptx::StoreReleaseSys(window.Head(peer, window.rank()),
                           window.Word(window.params.op.tag));
    }
  }
  ptx::SyncThreads(kEpochBarrier, kWindowThreads);
  if (lane == 0) {
    volatile LowLatencyState* shown = state;
    if (blockIdx.x == 0) {
      // Of the operation before: this one's other blocks may have ended.
      const uint32_t before = window.parity ^ 1;
      const uint32_t launched = shown->launched[before];
      const uint32_t done = shown->done[before];
      if (ptx::ExchangeRelaxedGpu(&state->busy, 1) != 0 || launched != done) {
        TwoAtOnce(window);
      }
    }
    if (ptx::IncrementAcqRelGpu(&state->started, gridDim.x - 1) ==
        gridDim.x - 1) {
      shown->launched[window.parity] =
          shown->launched[window.parity] + gridDim.x * kWorkWarps;
      shown->busy = 0;
      shown->epoch = window.epoch;
    }
  }
  if (static_cast<int32_t>(blockIdx.x) != first_receiver) return;
  for (int32_t peer = lane; peer < window.num_ranks(); peer += kWarpSize) {
    const uint64_t* head = window.Head(window.rank(), peer);
    Patience patience = {"the beginning", peer};
    uint64_t seen = ptx::LoadAcquireSys(head);
    while (static_cast<uint32_t>(seen >> 32) != window.epoch) {
      patience.Look(window, static_cast<uint32_t>(seen >> 32));
      seen = ptx::LoadAcquireSys(head);
    }
    if (static_cast<uint32_t>(seen) != window.params.op.tag) {
      OtherOperation(window, peer, static_cast<uint32_t>(seen));
    }
  }
}

// Rows in chunks
// ---------------------------------------------------------------
//
// A protocol says which units of a chunk a lane holds: UnitOf(lane, i) of
// [0, kUnits) for i < kPerLane, kNoUnit where it holds fewer. `left` are the
// units of the row from the chunk's first on; what lies behind is neither
// stored nor waited for. Units that the lane does not hold may be anything.

inline constexpr int32_t kNoUnit = 1 << 30;
// Loads and stores of a lane for a chunk.
inline constexpr int kChunkWords =
    LowLatencyLayout::kChunkBytes / 16 / kWarpSize;

struct Words {
  static constexpr int32_t kUnits = 96;
  static constexpr int kPerLane = 3;

  static __device__ __forceinline__ int32_t UnitOf(int32_t lane, int i) {
    return i * kWarpSize + lane;
  }

  // Word i of the lane holds something of unit i or i - 1.
  static __device__ __forceinline__ bool Holds(int32_t lane, int i,
                                               int32_t left) {
    return UnitOf(lane, i == 0 ? 0 : i - 1) < left;
  }

  static __device__ __forceinline__ void Store(std::byte* chunk,
                                               const uint4 (&u)[kPerLane],
                                               int32_t left, uint32_t epoch) {
    const int32_t lane = threadIdx.x % kWarpSize;
    uint4* to = reinterpret_cast<uint4*>(chunk) + lane;
    const uint4 words[kChunkWords] = {{u[0].x, u[0].y, u[0].z, epoch},
                                      {u[0].w, u[1].x, u[1].y, epoch},
                                      {u[1].z, u[1].w, u[2].x, epoch},
                                      {u[2].y, u[2].z, u[2].w, epoch}};
#pragma unroll
    for (int i = 0; i < kChunkWords; ++i) {
      if (Holds(lane, i, left)) {
        ptx::StoreRelaxedSys(to + i * kWarpSize, words[i]);
      }
    }
  }

  static __device__ __forceinline__ uint4 Load(const uint4* word) {
    return ptx::LoadRelaxedSys(word);
  }

  // Whether the lane's words have come.
  static __device__ __forceinline__ bool Arrived(const uint4 (&w)[kChunkWords],
                                                 int32_t left, uint32_t epoch) {
    const int32_t lane = threadIdx.x % kWarpSize;
    bool all = true;
#pragma unroll
    for (int i = 0; i < kChunkWords; ++i) {
      all &= w[i].w == epoch || !Holds(lane, i, left);
    }
    return all;
  }

  static __device__ __forceinline__ void Unpack(const uint4 (&w)[kChunkWords],
                                                uint4 (&u)[kPerLane]) {
    u[0] = {w[0].x, w[0].y, w[0].z, w[1].x};
    u[1] = {w[1].y, w[1].z, w[2].x, w[2].y};
    u[2] = {w[2].z, w[3].x, w[3].y, w[3].z};
  }
};

// A chunk is two pairs of instructions; in a pair four groups of eight lanes
// have 15 units each. Lanes 0 to 6 of a group hold two of them, one in each
// line. Lane 7 holds one, half of it in each line, beside the epoch.
struct Lines {
  static constexpr int32_t kUnits = 120;
  static constexpr int kPerLane = 4;

  static __device__ __forceinline__ int32_t FirstOf(int32_t lane, int i) {
    return i / 2 * 60 + lane / 8 * 15 + i % 2 * 7;
  }
  static __device__ __forceinline__ int32_t UnitOf(int32_t lane, int i) {
    if (lane % 8 < 7) return FirstOf(lane, i) + lane % 8;
    return i % 2 == 0 ? FirstOf(lane, i) + 14 : kNoUnit;
  }

  // The line of instruction i holds something of the row.
  static __device__ __forceinline__ bool Holds(int32_t lane, int i,
                                               int32_t left) {
    return FirstOf(lane, i) < left;
  }

  static __device__ __forceinline__ void Store(std::byte* chunk,
                                               const uint4 (&u)[kPerLane],
                                               int32_t left, uint32_t epoch) {
    const int32_t lane = threadIdx.x % kWarpSize;
    uint4* to = reinterpret_cast<uint4*>(chunk) + lane;
    const bool last = lane % 8 == 7;
#pragma unroll
    for (int i = 0; i < kChunkWords; ++i) {
      uint4 word = u[i];
      if (last) {
        const uint4 both = u[i / 2 * 2];
        word = i % 2 == 0 ? uint4{both.x, both.y, epoch, epoch}
                          : uint4{both.z, both.w, epoch, epoch};
      }
      if (Holds(lane, i, left)) ptx::StoreLine(to + i * kWarpSize, word);
    }
  }

  static __device__ __forceinline__ uint4 Load(const uint4* word) {
    return ptx::LoadLine(word);
  }

  static __device__ __forceinline__ bool Arrived(const uint4 (&w)[kChunkWords],
                                                 int32_t left, uint32_t epoch) {
    const int32_t lane = threadIdx.x % kWarpSize;
    bool all = true;
    if (lane % 8 == 7) {
#pragma unroll
      for (int i = 0; i < kChunkWords; ++i) {
        all &= w[i].w == epoch || !Holds(lane, i, left);
      }
    }
    return all;
  }

  static __device__ __forceinline__ void Unpack(const uint4 (&w)[kChunkWords],
                                                uint4 (&u)[kPerLane]) {
    const bool last = threadIdx.x % kWarpSize % 8 == 7;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      u[i] = w[i];
      if (last && i % 2 == 0) {
        u[i] = {w[i].x, w[i].y, w[i + 1].x, w[i + 1].y};
      }
    }
  }
};

// Lines pay where the link's rate counts more than its latency. From sizes
// alone, so that all ranks choose alike.
inline bool UseLines(int64_t row_bytes, int64_t num_tokens) {
  constexpr int64_t kFromBytes = 256 << 10;
  return row_bytes * num_tokens >= kFromBytes;
}

inline int32_t ElementBytes(Element element) {
  return element == Element::kF32 ? 4 : 2;
}

// A first look at a chunk.
template <typename Protocol>
__device__ __forceinline__ void LookAt(const std::byte* chunk, int32_t left,
                                       uint4 (&w)[kChunkWords]) {
  const int32_t lane = threadIdx.x % kWarpSize;
  const uint4* from = reinterpret_cast<const uint4*>(chunk) + lane;
#pragma unroll
  for (int i = 0; i < kChunkWords; ++i) {
    w[i] = uint4{};
    if (Protocol::Holds(lane, i, left)) {
      w[i] = Protocol::Load(from + i * kWarpSize);
    }
  }
}

// Looks again until all has come; then the lane's units. All lanes of a warp.
template <typename Protocol>
__device__ __forceinline__ void WaitChunk(const Window& window,
                                          const std::byte* chunk, int32_t left,
                                          int32_t peer, uint4 (&w)[kChunkWords],
                                          uint4 (&u)[Protocol::kPerLane]) {
  Patience patience = {"the rows", peer};
  while (!__all_sync(kAllLanes, Protocol::Arrived(w, left, window.epoch))) {
    patience.Look(window, w[0].w);
    LookAt<Protocol>(chunk, left, w);
  }
  Protocol::Unpack(w, u);
}

// Rows in XLA's buffers
// --------------------------------------------------------

// Unit `unit` of a row, zeros behind its end. kWide: rows and their sizes are
// multiples of 16 bytes.
template <bool kWide>
__device__ __forceinline__ uint4 LoadRowUnit(const std::byte* row, int32_t unit,
                                             int64_t row_bytes) {
  if constexpr (kWide) {
    return LoadUnit(reinterpret_cast<const uint4*>(row) + unit);
  } else {
    uint32_t words[4] = {};
    for (int i = 0; i < 16; ++i) {
      const int64_t at = int64_t{unit} * 16 + i;
      if (at < row_bytes) {
        words[i / 4] |= static_cast<uint32_t>(row[at]) << i % 4 * 8;
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }
}

template <bool kWide>
__device__ __forceinline__ void StoreRowUnit(std::byte* row, int32_t unit,
                                             int64_t row_bytes, uint4 value) {
  if constexpr (kWide) {
    StoreUnit(reinterpret_cast<uint4*>(row) + unit, value);
  } else {
    const uint32_t words[4] = {value.x, value.y, value.z, value.w};
    for (int i = 0; i < 16; ++i) {
      const int64_t at = int64_t{unit} * 16 + i;
      if (at < row_bytes) {
        row[at] = static_cast<std::byte>(words[i / 4] >> i % 4 * 8);
      }
    }
  }
}

// The lane's units of a chunk that begins at unit `first` of a row.
template <typename Protocol, bool kWide>
__device__ __forceinline__ void LoadRow(const std::byte* row, int32_t first,
                                        int32_t left, int64_t row_bytes,
                                        uint4 (&u)[Protocol::kPerLane]) {
  const int32_t lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < Protocol::kPerLane; ++i) {
    const int32_t unit = Protocol::UnitOf(lane, i);
    u[i] = uint4{};
    if (unit < left) u[i] = LoadRowUnit<kWide>(row, first + unit, row_bytes);
  }
}

template <typename Protocol, bool kWide>
__device__ __forceinline__ void StoreRow(std::byte* row, int32_t first,
                                         int32_t left, int64_t row_bytes,
                                         const uint4 (&u)[Protocol::kPerLane]) {
  const int32_t lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < Protocol::kPerLane; ++i) {
    const int32_t unit = Protocol::UnitOf(lane, i);
    if (unit < left) StoreRowUnit<kWide>(row, first + unit, row_bytes, u[i]);
  }
}

// Tokens and ranks
// -------------------------------------------------------------

// An expert id's rank and number there.
struct Experts {
  int32_t num_experts;
  int32_t local_experts;
  Divisor divide;

  __host__ __device__ Experts(int32_t experts, int32_t num_ranks)
      : num_experts(experts),
        local_experts(LocalExperts(experts, num_ranks)),
        divide(static_cast<uint32_t>(local_experts)) {}

  __device__ bool IsExpert(int32_t id) const {
    return static_cast<uint32_t>(id) < static_cast<uint32_t>(num_experts);
  }
  // -1 for no expert.
  __device__ int32_t RankOf(int32_t id) const {
    return IsExpert(id) ? static_cast<int32_t>(divide.Divide(id)) : -1;
  }
  // -1 for an expert elsewhere.
  __device__ int32_t LocalOn(int32_t rank, int32_t id) const {
    const int32_t local = id - rank * local_experts;
    return IsExpert(id) && local >= 0 && local < local_experts ? local : -1;
  }
};

// OR over the warp of the bits of the lanes' ranks.
__device__ __forceinline__ uint64_t RanksOfWarp(int32_t rank,
                                                int32_t num_ranks) {
  const uint64_t bit = rank < 0 ? 0 : uint64_t{1} << rank;
  uint64_t ranks = __reduce_or_sync(kAllLanes, static_cast<uint32_t>(bit));
  if (num_ranks > 32) {
    ranks |=
        uint64_t{__reduce_or_sync(kAllLanes, static_cast<uint32_t>(bit >> 32))}
        << 32;
  }
  return ranks;
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_DEVICE_WINDOW_CUH_
