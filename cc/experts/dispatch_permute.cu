// dispatch_permute: dispatch and permute in one launch. A row crosses to a peer
// once; as rows arrive they are copied to the places of their experts there.
//
// Launch: a block of kRowThreads for each multiprocessor; kBulkSharedBytes of
//         dynamic shared memory where view.has_bulk.
// Roles:  the first blocks are movers: view.num_sms of them, but no more than
//         kMaxMovers and half of all. Block 0 clears the workspace and
//         publishes it with the landing places. Movers store this rank's rows
//         to the peers: a warp to a token at a time, by bulk copies where they
//         can, and a warp that tells the peers how far the block is. Then they
//         help the others. All other blocks zero what is empty, copy the rows
//         that stay here straight from the tokens, and then claim rows of the
//         peers one by one and copy each as soon as it has landed. The last
//         block of the launch closes with the peers.
//         A second launch of as many blocks follows: it copies the rows that
//         nobody had claimed when the first block gave up waiting for a peer,
//         all of which have landed by then. Mostly there are none.
// Reads:  all int32 arrays of params, leaves[].in, landed rows. Writes: grouped
//         and leaves[].out of this rank; leaves[].out and workspace of peers.
// Order:  publish (release) -> the peers' WaitReady (acquire) -> their stores,
//         then their words of progress (release) -> the warp that copies the
//         row (acquire). Closing as in dispatch, so that nobody's landing
//         places or workspace are touched after its kernel has ended, and the
//         second launch finds all rows.
//
// Why nothing deadlocks: as in dispatch, movers wait for all peers to begin
// and the last block waits for all peers to end. Apart from that a block waits
// for block 0 of its launch, which has begun before it; for at most
// kPatienceNs, for all movers of all peers to begin; and for rows, if these
// have begun: then they need nobody any more. A block whose patience ends stops
// all claims and ends, so that what holds a multiprocessor for longer are
// movers, no more than view.num_sms blocks, and what docs/design.md says of
// operations side by side stays true. The second launch waits for nobody, so
// the rows of a late peer are copied by the whole GPU, and not by the few
// blocks that waited for it.
#include <cuda_runtime.h>

#include <algorithm>

#include "cc/experts/expert_items.cuh"
#include "cc/experts/expert_ops.h"
#include "cc/handshake/sync.cuh"
#include "cc/layout/experts.h"
#include "cc/ptx.cuh"
#include "cc/rows/bulk.cuh"
#include "cc/rows/bulk_mover.cuh"
#include "cc/rows/items.cuh"
#include "cc/rows/rows.cuh"
#include "cc/rows/zero.cuh"

namespace jax_ep {
namespace {

constexpr uint64_t kPatienceNs = 1'000'000;
// What a polling warp sleeps, so that words and rows do not queue behind polls.
constexpr uint32_t kPollNs = 200;
static_assert(ProgressLayout::kMaxMovers <= kWarpSize);

// What this rank receives from each source, and the source's movers.
struct Sources {
  int32_t first[kMaxRanks];  // slot
  int32_t count[kMaxRanks];
  int32_t movers[kMaxRanks];
  int32_t most;  // rows of one peer
};

// Tokens of one warp of a mover: those at (warp + i * warps) * blocks + block.
struct Share {
  int32_t block;
  int32_t blocks;
  int32_t warp;
  int32_t warps;

