// dispatch: every rank stores its rows straight into its peers' buffers.
//
// Launch: view.num_sms blocks of kRowThreads; kBulkSharedBytes of dynamic
//         shared memory where view.has_bulk.
// Roles:  block 0 publishes the addresses of this rank's outputs. One in R
//         blocks moves the rows that stay on this rank, the others those that
//         go to peers: a multiprocessor stores local rows no faster than the
//         link takes remote ones, and they must not take turns. Where routing
//         is skewed, shares are by rows; where all rows are of one kind, each
//         block moves both. Of the warps,
//         the first kBulkWarps move rows by bulk copies through shared memory;
//         the others zero the empty slots, then move what bulk copies cannot.
//         Rows for buffers out of reach follow through staging memory
//         (cc/rings/staged_dispatch.cuh). The last block closes with the peers.
// Reads:  params.routes, num_recv, leaves[].in; recv_src for staged rows.
//         Writes: leaves[].out of this rank (empty slots, local rows) and of
//         the peers (rows).
// Order:  publish (release) -> the peers' WaitReady (acquire) -> their stores
//         -> their CloseWithPeers (release) -> ours (acquire). Bulk stores are
//         waited for and fenced before the block counts as finished.
#include <cuda_runtime.h>

#include "cc/few_tokens/few_dispatch.cuh"
#include "cc/few_tokens/few_tokens.cuh"
#include "cc/handshake/sync.cuh"
#include "cc/launch.cuh"
#include "cc/ops.h"
#include "cc/rings/staged_dispatch.cuh"
#include "cc/rows/bulk.cuh"
#include "cc/rows/bulk_mover.cuh"
#include "cc/rows/items.cuh"
#include "cc/rows/rows.cuh"

