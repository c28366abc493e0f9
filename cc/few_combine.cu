// combine of few tokens: the results of CombineKernel (cc/combine.cu) sooner.
//
// Launch: FewBlocks() blocks of kRowThreads.
// Roles:  block 0 publishes the addresses of this rank's inputs. A warp has a
//         piece of a token: it asks for this rank's row while the peers'
//         addresses travel, for the peers' rows when it has them, and has all
//         of them in flight at once. The block that is the last to get the
//         addresses waits for the end: all others have begun by then, so it
//         keeps no multiprocessor from them.
// Reads:  params.routes, leaves[].in of this rank and of the peers; for staged
//         rows num_recv and recv_src. Writes: leaves[].out of this rank, every
//         row once.
// Order:  publish (release; this rank's rows were written before it in stream
//         order) -> the peers' AwaitPeers (acquire) -> their loads -> their
//         TellRead (release) -> our AwaitBlocks (acquire): only then may the
//         rows be overwritten. A block has read all that it will when its sums
//         are done; it says so before it stores them.
#include <cuda_runtime.h>

#include <vector>

#include "cc/device/few_tokens.cuh"
#include "cc/device/items.cuh"
#include "cc/device/rows.cuh"
#include "cc/device/sync.cuh"
#include "cc/device/unit_sum.cuh"
#include "cc/launch.cuh"
#include "cc/ops.h"
#include "cc/staged_combine.cuh"

namespace jax_ep {
namespace {

// Units that a lane has in flight, of all rows of a piece.
constexpr int kUnitsInFlight = 2 * kPieceUnits;
// Rows of a token at most: a kernel for two ranks, and one for more.
constexpr int kFewRows = 2;
constexpr int kMoreRows = 8;

constexpr int PieceUnits(int rows) { return kUnitsInFlight / rows; }

// Tells every peer where this rank's leaves are. Called by all threads of block
// 0 before anything else. Release: pairs with the acquire in AwaitPeers.
__device__ __forceinline__ void PublishFull(const CombineParams& params,
                                            const Control& control) {
  // While the epoch is on its way.
  ptx::FenceSys();
  const int32_t words = 1 + 2 * params.num_leaves;
  for (int32_t peer = threadIdx.x / kWarpSize; peer < control.num_ranks();
       peer += kRowWarps) {
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
       peer += kRowWarps) {
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
  for (int32_t r = threadIdx.x % kWarpSize; r < control.num_ranks();
       r += kWarpSize) {
    ptx::StoreReleaseSys(control.BlockDone(r, control.rank(), blockIdx.x),
                         control.Word(gridDim.x));
  }
}

// Waits until all blocks of all ranks have told; a warp waits for a rank's.
// Called by all threads of a block. Ends in a barrier.
__device__ __forceinline__ void AwaitBlocks(const Control& control) {
  static_assert(ControlLayout::kDoneBlocks == kWarpSize);
  const int32_t lane = threadIdx.x % kWarpSize;
  for (int32_t r = threadIdx.x / kWarpSize; r < control.num_ranks();
       r += kRowWarps) {
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
      if (ptx::GlobalTimer() - start > control.op.view.timeout_ns) {
        const uint32_t missing = (told & 1) != 0 ? all & ~told : 1u;
        if (lane == __ffs(missing) - 1) {
          TimedOut(Control(control), "the end", r, seen);
        }
        __syncwarp();
      }
    }
  }
  __syncthreads();
}

// A piece of all rows of a token, in the registers of a warp: row s is that of
// route s. Rows that are missing, and units past the end, hold what is neutral:
// so all registers get a value here, and hold none from the piece before.
template <typename T, int kRows>
struct RowsPiece {
  static constexpr int kUnits = PieceUnits(kRows);

  uint4 units[kRows][kUnits];
  int2 route;     // of lane j
  uint32_t rows;  // bit s: there is a row s
  uint32_t own;   // bit s: and it is this rank's

  __device__ __forceinline__ void Load(int s, uint64_t row,
                                       const UnitsOfLane& of) {
    const auto* from = reinterpret_cast<const uint4*>(row) + of.first;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (of.Has(i)) units[s][i] = LoadUnit(from + i * kWarpSize);
    }
  }

  // Finds the rows and asks for this rank's.
  __device__ __forceinline__ void Begin(const FewParams& few,
                                        const PieceAt& at) {
    rows = own = 0;
    if (!at.Exists(few)) return;
    const Leaf& leaf = few.rows.leaves[at.leaf];
    const PieceCut& cut = few.cuts[at.leaf];
    const int32_t token = cut.TokenOf(at.item);
    route = RouteOf(few.rows, token);
    rows = __ballot_sync(kAllLanes, route.x >= 0);
    own = __ballot_sync(kAllLanes, route.x == few.rows.op.view.rank);
    const uint4 neutral = UnitSum<T>::Neutral(rows != 0);
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) units[s][i] = neutral;
    }
    const UnitsOfLane of(cut, at.item - token * cut.parts);
    const int32_t slot =
        __shfl_sync(kAllLanes, route.y, max(__ffs(own) - 1, 0));
    const uint64_t row =
        reinterpret_cast<uint64_t>(leaf.in) + slot * leaf.row_bytes;
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      if (own >> s & 1) Load(s, row, of);
    }
  }

  // Asks for the peers' rows, of which lane j knows the address of the j-th.
  __device__ __forceinline__ void LoadPeers(uint64_t source,
                                            const UnitsOfLane& of) {
    const uint32_t peers = rows & ~own;
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      const uint64_t row = AddressOf(source, s);
      if (peers >> s & 1) Load(s, row, of);
    }
  }

  // Leaves the sums, in the order of the rows, in units[0].
  __device__ __forceinline__ void Sum() {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      UnitSum<T> sum = UnitSum<T>::Of(units[0][i]);
#pragma unroll
      for (int s = 1; s < kRows; ++s) sum += units[s][i];
      units[0][i] = sum.Rounded();
    }
  }

  __device__ __forceinline__ void Store(std::byte* out, const UnitsOfLane& of) {
    auto* to = reinterpret_cast<uint4*>(out) + of.first;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (of.Has(i)) StoreUnit(to + i * kWarpSize, units[0][i]);
    }
  }
};

