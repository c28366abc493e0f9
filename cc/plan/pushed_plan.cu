// plan by pushed ids: for batches whose ids fit control memory (PushedPlan in
// cc/layout/pushed_plan.h). The results are those of cc/plan/plan.cu.
//
// Every rank sends all of its ids to every peer and works its own plan out from
// everybody's, so that nobody writes into a peer's buffers: no addresses
// travel, and nothing has to be closed. A plan takes one way over the link.
//
// Launch: blocks of kThreads, at most one for each part of the tokens unless
//         there are many empty slots, and no more than view.num_sms.
// Roles:  blocks take parts of this rank's tokens by ticket and push their ids,
//         then how many rows they have for each rank. When no part is left,
//         block b waits for the b-th part of every rank (then the (b +
//         blocks)-th), and turns it into rows received and routes. The last
//         block adds up the expert counts.
// Reads:  params.topk_idx and the windows of this rank's control memory.
// Writes:
//         all outputs of this rank, params.workspace, windows of the peers.
// Order:  none between words. Each holds its epoch, is stored and polled
//         relaxed, and is its own message.
//
// Why two windows are enough: rank p writes into the window of epoch e + 2 only
// in the launch after the one of e + 1, which ended when p had seen a word of
// epoch e + 1 from every peer q. q sent it after its launch of epoch e had
// ended, and so after q had read all that it needs from that window. The same
// holds where epoch e + 1 was another operation of the slot, which closes.
// A launch awaits every word that a peer sends it, so none comes after its end.
//
// Why it makes progress with one resident block: no block waits before all
// parts have been taken, each by a block that pushes it before it waits.
#include <cuda_runtime.h>

#include <vector>

#include "cc/handshake/sync.cuh"
#include "cc/ops.h"
#include "cc/plan/plan.cuh"
#include "cc/plan/pushed_ids.cuh"
#include "cc/rows/rows.cuh"

namespace jax_ep {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
static_assert(PushedPlan::kMaxPartTokens <= kThreads);
// Empty slots' elements that are worth a block of their own.
constexpr int64_t kElementsPerBlock = 32768;

// What follows from the shapes is worked out on the host: divisions would take
// long in a kernel of a few microseconds.
struct PushedPlanParams {
  PlanParams plan;
  PushedPlan cut;
  ExpertMap experts;
  ControlLayout layout;
};

struct Scratch {
  uint32_t ticket;
  // Rows of a part's c-th warp for rank r, at c * R + r; then the rows before
  // them in the part.
  int32_t part_rows[PushedPlan::kMaxPartRows];
  int32_t part_totals[kMaxRanksOfWord];
  // Rows that each source has for this rank, and how many of them stand before
  // this block's part.
  int32_t received[kMaxRanksOfWord];
  int32_t received_before[kMaxRanksOfWord];
  // The next slot here for each source's rows, and on each rank for ours.
  int32_t recv_slot[kMaxRanksOfWord];
  int32_t send_slot[kMaxRanksOfWord];
  int32_t warp_rows[kWarps];
  int32_t demand;
  int32_t expert_counts[PushedPlan::kMaxLocalExperts];
};

template <int kWords>
struct Planner : PushedIds<kWords> {
  using Base = PushedIds<kWords>;
  using Base::AwaitIds, Base::Await, Base::ComesHere, Base::Counts;
  using Base::control, Base::params, Base::plan, Base::experts;
  using Base::FirstIds, Base::lane, Base::warp;
  using Base::num_ranks, Base::num_tokens, Base::rank;
  using Base::OwnIds, Base::PushIds, Base::RanksOf, Base::Tag;
  using typename Base::Ids;

  Scratch& scratch;
  int32_t part_warps;

  // The ids of the first item of part blockIdx.x are asked for at once.
  __device__ Planner(const PushedPlanParams& p, Scratch& s)
      : Base(
            p.plan, p.cut, p.experts, "plan", p.layout,
            TokenOf(p.cut, p.plan.num_tokens, blockIdx.x,
                    threadIdx.x / kWarpSize % (p.cut.part_tokens / kWarpSize))),
        scratch(s),
        part_warps(p.cut.part_tokens / kWarpSize) {}

