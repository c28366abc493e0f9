// FFI handlers of the low-latency operations, on GPUs. Their call sites belong
// to a buffer, which is registered as a communicator: its control memory are
// the windows.
#ifndef JAX_EP_XLA_FFI_CUDA_LOW_LATENCY_HANDLERS_H_
#define JAX_EP_XLA_FFI_CUDA_LOW_LATENCY_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

XLA_FFI_DECLARE_HANDLER_SYMBOL(EpLowLatencyInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpLowLatencyDispatch);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpLowLatencyCombine);

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_CUDA_LOW_LATENCY_HANDLERS_H_
