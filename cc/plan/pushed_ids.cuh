// Ids that every rank sends to every peer, for plans that are worked out from
// everybody's (PushedPlan in cc/layout/pushed_plan.h): how they travel in the
// windows of control memory, and what a kernel makes of them.
//
// Order: none between words. Each holds its epoch, is stored and polled
//        relaxed, and is its own message.
#ifndef JAX_EP_CC_PLAN_PUSHED_IDS_CUH_
#define JAX_EP_CC_PLAN_PUSHED_IDS_CUH_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cc/handshake/sync.cuh"
#include "cc/layout/control.h"
#include "cc/layout/pushed_plan.h"
#include "cc/ops.h"
#include "cc/plan/plan.cuh"
#include "cc/ptx.cuh"
#include "cc/rows/rows.cuh"

namespace jax_ep {

// A wait that lasts longer looks whether the peer is in another operation.
inline constexpr uint64_t kPatienceNs = 1'000'000;
// Most tokens name no more than 8 experts: their ids take fewer registers.
inline constexpr int kFewWords = 4;

// A token's ids, two in a word, kNoExpert where there is none.
template <int kWords>
struct TokenIds {
  uint32_t word[kWords];

  __device__ int32_t At(int32_t k) const {
    return word[k / 2] >> (k % 2 * 16) & 0xFFFF;
  }
};

// A token's ids as they stand in memory, -1 where there is none.
template <int kWords>
struct RawIds {
  int32_t id[2 * kWords];
};

// Reads ids of this rank's tokens and says where they live. kWords: words of a
// token's ids at most.
template <int kWords>
struct IdReader {
  using Ids = TokenIds<kWords>;

  const PlanParams& params;
  const PushedPlan& plan;
  const ExpertMap& experts;
  int32_t num_ranks;
  int32_t rank;
  int32_t num_tokens;
  int32_t warp;
  int32_t lane;

  __device__ IdReader(const PlanParams& p, const PushedPlan& cut,
                      const ExpertMap& map)
      : params(p),
        plan(cut),
        experts(map),
        num_ranks(p.op.view.num_ranks),
        rank(p.op.view.rank),
        num_tokens(static_cast<int32_t>(p.num_tokens)),
        warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize) {}

  // Bit r is set where the token goes to rank r.
  __device__ uint64_t RanksOf(const Ids& ids) const {
    uint64_t ranks = 0;
#pragma unroll
    for (int k = 0; k < 2 * kWords; ++k) ranks |= experts.RankBit(ids.At(k));
    return ranks;
  }
  // The same of at most 32 ranks.
  __device__ uint32_t LowRanksOf(const Ids& ids) const {
    uint32_t ranks = 0;
#pragma unroll
    for (int k = 0; k < 2 * kWords; ++k) ranks |= experts.LowRankBit(ids.At(k));
    return ranks;
  }
  __device__ uint32_t LowRanksOf(const RawIds<kWords>& raw) const {
    uint32_t ranks = 0;
#pragma unroll
    for (int k = 0; k < 2 * kWords; ++k) ranks |= experts.LowRankBit(raw.id[k]);
    return ranks;
  }
  // The id on this rank, or -1.
  __device__ int32_t Local(int32_t id) const {
    const int32_t local = id - rank * experts.local_experts;
    const bool here = experts.IsExpert(id) && local >= 0;
    return here && local < experts.local_experts ? local : -1;
  }
  __device__ bool ComesHere(const Ids& ids) const {
    bool comes = false;
#pragma unroll
    for (int k = 0; k < 2 * kWords; ++k) comes |= Local(ids.At(k)) >= 0;
    return comes;
  }

