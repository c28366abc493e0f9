// Kernels between the rows of a rank and its experts: parameters and launchers.
//
// All but dispatch_permute are local: no peer, no handshake, so they may use
// the whole GPU. Launchers enqueue on `stream` of the current device and return
// at once: no allocation, no synchronisation, fit for stream capture. C rows of
// K choices, L local experts, S expert rows; arrays are row-major.
#ifndef JAX_EP_CC_EXPERTS_EXPERT_OPS_H_
#define JAX_EP_CC_EXPERTS_EXPERT_OPS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/element.h"
#include "cc/layout/limits.h"
#include "cc/ops.h"

namespace jax_ep {

struct ExpertRowsParams {
  int32_t local_experts;
  int32_t expert_alignment;
  int64_t num_pairs;             // C * K
  int64_t expert_capacity;       // S
  const int32_t* recv_topk_idx;  // [C, K]
  int32_t* expert_rows;          // [C, K], -1: none
  int32_t* empty_ranges;         // [L + 1, 2], see ExpertRows in cc/cpu
  int32_t* workspace;            // ExpertRowsWorkspaceSize elements
};

// permute: leaves [C, ...] -> [S, ...]. unpermute: leaves [S, ...] -> [C, ...].
struct PermuteParams {
  int32_t top_k;
  int32_t num_leaves;
  int32_t num_ranges;           // L + 1
  int64_t capacity;             // C
  int64_t expert_capacity;      // S
  const int32_t* expert_rows;   // [C, K]
  const int32_t* empty_ranges;  // [L + 1, 2], permute only
  // [C, K]: float, double where the leaves are; nullptr: rows as they are.
  const void* weights;
  Leaf leaves[kMaxLeaves];
};
using UnpermuteParams = PermuteParams;

// permute(dispatch(x)) of the first num_grouped leaves, dispatch(x) of the
// others.
struct DispatchPermuteParams {
  // num_recv is not read. leaves[].out is where rows land, [C, ...]: scratch of
  // a grouped leaf, in which only rows of peers stand, else the result. One
  // leaf less than kMaxLeaves.
  RowParams rows;
  int32_t num_grouped;
  int32_t top_k;
  int32_t num_ranges;              // L + 1
  const int32_t* recv_counts;      // [R]
  const int32_t* recv_src;         // [C]
  const int32_t* expert_rows;      // [C, K]
  const int32_t* empty_ranges;     // [L + 1, 2]
  uint64_t* workspace;             // ProgressLayout
  std::byte* grouped[kMaxLeaves];  // [S, ...]
};

// dots[c, k] = sum over leaves of <rows[c], expert_rows' row of (c, k)>.
struct RowDotsParams {
  struct Pair {
    const std::byte* row;         // [C, ...]
    const std::byte* expert_row;  // [S, ...]
    int64_t row_bytes;
    Element element;
  };

  int32_t top_k;
  int32_t num_leaves;
  int64_t capacity;            // C
  const int32_t* expert_rows;  // [C, K]
  void* dots;                  // [C, K]: float, double where the leaves are
  Pair leaves[kMaxLeaves];
};

cudaError_t LaunchExpertRows(const ExpertRowsParams& params,
                             cudaStream_t stream);
cudaError_t LaunchPermute(const PermuteParams& params, cudaStream_t stream);
cudaError_t LaunchUnpermute(const UnpermuteParams& params, cudaStream_t stream);
cudaError_t LaunchDispatchPermute(const DispatchPermuteParams& params,
                                  cudaStream_t stream);
cudaError_t LaunchRowDots(const RowDotsParams& params, cudaStream_t stream);

// The kernels themselves, for loading them ahead of the first launch.
std::vector<const void*> ExpertRowsKernelAddresses();
const void* PermuteKernelAddress();
const void* UnpermuteKernelAddress();
const void* DispatchPermuteKernelAddress();
const void* FanOutRestKernelAddress();  // of LaunchDispatchPermute
const void* RowDotsKernelAddress();

}  // namespace jax_ep

#endif  // JAX_EP_CC_EXPERTS_EXPERT_OPS_H_
