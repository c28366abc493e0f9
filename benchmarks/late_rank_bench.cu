// Times dispatch_permute where one rank comes late, and checks its rows.
//
//   nvcc -O3 -std=c++20 -I. -arch=native -o /tmp/late_rank_bench
//     benchmarks/late_rank_bench.cu cc/experts/dispatch_permute.cu
//     cc/experts/expert_rows.cu cc/plan/plan.cu cc/plan/pushed_plan.cu &&
//     /tmp/late_rank_bench
//
// (one line, at the root of the project; CUDA 12.5 or newer). Rank r runs on
// GPU r where there are enough of them. Else all ranks share GPU 0, each with a
// part of its multiprocessors (green contexts), as ranks that wait for each
// other have to run at the same time.
//
// All work of a timing is enqueued behind a gate, a kernel on each rank's
// stream that waits for a word in host memory; the last rank's then waits for
// as long as it is late. Printed are medians, of rank 0: from its gate to the
// end of its operation.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cc/experts/expert_ops.h"
#include "cc/layout/control.h"
#include "cc/layout/experts.h"
#include "cc/layout/limits.h"
#include "cc/layout/pushed_plan.h"
#include "cc/ops.h"

namespace {

using jax_ep::ControlLayout;

constexpr int kRanks = 2;
constexpr int32_t kTokens = 4096;
constexpr int32_t kTopK = 8;
constexpr int32_t kExperts = 64;
constexpr int64_t kRowBytes = 7168 * 2;
constexpr int64_t kRowWords = kRowBytes / 4;
constexpr int64_t kCapacity = int64_t{kRanks} * kTokens;
// A rank's choices are as many as its tokens': a quarter more is enough.
constexpr int64_t kExpertCapacity = int64_t{kTokens} * kTopK * 5 / 4;
constexpr int32_t kLocalExperts = kExperts / kRanks;
constexpr int kTimings = 21;

void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}
void Check(CUresult status, const char* what) {
  if (status == CUDA_SUCCESS) return;
  std::fprintf(stderr, "%s: CUDA error %d\n", what, static_cast<int>(status));
  std::exit(1);
}

// A function of the driver, so that nothing needs -lcuda.
template <typename Function>
Function* Driver(const char* name, Function*) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  Check(cudaGetDriverEntryPointByVersion(name, &found, 12050, cudaEnableDefault,
                                         &result),
        name);
  if (found == nullptr) {
    std::fprintf(stderr, "the driver has no %s\n", name);
    std::exit(1);
  }
  return reinterpret_cast<Function*>(found);
}
#define DRIVER(name) Driver(#name, static_cast<decltype(name)*>(nullptr))

// What column `word` of global token `token` holds.
__device__ uint32_t Payload(int64_t token, int64_t word) {
  return static_cast<uint32_t>(token * 0x9E3779B1u + word * 0x85EBCA77u);
}

__global__ void FillRows(uint32_t* rows, int64_t first_token) {
  for (int64_t w = threadIdx.x; w < kRowWords; w += blockDim.x) {
    rows[blockIdx.x * kRowWords + w] = Payload(first_token + blockIdx.x, w);
  }
}

// Counts expert rows that are not their tokens', and those that there are.
__global__ void CheckRows(const int32_t* recv_src, const int32_t* num_recv,
                          const int32_t* expert_rows, const uint32_t* grouped,
                          unsigned long long* counts) {
  const int64_t slot = blockIdx.x;
  if (slot >= *num_recv) return;
  for (int32_t k = 0; k < kTopK; ++k) {
    const int32_t place = expert_rows[slot * kTopK + k];
    if (place < 0) continue;
    bool wrong = false;
    for (int64_t w = threadIdx.x; w < kRowWords; w += blockDim.x) {
      wrong |= grouped[place * kRowWords + w] != Payload(recv_src[slot], w);
    }
    const bool any = __syncthreads_or(wrong);
    if (threadIdx.x == 0) atomicAdd(counts + !any, 1ull);
  }
}

__global__ void Gate(const volatile uint32_t* word, uint32_t turn,
                     uint64_t late_ns) {
  while (*word < turn) {
  }
  uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < late_ns);
}

