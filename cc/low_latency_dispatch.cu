// low_latency_dispatch: rows to their ranks in one launch without a plan.
//
// Launch: max(view.num_sms, 2) blocks of kWindowThreads.
// Roles:  the first blocks send: rows and, before them, the expert ids of all
//         tokens to every peer. The others receive what comes through the
//         windows as it comes. By rank a row has a fixed place, and senders
//         store this rank's own rows too. By expert a receiving block first
//         counts the ids of all ranks, from which the places of its tokens
//         follow, and copies its share of the own rows straight from x. In each
//         block the clerk keeps the launch in step (cc/device/window.cuh).
// Reads:  x, topk_idx, topk_weights; this rank's windows. Writes: the peers'
//         windows; rows, scales, counts, places, recv_weights of this rank.
//         Rows that nothing came to are not written.
// Order:  every word and line says itself whether it has come; nothing
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

// Chunks that a warp has in flight: of plain rows that it sends, of those that
// it copies while it counts, and of what it receives.
constexpr int kSending = 6;
constexpr int kCopying = 5;
constexpr int kReceiving = 6;

// Places that a block keeps in shared memory.
constexpr int32_t kKeptPlaces = 1024;

struct Launch {
  LowLatencyDispatchParams params;
  Experts experts;
  int32_t num_senders;  // blocks
  int32_t num_chunks;   // of a row
  int32_t row_bytes;    // of `rows`
  // By expert: chunks of this rank's rows, and as many of each peer's, that a
  // receiving block sees to; whether it keeps the places of its tokens.
  int32_t share;
  bool keeps_places;
  Divisor by_chunks;
  Divisor by_peers;   // num_ranks - 1
  Divisor by_tokens;  // T
  Divisor by_top_k;
  Divisor by_max_tokens;
};

// Where rows come from, as chunks of units.

template <bool kWideRows>
struct Plain {
  using Protocol = Lines;
  static constexpr bool kWide = kWideRows;
  static constexpr bool kScaled = false;
  static constexpr int kSending = jax_ep::kSending;
  static constexpr int kCopying = jax_ep::kCopying;
  struct Chunk {
    Units units;
  };

  static __device__ __forceinline__ void Load(const Launch& launch,
                                              int32_t token, int32_t first,
                                              int32_t left, Chunk& chunk) {
    LoadRow<Protocol, kWide>(
        launch.params.x + int64_t{token} * launch.row_bytes, first, left,
        launch.row_bytes, chunk.units);
  }
  static __device__ __forceinline__ void Finish(const Chunk& chunk,
                                                Units& units) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) units[i] = chunk.units[i];
  }
};

// x / scale, rounded to nearest, where that counts for a float8_e4m3fn: to
// normal numbers. `reciprocal` is 1 / scale, rounded. After one correction the
// quotient is exact but for its rounding, which a second one puts right. Where
// x has 11 bits and the scale is one of those over 448, one will do: no such
// quotient is as near to the middle between two floats that it counts.
template <bool kTwice>
__device__ __forceinline__ float Quotient(float x, float scale,
                                          float reciprocal) {
  // This way round a quotient of -0 stays one.
  float q = x * reciprocal;
  q = fmaf(fmaf(q, scale, -x), -reciprocal, q);
  if (kTwice) q = fmaf(fmaf(q, scale, -x), -reciprocal, q);
  return q;
}

// Quantised as jax_ep.quantize_fp8 does it: eight neighbouring lanes hold the
// 128 columns of a block, each of them one unit of 16.
template <typename T, bool kWideRows>
struct Quantized {
  using Protocol = ScaledLines;
  static constexpr bool kWide = kWideRows;
  static constexpr bool kScaled = true;
  static constexpr int kColumns = 16;
  static constexpr int kVectors = kColumns * sizeof(T) / 16;
  static constexpr int kSending = 8 / kVectors;
  static constexpr int kCopying = 4 / kVectors;
  struct Chunk {
    uint4 in[kPerLane][kVectors];
  };

