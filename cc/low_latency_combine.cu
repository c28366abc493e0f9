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
  WindowOffsets offsets;
  Experts experts;
  Roles roles;
  int32_t num_chunks;  // of a row
  int32_t row_bytes;
  int32_t num_slots;  // of a warp, in shared memory
  Divisor by_chunks;
  Divisor by_peers;  // num_ranks - 1
};

// Parts of rows that a warp has in flight as they are, sending and receiving.
constexpr int kSending = 5;
constexpr int kReceiving = 4;

using Slots = Shelf<kPerLane, false>;

template <typename T, bool kByExpert>
struct Combiner {
  using Protocol = Lines;
  using Row = Elements<T, uint4>;

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
        num_units(l.row_bytes / 16),
        warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize) {}

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

  __device__ const std::byte* RowOfY(int32_t place) const {
    return params.y + int64_t{place} * launch.row_bytes;
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

  // A part of a row that this rank sums over its experts: of a peer's token,
  // then it is sent, or of an own one.
  struct Step {
    int32_t i;  // of the peers' items, or of the own ones
    bool receives;
    bool exists;
  };
  __device__ Item ItemOf(const Step& step) const {
    if (!step.receives) return PeersItem(step.i);
    const int32_t token = launch.by_chunks.Divide(step.i);
    const int32_t chunk = step.i - token * launch.num_chunks;
    return {me, token, chunk, chunk * Protocol::kUnits};
  }
  // What a warp has to know of a step beforehand. Lane k has the k-th choice's:
  // the id of an own token alone.
  struct Looked {
    int32_t place;
    int32_t id;
    uint64_t weight;  // a word
  };
  __device__ const uint64_t* WeightWord(const Item& item) const {
    return window.Words(me, item.source) + item.token * top_k + lane;
  }
  __device__ Step FirstStep() const;
  __device__ Step NextStep(Step step) const;
  __device__ Looked LookAtPlaces(const Step& step) const;
  __device__ void LookAtWeights(const Step& step, Looked& looked) const;
  __device__ void SumByExpert(const Slots& shelf) const;
  template <typename Own>
  __device__ void FinishOwn(const Item& item, uint64_t ranks, Units& words,
                            const Own& own) const;

  __device__ void SendWeights() const;
  __device__ void SendByRank() const;
  __device__ void AskOwn(int32_t base, const Slots& shelf) const;
  __device__ void ReceiveByRank(const Slots& shelf) const;
  __device__ void LookAtPeer(const Item& item, uint64_t ranks,
                             Units& words) const;
  __device__ void Run() const;
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
  const int32_t count = launch.roles.num_senders * kWorkWarps;
  const int32_t index = warp * launch.roles.num_senders + blockIdx.x;
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
      LoadRow<Protocol>(RowOfY(item.source * params.base.stride + item.token),
                        item.first, num_units - item.first, units[j]);
    }
    if (!begun) HasEpoch(window);
    begun = true;
#pragma unroll 1
    for (int j = 0; j < kSending && base + j * count < num_items; ++j) {
      int32_t place;
      Pick(places, j, place);
      if (!__any_sync(kAllLanes, place >= 0)) continue;
      Units one;
      Pick(units, j, one);
      Push(PeersItem(base + j * count), one);
    }
  }
}

// A first look at the item's row of the first peer in `ranks`.
template <typename T, bool kByExpert>
__device__ __forceinline__ void Combiner<T, kByExpert>::LookAtPeer(
    const Item& item, uint64_t ranks, Units& words) const {
  ranks &= ~(uint64_t{1} << me);
  if (ranks == 0) return;
  const int32_t peer = __ffsll(static_cast<long long>(ranks)) - 1;
  LookAt<Protocol>(window.Chunk(me, peer, item.token, item.chunk),
                   num_units - item.first, words);
}

