// low_latency_dispatch: rows to their ranks in one launch without a plan.
//
// Launch: max(view.num_sms, 2) blocks of kWindowThreads.
// Roles:  the first blocks send: rows and, before them, the expert ids of all
//         tokens to every peer. The others receive: they copy this rank's own
//         rows straight from x, and what comes through the windows as it comes.
//         By rank a row has a fixed place. By expert a block first counts the
//         ids of all ranks, from which the places of its tokens follow. In each
//         block the clerk keeps the launch in step (cc/device/window.cuh).
// Reads:  x, topk_idx, topk_weights; this rank's windows. Writes: the peers'
//         windows; rows, scales, counts, places, recv_weights of this rank.
//         Rows that nothing came to are not written.
// Order:  every word, chunk and scale says itself whether it has come; nothing
//         else orders them. No block waits for another of its launch: senders
//         wait for nobody, receivers for the peers' senders, which stand before
//         their receivers in the order in which blocks get multiprocessors.
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "cc/device/window.cuh"
#include "cc/low_latency.h"

namespace jax_ep {
namespace {

// Chunks that a receiving warp looks at in one go.
constexpr int kReceiving = 2;

struct Launch {
  LowLatencyDispatchParams params;
  Experts experts;
  int32_t num_senders;  // blocks
  int32_t num_chunks;   // of a row
  int32_t row_bytes;    // of `rows`
  Divisor by_chunks;
  Divisor by_peers;   // num_ranks - 1
  Divisor by_tokens;  // T
  Divisor by_top_k;
  Divisor by_max_tokens;
};

// Where rows come from, as chunks of units.

template <typename P, bool kWideRows>
struct Plain {
  using Protocol = P;
  static constexpr bool kWide = kWideRows;
  static constexpr bool kScaled = false;
  // Chunks that a sending warp, or one that copies own rows, has in flight.
  static constexpr int kInFlight = 4;
  struct Chunk {
    uint4 units[Protocol::kPerLane];
  };

  static __device__ __forceinline__ void Load(const Launch& launch,
                                              int32_t token, int32_t first,
                                              int32_t left, Chunk& chunk) {
    LoadRow<Protocol, kWide>(
        launch.params.x + int64_t{token} * launch.row_bytes, first, left,
        launch.row_bytes, chunk.units);
  }
  static __device__ __forceinline__ void Finish(
      Chunk& chunk, uint4 (&units)[Protocol::kPerLane],
      float (&)[Protocol::kPerLane]) {
#pragma unroll
    for (int i = 0; i < Protocol::kPerLane; ++i) units[i] = chunk.units[i];
  }
};

// Quantised as jax_ep.quantize_fp8 does it: eight neighbouring lanes hold the
// 128 columns of a block, each of them one unit of 16.
template <typename T, bool kWideRows>
struct Quantized {
  using Protocol = Words;
  static constexpr bool kWide = kWideRows;
  static constexpr bool kScaled = true;
  static constexpr int kColumns = 16;
  static constexpr int kVectors = kColumns * sizeof(T) / 16;
  static constexpr int kInFlight = 4 / kVectors;
  struct Chunk {
    uint4 in[Protocol::kPerLane][kVectors];
  };

  static __device__ __forceinline__ void Load(const Launch& launch,
                                              int32_t token, int32_t first,
                                              int32_t left, Chunk& chunk) {
    const int64_t bytes =
        int64_t{launch.params.base.hidden} * static_cast<int64_t>(sizeof(T));
    const std::byte* row = launch.params.x + token * bytes;
    const int32_t lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < Protocol::kPerLane; ++i) {
      const int32_t unit = Protocol::UnitOf(lane, i);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        chunk.in[i][v] = uint4{};
        if (unit < left) {
          chunk.in[i][v] =
              LoadRowUnit<kWide>(row, (first + unit) * kVectors + v, bytes);
        }
      }
    }
  }