  static __device__ __forceinline__ void Load(const Launch& launch,
                                              int32_t token, int32_t first,
                                              int32_t left, Chunk& chunk) {
    const int64_t bytes =
        int64_t{launch.params.base.hidden} * static_cast<int64_t>(sizeof(T));
    const std::byte* row = launch.params.x + token * bytes;
    const int32_t lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int32_t unit = i * kWarpSize + lane;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        chunk.in[i][v] = uint4{};
        if (unit < min(left, Protocol::kUnits)) {
          chunk.in[i][v] =
              LoadRowUnit<kWide>(row, (first + unit) * kVectors + v, bytes);
        }
      }
    }
  }

  static __device__ __forceinline__ uint4 Quantize(const uint4 (&in)[kVectors],
                                                   float& scale) {
    using Part = Elements<T, uint4>;
    float x[kColumns];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const Part part = Part::From(in[v]);
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
    scale = most < 0x7F800000
                ? __fdiv_rn(fmaxf(__uint_as_float(most), 1e-4f), 448.f)
                : __uint_as_float(0x7FC00000);
    const float reciprocal = __frcp_rn(scale);
    uint32_t words[4] = {};
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      constexpr bool kTwice = sizeof(T) == 4;
      const float2 pair = {Quotient<kTwice>(x[c], scale, reciprocal),
                           Quotient<kTwice>(x[c + 1], scale, reciprocal)};
      const uint32_t bits =
          __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
      words[c / 4] |= bits << c % 4 * 8;
    }
    return {words[0], words[1], words[2], words[3]};
  }

  static __device__ __forceinline__ void Finish(const Chunk& chunk,
                                                Units& units) {
    const int32_t lane = threadIdx.x % kWarpSize;
    float scales[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      units[i] = Quantize(chunk.in[i], scales[i]);
    }
    // The eighths of the first four lines and of the next three: to the last
    // line, which has had nothing so far.
    const int32_t from = lane % 4 * 8 + 7;
    const auto eighth = [&](uint32_t first, uint32_t second) {
      first = __shfl_sync(kAllLanes, first, from);
      second = __shfl_sync(kAllLanes, second, from);
      return lane < 28 ? first : second;
    };
    const uint4 eighths = {
        eighth(units[0].x, units[1].x), eighth(units[0].y, units[1].y),
        eighth(units[0].z, units[1].z), eighth(units[0].w, units[1].w)};
    if (lane >= 24) units[1] = eighths;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane % 8 == 7) units[i] = {__float_as_uint(scales[i]), 0, 0, 0};
    }
  }
};

template <typename Source, bool kByExpert>
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
  // Item i of the peers' rows from own item `begin` on: of all of them in turn.
  __device__ Item PeersItem(int32_t begin, int32_t i) const {
    const int32_t own = launch.by_peers.Divide(i);
    int32_t source = me + 1 + i - own * (num_ranks - 1);
    if (source >= num_ranks) source -= num_ranks;
    const int32_t token = launch.by_chunks.Divide(begin + own);
    return ItemOf(source, token, begin + own - token * launch.num_chunks);
  }

  __device__ int32_t OwnId(int32_t token) const {
    return lane < top_k ? __ldg(params.base.topk_idx + token * top_k + lane)
                        : -1;
  }
  __device__ const uint64_t* IdWord(int32_t source, int32_t token) const {
    return window.Words(me, source) + token * top_k + lane;
  }

  // Where the places of a token of the block's share stand, by expert.
  struct Places {
    int32_t* at;
    int32_t stride;  // tokens of a source
    int32_t begin;   // token

    __device__ int32_t* Of(int32_t source, int32_t token, int32_t top_k) const {
      return at + (source * stride + token - begin) * top_k;
    }
  };

  // An expert id and its weight.
  struct Small {
    uint32_t id;
    uint32_t weight;
  };
  __device__ Small SmallOf(int32_t i) const;
  __device__ void SendSmall(int32_t thread, int32_t threads, Small small) const;
  __device__ void Send() const;
  __device__ void SendItem(const Item& item, uint64_t ranks,
                           const Units& units) const;
  template <typename Ready, typename PlaceOf>
  __device__ void CopyOwn(int32_t begin, int32_t end, const Ready& ready,
                          const PlaceOf& place_of) const;
  template <typename Look, typename PlaceOf>
  __device__ void Receive(int32_t index, int32_t count, int32_t begin,
                          int32_t num_items, const Look& look,
                          const PlaceOf& place_of) const;
  __device__ void Deliver(const Item& item, int32_t place,
                          const Units& units) const;
  __device__ void ReceiveIds(int32_t thread, int32_t threads) const;
  __device__ void ReceiveByRank() const;
  __device__ void CountIds(int32_t begin, int32_t end, const Places& places,
                           int32_t* before, int32_t* total) const;
  __device__ void FindPlaces(int32_t begin, int32_t end, const Places& places,
                             int32_t* next) const;
  __device__ void ReceiveByExpert() const;
};

template <typename Source, bool kByExpert>
__device__ typename Dispatcher<Source, kByExpert>::Small
Dispatcher<Source, kByExpert>::SmallOf(int32_t i) const {
  if (i >= num_tokens * top_k) return {};
  return {static_cast<uint32_t>(__ldg(params.base.topk_idx + i)),
          kByExpert || params.topk_weights == nullptr
              ? 0
              : __float_as_uint(__ldg(params.topk_weights + i))};
}

