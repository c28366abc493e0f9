// expert_rows: the place of every (row, k) pair among the rows of the experts.
//
// Expert rows are grouped by expert, each group padded to the alignment;
// inside a group pairs stand in the order of (slot, k). So the place of a pair
// is the start of its group, plus the pairs of that expert before it.
//
// Launch: two kernels, a warp to a chunk of pairs. CountKernel counts the pairs
//         of each expert in each chunk. AssignKernel adds the counts up, every
//         block for itself, and numbers the pairs of its chunks. No block waits
//         for another: what has to be known before stands in the first launch.
//         Where one block has all chunks, AssignKernel counts, too, and is the
//         only launch.
// Reads:  params.recv_topk_idx. Writes: expert_rows, empty_ranges, workspace.
// Order:  the second launch follows the first on its stream.
#include <cuda_runtime.h>

#include <algorithm>

#include "cc/experts/expert_ops.h"
#include "cc/layout/experts.h"
#include "cc/rows/rows.cuh"

namespace jax_ep {
namespace {

constexpr int kMaxWarps = 16;
// What every GPU grants without being asked, less some for static arrays.
constexpr int kSharedCounters = (40 << 10) / sizeof(int32_t);
// Counters of an expert that belong to the whole block.
constexpr int kBlockCounters = 2;
static_assert(kSharedCounters >= (kBlockCounters + 1) * kMaxLocalExperts);

extern __shared__ int32_t shared_counters[];

__device__ __forceinline__ int32_t ExpertOf(const ExpertRowsParams& params,
                                            int64_t pair, int64_t end) {
  const int32_t expert = pair < end ? params.recv_topk_idx[pair] : -1;
  return expert < params.local_experts ? expert : -1;
}

// A warp's chunk: how many pairs each expert has, through counts [L] in shared
// memory.
__device__ __forceinline__ void CountChunk(const ExpertRowsParams& params,
                                           const ExpertRowsChunks& split,
                                           int64_t chunk, int32_t* counts) {
  if (chunk >= split.chunks) return;
  const int lane = threadIdx.x % kWarpSize;
  const int32_t experts = params.local_experts;
  for (int32_t e = lane; e < experts; e += kWarpSize) counts[e] = 0;
  __syncwarp();
  const int64_t end = min((chunk + 1) * split.pairs, params.num_pairs);
  for (int64_t pair = chunk * split.pairs + lane; pair < end;
       pair += kWarpSize) {
    const int32_t expert = ExpertOf(params, pair, end);
    if (expert >= 0) atomicAdd(counts + expert, 1);
  }
  __syncwarp();
  for (int32_t e = lane; e < experts; e += kWarpSize) {
    params.workspace[chunk * experts + e] = counts[e];
  }
}

__global__ void __launch_bounds__(kMaxWarps* kWarpSize)
    CountKernel(const __grid_constant__ ExpertRowsParams params) {
  const int32_t warp = threadIdx.x / kWarpSize;
  const int64_t chunk = int64_t{blockIdx.x} * (blockDim.x / kWarpSize) + warp;
  CountChunk(params, ExpertRowsChunks(params.num_pairs, params.local_experts),
             chunk, shared_counters + warp * params.local_experts);
}

struct Assigner {
  const ExpertRowsParams& params;
  ExpertRowsChunks split;
  int32_t experts;
  int32_t warps;
  int32_t warp;
  int32_t lane;
  int64_t first_chunk;  // of this block
  int32_t* total;       // [L] pairs of each expert; then the starts of groups
  int32_t* before;      // [L] pairs of each expert before this block
  int32_t* next;        // [L] the next place of each expert, this warp's

  __device__ explicit Assigner(const ExpertRowsParams& p)
      : params(p),
        split(p.num_pairs, p.local_experts),
        experts(p.local_experts),
        warps(blockDim.x / kWarpSize),
        warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize),
        first_chunk(int64_t{blockIdx.x} * warps),
        total(shared_counters),
        before(total + experts),
        next(before + (1 + warp) * experts) {}

