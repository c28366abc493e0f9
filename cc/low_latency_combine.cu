// low_latency_combine: rows back to their tokens and summed, in one launch.
//
// Launch: max(view.num_sms, 2) blocks of kWindowThreads.
// Roles:  the first blocks send this rank's rows of the peers' tokens, each of
//         them the sum over this rank's experts; and before that block 0 the
//         router's weights to the ranks of the experts (by expert alone). The
//         others receive: for each of this rank's tokens they add up its rows
//         in rank order, this rank's own among them.
// Reads:  y, places, topk_idx, topk_weights; this rank's windows. Writes: the
//         peers' windows; out.
// Order:  as in low_latency_dispatch. Senders wait for the peers' weights
// alone,
//         which block 0 stores before it waits for anything.
//
// A rank's sum over its experts rounds once to the rows' type before it
// travels, the sum over ranks once more: sums in float32, products and sums
// apart.
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "cc/device/weighted_rows.cuh"
#include "cc/device/window.cuh"
#include "cc/low_latency.h"

namespace jax_ep {
namespace {

struct Launch {
  LowLatencyCombineParams params;
  Experts experts;
  int32_t num_senders;  // blocks
  int32_t num_chunks;   // of a row
  int32_t row_bytes;
  Divisor by_chunks;
  Divisor by_peers;  // num_ranks - 1
};

template <typename T, typename Protocol, bool kWide>
struct Combiner {
  using Row = Elements<T, uint4>;
  using Units = uint4[Protocol::kPerLane];

  const Launch& launch;
  const LowLatencyCombineParams& params;
  Window& window;
  const Experts& experts;
  int32_t me;
  int32_t num_ranks;
  int32_t num_tokens;
  int32_t top_k;
  int32_t num_units;  // of a row
  int32_t warp;
  int32_t lane;

  __device__ Combiner(const Launch& l, Window& w)
      : launch(l),
        params(l.params),
        window(w),
        experts(l.experts),
        me(w.rank()),
        num_ranks(w.num_ranks()),
        num_tokens(l.params.base.num_tokens),
        top_k(l.params.base.top_k),
        num_units((l.row_bytes + 15) / 16),
        warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize) {}

  // A running sum of the lane's units.
  struct Sum {
    float at[Protocol::kPerLane][Row::kSize];

    // Minus zero is the neutral element: a lone -0.0 stays what it is.
    __device__ __forceinline__ void Begin(bool empty) {
#pragma unroll
      for (int i = 0; i < Protocol::kPerLane; ++i) {
#pragma unroll
        for (int e = 0; e < Row::kSize; ++e) at[i][e] = empty ? 0.f : -0.f;
      }
    }
    __device__ __forceinline__ void Add(const Units& units) {
#pragma unroll
      for (int i = 0; i < Protocol::kPerLane; ++i) {
        const Row row = Row::From(units[i]);
#pragma unroll
        for (int e = 0; e < Row::kSize; ++e) at[i][e] += Widen(row.at[e]);
      }
    }
    __device__ __forceinline__ void AddTimes(float weight, const Units& units) {
#pragma unroll
      for (int i = 0; i < Protocol::kPerLane; ++i) {
        const Row row = Row::From(units[i]);
#pragma unroll
        for (int e = 0; e < Row::kSize; ++e) {
          at[i][e] += Times(weight, Widen(row.at[e]));
        }
      }
    }
    __device__ __forceinline__ void Round(Units& units) const {
#pragma unroll
      for (int i = 0; i < Protocol::kPerLane; ++i) {
        Row row;
#pragma unroll
        for (int e = 0; e < Row::kSize; ++e) row.at[e] = Narrow<T>(at[i][e]);
        units[i] = row.ToUnit();
      }
    }
  };

  __device__ void LoadY(int32_t place, int32_t first, Units& units) const {
    LoadRow<Protocol, kWide>(params.y + int64_t{place} * launch.row_bytes,
                             first, num_units - first, launch.row_bytes, units);
  }
  // The places of a token's rows on this rank, lane k's that of its k-th id.
  __device__ int32_t PlaceOf(int32_t source, int32_t token) const {
    const int32_t row = source * params.base.stride + token;
    return lane < top_k ? __ldg(params.places + int64_t{row} * top_k + lane)
                        : -1;
  }

