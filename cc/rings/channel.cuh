// Staged rows: rings in staging memory between ranks of different processes,
// for what one of them cannot reach in the other's buffers.
//
// A channel is one block of a launch, channel c block c on every rank (plan:
// the last block, channel 0). Two teams of its warps work at the same time: one
// fills rings of the peers, the other drains this rank's. So a channel needs no
// block of its launch beside its own: blocks become resident in the order of
// their index, the lowest unfinished channel is resident on all ranks, and both
// of its ends run on each. Where a team serves one peer after the other, the
// step'th peer to send to is rank + step and to receive from rank - step, so
// that the two ends of the lowest unfinished step meet; each ring's contents
// are in the same order on both ends.
//
// Counters only grow and persist from call to call. Between operations every
// ring is drained, so a producer goes on from the head that it finds.
//
// One operation of a group has staging memory at a time: rank 0 takes the turn
// when its block gets there, tells all ranks by a word in this operation's
// control slot, and gives it back after all ranks have closed, when all rings
// are drained.
//
// Order:  BeginStaged: rank 0's take (acquire) pairs with the last operation's
//         EndStaged (release); its word to the ranks (release) with their wait
//         (acquire). So all that the last operation did to the rings is past.
//         Push (a barrier of the team, release of the tail) -> WaitRows
//         (acquire, barrier): the slot is filled. Pop (barrier, release of the
//         head) -> WaitRoom (acquire, barrier): the slot has been read.
#ifndef JAX_EP_CC_RINGS_CHANNEL_CUH_
#define JAX_EP_CC_RINGS_CHANNEL_CUH_

#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "cc/handshake/sync.cuh"
#include "cc/layout/staging.h"
#include "cc/ops.h"
#include "cc/ptx.cuh"
#include "cc/rows/rows.cuh"

namespace jax_ep {

inline constexpr int kTeamThreads = 256;
inline constexpr int kTeamWarps = kTeamThreads / kWarpSize;
// Teams of a block; further warps of it have no part in staged rows.
enum : int32_t { kSends, kReceives, kNumTeams };

struct Team {
  int32_t number;
  int32_t thread;

  static __device__ Team Mine() {
    return {static_cast<int32_t>(threadIdx.x) / kTeamThreads,
            static_cast<int32_t>(threadIdx.x) % kTeamThreads};
  }
  __device__ bool leader() const { return thread == 0; }
  __device__ void Sync() const { ptx::SyncThreads(number + 1, kTeamThreads); }
};

// The rings of one channel.
struct Rings {
  const Control& control;
  StagingLayout layout;
  int32_t channel;

  __device__ Rings(const Control& c, int32_t ring_channel)
      : control(c),
        layout(c.op.view.staging_bytes, c.op.view.num_channels, c.num_ranks()),
        channel(ring_channel) {}

  __device__ int32_t rank() const { return control.rank(); }
  __device__ int32_t num_ranks() const { return control.num_ranks(); }
  // Whether rings lead to that rank: it belongs to another process.
  __device__ bool Leads(int32_t peer) const {
    return !control.op.view.same_process.Has(peer);
  }