// The sum over ranks of an item of an own token; own(units) gives what this
// rank has of it. `words` are a first look at the first peer's.
template <typename T, bool kByExpert>
template <typename Own>
__device__ __forceinline__ void Combiner<T, kByExpert>::FinishOwn(
    const Item& item, uint64_t ranks, Units& words, const Own& own) const {
  const int32_t left = num_units - item.first;
  Sum sum;
  sum.Begin(ranks == 0);
  for (uint64_t rest = ranks; rest != 0; rest &= rest - 1) {
    const int32_t rank = __ffsll(static_cast<long long>(rest)) - 1;
    Units units;
    if (rank == me) {
      own(units);
      sum.Add(units);
      continue;
    }
    WaitChunk<Protocol>(window, window.Chunk(me, rank, item.token, item.chunk),
                        left, rank, words, units);
    LookAtPeer(item, rest & (rest - 1), words);
    sum.Add(units);
  }
  Units units;
  sum.Round(units);
  StoreRow<Protocol>(params.out + int64_t{item.token} * launch.row_bytes,
                     item.first, left, units);
}

// Asks for this rank's own rows of the receiving items from the base-th of each
// warp on: what they hold is used where ids say so.
template <typename T, bool kByExpert>
__device__ __forceinline__ void Combiner<T, kByExpert>::AskOwn(
    int32_t base, const Slots& shelf) const {
  const int32_t blocks = launch.roles.num_receivers();
  const int32_t count = blocks * kWorkWarps;
  base += warp * blocks + launch.roles.receiver();
#pragma unroll 1
  for (int32_t j = 0; j < kReceiving; ++j) {
    const int32_t i = base + j * count;
    if (i >= num_tokens * launch.num_chunks) return;
    const Item item = ItemOf({i, true, true});
    shelf.Ask<Protocol>(j, RowOfY(me * params.base.stride + item.token),
                        item.first, num_units - item.first);
    ptx::CommitCopies();
  }
}

template <typename T, bool kByExpert>
__device__ void Combiner<T, kByExpert>::ReceiveByRank(
    const Slots& shelf) const {
  constexpr int kBatch = kReceiving;
  const int32_t blocks = launch.roles.num_receivers();
  const int32_t index = warp * blocks + launch.roles.receiver();
  const int32_t count = blocks * kWorkWarps;
  const int32_t num_items = num_tokens * launch.num_chunks;
  const uint64_t others = ~(uint64_t{1} << me);
  const auto load_ids = [&](int32_t base, int32_t (&ids)[kBatch]) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int32_t i = base + j * count;
      ids[j] = -1;
      if (i >= num_items || lane >= top_k) continue;
      const int32_t token = launch.by_chunks.Divide(i);
      ids[j] = __ldg(params.base.topk_idx + token * top_k + lane);
    }
  };
  int32_t next_ids[kBatch];
  load_ids(index, next_ids);
  if (!launch.roles.Sends()) HasEpoch(window);
  for (int32_t base = index; base < num_items; base += kBatch * count) {
    const auto item_of = [&](int j) {
      return ItemOf({base + j * count, true, true});
    };
    int32_t ids[kBatch];
    Units words[kBatch];
    uint32_t missing = 0;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      ids[j] = next_ids[j];
      if (base + j * count >= num_items) continue;
      const uint64_t ranks = RanksOfWarp(experts.RankOf(ids[j]), num_ranks);
      const Item item = item_of(j);
      missing |= 1u << j;
      LookAtPeer(item, ranks, words[j]);
    }
    if (base != index) AskOwn(base - index, shelf);
    // Of the next items, while these ones' rows are on their way.
    load_ids(base + kBatch * count, next_ids);
    ptx::WaitCopies<0>();
    TakeAsTheyCome<Protocol, true>(
        window, missing, words,
        [&](int j) -> Awaited {
          const uint64_t rest =
              RanksOfWarp(experts.RankOf(ids[j]), num_ranks) & others;
          const int32_t peer =
              rest == 0 ? me : __ffsll(static_cast<long long>(rest)) - 1;
          const Item item = item_of(j);
          return {window.Chunk(me, peer, item.token, item.chunk),
                  rest == 0 ? 0 : num_units - item.first, peer};
        },
        [&](int j, Units& taken) {
          int32_t id;
          Pick(ids, j, id);
          FinishOwn(item_of(j), RanksOfWarp(experts.RankOf(id), num_ranks),
                    taken, [&](Units& own) { shelf.Get(j, own); });
        });
  }
}