  // This thread's token of a part's c-th warp; num_tokens where there is none.
  static __device__ int32_t TokenOf(const PushedPlan& cut, int64_t num_tokens,
                                    int32_t part, int32_t c) {
    const auto tokens = static_cast<int32_t>(num_tokens);
    const int32_t token = min(part * cut.part_tokens, tokens) + c * kWarpSize +
                          static_cast<int32_t>(threadIdx.x) % kWarpSize;
    return token < min((part + 1) * cut.part_tokens, tokens) ? token : tokens;
  }
  __device__ int32_t TokenOf(int32_t part, int32_t c) const {
    return TokenOf(plan, num_tokens, part, c);
  }

  __device__ __forceinline__ void CountWarp(const Ids& ids, int32_t c) const;
  __device__ __forceinline__ void CountPart(int32_t part, bool push) const;
  __device__ __forceinline__ int32_t TakePart(int32_t taken) const;
  __device__ __forceinline__ void LearnSlots(int32_t part) const;
  __device__ __forceinline__ void WritePart(int32_t part) const;
  __device__ __forceinline__ void WriteRoutes(int32_t part) const;
  __device__ __forceinline__ void WriteExpertCounts() const;
  __device__ __forceinline__ void Run() const;
};

// Counts the rows of a part's c-th warp, whose ids the caller's warp holds.
template <int kWords>
__device__ __forceinline__ void Planner<kWords>::CountWarp(const Ids& ids,
                                                           int32_t c) const {
  const uint64_t ranks = RanksOf(ids);
#pragma unroll 1
  for (int32_t r = 0; r < num_ranks; ++r) {
    const int32_t rows = __popc(__ballot_sync(kAllLanes, ranks >> r & 1));
    if (lane == r % kWarpSize) scratch.part_rows[c * num_ranks + r] = rows;
  }
}

// Counts the rows of a part into scratch.part_rows and part_totals. To push it
// as well is to send its ids meanwhile, and then the counts.
template <int kWords>
__device__ __forceinline__ void Planner<kWords>::CountPart(int32_t part,
                                                           bool push) const {
  const int32_t items = push ? part_warps * num_ranks : part_warps;
#pragma unroll 1
  for (int32_t item = warp; item < items; item += kWarps) {
    const int32_t distance = item / part_warps;
    const int32_t c = item - distance * part_warps;
    const int32_t token = TokenOf(part, c);
    const bool first = item == warp && part == blockIdx.x;
    const Ids ids = first ? FirstIds() : OwnIds(token);
    if (distance == 0) {
      CountWarp(ids, c);
    } else if (token < num_tokens) {
      const int32_t turned = rank + distance;
      const int32_t peer = turned < num_ranks ? turned : turned - num_ranks;
      PushIds(peer, token, ids);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int32_t r = warp; r < num_ranks; r += kWarps) {
    const int32_t rows =
        lane < part_warps ? scratch.part_rows[lane * num_ranks + r] : 0;
    int32_t sum = rows;
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int32_t left = __shfl_up_sync(kAllLanes, sum, offset);
      if (lane >= offset) sum += left;
    }
    if (lane < part_warps) scratch.part_rows[lane * num_ranks + r] = sum - rows;
    if (lane == kWarpSize - 1) scratch.part_totals[r] = sum;
  }
  __syncthreads();
  if (!push) return;
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < num_ranks * num_ranks; i += kThreads) {
    const int32_t owner = i / num_ranks;
    const int32_t to = i - owner * num_ranks;
    // Only what the owner will wait for.
    if (to != owner && rank > owner) continue;
    ptx::StoreRelaxedSys(Counts(owner, part, rank, to),
                         control.Word(scratch.part_totals[to]));
  }
  if (part == 0 && threadIdx.x < num_ranks) {
    ptx::StoreRelaxedSys(Tag(threadIdx.x, rank), control.Word(control.op.tag));
    // For a peer that is in another operation, which looks there.
    ptx::StoreRelaxedSys(control.Ready(threadIdx.x, rank),
                         control.Word(control.op.tag));
  }
}

// The next part to push, of which this block has taken so many; num_parts or
// more where none is left.
template <int kWords>
__device__ __forceinline__ int32_t
Planner<kWords>::TakePart(int32_t taken) const {
  if (gridDim.x == 1) return taken;
  if (threadIdx.x == 0) {
    // Every block draws one blank, and the last of them sets it to 0 again.
    const uint32_t draws = plan.num_parts + gridDim.x;
    auto* ticket =
        reinterpret_cast<uint32_t*>(control.Slot(rank) + control.layout.ticket);
    scratch.ticket = ptx::IncrementRelaxedGpu(ticket, draws - 1);
  }
  __syncthreads();
  return static_cast<int32_t>(scratch.ticket);
}