  __device__ std::byte* Memory(int32_t owner) const {
    return control.op.view.control[owner] + control.layout.size();
  }
  // Of the ring in which `from` sends to `to`: its counters and a slot.
  __device__ uint64_t* Tail(int32_t from, int32_t to) const {
    return reinterpret_cast<uint64_t*>(
        Memory(to) + layout.tail(channel, StagingLayout::PeerIndex(to, from)));
  }
  __device__ uint64_t* Drained(int32_t from, int32_t to) const {
    return reinterpret_cast<uint64_t*>(
        Memory(to) +
        layout.drained(channel, StagingLayout::PeerIndex(to, from)));
  }
  __device__ uint64_t* Head(int32_t from, int32_t to) const {
    return reinterpret_cast<uint64_t*>(
        Memory(from) +
        layout.head(channel, StagingLayout::PeerIndex(from, to)));
  }
  __device__ std::byte* Slot(int32_t from, int32_t to, uint64_t count) const {
    return Memory(to) + layout.slot(channel, StagingLayout::PeerIndex(to, from),
                                    count % layout.num_slots);
  }
  // The head from which on slot number `filled` may be filled.
  __device__ uint64_t HeadFor(uint64_t filled) const {
    const uint64_t slots = layout.num_slots;
    return filled < slots ? 0 : filled + 1 - slots;
  }
};

// Channels that this launch uses, the same on all ranks.
static __device__ __forceinline__ int32_t NumChannels(const Control& control) {
  return min(control.op.view.num_channels, static_cast<int32_t>(gridDim.x));
}

// A channel's share of the tokens of any rank.
static __device__ __forceinline__ Range TokensOf(const Control& control,
                                                 int32_t channel,
                                                 int64_t num_tokens) {
  const int32_t channels = NumChannels(control);
  return {num_tokens * channel / channels,
          num_tokens * (channel + 1) / channels};
}

// Words that a team waits for.

static __device__ __noinline__ void RingTimedOut(const Rings& rings,
                                                 const char* step, int32_t peer,
                                                 uint64_t least,
                                                 uint64_t seen) {
  const Control& control = rings.control;
  printf(
      "jax_ep %s (channel %u): rank %d waited %.1f s for %s of rank %d in ring "
      "%d: expected slot %llu, seen %llu\n",
      control.name, control.op.channel, control.rank(),
      static_cast<double>(control.op.view.timeout_ns) * 1e-9, step, peer,
      rings.channel, static_cast<unsigned long long>(least),
      static_cast<unsigned long long>(seen));
  __trap();
}

// Waits until a counter is at least `least`. Acquire.
static __device__ void WaitCounter(const Rings& rings, const uint64_t* word,
                                   uint64_t least, const char* step,
                                   int32_t peer) {
  uint64_t seen = ptx::LoadAcquireSys(word);
  if (seen >= least) return;
  const uint64_t start = ptx::GlobalTimer();
  for (;;) {
    seen = ptx::LoadAcquireSys(word);
    if (seen >= least) return;
    if (RanOut(rings.control, ptx::GlobalTimer() - start, step, peer)) {
      RingTimedOut(rings, step, peer, least, seen);
    }
  }
}

// A counter that nobody changes at the moment.
static __device__ __forceinline__ uint64_t LoadCounter(const uint64_t* word) {
  return *reinterpret_cast<const volatile uint64_t*>(word);
}

// The end of a ring that fills slots. Called by all threads of a team.
class Producer {
 public:
  __device__ Producer(const Rings& rings, const Team& team, int32_t peer)
      : rings_(rings),
        team_(team),
        peer_(peer),
        filled_(LoadCounter(rings.Head(rings.rank(), peer))) {}

  // Waits until the next slot is free.
  __device__ void WaitRoom() const {
    if (team_.leader()) {
      WaitCounter(rings_, rings_.Head(rings_.rank(), peer_),
                  rings_.HeadFor(filled_), "a free slot", peer_);
    }
    team_.Sync();
  }
  __device__ std::byte* slot() const {
    return rings_.Slot(rings_.rank(), peer_, filled_);
  }
  __device__ void Push() {
    team_.Sync();
    ++filled_;
    if (team_.leader()) {
      ptx::StoreReleaseSys(rings_.Tail(rings_.rank(), peer_), filled_);
    }
  }

 private:
  const Rings& rings_;
  const Team& team_;
  int32_t peer_;
  uint64_t filled_;
};

// Slots up to `drained` of the ring from `peer` have been read by threads that
// the caller has met in a barrier.
static __device__ __forceinline__ void ReleaseSlots(const Rings& rings,
                                                    int32_t peer,
                                                    uint64_t drained) {
  *rings.Drained(peer, rings.rank()) = drained;
  ptx::StoreReleaseSys(rings.Head(peer, rings.rank()), drained);
}

// The end of a ring that drains slots. Called by all threads of a team.
class Consumer {
 public:
  __device__ Consumer(const Rings& rings, const Team& team, int32_t peer)
      : rings_(rings),
        team_(team),
        peer_(peer),
        drained_(LoadCounter(rings.Drained(peer, rings.rank()))) {}

  // Waits until the next slot is filled.
  __device__ void WaitRows() const {
    if (team_.leader()) {
      WaitCounter(rings_, rings_.Tail(peer_, rings_.rank()), drained_ + 1,
                  "rows", peer_);
    }
    team_.Sync();
  }
  __device__ const std::byte* slot() const {
    return rings_.Slot(peer_, rings_.rank(), drained_);
  }
  __device__ void Pop() {
    team_.Sync();
    ++drained_;
    if (team_.leader()) ReleaseSlots(rings_, peer_, drained_);
  }

