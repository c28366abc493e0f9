// combine: every rank gathers its tokens' rows from its peers and sums them.
//
// Launch: view.num_sms blocks of kRowThreads; kBulkSharedBytes of dynamic
//         shared memory where view.has_bulk.
// Roles:  block 0 publishes the addresses of this rank's inputs; all warps of
//         all blocks sum rows, each with a ring of pieces of its own that bulk
//         copies fill ahead of it (else through registers); the last block
//         closes with the peers.
// Reads:  params.routes, leaves[].in of this rank and of the peers. Writes:
//         leaves[].out of this rank, every row once.
// Order:  publish (release; this rank's rows were written before it in stream
//         order) -> the peers' WaitReady (acquire) -> their loads -> their
//         CloseWithPeers (release) -> ours (acquire): only then may the rows be
//         overwritten. A proxy fence stands between WaitReady and the first
//         bulk load, and between the reads of a piece and the bulk load that
//         takes its place.
#include <cuda_runtime.h>

#include "cc/device/bulk.cuh"
#include "cc/device/items.cuh"
#include "cc/device/rows.cuh"
#include "cc/device/sync.cuh"
#include "cc/ops.h"

namespace jax_ep {
namespace {

#if JAX_EP_HAS_BULK

// A piece: what a warp sums at a time, kUnits units of 16 bytes a lane.
constexpr int kUnits = 4;
constexpr int kPieceBytes = kUnits * kWarpSize * 16;
constexpr int kPieces = kBulkSharedBytes / kRowWarps / kPieceBytes;

// Walks over the pieces of a leaf that a warp sums: its items in turn, of each
// item its columns, of each column the sources in rank order.
struct Cursor {
  const CombineParams& params;
  std::byte* const* inputs;
  int32_t leaf;
  int32_t parts;
  int32_t columns;  // pieces of a row
  int64_t items;
  int64_t stride;

  int64_t item;
  int32_t column;
  int32_t end_column;
  uint64_t source;   // of this lane, 0 where there is none
  uint32_t sources;  // lanes that have one
  uint32_t left;     // those still to come in this column

  __device__ Cursor(const CombineParams& p, std::byte* const* in, int32_t l,
                    const Workers& workers)
      : params(p), inputs(in), leaf(l), stride(workers.count) {
    const int64_t row_bytes = p.leaves[l].row_bytes;
    columns = static_cast<int32_t>((row_bytes + kPieceBytes - 1) / kPieceBytes);
    parts = PartsPerRow(workers, p.num_tokens, row_bytes);
    items = p.num_tokens * parts;
    item = workers.index;
    Enter();
  }

  __device__ bool Done() const { return item >= items; }
  __device__ int64_t token() const { return item / parts; }

  __device__ void NextItem() {
    item += stride;
    Enter();
  }
  __device__ void NextColumn() {
    ++column;
    left = sources;
    if (column == end_column) NextItem();
  }
  // The bytes of a row that the column covers.
  __device__ int64_t Begin() const { return int64_t{column} * kPieceBytes; }
  __device__ uint32_t Bytes() const {
    return static_cast<uint32_t>(
        min(int64_t{kPieceBytes}, params.leaves[leaf].row_bytes - Begin()));
  }

 private:
  __device__ void Enter() {
    if (Done()) return;
    const int32_t part = static_cast<int32_t>(item % parts);
    column = columns * part / parts;
    end_column = columns * (part + 1) / parts;
    const int2 route = RouteOf(params, token());
    source = RowAt(params, inputs, leaf, route);
    sources = left = __ballot_sync(kAllLanes, route.x >= 0);
  }
};

// One warp's ring of pieces, kPieces bulk loads ahead of the sums.
class Ring {
 public:
  __device__ Ring(uint64_t* loaded, std::byte* bytes)
      : loaded_(loaded), bytes_(bytes), lane_(threadIdx.x % kWarpSize) {
    if (lane_ == 0) {
      for (int i = 0; i < kPieces; ++i) bulk::InitBarrier(&loaded_[i], 1);
      bulk::FenceBarrierInit();
      // The rows were written by ordinary stores and acquired as such.
      bulk::FenceProxy();
    }
    __syncwarp();
  }

  // Fills free places with the pieces at `ahead`.
  __device__ void Fill(Cursor& ahead) {
    while (asked_ - taken_ < kPieces && !ahead.Done()) {
      if (ahead.left == 0) {  // a token without rows
        ahead.NextItem();
        continue;
      }
      const uint64_t from = AddressOf(ahead.source, __ffs(ahead.left) - 1);
      if (lane_ == 0) {
        const uint32_t place = asked_ % kPieces;
        bulk::ArriveExpecting(&loaded_[place], ahead.Bytes());
        bulk::Load(bytes_ + place * kPieceBytes,
                   reinterpret_cast<const std::byte*>(from) + ahead.Begin(),
                   ahead.Bytes(), &loaded_[place]);
      }
      ++asked_;
      ahead.left &= ahead.left - 1;
      if (ahead.left == 0) ahead.NextColumn();
    }
  }

  // The next piece, once it is there.
  __device__ const uint4* Take() {
    const uint32_t place = taken_ % kPieces;
    bulk::WaitBarrier(&loaded_[place], taken_ / kPieces & 1);
    return reinterpret_cast<const uint4*>(bytes_ + place * kPieceBytes);
  }

