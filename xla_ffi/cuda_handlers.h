// FFI handlers of the CUDA backend.
#ifndef JAX_EP_XLA_FFI_CUDA_HANDLERS_H_
#define JAX_EP_XLA_FFI_CUDA_HANDLERS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>

#include "cc/peer_view.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// Set up by Python, only read afterwards. Owns the control memory of the local
// devices: the last of Python and the executables frees it.
struct CudaCommunicator {
  CudaCommunicator() = default;
  CudaCommunicator(const CudaCommunicator&) = delete;
  CudaCommunicator& operator=(const CudaCommunicator&) = delete;
  ~CudaCommunicator();

  std::map<int32_t, PeerView> views;  // by XLA's device ordinal
  std::atomic<uint32_t> num_sites{0};
};

// State of one call site, shared by the local devices. Its control slot is its
// own: sites of one program may run at the same time, as branches of a CUDA
// graph. Sites get slots in the order of their creation, which is the same in
// every process; more than ControlLayout::kSlots sites share slots, which is
// right as long as no two of them run at the same time.
struct CudaCallSite {
  static xla::ffi::TypeId id;

  std::shared_ptr<CudaCommunicator> communicator;
  int32_t slot;
  uint32_t channel;
};

extern const XLA_FFI_TypeInfo kCudaCallSiteInfo;

// Executions of the handlers below in this process. A replayed CUDA graph runs
// the kernels without them, which is how tests see that it was replayed.
int64_t NumHandlerCalls();

XLA_FFI_DECLARE_HANDLER_SYMBOL(EpInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpPlan);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpDispatch);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpCombine);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpDispatchPermute);

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_CUDA_HANDLERS_H_