// Ids and weights of all tokens to all peers. `small` is the thread's first.
template <typename Source, bool kByExpert>
__device__ void Dispatcher<Source, kByExpert>::SendSmall(int32_t thread,
                                                         int32_t threads,
                                                         Small small) const {
  for (int32_t i = thread; i < num_tokens * top_k; i += threads) {
    if (i != thread) small = SmallOf(i);
    for (int32_t p = 1; p < num_ranks; ++p) {
      const int32_t peer = me + p < num_ranks ? me + p : me + p - num_ranks;
      ptx::StoreRelaxedSys(window.Words(peer, me) + i, window.Word(small.id));
      if (!kByExpert && params.topk_weights != nullptr) {
        ptx::StoreRelaxedSys(window.Weights(peer, me) + i,
                             window.Word(small.weight));
      }
    }
  }
}

// To the ranks of the mask, none of them this one.
template <typename Source, bool kByExpert>
__device__ void Dispatcher<Source, kByExpert>::SendItem(
    const Item& item, uint64_t ranks, const Units& units) const {
  // Each rank begins with another peer.
  for (uint64_t half : {ranks >> me << me, ranks & ((uint64_t{1} << me) - 1)}) {
    for (; half != 0; half &= half - 1) {
      const int32_t peer = __ffsll(static_cast<long long>(half)) - 1;
      StoreChunk<Protocol>(window.Chunk(peer, me, item.token, item.chunk),
                           units, item.left, window.epoch);
    }
  }
}

template <typename Source, bool kByExpert>
__device__ void Dispatcher<Source, kByExpert>::Send() const {
  constexpr int kBatch = Source::kSending;
  const int32_t count = launch.num_senders * kWorkWarps;
  const int32_t index = warp * launch.num_senders + blockIdx.x;
  const int32_t num_items =
      kByExpert && num_ranks == 1 ? 0 : num_tokens * launch.num_chunks;
  // What others wait for longest is asked for first.
  const int32_t thread = index * kWarpSize + lane;
  const Small small = num_ranks == 1 ? Small{} : SmallOf(thread);
  bool begun = false;
  for (int32_t base = index; base < num_items || !begun;
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
    if (!begun) {
      HasEpoch(window);
      SendSmall(thread, count * kWarpSize, small);
    }
    begun = true;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (base + j * count >= num_items) continue;
      const uint64_t own = uint64_t{1} << me;
      uint64_t ranks = RanksOfWarp(experts.RankOf(ids[j]), num_ranks);
      if (kByExpert) ranks &= ~own;
      if (ranks == 0) continue;
      const Item item = OwnItem(base + j * count);
      Units units;
      Source::Finish(chunks[j], units);
      SendItem(item, ranks & ~own, units);
      if (kByExpert || (ranks & own) == 0) continue;
      Deliver(item, lane == 0 ? me * params.base.stride + item.token : -1,
              units);
    }
  }
}

// Stores a chunk in the rows at the lanes' places; -1: none.
template <typename Source, bool kByExpert>
__device__ void Dispatcher<Source, kByExpert>::Deliver(
    const Item& item, int32_t place, const Units& units) const {
  for (uint32_t left = __ballot_sync(kAllLanes, place >= 0); left != 0;
       left &= left - 1) {
    const int64_t at = __shfl_sync(kAllLanes, place, __ffs(left) - 1);
    StoreRow<Protocol, kWide>(params.rows + at * launch.row_bytes, item.first,
                              item.left, launch.row_bytes, units);
    if constexpr (Source::kScaled) {
      const int64_t num_scales = params.base.layout.num_scales;
      const int64_t first = item.chunk * Protocol::kScales;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int64_t scale = first + Protocol::ScaleOf(lane, i);
        if (scale < num_scales) {
          params.scales[at * num_scales + scale] = __uint_as_float(units[i].x);
        }
      }
    }
  }
}

// Items [begin, end) of this rank's own rows by the warps of a block.
// place_of(item) is a lane's place, once ready() has returned.
template <typename Source, bool kByExpert>
template <typename Ready, typename PlaceOf>
__device__ void Dispatcher<Source, kByExpert>::CopyOwn(
    int32_t begin, int32_t end, const Ready& ready,
    const PlaceOf& place_of) const {
  constexpr int kBatch = Source::kCopying;
  bool is_ready = false;
  for (int32_t base = begin + warp; base < end || !is_ready;
       base += kBatch * kWorkWarps) {
    Chunk chunks[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (base + j * kWorkWarps < end) {
        const Item item = OwnItem(base + j * kWorkWarps);
        Source::Load(launch, item.token, item.first, item.left, chunks[j]);
      }
    }
    // While the rows are on their way here.
    if (!is_ready) ready();
    is_ready = true;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (base + j * kWorkWarps >= end) continue;
      const Item item = OwnItem(base + j * kWorkWarps);
      const int32_t place = place_of(item);
      if (!__any_sync(kAllLanes, place >= 0)) continue;
      Units units;
      Source::Finish(chunks[j], units);
      Deliver(item, place, units);
    }
  }
}

