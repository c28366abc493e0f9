// Windows of a low-latency buffer as the blocks of one launch use them.
//
// Nothing is announced and nothing is reset: whatever a peer stores here tells
// by itself that it belongs to this operation, by the operation's epoch. Expert
// ids and weights are words (epoch << 32 | value). Rows travel in lines of 128
// bytes, the last four of them the epoch, stored and loaded by eight
// neighbouring lanes in one instruction each. PTX does not promise that a line
// is seen whole; GPUs with NVLink do, and NCCL's protocol LL128 rests on it.
// That saves the fence that a flag behind a row would need, which waits until
// all stores so far have crossed the link. The epoch has the same place in
// every line of every operation: what an older one left is never taken for it.
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
  uint32_t before;  // the epoch of the operation before
  uint32_t epoch;
  uint32_t parity;

  // All threads of a block construct it first of all.
  __device__ Window(const LowLatencyParams& p, const char* operation_name,
                    WindowKind window_kind)
      : params(p), name(operation_name), kind(window_kind) {
    before = *reinterpret_cast<volatile uint32_t*>(&State()->epoch);
  }
  // Waits for the epoch; until then there is none.
  __device__ __forceinline__ void AwaitEpoch() {
    epoch = before + 1;
    // Words that nobody has written hold epoch 0; and odd and even have to take
    // turns, so 1 is left out as well when the count begins again.
    if (epoch == 0) epoch = 2;
    parity = epoch & 1;
    ptx::AwaitNonzero(epoch);
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
  __device__ std::byte* Chunk(int32_t owner, int32_t from, int32_t token,
                              int32_t chunk) const {
    return At(owner, params.layout.rows(kind, parity)) +
           (from * params.layout.max_tokens + token) * params.layout.row_bytes +
           chunk * LowLatencyLayout::kChunkBytes;
  }
};

// Out of line: keeps printf's stack out of the waiting code. These get copies,
// or windows would have to live in memory.
[[noreturn]] static __device__ __noinline__ void TimedOut(Window window,
                                                          const char* step,
                                                          int32_t peer,
                                                          uint32_t seen) {
  printf(
      "jax_ep %s (channel %u): rank %d waited %.1f s for %s of rank %d: "
      "expected epoch %u, seen %u\n",
      window.name, window.params.op.channel, window.rank(),
      static_cast<double>(window.params.op.view.timeout_ns) * 1e-9, step, peer,
      window.epoch, seen);
  __trap();
  __builtin_unreachable();
}

[[noreturn]] static __device__ __noinline__ void OtherOperation(Window window,
                                                                int32_t peer,
                                                                uint32_t tag) {
  printf(
      "jax_ep %s (channel %u): rank %d found rank %d in another operation "
      "(channel %u)\n",
      window.name, window.params.op.channel, window.rank(), peer, tag & 0xffff);
  __trap();
  __builtin_unreachable();
}

[[noreturn]] static __device__ __noinline__ void TwoAtOnce(Window window) {
  printf(
      "jax_ep %s (channel %u): rank %d found another operation of this buffer "
      "under way; make one depend on the other, or use two buffers\n",
      window.name, window.params.op.channel, window.rank());
  __trap();
  __builtin_unreachable();
}

// The patience of one wait, which begins with its first look in vain.
struct Patience {
  const char* step;
  int32_t peer;
  uint64_t start = 0;

  // `tells`: this lane, of those that wait together, has the last word.
  __device__ void Look(const Window& window, uint32_t seen, bool tells = true) {
    const uint64_t now = ptx::GlobalTimer();
    if (start == 0) start = now;
    if (now - start > window.params.op.view.timeout_ns && tells) {
      TimedOut(window, step, peer, seen);
    }
  }
};

// A word that a look has seen is of this operation.
static __device__ __forceinline__ bool HasCome(const Window& window,
                                               uint64_t seen) {
  return static_cast<uint32_t>(seen >> 32) == window.epoch;
}

// Whether the caller is the first lane of `lanes`.
static __device__ __forceinline__ bool IsFirstOf(uint32_t lanes) {
  return static_cast<int32_t>(threadIdx.x % kWarpSize) == __ffs(lanes) - 1;
}

// A word that is waited for.
struct AwaitedWord {
  const uint64_t* word;
  int32_t peer;
};

// Waits for the words of a batch; `seen` are first looks at them, and
// window.Word(~0u) where a lane wants none. Those that have not come are looked
// at again all at once. Called by a whole warp, which goes on as one: see
// "Rows in chunks".
template <int kBatch, typename WordOf>
__device__ __forceinline__ void WaitWords(const Window& window,
                                          uint64_t (&seen)[kBatch],
                                          const WordOf& word_of,
                                          const char* step) {
  Patience patience = {step, 0};
  while (true) {
    bool all = true;
    uint32_t found = 0;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (HasCome(window, seen[j])) continue;
      const AwaitedWord awaited = word_of(j);
      all = false;
      found = static_cast<uint32_t>(seen[j] >> 32);
      patience.peer = awaited.peer;
      seen[j] = ptx::LoadRelaxedSys(awaited.word);
    }
    const uint32_t waiting = __ballot_sync(kAllLanes, !all);
    if (waiting == 0) return;
    patience.Look(window, found, IsFirstOf(waiting));
  }
}

// Calls each(i) for the i of [0, n) that are `thread` modulo `threads`, the
// lanes of a warp in step. `thread` is that of the warp's first lane plus lane.
template <typename Each>
__device__ __forceinline__ void ForEach(int32_t thread, int32_t threads,
                                        int32_t n, const Each& each) {
  const int32_t lane = threadIdx.x % kWarpSize;
  for (int32_t first = thread - lane; first < n; first += threads) {
    if (first + lane < n) each(first + lane);
  }
}

// Keeping step ---------------------------------------------------------------

// Every working warp, when it has asked for what needs no epoch: the epoch is
// then in its register, and may be advanced in memory.
static __device__ __forceinline__ void HasEpoch(Window& window) {
  window.AwaitEpoch();
  ptx::ArriveThreads(kEpochBarrier, kWindowThreads);
}

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
static __device__ void KeepStep(Window window, int32_t first_receiver) {
  window.AwaitEpoch();
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

// Rows in chunks -------------------------------------------------------------
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
template <typename Protocol>
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
    patience.Look(window, seen, IsFirstOf(waiting));
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

// Tokens and ranks -----------------------------------------------------------

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