  // Gives the place of the piece taken last back; all lanes have read it.
  __device__ void GiveBack() {
    bulk::FenceProxy();
    __syncwarp();
    ++taken_;
  }

 private:
  uint64_t* loaded_;
  std::byte* bytes_;
  int32_t lane_;
  uint32_t asked_ = 0;
  uint32_t taken_ = 0;
};

template <typename T, typename Wide>
__device__ void SumBulk(Cursor now, Ring& ring) {
  using Row = Elements<T, uint4>;
  const int32_t lane = threadIdx.x % kWarpSize;
  const Leaf& leaf = now.params.leaves[now.leaf];
  Cursor ahead = now;
  ring.Fill(ahead);
  while (!now.Done()) {
    // Minus zero is the neutral element: a lone -0.0 stays what it is. A token
    // without rows gets plus zero.
    const Wide neutral = now.sources == 0 ? Wide(0) : -Wide(0);
    Wide total[kUnits][Row::kSize];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
#pragma unroll
      for (int e = 0; e < Row::kSize; ++e) total[i][e] = neutral;
    }
    const int32_t units = now.Bytes() / 16;
    for (uint32_t left = now.sources; left != 0; left &= left - 1) {
      const uint4* piece = ring.Take();
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const int32_t at = i * kWarpSize + lane;
        if (at < units) {
          const Row row = Row::From(piece[at]);
#pragma unroll
          for (int e = 0; e < Row::kSize; ++e) total[i][e] += Widen(row.at[e]);
        }
      }
      ring.GiveBack();
      ring.Fill(ahead);
    }
    uint4* out = reinterpret_cast<uint4*>(
        leaf.out + now.token() * leaf.row_bytes + now.Begin());
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int32_t at = i * kWarpSize + lane;
      Row sum;
#pragma unroll
      for (int e = 0; e < Row::kSize; ++e) sum.at[e] = Narrow<T>(total[i][e]);
      if (at < units) StoreUnit(out + at, sum.ToUnit());
    }
    now.NextColumn();
  }
}

#else

class Ring {};

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

template <typename T, typename Wide>
__device__ void SumLeaf(const CombineParams& params, std::byte* const* inputs,
                        int32_t i, const Workers& workers, Ring* ring) {
#if JAX_EP_HAS_BULK
  if (ring != nullptr) {
    return SumBulk<T, Wide>(Cursor(params, inputs, i, workers), *ring);
  }
#endif
  SumPlain<T, Wide>(params, inputs, i, workers);
}

__device__ void SumLeaves(const CombineParams& params, std::byte* const* inputs,
                          uint32_t bulk_leaves, const Workers& workers,
                          Ring& ring) {
  for (int32_t i = 0; i < params.num_leaves; ++i) {
    Ring* const with = bulk_leaves >> i & 1 ? &ring : nullptr;
    switch (params.leaves[i].element) {
      case Element::kBf16:
        SumLeaf<Bf16, float>(params, inputs, i, workers, with);
        break;
      case Element::kF16:
        SumLeaf<F16, float>(params, inputs, i, workers, with);
        break;
      case Element::kF32:
        SumLeaf<float, float>(params, inputs, i, workers, with);
        break;
      case Element::kF64:
        SumLeaf<double, double>(params, inputs, i, workers, with);
        break;
      case Element::kNone:
        break;
    }
  }
}

__global__ void __launch_bounds__(kRowThreads, 1)
    CombineKernel(const __grid_constant__ CombineParams params) {
  __shared__ std::byte* inputs[kMaxLeaves * kMaxRanks];
  const Control control(params.op, "combine");
  if (blockIdx.x == 0) {
    __shared__ std::byte* own[kMaxLeaves];
    if (threadIdx.x < params.num_leaves) {
      own[threadIdx.x] = const_cast<std::byte*>(params.leaves[threadIdx.x].in);
    }
    __syncthreads();
    PublishReady(control, own, params.num_leaves);
  }
  WaitReady(control, inputs, params.num_leaves);
  const Workers workers = WarpsOf(blockIdx.x, gridDim.x, 0, kRowWarps);
#if JAX_EP_HAS_BULK
  extern __shared__ __align__(128) std::byte bulk_bytes[];
  __shared__ uint64_t loaded[kRowWarps][kPieces];
  const int32_t warp = threadIdx.x / kWarpSize;
  Ring ring(loaded[warp], bulk_bytes + warp * kPieces * kPieceBytes);
#else
  Ring ring;
#endif
  SumLeaves(params, inputs, BulkLeaves(params, inputs), workers, ring);
  if (IsLastBlock(control)) {
    CloseWithPeers(control);
    AdvanceEpoch(control);
  }
}

}  // namespace

cudaError_t LaunchCombine(const CombineParams& params, cudaStream_t stream) {
  CombineKernel<<<params.op.view.num_sms, kRowThreads,
                  params.op.view.has_bulk ? kBulkSharedBytes : 0, stream>>>(
      params);
  return cudaPeekAtLastError();
}

const void* CombineKernelAddress() {
  return reinterpret_cast<const void*>(&CombineKernel);
}

}  // namespace jax_ep
