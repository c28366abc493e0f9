// plan_dispatch: a plan and its dispatch in one launch, where tokens are few
// and ids fit control memory (PlanDispatchFits in cc/layout/few_tokens.h). The
// results are those of cc/plan/pushed_plan.cu, then cc/rows/dispatch.cu.
//
// A row's slot follows from how many rows each rank has for its target, which
// is one word, and from the ids of the tokens before it on its own rank. So
// rows wait for the addresses and those counts; the ids of peers, which the
// rest of the plan is made of, arrive while rows are on their way.
//
// Launch: as many blocks as dispatch has where tokens are few, of kRowThreads
//         and kPlanThreads. At most kPlanDispatchRanks ranks.
// Roles:  of the warps the first kRowWarps, the movers, load pieces of rows
//         into registers, and store them to all of their targets when slots are
//         known; they write their tokens' routes. The others, the planners:
//         each block's count all tokens of this rank, with the movers' help
//         where they are more than kPlanThreads, and wait for what the peers
//         say; those of block 0 push addresses, counts and ids before; those of
//         block b write what came from ranks b, b + blocks and so on, and count
//         its experts, which the last block adds up. Rows for buffers out of
//         reach follow through staging memory (cc/rings/staged_dispatch.cuh),
//         for which every block writes the whole plan again.
// Reads:  topk_idx, leaves[].in, the windows of this rank's control memory.
// Writes: all outputs of this rank, the workspace, leaves[].out and the windows
//         of the peers.
// Order:  words of the opening are stored and polled relaxed: each is its own
//         message. An address says that earlier kernels are done with the
//         buffer, and passes on nothing that they wrote. Rows: CloseBlock
//         (release) -> CloseFew (acquire).
//
// Control words and windows may be used by other plans before and after:
// whoever is at epoch e + 1 of a slot has words of epoch e from all peers, as
// after a pushed plan (cc/plan/pushed_plan.cu), and here every block of every
// peer has closed as well, after its last look at words of epoch e.
//
// Why it makes progress with one resident block: no block waits for words of
// others than the peers' blocks 0, which push all of them before they wait.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/few_tokens/few_dispatch.cuh"
#include "cc/few_tokens/few_tokens.cuh"
#include "cc/handshake/sync.cuh"
#include "cc/ops.h"
#include "cc/plan/plan.cuh"
#include "cc/plan/pushed_ids.cuh"
#include "cc/rings/staged_dispatch.cuh"
#include "cc/rows/items.cuh"
#include "cc/rows/rows.cuh"

