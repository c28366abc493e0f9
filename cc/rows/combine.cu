// combine: every rank gathers its tokens' rows from its peers and sums them.
//
// Launch: view.num_sms blocks of kCombineThreads; kBulkSharedBytes of dynamic
//         shared memory where view.has_bulk.
// Roles:  block 0 publishes the addresses of this rank's inputs. In each block
//         one warp loads the rows of a token, or of some, after the other into
//         a ring of stages by bulk copies, the other warps sum them; what bulk
//         copies cannot load the summing warps load themselves. Leaves with
//         rows out of reach follow through staging memory
//         (cc/rings/staged_combine.cuh). The last block closes with the peers;
//         where there are bulk copies only, the last one to have read, before
//         it has stored its sums.
// Reads:  params.routes, leaves[].in of this rank and of the peers; for staged
//         rows num_recv and recv_src. Writes: leaves[].out of this rank, every
//         row once.
// Order:  publish (release; this rank's rows were written before it in stream
//         order) -> the peers' WaitReady (acquire) -> their loads -> their
//         CloseRead or CloseWithPeers (release) -> ours (acquire): only then
//         may the rows be overwritten. A proxy fence stands between WaitReady
//         and the first bulk load, and between the reads of a stage and the
//         bulk loads that take its place.
#include <cuda_runtime.h>

#include "cc/handshake/sync.cuh"
#include "cc/launch.cuh"
#include "cc/ops.h"
#include "cc/rings/staged_combine.cuh"
#include "cc/rows/bulk.cuh"
#include "cc/rows/items.cuh"
#include "cc/rows/rows.cuh"
#include "cc/rows/unit_sum.cuh"

namespace jax_ep {
namespace {

// The summing warps, and one that loads rows for them.
constexpr int kCombineThreads = kRowThreads + kWarpSize;

#if JAX_EP_HAS_BULK

// Stages of a block's ring at least, and at most where rows are short: a row
// that is asked for takes its time to come, however short it is. A stage takes
// the same columns of all rows that one token's sum has.
constexpr int kLeastStages = 6;
constexpr int kMostStages = 24;
constexpr int kMostStageBytes = kBulkSharedBytes / kLeastStages / 128 * 128;

struct Stage {
  uint64_t loaded;   // mbarrier: the rows are there
  uint64_t summed;   // mbarrier: all warps of the stage's team have read them
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
    const int32_t most = kMostStageBytes / params.routes_per_token / 16 * 16;
    count = static_cast<int32_t>((row_bytes + most - 1) / most);
    bytes =
        static_cast<int32_t>((row_bytes + count * 16 - 1) / (count * 16) * 16);
  }
};

// How a launch cuts its shared memory into stages.
struct Ring {
  uint32_t stages;
  int32_t stage_bytes;

  __device__ Ring(const CombineParams& params, uint32_t bulk_leaves)
      : stage_bytes(128) {
    for (int32_t i = 0; i < params.num_leaves; ++i) {
      if (!(bulk_leaves >> i & 1)) continue;
      const int32_t bytes =
          params.routes_per_token * Columns(params, params.leaves[i]).bytes;
      stage_bytes = max(stage_bytes, (bytes + 127) / 128 * 128);
    }
    stages = min(kBulkSharedBytes / stage_bytes, kMostStages);
  }
};

// The ring as one side sees it: which stage is next and in which round.
struct Turn {
  uint32_t stages;  // of the ring
  uint32_t stage = 0;
  uint32_t parity = 0;
  uint32_t number = 0;  // of stages so far

