// The staged part of combine: sums of rows of which some stand in buffers that
// this rank cannot reach.
//
// Launch: called by all threads of every block, after the direct part.
// Roles:  channel c sums its share of each rank's tokens, leaf by leaf. The
//         senders pass on this rank's rows of other ranks' tokens, found by
//         recv_src: a slot to whichever peer has room, never waiting for one of
//         them. The receivers take a few tokens at a time, wait for what the
//         rings bring of them and add it in rank order to what they can reach.
//         What they wait for spans two slots of a ring at most, and all slots
//         before are free by then: each sender gets on with that peer, whatever
//         the others do, and so does each receiver.
// Reads:  params.routes, num_recv, recv_src, leaves[].in of this rank and of
//         peers within reach. Writes: staging memory of the peers, leaves[].out
//         of this rank.
// Order:  as cc/rings/channel.cuh says of Push, WaitRows, Pop and WaitRoom.
#ifndef JAX_EP_CC_RINGS_STAGED_COMBINE_CUH_
#define JAX_EP_CC_RINGS_STAGED_COMBINE_CUH_

#include <cstddef>
#include <cstdint>

#include "cc/ops.h"
#include "cc/rings/channel.cuh"

namespace jax_ep {

// Bit i is set where some rank's rows of leaf i are out of reach. `inputs` as
// WaitReady() leaves it.
static __device__ __forceinline__ uint32_t
LeavesOutOfReach(const CombineParams& params, std::byte* const* inputs) {
  const int32_t num_ranks = params.op.view.num_ranks;
  uint32_t leaves = 0;
  for (int32_t i = 0; i < params.num_leaves * num_ranks; ++i) {
    if (inputs[i] == nullptr) leaves |= 1u << i / num_ranks;
  }
  return leaves;
}

// What is left to send to a peer.
struct Flow {
  int64_t first_slot;  // of this rank's buffer
  int64_t rows;
  int64_t pieces;  // of the present leaf
  int64_t sent;
  uint64_t filled;  // slots of the ring
};

struct Flows {
  Flow to[kMaxRanks];
  int32_t chosen;
};

// The next peer after `last` to whose ring a slot can be added, -1 where
// nothing is left to send. Called by the first warp of the team.
static __device__ int32_t ChoosePeer(const Rings& rings, const Flows& flows,
                                     int32_t last) {
  const int32_t lane = threadIdx.x % kWarpSize;
  const uint64_t start = ptx::GlobalTimer();
  // The leader has just counted a slot.
  __syncwarp();
  for (;;) {
    // The first peer of each kind; `later` are ready and come after `last`.
    int32_t left = -1;
    int32_t ready = -1;
    int32_t later = -1;
    const auto find = [](int32_t& found, int32_t first, bool is) {
      const uint32_t lanes = __ballot_sync(kAllLanes, is);
      if (found < 0 && lanes != 0) found = first + __ffs(lanes) - 1;
    };
    for (int32_t first = 0; first < rings.num_ranks(); first += kWarpSize) {
      const int32_t peer = first + lane;
      bool has = false;
      bool room = false;
      if (peer < rings.num_ranks()) {
        const Flow& flow = flows.to[peer];
        has = flow.sent < flow.pieces;
        room = has && ptx::LoadAcquireSys(rings.Head(rings.rank(), peer)) >=
                          rings.HeadFor(flow.filled);
      }
      find(left, first, has);
      find(ready, first, room);
      find(later, first, room && peer > last);
    }
    if (left < 0) return -1;
    if (ready >= 0) return later >= 0 ? later : ready;
    if (lane == 0 && RanOut(rings.control, ptx::GlobalTimer() - start,
                            "a free slot", left)) {
      const uint64_t* head = rings.Head(rings.rank(), left);
      RingTimedOut(rings, "a free slot", left,
                   rings.HeadFor(flows.to[left].filled),
                   ptx::LoadAcquireSys(head));
    }
    __syncwarp();
  }
}

static __device__ void SendStaged(const CombineParams& params,
                                  const Rings& rings, const Team& team,
                                  Flows& flows) {
  const bool has_flow = team.thread < rings.num_ranks();
  Flow& mine = flows.to[has_flow ? team.thread : 0];
  if (has_flow) {
    mine = {};
    if (rings.Leads(team.thread)) {
      const Range slots =
          SlotsOf(params, team.thread,
                  TokensOf(rings.control, rings.channel, params.num_tokens));
      mine.first_slot = slots.begin;
      mine.rows = slots.end - slots.begin;
      mine.filled = LoadCounter(rings.Head(rings.rank(), team.thread));
    }
  }
  int32_t last = rings.rank();
  for (int32_t i = 0; i < params.num_leaves; ++i) {
    const Leaf& leaf = params.leaves[i];
    if (leaf.exported) continue;
    const RowCut cut(leaf.row_bytes, rings.layout.slot_bytes);
    if (has_flow) {
      mine.pieces = mine.rows * cut.pieces;
      mine.sent = 0;
    }
    team.Sync();
    for (;;) {
      if (team.thread < kWarpSize) {
        const int32_t chosen = ChoosePeer(rings, flows, last);
        if (team.leader()) flows.chosen = chosen;
      }
      team.Sync();
      const int32_t peer = flows.chosen;
      if (peer < 0) break;
      last = peer;
      Flow& flow = flows.to[peer];
      const int64_t count = min(flow.pieces - flow.sent, cut.per_slot);
      const int64_t part = flow.sent % cut.pieces;
      CopyPieces(
          team,
          {leaf.in +
               (flow.first_slot + flow.sent / cut.pieces) * cut.row_bytes +
               cut.begin(part),
           cut.row_bytes, nullptr},
          rings.Slot(rings.rank(), peer, flow.filled), cut.piece_bytes, count,
          cut.bytes(part));
      team.Sync();
      if (team.leader()) {
        flow.sent += count;
        ++flow.filled;
        ptx::StoreReleaseSys(rings.Tail(rings.rank(), peer), flow.filled);
      }
    }
  }
}

// What the receivers know of the rows of this channel's tokens, by rank.
struct Arrivals {
  // The slot of the first of them on that rank.
  int32_t first_slot[kMaxRanks];
  // Rows of the leaf so far, those of the tokens at hand included.
  int32_t rows[kMaxRanks];
  // Slots of the ring that were drained before this leaf.
  uint64_t drained[kMaxRanks];
  // Of the tokens at hand: addresses of their rows' pieces, 0 where a route
  // leads nowhere; routes_per_token each.
  uint64_t pieces[kTeamThreads];
};

// Fills in first_slot for `tokens`; a barrier of the team has to follow.
static __device__ void FindFirstSlots(const CombineParams& params,
                                      const Rings& rings, const Team& team,
                                      Range tokens, Arrivals& arrivals) {
  if (team.thread < rings.num_ranks()) {
    arrivals.first_slot[team.thread] = INT32_MAX;
  }
  team.Sync();
  const int64_t width = params.routes_per_token;
  for (int64_t i = tokens.begin * width + team.thread; i < tokens.end * width;
       i += kTeamThreads) {
    const int2 route = __ldg(reinterpret_cast<const int2*>(params.routes) + i);
    if (route.x >= 0) atomicMin(&arrivals.first_slot[route.x], route.y);
  }
}

// Sums the pieces of `count` tokens into `out`, `stride` bytes apart.
template <typename T, typename Wide, typename Unit>
__device__ void SumPiecesBy(const Team& team, const uint64_t* pieces,
                            int32_t routes_per_token, std::byte* out,
                            int64_t stride, int64_t count, int64_t bytes) {
  using Row = Elements<T, Unit>;
  const uint32_t units = static_cast<uint32_t>(bytes / sizeof(Unit));
  const uint32_t total_units = static_cast<uint32_t>(count) * units;
  for (uint32_t unit = team.thread; unit < total_units; unit += kTeamThreads) {
    const uint32_t token = unit / units;
    const uint32_t at = unit % units;
    // As in SumUnits (cc/rows/rows.cuh): bit-equal to the direct part.
    Wide sums[Row::kSize];
#pragma unroll
    for (int e = 0; e < Row::kSize; ++e) sums[e] = -Wide(0);
    bool any = false;
    for (int32_t j = 0; j < routes_per_token; ++j) {
      const uint64_t piece = pieces[token * routes_per_token + j];
      if (piece == 0) continue;
      any = true;
      const Row row =
          Row::From(LoadUnit(reinterpret_cast<const Unit*>(piece) + at));
#pragma unroll
      for (int e = 0; e < Row::kSize; ++e) sums[e] += Widen(row.at[e]);
    }
    Row sum;
#pragma unroll
    for (int e = 0; e < Row::kSize; ++e) {
      sum.at[e] = Narrow<T>(any ? sums[e] : Wide(0));
    }
    StoreUnit(reinterpret_cast<Unit*>(out + token * stride) + at, sum.ToUnit());
  }
}

// One leaf's sums of this channel's tokens.
class Summer {
 public:
  // `drained` is, in the thread of each rank, how much of its ring is drained.
  __device__ Summer(const CombineParams& params, const Rings& rings,
                    const Team& team, std::byte* const* inputs, int32_t leaf,
                    Arrivals& arrivals, uint64_t& drained)
      : params_(params),
        rings_(rings),
        team_(team),
        inputs_(inputs + leaf * rings.num_ranks()),
        leaf_(params.leaves[leaf]),
        cut_(leaf_.row_bytes, rings.layout.slot_bytes),
        arrivals_(arrivals),
        drained_(drained),
        has_ring_(team.thread < rings.num_ranks() &&
                  inputs_[team.thread] == nullptr) {
    uint64_t bits = reinterpret_cast<uint64_t>(leaf_.out) | leaf_.row_bytes;
    for (int32_t r = 0; r < rings.num_ranks(); ++r) {
      bits |= reinterpret_cast<uint64_t>(inputs_[r]);
    }
    vectors_ = bits % 16 == 0;
  }