// Where the rows of this part begin, here and on the other ranks. Starts from
// zeroed sums.
template <int kWords>
__device__ __forceinline__ void Planner<kWords>::LearnSlots(
    int32_t part) const {
  // The first warps are still at ids: begin with the last threads.
  const int32_t words = plan.num_parts * num_ranks * num_ranks;
#pragma unroll 1
  for (int32_t i = kThreads - 1 - threadIdx.x; i < words; i += kThreads) {
    const int32_t to = i % num_ranks;
    const int32_t from = i / num_ranks % num_ranks;
    const int32_t at = i / (num_ranks * num_ranks);
    const bool ours_before = from < rank || (from == rank && at < part);
    if (to != rank && !ours_before) continue;
    const int32_t rows = Await(Counts(rank, at, from, to), "the counts", from);
    if (to == rank) {
      atomicAdd(&scratch.received[from], rows);
      if (at < part) atomicAdd(&scratch.received_before[from], rows);
    }
    if (ours_before) atomicAdd(&scratch.send_slot[to], rows);
  }
  if (blockIdx.x == 0 && threadIdx.x < num_ranks) {
    const int32_t peer = threadIdx.x;
    const uint32_t tag = Await(Tag(rank, peer), "the tag", peer);
    if (tag != control.op.tag) OtherOperation(Control(control), peer, tag);
  }
  __syncthreads();
  if (threadIdx.x < num_ranks) {
    int32_t before = 0;
#pragma unroll 1
    for (int32_t source = 0; source < threadIdx.x; ++source) {
      before += scratch.received[source];
    }
    scratch.recv_slot[threadIdx.x] =
        before + scratch.received_before[threadIdx.x];
    if (threadIdx.x == num_ranks - 1) {
      scratch.demand = before + scratch.received[threadIdx.x];
    }
  }
  __syncthreads();
}

// Turns the part of every rank into rows received, and this rank's into routes.
// CountPart() has counted it.
template <int kWords>
__device__ __forceinline__ void Planner<kWords>::WritePart(int32_t part) const {
  if (threadIdx.x < num_ranks) {
    scratch.received[threadIdx.x] = 0;
    scratch.received_before[threadIdx.x] = 0;
    scratch.send_slot[threadIdx.x] = 0;
  }
  __syncthreads();
  // Warps of all ranks' parts in order of source and token, kWarps at a time.
  const int32_t warps = num_ranks * part_warps;
#pragma unroll 1
  for (int32_t first = 0; first < warps; first += kWarps) {
    const int32_t source = (first + warp) / part_warps;
    const int32_t c = first + warp - source * part_warps;
    const int32_t token = source < num_ranks ? TokenOf(part, c) : num_tokens;
    const Ids ids = source == rank || token >= num_tokens
                        ? OwnIds(token)
                        : AwaitIds(source, token);
    // While the ids travel, so do the counts.
    if (first == 0) LearnSlots(part);
    const bool comes = ComesHere(ids);
    const uint32_t coming = __ballot_sync(kAllLanes, comes);
    if (lane == 0) scratch.warp_rows[warp] = __popc(coming);
    __syncthreads();
    // The rows of this source's earlier warps stand before.
    const bool earlier = lane < warp && lane >= source * part_warps - first;
    const int32_t before =
        __reduce_add_sync(kAllLanes, earlier ? scratch.warp_rows[lane] : 0);
    const int32_t begin =
        source < num_ranks ? scratch.recv_slot[source] + before : 0;
    __syncthreads();
    if (lane == 0 && source < num_ranks &&
        (warp == kWarps - 1 || c == part_warps - 1)) {
      scratch.recv_slot[source] = begin + __popc(coming);
    }
    const int32_t slot = begin + __popc(coming & ((1u << lane) - 1));
    if (comes && slot < params.capacity) {
      Base::WriteRow(source, token, slot, ids, scratch.expert_counts);
    }
  }
  WriteRoutes(part);
}

// Counts of the part stand in scratch.part_rows.
template <int kWords>
__device__ __forceinline__ void Planner<kWords>::WriteRoutes(
    int32_t part) const {
  if (warp >= part_warps) return;
  const int32_t token = TokenOf(part, warp);
  const uint64_t ranks = RanksOf(OwnIds(token));
  const int32_t width = RoutesPerToken(params.top_k, num_ranks);
  int2* route = reinterpret_cast<int2*>(params.routes) + int64_t{token} * width;
  int32_t num_routes = 0;
#pragma unroll 1
  for (int32_t r = 0; r < num_ranks; ++r) {
    const uint32_t going = __ballot_sync(kAllLanes, ranks >> r & 1);
    if (!(ranks >> r & 1)) continue;
    const int32_t slot = scratch.send_slot[r] +
                         scratch.part_rows[warp * num_ranks + r] +
                         __popc(going & ((1u << lane) - 1));
    const bool kept = slot < params.capacity;
    route[num_routes++] = kept ? int2{r, slot} : int2{-1, -1};
  }
  if (token < num_tokens) {
    for (; num_routes < width; ++num_routes) route[num_routes] = {-1, -1};
  }
}

