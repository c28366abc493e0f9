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

#include "cc/few_tokens/low_latency.h"
#include "cc/few_tokens/window_chunks.cuh"
#include "cc/few_tokens/window_worker.cuh"
#include "cc/rows/weighted_rows.cuh"

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

// Parts of rows that a warp has in flight: as they are, sending and receiving;
// and rows of the sum over this rank's experts, one sum at a time.
constexpr int kSending = 6;
constexpr int kReceiving = 2;
constexpr int kSummedRows = 6;

template <typename T, bool kByExpert>
struct Combiner : WindowWorker<Launch> {
  using Protocol = Lines;
  using Row = Elements<T, uint4>;

  using WindowWorker<Launch>::WindowWorker;

  // A running sum of the lane's units.
  struct Sum {
    float at[kPerLane][Row::kSize];

    // Minus zero is the neutral element: a lone -0.0 stays what it is.
    __device__ __forceinline__ void Begin(bool empty) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
#pragma unroll
        for (int e = 0; e < Row::kSize; ++e) at[i][e] = empty ? 0.f : -0.f;
      }
    }
    __device__ __forceinline__ void Add(const Units& units) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const Row row = Row::From(units[i]);
#pragma unroll
        for (int e = 0; e < Row::kSize; ++e) at[i][e] += Widen(row.at[e]);
      }
    }
    __device__ __forceinline__ void AddTimes(float weight, const Units& units) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const Row row = Row::From(units[i]);
#pragma unroll
        for (int e = 0; e < Row::kSize; ++e) {
          at[i][e] += Times(weight, Widen(row.at[e]));
        }
      }
    }
    __device__ __forceinline__ void Round(Units& units) const {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        Row row;
#pragma unroll
        for (int e = 0; e < Row::kSize; ++e) row.at[e] = Narrow<T>(at[i][e]);
        units[i] = row.ToUnit();
      }
    }
  };

  __device__ void LoadY(int32_t place, int32_t first, Units& units) const {
    LoadRow<Protocol>(params.y + int64_t{place} * launch.row_bytes, first,
                      num_units - first, units);
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
    StoreChunk<Protocol>(window.Chunk(item.source, me, item.token, item.chunk),
                         units, num_units - item.first, window.epoch);
  }

  // A part of the sum of the rows at the lanes' places, in their order.
  struct ExpertSum {
    // By rank a rank's own row is all there is of it.
    static constexpr int kRows = kByExpert ? kSummedRows : 1;

    Units rows[kRows];
    int32_t place;
    uint32_t to_load;
    uint32_t to_add;

    __device__ __forceinline__ void Load(const Combiner& combiner,
                                         int32_t first, Units& row) {
      if (to_load == 0) return;
      combiner.LoadY(__shfl_sync(kAllLanes, place, __ffs(to_load) - 1), first,
                     row);
      to_load &= to_load - 1;
    }
    // Asks for the first rows.
    __device__ __forceinline__ void Begin(const Combiner& combiner,
                                          int32_t lane_place, int32_t first) {
      place = lane_place;
      to_load = to_add = __ballot_sync(kAllLanes, place >= 0);
#pragma unroll
      for (int j = 0; j < kRows; ++j) Load(combiner, first, rows[j]);
    }
    __device__ __forceinline__ bool empty() const { return to_add == 0; }
    // `weight` is that of the lane's place. Some place is >= 0.
    __device__ __forceinline__ void End(const Combiner& combiner, float weight,
                                        int32_t first, Units& units) {
      Sum sum;
      sum.Begin(false);
      while (to_add != 0) {
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          if (to_add == 0) break;
          sum.AddTimes(__shfl_sync(kAllLanes, weight, __ffs(to_add) - 1),
                       rows[j]);
          to_add &= to_add - 1;
          Load(combiner, first, rows[j]);
        }
      }
      sum.Round(units);
    }
  };

  __device__ void SendWeights() const;
  __device__ void SendByRank() const;
  __device__ void SendByExpert() const;
  __device__ void Receive() const;
};

// Begins; then sends each weight to the rank of its expert. One block for all:
// another may have to wait for the multiprocessor of one that waits.
template <typename T, bool kByExpert>
__device__ void Combiner<T, kByExpert>::SendWeights() const {
  constexpr int kBatch = 4;
  const int32_t pairs = num_tokens * top_k;
  bool begun = false;
  // The lanes of a warp in step.
  for (int32_t first = threadIdx.x - lane; first < pairs || !begun;
       first += kBatch * kWorkThreads) {
    const int32_t base = first + lane;
    int32_t ids[kBatch];
    float weights[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int32_t i = base + j * kWorkThreads;
      ids[j] = -1;
      if (i >= pairs) continue;
      ids[j] = __ldg(params.base.topk_idx + i);
      weights[j] = __ldg(params.topk_weights + i);
    }
    if (!begun) HasEpoch(window);
    begun = true;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int32_t rank = experts.RankOf(ids[j]);
      if (rank < 0 || rank == me) continue;
      ptx::StoreRelaxedSys(window.Words(rank, me) + base + j * kWorkThreads,
                           window.Word(__float_as_uint(weights[j])));
    }
  }
}