 private:
  const Rings& rings_;
  const Team& team_;
  int32_t peer_;
  uint64_t drained_;
};

// The peers of the step'th of a team's steps, from 1 to R - 1.
static __device__ __forceinline__ int32_t SendsTo(const Rings& rings,
                                                  int32_t step) {
  return (rings.rank() + step) % rings.num_ranks();
}
static __device__ __forceinline__ int32_t ReceivesFrom(const Rings& rings,
                                                       int32_t step) {
  return (rings.rank() + rings.num_ranks() - step) % rings.num_ranks();
}

// Pieces of one size, the j-th of them at first + j * stride, or where there is
// an index at first + index[j] * stride.
struct Pieces {
  const std::byte* first;
  int64_t stride;
  const int32_t* index;

  __device__ const std::byte* operator[](int64_t j) const {
    return first + (index == nullptr ? j : index[j]) * stride;
  }
};

template <typename Unit>
__device__ void CopyPiecesBy(const Team& team, const Pieces& from,
                             std::byte* to, int64_t stride, int64_t count,
                             int64_t bytes) {
  constexpr int kInFlight = 4;
  // What a slot holds fits 32 bits.
  const uint32_t units = static_cast<uint32_t>(bytes / sizeof(Unit));
  const uint32_t total = static_cast<uint32_t>(count) * units;
  for (uint32_t base = team.thread; base < total;
       base += kInFlight * kTeamThreads) {
    Unit values[kInFlight];
    Unit* targets[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const uint32_t unit = base + i * kTeamThreads;
      targets[i] = nullptr;
      if (unit < total) {
        const uint32_t j = unit / units;
        const uint32_t at = unit % units;
        values[i] = LoadUnit(reinterpret_cast<const Unit*>(from[j]) + at);
        targets[i] = reinterpret_cast<Unit*>(to + j * stride) + at;
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (targets[i] != nullptr) StoreUnit(targets[i], values[i]);
    }
  }
}

// Copies `count` pieces of `bytes` to `to`, `stride` bytes apart. Called by all
// threads of a team, with the same arguments.
static __device__ void CopyPieces(const Team& team, const Pieces& from,
                                  std::byte* to, int64_t stride, int64_t count,
                                  int64_t bytes) {
  switch (UnitBytes(reinterpret_cast<uint64_t>(from.first) | from.stride |
                    reinterpret_cast<uint64_t>(to) | stride | bytes)) {
    case 16:
      return CopyPiecesBy<uint4>(team, from, to, stride, count, bytes);
    case 8:
      return CopyPiecesBy<uint2>(team, from, to, stride, count, bytes);
    case 4:
      return CopyPiecesBy<uint32_t>(team, from, to, stride, count, bytes);
    case 2:
      return CopyPiecesBy<uint16_t>(team, from, to, stride, count, bytes);
    default:
      return CopyPiecesBy<uint8_t>(team, from, to, stride, count, bytes);
  }
}

// Tokens with a row for one rank, in order; in shared memory.
struct TokenWindow {
  int32_t tokens[kTeamThreads];
  int32_t warp_rows[kTeamWarps];
};

// Finds those of tokens [begin, begin + kTeamThreads) below `end` that go to
// `rank`, and returns how many. Called by all threads of a team, which have
// done with the last window's tokens when all have called it.
static __device__ int32_t FindTokens(const Team& team, const int32_t* routes,
                                     int32_t routes_per_token, int64_t begin,
                                     int64_t end, int32_t rank,
                                     TokenWindow& window) {
  const int64_t token = begin + team.thread;
  bool goes = false;
  if (token < end) {
    const int2* route =
        reinterpret_cast<const int2*>(routes) + token * routes_per_token;
    for (int32_t j = 0; j < routes_per_token; ++j) {
      // Not through the read-only cache: plan has just written them.
      goes |= __ldcg(route + j).x == rank;
    }
  }
  const uint32_t here = __ballot_sync(kAllLanes, goes);
  const int32_t lane = team.thread % kWarpSize;
  const int32_t warp = team.thread / kWarpSize;
  if (lane == 0) window.warp_rows[warp] = __popc(here);
  team.Sync();
  int32_t before = 0;
  int32_t rows = 0;
  for (int32_t w = 0; w < kTeamWarps; ++w) {
    if (w < warp) before += window.warp_rows[w];
    rows += window.warp_rows[w];
  }
  if (goes) {
    window.tokens[before + __popc(here & ((1u << lane) - 1))] =
        static_cast<int32_t>(token);
  }
  team.Sync();
  return rows;
}

// Sends the rows of those of `tokens` that go to `producer`'s peer, `rank`.
// fill(tokens, part, count, slot) writes that piece of the rows of so many
// tokens to a slot, cut.piece_bytes apart.
template <typename Fill>
__device__ void SendTokens(const Team& team, const RowCut& cut,
                           const int32_t* routes, int32_t routes_per_token,
                           Range tokens, int32_t rank, TokenWindow& window,
                           Producer& producer, const Fill& fill) {
  int64_t in_slot = 0;
  for (int64_t begin = tokens.begin; begin < tokens.end;
       begin += kTeamThreads) {
    const int64_t pieces =
        cut.pieces * FindTokens(team, routes, routes_per_token, begin,
                                tokens.end, rank, window);
    for (int64_t piece = 0; piece < pieces;) {
      if (in_slot == 0) producer.WaitRoom();
      const int64_t count = min(pieces - piece, cut.per_slot - in_slot);
      fill(window.tokens + piece / cut.pieces, piece % cut.pieces, count,
           producer.slot() + in_slot * cut.piece_bytes);
      piece += count;
      in_slot += count;
      if (in_slot == cut.per_slot) {
        producer.Push();
        in_slot = 0;
      }
    }
  }
  if (in_slot > 0) producer.Push();
}

// Receives `rows` rows. drain(row, part, count, slot) reads that piece of so
// many rows, from the row'th on.
template <typename Drain>
__device__ void ReceiveRows(const RowCut& cut, int64_t rows, Consumer& consumer,
                            const Drain& drain) {
  const int64_t pieces = rows * cut.pieces;
  for (int64_t piece = 0; piece < pieces;) {
    consumer.WaitRows();
    const int64_t count = min(pieces - piece, cut.per_slot);
    drain(piece / cut.pieces, piece % cut.pieces, count, consumer.slot());
    consumer.Pop();
    piece += count;
  }
}

// The slots of a receive buffer that hold the rows of tokens [begin, end) of
// rank `source`: recv_src grows up to num_recv. Called by whole warps or by
// threads alone; no barrier.
static __device__ Range SlotsOf(const RowParams& params, int64_t source,
                                Range tokens) {
  const int32_t* const recv_src = params.recv_src;
  const int64_t num_tokens =
      params.source_tokens != 0 ? params.source_tokens : params.num_tokens;
  const int64_t first =
      (params.first_source + source) * num_tokens + params.first_token;
  const auto first_from = [&](int64_t key) {
    int32_t low = 0;
    int32_t high = *params.num_recv;
    while (low < high) {
      const int32_t middle = low + (high - low) / 2;
      // Not through the read-only cache: plan_dispatch has just written it.
      if (__ldcg(recv_src + middle) < key) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return int64_t{low};
  };
  return {first_from(first + tokens.begin), first_from(first + tokens.end)};
}

// Whose turn it is.

static __device__ __forceinline__ uint64_t* TurnWord(const Control& control) {
  return reinterpret_cast<uint64_t*>(control.op.view.control[0] +
                                     control.layout.size());
}

static __device__ __noinline__ void TurnTimedOut(const Control& control,
                                                 uint64_t seen) {
  printf(
      "jax_ep %s (channel %u): rank %d waited %.1f s for its turn with staging "
      "memory, which channel %u has\n",
      control.name, control.op.channel, control.rank(),
      static_cast<double>(control.op.view.timeout_ns) * 1e-9,
      static_cast<uint32_t>(seen));
  __trap();
}

// Waits until staging memory is this operation's. Called by all threads of
// every block that uses rings; in one block of rank 0, which may not wait for
// another of its launch, with `takes`. Ends in a barrier.
static __device__ void BeginStaged(const Control& control, bool takes) {
  if (threadIdx.x == 0) {
    if (takes && control.rank() == 0) {
      const uint64_t mine = uint64_t{1} << 32 | control.op.channel;
      const uint64_t start = ptx::GlobalTimer();
      for (;;) {
        const uint64_t seen = ptx::TakeAcquireGpu(TurnWord(control), mine);
        if (seen == 0) break;
        if (RanOut(control, ptx::GlobalTimer() - start, "the turn", 0)) {
          TurnTimedOut(control, seen);
        }
      }
      for (int32_t r = 0; r < control.num_ranks(); ++r) {
        ptx::StoreReleaseSys(control.Turn(r), control.Word(control.op.channel));
      }
    }
    Wait(control, control.Turn(control.rank()), "the turn", 0);
  }
  __syncthreads();
}

// Gives the turn back. Called by all threads of the last block, after
// CloseWithPeers().
static __device__ void EndStaged(const Control& control) {
  if (threadIdx.x == 0 && control.rank() == 0) {
    ptx::StoreReleaseSys(TurnWord(control), 0);
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_RINGS_CHANNEL_CUH_
