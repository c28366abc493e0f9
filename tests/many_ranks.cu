// Plan, dispatch and combine with more ranks than a word has bits, on one GPU.
//
// Each rank is a stream with launches of one block, so that all run at the same
// time: an H200 has 132 multiprocessors. The ranks belong to four "processes":
// those of others are found by regions, or their rows are staged, as set-up
// would have it. tests/many_ranks_test.py compiles and runs it.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cc/handshake/peer_view.h"
#include "cc/layout/control.h"
#include "cc/layout/limits.h"
#include "cc/layout/pushed_plan.h"
#include "cc/layout/staging.h"
#include "cc/ops.h"

namespace {

using jax_ep::ControlLayout;

constexpr int32_t kTokens = 8;
constexpr int32_t kTopK = 4;
constexpr int64_t kColumns = 96;
constexpr int kProcesses = 4;
constexpr int64_t kStagingBytes = 4 << 20;

void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// A rank's k-th choice for a token: one expert a rank, all different.
int32_t Choice(int32_t num_ranks, int32_t rank, int32_t token, int32_t k) {
  return (rank * 7 + token * 5 + k * 11) % num_ranks;
}
float Value(int64_t global_token, int64_t column) {
  return static_cast<float>((global_token * 37 + column * 11) % 193 - 96);
}

struct Rank {
  cudaStream_t stream;
  std::byte* arena;
  int64_t arena_bytes;
  int64_t used = 0;
  jax_ep::PlanParams plan = {};
  jax_ep::RowParams dispatch = {};
  jax_ep::RowParams combine = {};