  __device__ uint32_t Pair(int32_t a, int32_t b) const {
    const uint32_t low = experts.IsExpert(a) ? a : PushedPlan::kNoExpert;
    const uint32_t high = experts.IsExpert(b) ? b : PushedPlan::kNoExpert;
    return high << 16 | low;
  }
  // Asks for the ids of a token; none where it is no token. To look at them is
  // to wait for them.
  __device__ __forceinline__ RawIds<kWords> LoadIds(int32_t token) const;
  __device__ __forceinline__ Ids Pack(const RawIds<kWords>& raw) const {
    Ids ids;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      ids.word[i] = Pair(raw.id[2 * i], raw.id[2 * i + 1]);
    }
    return ids;
  }
  __device__ __forceinline__ Ids OwnIds(int32_t token) const {
    return Pack(LoadIds(token));
  }
  __device__ __forceinline__ void WriteRow(int32_t source, int32_t token,
                                           int32_t slot, const Ids& ids,
                                           int32_t* expert_counts) const;
};

// The same, and the ids of the peers.
template <int kWords>
struct PushedIds : IdReader<kWords> {
  using Base = IdReader<kWords>;
  using Base::num_ranks, Base::rank, Base::num_tokens, Base::plan;
  using typename Base::Ids;

  // Of the `first_token` of the constructor, asked for before the epoch is
  // read. Few are not looked at before, many would take too many registers.
  static constexpr bool kLooksLater = kWords <= kFewWords;
  std::conditional_t<kLooksLater, RawIds<kWords>, Ids> asked_for;
  Control control;

  __device__ PushedIds(const PlanParams& p, const PushedPlan& cut,
                       const ExpertMap& map, const char* operation_name,
                       const ControlLayout& layout, int32_t first_token)
      : Base(p, cut, map),
        asked_for(AskFor(first_token)),
        control(p.op, operation_name, layout) {}

  __device__ __forceinline__ auto AskFor(int32_t token) const {
    if constexpr (kLooksLater) {
      return Base::LoadIds(token);
    } else {
      return Base::OwnIds(token);
    }
  }
  __device__ __forceinline__ Ids FirstIds() const {
    if constexpr (kLooksLater) {
      return Base::Pack(asked_for);
    } else {
      return asked_for;
    }
  }

  __device__ std::byte* Window(int32_t owner) const {
    return control.op.view.control[owner] +
           control.layout.window(control.op.slot, control.epoch);
  }
  // A word of the ids of `source`, which is not `owner`.
  __device__ uint64_t* IdWord(int32_t owner, int32_t source, int32_t word,
                              int32_t token) const {
    const int32_t place = source < owner ? source : source - 1;
    return reinterpret_cast<uint64_t*>(Window(owner)) +
           (place * plan.num_words + word) * num_tokens + token;
  }
  __device__ uint64_t* Counts(int32_t owner, int32_t part, int32_t from,
                              int32_t to) const {
    return reinterpret_cast<uint64_t*>(Window(owner) +
                                       control.layout.window_counts) +
           (part * num_ranks + from) * num_ranks + to;
  }
  __device__ uint64_t* Tag(int32_t owner, int32_t from) const {
    return reinterpret_cast<uint64_t*>(Window(owner) +
                                       control.layout.window_tags) +
           from;
  }

  __device__ void PushIds(int32_t peer, int32_t token, const Ids& ids) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (i >= plan.num_words) continue;
      ptx::StoreRelaxedSys(IdWord(peer, rank, i, token),
                           control.Word(ids.word[i]));
    }
  }

  __device__ __forceinline__ TokenIds<kWords> AwaitIds(int32_t source,
                                                       int32_t token) const;
  __device__ __forceinline__ uint32_t Await(const uint64_t* word,
                                            const char* step,
                                            int32_t peer) const;
};

// Called again and again while a wait goes on. What a peer in another operation
// says, it says where general operations look. `control` is a copy: registers
// have no address.
static __device__ __noinline__ void WaitsLong(const Control& control,
                                              uint64_t waited, const char* step,
                                              int32_t peer, uint64_t seen) {
  const uint64_t ready =
      ptx::LoadRelaxedSys(control.Ready(control.rank(), peer));
  const auto tag = static_cast<uint32_t>(ready);
  if (static_cast<uint32_t>(ready >> 32) == control.epoch &&
      tag != control.op.tag) {
    OtherOperation(control, peer, tag);
  }
  if (RanOut(control, waited, step, peer)) TimedOut(control, step, peer, seen);
}