  static __device__ __forceinline__ void Finish(
      Chunk& chunk, uint4 (&units)[Protocol::kPerLane],
      float (&scales)[Protocol::kPerLane]) {
#pragma unroll
    for (int i = 0; i < Protocol::kPerLane; ++i) {
      using Part = Elements<T, uint4>;
      float x[kColumns];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const Part part = Part::From(chunk.in[i][v]);
#pragma unroll
        for (int e = 0; e < Part::kSize; ++e) {
          x[v * Part::kSize + e] = Widen(part.at[e]);
        }
      }
      // Magnitudes are ordered as their bits are, NaN above all.
      uint32_t most = 0;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        most = max(most, __float_as_uint(x[c]) & 0x7FFFFFFF);
      }
#pragma unroll
      for (int other = 1; other < 8; other *= 2) {
        most = max(most, __shfl_xor_sync(kAllLanes, most, other));
      }
      const float amax = __uint_as_float(most);
      scales[i] = most < 0x7F800000 ? __fdiv_rn(fmaxf(amax, 1e-4f), 448.f)
                                    : __uint_as_float(0x7FC00000);
      uint32_t words[4] = {};
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const uint32_t bits = __nv_cvt_float_to_fp8(__fdiv_rn(x[c], scales[i]),
                                                    __NV_SATFINITE, __NV_E4M3);
        words[c / 4] |= bits << c % 4 * 8;
      }
      units[i] = {words[0], words[1], words[2], words[3]};
    }
  }
};

// The lanes' part in the scales of a chunk: the first of eight lanes has one.
__device__ __forceinline__ int32_t ScaleOf(int32_t first, int32_t lane, int i) {
  return (first + Words::UnitOf(lane, i)) / 8;
}

template <typename Source>
struct Dispatcher {
  using Protocol = typename Source::Protocol;
  using Chunk = typename Source::Chunk;
  static constexpr bool kWide = Source::kWide;

  const Launch& launch;
  const LowLatencyDispatchParams& params;
  Window& window;
  const Experts& experts;
  int32_t me;
  int32_t num_ranks;
  int32_t num_tokens;
  int32_t top_k;
  int32_t num_units;  // of a row
  int32_t warp;
  int32_t lane;

  __device__ Dispatcher(const Launch& l, Window& w)
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

  // A part of a row.
  struct Item {
    int32_t source;
    int32_t token;
    int32_t chunk;
    int32_t first;  // unit
    int32_t left;   // units
  };

  __device__ Item ItemOf(int32_t source, int32_t token, int32_t chunk) const {
    const int32_t first = chunk * Protocol::kUnits;
    return {source, token, chunk, first, num_units - first};
  }
  // Item i of this rank's rows.
  __device__ Item OwnItem(int32_t i) const {
    const int32_t token = launch.by_chunks.Divide(i);
    return ItemOf(me, token, i - token * launch.num_chunks);
  }
  // Item i of the peers' rows: token after token, of all of them in turn.
  __device__ Item PeersItem(int32_t i) const {
    const int32_t row = launch.by_chunks.Divide(i);
    const int32_t token = launch.by_peers.Divide(row);
    int32_t source = me + 1 + row - token * (num_ranks - 1);
    if (source >= num_ranks) source -= num_ranks;
    return ItemOf(source, token, i - row * launch.num_chunks);
  }

  __device__ int32_t OwnId(int32_t token) const {
    return lane < top_k ? __ldg(params.base.topk_idx + token * top_k + lane)
                        : -1;
  }
  __device__ const uint64_t* IdWord(int32_t source, int32_t token) const {
    return window.Words(me, source) + token * top_k + lane;
  }

