// What the warps of a low-latency dispatch do with rows: send them, and receive
// them as they come. Where rows go by expert is found in
// cc/few_tokens/low_latency_dispatch.cu.
#ifndef JAX_EP_CC_FEW_TOKENS_WINDOW_DISPATCHER_CUH_
#define JAX_EP_CC_FEW_TOKENS_WINDOW_DISPATCHER_CUH_

#include <cstddef>
#include <cstdint>

#include "cc/few_tokens/low_latency.h"
#include "cc/few_tokens/row_source.cuh"
#include "cc/few_tokens/window_chunks.cuh"
#include "cc/few_tokens/window_worker.cuh"

namespace jax_ep {

struct DispatchLaunch {
  LowLatencyDispatchParams params;
  Experts experts;
  int32_t num_senders;  // blocks
  int32_t num_chunks;   // of a row
  int32_t x_bytes;      // of a row of x
  int32_t row_bytes;    // of one of `rows`
  int32_t num_scales;   // of a row
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

template <typename Source, bool kByExpert>
struct WindowDispatcher : WindowWorker<DispatchLaunch> {
  using Protocol = typename Source::Protocol;
  using Chunk = typename Source::Chunk;

  using WindowWorker<DispatchLaunch>::WindowWorker;

  // Chunks of what it receives that a warp has in flight.
  static constexpr int kReceiving = 6;

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

