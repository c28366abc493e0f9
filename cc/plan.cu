// plan: from the experts of this rank's tokens to slots in the peers' buffers.
//
// Launch: some blocks of kPlanThreads, no more than view.num_sms.
// Roles:  block 0 alone counts the rows of all tokens for each rank, tells the
//         peers its counts and the addresses of its outputs, and sets `planned`
//         for the other blocks. Then all blocks turn chunks of 32 tokens, a
//         chunk to a warp, into slots, keep them as routes and write the
//         receiver's metadata. The last block exchanges the expert counts,
//         closes with the peers and writes the sums.
//         One block counts because a block that waits for another of its own
//         launch may keep that one from running; reading the ids twice is
//         cheaper than a second launch.
// Reads:  params.topk_idx. Writes: all outputs of this rank; recv_topk_idx,
//         recv_src and workspace.received of the peers.
// Order:  counts travel as words that hold their epoch and need no other order;
//         addresses and metadata as in dispatch. `planned` (release, block 0)
//         -> Wait (acquire, other blocks) covers workspace.prefix and .sent.
#include <cuda_runtime.h>

#include "cc/device/rows.cuh"
#include "cc/device/sync.cuh"
#include "cc/ops.h"

namespace jax_ep {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kPlanWarps = kPlanThreads / kWarpSize;
// Experts whose counts a block keeps in shared memory; more go to the L2.
constexpr int kSharedExperts = 2048;
static_assert(kPlanChunk == kWarpSize);

// Addresses that peers need: outputs written from afar.
enum Address { kRecvTopkIdx, kRecvSrc, kReceived, kNumAddresses };
static_assert(kNumAddresses <= kMaxLeaves);

struct Scratch {
  std::byte* peers[kNumAddresses * kMaxRanks];
  std::byte* own[kNumAddresses];
  // Counting: rows of each warp for each rank; then the first of each warp.
  int32_t warp_rows[kPlanWarps][kMaxRanks];
  // Rows of this rank for each rank, and the first slot of them there.
  int32_t rows[kMaxRanks];
  int32_t first_slot[kMaxRanks];
  int32_t demand;
  int32_t sent[kSharedExperts];
};

struct Planner {
  const PlanParams& params;
  const Control& control;
  Scratch& scratch;
  PlanWorkspace workspace;
  int32_t num_ranks;
  int32_t local_experts;
  int64_t num_chunks;

  __device__ Planner(const PlanParams& p, const Control& c, Scratch& s)
      : params(p),
        control(c),
        scratch(s),
        workspace(p.num_tokens, p.op.view.num_ranks, p.num_experts),
        num_ranks(p.op.view.num_ranks),
        local_experts(LocalExperts(p.num_experts, p.op.view.num_ranks)),
        num_chunks((p.num_tokens + kPlanChunk - 1) / kPlanChunk) {}

  __device__ int32_t* Prefix(int64_t chunk) const {
    return params.workspace + workspace.prefix + chunk * num_ranks;
  }
  __device__ int32_t* Sent() const { return params.workspace + workspace.sent; }

  __device__ bool IsExpert(int32_t id) const {
    return id >= 0 && id < params.num_experts;
  }

  // Bit r is set where this lane's token of the chunk goes to rank r.
  __device__ uint64_t RanksOf(int64_t chunk) const {
    const int64_t token = chunk * kPlanChunk + threadIdx.x % kWarpSize;
    uint64_t ranks = 0;
    if (token >= params.num_tokens) return ranks;
    const int32_t* ids = params.topk_idx + token * params.top_k;
    if (params.top_k % 4 == 0) {
      for (int32_t k = 0; k < params.top_k; k += 4) {
        const int4 four = *reinterpret_cast<const int4*>(ids + k);
        ranks |= RankBit(four.x) | RankBit(four.y) | RankBit(four.z) |
                 RankBit(four.w);
      }
    } else {
      for (int32_t k = 0; k < params.top_k; ++k) ranks |= RankBit(ids[k]);
    }
    return ranks;
  }
  __device__ uint64_t RankBit(int32_t id) const {
    return IsExpert(id) ? uint64_t{1} << (id / local_experts) : 0;
  }

