// low_latency_dispatch: rows to their ranks in one launch without a plan.
//
// Launch: max(view.num_sms, 2) blocks of kWindowThreads.
// Roles:  the first blocks send: rows and, before them, the expert ids of all
//         tokens to every peer. The others receive what comes through the
//         windows as it comes. By rank a row has a fixed place, and senders
//         store this rank's own rows too. By expert a receiving block first
//         counts the ids of all ranks, from which the places of its tokens
//         follow, and copies its share of the own rows straight from x. In each
//         block the control warp keeps the launch in step
//         (cc/few_tokens/window.cuh).
// Reads:  x, topk_idx, topk_weights; this rank's windows. Writes: the peers'
//         windows; rows, scales, counts, places, recv_weights of this rank.
//         Rows that nothing came to are not written.
// Order:  every word and line says itself whether it has come; nothing
//         else orders them. No block waits for another of its launch: senders
//         wait for nobody, receivers for the peers' senders, which stand before
//         their receivers in the order in which blocks get multiprocessors.
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "cc/few_tokens/low_latency.h"
#include "cc/few_tokens/window_dispatcher.cuh"

namespace jax_ep {

// Places that a block keeps in shared memory.
static constexpr int32_t kKeptPlaces = 1024;

// By expert. A token has one row in an expert, however often it names it.
// Lane l of a warp has choice l % K of the warp's token l / K.

// Counts, for every source and local expert, the rows of all tokens and those
// of tokens before `begin`; leaves the local ids of tokens [begin, end) where
// their places will be. All working warps of a block.
template <typename Source, bool kByExpert>
__device__ void WindowDispatcher<Source, kByExpert>::CountIds(
    int32_t begin, int32_t end, const Places& places, int32_t* before,
    int32_t* total) const {
  // Enough for 128 tokens of two ranks, eight experts each.
  constexpr int kLooks = 5;
  const int32_t tokens = launch.by_top_k.Divide(kWarpSize);
  const int32_t in_warp = launch.by_top_k.Divide(lane);
  const int32_t k = lane - in_warp * top_k;
  const bool used = in_warp < tokens;
  const int32_t rows = num_ranks * num_tokens;
  const int32_t step = kWorkWarps * tokens;
  for (int32_t base = warp * tokens; base < rows; base += kLooks * step) {
    const auto word_of = [&](int j) -> AwaitedWord {
      const int32_t row = base + j * step + in_warp;
      const int32_t source = launch.by_tokens.Divide(row);
      const int32_t pair = (row - source * num_tokens) * top_k + k;
      return {window.Words(me, source) + pair, source};
    };
    uint64_t words[kLooks];
#pragma unroll
    for (int j = 0; j < kLooks; ++j) {
      words[j] = window.Word(~0u);
      const int32_t row = base + j * step + in_warp;
      if (!used || row >= rows) continue;
      const int32_t source = launch.by_tokens.Divide(row);
      const int32_t pair = (row - source * num_tokens) * top_k + k;
      words[j] = source == me
                     ? window.Word(static_cast<uint32_t>(
                           __ldg(params.base.topk_idx + pair)))
                     : ptx::LoadRelaxedSys(window.Words(me, source) + pair);
    }
    WaitWords(window, words, word_of, "the ids");
#pragma unroll
    for (int j = 0; j < kLooks; ++j) {
      const int32_t row = base + j * step + in_warp;
      if (base + j * step >= rows) break;
      int32_t local = -1, source = 0, token = 0;
      if (used && row < rows) {
        source = launch.by_tokens.Divide(row);
        token = row - source * num_tokens;
        local = experts.LocalOn(me, static_cast<int32_t>(words[j]));
        if (token >= begin && token < end) {
          places.Of(source, token, top_k)[k] = local;
        }
      }
      __syncwarp();
      const uint32_t key = local >= 0
                               ? in_warp << 16 | local
                               : 0x80000000u | static_cast<uint32_t>(lane);
      const uint32_t same = __match_any_sync(kAllLanes, key);
      if (local < 0 || __ffs(same) - 1 != lane) continue;
      const int32_t counter = source * experts.local_experts + local;
      atomicAdd(total + counter, 1);
      if (token < begin) atomicAdd(before + counter, 1);
    }
  }
}

// The places of tokens [begin, end) of all sources, a warp to a source. `next`
// counts, for every source and local expert, from its tokens' first row on.
template <typename Source, bool kByExpert>
__device__ void WindowDispatcher<Source, kByExpert>::FindPlaces(
    int32_t begin, int32_t end, const Places& places, int32_t* next) const {
  const int32_t tokens = launch.by_top_k.Divide(kWarpSize);
  const int32_t in_warp = launch.by_top_k.Divide(lane);
  const int32_t k = lane - in_warp * top_k;
  const int32_t rows =
      num_ranks * static_cast<int32_t>(params.base.layout.max_tokens);
  for (int32_t source = warp; source < num_ranks; source += kWorkWarps) {
    int32_t* counters = next + source * experts.local_experts;
    for (int32_t first = begin; first < end; first += tokens) {
      const int32_t token = first + in_warp;
      const bool used = in_warp < tokens && token < end;
      int32_t* const at = places.Of(source, token, top_k) + k;
      const int32_t local = used ? *at : -1;
      const uint32_t none = 0x80000000u | static_cast<uint32_t>(lane);
      const uint32_t same = __match_any_sync(
          kAllLanes, local >= 0 ? in_warp << 16 | local : none);
      const bool counts = local >= 0 && __ffs(same) - 1 == lane;
      const uint32_t alike = __match_any_sync(
          kAllLanes, counts ? static_cast<uint32_t>(local) : none);
      int32_t place = -1;
      if (counts) {
        place =
            local * rows + counters[local] + __popc(alike & ((1u << lane) - 1));
      }
      __syncwarp();
      if (counts && __ffs(alike) - 1 == lane) {
        counters[local] += __popc(alike);
      }
      __syncwarp();
      place = __shfl_sync(kAllLanes, place, __ffs(same) - 1);
      if (!used) continue;
      place = local >= 0 ? place : -1;
      *at = place;
      // Two blocks may share a token; they find the same.
      if (launch.keeps_places) {
        params.places[(source * params.base.stride + token) * top_k + k] =
            place;
      }
    }
  }
}

template <typename Source, bool kByExpert>
__device__ void WindowDispatcher<Source, kByExpert>::ReceiveByExpert() const {
  __shared__ int32_t before[kMaxCountedExperts];
  __shared__ int32_t total[kMaxCountedExperts];
  __shared__ int32_t kept[kKeptPlaces];
  const int32_t block = blockIdx.x - launch.num_senders;
  // This block's items, and the tokens that they are of.
  const int32_t num_items = num_tokens * launch.num_chunks;
  const int32_t first = min(block * launch.share, num_items);
  const int32_t last = min(first + launch.share, num_items);
  const int32_t begin = launch.by_chunks.Divide(first);
  const int32_t end = launch.by_chunks.Divide(last + launch.num_chunks - 1);
  const int32_t local_experts = experts.local_experts;
  const Places places = launch.keeps_places
                            ? Places{kept, end - begin, begin}
                            : Places{params.places, params.base.stride, 0};
  const auto count = [&] {
    HasEpoch(window);
    ForEach(threadIdx.x, kWorkThreads, num_ranks * local_experts,
            [&](int32_t i) { before[i] = total[i] = 0; });
    ptx::SyncThreads(kWorkBarrier, kWorkThreads);
    CountIds(begin, end, places, before, total);
    ptx::SyncThreads(kWorkBarrier, kWorkThreads);
    // Rows of earlier sources stand before those of later ones.
    ForEach(threadIdx.x, kWorkThreads, local_experts, [&](int32_t e) {
      int32_t rows = 0;
      for (int32_t source = 0; source < num_ranks; ++source) {
        before[source * local_experts + e] += rows;
        rows += total[source * local_experts + e];
      }
      if (block == 0) params.counts[e] = rows;
    });
    ptx::SyncThreads(kWorkBarrier, kWorkThreads);
    FindPlaces(begin, end, places, before);
    ptx::SyncThreads(kWorkBarrier, kWorkThreads);
  };
  CopyOwn(first, last, count, places);
  Receive(warp, kWorkWarps, first, (last - first) * (num_ranks - 1), places);
}

namespace {

template <typename Source, bool kByExpert>
__global__ void __launch_bounds__(kWindowThreads, 1)
    DispatchKernel(const __grid_constant__ DispatchLaunch launch) {
  Window window(launch.params.base, "low_latency_dispatch",
                WindowKind::kDispatch);
  if (threadIdx.x >= kWorkThreads) {
    return KeepStep(window, launch.num_senders);
  }
  const WindowDispatcher<Source, kByExpert> dispatcher(launch, window);
  if (static_cast<int32_t>(blockIdx.x) < launch.num_senders) {
    dispatcher.Send();
  } else if constexpr (kByExpert) {
    dispatcher.ReceiveByExpert();
  } else {
    dispatcher.ReceiveByRank();
  }
  WarpDone(window);
}

using Kernel = void (*)(DispatchLaunch);

// By rank and by expert, for each kind of row.
constexpr Kernel kKernels[] = {
    &DispatchKernel<Plain, false>,
    &DispatchKernel<Plain, true>,
    &DispatchKernel<Quantized<Bf16>, false>,
    &DispatchKernel<Quantized<Bf16>, true>,
    &DispatchKernel<Quantized<F16>, false>,
    &DispatchKernel<Quantized<F16>, true>,
    &DispatchKernel<Quantized<float>, false>,
    &DispatchKernel<Quantized<float>, true>,
};

Kernel KernelFor(const LowLatencyDispatchParams& params) {
  const Element element = params.base.element;
  const int32_t source = !params.quantize            ? 0
                         : element == Element::kBf16 ? 1
                         : element == Element::kF16  ? 2
                                                     : 3;
  return kKernels[2 * source + params.base.by_expert];
}

// Blocks of 32 that send. By rank they store own rows too, and still it was the
// receivers that 128 tokens waited for; quantised rows of hidden 7168 then take
// one round. By expert a row is received once for every expert
// (docs/performance.md).
int32_t SendersOf32(const LowLatencyDispatchParams& params) {
  if (params.base.by_expert) return params.quantize ? 8 : 6;
  return params.quantize ? 20 : 16;
}

}  // namespace

cudaError_t LaunchLowLatencyDispatch(const LowLatencyDispatchParams& params,
                                     cudaStream_t stream) {
  const LowLatencyParams& base = params.base;
  const int32_t num_ranks = base.op.view.num_ranks;
  const int32_t x_bytes = base.hidden * ElementBytes(base.element);
  const int32_t row_bytes = params.quantize ? base.hidden : x_bytes;
  const uint64_t bits = reinterpret_cast<uint64_t>(params.x) |
                        reinterpret_cast<uint64_t>(params.rows) |
                        static_cast<uint64_t>(x_bytes | row_bytes);
  if (bits % 16 != 0) return cudaErrorMisalignedAddress;
  const int32_t units = params.quantize ? ScaledLines::kUnits : Lines::kUnits;
  const int32_t num_chunks = (row_bytes / 16 + units - 1) / units;
  const int32_t blocks = std::max(base.op.view.num_sms, 2);
  const int32_t num_senders = std::max(blocks * SendersOf32(params) / 32, 1);
  // By expert, of the receiving blocks.
  const int32_t receivers = blocks - num_senders;
  const auto share_of = [&](int32_t items) {
    return (items + receivers - 1) / receivers;
  };
  int32_t share = share_of(base.num_tokens * num_chunks);
  const bool keeps_places =
      int64_t{num_ranks} * (share / num_chunks + 2) * base.top_k <= kKeptPlaces;
  // Whole tokens: in global memory places would meet ids of another block.
  if (!keeps_places) share = share_of(base.num_tokens) * num_chunks;
  const DispatchLaunch launch = {
      .params = params,
      .experts = Experts(base.num_experts, num_ranks),
      .num_senders = num_senders,
      .num_chunks = num_chunks,
      .x_bytes = x_bytes,
      .row_bytes = row_bytes,
      .num_scales = (base.hidden + kScaleBlock - 1) / kScaleBlock,
      .share = share,
      .keeps_places = keeps_places,
      .by_chunks = Divisor(num_chunks),
      .by_peers = Divisor(std::max(num_ranks - 1, 1)),
      .by_tokens = Divisor(base.num_tokens),
      .by_top_k = Divisor(base.top_k),
      .by_max_tokens = Divisor(base.stride),
  };
  KernelFor(params)<<<blocks, kWindowThreads, 0, stream>>>(launch);
  return cudaPeekAtLastError();
}

std::vector<const void*> LowLatencyDispatchKernelAddresses() {
  std::vector<const void*> addresses;
  for (const Kernel kernel : kKernels) {
    addresses.push_back(reinterpret_cast<const void*>(kernel));
  }
  return addresses;
}

}  // namespace jax_ep
