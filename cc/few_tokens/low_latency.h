// The low-latency operations of the CUDA backend: parameters and launchers.
//
// As in cc/ops.h: a launcher enqueues one kernel and returns at once. All ranks
// of the group launch the same operations of a buffer in the same order, each
// kind of operation one after the other on a device.
#ifndef JAX_EP_CC_FEW_TOKENS_LOW_LATENCY_H_
#define JAX_EP_CC_FEW_TOKENS_LOW_LATENCY_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/element.h"
#include "cc/handshake/peer_view.h"
#include "cc/layout/low_latency.h"

namespace jax_ep {

// What both operations know. `op.view.control` are the ranks' windows.
struct LowLatencyParams {
  Operation op;
  LowLatencyLayout layout;
  int32_t num_experts;
  int32_t top_k;
  int32_t num_tokens;  // T, in [1, max_tokens]
  int32_t hidden;      // a multiple of LowLatencyLayout::kColumns
  Element element;     // of a row's numbers, as the buffer was made for
  bool by_expert;      // the layout of the received rows: "expert", else "rank"
  int32_t stride;      // tokens from one source to the next in `places`
  const int32_t* topk_idx;  // [T, K], this rank's
};

struct LowLatencyDispatchParams {
  LowLatencyParams base;
  bool quantize = false;         // rows travel as float8_e4m3fn with scales
  const std::byte* x = nullptr;  // [T, H]
  const float* topk_weights = nullptr;  // [T, K] or nullptr; by rank alone
  // By expert [L, R * max_tokens, H], by rank [R, max_tokens, H].
  std::byte* rows = nullptr;
  float* scales = nullptr;    // of rows, [.., num_scales], where quantize
  int32_t* counts = nullptr;  // [L], by expert
  // By expert [R, T, K], the index of a token's row among all of `rows`, -1 for
  // none. By rank [R, max_tokens, K], local expert ids.
  int32_t* places = nullptr;
  float* recv_weights = nullptr;  // [R, max_tokens, K], where topk_weights
};

struct LowLatencyCombineParams {
  LowLatencyParams base;
  const std::byte* y = nullptr;         // as `rows` of dispatch
  const float* topk_weights = nullptr;  // [T, K], by expert alone
  const int32_t* places = nullptr;      // as dispatch left it
  std::byte* out = nullptr;             // [T, H]
};

// Experts of all ranks at most in the layout by expert: a block counts them in
// shared memory.
inline constexpr int32_t kMaxCountedExperts = 4096;

cudaError_t LaunchLowLatencyDispatch(const LowLatencyDispatchParams& params,
                                     cudaStream_t stream);
cudaError_t LaunchLowLatencyCombine(const LowLatencyCombineParams& params,
                                    cudaStream_t stream);

// The kernels themselves, for loading them ahead of the first launch.
std::vector<const void*> LowLatencyDispatchKernelAddresses();
std::vector<const void*> LowLatencyCombineKernelAddresses();

}  // namespace jax_ep

#endif  // JAX_EP_CC_FEW_TOKENS_LOW_LATENCY_H_
