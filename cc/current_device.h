// Makes a GPU current for a while, and leaves the thread as it was.
//
// cudaSetDevice() back to the device before would not do: a thread without a
// context is told device 0, and setting that makes a context on a GPU that this
// process may have nothing to do with.
#ifndef JAX_EP_CC_CURRENT_DEVICE_H_
#define JAX_EP_CC_CURRENT_DEVICE_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace jax_ep {

// A function of the driver; nullptr where there is none. Asked for by name, so
// that a module loads where there is no driver.
template <typename Function>
Function* DriverFunction(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(
      name, &found, 12000, cudaEnableDefault, &result);
  return status == cudaSuccess ? reinterpret_cast<Function*>(found) : nullptr;
}

class OnDevice {
 public:
  explicit OnDevice(int ordinal) {
    auto* const get = DriverFunction<CUresult(CUcontext*)>("cuCtxGetCurrent");
    set_ = DriverFunction<CUresult(CUcontext)>("cuCtxSetCurrent");
    if (get == nullptr || set_ == nullptr || get(&before_) != CUDA_SUCCESS) {
      set_ = nullptr;
      status_ = cudaErrorInitializationError;
      return;
    }
    status_ = cudaSetDevice(ordinal);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() {
    if (set_ != nullptr) set_(before_);
  }

  cudaError_t status() const { return status_; }

 private:
  CUcontext before_ = nullptr;
  CUresult (*set_)(CUcontext) = nullptr;
  cudaError_t status_ = cudaSuccess;
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_CURRENT_DEVICE_H_