// By expert. A warp has the steps of all that it sends, and after them those of
// what it receives. The rows of all steps are one stream, of which it has as
// many in flight as it can hold: with the last rows of one step on their way it
// asks for those of the next.

template <typename T, bool kByExpert>
__device__ __forceinline__ typename Combiner<T, kByExpert>::Step
Combiner<T, kByExpert>::FirstStep() const {
  Step step = {
      static_cast<int32_t>(warp * launch.roles.num_senders + blockIdx.x), false,
      true};
  if (!launch.roles.Sends() ||
      step.i >= num_tokens * (num_ranks - 1) * launch.num_chunks) {
    step = {warp * launch.roles.num_receivers() + launch.roles.receiver(), true,
            launch.roles.Receives()};
    step.exists &= step.i < num_tokens * launch.num_chunks;
  }
  return step;
}

template <typename T, bool kByExpert>
__device__ __forceinline__ typename Combiner<T, kByExpert>::Step
Combiner<T, kByExpert>::NextStep(Step step) const {
  if (!step.exists) return step;
  if (!step.receives) {
    step.i += launch.roles.num_senders * kWorkWarps;
    if (step.i < num_tokens * (num_ranks - 1) * launch.num_chunks) return step;
    step = {warp * launch.roles.num_receivers() + launch.roles.receiver(), true,
            launch.roles.Receives()};
  } else {
    step.i += launch.roles.num_receivers() * kWorkWarps;
  }
  step.exists &= step.i < num_tokens * launch.num_chunks;
  return step;
}

template <typename T, bool kByExpert>
__device__ __forceinline__ typename Combiner<T, kByExpert>::Looked
Combiner<T, kByExpert>::LookAtPlaces(const Step& step) const {
  Looked looked = {-1, -1, 0};
  if (!step.exists || lane >= top_k) return looked;
  const Item item = ItemOf(step);
  looked.place = PlaceOf(item.source, item.token);
  if (step.receives) {
    looked.id = __ldg(params.base.topk_idx + item.token * top_k + lane);
  }
  return looked;
}

template <typename T, bool kByExpert>
__device__ __forceinline__ void Combiner<T, kByExpert>::LookAtWeights(
    const Step& step, Looked& looked) const {
  if (!step.exists || lane >= top_k) return;
  const Item item = ItemOf(step);
  looked.weight = step.receives
                      ? window.Word(__float_as_uint(__ldg(
                            params.topk_weights + item.token * top_k + lane)))
                      : ptx::LoadRelaxedSys(WeightWord(item));
}