  __device__ void AddUp() const;
  __device__ void PlaceGroups() const;
  __device__ void StartChunk() const;
  __device__ void NumberPairs() const;
};

__device__ void Assigner::AddUp() const {
  for (int32_t e = threadIdx.x; e < experts; e += blockDim.x) {
    total[e] = before[e] = 0;
  }
  __syncthreads();
  for (int32_t e = lane; e < experts; e += kWarpSize) {
    int32_t all = 0, earlier = 0;
#pragma unroll 8
    for (int64_t chunk = warp; chunk < split.chunks; chunk += warps) {
      const int32_t count = params.workspace[chunk * experts + e];
      all += count;
      earlier += chunk < first_chunk ? count : 0;
    }
    atomicAdd(total + e, all);
    atomicAdd(before + e, earlier);
  }
  __syncthreads();
}

// One warp: from totals to the starts of groups; block 0 says what is empty.
__device__ void Assigner::PlaceGroups() const {
  const int64_t room = params.expert_capacity;
  const int64_t align = params.expert_alignment;
  int64_t start = 0;
  for (int32_t base = 0; base < experts; base += kWarpSize) {
    const int32_t e = base + lane;
    const int64_t pairs = e < experts ? total[e] : 0;
    const int64_t size = (pairs + align - 1) / align * align;
    int64_t end = size;  // inclusive scan over the warp
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int64_t other = __shfl_up_sync(kAllLanes, end, distance);
      if (lane >= distance) end += other;
    }
    const int64_t begin = start + end - size;
    if (e < experts) {
      total[e] = static_cast<int32_t>(begin);
      if (blockIdx.x == 0) {
        params.empty_ranges[2 * e] =
            static_cast<int32_t>(min(begin + pairs, room));
        params.empty_ranges[2 * e + 1] =
            static_cast<int32_t>(min(begin + size, room));
      }
    }
    start += __shfl_sync(kAllLanes, end, kWarpSize - 1);
  }
  if (blockIdx.x == 0 && lane == 0) {
    params.empty_ranges[2 * experts] = static_cast<int32_t>(min(start, room));
    params.empty_ranges[2 * experts + 1] = static_cast<int32_t>(room);
  }
}

// Where this warp's chunk goes on from the chunks before it.
__device__ void Assigner::StartChunk() const {
  for (int32_t e = lane; e < experts; e += kWarpSize) {
    int32_t at = total[e] + before[e];
#pragma unroll 4
    for (int32_t w = 0; w < warp; ++w) {
      at += params.workspace[(first_chunk + w) * experts + e];
    }
    next[e] = at;
  }
  __syncwarp();
}

__device__ void Assigner::NumberPairs() const {
  const int64_t begin = (first_chunk + warp) * split.pairs;
  const int64_t end = min(begin + split.pairs, params.num_pairs);
  for (int64_t base = begin; base < end; base += kWarpSize) {
    const int64_t pair = base + lane;
    const int32_t expert = ExpertOf(params, pair, end);
    const uint32_t same = __match_any_sync(kAllLanes, expert);
    const int32_t earlier = __popc(same & ((1u << lane) - 1));
    const int32_t first = expert >= 0 ? next[expert] : 0;
    __syncwarp();
    if (expert >= 0 && earlier == 0) next[expert] = first + __popc(same);
    __syncwarp();
    const int32_t place = first + earlier;
    if (pair < end) {
      params.expert_rows[pair] =
          expert >= 0 && place < params.expert_capacity ? place : -1;
    }
  }
}

__global__ void __launch_bounds__(kMaxWarps* kWarpSize)
    AssignKernel(const __grid_constant__ ExpertRowsParams params) {
  const Assigner assigner(params);
  if (gridDim.x == 1) {
    CountChunk(params, assigner.split, assigner.warp, assigner.next);
    __syncthreads();
  }
  assigner.AddUp();
  if (assigner.warp == 0) assigner.PlaceGroups();
  __syncthreads();
  if (assigner.first_chunk + assigner.warp >= assigner.split.chunks) return;
  assigner.StartChunk();
  assigner.NumberPairs();
}

}  // namespace

cudaError_t LaunchExpertRows(const ExpertRowsParams& params,
                             cudaStream_t stream) {
  const int32_t experts = params.local_experts;
  const ExpertRowsChunks split(params.num_pairs, experts);
  const int64_t warps = std::min<int64_t>(
      {kMaxWarps, kSharedCounters / experts - kBlockCounters, split.chunks});
  const auto blocks =
      static_cast<unsigned int>((split.chunks + warps - 1) / warps);
  const auto threads = static_cast<unsigned int>(warps * kWarpSize);
  const size_t bytes = experts * sizeof(int32_t);
  if (blocks > 1) {
    CountKernel<<<blocks, threads, warps * bytes, stream>>>(params);
  }
  AssignKernel<<<blocks, threads, (warps + kBlockCounters) * bytes, stream>>>(
      params);
  return cudaPeekAtLastError();
}

std::vector<const void*> ExpertRowsKernelAddresses() {
  return {reinterpret_cast<const void*>(&CountKernel),
          reinterpret_cast<const void*>(&AssignKernel)};
}

}  // namespace jax_ep