  template <typename T, typename Wide>
  __device__ void Sum(Range tokens) {
    const int64_t width = params_.routes_per_token;
    const int64_t most =
        cut_.pieces > 1 ? 1 : min(cut_.per_slot, kTeamThreads / width);
    // The threads of the last leaf have done with its pieces.
    team_.Sync();
    if (team_.thread < rings_.num_ranks()) {
      arrivals_.rows[team_.thread] = 0;
      arrivals_.drained[team_.thread] = drained_;
    }
    team_.Sync();
    for (int64_t token = tokens.begin; token < tokens.end; token += most) {
      const int64_t count = min(most, tokens.end - token);
      for (int64_t part = 0; part < cut_.pieces; ++part) {
        if (team_.thread < count * width) {
          arrivals_.pieces[team_.thread] =
              Locate(token * width + team_.thread, part);
        }
        team_.Sync();
        const int64_t pieces = has_ring_ ? WaitPieces(part) : 0;
        team_.Sync();
        std::byte* out = leaf_.out + token * cut_.row_bytes + cut_.begin(part);
        if (vectors_) {
          SumPiecesBy<T, Wide, uint4>(team_, arrivals_.pieces,
                                      params_.routes_per_token, out,
                                      cut_.row_bytes, count, cut_.bytes(part));
        } else {
          SumPiecesBy<T, Wide, T>(team_, arrivals_.pieces,
                                  params_.routes_per_token, out, cut_.row_bytes,
                                  count, cut_.bytes(part));
        }
        team_.Sync();
        if (has_ring_) Release(pieces / cut_.per_slot);
      }
      if (has_ring_) rows_ = arriving_;
    }
    // The last slot may not be full.
    if (has_ring_) Release(cut_.slots(rows_ * cut_.pieces));
  }

