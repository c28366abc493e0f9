// plan: from the experts of this rank's tokens to slots in the peers' buffers.
// For any number of tokens; small batches go the way of cc/plan/pushed_plan.cu.
//
// Launch: some blocks of kPlanThreads, no more than view.num_sms.
// Roles:  block 0 counts the rows of all tokens for each rank and tells the
//         peers its counts and the addresses of its outputs. Every other block
//         counts the tokens before its own. Then each turns its tokens into
//         slots, keeps them as routes and writes the receiver's metadata. The
//         last block passes on through staging memory what is for outputs out
//         of reach (cc/rings/staged_plan.cuh), closes with the peers and adds
//         up the expert counts. Each block reads the ids before its own again
//         because a block that waits for another of its launch may keep that
//         one from running; the ids stand in the L2, and no block takes longer
//         than block 0.
// Reads:  params.topk_idx. Writes: all outputs of this rank; recv_topk_idx,
//         recv_src and workspace of the peers (workspace by atomic adds).
// Order:  counts travel as words that hold their epoch and need no other order;
//         addresses and metadata as in dispatch. The workspace is zeroed before
//         its address is published.
#include <cuda_runtime.h>

#include "cc/handshake/sync.cuh"
#include "cc/ops.h"
#include "cc/plan/plan.cuh"
#include "cc/rings/staged_plan.cuh"
#include "cc/rows/rows.cuh"

namespace jax_ep {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kPlanWarps = kPlanThreads / kWarpSize;
// Tokens that a warp takes at a time, and how many such chunks a block gets
// where there are enough blocks.
constexpr int kChunk = kWarpSize;
constexpr int kChunksPerBlock = 8;
// Experts whose counts a block keeps in shared memory; those of more go to the
// receiver one by one.
constexpr int kSharedExperts = 2048;
// Counters of a warp: lane l counts for the ranks l, l + 32, ...
constexpr int kCounters = RankSet::kWords;
static_assert(RankSet::kWordBits == kWarpSize);

struct Scratch {
  std::byte* peers[kNumAddresses * kMaxRanks];
  std::byte* own[kNumAddresses];
  int32_t warp_rows[kPlanWarps][kMaxRanks];
  // The next slot of each rank's buffer that this block fills. Until the peers'
  // counts are known, from the first of this rank's rows there.
  int32_t next_slot[kMaxRanks];
  // What each source has for this rank, and all of it, before drops.
  int32_t received_rows[kMaxRanks];
  int32_t demand;
  int32_t sent[kSharedExperts];
};

struct Planner {
  const PlanParams& params;
  const Control& control;
  Scratch& scratch;
  ExpertMap experts;
  int32_t num_ranks;
  int32_t warp;
  int32_t lane;

  __device__ Planner(const PlanParams& p, const Control& c, Scratch& s)
      : params(p),
        control(c),
        scratch(s),
        experts(p),
        num_ranks(p.op.view.num_ranks),
        warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize) {}

  __device__ RankSet RanksOf(int64_t token) const;
  __device__ void AddRows(const RankSet& ranks,
                          int32_t (&count)[kCounters]) const;
  __device__ void CountTokens(int64_t end) const;
  __device__ void Publish() const;
  __device__ bool LearnSlots() const;
  __device__ void WriteTokens(Range chunks) const;
  __device__ void WriteRoutes(int64_t token, const RankSet& ranks) const;
  __device__ void WriteRow(int64_t token, int32_t rank, int32_t slot) const;
  __device__ void SendExpertCounts() const;
  __device__ void WriteExpertCounts() const;
};

// The ranks that this token goes to.
__device__ RankSet Planner::RanksOf(int64_t token) const {
  RankSet ranks = {};
  if (token >= params.num_tokens) return ranks;
  const auto add = [&](int32_t id) {
    if (experts.IsExpert(id)) ranks.Add(experts.RankOf(id));
  };
  const int32_t* ids = params.topk_idx + token * params.top_k;
  if (params.top_k % 4 == 0) {
    for (int32_t k = 0; k < params.top_k; k += 4) {
      const int4 four = __ldg(reinterpret_cast<const int4*>(ids + k));
      add(four.x);
      add(four.y);
      add(four.z);
      add(four.w);
    }
  } else {
    for (int32_t k = 0; k < params.top_k; ++k) add(__ldg(ids + k));
  }
  return ranks;
}

