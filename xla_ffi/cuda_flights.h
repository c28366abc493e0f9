// Rows on their way between the two halves of an operation, on GPUs.
#ifndef JAX_EP_XLA_FFI_CUDA_FLIGHTS_H_
#define JAX_EP_XLA_FFI_CUDA_FLIGHTS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cc/ops.h"
#include "xla_ffi/cuda_calls.h"

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

// The communicator's flights, made by the first that asks.
std::shared_ptr<CudaFlights> FlightsOf(CudaCommunicator& communicator);

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_CUDA_FLIGHTS_H_