// Rows of the peers' tokens as they are.
template <typename T, bool kByExpert>
__device__ void Combiner<T, kByExpert>::SendByRank() const {
  const int32_t count = launch.num_senders * kWorkWarps;
  const int32_t index = warp * launch.num_senders + blockIdx.x;
  const int32_t num_items = num_tokens * (num_ranks - 1) * launch.num_chunks;
  bool begun = false;
  for (int32_t base = index; base < num_items || !begun;
       base += kSending * count) {
    Units units[kSending];
    int32_t places[kSending];
    // All that may have come: whether a row did is known when it is here.
#pragma unroll
    for (int j = 0; j < kSending; ++j) {
      if (base + j * count >= num_items) continue;
      const Item item = PeersItem(base + j * count);
      places[j] = PlaceOf(item.source, item.token);
      LoadY(item.source * params.base.stride + item.token, item.first,
            units[j]);
    }
    if (!begun) HasEpoch(window);
    begun = true;
#pragma unroll
    for (int j = 0; j < kSending; ++j) {
      if (base + j * count >= num_items) continue;
      if (!__any_sync(kAllLanes, places[j] >= 0)) continue;
      Push(PeersItem(base + j * count), units[j]);
    }
  }
}

// The sums over this rank's experts.
template <typename T, bool kByExpert>
__device__ void Combiner<T, kByExpert>::SendByExpert() const {
  if (blockIdx.x == 0) {
    SendWeights();
  } else {
    HasEpoch(window);
  }
  const int32_t count = launch.num_senders * kWorkWarps;
  const int32_t index = warp * launch.num_senders + blockIdx.x;
  const int32_t num_items = num_tokens * (num_ranks - 1) * launch.num_chunks;
  const auto weight_word = [&](const Item& item) {
    return window.Words(me, item.source) + item.token * top_k + lane;
  };
  // Of the next item places and weights are looked at while this one's rows are
  // on their way.
  int32_t place;
  uint64_t word;
  const auto look = [&](int32_t i) {
    place = -1;
    if (i >= num_items || lane >= top_k) return;
    const Item item = PeersItem(i);
    place = PlaceOf(item.source, item.token);
    word = ptx::LoadRelaxedSys(weight_word(item));
  };
  look(index);
  for (int32_t i = index; i < num_items; i += count) {
    const Item item = PeersItem(i);
    const uint64_t looked = word;
    ExpertSum sum;
    sum.Begin(*this, place, item.first);
    look(i + count);
    if (sum.empty()) continue;
    uint64_t seen[] = {sum.place >= 0 ? looked : window.Word(0)};
    WaitWords</*kNotes=*/false>(
        window, seen,
        [&](int) -> AwaitedWord { return {weight_word(item), item.source}; },
        "the weights");
    const float weight = __uint_as_float(static_cast<uint32_t>(seen[0]));
    Units units;
    sum.End(*this, weight, item.first, units);
    Push(item, units);
  }
}