template <int kWords>
__device__ __forceinline__ RawIds<kWords> IdReader<kWords>::LoadIds(
    int32_t token) const {
  RawIds<kWords> raw;
#pragma unroll
  for (int k = 0; k < 2 * kWords; ++k) raw.id[k] = -1;
  if (token >= num_tokens) return raw;
  const int32_t* from = params.topk_idx + int64_t{token} * params.top_k;
  if (params.top_k % 4 == 0) {
#pragma unroll
    for (int k = 0; k < 2 * kWords; k += 4) {
      if (k >= params.top_k) continue;
      const int4 four = __ldg(reinterpret_cast<const int4*>(from + k));
      raw.id[k] = four.x;
      raw.id[k + 1] = four.y;
      raw.id[k + 2] = four.z;
      raw.id[k + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int k = 0; k < 2 * kWords; ++k) {
      if (k < params.top_k) raw.id[k] = __ldg(from + k);
    }
  }
  return raw;
}

// Waits until `word` holds this epoch; returns its payload.
template <int kWords>
__device__ __forceinline__ uint32_t PushedIds<kWords>::Await(
    const uint64_t* word, const char* step, int32_t peer) const {
  uint64_t start = 0;
  for (;;) {
    const uint64_t seen = ptx::LoadRelaxedSys(word);
    if (static_cast<uint32_t>(seen >> 32) == control.epoch) {
      return static_cast<uint32_t>(seen);
    }
    const uint64_t now = ptx::GlobalTimer();
    if (start == 0) start = now;
    if (now - start > kPatienceNs) {
      WaitsLong(Control(control), now - start, step, peer, seen);
    }
  }
}

// Waits for the ids of a peer's token, four words in flight at a time.
template <int kWords>
__device__ __forceinline__ TokenIds<kWords> PushedIds<kWords>::AwaitIds(
    int32_t source, int32_t token) const {
  Ids ids;
#pragma unroll
  for (int i = 0; i < kWords; ++i) ids.word[i] = ~0u;
#pragma unroll
  for (int first = 0; first < kWords; first += 4) {
    if (first >= plan.num_words) continue;
    uint64_t seen[4];
    uint64_t start = 0;
    for (;;) {
      bool there = true;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Past the end, the last word again.
        const int32_t word = min(first + i, plan.num_words - 1);
        seen[i] = ptx::LoadRelaxedSys(IdWord(rank, source, word, token));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        there &= static_cast<uint32_t>(seen[i] >> 32) == control.epoch;
      }
      if (there) break;
      const uint64_t now = ptx::GlobalTimer();
      if (start == 0) start = now;
      if (now - start > kPatienceNs) {
        WaitsLong(Control(control), now - start, "the ids", source, seen[0]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i < plan.num_words) {
        ids.word[first + i] = static_cast<uint32_t>(seen[i]);
      }
    }
  }
  return ids;
}

// Writes what a plan says of a row that came, and counts its experts in
// expert_counts, which other threads count in too.
template <int kWords>
__device__ __forceinline__ void IdReader<kWords>::WriteRow(
    int32_t source, int32_t token, int32_t slot, const Ids& ids,
    int32_t* expert_counts) const {
  params.recv_src[slot] = source * num_tokens + token;
  int32_t* to = params.recv_topk_idx + int64_t{slot} * params.top_k;
  const auto local = [&](int32_t k) {
    const int32_t id = Local(ids.At(k));
    if (id >= 0) atomicAdd(expert_counts + id, 1);
    return id;
  };
  if (params.top_k % 4 == 0) {
#pragma unroll
    for (int k = 0; k < 2 * kWords; k += 4) {
      if (k >= params.top_k) continue;
      *reinterpret_cast<int4*>(to + k) = {local(k), local(k + 1), local(k + 2),
                                          local(k + 3)};
    }
  } else {
#pragma unroll
    for (int k = 0; k < 2 * kWords; ++k) {
      if (k < params.top_k) to[k] = local(k);
    }
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_PLAN_PUSHED_IDS_CUH_