// Items of the peers' rows from own item `begin` on. look(item) is a first look
// at what tells a lane's place, and place_of(item, looked) that place.
template <typename Source, bool kByExpert>
template <typename Look, typename PlaceOf>
__device__ void Dispatcher<Source, kByExpert>::Receive(
    int32_t index, int32_t count, int32_t begin, int32_t num_items,
    const Look& look, const PlaceOf& place_of) const {
  for (int32_t base = index; base < num_items; base += kReceiving * count) {
    Units words[kReceiving];
    decltype(look(Item())) looked[kReceiving];
    // At the rows too, before it is known whether they come at all.
#pragma unroll
    for (int j = 0; j < kReceiving; ++j) {
      if (base + j * count >= num_items) continue;
      const Item item = PeersItem(begin, base + j * count);
      looked[j] = look(item);
      LookAt<Protocol>(window.Chunk(me, item.source, item.token, item.chunk),
                       item.left, words[j]);
    }
#pragma unroll
    for (int j = 0; j < kReceiving; ++j) {
      if (base + j * count >= num_items) continue;
      const Item item = PeersItem(begin, base + j * count);
      const int32_t place = place_of(item, looked[j]);
      if (!__any_sync(kAllLanes, place >= 0)) continue;
      Units units;
      WaitChunk<Protocol>(window,
                          window.Chunk(me, item.source, item.token, item.chunk),
                          item.left, item.source, words[j], units);
      Deliver(item, place, units);
    }
  }
}

// By rank: the local ids of all tokens, -1 for the others and for tokens that
// this call does not have; and their weights.
template <typename Source, bool kByExpert>
__device__ void Dispatcher<Source, kByExpert>::ReceiveIds(
    int32_t thread, int32_t threads) const {
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

template <typename Source, bool kByExpert>
__device__ void Dispatcher<Source, kByExpert>::ReceiveByRank() const {
  HasEpoch(window);
  const int32_t blocks = gridDim.x - launch.num_senders;
  const int32_t index = warp * blocks + blockIdx.x - launch.num_senders;
  const int32_t count = blocks * kWorkWarps;
  // By the last warps: with few tokens those have no rows.
  ReceiveIds((count - 1 - index) * kWarpSize + lane, count * kWarpSize);
  Receive(
      index, count, 0, num_tokens * launch.num_chunks * (num_ranks - 1),
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
        // The first lane has the row's place, if it comes here.
        const bool comes = __any_sync(kAllLanes, experts.LocalOn(me, id) >= 0);
        return lane == 0 && comes
                   ? item.source * params.base.stride + item.token
                   : -1;
      });
}

// By expert. A token has one row in an expert, however often it names it.
// Lane l of a warp has choice l % K of the warp's token l / K.