template <typename T, bool kByExpert>
__device__ void Combiner<T, kByExpert>::SumByExpert(const Slots& shelf) const {
  const int32_t depth = launch.num_slots;

  // Rows of `now` are added, some of `next` may have been asked for, and of
  // `then` places and weights.
  Step now = FirstStep();
  Looked of_now = LookAtPlaces(now);
  Step next = NextStep(now);
  Looked of_next = LookAtPlaces(next);
  if (blockIdx.x == 0) {
    SendWeights();
  } else {
    HasEpoch(window);
  }
  LookAtWeights(now, of_now);
  LookAtWeights(next, of_next);

  // The shelf is a ring of rows in flight. `load` tells of what is to be asked
  // for next.
  int32_t first_row = 0, num_rows = 0;
  struct {
    int32_t place;
    uint32_t left;
    int32_t first;
  } load;
  bool loads_next = false;
  const auto load_of = [&](const Step& step, const Looked& looked) {
    load.place = looked.place;
    load.left = __ballot_sync(kAllLanes, looked.place >= 0);
    load.first = ItemOf(step).first;
  };
  // Asks for one more row; whether there was one.
  const auto load_row = [&] {
    if (load.left == 0) {
      if (loads_next || !next.exists) return false;
      loads_next = true;
      load_of(next, of_next);
      if (load.left == 0) return false;
    }
    const int32_t place =
        __shfl_sync(kAllLanes, load.place, __ffs(load.left) - 1);
    load.left &= load.left - 1;
    int32_t at = first_row + num_rows;
    if (at >= depth) at -= depth;
    shelf.Ask<Protocol>(at, RowOfY(place), load.first, num_units - load.first);
    ptx::CommitCopies();
    ++num_rows;
    return true;
  };

  if (now.exists) load_of(now, of_now);
  while (now.exists) {
    while (num_rows < depth && load_row()) {
    }
    const Step then = NextStep(next);
    Looked of_then = LookAtPlaces(then);
    LookAtWeights(then, of_then);

    const Item item = ItemOf(now);
    uint64_t ranks = 0;
    Units words;
    if (now.receives) {
      ranks = RanksOfWarp(experts.RankOf(of_now.id), num_ranks);
      LookAtPeer(item, ranks, words);
    }
    uint32_t left = __ballot_sync(kAllLanes, of_now.place >= 0);
    uint64_t seen[] = {of_now.place >= 0 ? of_now.weight : window.Word(0)};
    WaitWords(
        window, seen,
        [&](int) -> AwaitedWord { return {WeightWord(item), item.source}; },
        "the weights");
    const float weight = __uint_as_float(static_cast<uint32_t>(seen[0]));
    const bool any = left != 0;
    Sum sum;
    sum.Begin(false);
    for (; left != 0; left &= left - 1) {
      const float of_row = __shfl_sync(kAllLanes, weight, __ffs(left) - 1);
      --num_rows;
      Slots::WaitOldest(num_rows);
      Units row;
      shelf.Get(first_row, row);
      sum.AddTimes(of_row, row);
      first_row = first_row + 1 == depth ? 0 : first_row + 1;
      load_row();
    }
    Units units;
    sum.Round(units);
    if (now.receives) {
      FinishOwn(item, ranks, words,
                [&](Units& own) { memcpy(&own, &units, sizeof(Units)); });
    } else if (any) {
      Push(item, units);
    }
    now = next;
    of_now = of_next;
    next = then;
    of_next = of_then;
    if (!loads_next && now.exists) load_of(now, of_now);
    loads_next = false;
  }
}

template <typename T, bool kByExpert>
__device__ void Combiner<T, kByExpert>::Run() const {
  extern __shared__ uint4 shared_units[];
  const Slots shelf(reinterpret_cast<std::byte*>(shared_units),
                    launch.num_slots);
  if constexpr (kByExpert) {
    SumByExpert(shelf);
  } else {
    if (launch.roles.Receives()) AskOwn(0, shelf);
    if (launch.roles.Sends()) SendByRank();
    if (launch.roles.Receives()) ReceiveByRank(shelf);
  }
}

template <typename T, bool kByExpert>
__global__ void __launch_bounds__(kWindowThreads, 1)
    CombineKernel(const __grid_constant__ Launch launch) {
  Window window(launch.params.base, launch.offsets, "low_latency_combine",
                WindowKind::kCombine);
  if (threadIdx.x >= kWorkThreads) {
    return KeepStep(window, launch.roles.first_receiver);
  }
  Combiner<T, kByExpert>(launch, window).Run();
  WarpDone(window);
}

using Kernel = void (*)(Launch);

// The kernels by number: two for each element, by rank and by expert.
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
  Roles roles;
  const cudaError_t status =
      Roles::Of(blocks, base.by_expert ? 16 : 10, &roles);
  if (status != cudaSuccess) return status;
  const int32_t num_slots =
      Slots::Fitting(base.by_expert ? Slots::kMost : kReceiving,
                     LowLatencySharedBytes(base.op.view.has_bulk));
  const Launch launch = {
      .params = params,
      .offsets = WindowOffsets(base.layout, WindowKind::kCombine),
      .experts = Experts(base.num_experts, num_ranks),
      .roles = roles,
      .num_chunks = num_chunks,
      .row_bytes = row_bytes,
      .num_slots = num_slots,
      .by_chunks = Divisor(num_chunks),
      .by_peers = Divisor(std::max(num_ranks - 1, 1)),
  };
  const int32_t element = base.element == Element::kBf16  ? 0
                          : base.element == Element::kF16 ? 1
                                                          : 2;
  kKernels[2 * element + base.by_expert]<<<
      blocks, kWindowThreads, num_slots * Slots::OneOfEach(), stream>>>(launch);
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
