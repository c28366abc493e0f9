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
#ifndef JAX_EP_CC_FEW_TOKENS_WINDOW_CUH_
#define JAX_EP_CC_FEW_TOKENS_WINDOW_CUH_

#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "cc/few_tokens/low_latency.h"
#include "cc/handshake/mesh.cuh"
#include "cc/handshake/patience.cuh"
#include "cc/ptx.cuh"
#include "cc/rows/rows.cuh"

namespace jax_ep {

// Warps of a block that work on rows; one more, the control warp, keeps the
// launch in step with others.
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
  uint32_t position;  // of this device on the program's mesh
  uint32_t before;    // the epoch of the operation before
  uint32_t epoch;
  uint32_t parity;

  // All threads of a block construct it first of all.
  __device__ Window(const LowLatencyParams& p, const char* operation_name,
                    WindowKind window_kind)
      : params(p), name(operation_name), kind(window_kind) {
    position = LoadPosition(params.op);
    before = *reinterpret_cast<volatile uint32_t*>(&State()->epoch);
  }
  // Waits for the epoch; until then there is none, and nothing is written.
  __device__ __forceinline__ void AwaitEpoch() {
    CheckPosition(params.op, position, name);
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

// The patience of one wait, which begins when its first look finds nothing.
struct Patience {
  const char* step;
  int32_t peer;
  uint64_t start = 0;

  // `tells`: this lane, of those that wait together, has the last word.
  __device__ void Look(const Window& window, uint32_t seen, bool tells = true) {
    const uint64_t now = ptx::GlobalTimer();
    if (start == 0) start = now;
    if (tells && RanOut(window.params.op, window.name, window.epoch,
                        now - start, step, peer)) {
      TimedOut(window, step, peer, seen);
    }
  }
  // The same without a note to the host. Where a note is left the compiler may
  // part the lanes of a warp (it does for sm_80 in combine), which have to go
  // on as one; who waits for the peer's beginning leaves the note.
  __device__ void LookWithoutNote(const Window& window, uint32_t seen,
                                  bool tells) {
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
// cc/few_tokens/window_chunks.cuh.
template <bool kNotes = true, int kBatch, typename WordOf>
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
    if constexpr (kNotes) {
      patience.Look(window, found, IsFirstOf(waiting));
    } else {
      patience.LookWithoutNote(window, found, IsFirstOf(waiting));
    }
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

// The control warp of a block. Block 0's tells the peers that this operation
// has begun here; that of block `first_receiver` waits until it has begun on
// all ranks, so that no rank ends an operation that a peer has not begun.
// Release and acquire: a rank that writes into a window in its operation after
// the next has seen that its reader was through with it.
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

}  // namespace jax_ep

#endif  // JAX_EP_CC_FEW_TOKENS_WINDOW_CUH_