template <typename T, bool kByExpert>
__device__ void Combiner<T, kByExpert>::Receive() const {
  constexpr int kBatch = kByExpert ? 1 : kReceiving;
  const int32_t blocks = gridDim.x - launch.num_senders;
  const int32_t index = warp * blocks + blockIdx.x - launch.num_senders;
  const int32_t count = blocks * kWorkWarps;
  const int32_t num_items = num_tokens * launch.num_chunks;
  // Of the next items, while these ones' rows are on their way.
  int32_t ids[kBatch], places[kBatch];
  const auto look_ahead = [&](int32_t base) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int32_t i = base + j * count;
      ids[j] = places[j] = -1;
      if (i >= num_items || lane >= top_k) continue;
      const int32_t token = launch.by_chunks.Divide(i);
      ids[j] = __ldg(params.base.topk_idx + token * top_k + lane);
      if constexpr (kByExpert) places[j] = PlaceOf(me, token);
    }
  };
  look_ahead(index);
  HasEpoch(window);
  for (int32_t base = index; base < num_items; base += kBatch * count) {
    uint64_t ranks[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      ranks[j] = RanksOfWarp(experts.RankOf(ids[j]), num_ranks);
    }
    float weights[kBatch];
    ExpertSum sums[kBatch];
    Units words[kBatch];
    // At the row of the first peer of those that are left.
    const auto look = [&](int j, uint64_t rest) {
      rest &= ~(uint64_t{1} << me);
      if (rest == 0) return;
      const int32_t i = base + j * count;
      const int32_t peer = __ffsll(static_cast<long long>(rest)) - 1;
      const int32_t token = launch.by_chunks.Divide(i);
      const int32_t chunk = i - token * launch.num_chunks;
      LookAt<Protocol>(window.Chunk(me, peer, token, chunk),
                       num_units - chunk * Protocol::kUnits, words[j]);
    };
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int32_t i = base + j * count;
      const int32_t token = launch.by_chunks.Divide(i);
      const int32_t first = (i - token * launch.num_chunks) * Protocol::kUnits;
      look(j, ranks[j]);
      if constexpr (kByExpert) {
        sums[j].Begin(*this, places[j], first);
        weights[j] = places[j] < 0
                         ? 0
                         : __ldg(params.topk_weights + token * top_k + lane);
      } else if (ranks[j] >> me & 1) {
        LoadY(me * params.base.stride + token, first, sums[j].rows[0]);
      }
    }
    look_ahead(base + kBatch * count);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int32_t i = base + j * count;
      if (i >= num_items) continue;
      const int32_t token = launch.by_chunks.Divide(i);
      const int32_t chunk = i - token * launch.num_chunks;
      const int32_t first = chunk * Protocol::kUnits;
      const int32_t left = num_units - first;
      if (kByExpert && (ranks[j] >> me & 1)) {
        sums[j].End(*this, weights[j], first, sums[j].rows[0]);
      }
      Sum sum;
      sum.Begin(ranks[j] == 0);
      for (uint64_t rest = ranks[j]; rest != 0; rest &= rest - 1) {
        const int32_t rank = __ffsll(static_cast<long long>(rest)) - 1;
        if (rank == me) {
          sum.Add(sums[j].rows[0]);
          continue;
        }
        Units units;
        WaitChunk<Protocol, /*kNotes=*/false>(
            window, window.Chunk(me, rank, token, chunk), left, rank, words[j],
            units);
        look(j, rest & (rest - 1));
        sum.Add(units);
      }
      Units units;
      sum.Round(units);
      StoreRow<Protocol>(params.out + int64_t{token} * launch.row_bytes, first,
                         left, units);
    }
  }
}

template <typename T, bool kByExpert>
__global__ void __launch_bounds__(kWindowThreads, 1)
    CombineKernel(const __grid_constant__ Launch launch) {
  Window window(launch.params.base, "low_latency_combine",
                WindowKind::kCombine);
  if (threadIdx.x >= kWorkThreads) {
    return KeepStep(window, launch.num_senders);
  }
  const Combiner<T, kByExpert> combiner(launch, window);
  if (static_cast<int32_t>(blockIdx.x) >= launch.num_senders) {
    combiner.Receive();
  } else if constexpr (kByExpert) {
    combiner.SendByExpert();
  } else {
    combiner.SendByRank();
  }
  WarpDone(window);
}

using Kernel = void (*)(Launch);

// By rank and by expert, for each element.
constexpr Kernel kKernels[] = {
    &CombineKernel<Bf16, false>,  &CombineKernel<Bf16, true>,
    &CombineKernel<F16, false>,   &CombineKernel<F16, true>,
    &CombineKernel<float, false>, &CombineKernel<float, true>,
};

}  // namespace

cudaError_t LaunchLowLatencyCombine(const LowLatencyCombineParams& params,
                                    cudaStream_t stream) {
  const LowLatencyParams& base = params.base;
  const int32_t num_ranks = base.op.view.num_ranks;
  const int32_t row_bytes = base.hidden * ElementBytes(base.element);
  const uint64_t bits = reinterpret_cast<uint64_t>(params.y) |
                        reinterpret_cast<uint64_t>(params.out) |
                        static_cast<uint64_t>(row_bytes);
  if (bits % 16 != 0) return cudaErrorMisalignedAddress;
  const int32_t num_chunks =
      (row_bytes / 16 + Lines::kUnits - 1) / Lines::kUnits;
  const int32_t blocks = std::max(base.op.view.num_sms, 2);
  // By expert both halves read a row of every expert.
  const int32_t num_senders =
      std::max(blocks * (base.by_expert ? 16 : 10) / 32, 1);
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
  kKernels[2 * element + base.by_expert]<<<blocks, kWindowThreads, 0, stream>>>(
      launch);
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