  __device__ void SendSmall(int32_t thread, int32_t threads) const;
  __device__ void Send() const;
  __device__ void SendItem(const Item& item, Chunk& chunk, int32_t id) const;
  template <typename PlaceOf>
  __device__ void CopyOwn(int32_t index, int32_t count, int32_t begin,
                          int32_t end, const PlaceOf& place_of) const;
  template <typename ItemAt, typename Look, typename PlaceOf>
  __device__ void Receive(int32_t index, int32_t count, int32_t num_items,
                          const ItemAt& item_at, const Look& look,
                          const PlaceOf& place_of) const;
  __device__ void Deliver(const Item& item, int32_t place,
                          const uint4 (&units)[Protocol::kPerLane]) const;
  __device__ void DeliverScales(const Item& item, int32_t place) const;
  __device__ void ReceiveIds(int32_t thread, int32_t threads) const;
  __device__ void ReceiveByRank() const;
  __device__ void CountIds(int32_t begin, int32_t* before,
                           int32_t* total) const;
  __device__ void FindPlaces(int32_t begin, int32_t end, int32_t* next) const;
  __device__ void ReceiveByExpert() const;
};

// Ids and weights of all tokens to all peers.
template <typename Source>
__device__ void Dispatcher<Source>::SendSmall(int32_t thread,
                                              int32_t threads) const {
  for (int32_t i = thread; i < num_tokens * top_k; i += threads) {
    const auto id = static_cast<uint32_t>(__ldg(params.base.topk_idx + i));
    const bool weighted = params.topk_weights != nullptr;
    const uint32_t weight =
        weighted ? __float_as_uint(__ldg(params.topk_weights + i)) : 0;
    for (int32_t p = 1; p < num_ranks; ++p) {
      const int32_t peer = me + p < num_ranks ? me + p : me + p - num_ranks;
      ptx::StoreRelaxedSys(window.Words(peer, me) + i, window.Word(id));
      if (weighted) {
        ptx::StoreRelaxedSys(window.Weights(peer, me) + i, window.Word(weight));
      }
    }
  }
}

// Lane k holds the token's k-th id.
template <typename Source>
__device__ void Dispatcher<Source>::SendItem(const Item& item, Chunk& chunk,
                                             int32_t id) const {
  uint64_t ranks = RanksOfWarp(experts.RankOf(id), num_ranks);
  ranks &= ~(uint64_t{1} << me);
  if (ranks == 0) return;
  uint4 units[Protocol::kPerLane];
  float scales[Protocol::kPerLane];
  Source::Finish(chunk, units, scales);
  // Each rank begins with another peer.
  for (uint64_t half : {ranks >> me << me, ranks & ((uint64_t{1} << me) - 1)}) {
    for (; half != 0; half &= half - 1) {
      const int32_t peer = __ffsll(static_cast<long long>(half)) - 1;
      Protocol::Store(window.Chunk(peer, me, item.token, item.chunk), units,
                      item.left, window.epoch);
      if constexpr (Source::kScaled) {
        uint64_t* words = window.Scales(peer, me, item.token);
#pragma unroll
        for (int i = 0; i < Protocol::kPerLane; ++i) {
          if (lane % 8 == 0 && Protocol::UnitOf(lane, i) < item.left) {
            ptx::StoreRelaxedSys(words + ScaleOf(item.first, lane, i),
                                 window.Word(__float_as_uint(scales[i])));
          }
        }
      }
    }
  }
}

template <typename Source>
__device__ void Dispatcher<Source>::Send() const {
  constexpr int kBatch = Source::kInFlight;
  if (num_ranks == 1) return window.Begin();
  const int32_t count = launch.num_senders * kWorkWarps;
  const int32_t index = warp * launch.num_senders + blockIdx.x;
  const int32_t num_items = num_tokens * launch.num_chunks;
  bool small_sent = false;
  for (int32_t base = index; base < num_items || !small_sent;
       base += kBatch * count) {
    Chunk chunks[kBatch];
    int32_t ids[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (base + j * count < num_items) {
        const Item item = OwnItem(base + j * count);
        ids[j] = OwnId(item.token);
        Source::Load(launch, item.token, item.first, item.left, chunks[j]);
      }
    }
    // While the rows are on their way here.
    if (!small_sent) {
      window.Begin();
      SendSmall(index * kWarpSize + lane, count * kWarpSize);
      small_sent = true;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (base + j * count < num_items) {
        SendItem(OwnItem(base + j * count), chunks[j], ids[j]);
      }
    }
  }
}

