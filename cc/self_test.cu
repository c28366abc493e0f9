#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cc/current_device.h"
#include "cc/experts/expert_ops.h"
#include "cc/few_tokens/low_latency.h"
#include "cc/layout/control.h"
#include "cc/layout/experts.h"
#include "cc/layout/pushed_plan.h"
#include "cc/ops.h"
#include "cc/self_test.h"

#ifndef JAX_EP_CUDA_ARCHITECTURES
#define JAX_EP_CUDA_ARCHITECTURES "unknown architectures"
#endif

namespace jax_ep {
namespace {

// Four tokens, two experts each of four; row t goes to slot t.
constexpr int32_t kTokens = 4;
constexpr int32_t kTopK = 2;
constexpr int32_t kExperts = 4;
constexpr int32_t kColumns = 128;
constexpr int32_t kPairs = kTokens * kTopK;

std::string Problem(int ordinal, const char* step, cudaError_t error) {
  return "GPU " + std::to_string(ordinal) + ": " + step +
         " failed: " + cudaGetErrorString(error);
}

// Owns one allocation for all buffers of the test, zeroed on `stream`: the
// default stream's zeros would come at any time beside the work of another.
class Arena {
 public:
  Arena(int64_t bytes, cudaStream_t stream) {
    status_ = cudaMalloc(reinterpret_cast<void**>(&base_), bytes);
    if (status_ == cudaSuccess) {
      status_ = cudaMemsetAsync(base_, 0, bytes, stream);
    }
    next_ = base_;
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { cudaFree(base_); }

  cudaError_t status() const { return status_; }

  template <typename T>
  T* Take(int64_t count) {
    T* result = reinterpret_cast<T*>(next_);
    next_ += (count * sizeof(T) + 255) / 256 * 256;
    return result;
  }

 private:
  cudaError_t status_;
  std::byte* base_ = nullptr;
  std::byte* next_ = nullptr;
};

struct Buffers {
  PlanParams plan = {};
  RowParams dispatch = {};
  RowParams combine = {};
  ExpertRowsParams expert_rows = {};
  DispatchPermuteParams dispatch_permute = {};
  int32_t* topk_idx;
  float* in;
  float* out;
  float* grouped;  // [kPairs, kColumns]
  PlanDispatchParams plan_dispatch = {};
  float* planned;  // what it dispatched
};

Buffers Cut(Arena& arena, bool has_bulk) {
  Buffers b;
  Operation op = {};
  op.view.num_ranks = 1;
  op.view.num_sms = 2;
  op.view.has_bulk = has_bulk;
  op.view.timeout_ns = op.view.warn_ns = 10'000'000'000;
  op.view.control[0] = arena.Take<std::byte>(ControlLayout(1).size());
  op.channel = op.tag = 1;
  op.view.mesh = {.position = 0, .num_ranks = 1, .stride = 1};
  op.position = arena.Take<uint32_t>(1);
  b.topk_idx = arena.Take<int32_t>(kTokens * kTopK);
  b.in = arena.Take<float>(kTokens * kColumns);
  b.out = arena.Take<float>(kTokens * kColumns);
  float* rows = arena.Take<float>(kTokens * kColumns);

  PlanParams& p = b.plan;
  p.op = op;
  p.num_experts = kExperts;
  p.expert_alignment = 1;
  p.top_k = kTopK;
  p.num_tokens = kTokens;
  p.capacity = kTokens;
  p.topk_idx = b.topk_idx;
  p.routes = arena.Take<int32_t>(2 * kTokens);
  p.num_recv = arena.Take<int32_t>(1);
  p.num_demand = arena.Take<int32_t>(1);
  p.overflow = arena.Take<bool>(1);
  p.recv_counts = arena.Take<int32_t>(1);
  p.recv_topk_idx = arena.Take<int32_t>(kTokens * kTopK);
  p.recv_src = arena.Take<int32_t>(kTokens);
  p.expert_counts = arena.Take<int32_t>(kExperts);
  p.group_sizes = arena.Take<int32_t>(kExperts);
  p.workspace = arena.Take<int32_t>(PlanWorkspaceSize(1, kExperts));

  RowParams r = {};
  r.op = op;
  r.routes_per_token = 1;
  r.num_leaves = 1;
  r.num_tokens = kTokens;
  r.capacity = kTokens;
  r.routes = p.routes;
  r.num_recv = p.num_recv;
  r.recv_src = p.recv_src;
  b.dispatch = b.combine = r;
  const int64_t row_bytes = kColumns * sizeof(float);
  b.dispatch.leaves[0] = {reinterpret_cast<const std::byte*>(b.in),
                          reinterpret_cast<std::byte*>(rows), row_bytes,
                          Element::kF32};
  b.combine.leaves[0] = {reinterpret_cast<const std::byte*>(rows),
                         reinterpret_cast<std::byte*>(b.out), row_bytes,
                         Element::kF32};

  b.planned = arena.Take<float>(kTokens * kColumns);
  b.plan_dispatch = {.plan = p, .rows = b.dispatch};
  b.plan_dispatch.rows.leaves[0].out = reinterpret_cast<std::byte*>(b.planned);

  ExpertRowsParams& e = b.expert_rows;
  e.local_experts = kExperts;
  e.expert_alignment = 1;
  e.num_pairs = kPairs;
  e.expert_capacity = kPairs;
  e.recv_topk_idx = p.recv_topk_idx;
  e.expert_rows = arena.Take<int32_t>(kPairs);
  e.empty_ranges = arena.Take<int32_t>(2 * (kExperts + 1));
  e.workspace = arena.Take<int32_t>(ExpertRowsWorkspaceSize(kPairs, kExperts));

  DispatchPermuteParams& d = b.dispatch_permute;
  d.rows = b.dispatch;
  d.rows.leaves[0].out =
      reinterpret_cast<std::byte*>(arena.Take<float>(kTokens * kColumns));
  d.num_grouped = 1;
  d.top_k = kTopK;
  d.num_ranges = kExperts + 1;
  d.recv_counts = p.recv_counts;
  d.recv_src = p.recv_src;
  d.expert_rows = e.expert_rows;
  d.empty_ranges = e.empty_ranges;
  d.workspace = arena.Take<uint64_t>(ProgressLayout(1).size());
  b.grouped = arena.Take<float>(kPairs * kColumns);
  d.grouped[0] = reinterpret_cast<std::byte*>(b.grouped);
  return b;
}

// What dispatch_permute makes of `in`: the tokens of each expert in turn.
std::vector<float> Grouped(const std::vector<int32_t>& ids,
                           const std::vector<float>& in) {
  std::vector<float> out;
  for (int32_t expert = 0; expert < kExperts; ++expert) {
    for (int32_t pair = 0; pair < kPairs; ++pair) {
      if (ids[pair] != expert) continue;
      const auto row = in.begin() + pair / kTopK * kColumns;
      out.insert(out.end(), row, row + kColumns);
    }
  }
  return out;
}

std::string RunOnce(int ordinal, cudaStream_t stream) {
  Arena arena(ControlLayout(1).size() + (64 << 10), stream);
  if (arena.status() != cudaSuccess) {
    return Problem(ordinal, "allocation", arena.status());
  }
  const Buffers b = Cut(arena, HasBulk(ordinal));
  std::vector<int32_t> ids(kPairs);
  std::vector<float> in(kTokens * kColumns), out(in.size()), planned(in.size());
  std::vector<float> grouped(kPairs * kColumns);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = i * 3 % kExperts;
  for (size_t i = 0; i < in.size(); ++i) in[i] = 1.5f * (i + 1);
  cudaError_t status = cudaSuccess;
  const auto check = [&](cudaError_t next) {
    if (status == cudaSuccess) status = next;
  };
  check(cudaMemcpyAsync(b.topk_idx, ids.data(), ids.size() * sizeof(int32_t),
                        cudaMemcpyHostToDevice, stream));
  check(cudaMemcpyAsync(b.in, in.data(), in.size() * sizeof(float),
                        cudaMemcpyHostToDevice, stream));
  // A plan in a slot without windows goes the general way.
  PlanParams general = b.plan;
  general.op.slot = ControlLayout::kPlanSlots;
  if (status == cudaSuccess) check(LaunchPlan(general, stream));
  if (status == cudaSuccess) check(LaunchPlan(b.plan, stream));
  if (status == cudaSuccess) {
    check(LaunchPlanDispatch(b.plan_dispatch, stream));
  }
  // Rows go there and back by the kernels for few tokens and by the others.
  if (status == cudaSuccess) check(LaunchDispatch(b.dispatch, stream));
  if (status == cudaSuccess) check(LaunchGeneralCombine(b.combine, stream));
  RowParams again = b.dispatch;
  again.leaves[0].in = reinterpret_cast<const std::byte*>(b.out);
  if (status == cudaSuccess) check(LaunchGeneralDispatch(again, stream));
  if (status == cudaSuccess) check(LaunchCombine(b.combine, stream));
  if (status == cudaSuccess) check(LaunchExpertRows(b.expert_rows, stream));
  if (status == cudaSuccess) {
    check(LaunchDispatchPermute(b.dispatch_permute, stream));
  }
  check(cudaMemcpyAsync(out.data(), b.out, out.size() * sizeof(float),
                        cudaMemcpyDeviceToHost, stream));
  check(cudaMemcpyAsync(grouped.data(), b.grouped,
                        grouped.size() * sizeof(float), cudaMemcpyDeviceToHost,
                        stream));
  check(cudaMemcpyAsync(planned.data(), b.planned,
                        planned.size() * sizeof(float), cudaMemcpyDeviceToHost,
                        stream));
  check(cudaStreamSynchronize(stream));
  if (status != cudaSuccess) return Problem(ordinal, "self-test", status);
  if (in != out || in != planned || grouped != Grouped(ids, in)) {
    return "GPU " + std::to_string(ordinal) +
           ": self-test moved rows to wrong places";
  }
  return "";
}

std::string Run(int ordinal) {
  cudaStream_t stream;
  const cudaError_t status =
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (status != cudaSuccess) return Problem(ordinal, "stream", status);
  const std::string problem = RunOnce(ordinal, stream);
  cudaStreamDestroy(stream);
  return problem;
}

std::string Load(int ordinal, const void* kernel) {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (status == cudaSuccess) return "";
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  const std::string architecture =
      std::to_string(major) + std::to_string(minor);
  return Problem(ordinal, "loading a kernel", status) + "; the GPU is sm_" +
         architecture +
         ", jax_ep was built for " JAX_EP_CUDA_ARCHITECTURES
         "; rebuild with -DCMAKE_CUDA_ARCHITECTURES=" +
         architecture;
}

}  // namespace

const char* Architectures() { return JAX_EP_CUDA_ARCHITECTURES; }

bool HasBulk(int ordinal) {
  // What the kernels use beside their dynamic shared memory.
  constexpr int kStaticBytes = 24 << 10;
  int major = 0, shared = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                         ordinal);
  return major >= 9 && shared >= kBulkSharedBytes + kStaticBytes;
}

std::string SelfTest(int ordinal) {
  const OnDevice current(ordinal);
  cudaError_t status = current.status();
  if (status != cudaSuccess) return Problem(ordinal, "cudaSetDevice", status);
  std::string problem;
  std::vector<const void*> kernels = ExpertRowsKernelAddresses();
  kernels.insert(
      kernels.end(),
      {PlanKernelAddress(), DispatchKernelAddress(), FewDispatchKernelAddress(),
       CombineKernelAddress(), DispatchPermuteKernelAddress(),
       FanOutRestKernelAddress(), PermuteKernelAddress(),
       UnpermuteKernelAddress(), RowDotsKernelAddress()});
  for (const auto& more :
       {PushedPlanKernelAddresses(), PlanDispatchKernelAddresses(),
        FewCombineKernelAddresses(), LowLatencyDispatchKernelAddresses(),
        LowLatencyCombineKernelAddresses()}) {
    kernels.insert(kernels.end(), more.begin(), more.end());
  }
  for (const void* kernel : kernels) {
    problem = Load(ordinal, kernel);
    if (!problem.empty()) break;
  }
  if (problem.empty() && HasBulk(ordinal)) {
    std::vector<const void*> with_bulk = FewCombineKernelAddresses();
    with_bulk.insert(with_bulk.end(),
                     {DispatchKernelAddress(), CombineKernelAddress(),
                      DispatchPermuteKernelAddress()});
    for (const void* kernel : with_bulk) {
      status = cudaFuncSetAttribute(kernel,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    kBulkSharedBytes);
      if (status != cudaSuccess) {
        problem = Problem(ordinal, "asking for shared memory", status);
      }
    }
  }
  if (problem.empty()) problem = Run(ordinal);
  return problem;
}

}  // namespace jax_ep