namespace jax_ep {
namespace {

constexpr int kPlanWarps = 4;
constexpr int kPlanThreads = kPlanWarps * kWarpSize;
constexpr int kThreads = kRowThreads + kPlanThreads;
constexpr int kRanks = kPlanDispatchRanks;
static_assert(kRanks == kWarpSize);
// Warps' worth of tokens: each token has a piece.
constexpr int kTokenWarps = kFewPieces / kWarpSize;

// Named barriers: own tokens are counted, slots are known, among planners.
constexpr int kCounted = 1;
constexpr int kKnown = 2;
constexpr int kPlanning = 3;

struct LaunchParams {
  PlanParams plan;
  FewParams few;
  PushedPlan cut;
  ExpertMap experts;
  ControlLayout layout;
};

struct Scratch {
  // Where leaf i of rank r begins, at i * R + r; nullptr where out of reach.
  std::byte* outputs[kMaxLeaves * kRanks];
  // Bit i at c * R + r: token 32 * c + i goes to rank r.
  uint32_t going[kTokenWarps * kRanks];
  // At from * R + to: rows of a rank for a rank, of those for this rank or from
  // ranks up to it.
  int32_t sent[kRanks * kRanks];
  int32_t received[kRanks];  // rows from each rank for this one
  int32_t warp_rows[2][kPlanWarps];
  bool staged;  // some buffer is out of reach
  int32_t expert_counts[PushedPlan::kMaxLocalExperts];
};

// Rows of this rank for rank r.
__device__ int32_t Total(const Scratch& scratch, int32_t num_tokens,
                         int32_t num_ranks, int32_t r) {
  int32_t rows = 0;
  for (int32_t c = 0; c * kWarpSize < num_tokens; ++c) {
    rows += __popc(scratch.going[c * num_ranks + r]);
  }
  return rows;
}

// Rows that want to come to this rank.
__device__ int32_t Demand(const Scratch& scratch, int32_t num_ranks) {
  int32_t rows = 0;
#pragma unroll 1
  for (int32_t r = 0; r < num_ranks; ++r) rows += scratch.received[r];
  return rows;
}

// Whether movers count tokens as well.
__device__ bool AllCount(int32_t num_tokens) {
  return num_tokens > kPlanThreads;
}

// Notes where tokens [32 * c, 32 * c + 32) go, of which each lane has one that
// goes to `ranks`. Called by a whole warp.
__device__ __forceinline__ void NoteTokens(Scratch& scratch, int32_t num_ranks,
                                           int32_t c, uint32_t ranks) {
  const int32_t lane = threadIdx.x % kWarpSize;
  uint32_t going = 0;
#pragma unroll 1
  for (int32_t r = 0; r < num_ranks; ++r) {
    const uint32_t to_r = __ballot_sync(kAllLanes, ranks >> r & 1);
    if (lane == r) going = to_r;
  }
  if (lane < num_ranks) scratch.going[c * num_ranks + lane] = going;
}

template <int kWords>
struct Planner : PushedIds<kWords> {
  using Base = PushedIds<kWords>;
  using Base::AwaitIds, Base::Await, Base::Counts, Base::PushIds;
  using Base::control;
  using Base::num_ranks, Base::num_tokens, Base::rank;
  using Base::OwnIds, Base::ComesHere, Base::WriteRow;
  using Base::params, Base::experts, Base::lane;
  using typename Base::Ids;

  const FewParams& few;
  Scratch& scratch;
  int32_t thread;  // among planners
  int32_t warp;

  __device__ Planner(const LaunchParams& p, Scratch& s)
      : Base(p.plan, p.cut, p.experts, "plan_dispatch", p.layout,
             static_cast<int32_t>(threadIdx.x) - kRowThreads),
        few(p.few),
        scratch(s),
        thread(threadIdx.x - kRowThreads),
        warp(thread / kWarpSize) {}