// Stores a chunk in the rows at the lanes' places; -1: none.
template <typename Source>
__device__ void Dispatcher<Source>::Deliver(
    const Item& item, int32_t place,
    const uint4 (&units)[Protocol::kPerLane]) const {
  for (uint32_t left = __ballot_sync(kAllLanes, place >= 0); left != 0;
       left &= left - 1) {
    const int32_t at = __shfl_sync(kAllLanes, place, __ffs(left) - 1);
    StoreRow<Protocol, kWide>(params.rows + int64_t{at} * launch.row_bytes,
                              item.first, item.left, launch.row_bytes, units);
  }
}

// The scales of a peer's chunk, a lane each.
template <typename Source>
__device__ void Dispatcher<Source>::DeliverScales(const Item& item,
                                                  int32_t place) const {
  constexpr int32_t kScales = Protocol::kUnits / 8;
  const auto num_scales = static_cast<int32_t>(params.base.layout.num_scales);
  const int32_t at = item.chunk * kScales + lane;
  const bool mine = lane < kScales && at < num_scales;
  uint32_t scale = 0;
  if (mine) {
    scale = WaitWord(window, window.Scales(me, item.source, item.token) + at,
                     "the scales", item.source);
  }
  __syncwarp();
  for (uint32_t left = __ballot_sync(kAllLanes, place >= 0); left != 0;
       left &= left - 1) {
    const int64_t row = __shfl_sync(kAllLanes, place, __ffs(left) - 1);
    if (mine) params.scales[row * num_scales + at] = __uint_as_float(scale);
  }
}