  __device__ int64_t first() const { return int64_t{warp} * blocks + block; }
  __device__ int64_t step() const { return int64_t{warps} * blocks; }
};

__device__ void Publish(const Control& control,
                        const DispatchPermuteParams& params) {
  __shared__ std::byte* own[kMaxLeaves];
  const int32_t leaves = params.rows.num_leaves;
  const ProgressLayout layout(control.num_ranks());
  for (int64_t at = threadIdx.x * ProgressLayout::kLineWords;
       at < layout.size(); at += kRowThreads * ProgressLayout::kLineWords) {
    // What it held may look like a word of this epoch: now of the one before.
    params.workspace[at] = at == layout.claimed() || at == layout.unclaimed()
                               ? 0
                               : uint64_t{control.epoch - 1} << 32;
  }
  if (threadIdx.x < leaves) {
    own[threadIdx.x] = params.rows.leaves[threadIdx.x].out;
  } else if (threadIdx.x == leaves) {
    own[leaves] = reinterpret_cast<std::byte*>(params.workspace);
  }
  __syncthreads();
  PublishReady(control, own, leaves + 1);
}

__device__ void LearnSources(const DispatchPermuteParams& params,
                             Sources& sources) {
  const PeerView& view = params.rows.op.view;
  for (int32_t r = threadIdx.x; r < view.num_ranks; r += kRowThreads) {
    sources.count[r] = params.recv_counts[r];
  }
  __syncthreads();
  for (int32_t r = threadIdx.x; r < view.num_ranks; r += kRowThreads) {
    int32_t before = 0;
    for (int32_t q = 0; q < r; ++q) before += sources.count[q];
    sources.first[r] = before;
  }
  if (threadIdx.x == 0) {
    int32_t most = 0;
    for (int32_t r = 0; r < view.num_ranks; ++r) {
      if (r != view.rank) most = max(most, sources.count[r]);
    }
    sources.most = most;
  }
  __syncthreads();
}

// Out of line: what CopyRow keeps in registers stays out of its callers.
__device__ __noinline__ void Copy(const std::byte* in, uint64_t target,
                                  uint32_t targets, int64_t row_bytes,
                                  int32_t part, int32_t parts) {
  CopyRow(in, target, targets, row_bytes, part, parts);
}

// Movers.

// Calls `move(i, number, in, target, targets)` for each leaf of each token of
// this warp that goes to a peer, and `tell(number)` after each token, which is
// number `number` of the warp. Returns how many tokens there were.
template <typename Move, typename Tell>
__device__ __forceinline__ uint32_t ForEachToken(const RowParams& rows,
                                                 std::byte* const* outputs,
                                                 const Share& share,
                                                 const Move& move,
                                                 const Tell& tell) {
  uint32_t number = 0;
  int2 next = share.first() < rows.num_tokens ? RouteOf(rows, share.first())
                                              : int2{-1, -1};
  for (int64_t token = share.first(); token < rows.num_tokens;
       token += share.step(), ++number) {
    int2 route = next;
    // Asked for now, looked at when this token's pieces are on their way.
    if (token + share.step() < rows.num_tokens) {
      next = RouteOf(rows, token + share.step());
    }
    if (route.x == rows.op.view.rank) route.x = -1;
    const uint32_t targets = __ballot_sync(kAllLanes, route.x >= 0);
    if (targets != 0) {
      for (int32_t i = 0; i < rows.num_leaves; ++i) {
        move(i, number, rows.leaves[i].in + token * rows.leaves[i].row_bytes,
             RowAt(rows, outputs, i, route), targets);
      }
    }
    tell(number);
  }
  return number;
}

// `done` is the warp's word in shared memory: tokens whose rows have landed.
__device__ void MovePlain(const RowParams& rows, std::byte* const* outputs,
                          const Share& share, uint32_t* done) {
  ForEachToken(
      rows, outputs, share,
      [&](int32_t i, uint32_t, const std::byte* in, uint64_t target,
          uint32_t targets) {
        Copy(in, target, targets, rows.leaves[i].row_bytes, 0, 1);
      },
      [&](uint32_t number) {
        __syncwarp();
        if (threadIdx.x % kWarpSize == 0) {
          ptx::StoreReleaseCta(done, number + 1);
        }
      });
}

#if JAX_EP_HAS_BULK

// Groups of stores that may be on their way while the warp goes on: more than
// a round trip takes, so that looking for those before them costs no time.
constexpr int kStoring = 6;
// Pieces not known to have landed fit in.
constexpr int kPending = 16;
static_assert(kLoads + kStoring <= kPending);

__device__ void MoveBulk(const RowParams& rows, std::byte* const* outputs,
                         uint32_t bulk_leaves, const Share& share,
                         uint32_t* done) {
  extern __shared__ __align__(128) std::byte bulk_bytes[];
  __shared__ Stage stages[kBulkWarps][kStages];
  __shared__ uint32_t numbers[kBulkWarps][kPending];  // the token of each piece
  const bool leader = threadIdx.x % kWarpSize == 0;
  uint32_t* number_of = numbers[share.warp];
  BulkMover mover(stages[share.warp],
                  bulk_bytes + share.warp * kStages * kStageBytes);
  const auto move = [&](int32_t i, uint32_t number, const std::byte* in,
                        uint64_t target, uint32_t targets) {
    const int64_t row_bytes = rows.leaves[i].row_bytes;
    if (!(bulk_leaves >> i & 1)) {
      return Copy(in, target, targets, row_bytes, 0, 1);
    }
    const int64_t pieces = (row_bytes + kStageBytes - 1) / kStageBytes;
    const int64_t piece_bytes =
        (row_bytes + pieces * 16 - 1) / (pieces * 16) * 16;
    for (int64_t begin = 0; begin < row_bytes; begin += piece_bytes) {
      if (leader) number_of[mover.turn() % kPending] = number;
      mover.Move(in + begin,
                 static_cast<uint32_t>(min(piece_bytes, row_bytes - begin)),
                 target == 0 ? 0 : target + begin, targets);
    }
  };
  const auto tell = [&](uint32_t number) {
    __syncwarp();
    if (!leader) return;
    bulk::WaitStoresMade<kStoring>();
    const uint32_t turn = mover.turn();
    // The first piece that may not have landed; all tokens before its own have.
    const uint32_t first =
        turn < kLoads + kStoring ? 0 : turn - (kLoads + kStoring);
    ptx::StoreReleaseCta(done,
                         turn == 0 ? number + 1 : number_of[first % kPending]);
  };
  const uint32_t tokens = ForEachToken(rows, outputs, share, move, tell);
  mover.Finish();
  if (leader) ptx::StoreReleaseCta(done, tokens);
}

#endif  // JAX_EP_HAS_BULK

// One warp: tells all peers of this mover's progress until all has landed.
// `done` [share.warps] as the moving warps keep it, `peers` the workspaces.
__device__ void TellPeers(const Control& control, int64_t num_tokens,
                          const Share& share, std::byte* const* peers,
                          const uint32_t* done) {
  const ProgressLayout layout(control.num_ranks());
  const int lane = threadIdx.x % kWarpSize;
  const auto tell = [&](int64_t at, uint32_t payload) {
    for (int32_t r = lane; r < control.num_ranks(); r += kWarpSize) {
      if (r == control.rank()) continue;
      ptx::StoreReleaseSys(reinterpret_cast<uint64_t*>(peers[r]) + at,
                           control.Word(payload));
    }
  };
  const int64_t at = layout.done(control.rank(), share.block);
  if (share.block == 0) tell(layout.movers(control.rank()), share.blocks);
  tell(at, 0);
  const int64_t all = (num_tokens - share.block + share.blocks - 1) /
                      share.blocks;  // of this mover
  int64_t told = 0;
  while (told < all) {
    // Token i of the mover is token i / warps of warp i % warps: those before
    // the first that is missing somewhere have landed.
    uint32_t landed = 0xFFFFFFFF;
    if (lane < share.warps) {
      landed = ptx::LoadAcquireCta(done + lane) * share.warps + lane;
    }
    landed = __reduce_min_sync(kAllLanes, landed);
    // What one lane has acquired, another one may release.
    __syncwarp();
    const int64_t now = min(int64_t{landed}, all);
    if (now == told) {
      __nanosleep(kPollNs);
      continue;
    }
    told = now;
    tell(at, static_cast<uint32_t>(told));
  }
}

__device__ void MoveToPeers(const Control& control,
                            const DispatchPermuteParams& params,
                            std::byte* const* outputs, int32_t movers) {
  __shared__ uint32_t done[kRowWarps];
  const RowParams& rows = params.rows;
  const uint32_t bulk_leaves = BulkLeaves(rows, outputs);
  const int32_t warp = threadIdx.x / kWarpSize;
  Share share = {static_cast<int32_t>(blockIdx.x), movers, warp, kRowWarps - 1};
  if (bulk_leaves != 0) share.warps = kBulkWarps;
  if (threadIdx.x < kRowWarps) done[threadIdx.x] = 0;
  __syncthreads();
  if (warp == kRowWarps - 1) {
    TellPeers(control, rows.num_tokens, share,
              outputs + rows.num_leaves * control.num_ranks(), done);
  } else if (warp < share.warps) {
#if JAX_EP_HAS_BULK
    if (bulk_leaves != 0) {
      return MoveBulk(rows, outputs, bulk_leaves, share, done + warp);
    }
#endif
    MovePlain(rows, outputs, share, done + warp);
  }
}

// The other blocks.

// Empty places of the grouped leaves, empty slots of the others. `block` of
// `blocks` that share this.
__device__ void ZeroEmpty(const DispatchPermuteParams& params, int64_t filled,
                          int32_t block, int32_t blocks) {
  const int64_t thread = int64_t{block} * kRowThreads + threadIdx.x;
  const int64_t threads = int64_t{blocks} * kRowThreads;
  const auto zero_places = [&](int32_t range, int64_t thread, int64_t threads) {
    const int32_t begin = params.empty_ranges[2 * range];
    const int32_t end = params.empty_ranges[2 * range + 1];
    if (begin >= end) return;
    for (int32_t i = 0; i < params.num_grouped; ++i) {
      const int64_t row_bytes = params.rows.leaves[i].row_bytes;
      ZeroBytes(params.grouped[i] + begin * row_bytes,
                (end - begin) * row_bytes, thread, threads);
    }
  };
  // The pads of each group to a block; the rest after the last group to all.
  const int32_t last = params.num_ranges - 1;
  for (int32_t range = block; range < last; range += blocks) {
    zero_places(range, threadIdx.x, kRowThreads);
  }
  zero_places(last, thread, threads);
  for (int32_t i = params.num_grouped; i < params.rows.num_leaves; ++i) {
    const Leaf& leaf = params.rows.leaves[i];
    ZeroBytes(leaf.out + filled * leaf.row_bytes,
              (params.rows.capacity - filled) * leaf.row_bytes, thread,
              threads);
  }
}

// Copies part of the row in `slot` to its places: from where it landed, or from
// `token` where it stays on this rank, and then to the slot where no experts
// group it.
template <bool kStays>
__device__ __forceinline__ void FanOut(const DispatchPermuteParams& params,
                                       int64_t slot, int64_t token,
                                       int32_t part, int32_t parts) {
  const int32_t place = ExpertRowOf(params.expert_rows, params.top_k, slot);
  const uint32_t places = __ballot_sync(kAllLanes, place >= 0);
  for (int32_t i = 0; i < params.rows.num_leaves; ++i) {
    const Leaf& leaf = params.rows.leaves[i];
    std::byte* landed = leaf.out + slot * leaf.row_bytes;
    const std::byte* from = kStays ? leaf.in + token * leaf.row_bytes : landed;
    if (i < params.num_grouped) {
      if (places == 0) continue;
      const uint64_t target =
          place < 0 ? 0
                    : reinterpret_cast<uint64_t>(params.grouped[i] +
                                                 place * leaf.row_bytes);
      Copy(from, target, places, leaf.row_bytes, part, parts);
    } else if (kStays) {
      Copy(from, reinterpret_cast<uint64_t>(landed), 1, leaf.row_bytes, part,
           parts);
    }
  }
}

__device__ void FanOutOwn(const DispatchPermuteParams& params,
                          const Sources& sources, const Workers& workers,
                          int32_t parts) {
  const int32_t rank = params.rows.op.view.rank;
  const int64_t num_tokens = params.rows.num_tokens;
  const int64_t items = int64_t{sources.count[rank]} * parts;
  for (int64_t item = workers.index; item < items; item += workers.count) {
    const int64_t slot = sources.first[rank] + item / parts;
    const int64_t token = params.recv_src[slot] - rank * num_tokens;
    if (token < 0 || token >= num_tokens) continue;  // not of make_plan
    FanOut<true>(params, slot, token, static_cast<int32_t>(item % parts),
                 parts);
  }
}

// Whether a word of this epoch comes before kPatienceNs have passed since
// `start`.
__device__ bool Await(const Control& control, const uint64_t* word,
                      uint64_t start, uint32_t* payload) {
  for (;;) {
    const uint64_t seen = ptx::LoadAcquireSys(word);
    *payload = static_cast<uint32_t>(seen);
    if (static_cast<uint32_t>(seen >> 32) == control.epoch) return true;
    if (ptx::GlobalTimer() - start > kPatienceNs) return false;
    __nanosleep(kPollNs);
  }
}

// Whether all movers of all peers have begun, so that all rows will come.
// Called by all threads of a block; learns sources.movers.
__device__ bool PeersMove(const Control& control,
                          const DispatchPermuteParams& params,
                          Sources& sources) {
  const ProgressLayout layout(control.num_ranks());
  const int lane = threadIdx.x % kWarpSize;
  const uint64_t start = ptx::GlobalTimer();
  bool move = true;
  for (int32_t r = threadIdx.x / kWarpSize; r < control.num_ranks() && move;
       r += kRowWarps) {
    if (r == control.rank()) continue;
    uint32_t movers, tokens;
    move = Await(control, params.workspace + layout.movers(r), start, &movers);
    move = __all_sync(kAllLanes, move);
    if (!move) break;
    if (lane == 0) sources.movers[r] = static_cast<int32_t>(movers);
    if (lane < movers) {
      move = Await(control, params.workspace + layout.done(r, lane), start,
                   &tokens);
    }
    move = __all_sync(kAllLanes, move);
  }
  return __syncthreads_and(move) != 0;
}

// Waits until the row of `token` of rank `source` has landed here.
__device__ void WaitForToken(const Control& control,
                             const DispatchPermuteParams& params,
                             int32_t movers, int32_t source, int64_t token) {
  const int32_t mover = static_cast<int32_t>(token % movers);
  const auto number = static_cast<uint32_t>(token / movers);
  const uint64_t* word =
      params.workspace +
      ProgressLayout(control.num_ranks()).done(source, mover);
  // Its epoch was seen already: PeersMove.
  uint64_t seen = ptx::LoadAcquireSys(word);
  if (static_cast<uint32_t>(seen) <= number) {
    const uint64_t start = ptx::GlobalTimer();
    do {
      __nanosleep(kPollNs);
      if (RanOut(control, ptx::GlobalTimer() - start, "the rows", source)) {
        TimedOut(control, "the rows", source, seen);
      }
      seen = ptx::LoadAcquireSys(word);
    } while (static_cast<uint32_t>(seen) <= number);
  }
  __syncwarp();
}

// Rows of the peers to claim, in parts. Some are none: peers may send fewer
// than the one that sends most.
__device__ __forceinline__ int64_t Claims(const DispatchPermuteParams& params,
                                          const Sources& sources,
                                          int32_t parts) {
  return int64_t{sources.most} * (params.rows.op.view.num_ranks - 1) * parts;
}

// Added to the count of claims to stop them: more than there ever are, and so
// little that every block of a launch may add it.
constexpr unsigned long long kStopped = 1ull << 48;

__device__ __forceinline__ unsigned long long AddClaims(
    const DispatchPermuteParams& params, unsigned long long count) {
  const ProgressLayout layout(params.rows.op.view.num_ranks);
  return atomicAdd(reinterpret_cast<unsigned long long*>(params.workspace +
                                                         layout.claimed()),
                   count);
}

// Claims a row of a peer; the first rows of all peers first, as they come.
__device__ __forceinline__ int64_t Claim(const DispatchPermuteParams& params) {
  unsigned long long item = 0;
  if (threadIdx.x % kWarpSize == 0) item = AddClaims(params, 1);
  return static_cast<int64_t>(__shfl_sync(kAllLanes, item, 0));
}

// Leaves what nobody has claimed so far to the second launch. Called by one
// thread of a block.
__device__ void StopClaims(const DispatchPermuteParams& params,
                           int64_t claims) {
  const auto claimed = static_cast<int64_t>(AddClaims(params, kStopped));
  if (claimed >= claims) return;  // stopped already, or all are claimed
  const ProgressLayout layout(params.rows.op.view.num_ranks);
  params.workspace[layout.unclaimed()] = claims - claimed;
}

// A claim's row of a peer.
struct PeerRow {
  int32_t source;
  int64_t slot;
  int64_t token;  // -1: there is none