  __device__ __forceinline__ void PushAddresses() const;
  __device__ __forceinline__ void PushCounts() const;
  __device__ __forceinline__ void PushAllIds() const;
  __device__ __forceinline__ uint64_t AwaitAddress(int32_t leaf,
                                                   int32_t peer) const;
  __device__ __forceinline__ void AwaitOutputs() const;
  __device__ __forceinline__ void AwaitCounts() const;
  __device__ __forceinline__ void WriteSource(int32_t source,
                                              int32_t& turn) const;
  __device__ __forceinline__ void Run() const;
};

// What planners of block 0 push. A lane is a peer; words go to warps in turn.

template <int kWords>
__device__ __forceinline__ void Planner<kWords>::PushAddresses() const {
  if (lane >= num_ranks || lane == rank) return;
  const int32_t words = 1 + 2 * few.rows.num_leaves;
#pragma unroll 1
  for (int32_t word = warp; word < words; word += kPlanWarps) {
    uint32_t payload = control.op.tag;
    if (word > 0) {
      const Leaf& leaf = few.rows.leaves[(word - 1) / 2];
      const auto address = reinterpret_cast<uint64_t>(
          Published(control, leaf.out, leaf.exported));
      payload = static_cast<uint32_t>(word % 2 == 1 ? address : address >> 32);
    }
    ptx::StoreRelaxedSys(control.Ready(lane, rank) + word,
                         control.Word(payload));
  }
}

template <int kWords>
__device__ __forceinline__ void Planner<kWords>::PushCounts() const {
  if (lane >= num_ranks || lane == rank) return;
#pragma unroll 1
  for (int32_t to = warp; to < num_ranks; to += kPlanWarps) {
    // Only what the peer will wait for.
    if (to != lane && rank > lane) continue;
    ptx::StoreRelaxedSys(
        Counts(lane, 0, rank, to),
        control.Word(Total(scratch, num_tokens, num_ranks, to)));
  }
}

template <int kWords>
__device__ __forceinline__ void Planner<kWords>::PushAllIds() const {
#pragma unroll 1
  for (int32_t token = thread; token < num_tokens; token += kPlanThreads) {
    // Asked for again: to keep them would take registers from others.
    const Ids ids = OwnIds(token);
#pragma unroll 1
    for (int32_t distance = 1; distance < num_ranks; ++distance) {
      const int32_t turned = rank + distance;
      PushIds(turned < num_ranks ? turned : turned - num_ranks, token, ids);
    }
  }
}

// What planners of every block wait for.

// The address of a peer's leaf: two words, polled together.
template <int kWords>
__device__ __forceinline__ uint64_t
Planner<kWords>::AwaitAddress(int32_t leaf, int32_t peer) const {
  const uint64_t* words = control.Ready(rank, peer) + 1 + 2 * leaf;
  uint64_t start = 0;
  for (;;) {
    const uint64_t low = ptx::LoadRelaxedSys(words);
    const uint64_t high = ptx::LoadRelaxedSys(words + 1);
    if (static_cast<uint32_t>(low >> 32) == control.epoch &&
        static_cast<uint32_t>(high >> 32) == control.epoch) {
      return high << 32 | static_cast<uint32_t>(low);
    }
    const uint64_t now = ptx::GlobalTimer();
    if (start == 0) start = now;
    if (now - start > kPatienceNs) {
      WaitsLong(Control(control), now - start, "the buffers", peer, low);
    }
  }
}

template <int kWords>
__device__ __forceinline__ void Planner<kWords>::AwaitOutputs() const {
  if (lane >= num_ranks) return;
  const PeerView& view = control.op.view;
#pragma unroll 1
  for (int32_t i = warp; i <= few.rows.num_leaves; i += kPlanWarps) {
    const int32_t leaf = i - 1;
    if (leaf < 0) {
      if (lane == rank) continue;
      const uint32_t tag =
          Await(control.Ready(rank, lane), "the buffers", lane);
      if (tag != control.op.tag) OtherOperation(Control(control), lane, tag);
      continue;
    }
    const Leaf& own = few.rows.leaves[leaf];
    uint64_t address = lane == rank ? reinterpret_cast<uint64_t>(Published(
                                          control, own.out, own.exported))
                                    : AwaitAddress(leaf, lane);
    if (view.regions != nullptr) {
      if (address & kNotExported) scratch.staged = true;
      address =
          reinterpret_cast<uint64_t>(Reach(Control(control), lane, address));
    }
    scratch.outputs[leaf * num_ranks + lane] =
        reinterpret_cast<std::byte*>(address);
  }
}

// Begins with the last warp: the first are at addresses.
template <int kWords>
__device__ __forceinline__ void Planner<kWords>::AwaitCounts() const {
  if (lane >= num_ranks) return;
  const int32_t to = lane;
#pragma unroll 1
  for (int32_t from = kPlanWarps - 1 - warp; from < num_ranks;
       from += kPlanWarps) {
    if (from > rank && to != rank) continue;
    const int32_t rows =
        from == rank ? Total(scratch, num_tokens, num_ranks, to)
                     : static_cast<int32_t>(Await(Counts(rank, 0, from, to),
                                                  "the counts", from));
    scratch.sent[from * num_ranks + to] = rows;
    if (to == rank) scratch.received[from] = rows;
  }
}

// Writes the part of the plan that follows from the tokens of a rank. `turn`
// says which of warp_rows nobody still reads.
template <int kWords>
__device__ __forceinline__ void Planner<kWords>::WriteSource(
    int32_t source, int32_t& turn) const {
  int32_t begin = 0;
#pragma unroll 1
  for (int32_t s = 0; s < source; ++s) begin += scratch.received[s];
#pragma unroll 1
  for (int32_t first = 0; first < num_tokens; first += kPlanThreads) {
    const int32_t token = first + thread;
    const Ids ids = source == rank || token >= num_tokens
                        ? OwnIds(token)
                        : AwaitIds(source, token);
    const bool comes = ComesHere(ids);
    const uint32_t coming = __ballot_sync(kAllLanes, comes);
    int32_t* const rows = scratch.warp_rows[turn];
    turn ^= 1;
    if (lane == 0) rows[warp] = __popc(coming);
    ptx::SyncThreads(kPlanning, kPlanThreads);
    int32_t slot = begin + __popc(coming & ((1u << lane) - 1));
#pragma unroll
    for (int32_t w = 0; w < kPlanWarps; ++w) {
      if (w < warp) slot += rows[w];
      begin += rows[w];
    }
    if (comes && slot < params.capacity) {
      WriteRow(source, token, slot, ids, scratch.expert_counts);
    }
  }
}

template <int kWords>
__device__ __forceinline__ void Planner<kWords>::Run() const {
  const int32_t local_experts = experts.local_experts;
  if (blockIdx.x == 0) PushAddresses();
  NoteTokens(scratch, num_ranks, warp, Base::LowRanksOf(Base::asked_for));
#pragma unroll 1
  for (int32_t e = thread; e < local_experts; e += kPlanThreads) {
    scratch.expert_counts[e] = 0;
  }
  if (thread == 0) scratch.staged = false;
  if (AllCount(num_tokens)) {
    ptx::SyncThreads(kCounted, kThreads);
  } else {
    // The movers have nothing to say, and are not waited for.
    ptx::ArriveThreads(kCounted, kThreads);
    ptx::SyncThreads(kPlanning, kPlanThreads);
  }
  if (blockIdx.x == 0) {
    PushCounts();
    PushAllIds();
  }
  AwaitOutputs();
  AwaitCounts();
  ptx::SyncThreads(kKnown, kThreads);

  const bool staged = scratch.staged;
  const int32_t blocks = gridDim.x;
  const int32_t demand = Demand(scratch, num_ranks);
  int32_t turn = 0;
  int32_t source = blockIdx.x;
  int32_t step = blocks;
  for (;;) {
#pragma unroll 1
    for (; source < num_ranks; source += step) WriteSource(source, turn);
    if (step != blocks) return;
    ptx::SyncThreads(kPlanning, kPlanThreads);
    if (blockIdx.x < num_ranks) {
      int32_t* const mine = params.workspace + blockIdx.x * local_experts;
#pragma unroll 1
      for (int32_t e = thread; e < local_experts; e += kPlanThreads) {
        mine[e] = scratch.expert_counts[e];
      }
    }
    FillEmptySlots(params, demand, int64_t{blockIdx.x} * kPlanThreads + thread,
                   int64_t{blocks} * kPlanThreads);
    if (thread == 0 && (blockIdx.x == 0 || staged)) {
      WriteTotals(params, scratch.received, demand);
    }
    if (!staged || blocks == 1) return;
    // A channel may not wait for another block, so it looks at what its own
    // block has written: everything once more. What that counts of experts
    // nobody asks for.
    source = 0;
    step = 1;
  }
}

template <int kWords>
struct Mover : IdReader<kWords> {
  using Base = IdReader<kWords>;
  using Base::num_ranks, Base::num_tokens, Base::rank;
  using Base::params, Base::lane, Base::warp;