  __device__ const std::byte* RowOfX(int32_t token) const {
    return params.x + int64_t{token} * launch.x_bytes;
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

  __device__ int32_t PlaceAt(const Item& item, const Places& places) const {
    return lane < top_k ? places.Of(item.source, item.token, top_k)[lane] : -1;
  }

  // An expert id and its weight.
  struct IdAndWeight {
    uint32_t id;
    uint32_t weight;
  };
  __device__ IdAndWeight IdAndWeightOf(int32_t i) const;
  __device__ void SendIdAndWeight(int32_t thread, int32_t threads,
                                  IdAndWeight pair) const;
  __device__ void Send() const;
  __device__ void SendItem(const Item& item, uint64_t ranks,
                           const Units& units) const;
  template <typename Ready>
  __device__ void CopyOwn(int32_t begin, int32_t end, const Ready& ready,
                          const Places& places) const;
  __device__ void Receive(int32_t index, int32_t count, int32_t begin,
                          int32_t num_items, const Places& places) const;
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
__device__ typename WindowDispatcher<Source, kByExpert>::IdAndWeight
WindowDispatcher<Source, kByExpert>::IdAndWeightOf(int32_t i) const {
  if (i >= num_tokens * top_k) return {};
  return {static_cast<uint32_t>(__ldg(params.base.topk_idx + i)),
          kByExpert || params.topk_weights == nullptr
              ? 0
              : __float_as_uint(__ldg(params.topk_weights + i))};
}

// Ids and weights of all tokens to all peers. `pair` is the thread's first.
template <typename Source, bool kByExpert>
__device__ void WindowDispatcher<Source, kByExpert>::SendIdAndWeight(
    int32_t thread, int32_t threads, IdAndWeight pair) const {
  ForEach(thread, threads, num_tokens * top_k, [&](int32_t i) {
    if (i != thread) pair = IdAndWeightOf(i);
    for (int32_t p = 1; p < num_ranks; ++p) {
      const int32_t peer = me + p < num_ranks ? me + p : me + p - num_ranks;
      ptx::StoreRelaxedSys(window.Words(peer, me) + i, window.Word(pair.id));
      if (!kByExpert && params.topk_weights != nullptr) {
        ptx::StoreRelaxedSys(window.Weights(peer, me) + i,
                             window.Word(pair.weight));
      }
    }
  });
}

// To the ranks of the mask, none of them this one.
template <typename Source, bool kByExpert>
__device__ void WindowDispatcher<Source, kByExpert>::SendItem(
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
__device__ void WindowDispatcher<Source, kByExpert>::Send() const {
  constexpr int kBatch = Source::kSending;
  const int32_t count = launch.num_senders * kWorkWarps;
  const int32_t index = warp * launch.num_senders + blockIdx.x;
  const int32_t num_items =
      kByExpert && num_ranks == 1 ? 0 : num_tokens * launch.num_chunks;
  // What others wait for longest is asked for first.
  const int32_t thread = index * kWarpSize + lane;
  const IdAndWeight pair =
      num_ranks == 1 ? IdAndWeight{} : IdAndWeightOf(thread);
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
        Source::Load(RowOfX(item.token), item.first, item.left, chunks[j]);
      }
    }
    // While the rows are on their way here.
    if (!begun) {
      HasEpoch(window);
      SendIdAndWeight(thread, count * kWarpSize, pair);
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
__device__ void WindowDispatcher<Source, kByExpert>::Deliver(
    const Item& item, int32_t place, const Units& units) const {
  for (uint32_t left = __ballot_sync(kAllLanes, place >= 0); left != 0;
       left &= left - 1) {
    const int64_t at = __shfl_sync(kAllLanes, place, __ffs(left) - 1);
    StoreRow<Protocol>(params.rows + at * launch.row_bytes, item.first,
                       item.left, units);
    if constexpr (Source::kScaled) {
      const int64_t num_scales = launch.num_scales;
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
// Their places are there once ready() has returned.
template <typename Source, bool kByExpert>
template <typename Ready>
__device__ void WindowDispatcher<Source, kByExpert>::CopyOwn(
    int32_t begin, int32_t end, const Ready& ready,
    const Places& places) const {
  constexpr int kBatch = Source::kCopying;
  bool is_ready = false;
  for (int32_t base = begin + warp; base < end || !is_ready;
       base += kBatch * kWorkWarps) {
    Chunk chunks[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (base + j * kWorkWarps < end) {
        const Item item = OwnItem(base + j * kWorkWarps);
        Source::Load(RowOfX(item.token), item.first, item.left, chunks[j]);
      }
    }
    // While the rows are on their way here.
    if (!is_ready) ready();
    is_ready = true;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (base + j * kWorkWarps >= end) continue;
      const Item item = OwnItem(base + j * kWorkWarps);
      const int32_t place = PlaceAt(item, places);
      if (!__any_sync(kAllLanes, place >= 0)) continue;
      Units units;
      Source::Finish(chunks[j], units);
      Deliver(item, place, units);
    }
  }
}

// Items of the peers' rows from own item `begin` on, every count-th.
template <typename Source, bool kByExpert>
__device__ void WindowDispatcher<Source, kByExpert>::Receive(
    int32_t index, int32_t count, int32_t begin, int32_t num_items,
    const Places& places) const {
  for (int32_t base = index; base < num_items; base += kReceiving * count) {
    const auto item_of = [&](int j) {
      return PeersItem(begin, base + j * count);
    };
    Units words[kReceiving];
    uint64_t looked[kReceiving];
    // At the rows too, before it is known whether they come at all.
#pragma unroll
    for (int j = 0; j < kReceiving; ++j) {
      looked[j] = window.Word(~0u);
      if (base + j * count >= num_items) continue;
      const Item item = item_of(j);
      if (!kByExpert && lane < top_k) {
        looked[j] = ptx::LoadRelaxedSys(IdWord(item.source, item.token));
      }
      LookAt<Protocol>(window.Chunk(me, item.source, item.token, item.chunk),
                       item.left, words[j]);
    }
    if constexpr (!kByExpert) {
      WaitWords(
          window, looked,
          [&](int j) -> AwaitedWord {
            const Item item = item_of(j);
            return {IdWord(item.source, item.token), item.source};
          },
          "the ids");
    }
#pragma unroll
    for (int j = 0; j < kReceiving; ++j) {
      if (base + j * count >= num_items) continue;
      const Item item = item_of(j);
      int32_t place;
      if constexpr (kByExpert) {
        place = PlaceAt(item, places);
        if (!__any_sync(kAllLanes, place >= 0)) continue;
      } else {
        const int32_t here =
            experts.LocalOn(me, static_cast<int32_t>(looked[j]));
        if (!__any_sync(kAllLanes, here >= 0)) continue;
        // The first lane has the row's place.
        place = lane == 0 ? item.source * params.base.stride + item.token : -1;
      }
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
__device__ void WindowDispatcher<Source, kByExpert>::ReceiveIds(
    int32_t thread, int32_t threads) const {
  const int32_t stride = params.base.stride;
  const int32_t num_pairs = num_ranks * stride * top_k;
  for (int32_t first = thread - lane; first < num_pairs; first += threads) {
    const int32_t i = first + lane;
    const int32_t row = launch.by_top_k.Divide(i);
    const int32_t source = launch.by_max_tokens.Divide(row);
    const int32_t token = row - source * stride;
    const int32_t pair = token * top_k + i - row * top_k;
    const bool comes = i < num_pairs && token < num_tokens;
    // What peers say of a pair, once it is here; this rank's own by itself.
    const auto word_of = [&](const uint64_t* words, const char* step,
                             bool wanted, uint32_t own) {
      uint64_t seen[] = {window.Word(own)};
      if (wanted && source != me) seen[0] = ptx::LoadRelaxedSys(words + pair);
      WaitWords(
          window, seen,
          [&](int) -> AwaitedWord { return {words + pair, source}; }, step);
      return static_cast<uint32_t>(seen[0]);
    };
    const uint32_t own_id =
        comes && source == me ? __ldg(params.base.topk_idx + pair) : ~0u;
    const int32_t local = experts.LocalOn(
        me, static_cast<int32_t>(
                word_of(window.Words(me, source), "the ids", comes, own_id)));
    if (i < num_pairs) params.places[i] = local;
    if (params.topk_weights == nullptr) continue;
    const float own_weight =
        local >= 0 && source == me ? __ldg(params.topk_weights + pair) : 0;
    const uint32_t weight = word_of(window.Weights(me, source), "the weights",
                                    local >= 0, __float_as_uint(own_weight));
    if (i < num_pairs) params.recv_weights[i] = __uint_as_float(weight);
  }
}

template <typename Source, bool kByExpert>
__device__ void WindowDispatcher<Source, kByExpert>::ReceiveByRank() const {
  HasEpoch(window);
  const int32_t blocks = gridDim.x - launch.num_senders;
  const int32_t index = warp * blocks + blockIdx.x - launch.num_senders;
  const int32_t count = blocks * kWorkWarps;
  // By the last warps: with few tokens those have no rows.
  ReceiveIds((count - 1 - index) * kWarpSize + lane, count * kWarpSize);
  Receive(index, count, 0, num_tokens * launch.num_chunks * (num_ranks - 1),
          Places{});
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_FEW_TOKENS_WINDOW_DISPATCHER_CUH_
