// plan, dispatch and combine on the host, over all ranks of a group at once.
//
// The last rank to arrive (cc/cpu/rendezvous.h) calls these with everybody's
// buffers; no rank waits for another inside. Ranks of other processes have no
// buffers here, but for topk_idx: what they would write is left out. Shapes are
// equal on all ranks. Arrays are row-major; see jax_ep.Plan for the meaning of
// the plan's fields.
#ifndef JAX_EP_CC_CPU_OPS_H_
#define JAX_EP_CC_CPU_OPS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/element.h"
#include "cc/plan/plan_results.h"

namespace jax_ep::cpu {

struct PlanSizes {
  int32_t num_ranks;
  int32_t num_experts;
  int32_t expert_alignment;
  int32_t top_k;
  int64_t num_tokens;
  int64_t capacity;
};

// One rank's buffers of a plan.
struct PlanBuffers : PlanResults {
  // Whether the rank is in this process. recv_counts is never empty.
  bool here() const { return recv_counts != nullptr; }

  const int32_t* topk_idx;  // [T, K]
};

void Plan(const PlanSizes& sizes, const std::vector<PlanBuffers>& ranks);

struct Leaf {
  const std::byte* in;
  std::byte* out;
  int64_t row_bytes;
  Element element;
};

// One rank's buffers of a dispatch (in [T], out [C]) or combine (in [C], out
// [T]).
struct RowBuffers {
  // Whether the rank is in this process. There is a leaf in every call.
  bool here() const { return !leaves.empty(); }

  const int32_t* routes;    // [T, routes_per_token, 2]
  const int32_t* num_recv;  // [], dispatch only
  std::vector<Leaf> leaves;
};

struct RowSizes {
  int32_t routes_per_token;
  int64_t num_tokens;
  int64_t capacity;
};

// A part of a dispatch or combine that may run beside all other parts: tokens
// [begin, end) of rank `rank`, and for dispatch the empty slots of `rank` that
// fall into the same share of its buffer.
struct Part {
  int32_t rank;
  int64_t begin;
  int64_t end;
};

// Cuts the work into at most `max_parts` parts for each of `ranks`.
std::vector<Part> SplitRows(const std::vector<int>& ranks, int64_t num_tokens,
                            int64_t max_parts);

void Dispatch(const RowSizes& sizes, const std::vector<RowBuffers>& ranks,
              const Part& part);

void Combine(const RowSizes& sizes, const std::vector<RowBuffers>& ranks,
             const Part& part);

// out[i] = in[0][i] + in[1][i] + ..., added in that order in float32 (float64
// for kF64) and rounded once to nearest even. num_in >= 1, no overlap.
void SumRows(Element element, const std::byte* const* in, int32_t num_in,
             std::byte* out, int64_t num_bytes);

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CC_CPU_OPS_H_
