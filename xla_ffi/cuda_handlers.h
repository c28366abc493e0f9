// FFI handlers of the CUDA backend.
#ifndef JAX_EP_XLA_FFI_CUDA_HANDLERS_H_
#define JAX_EP_XLA_FFI_CUDA_HANDLERS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "cc/ops.h"
#include "cc/peer_view.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

class CudaFlights;  // cuda_flight_handlers.h

// Set up by Python, only read afterwards. Owns the control memory of the local
// devices: the last of Python and the executables frees it.
struct CudaCommunicator {
  CudaCommunicator() = default;
  CudaCommunicator(const CudaCommunicator&) = delete;
  CudaCommunicator& operator=(const CudaCommunicator&) = delete;
  ~CudaCommunicator();

  std::map<int32_t, PeerView> views;  // by XLA's device ordinal
  std::atomic<uint32_t> num_sites{0};
  // Made by the first start or done of an operation in two halves.
  std::mutex flights_mutex;
  std::shared_ptr<CudaFlights> flights;
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

// For handlers in other files: the state of a new call site, and the parameters
// of a dispatch or combine without num_recv. `capacity_is_out` says on which
// side the receive buffer stands; results after the leaves are not looked at.
xla::ffi::ErrorOr<std::unique_ptr<CudaCallSite>> MakeCallSite(
    xla::ffi::Dictionary attributes);
xla::ffi::ErrorOr<RowParams> RowsOfCall(
    const CudaCallSite& site, int32_t ordinal,
    const xla::ffi::BufferR3<xla::ffi::S32>& routes,
    const xla::ffi::RemainingArgs& in, const xla::ffi::RemainingRets& out,
    bool capacity_is_out);

// Executions of the handlers below in this process. A replayed CUDA graph runs
// the kernels without them, which is how tests see that it was replayed.
int64_t NumHandlerCalls();

XLA_FFI_DECLARE_HANDLER_SYMBOL(EpInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpPlan);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpDispatch);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpCombine);

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_CUDA_HANDLERS_H_