namespace jax_ep {
namespace {

// Which rows this block moves, and its number among the blocks that do so.
struct Role {
  bool local;
  bool remote;
  int32_t block;
  int32_t blocks;
};

// The rank of one of kRowThreads routes spread over all tokens, or -1; the
// thread's sample of where rows go.
__device__ int32_t SampledRank(const DispatchParams& params) {
  static_assert(kRowThreads == 512);
  const int64_t token = params.num_tokens * threadIdx.x >> 9;
  if (token >= params.num_tokens) return -1;
  const int64_t route =
      token * params.routes_per_token + threadIdx.x % params.routes_per_token;
  return __ldg(reinterpret_cast<const int2*>(params.routes) + route).x;
}

// Shares blocks by the number of ranks, unless a sample says that this would
// take half as long again as shares by rows: every call alike, so that chance
// in a sample does not cost a block. Called by all threads of a block; equal in
// all blocks of a launch.
__device__ Role RoleOf(const Control& control, int32_t sampled) {
  const int32_t blocks = gridDim.x;
  const int32_t block = blockIdx.x;
  if (control.num_ranks() == 1 || blocks == 1) {
    return {true, true, block, blocks};
  }
  const int32_t here = __syncthreads_count(sampled == control.rank());
  const int32_t all = __syncthreads_count(sampled >= 0);
  // Rows of one kind, as far as one can see.
  if (all > 0 && (here == 0 || here == all)) return {true, true, block, blocks};
  int32_t local = max(1, blocks / control.num_ranks());
  if (2 * here * blocks > 3 * local * all ||
      2 * (all - here) * blocks > 3 * (blocks - local) * all) {
    local = min(max((blocks * here + all / 2) / all, 1), blocks - 1);
  }
  if (block < local) return {true, false, block, local};
  return {false, true, block - local, blocks - local};
}

// `route` where this block moves that row, else rank -1.
__device__ int2 InRole(const DispatchParams& params, const Role& role,
                       int2 route) {
  const bool local = route.x == params.op.view.rank;
  if (!(local ? role.local : role.remote)) route.x = -1;
  return route;
}

// Moves the rows of the leaves not in `bulk_leaves` through registers.
__device__ void MovePlain(const DispatchParams& params, const Role& role,
                          std::byte* const* outputs, uint32_t bulk_leaves,
                          const Workers& workers) {
  for (int32_t i = 0; i < params.num_leaves; ++i) {
    if (bulk_leaves >> i & 1) continue;
    const Leaf& leaf = params.leaves[i];
    const int32_t parts =
        PartsPerRow(workers, params.num_tokens, leaf.row_bytes);
    for (int64_t item = workers.index; item < params.num_tokens * parts;
         item += workers.count) {
      const int64_t token = item / parts;
      const int2 route = InRole(params, role, RouteOf(params, token));
      const uint64_t target = RowAt(params, outputs, i, route);
      const uint32_t targets = __ballot_sync(kAllLanes, target != 0);
      if (targets == 0) continue;
      CopyRow(leaf.in + token * leaf.row_bytes, target, targets, leaf.row_bytes,
              static_cast<int32_t>(item % parts), parts);
    }
  }
}

#if JAX_EP_HAS_BULK

__device__ void MoveBulk(const DispatchParams& params, const Role& role,
                         std::byte* const* outputs, uint32_t bulk_leaves,
                         const Workers& workers, BulkMover& mover) {
  for (int32_t i = 0; i < params.num_leaves; ++i) {
    if (!(bulk_leaves >> i & 1)) continue;
    const Leaf& leaf = params.leaves[i];
    const auto pieces =
        static_cast<int32_t>((leaf.row_bytes + kStageBytes - 1) / kStageBytes);
    const int64_t unit = int64_t{pieces} * 16;
    const auto piece_bytes =
        static_cast<int32_t>((leaf.row_bytes + unit - 1) / unit * 16);
    // With few tokens a row's pieces go to several workers, each of which has
    // one token then.
    const auto parts = static_cast<int32_t>(
        min(max(workers.count / max(params.num_tokens, int64_t{1}), int64_t{1}),
            int64_t{pieces}));
    const auto index = static_cast<int32_t>(workers.index);
    const int32_t part = index % parts;
    const int64_t begin = int64_t{pieces} * part / parts * piece_bytes;
    const int64_t end =
        min(int64_t{pieces} * (part + 1) / parts * piece_bytes, leaf.row_bytes);
    ForEachTokenOfWarp(
        params, index / parts, static_cast<uint32_t>(workers.count),
        [&](int2 route) {
          return RowAt(params, outputs, i, InRole(params, role, route));
        },
        [&](uint32_t token, uint64_t target, uint32_t targets) {
          if (targets == 0) return;
          const std::byte* in = leaf.in + token * leaf.row_bytes;
          for (int64_t at = begin; at < end; at += piece_bytes) {
            mover.Move(in + at,
                       static_cast<uint32_t>(
                           min(int64_t{piece_bytes}, leaf.row_bytes - at)),
                       target + at, targets);
          }
        });
  }
  mover.Finish();
}

#endif  // JAX_EP_HAS_BULK

__global__ void __launch_bounds__(kRowThreads, 1)
    DispatchKernel(const __grid_constant__ DispatchParams params) {
  __shared__ std::byte* outputs[kMaxLeaves * kMaxRanks];
  const Control control(params.op, "dispatch");
  if (blockIdx.x == 0) {
    __shared__ std::byte* own[kMaxLeaves];
    if (threadIdx.x < params.num_leaves) {
      const Leaf& leaf = params.leaves[threadIdx.x];
      own[threadIdx.x] = Published(control, leaf.out, leaf.exported);
    }
    __syncthreads();
    PublishReady(control, own, params.num_leaves);
  }
  const int32_t sampled = SampledRank(params);
  const bool staged = WaitReady(control, outputs, params.num_leaves);

  const Role role = RoleOf(control, sampled);
  const uint32_t bulk_leaves = BulkLeaves(params, outputs);
  const int32_t warp = threadIdx.x / kWarpSize;
  const int32_t bulk_warps = bulk_leaves != 0 ? kBulkWarps : 0;
  if (warp < bulk_warps) {
#if JAX_EP_HAS_BULK
    extern __shared__ __align__(128) std::byte bulk_bytes[];
    __shared__ Stage stages[kBulkWarps][kStages];
    BulkMover mover(stages[warp], bulk_bytes + warp * kStages * kStageBytes);
    MoveBulk(params, role, outputs, bulk_leaves,
             WarpsOf(role.block, role.blocks, 0, kBulkWarps), mover);
#endif
  } else {
    const int32_t threads = kRowThreads - bulk_warps * kWarpSize;
    ZeroEmptySlots(
        params, *params.num_recv,
        int64_t{blockIdx.x} * threads + threadIdx.x - bulk_warps * kWarpSize,
        int64_t{gridDim.x} * threads);
    MovePlain(
        params, role, outputs, bulk_leaves,
        WarpsOf(role.block, role.blocks, bulk_warps, kRowWarps - bulk_warps));
  }
  if (staged) MoveStaged(params, Control(control), outputs);
  if (IsLastBlock(control)) {
    CloseWithPeers(control);
    if (staged) EndStaged(Control(control));
    AdvanceEpoch(control);
  }
}

// Where tokens are few: the results of DispatchKernel.
//
// Launch: as many blocks of kRowThreads, kDoneBlocks at most.
// Roles:  as above, but that a warp moves its pieces to all of their targets,
//         the peers' first, and loads them while the peers' addresses travel.
// Order:  an address is published relaxed: it says that earlier kernels are
//         done with the buffer, which they are when this one starts, and passes
//         on nothing that they wrote.

// The route of the caller's lane at a piece, of rank -1 where there is none.
__device__ __forceinline__ int2 RouteAt(const FewParams& few,
                                        const PieceAt& at) {
  if (!at.Exists(few)) return {-1, -1};
  return RouteOf(few.rows, few.cuts[at.leaf].TokenOf(at.item));
}

// Called by all threads of block 0.
__device__ void PublishFree(const DispatchParams& params,
                            const Control& control) {
  const int32_t words = 1 + 2 * params.num_leaves;
  for (int32_t i = threadIdx.x; i < control.num_ranks() * words;
       i += kRowThreads) {
    const int32_t peer = i / words;
    const int32_t word = i % words;
    uint32_t payload = control.op.tag;
    if (word > 0) {
      const Leaf& leaf = params.leaves[(word - 1) / 2];
      const auto address = reinterpret_cast<uint64_t>(
          Published(control, leaf.out, leaf.exported));
      payload = static_cast<uint32_t>(word % 2 == 1 ? address : address >> 32);
    }
    ptx::StoreRelaxedSys(control.Ready(peer, control.rank()) + word,
                         control.Word(payload));
  }
}

__global__ void __launch_bounds__(kRowThreads, 1)
    FewDispatchKernel(const __grid_constant__ FewParams few) {
  __shared__ std::byte* outputs[kMaxLeaves * kMaxRanks];
  const DispatchParams& params = few.rows;
  const ControlLayout layout(params.op.view.num_ranks);
  const Opening opening = Opening::Ask(params.op, layout);
  const Control control(params.op, "dispatch", layout, opening.epoch());
  if (blockIdx.x == 0) {
    opening.Check(params.op, control.name);
    PublishFree(params, control);
  }
  const Workers workers = WarpsOf(blockIdx.x, gridDim.x, 0, kRowWarps);
  PieceAt at = PieceAt::First(few, workers);
  int2 route = RouteAt(few, at);
  Piece piece;
  LoadPiece(few, at, piece);
  if (blockIdx.x != 0) opening.Check(params.op, control.name);
  const bool staged = WaitReady(control, outputs, params.num_leaves);
  // Most warps have one piece: a second one in registers would leave too few.
  while (at.Exists(few)) {
    StorePiece(few, outputs, at, route, piece);
    at = at.Next(few, workers);
    route = RouteAt(few, at);
    LoadPiece(few, at, piece);
  }
  ZeroEmptySlots(params, *params.num_recv,
                 int64_t{blockIdx.x} * kRowThreads + threadIdx.x,
                 int64_t{gridDim.x} * kRowThreads);
  if (staged) MoveStaged(params, Control(control), outputs);
  CloseBlock(control);
  if (IsLastBlock(control)) {
    CloseFew(control);
    if (staged) EndStaged(Control(control));
    AdvanceEpoch(control);
  }
}

}  // namespace

cudaError_t LaunchDispatch(const DispatchParams& params, cudaStream_t stream,
                           cudaEvent_t begun) {
  FewParams few;
  if (!CutFew(params, kPieceUnits, few)) {
    return LaunchGeneralDispatch(params, stream, begun);
  }
  return LaunchKernel(FewDispatchKernel, few,
                      {FewBlocks(params.op.view), kRowThreads, 0}, stream,
                      begun);
}

cudaError_t LaunchGeneralDispatch(const DispatchParams& params,
                                  cudaStream_t stream, cudaEvent_t begun) {
  const int32_t shared_bytes = params.op.view.has_bulk ? kBulkSharedBytes : 0;
  return LaunchKernel(DispatchKernel, params,
                      {params.op.view.num_sms, kRowThreads, shared_bytes},
                      stream, begun);
}

const void* DispatchKernelAddress() {
  return reinterpret_cast<const void*>(&DispatchKernel);
}

const void* FewDispatchKernelAddress() {
  return reinterpret_cast<const void*>(&FewDispatchKernel);
}

}  // namespace jax_ep