// Last block: adds the other blocks' counts to its own.
template <int kWords>
__device__ __forceinline__ void Planner<kWords>::WriteExpertCounts() const {
  const int32_t local_experts = experts.local_experts;
  if (gridDim.x > 1) {
    const int32_t counts = gridDim.x * local_experts;
    for (int32_t i = threadIdx.x; i < counts; i += kThreads) {
      const int32_t block = i / local_experts;
      if (block == blockIdx.x) continue;
      atomicAdd(scratch.expert_counts + i - block * local_experts,
                __ldcg(params.workspace + i));
    }
    __syncthreads();
  }
#pragma unroll 1
  for (int32_t e = threadIdx.x; e < local_experts; e += kThreads) {
    WriteExpertCount(params, e, scratch.expert_counts[e]);
  }
}

template <int kWords>
__device__ __forceinline__ void Planner<kWords>::Run() const {
#pragma unroll 1
  for (int32_t e = threadIdx.x; e < experts.local_experts; e += kThreads) {
    scratch.expert_counts[e] = 0;
  }
  // A block past the last part finds it empty, and learns the demand.
  int32_t part = blockIdx.x;
  int32_t counted = -1;
  int32_t taken = 0;
  bool pushing = true;
  do {
    int32_t next = part;
    if (pushing) {
      const int32_t ours = TakePart(taken++);
      pushing = ours < plan.num_parts;
      if (pushing) next = ours;
    }
    if (next != counted) CountPart(next, pushing);
    counted = next;
    if (pushing) continue;
    WritePart(part);
    part += gridDim.x;
    __syncthreads();
  } while (pushing || part < plan.num_parts);
  FillEmptySlots(params, scratch.demand);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    WriteTotals(params, scratch.received, scratch.demand);
  }
  if (gridDim.x > 1) {
    int32_t* mine = params.workspace + blockIdx.x * experts.local_experts;
#pragma unroll 1
    for (int32_t e = threadIdx.x; e < experts.local_experts; e += kThreads) {
      mine[e] = scratch.expert_counts[e];
    }
  }
  if (IsLastBlock(control)) {
    WriteExpertCounts();
    AdvanceEpoch(control);
  }
}

template <int kWords>
__global__ void __launch_bounds__(kThreads)
    PushedPlanKernel(const __grid_constant__ PushedPlanParams params) {
  __shared__ Scratch scratch;
  Planner<kWords>(params, scratch).Run();
}

}  // namespace

cudaError_t LaunchPushedPlan(const PlanParams& plan, cudaStream_t stream) {
  const PushedPlanParams params = {
      .plan = plan,
      .cut = PushedPlan(plan.op.view.num_ranks, plan.num_tokens, plan.top_k,
                        plan.num_experts),
      .experts = ExpertMap(plan),
      .layout = ControlLayout(plan.op.view.num_ranks),
  };
  const int64_t elements = plan.capacity * (plan.top_k + 1);
  int64_t blocks = (elements + kElementsPerBlock - 1) / kElementsPerBlock;
  if (blocks < params.cut.num_parts) blocks = params.cut.num_parts;
  if (blocks > PushedPlan::kMaxParts) blocks = PushedPlan::kMaxParts;
  if (blocks > plan.op.view.num_sms) blocks = plan.op.view.num_sms;
  const auto grid = static_cast<unsigned int>(blocks);
  if (params.cut.num_words <= kFewWords) {
    PushedPlanKernel<kFewWords><<<grid, kThreads, 0, stream>>>(params);
  } else {
    PushedPlanKernel<kMaxTopK / 2><<<grid, kThreads, 0, stream>>>(params);
  }
  return cudaPeekAtLastError();
}

std::vector<const void*> PushedPlanKernelAddresses() {
  return {reinterpret_cast<const void*>(&PushedPlanKernel<kFewWords>),
          reinterpret_cast<const void*>(&PushedPlanKernel<kMaxTopK / 2>)};
}

}  // namespace jax_ep