// Items [begin, end) of this rank's own rows, by warps of which this one is
// number `index`. place_of(item, id) is a lane's place.
template <typename Source>
template <typename PlaceOf>
__device__ void Dispatcher<Source>::CopyOwn(int32_t index, int32_t count,
                                            int32_t begin, int32_t end,
                                            const PlaceOf& place_of) const {
  constexpr int kBatch = Source::kInFlight;
  for (int32_t base = begin + index; base < end; base += kBatch * count) {
    Chunk chunks[kBatch];
    int32_t places[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (base + j * count < end) {
        const Item item = OwnItem(base + j * count);
        places[j] = place_of(item, OwnId(item.token));
        Source::Load(launch, item.token, item.first, item.left, chunks[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (base + j * count >= end) continue;
      if (!__any_sync(kAllLanes, places[j] >= 0)) continue;
      const Item item = OwnItem(base + j * count);
      uint4 units[Protocol::kPerLane];
      float scales[Protocol::kPerLane];
      Source::Finish(chunks[j], units, scales);
      Deliver(item, places[j], units);
      if constexpr (Source::kScaled) {
        for (uint32_t left = __ballot_sync(kAllLanes, places[j] >= 0);
             left != 0; left &= left - 1) {
          const int64_t row =
              __shfl_sync(kAllLanes, places[j], __ffs(left) - 1);
          float* to = params.scales + row * params.base.layout.num_scales;
#pragma unroll
          for (int i = 0; i < Protocol::kPerLane; ++i) {
            if (lane % 8 == 0 && Protocol::UnitOf(lane, i) < item.left) {
              to[ScaleOf(item.first, lane, i)] = scales[i];
            }
          }
        }
      }
    }
  }
}

// Items of the peers' rows. look(item) is a first look at what tells a lane's
// place, and place_of(item, looked) that place.
template <typename Source>
template <typename ItemAt, typename Look, typename PlaceOf>
__device__ void Dispatcher<Source>::Receive(int32_t index, int32_t count,
                                            int32_t num_items,
                                            const ItemAt& item_at,
                                            const Look& look,
                                            const PlaceOf& place_of) const {
  for (int32_t base = index; base < num_items; base += kReceiving * count) {
    uint4 words[kReceiving][kChunkWords];
    decltype(look(Item())) looked[kReceiving];
    // At the rows too, before it is known whether they come at all.
#pragma unroll
    for (int j = 0; j < kReceiving; ++j) {
      if (base + j * count >= num_items) continue;
      const Item item = item_at(base + j * count);
      looked[j] = look(item);
      LookAt<Protocol>(window.Chunk(me, item.source, item.token, item.chunk),
                       item.left, words[j]);
    }
#pragma unroll
    for (int j = 0; j < kReceiving; ++j) {
      if (base + j * count >= num_items) continue;
      const Item item = item_at(base + j * count);
      const int32_t place = place_of(item, looked[j]);
      if (!__any_sync(kAllLanes, place >= 0)) continue;
      uint4 units[Protocol::kPerLane];
      WaitChunk<Protocol>(window,
                          window.Chunk(me, item.source, item.token, item.chunk),
                          item.left, item.source, words[j], units);
      Deliver(item, place, units);
      if constexpr (Source::kScaled) DeliverScales(item, place);
    }
  }
}

// By rank: the local ids of all tokens, -1 for the others and for tokens that
// this call does not have; and their weights.
template <typename Source>
__device__ void Dispatcher<Source>::ReceiveIds(int32_t thread,
                                               int32_t threads) const {
  const int32_t stride = params.base.stride;
  for (int32_t i = thread; i < num_ranks * stride * top_k; i += threads) {
    const int32_t row = launch.by_top_k.Divide(i);
    const int32_t source = launch.by_max_tokens.Divide(row);
    const int32_t token = row - source * stride;
    const int32_t pair = token * top_k + i - row * top_k;
    int32_t local = -1;
    if (token < num_tokens) {
      const int32_t id = source == me
                             ? __ldg(params.base.topk_idx + pair)
                             : static_cast<int32_t>(WaitWord(
                                   window, window.Words(me, source) + pair,
                                   "the ids", source));
      local = experts.LocalOn(me, id);
    }
    params.places[i] = local;
    if (params.topk_weights == nullptr) continue;
    float weight = 0;
    if (local >= 0) {
      weight = source == me ? __ldg(params.topk_weights + pair)
                            : __uint_as_float(WaitWord(
                                  window, window.Weights(me, source) + pair,
                                  "the weights", source));
    }
    params.recv_weights[i] = weight;
  }
}

template <typename Source>
__device__ void Dispatcher<Source>::ReceiveByRank() const {
  const int32_t blocks = gridDim.x - launch.num_senders;
  const int32_t index = warp * blocks + blockIdx.x - launch.num_senders;
  const int32_t count = blocks * kWorkWarps;
  const int32_t num_items = num_tokens * launch.num_chunks;
  // The first lane has the row's place, if it comes here.
  const auto place_of = [&](const Item& item, int32_t id) {
    const bool comes = __any_sync(kAllLanes, experts.LocalOn(me, id) >= 0);
    return lane == 0 && comes ? item.source * params.base.stride + item.token
                              : -1;
  };
  CopyOwn(index, count, 0, num_items, place_of);
  window.Begin();
  ReceiveIds(index * kWarpSize + lane, count * kWarpSize);
  Receive(
      index, count, num_items * (num_ranks - 1),
      [&](int32_t i) { return PeersItem(i); },
      [&](const Item& item) {
        return lane < top_k
                   ? ptx::LoadRelaxedSys(IdWord(item.source, item.token))
                   : 0;
      },
      [&](const Item& item, uint64_t looked) {
        int32_t id = -1;
        if (lane < top_k) {
          id = static_cast<int32_t>(WaitWord(window,
                                             IdWord(item.source, item.token),
                                             looked, "the ids", item.source));
        }
        __syncwarp();
        return place_of(item, id);
      });
}

// By expert. A token has one row in an expert, however often it names it.
// Lane l of a warp has choice l % K of the warp's token l / K.

// Counts, for every source and local expert, the rows of all tokens and those
// of tokens before `begin`. All working warps of a block.
template <typename Source>
__device__ void Dispatcher<Source>::CountIds(int32_t begin, int32_t* before,
                                             int32_t* total) const {
  constexpr int kLooks = 4;
  const int32_t tokens = launch.by_top_k.Divide(kWarpSize);
  const int32_t in_warp = launch.by_top_k.Divide(lane);
  const int32_t k = lane - in_warp * top_k;
  const bool used = in_warp < tokens;
  const int32_t rows = num_ranks * num_tokens;
  const int32_t step = kWorkWarps * tokens;
  for (int32_t base = warp * tokens; base < rows; base += kLooks * step) {
    int32_t sources[kLooks], at[kLooks];
    uint64_t words[kLooks];
#pragma unroll
    for (int j = 0; j < kLooks; ++j) {
      const int32_t row = base + j * step + in_warp;
      sources[j] = -1;
      if (!used || row >= rows) continue;
      sources[j] = launch.by_tokens.Divide(row);
      at[j] = row - sources[j] * num_tokens;
      const int32_t pair = at[j] * top_k + k;
      words[j] = sources[j] == me
                     ? window.Word(static_cast<uint32_t>(
                           __ldg(params.base.topk_idx + pair)))
                     : ptx::LoadRelaxedSys(window.Words(me, sources[j]) + pair);
    }
#pragma unroll
    for (int j = 0; j < kLooks; ++j) {
      if (base + j * step >= rows) break;
      int32_t local = -1;
      if (sources[j] >= 0) {
        const auto id = static_cast<int32_t>(
            WaitWord(window, window.Words(me, sources[j]) + at[j] * top_k + k,
                     words[j], "the ids", sources[j]));
        local = experts.LocalOn(me, id);
      }
      __syncwarp();
      const uint32_t key = local >= 0
                               ? in_warp << 16 | local
                               : 0x80000000u | static_cast<uint32_t>(lane);
      const uint32_t same = __match_any_sync(kAllLanes, key);
      if (local < 0 || __ffs(same) - 1 != lane) continue;
      const int32_t counter = sources[j] * experts.local_experts + local;
      atomicAdd(total + counter, 1);
      if (at[j] < begin) atomicAdd(before + counter, 1);
    }
  }
}

// The places of tokens [begin, end) of all sources, a warp to a source. `next`
// counts, for every source and local expert, from its tokens' first row on.
template <typename Source>
__device__ void Dispatcher<Source>::FindPlaces(int32_t begin, int32_t end,
                                               int32_t* next) const {
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
      int32_t local = -1;
      if (used) {
        const int32_t pair = token * top_k + k;
        // Here already: the block has counted it.
        const uint64_t word =
            source == me ? window.Word(static_cast<uint32_t>(
                               __ldg(params.base.topk_idx + pair)))
                         : ptx::LoadRelaxedSys(window.Words(me, source) + pair);
        local = experts.LocalOn(me, static_cast<int32_t>(word));
      }
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
      if (used) {
        params.places[(source * params.base.stride + token) * top_k + k] =
            local >= 0 ? place : -1;
      }
    }
  }
}

template <typename Source>
__device__ void Dispatcher<Source>::ReceiveByExpert() const {
  __shared__ int32_t before[kMaxCountedExperts];
  __shared__ int32_t total[kMaxCountedExperts];
  const int32_t blocks = gridDim.x - launch.num_senders;
  const int32_t block = blockIdx.x - launch.num_senders;
  // This block's tokens, of all sources: some of them this rank's own, for
  // which it need not wait.
  const int32_t begin = num_tokens * block / blocks;
  const int32_t end = num_tokens * (block + 1) / blocks;
  const int32_t local_experts = experts.local_experts;
  for (int32_t i = threadIdx.x; i < num_ranks * local_experts;
       i += kWorkThreads) {
    before[i] = total[i] = 0;
  }
  window.Begin();
  ptx::SyncThreads(kWorkBarrier, kWorkThreads);
  CountIds(begin, before, total);
  ptx::SyncThreads(kWorkBarrier, kWorkThreads);
  // Rows of earlier sources stand before those of later ones.
  for (int32_t e = threadIdx.x; e < local_experts; e += kWorkThreads) {
    int32_t rows = 0;
    for (int32_t source = 0; source < num_ranks; ++source) {
      before[source * local_experts + e] += rows;
      rows += total[source * local_experts + e];
    }
    if (block == 0) params.counts[e] = rows;
  }
  ptx::SyncThreads(kWorkBarrier, kWorkThreads);
  FindPlaces(begin, end, before);
  ptx::SyncThreads(kWorkBarrier, kWorkThreads);
  const auto place_of = [&](const Item& item) {
    return lane < top_k
               ? __ldcg(params.places +
                        (item.source * params.base.stride + item.token) *
                            top_k +
                        lane)
               : -1;
  };
  CopyOwn(warp, kWorkWarps, begin * launch.num_chunks, end * launch.num_chunks,
          [&](const Item& item, int32_t) { return place_of(item); });
  const int32_t first = begin * (num_ranks - 1) * launch.num_chunks;
  Receive(
      warp, kWorkWarps, (end - begin) * (num_ranks - 1) * launch.num_chunks,
      [&](int32_t i) { return PeersItem(first + i); }, place_of,
      [](const Item&, int32_t place) { return place; });
}

template <typename Source>
__global__ void __launch_bounds__(kWindowThreads, 1)
    DispatchKernel(const __grid_constant__ Launch launch) {
  Window window(launch.params.base, "low_latency_dispatch",
                WindowKind::kDispatch);
  if (threadIdx.x >= kWorkThreads) {
    return KeepStep(window, launch.num_senders);
  }
  const Dispatcher<Source> dispatcher(launch, window);
  if (static_cast<int32_t>(blockIdx.x) < launch.num_senders) {
    dispatcher.Send();
  } else if (launch.params.base.by_expert) {
    dispatcher.ReceiveByExpert();
  } else {
    dispatcher.ReceiveByRank();
  }
  WarpDone(window);
}

using Kernel = void (*)(Launch);

// The kernels by number.
constexpr Kernel kKernels[] = {
    &DispatchKernel<Plain<Words, false>>,
    &DispatchKernel<Plain<Words, true>>,
    &DispatchKernel<Plain<Lines, false>>,
    &DispatchKernel<Plain<Lines, true>>,
    &DispatchKernel<Quantized<Bf16, false>>,
    &DispatchKernel<Quantized<Bf16, true>>,
    &DispatchKernel<Quantized<F16, false>>,
    &DispatchKernel<Quantized<F16, true>>,
    &DispatchKernel<Quantized<float, false>>,
    &DispatchKernel<Quantized<float, true>>,
};

int32_t KernelFor(const LowLatencyDispatchParams& params, bool wide,
                  bool lines) {
  if (!params.quantize) return 2 * lines + wide;
  switch (params.base.element) {
    case Element::kBf16:
      return 4 + wide;
    case Element::kF16:
      return 6 + wide;
    default:
      return 8 + wide;
  }
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
  const bool wide = bits % 16 == 0;
  // From sizes alone: equal on all ranks.
  const bool lines = !params.quantize && UseLines(row_bytes, base.num_tokens);
  const int32_t units = lines ? Lines::kUnits : Words::kUnits;
  const int32_t num_chunks = ((row_bytes + 15) / 16 + units - 1) / units;
  const int32_t blocks = std::max(base.op.view.num_sms, 2);
  // By expert a row is written for every expert.
  const int32_t num_senders =
      std::max(blocks * (base.by_expert ? 8 : 12) / 32, 1);
  const Launch launch = {
      .params = params,
      .experts = Experts(base.num_experts, num_ranks),
      .num_senders = num_senders,
      .num_chunks = num_chunks,
      .row_bytes = row_bytes,
      .by_chunks = Divisor(num_chunks),
      .by_peers = Divisor(std::max(num_ranks - 1, 1)),
      .by_tokens = Divisor(base.num_tokens),
      .by_top_k = Divisor(base.top_k),
      .by_max_tokens = Divisor(base.stride),
  };
  kKernels[KernelFor(params, wide,
                     lines)]<<<blocks, kWindowThreads, 0, stream>>>(launch);
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
