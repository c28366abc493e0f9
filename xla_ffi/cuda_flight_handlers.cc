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
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cc/current_device.h"
#include "cc/ops.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/attributes.h"
#include "xla_ffi/cuda_calls.h"
#include "xla_ffi/cuda_flights.h"
#include "xla_ffi/cuda_row_handlers.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/registry.h"

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

cudaError_t MakeEvents(int32_t ordinal, CudaFlight* flight) {
  const OnDevice device(ordinal);
  if (device.status() != cudaSuccess) return device.status();
  std::vector<cudaEvent_t*> events = {&flight->departed, &flight->landed};
  // Older drivers do not tell when a kernel has begun.
  int driver = 0;
  const cudaError_t asked = cudaDriverGetVersion(&driver);
  if (asked != cudaSuccess) return asked;
  if (driver >= 12030) events.push_back(&flight->begun);
  for (cudaEvent_t* event : events) {
    const cudaError_t status =
        cudaEventCreateWithFlags(event, cudaEventDisableTiming);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace

// State of a start's call site.
struct CudaStartSite {
  static ffi::TypeId id;

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
  static ffi::TypeId id;

  std::shared_ptr<CudaCommunicator> communicator;
  std::shared_ptr<CudaFlights> flights;
  uint32_t channel;
};

ffi::TypeId CudaStartSite::id = {};
ffi::TypeId CudaDoneSite::id = {};

CudaStartSite::CudaStartSite(CudaCallSite call_site)
    : site(std::move(call_site)), flights(FlightsOf(*site.communicator)) {
  status = flights->status();
  for (const auto& [ordinal, view] : site.communicator->views) {
    CudaFlight& flight = by_device[ordinal];
    const cudaError_t made = MakeEvents(ordinal, &flight);
    if (status == cudaSuccess) status = made;
    flights->Add(ordinal, &flight);
  }
}

CudaStartSite::~CudaStartSite() {
  for (auto& [ordinal, flight] : by_device) {
    flights->Remove(ordinal, &flight);
    for (cudaEvent_t event : {flight.departed, flight.begun, flight.landed}) {
      if (event != nullptr) cudaEventDestroy(event);
    }
  }
}

namespace {

ffi::ErrorOr<std::unique_ptr<CudaStartSite>> MakeStartSite(
    ffi::Dictionary attributes) {
  ffi::ErrorOr<std::unique_ptr<CudaCallSite>> site =
      MakeCallSite(SlotKind::kFlight, attributes);
  if (site.has_error()) return ffi::Unexpected(site.error());
  auto start = std::make_unique<CudaStartSite>(std::move(**site));
  if (start->status != cudaSuccess) {
    return ffi::Unexpected(Launched("start", start->status));
  }
  return start;
}

ffi::ErrorOr<std::unique_ptr<CudaDoneSite>> MakeDoneSite(
    ffi::Dictionary attributes) {
  const auto site = ReadSite<CudaCommunicator>(attributes, "cuda");
  if (site.has_error()) return ffi::Unexpected(site.error());
  std::shared_ptr<CudaFlights> flights = FlightsOf(*site->communicator);
  if (flights->status() != cudaSuccess) {
    return ffi::Unexpected(Launched("done", flights->status()));
  }
  return std::make_unique<CudaDoneSite>(CudaDoneSite{
      .communicator = site->communicator,
      .flights = std::move(flights),
      .channel = static_cast<uint32_t>(site->channel),
  });
}

// Of a half of an operation.
std::string NameOf(const RowOperation& op, const char* half) {
  return std::string(op.name) + half;
}

std::string WhereIn(const RowOperation& op, const char* half,
                    uint32_t channel) {
  return "jax_ep " + NameOf(op, half) + " (channel " + std::to_string(channel) +
         ")";
}

// Enqueues the kernel behind what `stream` holds, on the stream of flights.
// What comes on `stream` waits until the kernel's blocks have begun: they would
// else get their places when those of the kernel beside them end, and land
// later.
cudaError_t TakeOff(const RowOperation& op, const RowParams& rows,
                    cudaStream_t stream, cudaStream_t side,
                    const CudaFlight& flight) {
  cudaError_t status = cudaEventRecord(flight.departed, stream);
  if (status != cudaSuccess) return status;
  status = cudaStreamWaitEvent(side, flight.departed, 0);
  if (status != cudaSuccess) return status;
  status = op.launch(rows, side, flight.begun);
  if (status != cudaSuccess) return status;
  status = cudaEventRecord(flight.landed, side);
  if (status != cudaSuccess || flight.begun == nullptr) return status;
  return cudaStreamWaitEvent(stream, flight.begun, 0);
}

template <const RowOperation& op>
ffi::Error Start(CudaStartSite* start, int32_t ordinal, cudaStream_t stream,
                 Position position, Routes routes, NumRecv num_recv,
                 RecvSrc recv_src, ffi::RemainingArgs in,
                 ffi::RemainingRets out) {
  const ffi::ErrorOr<RowParams> rows =
      RowsOf(op, start->site, ordinal, position, {routes, num_recv, recv_src},
             in, out);
  if (rows.has_error()) return rows.error();
  // RowsOf() knows the ordinal, so it is here.
  CudaFlight& flight = start->by_device.find(ordinal)->second;
  CudaFlights& flights = *start->flights;
  if (flight.under_way) {
    flights.WaitForAll(ordinal, stream);
    return FailedPrecondition(
        WhereIn(op, "_start", start->site.channel) +
        ": the flight before was never finished; every start needs its done in "
        "the same program");
  }
  // One that arrives in the same place was left by a run that failed, else XLA
  // would not have given its memory away. It must not be taken for this one.
  CudaFlight* const left = flights.Find(ordinal, rows->leaves[0].out);
  if (left != nullptr) left->under_way = false;
  const cudaError_t status =
      TakeOff(op, *rows, stream, flights.StreamOn(ordinal), flight);
  if (status != cudaSuccess) return Launched(NameOf(op, "_start"), status);
  flight.rows = *rows;
  flight.under_way = true;
  return ffi::Error::Success();
}

// Whether a flight works on just these buffers. `in` holds the arriving leaves,
// the departing ones and the signal.
bool IsOf(const CudaFlight& flight, const Routing& routing,
          const ffi::RemainingArgs& in, const ffi::RemainingRets& out) {
  const RowParams& rows = flight.rows;
  const size_t count = out.size();
  if (static_cast<size_t>(rows.num_leaves) != count) return false;
  if (rows.routes != routing.routes || rows.num_recv != routing.num_recv ||
      rows.recv_src != routing.recv_src) {
    return false;
  }
  for (size_t i = 0; i < count; ++i) {
    const void* arriving = in.get<ffi::AnyBuffer>(i)->untyped_data();
    const void* departing = in.get<ffi::AnyBuffer>(count + i)->untyped_data();
    const void* result = (*out.get<ffi::AnyBuffer>(i))->untyped_data();
    if (rows.leaves[i].out != arriving || rows.leaves[i].out != result ||
        rows.leaves[i].in != departing) {
      return false;
    }
  }
  return true;
}

template <const RowOperation& op>
ffi::Error Done(CudaDoneSite* done, int32_t ordinal, cudaStream_t stream,
                Position /*start has checked it*/, Routes routes,
                NumRecv num_recv, RecvSrc recv_src, ffi::RemainingArgs in,
                ffi::RemainingRets out) {
  CudaFlights& flights = *done->flights;
  if (flights.StreamOn(ordinal) == nullptr || out.size() == 0 ||
      in.size() != 2 * out.size() + 1) {
    return Invalid(WhereIn(op, "_done", done->channel) +
                   ": not a call of jax_ep's");
  }
  CudaFlight* flight =
      flights.Find(ordinal, in.get<ffi::AnyBuffer>(0)->untyped_data());
  if (flight == nullptr ||
      !IsOf(*flight, {routes, num_recv, recv_src}, in, out)) {
    // Nothing may be left in the air when XLA takes its memory back.
    flights.WaitForAll(ordinal, stream);
    return FailedPrecondition(
        WhereIn(op, "_done", done->channel) +
        ": no flight has these buffers, because XLA copied them or it was "
        "finished before; start and finish a flight once, in the same jit and "
        "the same function, loop body or branch");
  }
  flight->under_way = false;
  return Launched(NameOf(op, "_done"),
                  cudaStreamWaitEvent(stream, flight->landed, 0));
}

const TypeRegistration start_site("jax_ep_cuda_start_site",
                                  static_cast<CudaStartSite*>(nullptr));
const TypeRegistration done_site("jax_ep_cuda_done_site",
                                 static_cast<CudaDoneSite*>(nullptr));

const HandlerRegistration dispatch_start(
    "jax_ep_dispatch_start", Execute<Start<kDispatch>, BindRows<CudaStartSite>>,
    Instantiate<MakeStartSite>);
const HandlerRegistration combine_start(
    "jax_ep_combine_start", Execute<Start<kCombine>, BindRows<CudaStartSite>>,
    Instantiate<MakeStartSite>);
const HandlerRegistration dispatch_done(
    "jax_ep_dispatch_done", Execute<Done<kDispatch>, BindRows<CudaDoneSite>>,
    Instantiate<MakeDoneSite>);
const HandlerRegistration combine_done(
    "jax_ep_combine_done", Execute<Done<kCombine>, BindRows<CudaDoneSite>>,
    Instantiate<MakeDoneSite>);

}  // namespace

}  // namespace jax_ep
