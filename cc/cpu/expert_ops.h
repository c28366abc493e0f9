// expert_rows, permute, unpermute and row_dots on the host, for one rank.
//
// C rows of K choices, L local experts, S expert rows. Arrays are row-major.
#ifndef JAX_EP_CC_CPU_EXPERT_OPS_H_
#define JAX_EP_CC_CPU_EXPERT_OPS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/cpu/ops.h"
#include "cc/element.h"

namespace jax_ep::cpu {

struct ExpertRowsParams {
  int32_t local_experts;
  int32_t expert_alignment;
  int64_t num_pairs;             // C * K
  int64_t expert_capacity;       // S
  const int32_t* recv_topk_idx;  // [C, K]
  int32_t* expert_rows;          // [C, K]
  int32_t* empty_ranges;         // [L + 1, 2]
};

// Numbers the (row, k) pairs by (expert, slot, k), each expert's group padded
// to the alignment; -1 where a pair has no expert here or its place is >= S.
// empty_ranges holds [begin, end) of the places without a pair: the pads of
// each group, then what is left after the last group.
void ExpertRows(const ExpertRowsParams& params);

// One rank's permute (in [C], out [S]) or unpermute (in [S], out [C]).
struct PermuteParams {
  int32_t top_k;
  int32_t num_ranges;  // L + 1
  int64_t capacity;    // C
  const int32_t* expert_rows;
  const int32_t* empty_ranges;  // permute only
  // [C, K]: float, double where the leaves are; nullptr: rows as they are.
  const void* weights;
  std::vector<Leaf> leaves;
};

// Rows [begin, end).
struct RowRange {
  int64_t begin;
  int64_t end;
};

// Parts of an operation may run beside each other. Of permute, part `index` of
// `count` also zeroes its share of the empty ranges.
void Permute(const PermuteParams& params, RowRange rows, int64_t index,
             int64_t count);
void Unpermute(const PermuteParams& params, RowRange rows);

struct RowDotsParams {
  struct Pair {
    const std::byte* row;         // [C, ...]
    const std::byte* expert_row;  // [S, ...]
    int64_t row_bytes;
    Element element;
  };

  int32_t top_k;
  const int32_t* expert_rows;  // [C, K]
  void* dots;                  // [C, K]: float, double where the leaves are
  std::vector<Pair> leaves;
};

// dots[c, k] = sum over leaves of <rows[c], the expert row of (c, k)>, 0 where
// there is none.
void RowDots(const RowDotsParams& params, RowRange rows);

// out[i] = weights[0] * in[0][i] + weights[1] * in[1][i] + ..., in that order:
// in float32 (float64 for kF64, weights alike) each product and each sum
// rounds, then the result once to nearest even. num_in >= 1, no overlap.
void WeightedSumRows(Element element, const std::byte* const* in,
                     const double* weights, int32_t num_in, std::byte* out,
                     int64_t num_bytes);

// The product of two rows, in float32 (float64 for kF64).
double DotRows(Element element, const std::byte* a, const std::byte* b,
               int64_t num_bytes);

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CC_CPU_EXPERT_OPS_H_