 private:
  // Where piece `part` of the row of route number `index` stands, or will.
  __device__ uint64_t Locate(int64_t index, int64_t part) const {
    const int2 route =
        __ldg(reinterpret_cast<const int2*>(params_.routes) + index);
    if (route.x < 0) return 0;
    const int64_t row = route.y - arrivals_.first_slot[route.x];
    atomicMax(&arrivals_.rows[route.x], static_cast<int32_t>(row) + 1);
    const std::byte* rows = inputs_[route.x];
    if (rows != nullptr) {
      return reinterpret_cast<uint64_t>(rows + route.y * cut_.row_bytes +
                                        cut_.begin(part));
    }
    const int64_t piece = row * cut_.pieces + part;
    return reinterpret_cast<uint64_t>(
        rings_.Slot(route.x, rings_.rank(),
                    arrivals_.drained[route.x] + piece / cut_.per_slot) +
        piece % cut_.per_slot * cut_.piece_bytes);
  }

  // In the thread of a rank: waits for the pieces at hand of its ring; returns
  // how many of the leaf they and those before them are.
  __device__ int64_t WaitPieces(int64_t part) {
    const int32_t peer = team_.thread;
    arriving_ = arrivals_.rows[peer];
    const int64_t pieces = arriving_ > rows_
                               ? (arriving_ - 1) * cut_.pieces + part + 1
                               : arriving_ * cut_.pieces;
    WaitCounter(rings_, rings_.Tail(peer, rings_.rank()),
                arrivals_.drained[peer] + cut_.slots(pieces), "rows", peer);
    return pieces;
  }