  // The turn `count` stages later, at most a round.
  __device__ Turn After(uint32_t count) const {
    Turn after = *this;
    after.number += count;
    after.stage += count;
    if (after.stage >= stages) {
      after.stage -= stages;
      after.parity ^= 1;
    }
    return after;
  }
};

// The loading warp, where a stage takes whole rows: it sees to several tokens
// at a time, because what each costs beside its bytes would hold up short rows.
__device__ void LoadRows(const CombineParams& params, std::byte* const* inputs,
                         int32_t i, Stage* stages, std::byte* bytes,
                         int32_t stage_bytes, Turn& turn) {
  // They wait for each other's stages, which may be few.
  const uint32_t together = min(turn.stages / kLeastStages, 4u);
  const auto num_tokens = static_cast<uint32_t>(params.num_tokens);
  const auto width = static_cast<uint32_t>(params.routes_per_token);
  const auto row_bytes = static_cast<int32_t>(params.leaves[i].row_bytes);
  const uint32_t lane = threadIdx.x % kWarpSize;
  const uint32_t tokens = TokensOfBatch(params);
  const uint32_t mine = lane / width;
  const bool leads = mine < tokens && lane == mine * width;
  const uint32_t beside =
      mine < tokens ? kAllLanes >> (kWarpSize - width) << mine * width : 0;
  ForEachBatch(
      params, blockIdx.x, gridDim.x,
      [&](int2 route) { return RowAt(params, inputs, i, route); },
      [&](uint32_t begin, uint64_t row, uint32_t all) {
        const uint32_t rows = all & beside;
        const int32_t num_rows = __popc(rows);
        const int32_t place = __popc(rows & ((1u << lane) - 1));
        const uint32_t token = begin + mine * gridDim.x;
        for (uint32_t first = 0; first < tokens; first += together) {
          const uint32_t number = mine - first;
          const bool now = number < together && token < num_tokens;
          const Turn its = turn.After(now ? number : 0);
          Stage& stage = stages[its.stage];
          if (now && leads) {
            // The first round finds the stages free.
            bulk::WaitBarrier(&stage.summed, its.parity ^ 1);
            stage.out = token * params.leaves[i].row_bytes;
            stage.bytes = row_bytes;
            stage.num_rows = num_rows;
            bulk::ArriveExpecting(&stage.loaded, row_bytes * num_rows);
          }
          const uint32_t taken = __popc(__ballot_sync(kAllLanes, now && leads));
          if (now && row != 0) {
            bulk::Load(bytes + its.stage * stage_bytes + place * row_bytes,
                       reinterpret_cast<const std::byte*>(row), row_bytes,
                       &stage.loaded);
          }
          turn = turn.After(taken);
        }
      });
}

// The loading warp: a lane loads the row at its address, some columns at a
// time.
__device__ void LoadColumns(const CombineParams& params,
                            std::byte* const* inputs, int32_t i,
                            const Columns& columns, Stage* stages,
                            std::byte* bytes, int32_t stage_bytes, Turn& turn) {
  const uint32_t lane = threadIdx.x % kWarpSize;
  ForEachTokenOfWarp(
      params, blockIdx.x, gridDim.x,
      [&](int2 route) { return RowAt(params, inputs, i, route); },
      [&](uint32_t token, uint64_t row, uint32_t rows) {
        const int32_t num_rows = __popc(rows);
        const bool mine = rows >> lane & 1;
        const auto* from = reinterpret_cast<const std::byte*>(row);
        const int32_t place = __popc(rows & ((1u << lane) - 1));
        for (int32_t c = 0; c < columns.count; ++c, turn = turn.After(1)) {
          Stage& stage = stages[turn.stage];
          const int64_t begin = int64_t{c} * columns.bytes;
          const int32_t size = static_cast<int32_t>(
              min(int64_t{columns.bytes}, columns.row_bytes - begin));
          if (lane == 0) {
            bulk::WaitBarrier(&stage.summed, turn.parity ^ 1);
            stage.out = token * columns.row_bytes + begin;
            stage.bytes = size;
            stage.num_rows = num_rows;
            bulk::ArriveExpecting(&stage.loaded, size * num_rows);
          }
          __syncwarp();
          if (mine) {
            bulk::Load(bytes + turn.stage * stage_bytes + place * columns.bytes,
                       from + begin, size, &stage.loaded);
          }
        }
      });
}

// Into how many teams the summing warps part, which take the stages in turn:
// what a stage costs beside its bytes is waiting, and short columns would leave
// most threads without a unit.
__device__ uint32_t TeamsFor(const CombineParams& params,
                             uint32_t bulk_leaves) {
  int32_t most = 0;
  for (int32_t i = 0; i < params.num_leaves; ++i) {
    if (!(bulk_leaves >> i & 1)) continue;
    most = max(most, Columns(params, params.leaves[i]).bytes / 16);
  }
  return most <= kRowThreads / 4 ? 4 : most <= kRowThreads / 2 ? 2 : 1;
}

// The summing warps: each thread of a team sums some 16-byte units of the
// team's stages.
template <typename T>
__device__ void SumStages(const CombineParams& params, int32_t i, Stage* stages,
                          const std::byte* bytes, int32_t stage_bytes,
                          uint32_t teams, Turn& turn) {
  const Leaf& leaf = params.leaves[i];
  const Columns columns(params, leaf);
  const uint32_t threads = kRowThreads / teams;
  const uint32_t team = threadIdx.x / threads;
  const auto first_unit = static_cast<int32_t>(threadIdx.x % threads);
  for (int64_t token = blockIdx.x; token < params.num_tokens;
       token += gridDim.x) {
    for (int32_t c = 0; c < columns.count; ++c, turn = turn.After(1)) {
      if ((turn.number & (teams - 1)) != team) continue;
      Stage& stage = stages[turn.stage];
      bulk::WaitBarrier(&stage.loaded, turn.parity);
      const int32_t num_rows = stage.num_rows;
      const int32_t units = stage.bytes / 16;
      const auto* rows =
          reinterpret_cast<const uint4*>(bytes + turn.stage * stage_bytes);
      const int32_t stride = columns.bytes / 16;
      uint4* out = reinterpret_cast<uint4*>(leaf.out + stage.out);
      for (int32_t at = first_unit; at < units; at += threads) {
        UnitSum<T> sum;
        if (num_rows == 2) {
          const uint4 first = rows[at];
          const uint4 second = rows[at + stride];
          sum = UnitSum<T>::Of(first);
          sum += second;
        } else if (num_rows != 0) {
          sum = UnitSum<T>::Of(rows[at]);
          for (int32_t r = 1; r < num_rows; ++r) sum += rows[at + r * stride];
        } else {
          sum = UnitSum<T>::Of(UnitSum<T>::Neutral(false));
        }
        StoreUnit(out + at, sum.Rounded());
      }
      // Bulk loads will take the place of what was read here.
      bulk::FenceProxyShared();
      __syncwarp();
      if (threadIdx.x % kWarpSize == 0) bulk::Arrive(&stage.summed);
    }
  }
}

// Waits until all that the loading warp asked for is there.
__device__ void AwaitStages(Stage* stages, const Turn& turn) {
  for (uint32_t s = 0; s < turn.stages; ++s) {
    // In this round or in the last; the first round finds the stages free.
    bulk::WaitBarrier(&stages[s].loaded, turn.parity ^ (s >= turn.stage));
  }
}

// Ends the operation for a block that reads no more, while it still adds up and
// stores. Called by a warp. What the last block of a launch does as ever, this
// does in the last one to have read.
__device__ void CloseRead(const Control& control) {
  const int32_t lane = threadIdx.x % kWarpSize;
  __syncwarp();
  uint32_t before = 0;
  if (lane == 0) {
    auto* finished = reinterpret_cast<uint32_t*>(control.Slot(control.rank()) +
                                                 control.layout.finished);
    before = ptx::IncrementAcqRelGpu(finished, gridDim.x - 1);
  }
  if (__shfl_sync(kAllLanes, before, 0) != gridDim.x - 1) return;
  for (int32_t peer = lane; peer < control.num_ranks(); peer += kWarpSize) {
    ptx::StoreReleaseSys(control.Done(peer, control.rank()),
                         control.Word(control.op.channel));
  }
  for (int32_t peer = lane; peer < control.num_ranks(); peer += kWarpSize) {
    Wait(control, control.Done(control.rank(), peer), "the end", peer);
  }
  __syncwarp();
  if (lane == 0) StoreEpoch(control);
}

// `closes`: rows come by bulk copies alone, so that the loading warp closes.
__device__ void SumBulk(const CombineParams& params, const Control& control,
                        std::byte* const* inputs, uint32_t bulk_leaves,
                        bool closes) {
  extern __shared__ __align__(128) std::byte bytes[];
  __shared__ Stage stages[kMostStages];
  const Ring ring(params, bulk_leaves);
  const uint32_t teams = TeamsFor(params, bulk_leaves);
  if (threadIdx.x == 0) {
    for (Stage& stage : stages) {
      bulk::InitBarrier(&stage.loaded, 1);
      bulk::InitBarrier(&stage.summed, kRowWarps / teams);
    }
    bulk::FenceBarrierInit();
  }
  __syncthreads();
  const bool loads = threadIdx.x >= kRowThreads;
  // The rows were written by ordinary stores and acquired as such.
  if (loads) bulk::FenceProxy();
  Turn turn = {ring.stages};
  for (int32_t i = 0; i < params.num_leaves; ++i) {
    if (!(bulk_leaves >> i & 1)) continue;
    if (loads) {
      const Columns columns(params, params.leaves[i]);
      if (columns.count == 1) {
        LoadRows(params, inputs, i, stages, bytes, ring.stage_bytes, turn);
      } else {
        LoadColumns(params, inputs, i, columns, stages, bytes, ring.stage_bytes,
                    turn);
      }
    } else {
      WithElement(params.leaves[i].element, [&](auto element, auto) {
        SumStages<decltype(element)>(params, i, stages, bytes, ring.stage_bytes,
                                     teams, turn);
      });
    }
  }
  if (loads && closes) {
    AwaitStages(stages, turn);
    CloseRead(control);
  }
}

#endif  // JAX_EP_HAS_BULK

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
  if (bulk_leaves != 0) {
    const bool closes = !staged && bulk_leaves == (1u << params.num_leaves) - 1;
    SumBulk(params, control, inputs, bulk_leaves, closes);
    if (closes) return;
  }
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

}  // namespace

cudaError_t LaunchGeneralCombine(const CombineParams& params,
                                 cudaStream_t stream, cudaEvent_t begun) {
  const int32_t shared_bytes = params.op.view.has_bulk ? kBulkSharedBytes : 0;
  return LaunchKernel(CombineKernel, params,
                      {params.op.view.num_sms, kCombineThreads, shared_bytes},
                      stream, begun);
}

const void* CombineKernelAddress() {
  return reinterpret_cast<const void*>(&CombineKernel);
}

}  // namespace jax_ep