  __device__ void CountAndPublish() const;
  __device__ void LearnSlots() const;
  __device__ void WriteChunk(int64_t chunk) const;
  __device__ void WriteRow(int64_t token, int32_t rank, int32_t slot) const;
  __device__ void FillEmptySlots() const;
  __device__ void FlushSent() const;
  __device__ void SendExpertCounts() const;
  __device__ void WriteTotals() const;
};

// Block 0: everything that must happen before anybody waits.
__device__ void Planner::CountAndPublish() const {
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  for (int32_t e = threadIdx.x; e < num_ranks * local_experts;
       e += kPlanThreads) {
    Sent()[e] = 0;
  }
  // Neighbouring chunks to one warp: its prefixes are running counts.
  const int64_t share = (num_chunks + kPlanWarps - 1) / kPlanWarps;
  const int64_t begin = min(num_chunks, share * warp);
  const int64_t end = min(num_chunks, begin + share);
  int32_t count[kMaxRanks / kWarpSize] = {};  // of ranks lane, lane + 32
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const uint64_t ranks = RanksOf(chunk);
    int32_t* prefix = Prefix(chunk);
#pragma unroll
    for (int half = 0; half < kMaxRanks / kWarpSize; ++half) {
      const int32_t mine = half * kWarpSize + lane;
      if (mine < num_ranks) prefix[mine] = count[half];
      for (int32_t r = half * kWarpSize;
           r < min(num_ranks, (half + 1) * kWarpSize); ++r) {
        const int32_t rows = __popc(__ballot_sync(kAllLanes, ranks >> r & 1));
        if (mine == r) count[half] += rows;
      }
    }
  }
#pragma unroll
  for (int half = 0; half < kMaxRanks / kWarpSize; ++half) {
    scratch.warp_rows[warp][half * kWarpSize + lane] = count[half];
  }
  __syncthreads();
  if (threadIdx.x < num_ranks) {
    int32_t total = 0;
    for (int w = 0; w < kPlanWarps; ++w) {
      const int32_t rows = scratch.warp_rows[w][threadIdx.x];
      scratch.warp_rows[w][threadIdx.x] = total;
      total += rows;
    }
    scratch.rows[threadIdx.x] = total;
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < num_ranks * num_ranks; i += kPlanThreads) {
    const int32_t to = i % num_ranks;
    ptx::StoreRelaxedSys(control.Counts(i / num_ranks, control.rank(), to),
                         control.Word(scratch.rows[to]));
  }
  PublishReady(control, scratch.own, kNumAddresses);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    for (int32_t r = lane; r < num_ranks; r += kWarpSize) {
      Prefix(chunk)[r] += scratch.warp_rows[warp][r];
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::StoreReleaseSys(control.Planned(), control.Word(0));
  }
}

// All blocks: the first slot of this rank's rows on each peer.
__device__ void Planner::LearnSlots() const {
  for (int32_t r = threadIdx.x; r < num_ranks; r += kPlanThreads) {
    int32_t before = 0;
    for (int32_t source = 0; source < control.rank(); ++source) {
      before += Wait(control, control.Counts(control.rank(), source, r),
                     "the counts", source);
    }
    scratch.first_slot[r] = before;
    if (r != control.rank()) continue;
    int32_t demand = before;
    for (int32_t source = control.rank(); source < num_ranks; ++source) {
      demand += Wait(control, control.Counts(control.rank(), source, r),
                     "the counts", source);
    }
    scratch.demand = demand;
  }
  if (threadIdx.x == kPlanThreads - 1) {
    Wait(control, control.Planned(), "block 0", control.rank());
  }
  for (int32_t e = threadIdx.x; e < kSharedExperts; e += kPlanThreads) {
    scratch.sent[e] = 0;
  }
  WaitReady(control, scratch.peers, kNumAddresses);
}

