// The staged part of dispatch: rows for buffers that this rank cannot reach.
//
// Launch: called by all threads of every block, after the direct part.
// Roles:  channel c moves the rows of its share of each rank's tokens, peer by
//         peer, leaf by leaf, in the order of the tokens. The sender finds them
//         in its routes, the receiver knows their slots from recv_src, so that
//         only rows travel.
// Reads:  params.routes, num_recv, recv_src, leaves[].in.
//         Writes: staging memory of the peers, leaves[].out of this rank.
// Order:  cc/rings/channel.cuh.
#ifndef JAX_EP_CC_RINGS_STAGED_DISPATCH_CUH_
#define JAX_EP_CC_RINGS_STAGED_DISPATCH_CUH_

#include <cstddef>
#include <cstdint>

#include "cc/ops.h"
#include "cc/rings/channel.cuh"

namespace jax_ep {

static __device__ void SendStaged(const DispatchParams& params,
                                  const Rings& rings, const Team& team,
                                  std::byte* const* outputs,
                                  TokenWindow& window) {
  const Range tokens =
      TokensOf(rings.control, rings.channel, params.num_tokens);
  for (int32_t step = 1; step < rings.num_ranks(); ++step) {
    const int32_t peer = SendsTo(rings, step);
    Producer producer(rings, team, peer);
    for (int32_t i = 0; i < params.num_leaves; ++i) {
      if (outputs[i * rings.num_ranks() + peer] != nullptr) continue;
      const Leaf& leaf = params.leaves[i];
      const RowCut cut(leaf.row_bytes, rings.layout.slot_bytes);
      SendTokens(team, cut, params.routes, params.routes_per_token, tokens,
                 peer, window, producer,
                 [&](const int32_t* rows, int64_t part, int64_t count,
                     std::byte* slot) {
                   CopyPieces(team,
                              {leaf.in + cut.begin(part), cut.row_bytes, rows},
                              slot, cut.piece_bytes, count, cut.bytes(part));
                 });
    }
  }
}

static __device__ void ReceiveStaged(const DispatchParams& params,
                                     const Rings& rings, const Team& team) {
  const Range tokens =
      TokensOf(rings.control, rings.channel, params.num_tokens);
  for (int32_t step = 1; step < rings.num_ranks(); ++step) {
    const int32_t peer = ReceivesFrom(rings, step);
    if (!rings.Leads(peer)) continue;
    const Range slots = SlotsOf(params, peer, tokens);
    Consumer consumer(rings, team, peer);
    for (int32_t i = 0; i < params.num_leaves; ++i) {
      const Leaf& leaf = params.leaves[i];
      if (leaf.exported) continue;
      const RowCut cut(leaf.row_bytes, rings.layout.slot_bytes);
      ReceiveRows(
          cut, slots.end - slots.begin, consumer,
          [&](int64_t row, int64_t part, int64_t count, const std::byte* slot) {
            CopyPieces(team, {slot, cut.piece_bytes, nullptr},
                       leaf.out + (slots.begin + row) * cut.row_bytes +
                           cut.begin(part),
                       cut.row_bytes, count, cut.bytes(part));
          });
    }
  }
}

// Where some rank's buffer is out of reach of others; `outputs` as WaitReady()
// leaves it. Out of line: the direct part keeps its registers.
static __device__ __noinline__ void MoveStaged(const DispatchParams& params,
                                               const Control& control,
                                               std::byte* const* outputs) {
  __shared__ TokenWindow window;
  const int32_t channel = blockIdx.x;
  if (channel >= NumChannels(control)) return;
  BeginStaged(control, channel == 0);
  const Rings rings(control, channel);
  const Team team = Team::Mine();
  if (team.number == kSends) {
    SendStaged(params, rings, team, outputs, window);
  } else if (team.number == kReceives) {
    ReceiveStaged(params, rings, team);
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_RINGS_STAGED_DISPATCH_CUH_