struct Rank {
  int device = 0;
  cudaStream_t stream = nullptr;
  cudaEvent_t start, stop;
  jax_ep::PlanParams plan = {};
  jax_ep::ExpertRowsParams expert_rows = {};
  jax_ep::DispatchPermuteParams op = {};
  unsigned long long* counts;  // of wrong and right rows
};

template <typename T>
T* Take(int64_t count) {
  T* memory;
  Check(cudaMalloc(&memory, count * sizeof(T)), "cudaMalloc");
  Check(cudaMemset(memory, 0, count * sizeof(T)), "cudaMemset");
  return memory;
}

// Streams on which the ranks run at the same time.
void MakeStreams(std::vector<Rank>& ranks) {
  int gpus = 0;
  Check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  if (gpus >= kRanks) {
    for (int r = 0; r < kRanks; ++r) {
      ranks[r].device = r;
      Check(cudaSetDevice(r), "cudaSetDevice");
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer != r) Check(cudaDeviceEnablePeerAccess(peer, 0), "peers");
      }
      Check(cudaStreamCreateWithFlags(&ranks[r].stream, cudaStreamNonBlocking),
            "stream");
    }
    std::printf("a GPU for each of %d ranks\n", kRanks);
    return;
  }
  Check(cudaFree(nullptr), "context");
  CUdevice device;
  Check(DRIVER(cuDeviceGet)(&device, 0), "cuDeviceGet");
  CUdevResource all, rest, parts[kRanks];
  Check(DRIVER(cuDeviceGetDevResource)(device, &all, CU_DEV_RESOURCE_TYPE_SM),
        "cuDeviceGetDevResource");
  unsigned int groups = kRanks;
  Check(DRIVER(cuDevSmResourceSplitByCount)(parts, &groups, &all, &rest, 0,
                                            all.sm.smCount / kRanks / 8 * 8),
        "cuDevSmResourceSplitByCount");
  if (groups < kRanks) {
    std::fprintf(stderr, "too few multiprocessors\n");
    std::exit(1);
  }
  for (int r = 0; r < kRanks; ++r) {
    CUdevResourceDesc description;
    CUgreenCtx context;
    Check(DRIVER(cuDevResourceGenerateDesc)(&description, &parts[r], 1),
          "cuDevResourceGenerateDesc");
    Check(DRIVER(cuGreenCtxCreate)(&context, description, device,
                                   CU_GREEN_CTX_DEFAULT_STREAM),
          "cuGreenCtxCreate");
    Check(DRIVER(cuGreenCtxStreamCreate)(&ranks[r].stream, context,
                                         CU_STREAM_NON_BLOCKING, 0),
          "cuGreenCtxStreamCreate");
  }
  std::printf("%d ranks on one GPU, %u multiprocessors each\n", kRanks,
              parts[0].sm.smCount);
}

jax_ep::Operation OperationOf(int rank, bool has_bulk,
                              const std::vector<std::byte*>& control) {
  jax_ep::Operation op = {};
  op.view.rank = rank;
  op.view.num_ranks = kRanks;
  op.view.num_sms = 24;
  op.view.mesh = {.position = static_cast<uint32_t>(rank),
                  .num_ranks = kRanks,
                  .stride = 1};
  auto* position = Take<uint32_t>(1);
  Check(cudaMemcpy(position, &op.view.mesh.position, sizeof(uint32_t),
                   cudaMemcpyHostToDevice),
        "position");
  op.position = position;
  op.view.has_bulk = has_bulk;
  op.view.timeout_ns = op.view.warn_ns = 10'000'000'000;
  for (int r = 0; r < kRanks; ++r) op.view.control[r] = control[r];
  op.channel = op.tag = 1;
  return op;
}