  // A part of a row of the peers' tokens: token after token, of all peers in
  // turn.
  struct Item {
    int32_t source;
    int32_t token;
    int32_t chunk;
    int32_t first;  // unit
  };
  __device__ Item PeersItem(int32_t i) const {
    const int32_t pair = launch.by_chunks.Divide(i);
    const int32_t token = launch.by_peers.Divide(pair);
    int32_t source = me + 1 + pair - token * (num_ranks - 1);
    if (source >= num_ranks) source -= num_ranks;
    const int32_t chunk = i - pair * launch.num_chunks;
    return {source, token, chunk, chunk * Protocol::kUnits};
  }
  __device__ void Push(const Item& item, const Units& units) const {
    Protocol::Store(window.Chunk(item.source, me, item.token, item.chunk),
                    units, num_units - item.first, window.epoch);
  }

  __device__ void SendWeights() const;
  template <typename WeightOf>
  __device__ void SumExperts(int32_t place, int32_t first,
                             const WeightOf& weight_of, Units& units) const;
  __device__ void SendByRank() const;
  __device__ void SendByExpert() const;
  __device__ void Receive() const;
};

// Each weight to the rank of its expert. One block for all: another may have to
// wait for the multiprocessor of one that waits.
template <typename T, typename Protocol, bool kWide>
__device__ void Combiner<T, Protocol, kWide>::SendWeights() const {
  constexpr int kBatch = 4;
  const int32_t pairs = num_tokens * top_k;
  for (int32_t base = threadIdx.x; base < pairs;
       base += kBatch * kWorkThreads) {
    int32_t ranks[kBatch];
    float weights[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int32_t i = base + j * kWorkThreads;
      ranks[j] = -1;
      if (i >= pairs) continue;
      ranks[j] = experts.RankOf(__ldg(params.base.topk_idx + i));
      weights[j] = __ldg(params.topk_weights + i);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (ranks[j] < 0 || ranks[j] == me) continue;
      ptx::StoreRelaxedSys(window.Words(ranks[j], me) + base + j * kWorkThreads,
                           window.Word(__float_as_uint(weights[j])));
    }
  }
}

// The weighted sum of the rows at the lanes' places, in their order; some place
// is >= 0. weight_of() is a lane's weight, and is called when rows are on their
// way.
template <typename T, typename Protocol, bool kWide>
template <typename WeightOf>
__device__ __forceinline__ void Combiner<T, Protocol, kWide>::SumExperts(
    int32_t place, int32_t first, const WeightOf& weight_of,
    Units& units) const {
  // More would not fit the registers.
  constexpr int kInFlight = Protocol::kPerLane > 3 ? 2 : 3;
  Units rows[kInFlight];
  uint32_t to_load = __ballot_sync(kAllLanes, place >= 0);
  uint32_t to_add = to_load;
  const auto load = [&](Units& row) {
    if (to_load == 0) return;
    LoadY(__shfl_sync(kAllLanes, place, __ffs(to_load) - 1), first, row);
    to_load &= to_load - 1;
  };
#pragma unroll
  for (int j = 0; j < kInFlight; ++j) load(rows[j]);
  const float weight = weight_of();
  Sum sum;
  sum.Begin(false);
  while (to_add != 0) {
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (to_add == 0) break;
      sum.AddTimes(__shfl_sync(kAllLanes, weight, __ffs(to_add) - 1), rows[j]);
      to_add &= to_add - 1;
      load(rows[j]);
    }
  }
  sum.Round(units);
}

// Rows of the peers' tokens as they are.
template <typename T, typename Protocol, bool kWide>
__device__ void Combiner<T, Protocol, kWide>::SendByRank() const {
  constexpr int kInFlight = 4;
  const int32_t count = launch.num_senders * kWorkWarps;
  const int32_t index = warp * launch.num_senders + blockIdx.x;
  const int32_t num_items = num_tokens * (num_ranks - 1) * launch.num_chunks;
  bool begun = false;
  for (int32_t base = index; base < num_items || !begun;
       base += kInFlight * count) {
    Units units[kInFlight];
    int32_t places[kInFlight];
    // All that may have come: whether a row did is known when it is here.
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (base + j * count >= num_items) continue;
      const Item item = PeersItem(base + j * count);
      places[j] = PlaceOf(item.source, item.token);
      LoadY(item.source * params.base.stride + item.token, item.first,
            units[j]);
    }
    if (!begun) window.Begin();
    begun = true;
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (base + j * count >= num_items) continue;
      if (!__any_sync(kAllLanes, places[j] >= 0)) continue;
      Push(PeersItem(base + j * count), units[j]);
    }
  }
}