  // In the thread of a rank: so many slots of the leaf have been read.
  __device__ void Release(int64_t slots) {
    const uint64_t drained = arrivals_.drained[team_.thread] + slots;
    if (drained == drained_) return;
    drained_ = drained;
    ReleaseSlots(rings_, team_.thread, drained);
  }

  const CombineParams& params_;
  const Rings& rings_;
  const Team& team_;
  std::byte* const* inputs_;
  const Leaf& leaf_;
  const RowCut cut_;
  Arrivals& arrivals_;
  uint64_t& drained_;
  const bool has_ring_;
  bool vectors_;
  // Rows of this thread's ring: before the tokens at hand, and with them.
  int64_t rows_ = 0;
  int64_t arriving_ = 0;
};

// Calls `sum` with a value of the leaf's element and one of its sum's type.
template <typename Sum>
static __device__ __forceinline__ void WithElement(Element element,
                                                   const Sum& sum) {
  switch (element) {
    case Element::kBf16:
      return sum(Bf16{}, 0.f);
    case Element::kF16:
      return sum(F16{}, 0.f);
    case Element::kF32:
      return sum(0.f, 0.f);
    case Element::kF64:
      return sum(0., 0.);
    case Element::kNone:
      return;
  }
}

// Sums `leaves`, a bit for each, where some rank's buffer is out of reach of
// others. Out of line: the direct part keeps its registers.
static __device__ __noinline__ void MoveStaged(const CombineParams& params,
                                               const Control& control,
                                               std::byte* const* inputs,
                                               uint32_t leaves) {
  __shared__ Flows flows;
  __shared__ Arrivals arrivals;
  const int32_t channel = blockIdx.x;
  if (channel >= NumChannels(control)) return;
  BeginStaged(control, channel == 0);
  const Rings rings(control, channel);
  const Team team = Team::Mine();
  if (team.number == kSends) {
    SendStaged(params, rings, team, flows);
  } else if (team.number == kReceives) {
    const Range tokens = TokensOf(control, channel, params.num_tokens);
    FindFirstSlots(params, rings, team, tokens, arrivals);
    uint64_t drained =
        team.thread < rings.num_ranks() && rings.Leads(team.thread)
            ? LoadCounter(rings.Drained(team.thread, rings.rank()))
            : 0;
    for (int32_t i = 0; i < params.num_leaves; ++i) {
      if (!(leaves >> i & 1)) continue;
      Summer summer(params, rings, team, inputs, i, arrivals, drained);
      WithElement(params.leaves[i].element, [&](auto element, auto wide) {
        summer.Sum<decltype(element), decltype(wide)>(tokens);
      });
    }
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_RINGS_STAGED_COMBINE_CUH_
