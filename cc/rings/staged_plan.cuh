// The staged part of plan: metadata of rows for outputs that this rank cannot
// reach.
//
// Launch: called by all threads of the last block of a launch to finish.
// Roles:  channel 0 alone, as there is little to send: the ids of each row that
//         a rank of another process is to get, in the order of slots. Its
//         receiver knows from the counts how many come and where they belong,
//         and adds up the expert counts itself.
// Reads:  params.topk_idx, and routes, which the blocks before have written.
//         Writes: staging memory of the peers; recv_topk_idx, recv_src and
//         workspace of this rank (the latter by atomic adds).
// Order:  cc/rings/channel.cuh; IsLastBlock() acquired the routes and the
//         zeroed workspace.
#ifndef JAX_EP_CC_RINGS_STAGED_PLAN_CUH_
#define JAX_EP_CC_RINGS_STAGED_PLAN_CUH_

#include <cstddef>
#include <cstdint>

#include "cc/ops.h"
#include "cc/rings/channel.cuh"

namespace jax_ep {

// Addresses that peers need: outputs written from afar.
enum Address { kRecvTopkIdx, kRecvSrc, kReceived, kNumAddresses };
static_assert(kNumAddresses <= kMaxLeaves);

// Of a rank whose outputs are partly out of reach none is used: all goes
// through staging memory. `peers` as WaitReady() leaves it. Called by all
// threads of a block; a barrier has to follow.
static __device__ __forceinline__ void ReachAllOrNone(const Control& control,
                                                      std::byte** peers) {
  const int32_t num_ranks = control.num_ranks();
  if (threadIdx.x >= num_ranks) return;
  std::byte** mine = peers + threadIdx.x;
  bool all = true;
  for (int32_t i = 0; i < kNumAddresses; ++i) {
    all &= mine[i * num_ranks] != nullptr;
  }
  for (int32_t i = 0; i < kNumAddresses && !all; ++i) {
    mine[i * num_ranks] = nullptr;
  }
}

// A row on its way: recv_src, then recv_topk_idx, int32 each.
static __device__ __forceinline__ RowCut MetadataCut(const PlanParams& params,
                                                     const Rings& rings) {
  const RowCut cut((1 + int64_t{params.top_k}) * 4, rings.layout.slot_bytes);
  static_assert((1 + kMaxTopK) * 4 <= StagingLayout::kMinSlotBytes,
                "rows are not cut");
  return cut;
}

static __device__ void SendStaged(const PlanParams& params, const Rings& rings,
                                  const Team& team, std::byte* const* peers,
                                  TokenWindow& window) {
  const int32_t top_k = params.top_k;
  const int32_t num_ranks = rings.num_ranks();
  const int32_t local_experts = LocalExperts(params.num_experts, num_ranks);
  const RowCut cut = MetadataCut(params, rings);
  for (int32_t step = 1; step < num_ranks; ++step) {
    const int32_t peer = SendsTo(rings, step);
    if (peers[kRecvSrc * num_ranks + peer] != nullptr) continue;
    const int64_t first_source = rings.rank() * params.num_tokens;
    const int64_t first_expert = int64_t{peer} * local_experts;
    const auto word = [&](int64_t token, uint32_t i) {
      if (i == 0) return static_cast<int32_t>(first_source + token);
      const int32_t id = __ldg(params.topk_idx + token * top_k + i - 1);
      const int64_t local = id - first_expert;
      const bool here =
          id < params.num_experts && local >= 0 && local < local_experts;
      return here ? static_cast<int32_t>(local) : -1;
    };
    Producer producer(rings, team, peer);
    SendTokens(
        team, cut, params.routes, RoutesPerToken(top_k, num_ranks),
        {0, params.num_tokens}, peer, window, producer,
        [&](const int32_t* tokens, int64_t, int64_t count, std::byte* slot) {
          const uint32_t words = 1 + top_k;
          for (uint32_t at = team.thread; at < count * words;
               at += kTeamThreads) {
            const uint32_t row = at / words;
            reinterpret_cast<int32_t*>(slot +
                                       row * cut.piece_bytes)[at % words] =
                word(tokens[row], at % words);
          }
        });
  }
}

static __device__ void ReceiveStaged(const PlanParams& params,
                                     const Rings& rings, const Team& team,
                                     const int32_t* received_rows) {
  const int32_t top_k = params.top_k;
  const int32_t num_ranks = rings.num_ranks();
  const int32_t local_experts = LocalExperts(params.num_experts, num_ranks);
  const RowCut cut = MetadataCut(params, rings);
  for (int32_t step = 1; step < num_ranks; ++step) {
    const int32_t peer = ReceivesFrom(rings, step);
    if (!rings.Leads(peer)) continue;
    int64_t first_slot = 0;
    for (int32_t r = 0; r < peer; ++r) first_slot += received_rows[r];
    const int64_t room = max(params.capacity - first_slot, int64_t{0});
    int32_t* counts = params.workspace + int64_t{peer} * local_experts;
    Consumer consumer(rings, team, peer);
    ReceiveRows(
        cut, min(int64_t{received_rows[peer]}, room), consumer,
        [&](int64_t first, int64_t, int64_t count, const std::byte* slot) {
          const uint32_t words = 1 + top_k;
          for (uint32_t at = team.thread; at < count * words;
               at += kTeamThreads) {
            const uint32_t row = at / words;
            const uint32_t i = at % words;
            const int32_t value = reinterpret_cast<const int32_t*>(
                slot + row * cut.piece_bytes)[i];
            const int64_t to = first_slot + first + row;
            if (i == 0) {
              params.recv_src[to] = value;
            } else {
              params.recv_topk_idx[to * top_k + i - 1] = value;
              if (value >= 0) atomicAdd(counts + value, 1);
            }
          }
        });
  }
}

// `peers` as ReachAllOrNone() leaves it, `received_rows` [R] before drops, both
// in shared memory. A barrier has to follow. Out of line: the direct part keeps
// its registers.
static __device__ __noinline__ void MoveStaged(const PlanParams& params,
                                               const Control& control,
                                               std::byte* const* peers,
                                               const int32_t* received_rows) {
  __shared__ TokenWindow window;
  BeginStaged(control, /*takes=*/true);
  const Rings rings(control, 0);
  const Team team = Team::Mine();
  if (team.number == kSends) {
    SendStaged(params, rings, team, peers, window);
  } else if (team.number == kReceives) {
    bool all = true;
    for (int32_t i = 0; i < kNumAddresses; ++i) all &= params.exported[i];
    if (!all) ReceiveStaged(params, rings, team, received_rows);
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_RINGS_STAGED_PLAN_CUH_