// A warp turns the 32 tokens of a chunk into routes and metadata.
__device__ void Planner::WriteChunk(int64_t chunk) const {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = chunk * kPlanChunk + lane;
  const uint64_t ranks = RanksOf(chunk);
  const int32_t width = RoutesPerToken(params.top_k, num_ranks);
  int2* route = reinterpret_cast<int2*>(params.routes) + token * width;
  int32_t num_routes = 0;
  for (int32_t r = 0; r < num_ranks; ++r) {
    const uint32_t goes = __ballot_sync(kAllLanes, ranks >> r & 1);
    if (!(ranks >> r & 1)) continue;
    const int32_t before = __popc(goes & ((1u << lane) - 1));
    const int32_t slot =
        scratch.first_slot[r] + __ldcg(Prefix(chunk) + r) + before;
    const bool kept = slot < params.capacity;
    route[num_routes++] = kept ? int2{r, slot} : int2{-1, -1};
    if (kept) WriteRow(token, r, slot);
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
  const int32_t first = rank * local_experts;
  for (int32_t k = 0; k < params.top_k; ++k) {
    const int32_t id = ids[k];
    const bool here = IsExpert(id) && id >= first && id - first < local_experts;
    topk_idx[k] = here ? id - first : -1;
    if (here) {
      // Expert id of rank r stands at r * L + (id - r * L) = id.
      atomicAdd(id < kSharedExperts ? scratch.sent + id : Sent() + id, 1);
    }
  }
}

__device__ void Planner::FillEmptySlots() const {
  const int64_t thread = int64_t{blockIdx.x} * kPlanThreads + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * kPlanThreads;
  const int64_t filled = min(int64_t{scratch.demand}, params.capacity);
  for (int64_t i = filled + thread; i < params.capacity; i += threads) {
    params.recv_src[i] = -1;
  }
  for (int64_t i = filled * params.top_k + thread;
       i < params.capacity * params.top_k; i += threads) {
    params.recv_topk_idx[i] = -1;
  }
}

// Adds this block's counts to the launch's.
__device__ void Planner::FlushSent() const {
  __syncthreads();
  const int32_t shared = min(params.num_experts, kSharedExperts);
  for (int32_t e = threadIdx.x; e < shared; e += kPlanThreads) {
    if (scratch.sent[e] != 0) atomicAdd(Sent() + e, scratch.sent[e]);
  }
}

// Last block: what this rank sends to each expert, told to its owner.
__device__ void Planner::SendExpertCounts() const {
  for (int32_t i = threadIdx.x; i < num_ranks * local_experts;
       i += kPlanThreads) {
    const int32_t rank = i / local_experts;
    auto* received =
        reinterpret_cast<int32_t*>(scratch.peers[kReceived * num_ranks + rank]);
    received[control.rank() * local_experts + i % local_experts] =
        __ldcg(Sent() + i);
  }
  __syncthreads();
  // Cumulative: the releases that close the operation cover all threads.
  ptx::FenceSys();
}

// Last block, after the peers have closed.
__device__ void Planner::WriteTotals() const {
  const int32_t* received = params.workspace + workspace.received;
  for (int32_t e = threadIdx.x; e < local_experts; e += kPlanThreads) {
    int32_t count = 0;
    for (int32_t source = 0; source < num_ranks; ++source) {
      count += __ldcg(received + source * local_experts + e);
    }
    params.expert_counts[e] = count;
    params.group_sizes[e] = (count + params.expert_alignment - 1) /
                            params.expert_alignment * params.expert_alignment;
  }
  if (threadIdx.x == 0) {
    int64_t before = 0;
    for (int32_t source = 0; source < num_ranks; ++source) {
      const int32_t rows = static_cast<uint32_t>(ptx::LoadAcquireSys(
          control.Counts(control.rank(), source, control.rank())));
      const int64_t room = max(params.capacity - before, int64_t{0});
      params.recv_counts[source] =
          static_cast<int32_t>(min(int64_t{rows}, room));
      before += rows;
    }
    *params.num_demand = scratch.demand;
    *params.num_recv =
        static_cast<int32_t>(min(int64_t{scratch.demand}, params.capacity));
    *params.overflow = scratch.demand > params.capacity;
  }
}

__global__ void __launch_bounds__(kPlanThreads)
    PlanKernel(const __grid_constant__ PlanParams params) {
  __shared__ Scratch scratch;
  const Control control(params.op, "plan");
  const Planner planner(params, control, scratch);
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) {
      scratch.own[kRecvTopkIdx] =
          reinterpret_cast<std::byte*>(params.recv_topk_idx);
      scratch.own[kRecvSrc] = reinterpret_cast<std::byte*>(params.recv_src);
      scratch.own[kReceived] = reinterpret_cast<std::byte*>(
          params.workspace + planner.workspace.received);
    }
    planner.CountAndPublish();
  }
  planner.LearnSlots();
  const int64_t warps = int64_t{gridDim.x} * kPlanWarps;
  for (int64_t chunk =
           int64_t{threadIdx.x / kWarpSize} * gridDim.x + blockIdx.x;
       chunk < planner.num_chunks; chunk += warps) {
    planner.WriteChunk(chunk);
  }
  planner.FillEmptySlots();
  planner.FlushSent();
  if (IsLastBlock(control)) {
    planner.SendExpertCounts();
    CloseWithPeers(control);
    planner.WriteTotals();
    AdvanceEpoch(control);
  }
}

}  // namespace

cudaError_t LaunchPlan(const PlanParams& params, cudaStream_t stream) {
  // Eight chunks to a block: enough warps to hide latency, many blocks.
  const int64_t chunks = (params.num_tokens + kPlanChunk - 1) / kPlanChunk;
  const int64_t wanted = (chunks + 7) / 8;
  const int64_t blocks =
      wanted < 1
          ? 1
          : (wanted < params.op.view.num_sms ? wanted : params.op.view.num_sms);
  PlanKernel<<<static_cast<unsigned int>(blocks), kPlanThreads, 0, stream>>>(
      params);
  return cudaPeekAtLastError();
}

const void* PlanKernelAddress() {
  return reinterpret_cast<const void*>(&PlanKernel);
}

}  // namespace jax_ep
