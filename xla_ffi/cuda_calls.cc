#include "xla_ffi/cuda_calls.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <string>

#include "cc/current_device.h"
#include "cc/handshake/wait_notes.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/registry.h"

namespace jax_ep {

namespace ffi = xla::ffi;

ffi::TypeId CudaCallSite::id = {};

namespace {

const TypeRegistration call_site("jax_ep_cuda_call_site",
                                 static_cast<CudaCallSite*>(nullptr));

std::atomic<int64_t> num_handler_calls{0};

void Unmap(const std::vector<CudaCommunicator::Range>& mapped) {
  static auto* const unmap =
      DriverFunction<CUresult(CUdeviceptr, size_t)>("cuMemUnmap");
  static auto* const free_address =
      DriverFunction<CUresult(CUdeviceptr, size_t)>("cuMemAddressFree");
  if (unmap == nullptr || free_address == nullptr) return;
  for (const CudaCommunicator::Range& range : mapped) {
    // Addresses that are still mapped must not be given to others.
    if (unmap(range.begin, range.bytes) == CUDA_SUCCESS) {
      free_address(range.begin, range.bytes);
    }
  }
}

}  // namespace

CudaCommunicator::~CudaCommunicator() {
  for (const int64_t table : note_tables) WaitNotes::Get().Remove(table);
  if (views.empty()) return;
  const OnDevice current(views.begin()->first);
  // At the end of the process the driver may be gone; then so is the memory.
  if (current.status() != cudaSuccess) return;
  // No kernel of this process may still poll or store in what goes, on any of
  // its GPUs. Those of other processes have mappings of their own, and the
  // physical memory lives as long as the last of them. Waited for before
  // freeing: cudaFree() waits as well, but may keep other threads meanwhile
  // from launching what its device waits for.
  for (const auto& [ordinal, view] : views) {
    if (cudaSetDevice(ordinal) == cudaSuccess) cudaDeviceSynchronize();
  }
  Unmap(mapped);
  for (uint64_t address : allocated) {
    cudaFree(reinterpret_cast<void*>(address));
  }
  if (notes != nullptr) cudaFreeHost(notes);
}

ffi::ErrorOr<std::unique_ptr<CudaCallSite>> MakeCallSite(
    SlotKind kind, const ffi::Dictionary& attributes) {
  const auto read = ReadSite<CudaCommunicator>(attributes, "cuda");
  if (read.has_error()) return ffi::Unexpected(read.error());
  uint32_t number = 0;
  if (IsNumbered(kind)) {
    const auto found = Integers(attributes, {"site"});
    if (found.has_error()) return ffi::Unexpected(found.error());
    number = static_cast<uint32_t>((*found)[0]);
  }
  const auto channel = static_cast<uint32_t>(read->channel);
  const ControlSlots::Site site =
      read->communicator->slots.Take(kind, number, channel);
  return std::make_unique<CudaCallSite>(CudaCallSite{
      .communicator = read->communicator,
      .slot = site.slot,
      .channel = channel,
      .instance = site.instance,
  });
}

ffi::ErrorOr<Operation> OperationOn(const CudaCallSite& site, int32_t ordinal,
                                    const Position& position) {
  num_handler_calls.fetch_add(1, std::memory_order_relaxed);
  // XLA's ordinal among the GPUs that this process sees, as set-up has it from
  // JAX's local_hardware_id.
  const auto view = site.communicator->views.find(ordinal);
  if (view == site.communicator->views.end()) {
    return ffi::Unexpected(NotOnMesh(ordinal));
  }
  return Operation{.view = view->second,
                   .slot = site.slot,
                   .channel = site.channel,
                   .tag = 0,
                   .position = position.typed_data()};
}

bool IsExported(const CudaCallSite& site, int32_t ordinal, const void* buffer,
                uint64_t bytes) {
  if (!site.communicator->has_other_processes || bytes == 0) return false;
  const auto found = site.communicator->exported.find(ordinal);
  if (found == site.communicator->exported.end()) return false;
  const auto address = reinterpret_cast<uint64_t>(buffer);
  return std::any_of(found->second.begin(), found->second.end(),
                     [&](const CudaCommunicator::Range& range) {
                       const uint64_t offset = address - range.begin;
                       return offset < range.bytes &&
                              bytes <= range.bytes - offset;
                     });
}

ffi::Error Launched(const std::string& op, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal("jax_ep " + op +
                              ": launch failed: " + cudaGetErrorString(status));
}

ffi::Error NotOnMesh(int32_t ordinal) {
  return Invalid("jax_ep: GPU " + std::to_string(ordinal) +
                 " is not on the communicator's mesh");
}

int64_t NumHandlerCalls() {
  return num_handler_calls.load(std::memory_order_relaxed);
}

}  // namespace jax_ep