  __device__ PeerRow(const DispatchPermuteParams& params,
                     const Sources& sources, int64_t row)
      : token(-1) {
    const PeerView& view = params.rows.op.view;
    const int64_t num_tokens = params.rows.num_tokens;
    const int32_t peers = view.num_ranks - 1;
    const auto peer = static_cast<int32_t>(row % peers);
    source = peer < view.rank ? peer : peer + 1;
    const int64_t number = row / peers;
    slot = sources.first[source] + number;
    if (number >= sources.count[source]) return;
    const int64_t found = params.recv_src[slot] - source * num_tokens;
    if (found >= 0 && found < num_tokens) token = found;  // of make_plan
  }
};

__device__ void FanOutPeers(const Control& control,
                            const DispatchPermuteParams& params,
                            const Sources& sources, int32_t parts) {
  const int64_t claims = Claims(params, sources, parts);
  if (claims == 0) return;
  for (;;) {
    const int64_t claim = Claim(params);
    if (claim >= claims) return;
    const PeerRow row(params, sources, claim / parts);
    if (row.token < 0) continue;
    WaitForToken(control, params, sources.movers[row.source], row.source,
                 row.token);
    FanOut<false>(params, row.slot, row.token,
                  static_cast<int32_t>(claim % parts), parts);
  }
}

__global__ void __launch_bounds__(kRowThreads, 1)
    DispatchPermuteKernel(const __grid_constant__ DispatchPermuteParams params,
                          const int32_t movers, const int32_t parts) {
  __shared__ std::byte* outputs[kMaxLeaves * kMaxRanks];
  __shared__ Sources sources;
  const Control control(params.rows.op, "dispatch_permute");
  const int32_t rank = control.rank();
  const int32_t block = blockIdx.x;
  if (block == 0) Publish(control, params);
  LearnSources(params, sources);
  if (block < movers) {
    WaitReady(control, outputs, params.rows.num_leaves + 1);
    if (control.num_ranks() > 1) {
      MoveToPeers(control, params, outputs, movers);
    }
  } else {
    const int32_t last = control.num_ranks() - 1;
    const int32_t index = block - movers;
    const int32_t count = static_cast<int32_t>(gridDim.x) - movers;
    ZeroEmpty(params, int64_t{sources.first[last]} + sources.count[last], index,
              count);
    FanOutOwn(params, sources, WarpsOf(index, count, 0, kRowWarps), parts);
    // Until then the workspace holds anything.
    if (threadIdx.x == 0) {
      Wait(control, control.Ready(rank, rank), "block 0", rank);
    }
    __syncthreads();
  }
  if (PeersMove(control, params, sources)) {
    FanOutPeers(control, params, sources, parts);
  } else if (threadIdx.x == 0) {
    StopClaims(params, Claims(params, sources, parts));
  }
  if (IsLastBlock(control)) {
    CloseWithPeers(control);
    AdvanceEpoch(control);
  }
}

// The second launch.
__global__ void __launch_bounds__(kRowThreads, 1)
    FanOutRestKernel(const __grid_constant__ DispatchPermuteParams params,
                     const int32_t parts) {
  __shared__ Sources sources;
  const ProgressLayout layout(params.rows.op.view.num_ranks);
  const auto unclaimed =
      static_cast<int64_t>(params.workspace[layout.unclaimed()]);
  if (unclaimed == 0) return;
  LearnSources(params, sources);
  const int64_t claims = Claims(params, sources, parts);
  const Workers workers = WarpsOf(blockIdx.x, gridDim.x, 0, kRowWarps);
  for (int64_t claim = claims - unclaimed + workers.index; claim < claims;
       claim += workers.count) {
    const PeerRow row(params, sources, claim / parts);
    if (row.token < 0) continue;
    FanOut<false>(params, row.slot, row.token,
                  static_cast<int32_t>(claim % parts), parts);
  }
}

}  // namespace

cudaError_t LaunchDispatchPermute(const DispatchPermuteParams& params,
                                  cudaStream_t stream) {
  int device = 0, num_sms = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status =
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  const RowParams& rows = params.rows;
  const int32_t movers = rows.op.view.num_ranks == 1
                             ? 1
                             : std::clamp(num_sms / 2, 1,
                                          std::min(rows.op.view.num_sms,
                                                   ProgressLayout::kMaxMovers));
  const int32_t blocks = std::max(num_sms, movers + 1);
  int64_t longest = 0;
  for (int32_t i = 0; i < rows.num_leaves; ++i) {
    longest = std::max(longest, rows.leaves[i].row_bytes);
  }
  // With few rows, parts of rows, so that every warp has work.
  const int64_t wanted = int64_t{blocks - movers} * kRowWarps / rows.capacity;
  const int64_t allowed =
      (longest + kMinExpertPartBytes - 1) / kMinExpertPartBytes;
  const int64_t parts =
      std::max<int64_t>(1, std::min<int64_t>(wanted, allowed));
  DispatchPermuteKernel<<<blocks, kRowThreads,
                          rows.op.view.has_bulk ? kBulkSharedBytes : 0,
                          stream>>>(params, movers,
                                    static_cast<int32_t>(parts));
  status = cudaPeekAtLastError();
  if (status != cudaSuccess || rows.op.view.num_ranks == 1) return status;
  FanOutRestKernel<<<blocks, kRowThreads, 0, stream>>>(
      params, static_cast<int32_t>(parts));
  return cudaPeekAtLastError();
}

const void* DispatchPermuteKernelAddress() {
  return reinterpret_cast<const void*>(&DispatchPermuteKernel);
}

const void* FanOutRestKernelAddress() {
  return reinterpret_cast<const void*>(&FanOutRestKernel);
}

}  // namespace jax_ep
