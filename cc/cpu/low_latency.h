// low_latency_dispatch and low_latency_combine on the host, over all ranks of a
// group at once, as in cc/cpu/ops.h. What they compute is in
// docs/semantics.md.
#ifndef JAX_EP_CC_CPU_LOW_LATENCY_H_
#define JAX_EP_CC_CPU_LOW_LATENCY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/cpu/ops.h"
#include "cc/element.h"

namespace jax_ep::cpu {

struct LowLatencySizes {
  int32_t num_ranks;
  int32_t num_experts;
  int32_t top_k;
  int64_t num_tokens;  // T
  int64_t max_tokens;
  bool by_expert;  // the layout "expert", else "rank"

  // Tokens from one source to the next in `places`.
  int64_t stride() const { return by_expert ? num_tokens : max_tokens; }
};

// One rank's buffers. Of ranks elsewhere there are only ids, weights and the
// leaves' `in`.
struct LowLatencyDispatchBuffers {
  bool here() const { return places != nullptr; }

  const int32_t* topk_idx;    // [T, K]
  const float* topk_weights;  // [T, K] or nullptr
  std::vector<Leaf> leaves;   // [T, ..] to the received rows
  int32_t* counts;            // [L], by expert
  int32_t* places;            // [R, stride, K]
  float* recv_weights;        // [R, max_tokens, K], where weights
};

void LowLatencyDispatch(const LowLatencySizes& sizes,
                        const std::vector<LowLatencyDispatchBuffers>& ranks);

struct LowLatencyCombineBuffers {
  bool here() const { return out != nullptr; }

  const int32_t* topk_idx;    // [T, K]; here
  const float* topk_weights;  // [T, K] or nullptr; of all ranks
  const int32_t* places;      // [R, stride, K]; here
  const std::byte* y;         // the received rows; here
  std::byte* out;             // [T, ..]; here
  // [R, T, ..]: what the rank has for each source's tokens; elsewhere.
  const std::byte* sums;
};

struct LowLatencyRows {
  int64_t row_bytes;
  Element element;
};

// What rank `from`, which is here, has for the tokens of all sources that are
// elsewhere: [R, T, ..], the rest is left alone.
void SumForOthers(const LowLatencySizes& sizes, const LowLatencyRows& rows,
                  const std::vector<LowLatencyCombineBuffers>& ranks,
                  int32_t from, std::byte* sums);

void LowLatencyCombine(const LowLatencySizes& sizes, const LowLatencyRows& rows,
                       const std::vector<LowLatencyCombineBuffers>& ranks);

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CC_CPU_LOW_LATENCY_H_