void MakePlan(Rank& rank, const jax_ep::Operation& op,
              const std::vector<int32_t>& ids) {
  jax_ep::PlanParams& p = rank.plan;
  auto* topk_idx = Take<int32_t>(ids.size());
  Check(cudaMemcpy(topk_idx, ids.data(), ids.size() * sizeof(int32_t),
                   cudaMemcpyHostToDevice),
        "ids");
  p.op = op;
  p.num_experts = kExperts;
  p.expert_alignment = 1;
  p.top_k = kTopK;
  p.num_tokens = kTokens;
  p.capacity = kCapacity;
  p.topk_idx = topk_idx;
  p.routes = Take<int32_t>(2 * kTokens * jax_ep::RoutesPerToken(kTopK, kRanks));
  p.num_recv = Take<int32_t>(1);
  p.num_demand = Take<int32_t>(1);
  p.overflow = Take<bool>(1);
  p.recv_counts = Take<int32_t>(kRanks);
  p.recv_topk_idx = Take<int32_t>(kCapacity * kTopK);
  p.recv_src = Take<int32_t>(kCapacity);
  p.expert_counts = Take<int32_t>(kLocalExperts);
  p.group_sizes = Take<int32_t>(kLocalExperts);
  p.workspace = Take<int32_t>(jax_ep::PlanWorkspaceSize(kRanks, kExperts));
}

void MakeOperation(Rank& rank, int number) {
  const jax_ep::PlanParams& p = rank.plan;
  jax_ep::ExpertRowsParams& e = rank.expert_rows;
  e.local_experts = kLocalExperts;
  e.expert_alignment = 1;
  e.num_pairs = kCapacity * kTopK;
  e.expert_capacity = kExpertCapacity;
  e.recv_topk_idx = p.recv_topk_idx;
  e.expert_rows = Take<int32_t>(e.num_pairs);
  e.empty_ranges = Take<int32_t>(2 * (kLocalExperts + 1));
  e.workspace = Take<int32_t>(
      jax_ep::ExpertRowsWorkspaceSize(e.num_pairs, kLocalExperts));

  jax_ep::DispatchPermuteParams& d = rank.op;
  d.rows.op = p.op;
  d.rows.op.slot = ControlLayout::kPlanSlots;
  d.rows.routes_per_token = jax_ep::RoutesPerToken(kTopK, kRanks);
  d.rows.num_leaves = 1;
  d.rows.num_tokens = kTokens;
  d.rows.capacity = kCapacity;
  d.rows.routes = p.routes;
  d.rows.num_recv = p.num_recv;
  d.rows.recv_src = p.recv_src;
  auto* rows = Take<uint32_t>(kTokens * kRowWords);
  FillRows<<<kTokens, 256>>>(rows, int64_t{number} * kTokens);
  d.rows.leaves[0] = {.in = reinterpret_cast<std::byte*>(rows),
                      .out = Take<std::byte>(kCapacity * kRowBytes),
                      .row_bytes = kRowBytes,
                      .element = jax_ep::Element::kNone};
  d.num_grouped = 1;
  d.top_k = kTopK;
  d.num_ranges = kLocalExperts + 1;
  d.recv_counts = p.recv_counts;
  d.recv_src = p.recv_src;
  d.expert_rows = e.expert_rows;
  d.empty_ranges = e.empty_ranges;
  d.workspace = reinterpret_cast<uint64_t*>(
      Take<int32_t>(jax_ep::DispatchPermuteWorkspaceSize(kRanks)));
  d.grouped[0] = Take<std::byte>(kExpertCapacity * kRowBytes);
  rank.counts = Take<unsigned long long>(2);
}

// A choice of experts without repetitions, at random but the same everywhere.
std::vector<int32_t> Ids(int rank) {
  std::vector<int32_t> ids;
  uint32_t state = 12345 + rank;
  for (int32_t t = 0; t < kTokens; ++t) {
    std::vector<int32_t> experts(kExperts);
    for (int32_t e = 0; e < kExperts; ++e) experts[e] = e;
    for (int32_t k = 0; k < kTopK; ++k) {
      state = state * 1664525u + 1013904223u;
      std::swap(experts[k], experts[k + (state >> 8) % (kExperts - k)]);
      ids.push_back(experts[k]);
    }
  }
  return ids;
}

void Synchronize(const std::vector<Rank>& ranks) {
  for (const Rank& rank : ranks) {
    Check(cudaStreamSynchronize(rank.stream), "the ranks' streams");
  }
}