  template <typename T>
  T* Take(int64_t count) {
    T* const memory = reinterpret_cast<T*>(arena + used);
    used = (used + count * sizeof(T) + 255) / 256 * 256;
    if (used > arena_bytes) std::abort();
    return memory;
  }
};

template <typename T>
std::vector<T> Read(const T* from, int64_t count) {
  std::vector<T> data(count);
  Check(cudaMemcpy(data.data(), from, count * sizeof(T), cudaMemcpyDefault),
        "copy");
  return data;
}
template <typename T>
void Write(T* to, const std::vector<T>& data) {
  Check(cudaMemcpy(to, data.data(), data.size() * sizeof(T), cudaMemcpyDefault),
        "copy");
}

jax_ep::PeerView ViewOf(int rank, const std::vector<Rank>& ranks,
                        const std::vector<std::byte*>& control) {
  const auto num_ranks = static_cast<int32_t>(ranks.size());
  jax_ep::PeerView view = {};
  view.rank = rank;
  view.num_ranks = num_ranks;
  view.num_sms = 1;
  view.mesh = {.position = static_cast<uint32_t>(rank),
               .num_ranks = static_cast<uint32_t>(num_ranks),
               .stride = 1};
  view.timeout_ns = view.warn_ns = 20'000'000'000;
  view.num_channels = 1;
  view.staging_bytes = kStagingBytes;
  std::vector<jax_ep::Region> regions(num_ranks * jax_ep::kMaxRegions);
  for (int32_t r = 0; r < num_ranks; ++r) {
    view.control[r] = control[r];
    if (r * kProcesses / num_ranks == rank * kProcesses / num_ranks) {
      view.same_process.Add(r);
      continue;
    }
    const auto begin = reinterpret_cast<uint64_t>(ranks[r].arena);
    regions[r * jax_ep::kMaxRegions] = {
        begin, static_cast<uint64_t>(ranks[r].arena_bytes), begin};
  }
  jax_ep::Region* table;
  Check(cudaMalloc(&table, regions.size() * sizeof(jax_ep::Region)), "regions");
  Write(table, regions);
  view.regions = table;
  return view;
}

void MakeOperations(Rank& rank, const jax_ep::PeerView& view, bool exported) {
  const int32_t num_ranks = view.num_ranks;
  const int64_t capacity = int64_t{num_ranks} * kTokens;
  std::vector<int32_t> ids;
  std::vector<float> rows;
  for (int32_t t = 0; t < kTokens; ++t) {
    for (int32_t k = 0; k < kTopK; ++k) {
      ids.push_back(Choice(num_ranks, view.rank, t, k));
    }
    for (int64_t c = 0; c < kColumns; ++c) {
      rows.push_back(Value(int64_t{view.rank} * kTokens + t, c));
    }
  }
  auto* topk_idx = rank.Take<int32_t>(ids.size());
  auto* in = rank.Take<float>(rows.size());
  Write(topk_idx, ids);
  Write(in, rows);
  auto* position = rank.Take<uint32_t>(1);
  Write(position, std::vector<uint32_t>{view.mesh.position});
  jax_ep::PlanParams& p = rank.plan;
  p.op.view = view;
  p.op.channel = p.op.tag = 1;
  p.op.position = position;
  p.num_experts = num_ranks;
  p.expert_alignment = 1;
  p.top_k = kTopK;
  p.num_tokens = kTokens;
  p.capacity = capacity;
  p.topk_idx = topk_idx;
  p.routes = rank.Take<int32_t>(2 * kTokens * kTopK);
  p.num_recv = rank.Take<int32_t>(1);
  p.num_demand = rank.Take<int32_t>(1);
  p.overflow = rank.Take<bool>(1);
  p.recv_counts = rank.Take<int32_t>(num_ranks);
  p.recv_topk_idx = rank.Take<int32_t>(capacity * kTopK);
  p.recv_src = rank.Take<int32_t>(capacity);
  p.expert_counts = rank.Take<int32_t>(1);
  p.group_sizes = rank.Take<int32_t>(1);
  p.workspace =
      rank.Take<int32_t>(jax_ep::PlanWorkspaceSize(num_ranks, p.num_experts));
  for (bool& one : p.exported) one = exported;

  jax_ep::RowParams& d = rank.dispatch;
  d.op = p.op;
  d.op.slot = ControlLayout::kPlanSlots;
  d.routes_per_token = kTopK;
  d.num_leaves = 1;
  d.num_tokens = kTokens;
  d.capacity = capacity;
  d.routes = p.routes;
  d.num_recv = p.num_recv;
  d.recv_src = p.recv_src;
  d.leaves[0] = {.in = reinterpret_cast<std::byte*>(in),
                 .out = rank.Take<std::byte>(capacity * kColumns * 4),
                 .row_bytes = kColumns * 4,
                 .element = jax_ep::Element::kF32,
                 .exported = exported};
  rank.combine = d;
  rank.combine.op.slot = ControlLayout::kPlanSlots + 1;
  rank.combine.leaves[0].in = d.leaves[0].out;
  rank.combine.leaves[0].out = rank.Take<std::byte>(kTokens * kColumns * 4);
}

bool IsRight(const std::vector<Rank>& ranks, int rank) {
  const auto num_ranks = static_cast<int32_t>(ranks.size());
  const Rank& r = ranks[rank];
  std::vector<int32_t> sources;
  for (int32_t g = 0; g < num_ranks * kTokens; ++g) {
    for (int32_t k = 0; k < kTopK; ++k) {
      if (Choice(num_ranks, g / kTokens, g % kTokens, k) == rank) {
        sources.push_back(g);
      }
    }
  }
  const auto count = static_cast<int64_t>(sources.size());
  if (Read(r.plan.num_recv, 1)[0] != count) return false;
  if (Read(r.plan.recv_src, count) != sources) return false;
  const auto* received = reinterpret_cast<float*>(r.dispatch.leaves[0].out);
  const auto rows = Read(received, count * kColumns);
  const auto* summed = reinterpret_cast<float*>(r.combine.leaves[0].out);
  const auto sums = Read(summed, kTokens * kColumns);
  for (int64_t i = 0; i < count * kColumns; ++i) {
    if (rows[i] != Value(sources[i / kColumns], i % kColumns)) return false;
  }
  for (int64_t i = 0; i < kTokens * kColumns; ++i) {
    const int64_t token = int64_t{rank} * kTokens + i / kColumns;
    if (sums[i] != kTopK * Value(token, i % kColumns)) return false;
  }
  return true;
}

template <typename Launch>
void OnAll(std::vector<Rank>& ranks, const char* what, const Launch& launch) {
  for (Rank& rank : ranks) Check(launch(rank), what);
  Check(cudaDeviceSynchronize(), what);
}

void Run(int32_t num_ranks, bool exported, bool general) {
  const int64_t arena_bytes =
      (4 << 20) + int64_t{num_ranks} * kTokens * kColumns * 8;
  const jax_ep::StagingLayout staging(kStagingBytes, 1, num_ranks);
  std::vector<Rank> ranks(num_ranks);
  std::vector<std::byte*> control(num_ranks);
  const int64_t bytes = ControlLayout(num_ranks).size() + staging.size();
  for (int32_t r = 0; r < num_ranks; ++r) {
    ranks[r].arena_bytes = arena_bytes;
    Check(cudaMalloc(&ranks[r].arena, arena_bytes), "arena");
    Check(cudaMemset(ranks[r].arena, 0x7f, arena_bytes), "arena");
    Check(cudaMalloc(&control[r], bytes), "control memory");
    Check(cudaMemset(control[r], 0, bytes), "control memory");
    Check(cudaStreamCreateWithFlags(&ranks[r].stream, cudaStreamNonBlocking),
          "stream");
  }
  std::vector<const void*> tables;
  for (int32_t r = 0; r < num_ranks; ++r) {
    const jax_ep::PeerView view = ViewOf(r, ranks, control);
    tables.push_back(view.regions);
    MakeOperations(ranks[r], view, exported);
  }
  Check(cudaDeviceSynchronize(), "set-up");
  for (int round = 0; round < 3; ++round) {
    OnAll(ranks, "plan",
          [](Rank& r) { return jax_ep::LaunchPlan(r.plan, r.stream); });
    OnAll(ranks, "dispatch", [&](Rank& r) {
      return general ? jax_ep::LaunchGeneralDispatch(r.dispatch, r.stream)
                     : jax_ep::LaunchDispatch(r.dispatch, r.stream);
    });
    OnAll(ranks, "combine", [&](Rank& r) {
      return general ? jax_ep::LaunchGeneralCombine(r.combine, r.stream)
                     : jax_ep::LaunchCombine(r.combine, r.stream);
    });
    for (int32_t r = 0; r < num_ranks; ++r) {
      if (IsRight(ranks, r)) continue;
      std::fprintf(stderr, "%d ranks, %s: rank %d has wrong rows\n", num_ranks,
                   exported ? "direct" : "staged", r);
      std::exit(1);
    }
  }
  for (int32_t r = 0; r < num_ranks; ++r) {
    Check(cudaFree(const_cast<void*>(tables[r])), "free");
    Check(cudaFree(ranks[r].arena), "free");
    Check(cudaFree(control[r]), "free");
    Check(cudaStreamDestroy(ranks[r].stream), "stream");
  }
  std::printf("%d ranks, %s, %s: right\n", num_ranks,
              exported ? "direct" : "staged", general ? "general" : "few");
}

}  // namespace

int main() {
  // As many streams at a time as there are ranks; no loading behind a kernel
  // that waits.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  for (const int32_t num_ranks : {5, 64, 65, 72, 96}) {
    for (const bool exported : {true, false}) {
      for (const bool general : {true, false}) {
        Run(num_ranks, exported, general);
      }
    }
  }
  return 0;
}
