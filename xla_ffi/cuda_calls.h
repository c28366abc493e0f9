// What the handlers of the CUDA backend share: communicators, call sites, and
// how a call begins and ends.
#ifndef JAX_EP_XLA_FFI_CUDA_CALLS_H_
#define JAX_EP_XLA_FFI_CUDA_CALLS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cc/handshake/control_slots.h"
#include "cc/handshake/peer_view.h"
#include "cc/handshake/wait_note.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

class CudaFlights;  // cuda_flights.h

// Set up by Python, only read afterwards. Owns the control memory of the local
// devices and what is mapped of other processes: when the last of Python and
// the executables lets go, it is given to a thread that frees it
// (cc/releases.h), because the destructor waits for the devices.
struct CudaCommunicator {
  struct Range {
    uint64_t begin;
    uint64_t bytes;
  };

  CudaCommunicator() = default;
  CudaCommunicator(const CudaCommunicator&) = delete;
  CudaCommunicator& operator=(const CudaCommunicator&) = delete;
  ~CudaCommunicator();

  std::map<int32_t, PeerView> views;  // by XLA's device ordinal
  // Memory of each device that its peers in other processes have mapped: parts
  // that XLA never gives back.
  std::map<int32_t, std::vector<Range>> exported;
  bool has_other_processes = false;
  std::vector<Range> mapped;        // to unmap, addresses and all
  std::vector<uint64_t> allocated;  // to free
  // What kernels say of long waits: memory of the host, [device][rank], and the
  // numbers of its tables (cc/handshake/wait_notes.h).
  WaitNote* notes = nullptr;
  std::vector<int64_t> note_tables;
  ControlSlots slots;
  // Made by the first start or done of an operation in two halves.
  std::mutex flights_mutex;
  std::shared_ptr<CudaFlights> flights;
};

// State of one call site, shared by the local devices.
struct CudaCallSite {
  static xla::ffi::TypeId id;

  std::shared_ptr<CudaCommunicator> communicator;
  int32_t slot;
  uint32_t channel;
  uint32_t instance;  // ControlSlots::Site
};

// Of this device on the program's mesh; the first operand of every call.
using Position = xla::ffi::BufferR0<xla::ffi::U32>;

// What every call of a communicator binds first. `Site` is the state of the
// call site.
template <typename Site>
auto BindCall() {
  namespace ffi = xla::ffi;
  return ffi::Ffi::Bind()
      .Ctx<ffi::State<Site>>()
      .template Ctx<ffi::DeviceOrdinal>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Arg<Position>();
}

// Of handlers whose calls can be part of a CUDA graph.
inline constexpr xla::ffi::Traits kInGraphs =
    xla::ffi::Traits::kCmdBufferCompatible;

// The state of a new call site.
xla::ffi::ErrorOr<std::unique_ptr<CudaCallSite>> MakeCallSite(
    SlotKind kind, const xla::ffi::Dictionary& attributes);
template <SlotKind kind>
xla::ffi::ErrorOr<std::unique_ptr<CudaCallSite>> MakeCallSiteOf(
    xla::ffi::Dictionary attributes) {
  return MakeCallSite(kind, attributes);
}

// The operation of a site on a device, all but its tag.
xla::ffi::ErrorOr<Operation> OperationOn(const CudaCallSite& site,
                                         int32_t ordinal,
                                         const Position& position);

// Whether ranks of other processes can reach a buffer of this device.
bool IsExported(const CudaCallSite& site, int32_t ordinal, const void* buffer,
                uint64_t bytes);

// How a call ends that has launched `op`.
xla::ffi::Error Launched(const std::string& op, cudaError_t status);

xla::ffi::Error NotOnMesh(int32_t ordinal);

// Calls of OperationOn() in this process. A replayed CUDA graph runs the
// kernels without, which is how tests see that it was replayed.
int64_t NumHandlerCalls();

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_CUDA_CALLS_H_