// T: the element of all leaves. kRows: rows of a token at most.
template <typename T, int kRows>
__global__ void __launch_bounds__(kRowThreads, 1)
    FewCombineKernel(const __grid_constant__ FewParams few) {
  __shared__ std::byte* inputs[kMaxLeaves * kMaxRanks];
  __shared__ uint32_t warps_read;
  __shared__ bool closes;
  const CombineParams& params = few.rows;
  const Control control(params.op, "combine");
  if (blockIdx.x == 0) PublishFull(params, control);
  if (threadIdx.x == 0) warps_read = 0;
  const Workers workers = WarpsOf(blockIdx.x, gridDim.x, 0, kRowWarps);
  PieceAt at = PieceAt::First(few, workers);
  RowsPiece<T, kRows> piece;
  piece.Begin(few, at);
  const bool staged = AwaitPeers(control, params, inputs);
  // All threads of the block have read the epoch, so it has begun.
  uint32_t begun = 0;
  if (threadIdx.x == 0) {
    begun = ptx::IncrementRelaxedGpu(
        reinterpret_cast<uint32_t*>(control.Slot(control.rank()) +
                                    control.layout.ticket),
        gridDim.x - 1);
  }
  const uint32_t staged_leaves = staged ? LeavesOutOfReach(params, inputs) : 0;
  // The block's last warp to have read tells the peers.
  const auto warp_has_read = [&] {
    __syncwarp();
    uint32_t before = 0;
    if (threadIdx.x % kWarpSize == 0) {
      before = ptx::IncrementAcqRelCta(&warps_read, kRowWarps - 1);
    }
    if (__shfl_sync(kAllLanes, before, 0) == kRowWarps - 1) TellRead(control);
  };
  bool told = staged;
  while (at.Exists(few)) {
    const Leaf& leaf = params.leaves[at.leaf];
    const PieceCut& cut = few.cuts[at.leaf];
    const int32_t token = cut.TokenOf(at.item);
    const int32_t part = at.item - token * cut.parts;
    std::byte* out = leaf.out + token * leaf.row_bytes;
    const uint64_t source = RowAt(params, inputs, at.leaf, piece.route);
    const bool direct = !(staged_leaves >> at.leaf & 1);
    if (direct && cut.row_units != 0 && OrOverWarp(source) % 16 == 0) {
      const UnitsOfLane of(cut, part);
      piece.LoadPeers(source, of);
      piece.Sum();
      at = at.Next(few, workers);
      if (!told && !at.Exists(few)) {
        warp_has_read();
        told = true;
      }
      piece.Store(out, of);
    } else {
      if (direct) {
        // What units of 16 bytes cannot load.
        SumUnits<T, float, T, 2>(
            source, piece.rows, out,
            PartOf(leaf.row_bytes / static_cast<int64_t>(sizeof(T)), part,
                   cut.parts));
      }
      at = at.Next(few, workers);
    }
    piece.Begin(few, at);
  }
  if (!told) warp_has_read();
  if (threadIdx.x == 0) closes = begun == gridDim.x - 1;
  if (staged) MoveStaged(params, Control(control), inputs, staged_leaves);
  __syncthreads();
  if (staged && threadIdx.x < kWarpSize) TellRead(control);
  if (!closes) return;
  AwaitBlocks(control);
  if (staged) EndStaged(Control(control));
  AdvanceEpoch(control);
}

using FewKernel = void (*)(FewParams);

template <int kRows>
FewKernel KernelOf(Element element) {
  switch (element) {
    case Element::kBf16:
      return &FewCombineKernel<Bf16, kRows>;
    case Element::kF16:
      return &FewCombineKernel<F16, kRows>;
    case Element::kF32:
      return &FewCombineKernel<float, kRows>;
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
  if (rows <= kFewRows) {
    return CutFew(params, PieceUnits(kFewRows), few)
               ? KernelOf<kFewRows>(element)
               : nullptr;
  }
  if (rows <= kMoreRows) {
    return CutFew(params, PieceUnits(kMoreRows), few)
               ? KernelOf<kMoreRows>(element)
               : nullptr;
  }
  return nullptr;
}

}  // namespace

cudaError_t LaunchCombine(const CombineParams& params, cudaStream_t stream,
                          cudaEvent_t begun) {
  FewParams few;
  const FewKernel kernel = FewKernelFor(params, few);
  if (kernel == nullptr) return LaunchGeneralCombine(params, stream, begun);
  return LaunchKernel(kernel, few, {FewBlocks(params.op.view), kRowThreads, 0},
                      stream, begun);
}

std::vector<const void*> FewCombineKernelAddresses() {
  std::vector<const void*> addresses;
  for (const Element element : {Element::kBf16, Element::kF16, Element::kF32}) {
    addresses.push_back(
        reinterpret_cast<const void*>(KernelOf<kFewRows>(element)));
    addresses.push_back(
        reinterpret_cast<const void*>(KernelOf<kMoreRows>(element)));
  }
  return addresses;
}

}  // namespace jax_ep