// Adds the rows of this warp's tokens to the lanes' counters.
__device__ void Planner::AddRows(const RankSet& ranks,
                                 int32_t (&count)[kCounters]) const {
#pragma unroll
  for (int c = 0; c < kCounters; ++c) {
    const int32_t bits = min(num_ranks - c * kWarpSize, kWarpSize);
    for (int32_t bit = 0; bit < bits; ++bit) {
      const int32_t rows = __popc(__ballot_sync(kAllLanes, ranks.Has(c, bit)));
      if (lane == bit) count[c] += rows;
    }
  }
}

// Counts the rows of tokens [0, end) for each rank into scratch.next_slot.
__device__ void Planner::CountTokens(int64_t end) const {
  int32_t count[kCounters] = {};
#pragma unroll 4
  for (int64_t first = int64_t{warp} * kChunk; first < end;
       first += kPlanWarps * kChunk) {
    AddRows(first + lane < end ? RanksOf(first + lane) : RankSet{}, count);
  }
#pragma unroll
  for (int c = 0; c < kCounters; ++c) {
    scratch.warp_rows[warp][c * kWarpSize + lane] = count[c];
  }
  __syncthreads();
  for (int32_t r = warp; r < num_ranks; r += kPlanWarps) {
    const int32_t rows =
        __reduce_add_sync(kAllLanes, scratch.warp_rows[lane][r]);
    if (lane == 0) scratch.next_slot[r] = rows;
  }
  __syncthreads();
}

// Block 0: what the peers wait for. CountTokens() has counted all tokens.
__device__ void Planner::Publish() const {
  for (int32_t i = threadIdx.x; i < num_ranks * num_ranks; i += kPlanThreads) {
    const int32_t to = i % num_ranks;
    ptx::StoreRelaxedSys(control.Counts(i / num_ranks, control.rank(), to),
                         control.Word(scratch.next_slot[to]));
  }
  __syncthreads();
  // The block's own tokens are the first.
  if (threadIdx.x < num_ranks) scratch.next_slot[threadIdx.x] = 0;
  __syncthreads();
}

// The rows of earlier ranks stand before this rank's. Returns whether some
// rank's outputs are out of reach of others.
__device__ bool Planner::LearnSlots() const {
  const int32_t me = control.rank();
  for (int32_t i = threadIdx.x; i < num_ranks * num_ranks; i += kPlanThreads) {
    const int32_t source = i / num_ranks;
    const int32_t to = i % num_ranks;
    if (source >= me && to != me) continue;
    const int32_t rows =
        Wait(control, control.Counts(me, source, to), "the counts", source);
    if (source < me) atomicAdd(&scratch.next_slot[to], rows);
    if (to == me) scratch.received_rows[source] = rows;
  }
  const bool staged = WaitReady(control, scratch.peers, kNumAddresses);
  if (staged) ReachAllOrNone(control, scratch.peers);
  if (threadIdx.x == 0) {
    int32_t demand = 0;
    for (int32_t r = 0; r < num_ranks; ++r) demand += scratch.received_rows[r];
    scratch.demand = demand;
  }
  __syncthreads();
  return staged;
}

