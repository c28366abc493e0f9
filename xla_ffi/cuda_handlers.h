// FFI handlers of the CUDA backend.
#ifndef JAX_EP_XLA_FFI_CUDA_HANDLERS_H_
#define JAX_EP_XLA_FFI_CUDA_HANDLERS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cc/control_slots.h"
#include "cc/ops.h"
#include "cc/peer_view.h"
#include "cc/wait_note.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

class CudaFlights;  // cuda_flight_handlers.h

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
  // numbers of its tables (cc/wait_notes.h).
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

extern const XLA_FFI_TypeInfo kCudaCallSiteInfo;

// Of this device on the program's mesh; the first operand of every call.
using Position = xla::ffi::BufferR0<xla::ffi::U32>;

// What dispatch and combine know of a plan.
struct Routing {
  const xla::ffi::BufferR3<xla::ffi::S32>& routes;
  const xla::ffi::BufferR0<xla::ffi::S32>& num_recv;
  const xla::ffi::BufferR1<xla::ffi::S32>& recv_src;
};

// What dispatch, combine and their halves bind: the position, the routing, then
// the leaves.
// `Site` is the state of the call site.
template <typename Site>
auto BindRows() {
  namespace ffi = xla::ffi;
  return ffi::Ffi::Bind()
      .Ctx<ffi::State<Site>>()
      .template Ctx<ffi::DeviceOrdinal>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Arg<Position>()
      .template Arg<ffi::BufferR3<ffi::S32>>()  // routes
      .template Arg<ffi::BufferR0<ffi::S32>>()  // num_recv
      .template Arg<ffi::BufferR1<ffi::S32>>()  // recv_src
      .RemainingArgs()
      .RemainingRets();
}

// For handlers in other files: the operation of a site on a device, the state
// of a new call site, and what the kernels get. Results after the leaves are
// not looked at.
xla::ffi::ErrorOr<Operation> OperationOn(const CudaCallSite& site,
                                         int32_t ordinal,
                                         const Position& position);
xla::ffi::ErrorOr<std::unique_ptr<CudaCallSite>> MakeCallSite(
    SlotKind kind, xla::ffi::Dictionary attributes);
xla::ffi::ErrorOr<RowParams> DispatchRows(const CudaCallSite& site,
                                          int32_t ordinal,
                                          const Position& position,
                                          const Routing& routing,
                                          const xla::ffi::RemainingArgs& in,
                                          const xla::ffi::RemainingRets& out);
xla::ffi::ErrorOr<RowParams> CombineRows(const CudaCallSite& site,
                                         int32_t ordinal,
                                         const Position& position,
                                         const Routing& routing,
                                         const xla::ffi::RemainingArgs& in,
                                         const xla::ffi::RemainingRets& out);

// Executions of the handlers below in this process. A replayed CUDA graph runs
// the kernels without them, which is how tests see that it was replayed.
int64_t NumHandlerCalls();

XLA_FFI_DECLARE_HANDLER_SYMBOL(EpPlanInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpRowsInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpPlan);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpPlanDispatch);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpDispatch);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpCombine);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpDispatchPermute);

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_CUDA_HANDLERS_H_
