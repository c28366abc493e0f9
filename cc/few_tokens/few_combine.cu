// combine of few tokens: the results of CombineKernel (cc/rows/combine.cu)
// sooner.
//
// Launch: FewBlocks() blocks of kFewThreads; kBulkSharedBytes of dynamic shared
//         memory where view.has_bulk.
// Roles:  block 0 publishes the addresses of this rank's inputs. A warp has a
//         piece of a token and a slice of shared memory, into which bulk copies
//         bring all rows of the piece: this rank's is asked for while the
//         peers' addresses travel, the peers' when they are there. What bulk
//         copies cannot load goes through registers. One more warp of each
//         block tells the peers that the block has read everything, while the
//         others still add up and store. The block that is the last to get the
//         addresses waits for the end: all others have begun by then, so it
//         keeps no multiprocessor from them.
// Reads:  params.routes, leaves[].in of this rank and of the peers; for staged
//         rows num_recv and recv_src. Writes: leaves[].out of this rank, every
//         row once.
// Order:  publish (release; this rank's rows were written before it in stream
//         order) -> the peers' AwaitPeers (acquire) -> their loads -> a barrier
//         of their block -> their TellRead (release) -> our AwaitBlocks
//         (acquire): only then may the rows be overwritten. A proxy fence
//         stands between AwaitPeers and the bulk loads of the peers' rows, and
//         between the reads of a slice and the bulk loads that take its place.
#include <cuda_runtime.h>

#include <vector>

#include "cc/few_tokens/few_combine.cuh"
#include "cc/few_tokens/few_tokens.cuh"
#include "cc/handshake/sync.cuh"
#include "cc/launch.cuh"
#include "cc/ops.h"
#include "cc/rings/staged_combine.cuh"
#include "cc/rows/items.cuh"
#include "cc/rows/rows.cuh"

