// combine: every rank gathers its tokens' rows from its peers and sums them.
//
// Launch: view.num_sms blocks of kCombineThreads; kBulkSharedBytes of dynamic
//         shared memory where view.has_bulk.
// Roles:  block 0 publishes the addresses of this rank's inputs. In each block
//         one warp loads the rows of a token after the other into a ring of
//         stages by bulk copies, the other warps sum them; what bulk copies
//         cannot load the summing warps load themselves. Leaves with rows out
//         of reach follow through staging memory (cc/staged_combine.cuh). The
//         last block closes with the peers.
// Reads:  params.routes, leaves[].in of this rank and of the peers; for staged
//         rows num_recv and recv_src. Writes: leaves[].out of this rank, every
//         row once.
// Order:  publish (release; this rank's rows were written before it in stream
//         order) -> the peers' WaitReady (acquire) -> their loads -> their
//         CloseWithPeers (release) -> ours (acquire): only then may the rows be
//         overwritten. A proxy fence stands between WaitReady and the first
//         bulk load, and between the reads of a stage and the bulk loads that
//         take its place.
#include <cuda_runtime.h>

#include <vector>

#include "cc/device/bulk.cuh"
#include "cc/device/few_tokens.cuh"
#include "cc/device/items.cuh"
#include "cc/device/rows.cuh"
#include "cc/device/sync.cuh"
#include "cc/ops.h"
#include "cc/staged_combine.cuh"

namespace jax_ep {
namespace {

// The summing warps, and one that loads rows for them.
constexpr int kCombineThreads = kRowThreads + kWarpSize;

#if JAX_EP_HAS_BULK

// Stages of a block's ring. A stage takes the same columns of all rows that one
// token's sum has.
constexpr int kStages = 6;
constexpr int kStageBytes = kBulkSharedBytes / kStages / 128 * 128;

struct Stage {
  uint64_t loaded;   // mbarrier: the rows are there
  uint64_t summed;   // mbarrier: all summing warps have read them
  int64_t out;       // first byte of the columns in the leaf's output
  int32_t bytes;     // of the columns
  int32_t num_rows;  // of the token, Columns::bytes apart
};

// How a leaf is cut into stages: some columns of all rows at a time.
struct Columns {
  int64_t row_bytes;
  int32_t bytes;  // of a full column
  int32_t count;

  __device__ Columns(const CombineParams& params, const Leaf& leaf)
      : row_bytes(leaf.row_bytes) {
    // As even as 16-byte units allow, all possible rows in one stage.
    const int32_t most = kStageBytes / params.routes_per_token / 16 * 16;
    count = static_cast<int32_t>((row_bytes + most - 1) / most);
    bytes =
        static_cast<int32_t>((row_bytes + count * 16 - 1) / (count * 16) * 16);
  }
};

// The ring as one side sees it: which stage is next and in which round.
struct Turn {
  uint32_t stage = 0;
  uint32_t parity = 0;