  const FewParams& few;
  const ControlLayout& layout;
  Scratch& scratch;

  __device__ Mover(const LaunchParams& p, Scratch& s)
      : Base(p.plan, p.cut, p.experts),
        few(p.few),
        layout(p.layout),
        scratch(s) {}

  __device__ __forceinline__ int32_t FirstSlot() const;
  __device__ __forceinline__ int2 RowOf(int32_t token) const;
  __device__ __forceinline__ int32_t TokenAt(const PieceAt& at) const {
    return at.Exists(few) ? few.cuts[at.leaf].TokenOf(at.item) : 0;
  }
  __device__ __forceinline__ void WriteRoutes(int32_t token, int2 route) const;
  __device__ __forceinline__ uint32_t Run() const;
};

// The slot that the first row of this rank for rank `lane` has there.
template <int kWords>
__device__ __forceinline__ int32_t Mover<kWords>::FirstSlot() const {
  if (lane >= num_ranks) return 0;
  int32_t slot = 0;
#pragma unroll 1
  for (int32_t from = 0; from < rank; ++from) {
    slot += scratch.sent[from * num_ranks + lane];
  }
  return slot;
}

// Rank `lane` and how many rows of this rank come before the token's there;
// rank -1 where the token does not go there.
template <int kWords>
__device__ __forceinline__ int2 Mover<kWords>::RowOf(int32_t token) const {
  if (lane >= num_ranks) return {-1, -1};
  const int32_t c = token / kWarpSize;
  const int32_t bit = token % kWarpSize;
  const uint32_t going = scratch.going[c * num_ranks + lane];
  if (!(going >> bit & 1)) return {-1, -1};
  int32_t rows = __popc(going & ((1u << bit) - 1));
#pragma unroll 1
  for (int32_t before = 0; before < c; ++before) {
    rows += __popc(scratch.going[before * num_ranks + lane]);
  }
  return {lane, rows};
}

// Called by a whole warp. Lane r holds the route to rank r, of rank -1 where
// there is none; its slot may be past the capacity.
template <int kWords>
__device__ __forceinline__ void Mover<kWords>::WriteRoutes(int32_t token,
                                                           int2 route) const {
  const int32_t width = few.rows.routes_per_token;
  int2* const routes = reinterpret_cast<int2*>(params.routes) + token * width;
  const uint32_t going = __ballot_sync(kAllLanes, route.x >= 0);
  if (route.x >= 0) {
    routes[__popc(going & ((1u << lane) - 1))] =
        route.y < params.capacity ? route : int2{-1, -1};
  }
  if (lane >= __popc(going) && lane < width) routes[lane] = {-1, -1};
}

// Returns the epoch, asked for behind the rows.
template <int kWords>
__device__ __forceinline__ uint32_t Mover<kWords>::Run() const {
  const Workers workers = WarpsOf(blockIdx.x, gridDim.x, 0, kRowWarps);
  PieceAt at = PieceAt::First(few, workers);
  Piece piece;
  LoadPiece(few, at, piece);
  const uint32_t epoch = Control::ReadEpoch(params.op, layout);
  if (AllCount(num_tokens)) {
#pragma unroll 1
    for (int32_t c = kPlanWarps + warp; c * kWarpSize < num_tokens;
         c += kRowWarps) {
      const auto ids = Base::OwnIds(c * kWarpSize + lane);
      NoteTokens(scratch, num_ranks, c, Base::LowRanksOf(ids));
    }
  }
  ptx::SyncThreads(kCounted, kThreads);
  int32_t token = TokenAt(at);
  int2 row = RowOf(token);
  ptx::SyncThreads(kKnown, kThreads);
  const int32_t first_slot = FirstSlot();
  while (at.Exists(few)) {
    const int2 route = {row.x, first_slot + row.y};
    const bool kept = route.y < params.capacity;
    StorePiece(few, scratch.outputs, at, kept ? route : int2{-1, -1}, piece);
    if (at.leaf == 0 && at.item == token * few.cuts[0].parts) {
      WriteRoutes(token, route);
    }
    at = at.Next(few, workers);
    LoadPiece(few, at, piece);
    token = TokenAt(at);
    row = RowOf(token);
  }
  if (scratch.staged) {
#pragma unroll 1
    for (token = warp; token < num_tokens; token += kRowWarps) {
      row = RowOf(token);
      WriteRoutes(token, {row.x, first_slot + row.y});
    }
  }
  return epoch;
}

// Last block: adds up what the blocks that wrote parts of the plan counted.
// Begins with the last threads: the first are at the peers' words.
__device__ __forceinline__ void WriteExpertCounts(const PlanParams& params,
                                                  int32_t local_experts) {
  const int32_t counted =
      min(params.op.view.num_ranks, static_cast<int32_t>(gridDim.x));
#pragma unroll 1
  for (int32_t e = kThreads - 1 - threadIdx.x; e < local_experts;
       e += kThreads) {
    int32_t count = 0;
    for (int32_t block = 0; block < counted; ++block) {
      count += __ldcg(params.workspace + block * local_experts + e);
    }
    WriteExpertCount(params, e, count);
  }
}

template <int kWords>
__global__ void __launch_bounds__(kThreads, 1)
    PlanDispatchKernel(const __grid_constant__ LaunchParams params) {
  __shared__ Scratch scratch;
  uint32_t epoch;
  if (threadIdx.x < kRowThreads) {
    epoch = Mover<kWords>(params, scratch).Run();
  } else {
    const Planner<kWords> planner(params, scratch);
    planner.Run();
    epoch = planner.control.epoch;
  }
  const DispatchParams& rows = params.few.rows;
  ZeroEmptySlots(
      rows,
      min(int64_t{Demand(scratch, rows.op.view.num_ranks)}, rows.capacity),
      int64_t{blockIdx.x} * kThreads + threadIdx.x,
      int64_t{gridDim.x} * kThreads);
  const Control control(params.plan.op, "plan_dispatch", params.layout, epoch);
  const bool staged = scratch.staged;
  if (staged) {
    __syncthreads();
    MoveStaged(rows, Control(control), scratch.outputs);
  }
  CloseBlock(control);
  if (IsLastBlock(control)) {
    WriteExpertCounts(params.plan, params.experts.local_experts);
    CloseFew(control);
    if (staged) EndStaged(Control(control));
    AdvanceEpoch(control);
  }
}

}  // namespace

cudaError_t LaunchPlanDispatch(const PlanDispatchParams& params,
                               cudaStream_t stream) {
  const PlanParams& plan = params.plan;
  LaunchParams launch = {
      .plan = plan,
      .few = {},
      .cut = PushedPlan(plan.op.view.num_ranks, plan.num_tokens, plan.top_k,
                        plan.num_experts),
      .experts = ExpertMap(plan),
      .layout = ControlLayout(plan.op.view.num_ranks),
  };
  if (plan.op.view.num_ranks > kPlanDispatchRanks || plan.num_tokens < 1 ||
      params.rows.num_leaves < 1 || plan.op.slot >= ControlLayout::kPlanSlots ||
      !launch.cut.fits || !CutFew(params.rows, kPieceUnits, launch.few)) {
    return cudaErrorInvalidValue;
  }
  const int32_t blocks = FewBlocks(plan.op.view);
  if (launch.cut.num_words <= kFewWords) {
    PlanDispatchKernel<kFewWords><<<blocks, kThreads, 0, stream>>>(launch);
  } else {
    PlanDispatchKernel<kMaxTopK / 2><<<blocks, kThreads, 0, stream>>>(launch);
  }
  return cudaPeekAtLastError();
}

std::vector<const void*> PlanDispatchKernelAddresses() {
  return {reinterpret_cast<const void*>(&PlanDispatchKernel<kFewWords>),
          reinterpret_cast<const void*>(&PlanDispatchKernel<kMaxTopK / 2>)};
}

}  // namespace jax_ep