// Turns the tokens of `chunks` into routes and metadata, a chunk to a warp.
__device__ void Planner::WriteTokens(Range chunks) const {
  for (int64_t first = chunks.begin; first < chunks.end; first += kPlanWarps) {
    const int64_t token = (first + warp) * kChunk + lane;
    const bool mine = first + warp < chunks.end;
    const RankSet ranks = mine ? RanksOf(token) : RankSet{};
    int32_t count[kCounters] = {};
    AddRows(ranks, count);
#pragma unroll
    for (int c = 0; c < kCounters; ++c) {
      scratch.warp_rows[warp][c * kWarpSize + lane] = count[c];
    }
    __syncthreads();
    // Exclusive sums over warps, from the next slot on.
    for (int32_t r = warp; r < num_ranks; r += kPlanWarps) {
      const int32_t rows = scratch.warp_rows[lane][r];
      int32_t sum = rows;
      for (int offset = 1; offset < kWarpSize; offset *= 2) {
        const int32_t left = __shfl_up_sync(kAllLanes, sum, offset);
        if (lane >= offset) sum += left;
      }
      const int32_t base = scratch.next_slot[r];
      scratch.warp_rows[lane][r] = base + sum - rows;
      __syncwarp();
      if (lane == kWarpSize - 1) scratch.next_slot[r] = base + sum;
    }
    __syncthreads();
    if (mine) WriteRoutes(token, ranks);
    __syncthreads();
  }
}

// A warp's tokens: scratch.warp_rows[warp] holds their first slots.
__device__ void Planner::WriteRoutes(int64_t token,
                                     const RankSet& ranks) const {
  const int32_t width = RoutesPerToken(params.top_k, num_ranks);
  int2* route = reinterpret_cast<int2*>(params.routes) + token * width;
  int32_t num_routes = 0;
#pragma unroll
  for (int c = 0; c < kCounters; ++c) {
    const int32_t bits = min(num_ranks - c * kWarpSize, kWarpSize);
    for (int32_t bit = 0; bit < bits; ++bit) {
      const uint32_t goes = __ballot_sync(kAllLanes, ranks.Has(c, bit));
      if (!ranks.Has(c, bit)) continue;
      const int32_t r = c * kWarpSize + bit;
      const int32_t slot =
          scratch.warp_rows[warp][r] + __popc(goes & ((1u << lane) - 1));
      const bool kept = slot < params.capacity;
      route[num_routes++] = kept ? int2{r, slot} : int2{-1, -1};
      if (kept && scratch.peers[kRecvSrc * num_ranks + r] != nullptr) {
        WriteRow(token, r, slot);
      }
    }
  }
  if (token < params.num_tokens) {
    for (; num_routes < width; ++num_routes) route[num_routes] = {-1, -1};
  }
}

// What receiver `rank` learns of the row in `slot`.
__device__ void Planner::WriteRow(int64_t token, int32_t rank,
                                  int32_t slot) const {
  auto* src =
      reinterpret_cast<int32_t*>(scratch.peers[kRecvSrc * num_ranks + rank]);
  src[slot] = static_cast<int32_t>(control.rank() * params.num_tokens + token);
  auto* topk_idx = reinterpret_cast<int32_t*>(
                       scratch.peers[kRecvTopkIdx * num_ranks + rank]) +
                   int64_t{slot} * params.top_k;
  const int32_t* ids = params.topk_idx + token * params.top_k;
  const int32_t local_experts = experts.local_experts;
  const int32_t first = rank * local_experts;
  const auto local = [&](int32_t id) {
    const bool here = experts.IsExpert(id) && id >= first;
    if (!here || id - first >= local_experts) return -1;
    if (id < kSharedExperts) {
      atomicAdd(scratch.sent + id, 1);
    } else {
      auto* received = reinterpret_cast<int32_t*>(
          scratch.peers[kReceived * num_ranks + rank]);
      ptx::AddRelaxedSys(received + control.rank() * local_experts + id - first,
                         1);
    }
    return id - first;
  };
  if (params.top_k % 4 == 0) {
    for (int32_t k = 0; k < params.top_k; k += 4) {
      const int4 four = __ldg(reinterpret_cast<const int4*>(ids + k));
      *reinterpret_cast<int4*>(topk_idx + k) = {local(four.x), local(four.y),
                                                local(four.z), local(four.w)};
    }
  } else {
    for (int32_t k = 0; k < params.top_k; ++k) {
      topk_idx[k] = local(__ldg(ids + k));
    }
  }
}