namespace jax_ep {
namespace {

// The summing warps, and one that tells the peers when these have read.
constexpr int kFewWarps = kRowWarps + 1;
constexpr int kFewThreads = kFewWarps * kWarpSize;
// A barrier of the block: all rows have been read.
constexpr int kAllRead = 1;

// Tells every peer where this rank's leaves are. Called by all threads of block
// 0 before anything else. Release: pairs with the acquire in AwaitPeers.
__device__ __forceinline__ void PublishFull(const CombineParams& params,
                                            const Control& control,
                                            const Opening& opening) {
  // While the opening is on its way.
  ptx::FenceSys();
  opening.Check(params.op, control.name);
  const int32_t words = 1 + 2 * params.num_leaves;
  for (int32_t peer = threadIdx.x / kWarpSize; peer < control.num_ranks();
       peer += kFewWarps) {
    if (peer == control.rank()) continue;
    for (int32_t word = threadIdx.x % kWarpSize; word < words;
         word += kWarpSize) {
      uint32_t payload = control.op.tag;
      if (word > 0) {
        const Leaf& leaf = params.leaves[(word - 1) / 2];
        const auto address = reinterpret_cast<uint64_t>(
            Published(control, leaf.in, leaf.exported));
        payload =
            static_cast<uint32_t>(word % 2 == 1 ? address : address >> 32);
      }
      ptx::StoreRelaxedSys(control.Ready(peer, control.rank()) + word,
                           control.Word(payload));
    }
  }
}

// As WaitReady(), but that this rank's own addresses need no waiting.
__device__ __forceinline__ bool AwaitPeers(const Control& control,
                                           const CombineParams& params,
                                           std::byte** inputs) {
  const int32_t words = 1 + 2 * params.num_leaves;
  for (int32_t peer = threadIdx.x / kWarpSize; peer < control.num_ranks();
       peer += kFewWarps) {
    const bool own = peer == control.rank();
    for (int32_t i = threadIdx.x % kWarpSize; own && i < params.num_leaves;
         i += kWarpSize) {
      const Leaf& leaf = params.leaves[i];
      inputs[i * control.num_ranks() + peer] =
          Published(control, leaf.in, leaf.exported);
    }
    for (int32_t word = threadIdx.x % kWarpSize; !own && word < words;
         word += kWarpSize) {
      TakeWord(control, inputs, peer, word);
    }
  }
  __syncthreads();
  return ReachAll(control, inputs, params.num_leaves);
}

// Tells all ranks that this block has read what it will of their rows, and no
// longer looks at their words. Called by a warp. Release: pairs with the
// acquire in AwaitBlocks.
__device__ __forceinline__ void TellRead(const Control& control) {
  ptx::FenceSys();
  for (int32_t r = threadIdx.x % kWarpSize; r < control.num_ranks();
       r += kWarpSize) {
    ptx::StoreRelaxedSys(control.BlockDone(r, control.rank(), blockIdx.x),
                         control.Word(gridDim.x));
  }
}

// Waits until all blocks of all ranks have told; a warp waits for a rank's.
// Called by all threads of a block. Ends in a barrier.
__device__ __forceinline__ void AwaitBlocks(const Control& control) {
  static_assert(ControlLayout::kDoneBlocks == kWarpSize);
  const int32_t lane = threadIdx.x % kWarpSize;
  for (int32_t r = threadIdx.x / kWarpSize; r < control.num_ranks();
       r += kFewWarps) {
    const uint64_t* word = control.BlockDone(control.rank(), r, lane);
    const uint64_t start = ptx::GlobalTimer();
    for (;;) {
      const uint64_t seen = ptx::LoadAcquireSys(word);
      const uint32_t told = __ballot_sync(
          kAllLanes, static_cast<uint32_t>(seen >> 32) == control.epoch);
      // Every block says how many there are; so block 0's word is the first.
      const uint32_t blocks =
          __shfl_sync(kAllLanes, static_cast<uint32_t>(seen), 0);
      const uint32_t all = blocks < kWarpSize ? (1u << blocks) - 1 : kAllLanes;
      if ((told & 1) != 0 && (told & all) == all) break;
      const uint64_t waited = ptx::GlobalTimer() - start;
      if (waited > control.op.view.warn_ns) {
        const uint32_t missing = (told & 1) != 0 ? all & ~told : 1u;
        if (lane == __ffs(missing) - 1 &&
            RanOut(control, waited, "the end", r)) {
          TimedOut(Control(control), "the end", r, seen);
        }
        __syncwarp();
      }
    }
  }
  __syncthreads();
}

// Sums the leaves in `leaves`. Out of line: the kernel's registers are for what
// is common.
template <typename T>
__device__ __noinline__ void SumOthers(const CombineParams& params,
                                       std::byte* const* inputs,
                                       uint32_t leaves) {
  const Workers workers = WarpsOf(blockIdx.x, gridDim.x, 0, kRowWarps);
  for (int32_t i = 0; i < params.num_leaves; ++i) {
    if (!(leaves >> i & 1)) continue;
    SumPlain<T, float>(params, inputs, i, workers);
  }
}

// T: the element of all leaves.
template <typename T>
__global__ void __launch_bounds__(kFewThreads, 1)
    FewCombineKernel(const __grid_constant__ FewParams few) {
  extern __shared__ __align__(128) std::byte slices[];
  __shared__ std::byte* inputs[kMaxLeaves * kMaxRanks];
  __shared__ uint64_t landed[kRowWarps];
  __shared__ bool closes;
  __shared__ bool is_staged;
  const CombineParams& params = few.rows;
  const int32_t rank = params.op.view.rank;
  const int32_t warp = threadIdx.x / kWarpSize;
  const ControlLayout layout(params.op.view.num_ranks);
  const Opening opening = Opening::Ask(params.op, layout);
  const Control control(params.op, "combine", layout, opening.epoch());
  if (blockIdx.x == 0) PublishFull(params, control, opening);
  const bool sums = warp < kRowWarps;
  Slice slice = {slices + warp * kSliceBytes, &landed[warp], 0};
  const Workers workers = WarpsOf(blockIdx.x, gridDim.x, 0, kRowWarps);
  PieceAt at = PieceAt::First(few, workers);
  PieceOfRows piece = {};
  const auto begin = [&] {
    piece = PieceOfRows::Of(few, at);
    const Leaf& leaf = params.leaves[at.leaf];
    slice.Load(
        piece, piece.route.x == rank,
        reinterpret_cast<uint64_t>(leaf.in) + piece.route.y * leaf.row_bytes);
  };
  if (sums) {
    slice.Init();
    if (at.Exists(few)) begin();
  }
  if (blockIdx.x != 0) opening.Check(params.op, control.name);
  const bool staged = AwaitPeers(control, params, inputs);
  if (sums) {
    const uint32_t staged_leaves =
        staged ? LeavesOutOfReach(params, inputs) : 0;
    const uint32_t bulk_leaves = BulkLeaves(params, inputs) & ~staged_leaves;
    const uint32_t other_leaves =
        ((1u << params.num_leaves) - 1) & ~(bulk_leaves | staged_leaves);
    const auto all_read = [] {
      __syncwarp();
      ptx::ArriveThreads(kAllRead, kFewThreads);
    };
    slice.FenceRows();
    bool told = staged;
    while (at.Exists(few)) {
      const bool is_bulk = bulk_leaves >> at.leaf & 1;
      const Leaf& leaf = params.leaves[at.leaf];
      std::byte* out = leaf.out + piece.token * leaf.row_bytes;
      slice.Load(piece, is_bulk && piece.route.x >= 0 && piece.route.x != rank,
                 RowAt(params, inputs, at.leaf, piece.route));
      slice.Await();
      at = at.Next(few, workers);
      if (!told && other_leaves == 0 && !at.Exists(few)) {
        all_read();
        told = true;
      }
      if (is_bulk) slice.Sum<T>(piece, out);
      if (!at.Exists(few)) break;
      slice.Free();
      begin();
    }
    if (other_leaves != 0) SumOthers<T>(params, inputs, other_leaves);
    if (!told) all_read();
  } else {
    // All threads of the block have read the epoch, so it has begun.
    if (threadIdx.x % kWarpSize == 0) {
      auto* begun = reinterpret_cast<uint32_t*>(control.Slot(rank) +
                                                control.layout.ticket);
      closes = ptx::IncrementRelaxedGpu(begun, gridDim.x - 1) == gridDim.x - 1;
      is_staged = staged;
    }
    __syncwarp();
    if (!staged) {
      ptx::SyncThreads(kAllRead, kFewThreads);
      TellRead(control);
    }
  }
  __syncthreads();
  if (is_staged) {
    MoveStaged(params, Control(control), inputs,
               LeavesOutOfReach(params, inputs));
    __syncthreads();
    if (!sums) TellRead(control);
  }
  if (!closes) return;
  AwaitBlocks(control);
  if (is_staged) EndStaged(Control(control));
  AdvanceEpoch(control);
}

using FewKernel = void (*)(FewParams);

FewKernel KernelOf(Element element) {
  switch (element) {
    case Element::kBf16:
      return &FewCombineKernel<Bf16>;
    case Element::kF16:
      return &FewCombineKernel<F16>;
    case Element::kF32:
      return &FewCombineKernel<float>;
    case Element::kF64:
    case Element::kNone:
      break;
  }
  return nullptr;
}

// The kernel for few tokens whose leaves have one element, and its parameters;
// else nullptr. All ranks have to agree, so it is a matter of sizes alone.
FewKernel FewKernelFor(const CombineParams& params, FewParams& few) {
  const Element element = params.leaves[0].element;
  for (int32_t i = 1; i < params.num_leaves; ++i) {
    if (params.leaves[i].element != element) return nullptr;
  }
  const int32_t rows = params.routes_per_token;
  if (rows > kFewRows || !CutFew(params, PieceUnits(rows), few)) return nullptr;
  return KernelOf(element);
}

}  // namespace

cudaError_t LaunchCombine(const CombineParams& params, cudaStream_t stream,
                          cudaEvent_t begun) {
  FewParams few;
  const FewKernel kernel = FewKernelFor(params, few);
  if (kernel == nullptr) return LaunchGeneralCombine(params, stream, begun);
  const int32_t shared_bytes = params.op.view.has_bulk ? kBulkSharedBytes : 0;
  return LaunchKernel(kernel, few,
                      {FewBlocks(params.op.view), kFewThreads, shared_bytes},
                      stream, begun);
}

std::vector<const void*> FewCombineKernelAddresses() {
  std::vector<const void*> addresses;
  for (const Element element : {Element::kBf16, Element::kF16, Element::kF32}) {
    addresses.push_back(reinterpret_cast<const void*>(KernelOf(element)));
  }
  return addresses;
}

}  // namespace jax_ep