void SetUp(std::vector<Rank>& ranks) {
  MakeStreams(ranks);
  std::vector<std::byte*> control;
  for (const Rank& rank : ranks) {
    Check(cudaSetDevice(rank.device), "cudaSetDevice");
    control.push_back(Take<std::byte>(ControlLayout(kRanks).size()));
  }
  for (int r = 0; r < kRanks; ++r) {
    Rank& rank = ranks[r];
    Check(cudaSetDevice(rank.device), "cudaSetDevice");
    int major = 0;
    Check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor,
                                 rank.device),
          "capability");
    if (major >= 9) {
      Check(cudaFuncSetAttribute(jax_ep::DispatchPermuteKernelAddress(),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 jax_ep::kBulkSharedBytes),
            "shared memory");
    }
    MakePlan(rank, OperationOf(r, major >= 9, control), Ids(r));
    MakeOperation(rank, r);
    Check(cudaEventCreate(&rank.start), "event");
    Check(cudaEventCreate(&rank.stop), "event");
    Check(cudaDeviceSynchronize(), "set-up");
  }
  for (const Rank& rank : ranks) {
    Check(cudaSetDevice(rank.device), "cudaSetDevice");
    Check(jax_ep::LaunchPlan(rank.plan, rank.stream), "plan");
    Check(jax_ep::LaunchExpertRows(rank.expert_rows, rank.stream), "places");
  }
  Synchronize(ranks);
}

// Milliseconds of rank 0. Rows are checked in all ranks.
double Time(std::vector<Rank>& ranks, uint32_t* gate, double late_ms) {
  const uint32_t turn = *gate + 1;
  for (int r = 0; r < kRanks; ++r) {
    Rank& rank = ranks[r];
    Check(cudaSetDevice(rank.device), "cudaSetDevice");
    Check(cudaMemsetAsync(rank.op.grouped[0], 0x7f, kExpertCapacity * kRowBytes,
                          rank.stream),
          "poison");
    Check(
        cudaMemsetAsync(rank.counts, 0, 2 * sizeof(*rank.counts), rank.stream),
        "counts");
    Gate<<<1, 1, 0, rank.stream>>>(
        gate, turn, r == kRanks - 1 ? static_cast<uint64_t>(late_ms * 1e6) : 0);
    Check(cudaEventRecord(rank.start, rank.stream), "start");
    Check(jax_ep::LaunchDispatchPermute(rank.op, rank.stream),
          "dispatch_permute");
    Check(cudaEventRecord(rank.stop, rank.stream), "stop");
    CheckRows<<<kCapacity, 256, 0, rank.stream>>>(
        rank.plan.recv_src, rank.plan.num_recv, rank.expert_rows.expert_rows,
        reinterpret_cast<const uint32_t*>(rank.op.grouped[0]), rank.counts);
  }
  *reinterpret_cast<volatile uint32_t*>(gate) = turn;
  Synchronize(ranks);
  for (const Rank& rank : ranks) {
    unsigned long long counts[2];
    Check(
        cudaMemcpy(counts, rank.counts, sizeof(counts), cudaMemcpyDeviceToHost),
        "counts");
    if (counts[0] != 0 || counts[1] == 0) {
      std::fprintf(stderr, "%llu rows are wrong, %llu right\n", counts[0],
                   counts[1]);
      std::exit(1);
    }
  }
  float ms = 0;
  Check(cudaEventElapsedTime(&ms, ranks[0].start, ranks[0].stop), "time");
  return ms;
}

double Median(std::vector<Rank>& ranks, uint32_t* gate, double late_ms) {
  Time(ranks, gate, late_ms);
  std::vector<double> times;
  for (int i = 0; i < kTimings; ++i) {
    times.push_back(Time(ranks, gate, late_ms));
  }
  std::sort(times.begin(), times.end());
  return times[kTimings / 2];
}

}  // namespace

int main() {
  // To load a kernel behind one that waits can deadlock.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  std::vector<Rank> ranks(kRanks);
  SetUp(ranks);
  uint32_t* gate;
  Check(cudaHostAlloc(&gate, sizeof(*gate), cudaHostAllocPortable), "gate");
  *gate = 0;
  const double on_time = Median(ranks, gate, 0);
  std::printf("on time: %.4f ms\n", on_time);
  for (const double late : {0.5, 2.0, 10.0}) {
    const double ms = Median(ranks, gate, late);
    std::printf(
        "%4.1f ms late: %.4f ms, %.3f of (on time + late); without the "
        "lateness %.3f of on time\n",
        late, ms, ms / (on_time + late), (ms - late) / on_time);
  }
  std::printf("all rows right\n");
  return 0;
}