// The sums over this rank's experts.
template <typename T, typename Protocol, bool kWide>
__device__ void Combiner<T, Protocol, kWide>::SendByExpert() const {
  const int32_t count = launch.num_senders * kWorkWarps;
  const int32_t index = warp * launch.num_senders + blockIdx.x;
  const int32_t num_items = num_tokens * (num_ranks - 1) * launch.num_chunks;
  const auto weight_word = [&](const Item& item) {
    return window.Words(me, item.source) + item.token * top_k + lane;
  };
  // Of the next item places and weights are looked at while this one's rows are
  // on their way.
  int32_t next_place = -1;
  uint64_t next_word = 0;
  const auto look_at_places = [&](int32_t i) {
    next_place = -1;
    if (i >= num_items) return;
    const Item item = PeersItem(i);
    next_place = PlaceOf(item.source, item.token);
  };
  const auto look_at_weights = [&](int32_t i) {
    if (i >= num_items || lane >= top_k) return;
    next_word = ptx::LoadRelaxedSys(weight_word(PeersItem(i)));
  };
  look_at_places(index);
  window.Begin();
  if (blockIdx.x == 0) SendWeights();
  look_at_weights(index);
  for (int32_t i = index; i < num_items; i += count) {
    const int32_t place = next_place;
    const uint64_t word = next_word;
    look_at_places(i + count);
    look_at_weights(i + count);
    if (!__any_sync(kAllLanes, place >= 0)) continue;
    const Item item = PeersItem(i);
    Units units;
    SumExperts(
        place, item.first,
        [&] {
          float weight = 0;
          if (place >= 0) {
            weight = __uint_as_float(WaitWord(window, weight_word(item), word,
                                              "the weights", item.source));
          }
          __syncwarp();
          return weight;
        },
        units);
    Push(item, units);
  }
}

template <typename T, typename Protocol, bool kWide>
__device__ void Combiner<T, Protocol, kWide>::Receive() const {
  const int32_t blocks = gridDim.x - launch.num_senders;
  const int32_t index = warp * blocks + blockIdx.x - launch.num_senders;
  const int32_t count = blocks * kWorkWarps;
  const int32_t num_items = num_tokens * launch.num_chunks;
  const bool by_expert = params.base.by_expert;
  // Of the next item, while this one's rows are on their way.
  int32_t next_id = -1, next_place = -1;
  float next_weight = 0;
  const auto look_ahead = [&](int32_t i) {
    if (i >= num_items || lane >= top_k) return;
    const int32_t token = launch.by_chunks.Divide(i);
    next_id = __ldg(params.base.topk_idx + token * top_k + lane);
    if (!by_expert) return;
    next_place = PlaceOf(me, token);
    next_weight = __ldg(params.topk_weights + token * top_k + lane);
  };
  look_ahead(index);
  window.Begin();
  for (int32_t i = index; i < num_items; i += count) {
    const int32_t token = launch.by_chunks.Divide(i);
    const int32_t chunk = i - token * launch.num_chunks;
    const int32_t first = chunk * Protocol::kUnits;
    const int32_t left = num_units - first;
    const int32_t place = next_place;
    const float weight = next_weight;
    const uint64_t ranks = RanksOfWarp(experts.RankOf(next_id), num_ranks);
    look_ahead(i + count);
    uint64_t peers = ranks & ~(uint64_t{1} << me);
    // A look at the first peer's rows while this rank's own are summed.
    uint4 words[kChunkWords];
    const auto look = [&] {
      if (peers == 0) return;
      const int32_t peer = __ffsll(static_cast<long long>(peers)) - 1;
      LookAt<Protocol>(window.Chunk(me, peer, token, chunk), left, words);
    };
    look();
    Units own;
    if (ranks >> me & 1) {
      if (by_expert) {
        SumExperts(place, first, [&] { return weight; }, own);
      } else {
        LoadY(me * params.base.stride + token, first, own);
      }
    }
    Sum sum;
    sum.Begin(ranks == 0);
    for (uint64_t rest = ranks; rest != 0; rest &= rest - 1) {
      const int32_t rank = __ffsll(static_cast<long long>(rest)) - 1;
      if (rank == me) {
        sum.Add(own);
        continue;
      }
      Units units;
      WaitChunk<Protocol>(window, window.Chunk(me, rank, token, chunk), left,
                          rank, words, units);
      peers &= peers - 1;
      look();
      sum.Add(units);
    }
    Units units;
    sum.Round(units);
    StoreRow<Protocol, kWide>(params.out + int64_t{token} * launch.row_bytes,
                              first, left, launch.row_bytes, units);
  }
}

