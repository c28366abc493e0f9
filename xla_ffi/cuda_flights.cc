#include "xla_ffi/cuda_flights.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "cc/current_device.h"

namespace jax_ep {

namespace {

cudaError_t MakeStream(int32_t ordinal, cudaStream_t* stream) {
  const OnDevice device(ordinal);
  if (device.status() != cudaSuccess) return device.status();
  // High priority: the blocks of a flight are few, and take their places before
  // those of a large kernel that is there to hide it.
  int least, greatest;
  const cudaError_t status =
      cudaDeviceGetStreamPriorityRange(&least, &greatest);
  if (status != cudaSuccess) return status;
  return cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, greatest);
}

}  // namespace

CudaFlights::CudaFlights(const CudaCommunicator& communicator) {
  for (const auto& [ordinal, view] : communicator.views) {
    const cudaError_t status = MakeStream(ordinal, &devices_[ordinal].stream);
    if (status_ == cudaSuccess) status_ = status;
  }
}

CudaFlights::~CudaFlights() {
  for (auto& [ordinal, device] : devices_) {
    if (device.stream == nullptr) continue;
    const OnDevice current(ordinal);
    // Does not wait for what is on the stream.
    if (current.status() == cudaSuccess) cudaStreamDestroy(device.stream);
  }
}

cudaStream_t CudaFlights::StreamOn(int32_t ordinal) const {
  const auto found = devices_.find(ordinal);
  return found == devices_.end() ? nullptr : found->second.stream;
}

void CudaFlights::Add(int32_t ordinal, CudaFlight* flight) {
  Device& device = On(ordinal);
  std::lock_guard<std::mutex> lock(device.mutex);
  device.flights.push_back(flight);
}

void CudaFlights::Remove(int32_t ordinal, const CudaFlight* flight) {
  Device& device = On(ordinal);
  std::lock_guard<std::mutex> lock(device.mutex);
  device.flights.erase(
      std::remove(device.flights.begin(), device.flights.end(), flight),
      device.flights.end());
}

CudaFlight* CudaFlights::Find(int32_t ordinal, const void* out) {
  Device& device = On(ordinal);
  std::lock_guard<std::mutex> lock(device.mutex);
  for (CudaFlight* flight : device.flights) {
    if (flight->under_way && flight->rows.leaves[0].out == out) return flight;
  }
  return nullptr;
}

void CudaFlights::WaitForAll(int32_t ordinal, cudaStream_t stream) {
  Device& device = On(ordinal);
  // No CUDA call waits for the device here.
  std::lock_guard<std::mutex> lock(device.mutex);
  for (CudaFlight* flight : device.flights) {
    if (!flight->under_way) continue;
    cudaStreamWaitEvent(stream, flight->landed, 0);
    flight->under_way = false;
  }
}

std::shared_ptr<CudaFlights> FlightsOf(CudaCommunicator& communicator) {
  std::lock_guard<std::mutex> lock(communicator.flights_mutex);
  if (communicator.flights == nullptr) {
    communicator.flights = std::make_shared<CudaFlights>(communicator);
  }
  return communicator.flights;
}

}  // namespace jax_ep