// Adds what this block sends to each expert to the owner's counts.
__device__ void Planner::SendExpertCounts() const {
  __syncthreads();
  const int32_t local_experts = experts.local_experts;
  const int32_t shared = min(params.num_experts, kSharedExperts);
  for (int32_t e = threadIdx.x; e < shared; e += kPlanThreads) {
    if (scratch.sent[e] == 0) continue;
    const int32_t rank = experts.RankOf(e);
    auto* received =
        reinterpret_cast<int32_t*>(scratch.peers[kReceived * num_ranks + rank]);
    ptx::AddRelaxedSys(
        received + control.rank() * local_experts + e - rank * local_experts,
        scratch.sent[e]);
  }
}

// Last block, after the peers have closed.
__device__ void Planner::WriteExpertCounts() const {
  const int32_t local_experts = experts.local_experts;
  for (int32_t e = threadIdx.x; e < local_experts; e += kPlanThreads) {
    int32_t count = 0;
    for (int32_t source = 0; source < num_ranks; ++source) {
      count += __ldcg(params.workspace + source * local_experts + e);
    }
    WriteExpertCount(params, e, count);
  }
}

__global__ void __launch_bounds__(kPlanThreads)
    PlanKernel(const __grid_constant__ PlanParams params) {
  __shared__ Scratch scratch;
  const Control control(params.op, "plan");
  const Planner planner(params, control, scratch);
  const int64_t num_chunks = (params.num_tokens + kChunk - 1) / kChunk;
  const Range chunks = {num_chunks * blockIdx.x / gridDim.x,
                        num_chunks * (blockIdx.x + 1) / gridDim.x};
  for (int32_t e = threadIdx.x; e < kSharedExperts; e += kPlanThreads) {
    scratch.sent[e] = 0;
  }
  if (blockIdx.x == 0) {
    const int32_t sums = planner.num_ranks * planner.experts.local_experts;
    for (int32_t i = threadIdx.x; i < sums; i += kPlanThreads) {
      params.workspace[i] = 0;
    }
    if (threadIdx.x == 0) {
      int32_t* const own[] = {params.recv_topk_idx, params.recv_src,
                              params.workspace};
      for (int32_t i = 0; i < kNumAddresses; ++i) {
        scratch.own[i] = Published(control, own[i], params.exported[i]);
      }
    }
    __syncthreads();
    // Before the counting: the peers' answers travel meanwhile.
    PublishReady(control, scratch.own, kNumAddresses);
    planner.CountTokens(params.num_tokens);
    planner.Publish();
  } else {
    planner.CountTokens(chunks.begin * kChunk);
  }
  const bool staged = planner.LearnSlots();
  planner.WriteTokens(chunks);
  FillEmptySlots(params, scratch.demand);
  planner.SendExpertCounts();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    WriteTotals(params, scratch.received_rows, scratch.demand);
  }
  if (IsLastBlock(control)) {
    if (staged) {
      MoveStaged(params, Control(control), scratch.peers,
                 scratch.received_rows);
      // Its teams end apart, and `done` says that all rings are drained.
      __syncthreads();
    }
    CloseWithPeers(control);
    if (staged) EndStaged(Control(control));
    planner.WriteExpertCounts();
    AdvanceEpoch(control);
  }
}

}  // namespace

cudaError_t LaunchPlan(const PlanParams& params, cudaStream_t stream) {
  const PushedPlan pushed(params.op.view.num_ranks, params.num_tokens,
                          params.top_k, params.num_experts);
  if (pushed.fits && params.op.slot < ControlLayout::kPlanSlots) {
    return LaunchPushedPlan(params, stream);
  }
  const int64_t chunks = (params.num_tokens + kChunk - 1) / kChunk;
  const int64_t wanted = (chunks + kChunksPerBlock - 1) / kChunksPerBlock;
  const int64_t most = params.op.view.num_sms;
  const int64_t blocks = wanted < 1 ? 1 : (wanted < most ? wanted : most);
  PlanKernel<<<static_cast<unsigned int>(blocks), kPlanThreads, 0, stream>>>(
      params);
  return cudaPeekAtLastError();
}

const void* PlanKernelAddress() {
  return reinterpret_cast<const void*>(&PlanKernel);
}

}  // namespace jax_ep
