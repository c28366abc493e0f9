// FFI handlers of operations in two halves, on GPUs.
//
// A start launches the operation's kernel on a stream of the communicator's
// own, behind all that XLA has enqueued so far; a done makes XLA's stream wait
// for the kernel. In between the kernel works on XLA's buffers beside XLA's own
// kernels. XLA keeps the buffers alive because the done has them all as
// operands, and the rows stay where they arrive because the done's results are
// aliased to the start's. A done checks both: it knows its start by the
// addresses, and where XLA has copied a buffer it finds none and fails.
//
// Not for command buffers: XLA captures one handler at a time into a graph, and
// a fork that is not joined in the same capture cannot be captured.
#ifndef JAX_EP_XLA_FFI_CUDA_FLIGHT_HANDLERS_H_
#define JAX_EP_XLA_FFI_CUDA_FLIGHT_HANDLERS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cc/ops.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/cuda_handlers.h"

namespace jax_ep {

// What one start has on one device. Touched by the thread that enqueues the
// device's work, where one program after the other comes to start and done.
struct CudaFlight {
  cudaEvent_t departed = nullptr;  // XLA's stream has come to the start
  cudaEvent_t begun = nullptr;     // the kernel's blocks have their places
  cudaEvent_t landed = nullptr;    // the kernel has ended
  bool under_way = false;          // started and not finished
  RowParams rows = {};             // what the kernel works on
};

// The flights of a communicator: a stream for each local device, and the
// flights of all starts by device.
class CudaFlights {
 public:
  // Makes the streams; `status` says whether that worked.
  explicit CudaFlights(const CudaCommunicator& communicator);
  CudaFlights(const CudaFlights&) = delete;
  CudaFlights& operator=(const CudaFlights&) = delete;
  ~CudaFlights();

  cudaError_t status() const { return status_; }
  // nullptr where the device is not the communicator's.
  cudaStream_t StreamOn(int32_t ordinal) const;

  void Add(int32_t ordinal, CudaFlight* flight);
  void Remove(int32_t ordinal, const CudaFlight* flight);
  // The flight under way whose first leaf arrives at `out`, or nullptr.
  CudaFlight* Find(int32_t ordinal, const void* out);
  // Makes `stream` wait for all flights under way, which then are no more.
  void WaitForAll(int32_t ordinal, cudaStream_t stream);

 private:
  struct Device {
    cudaStream_t stream = nullptr;
    std::mutex mutex;  // of the list; call sites come and go on any thread
    std::vector<CudaFlight*> flights;
  };

  // Of one of the communicator's devices.
  Device& On(int32_t ordinal) { return devices_.find(ordinal)->second; }

  std::map<int32_t, Device> devices_;  // by XLA's ordinal; only read once made
  cudaError_t status_ = cudaSuccess;
};

// State of a start's call site.
struct CudaStartSite {
  static xla::ffi::TypeId id;

  explicit CudaStartSite(CudaCallSite call_site);
  CudaStartSite(const CudaStartSite&) = delete;
  CudaStartSite& operator=(const CudaStartSite&) = delete;
  ~CudaStartSite();

  CudaCallSite site;
  std::shared_ptr<CudaFlights> flights;
  std::map<int32_t, CudaFlight> by_device;
  cudaError_t status = cudaSuccess;
};

// State of a done's call site.
struct CudaDoneSite {
  static xla::ffi::TypeId id;

  std::shared_ptr<CudaCommunicator> communicator;
  std::shared_ptr<CudaFlights> flights;
  uint32_t channel;
};

extern const XLA_FFI_TypeInfo kCudaStartSiteInfo;
extern const XLA_FFI_TypeInfo kCudaDoneSiteInfo;

XLA_FFI_DECLARE_HANDLER_SYMBOL(EpStartInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpDoneInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpDispatchStart);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpDispatchDone);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpCombineStart);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpCombineDone);

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_CUDA_FLIGHT_HANDLERS_H_