// Counts, for every source and local expert, the rows of all tokens and those
// of tokens before `begin`; leaves the local ids of tokens [begin, end) where
// their places will be. All working warps of a block.
template <typename Source, bool kByExpert>
__device__ void Dispatcher<Source, kByExpert>::CountIds(int32_t begin,
                                                        int32_t end,
                                                        const Places& places,
                                                        int32_t* before,
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
    uint64_t words[kLooks];
#pragma unroll
    for (int j = 0; j < kLooks; ++j) {
      const int32_t row = base + j * step + in_warp;
      if (!used || row >= rows) continue;
      const int32_t source = launch.by_tokens.Divide(row);
      const int32_t pair = (row - source * num_tokens) * top_k + k;
      words[j] = source == me
                     ? window.Word(static_cast<uint32_t>(
                           __ldg(params.base.topk_idx + pair)))
                     : ptx::LoadRelaxedSys(window.Words(me, source) + pair);
    }
#pragma unroll
    for (int j = 0; j < kLooks; ++j) {
      const int32_t row = base + j * step + in_warp;
      if (base + j * step >= rows) break;
      int32_t local = -1, source = 0, token = 0;
      if (used && row < rows) {
        source = launch.by_tokens.Divide(row);
        token = row - source * num_tokens;
        const auto id = static_cast<int32_t>(
            WaitWord(window, window.Words(me, source) + token * top_k + k,
                     words[j], "the ids", source));
        local = experts.LocalOn(me, id);
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
__device__ void Dispatcher<Source, kByExpert>::FindPlaces(int32_t begin,
                                                          int32_t end,
                                                          const Places& places,
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
__device__ void Dispatcher<Source, kByExpert>::ReceiveByExpert() const {
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
    for (int32_t i = threadIdx.x; i < num_ranks * local_experts;
         i += kWorkThreads) {
      before[i] = total[i] = 0;
    }
    ptx::SyncThreads(kWorkBarrier, kWorkThreads);
    CountIds(begin, end, places, before, total);
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
    FindPlaces(begin, end, places, before);
    ptx::SyncThreads(kWorkBarrier, kWorkThreads);
  };
  const auto place_of = [&](const Item& item) {
    return lane < top_k ? places.Of(item.source, item.token, top_k)[lane] : -1;
  };
  CopyOwn(first, last, count, place_of);
  Receive(
      warp, kWorkWarps, first, (last - first) * (num_ranks - 1),
      [](const Item&) { return 0; },
      [&](const Item& item, int) { return place_of(item); });
}

template <typename Source, bool kByExpert>
__global__ void __launch_bounds__(kWindowThreads, 1)
    DispatchKernel(const __grid_constant__ Launch launch) {
  Window window(launch.params.base, "low_latency_dispatch",
                WindowKind::kDispatch);
  if (threadIdx.x >= kWorkThreads) {
    return KeepStep(window, launch.num_senders);
  }
  const Dispatcher<Source, kByExpert> dispatcher(launch, window);
  if (static_cast<int32_t>(blockIdx.x) < launch.num_senders) {
    dispatcher.Send();
  } else if constexpr (kByExpert) {
    dispatcher.ReceiveByExpert();
  } else {
    dispatcher.ReceiveByRank();
  }
  WarpDone(window);
}

using Kernel = void (*)(Launch);

// The kernels by number: two for each element, two of those for each layout.
constexpr Kernel kKernels[] = {
    &DispatchKernel<Plain<false>, false>,
    &DispatchKernel<Plain<true>, false>,
    &DispatchKernel<Plain<false>, true>,
    &DispatchKernel<Plain<true>, true>,
    &DispatchKernel<Quantized<Bf16, false>, false>,
    &DispatchKernel<Quantized<Bf16, true>, false>,
    &DispatchKernel<Quantized<Bf16, false>, true>,
    &DispatchKernel<Quantized<Bf16, true>, true>,
    &DispatchKernel<Quantized<F16, false>, false>,
    &DispatchKernel<Quantized<F16, true>, false>,
    &DispatchKernel<Quantized<F16, false>, true>,
    &DispatchKernel<Quantized<F16, true>, true>,
    &DispatchKernel<Quantized<float, false>, false>,
    &DispatchKernel<Quantized<float, true>, false>,
    &DispatchKernel<Quantized<float, false>, true>,
    &DispatchKernel<Quantized<float, true>, true>,
};

int32_t KernelFor(const LowLatencyDispatchParams& params, bool wide) {
  const int32_t within = 2 * params.base.by_expert + wide;
  if (!params.quantize) return within;
  switch (params.base.element) {
    case Element::kBf16:
      return 4 + within;
    case Element::kF16:
      return 8 + within;
    default:
      return 12 + within;
  }
}

// Blocks of 32 that send. By rank they store own rows too, and still it was the
// receivers that 128 tokens waited for; by expert a row is received once for
// every expert (docs/performance.md).
int32_t SendersOf32(const LowLatencyDispatchParams& params) {
  if (params.base.by_expert) return params.quantize ? 8 : 6;
  return 16;
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
  const int32_t units = params.quantize ? ScaledLines::kUnits : Lines::kUnits;
  const int32_t num_chunks = ((row_bytes + 15) / 16 + units - 1) / units;
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
  const Launch launch = {
      .params = params,
      .experts = Experts(base.num_experts, num_ranks),
      .num_senders = num_senders,
      .num_chunks = num_chunks,
      .row_bytes = row_bytes,
      .share = share,
      .keeps_places = keeps_places,
      .by_chunks = Divisor(num_chunks),
      .by_peers = Divisor(std::max(num_ranks - 1, 1)),
      .by_tokens = Divisor(base.num_tokens),
      .by_top_k = Divisor(base.top_k),
      .by_max_tokens = Divisor(base.stride),
  };
  kKernels[KernelFor(params, wide)]<<<blocks, kWindowThreads, 0, stream>>>(
      launch);
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