  __device__ void Next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The loading warp: lane j loads the row of route j.
__device__ void LoadStages(const CombineParams& params,
                           std::byte* const* inputs, int32_t i, Stage* stages,
                           std::byte* bytes, Turn& turn) {
  const Columns columns(params, params.leaves[i]);
  const int32_t lane = threadIdx.x % kWarpSize;
  const auto ask = [&](int64_t first, int2(&routes)[kRoutesAhead]) {
#pragma unroll
    for (int j = 0; j < kRoutesAhead; ++j) {
      const int64_t token = first + j * gridDim.x;
      routes[j] =
          token < params.num_tokens ? RouteOf(params, token) : int2{-1, -1};
    }
  };
  const auto load = [&](int64_t token, int2 route) {
    const uint32_t rows = __ballot_sync(kAllLanes, route.x >= 0);
    const auto* from =
        reinterpret_cast<const std::byte*>(RowAt(params, inputs, i, route));
    const int32_t place = __popc(rows & ((1u << lane) - 1));
    for (int32_t c = 0; c < columns.count; ++c, turn.Next()) {
      Stage& stage = stages[turn.stage];
      const int64_t begin = int64_t{c} * columns.bytes;
      const int32_t size = static_cast<int32_t>(
          min(int64_t{columns.bytes}, columns.row_bytes - begin));
      if (lane == 0) {
        // The first round finds the stages free.
        bulk::WaitBarrier(&stage.summed, turn.parity ^ 1);
        stage.out = token * columns.row_bytes + begin;
        stage.bytes = size;
        stage.num_rows = __popc(rows);
        bulk::ArriveExpecting(&stage.loaded, size * __popc(rows));
      }
      __syncwarp();
      if (route.x >= 0) {
        bulk::Load(bytes + turn.stage * kStageBytes + place * columns.bytes,
                   from + begin, size, &stage.loaded);
      }
    }
  };
  int2 next[kRoutesAhead];
  ask(blockIdx.x, next);
  for (int64_t first = blockIdx.x; first < params.num_tokens;
       first += kRoutesAhead * gridDim.x) {
    int2 routes[kRoutesAhead];
#pragma unroll
    for (int j = 0; j < kRoutesAhead; ++j) routes[j] = next[j];
    ask(first + kRoutesAhead * gridDim.x, next);
#pragma unroll
    for (int j = 0; j < kRoutesAhead; ++j) {
      const int64_t token = first + j * gridDim.x;
      if (token < params.num_tokens) load(token, routes[j]);
    }
  }
}

// The summing warps: each thread sums some 16-byte units of every stage.
template <typename T, typename Wide>
__device__ void SumStages(const CombineParams& params, int32_t i, Stage* stages,
                          const std::byte* bytes, Turn& turn) {
  using Row = Elements<T, uint4>;
  const Leaf& leaf = params.leaves[i];
  const Columns columns(params, leaf);
  for (int64_t token = blockIdx.x; token < params.num_tokens;
       token += gridDim.x) {
    for (int32_t c = 0; c < columns.count; ++c, turn.Next()) {
      Stage& stage = stages[turn.stage];
      bulk::WaitBarrier(&stage.loaded, turn.parity);
      const int32_t num_rows = stage.num_rows;
      const int32_t units = stage.bytes / 16;
      const std::byte* rows = bytes + turn.stage * kStageBytes;
      uint4* out = reinterpret_cast<uint4*>(leaf.out + stage.out);
      for (int32_t at = threadIdx.x; at < units; at += kRowThreads) {
        // Minus zero is the neutral element: a lone -0.0 stays what it is. A
        // token without rows gets plus zero.
        const Wide neutral = num_rows == 0 ? Wide(0) : -Wide(0);
        Wide total[Row::kSize];
#pragma unroll
        for (int e = 0; e < Row::kSize; ++e) total[e] = neutral;
        for (int32_t r = 0; r < num_rows; ++r) {
          const Row row = Row::From(*reinterpret_cast<const uint4*>(
              rows + r * columns.bytes + at * 16));
#pragma unroll
          for (int e = 0; e < Row::kSize; ++e) total[e] += Widen(row.at[e]);
        }
        Row sum;
#pragma unroll
        for (int e = 0; e < Row::kSize; ++e) sum.at[e] = Narrow<T>(total[e]);
        StoreUnit(out + at, sum.ToUnit());
      }
      // Bulk loads will take the place of what was read here.
      bulk::FenceProxyShared();
      __syncwarp();
      if (threadIdx.x % kWarpSize == 0) bulk::Arrive(&stage.summed);
    }
  }
}

#endif  // JAX_EP_HAS_BULK

// Through registers, for what bulk copies cannot load.
template <typename T, typename Wide>
__device__ void SumPlain(const CombineParams& params, std::byte* const* inputs,
                         int32_t i, const Workers& workers) {
  const Leaf& leaf = params.leaves[i];
  const int32_t parts = PartsPerRow(workers, params.num_tokens, leaf.row_bytes);
  for (int64_t item = workers.index; item < params.num_tokens * parts;
       item += workers.count) {
    const int64_t token = item / parts;
    const int2 route = RouteOf(params, token);
    SumRow<T, Wide>(RowAt(params, inputs, i, route),
                    __ballot_sync(kAllLanes, route.x >= 0),
                    leaf.out + token * leaf.row_bytes, leaf.row_bytes,
                    static_cast<int32_t>(item % parts), parts);
  }
}

// Calls `sum` with a value of the leaf's element and one of its sum's type.
template <typename Sum>
__device__ __forceinline__ void WithElement(Element element, const Sum& sum) {
  switch (element) {
    case Element::kBf16:
      return sum(Bf16{}, 0.f);
    case Element::kF16:
      return sum(F16{}, 0.f);
    case Element::kF32:
      return sum(0.f, 0.f);
    case Element::kF64:
      return sum(0., 0.);
    case Element::kNone:
      return;
  }
}

#if JAX_EP_HAS_BULK

__device__ void SumBulk(const CombineParams& params, std::byte* const* inputs,
                        uint32_t bulk_leaves) {
  extern __shared__ __align__(128) std::byte bytes[];
  __shared__ Stage stages[kStages];
  if (threadIdx.x == 0) {
    for (Stage& stage : stages) {
      bulk::InitBarrier(&stage.loaded, 1);
      bulk::InitBarrier(&stage.summed, kRowWarps);
    }
    bulk::FenceBarrierInit();
  }
  __syncthreads();
  const bool loads = threadIdx.x >= kRowThreads;
  // The rows were written by ordinary stores and acquired as such.
  if (loads) bulk::FenceProxy();
  Turn turn;
  for (int32_t i = 0; i < params.num_leaves; ++i) {
    if (!(bulk_leaves >> i & 1)) continue;
    if (loads) {
      LoadStages(params, inputs, i, stages, bytes, turn);
    } else {
      WithElement(params.leaves[i].element, [&](auto element, auto wide) {
        SumStages<decltype(element), decltype(wide)>(params, i, stages, bytes,
                                                     turn);
      });
    }
  }
}

#endif  // JAX_EP_HAS_BULK

// Sums `leaves`, a bit for each, where some rank's buffer is out of reach of
// others. Out of line: the direct part keeps its registers.
__device__ __noinline__ void MoveStaged(const CombineParams& params,
                                        const Control& control,
                                        std::byte* const* inputs,
                                        uint32_t leaves) {
  __shared__ Flows flows;
  __shared__ Arrivals arrivals;
  const int32_t channel = blockIdx.x;
  if (channel >= NumChannels(control)) return;
  BeginStaged(control, channel == 0);
  const Rings rings(control, channel);
  const Team team = Team::Mine();
  if (team.number == kSends) {
    SendStaged(params, rings, team, flows);
  } else if (team.number == kReceives) {
    const Range tokens = TokensOf(control, channel, params.num_tokens);
    FindFirstSlots(params, rings, team, tokens, arrivals);
    uint64_t drained =
        team.thread < rings.num_ranks() && rings.Leads(team.thread)
            ? LoadCounter(rings.Drained(team.thread, rings.rank()))
            : 0;
    for (int32_t i = 0; i < params.num_leaves; ++i) {
      if (!(leaves >> i & 1)) continue;
      Summer summer(params, rings, team, inputs, i, arrivals, drained);
      WithElement(params.leaves[i].element, [&](auto element, auto wide) {
        summer.Sum<decltype(element), decltype(wide)>(tokens);
      });
    }
  }
}

__global__ void __launch_bounds__(kCombineThreads, 1)
    CombineKernel(const __grid_constant__ CombineParams params) {
  __shared__ std::byte* inputs[kMaxLeaves * kMaxRanks];
  const Control control(params.op, "combine");
  if (blockIdx.x == 0) {
    __shared__ std::byte* own[kMaxLeaves];
    if (threadIdx.x < params.num_leaves) {
      const Leaf& leaf = params.leaves[threadIdx.x];
      own[threadIdx.x] = Published(control, leaf.in, leaf.exported);
    }
    __syncthreads();
    PublishReady(control, own, params.num_leaves);
  }
  const bool staged = WaitReady(control, inputs, params.num_leaves);
  const uint32_t staged_leaves = staged ? LeavesOutOfReach(params, inputs) : 0;
  const uint32_t bulk_leaves = BulkLeaves(params, inputs) & ~staged_leaves;
#if JAX_EP_HAS_BULK
  if (bulk_leaves != 0) SumBulk(params, inputs, bulk_leaves);
#endif
  if (threadIdx.x < kRowThreads) {
    const Workers workers = WarpsOf(blockIdx.x, gridDim.x, 0, kRowWarps);
    for (int32_t i = 0; i < params.num_leaves; ++i) {
      if ((bulk_leaves | staged_leaves) >> i & 1) continue;
      WithElement(params.leaves[i].element, [&](auto element, auto wide) {
        SumPlain<decltype(element), decltype(wide)>(params, inputs, i, workers);
      });
    }
  }
  if (staged) MoveStaged(params, Control(control), inputs, staged_leaves);
  if (IsLastBlock(control)) {
    CloseWithPeers(control);
    if (staged) EndStaged(Control(control));
    AdvanceEpoch(control);
  }
}

// Where tokens are few: the results of CombineKernel.
//
// Launch: as many blocks of kRowThreads, kDoneBlocks at most.
// Roles:  as above, but that a warp loads its pieces of all rows of a token
//         into registers and sums them there.

// Sums units [begin, end) of at most kSources rows, all of whose loads are in
// flight at once.
template <typename T, typename Wide, int kSources>
__device__ __forceinline__ void SumPiece(uint64_t source, uint32_t sources,
                                         uint4* out, int32_t begin,
                                         int32_t end) {
  constexpr int kUnits = kPieceUnits / kSources;
  using Row = Elements<T, uint4>;
  const int32_t lane = threadIdx.x % kWarpSize;
  const int32_t count = __popc(sources);
  const uint4* from[kSources];
#pragma unroll
  for (int s = 0; s < kSources; ++s) {
    // Past the last row, the last again; it is not read.
    from[s] = reinterpret_cast<const uint4*>(
        AddressOf(source, max(__ffs(sources) - 1, 0)));
    if (s + 1 < count) sources &= sources - 1;
  }
  for (int32_t base = begin + lane; base < end; base += kUnits * kWarpSize) {
    // Of this lane; a constant apart, so that one register holds the address.
    const int32_t left = end - base;
    uint4 units[kSources][kUnits];
#pragma unroll
    for (int s = 0; s < kSources; ++s) {
      if (s >= count) continue;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        if (i * kWarpSize < left) {
          units[s][i] = LoadUnit(from[s] + base + i * kWarpSize);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      // As in SumUnits().
      const Wide neutral = count == 0 ? Wide(0) : -Wide(0);
      Wide total[Row::kSize];
#pragma unroll
      for (int e = 0; e < Row::kSize; ++e) total[e] = neutral;
#pragma unroll
      for (int s = 0; s < kSources; ++s) {
        if (s >= count) continue;
        const Row row = Row::From(units[s][i]);
#pragma unroll
        for (int e = 0; e < Row::kSize; ++e) total[e] += Widen(row.at[e]);
      }
      Row sum;
#pragma unroll
      for (int e = 0; e < Row::kSize; ++e) sum.at[e] = Narrow<T>(total[e]);
      if (i * kWarpSize < left) {
        StoreUnit(out + base + i * kWarpSize, sum.ToUnit());
      }
    }
  }
}

// What units of 16 bytes cannot load, and sums of more rows: few registers.
template <typename T, typename Wide>
__device__ __forceinline__ void SumPart(uint64_t source, uint32_t sources,
                                        std::byte* out, int64_t row_bytes,
                                        int32_t part, int32_t parts) {
  SumUnits<T, Wide, T, 2>(
      source, sources, out,
      PartOf(row_bytes / static_cast<int64_t>(sizeof(T)), part, parts));
}

template <typename T, typename Wide>
__device__ void SumFew(const FewParams& few, std::byte* const* inputs,
                       const PieceAt& at, int2 route) {
  const Leaf& leaf = few.rows.leaves[at.leaf];
  const PieceCut& cut = few.cuts[at.leaf];
  const int32_t token = cut.TokenOf(at.item);
  const int32_t part = at.item - token * cut.parts;
  const uint64_t source = RowAt(few.rows, inputs, at.leaf, route);
  const uint32_t sources = __ballot_sync(kAllLanes, route.x >= 0);
  const int32_t count = __popc(sources);
  std::byte* out = leaf.out + token * leaf.row_bytes;
  if (count > 8 || cut.row_units == 0 || OrOverWarp(source) % 16 != 0) {
    SumPart<T, Wide>(source, sources, out, leaf.row_bytes, part, cut.parts);
    return;
  }
  const int32_t begin = part * cut.share;
  const int32_t end = min(begin + cut.share, cut.row_units);
  auto* units = reinterpret_cast<uint4*>(out);
  if (count <= 2) {
    SumPiece<T, Wide, 2>(source, sources, units, begin, end);
  } else if (count <= 4) {
    SumPiece<T, Wide, 4>(source, sources, units, begin, end);
  } else {
    SumPiece<T, Wide, 8>(source, sources, units, begin, end);
  }
}

// T: the element of all leaves. A kernel for all elements would spill what it
// loads.
template <typename T, typename Wide>
__global__ void __launch_bounds__(kRowThreads, 1)
    FewCombineKernel(const __grid_constant__ FewParams few) {
  __shared__ std::byte* inputs[kMaxLeaves * kMaxRanks];
  const CombineParams& params = few.rows;
  const Control control(params.op, "combine");
  if (blockIdx.x == 0) {
    __shared__ std::byte* own[kMaxLeaves];
    if (threadIdx.x < params.num_leaves) {
      const Leaf& leaf = params.leaves[threadIdx.x];
      own[threadIdx.x] = Published(control, leaf.in, leaf.exported);
    }
    __syncthreads();
    PublishReady(control, own, params.num_leaves);
  }
  const Workers workers = WarpsOf(blockIdx.x, gridDim.x, 0, kRowWarps);
  const auto route_of = [&](const PieceAt& piece) {
    return piece.Exists(few)
               ? RouteOf(params, few.cuts[piece.leaf].TokenOf(piece.item))
               : int2{-1, -1};
  };
  PieceAt at = PieceAt::First(few, workers);
  int2 next = route_of(at);
  const bool staged = WaitReady(control, inputs, params.num_leaves);
  const uint32_t staged_leaves = staged ? LeavesOutOfReach(params, inputs) : 0;
  while (at.Exists(few)) {
    const PieceAt now = at;
    const int2 route = next;
    at = at.Next(few, workers);
    next = route_of(at);
    if (staged_leaves >> now.leaf & 1) continue;
    SumFew<T, Wide>(few, inputs, now, route);
  }
  if (staged) MoveStaged(params, Control(control), inputs, staged_leaves);
  CloseBlock(control);
  if (IsLastBlock(control)) {
    CloseFew(control);
    if (staged) EndStaged(Control(control));
    AdvanceEpoch(control);
  }
}

}  // namespace

namespace {

using FewKernel = void (*)(FewParams);

// The kernel for few tokens whose leaves have one element; else nullptr.
FewKernel FewKernelFor(const CombineParams& params) {
  const Element element = params.leaves[0].element;
  for (int32_t i = 1; i < params.num_leaves; ++i) {
    if (params.leaves[i].element != element) return nullptr;
  }
  switch (element) {
    case Element::kBf16:
      return &FewCombineKernel<Bf16, float>;
    case Element::kF16:
      return &FewCombineKernel<F16, float>;
    case Element::kF32:
      return &FewCombineKernel<float, float>;
    case Element::kF64:
      return &FewCombineKernel<double, double>;
    case Element::kNone:
      break;
  }
  return nullptr;
}

}  // namespace

cudaError_t LaunchCombine(const CombineParams& params, cudaStream_t stream) {
  FewParams few;
  const FewKernel few_kernel = FewKernelFor(params);
  if (few_kernel == nullptr || !CutFew(params, few)) {
    return LaunchGeneralCombine(params, stream);
  }
  few_kernel<<<FewBlocks(params.op.view), kRowThreads, 0, stream>>>(few);
  return cudaPeekAtLastError();
}

cudaError_t LaunchGeneralCombine(const CombineParams& params,
                                 cudaStream_t stream) {
  CombineKernel<<<params.op.view.num_sms, kCombineThreads,
                  params.op.view.has_bulk ? kBulkSharedBytes : 0, stream>>>(
      params);
  return cudaPeekAtLastError();
}

const void* CombineKernelAddress() {
  return reinterpret_cast<const void*>(&CombineKernel);
}

std::vector<const void*> FewCombineKernelAddresses() {
  return {reinterpret_cast<const void*>(&FewCombineKernel<Bf16, float>),
          reinterpret_cast<const void*>(&FewCombineKernel<F16, float>),
          reinterpret_cast<const void*>(&FewCombineKernel<float, float>),
          reinterpret_cast<const void*>(&FewCombineKernel<double, double>)};
}

}  // namespace jax_ep