template <typename T, typename Protocol, bool kWide>
__global__ void __launch_bounds__(kWindowThreads, 1)
    CombineKernel(const __grid_constant__ Launch launch) {
  Window window(launch.params.base, "low_latency_combine",
                WindowKind::kCombine);
  if (threadIdx.x >= kWorkThreads) {
    return KeepStep(window, launch.num_senders);
  }
  const Combiner<T, Protocol, kWide> combiner(launch, window);
  if (static_cast<int32_t>(blockIdx.x) < launch.num_senders) {
    if (window.num_ranks() == 1) {
      window.Begin();  // and nobody is there
    } else if (launch.params.base.by_expert) {
      combiner.SendByExpert();
    } else {
      combiner.SendByRank();
    }
  } else {
    combiner.Receive();
  }
  WarpDone(window);
}

using Kernel = void (*)(Launch);

// The kernels by number: four for each element.
constexpr Kernel kKernels[] = {
    &CombineKernel<Bf16, Words, false>,  &CombineKernel<Bf16, Words, true>,
    &CombineKernel<Bf16, Lines, false>,  &CombineKernel<Bf16, Lines, true>,
    &CombineKernel<F16, Words, false>,   &CombineKernel<F16, Words, true>,
    &CombineKernel<F16, Lines, false>,   &CombineKernel<F16, Lines, true>,
    &CombineKernel<float, Words, false>, &CombineKernel<float, Words, true>,
    &CombineKernel<float, Lines, false>, &CombineKernel<float, Lines, true>,
};

}  // namespace

cudaError_t LaunchLowLatencyCombine(const LowLatencyCombineParams& params,
                                    cudaStream_t stream) {
  const LowLatencyParams& base = params.base;
  const int32_t num_ranks = base.op.view.num_ranks;
  const int32_t row_bytes = base.hidden * ElementBytes(base.element);
  const bool wide = (reinterpret_cast<uint64_t>(params.y) |
                     reinterpret_cast<uint64_t>(params.out) |
                     static_cast<uint64_t>(row_bytes)) %
                        16 ==
                    0;
  // From sizes alone: equal on all ranks.
  const bool lines = UseLines(row_bytes, base.num_tokens);
  const int32_t units = lines ? Lines::kUnits : Words::kUnits;
  const int32_t num_chunks = ((row_bytes + 15) / 16 + units - 1) / units;
  const int32_t blocks = std::max(base.op.view.num_sms, 2);
  // By expert both halves read a row of every expert.
  const int32_t num_senders =
      std::max(blocks * (base.by_expert ? 16 : 12) / 32, 1);
  const Launch launch = {
      .params = params,
      .experts = Experts(base.num_experts, num_ranks),
      .num_senders = num_senders,
      .num_chunks = num_chunks,
      .row_bytes = row_bytes,
      .by_chunks = Divisor(num_chunks),
      .by_peers = Divisor(std::max(num_ranks - 1, 1)),
  };
  const int32_t element = base.element == Element::kBf16  ? 0
                          : base.element == Element::kF16 ? 1
                                                          : 2;
  kKernels[4 * element + 2 * lines +
           wide]<<<blocks, kWindowThreads, 0, stream>>>(launch);
  return cudaPeekAtLastError();
}

std::vector<const void*> LowLatencyCombineKernelAddresses() {
  std::vector<const void*> addresses;
  for (const Kernel kernel : kKernels) {
    addresses.push_back(reinterpret_cast<const void*>(kernel));
  }
  return addresses;
}

}  // namespace jax_ep
