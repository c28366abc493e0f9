// How the row-moving kernels are launched.
#ifndef JAX_EP_CC_LAUNCH_CUH_
#define JAX_EP_CC_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace jax_ep {

struct LaunchShape {
  int32_t blocks;
  int32_t threads;
  int32_t shared_bytes;  // dynamic
};

// Enqueues `kernel`. `begun`, if not nullptr, is recorded when all of its
// blocks have begun.
template <typename Params>
cudaError_t LaunchKernel(void (*kernel)(Params), const Params& params,
                         const LaunchShape& shape, cudaStream_t stream,
                         cudaEvent_t begun) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(shape.blocks);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  if (begun != nullptr) {
    attribute.id = cudaLaunchAttributeLaunchCompletionEvent;
    attribute.val.launchCompletionEvent.event = begun;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_LAUNCH_CUH_
