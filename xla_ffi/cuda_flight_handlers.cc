#include "xla_ffi/cuda_flight_handlers.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "cc/current_device.h"
#include "cc/layout.h"
#include "xla_ffi/registry.h"

namespace jax_ep {

namespace ffi = xla::ffi;

ffi::TypeId CudaStartSite::id = {};
ffi::TypeId CudaDoneSite::id = {};
const XLA_FFI_TypeInfo kCudaStartSiteInfo = ffi::MakeTypeInfo<CudaStartSite>();
const XLA_FFI_TypeInfo kCudaDoneSiteInfo = ffi::MakeTypeInfo<CudaDoneSite>();

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

// The communicator's flights, made by the first that asks.
std::shared_ptr<CudaFlights> FlightsOf(CudaCommunicator& communicator) {
  std::lock_guard<std::mutex> lock(communicator.flights_mutex);
  if (communicator.flights == nullptr) {
    communicator.flights = std::make_shared<CudaFlights>(communicator);
  }
  return communicator.flights;
}

ffi::Error Failed(const char* what, cudaError_t status) {
  return ffi::Error::Internal(std::string("jax_ep ") + what +
                              ": launch failed: " + cudaGetErrorString(status));
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

ffi::ErrorOr<std::unique_ptr<CudaStartSite>> InstantiateStart(
    ffi::Dictionary attributes) {
  ffi::ErrorOr<std::unique_ptr<CudaCallSite>> site =
      MakeCallSite(SlotKind::kFlight, attributes);
  if (site.has_error()) return ffi::Unexpected(site.error());
  auto start = std::make_unique<CudaStartSite>(std::move(**site));
  if (start->status != cudaSuccess) {
    return ffi::Unexpected(Failed("start", start->status));
  }
  return start;
}

ffi::ErrorOr<std::unique_ptr<CudaDoneSite>> InstantiateDone(
    ffi::Dictionary attributes) {
  const auto site = ReadSite<CudaCommunicator>(attributes, "cuda");
  if (site.has_error()) return ffi::Unexpected(site.error());
  std::shared_ptr<CudaFlights> flights = FlightsOf(*site->communicator);
  if (flights->status() != cudaSuccess) {
    return ffi::Unexpected(Failed("done", flights->status()));
  }
  return std::make_unique<CudaDoneSite>(CudaDoneSite{
      .communicator = site->communicator,
      .flights = std::move(flights),
      .channel = static_cast<uint32_t>(site->channel),
  });
}

std::string Name(const char* op, uint32_t channel) {
  return std::string("jax_ep ") + op + " (channel " + std::to_string(channel) +
         ")";
}

using Launcher = cudaError_t(const RowParams&, cudaStream_t, cudaEvent_t);

// Enqueues the kernel behind what `stream` holds, on the stream of flights.
// What comes on `stream` waits until the kernel's blocks have begun: they would
// else get their places when those of the kernel beside them end, and land
// later.
cudaError_t TakeOff(const RowParams& rows, cudaStream_t stream,
                    cudaStream_t side, Launcher* launch,
                    const CudaFlight& flight) {
  cudaError_t status = cudaEventRecord(flight.departed, stream);
  if (status != cudaSuccess) return status;
  status = cudaStreamWaitEvent(side, flight.departed, 0);
  if (status != cudaSuccess) return status;
  status = launch(rows, side, flight.begun);
  if (status != cudaSuccess) return status;
  status = cudaEventRecord(flight.landed, side);
  if (status != cudaSuccess || flight.begun == nullptr) return status;
  return cudaStreamWaitEvent(stream, flight.begun, 0);
}

ffi::Error Start(CudaStartSite& start, int32_t ordinal, cudaStream_t stream,
                 const RowParams& rows, const char* op, Launcher* launch) {
  // Rows() knows the ordinal, so it is here.
  CudaFlight& flight = start.by_device.find(ordinal)->second;
  if (flight.under_way) {
    start.flights->WaitForAll(ordinal, stream);
    return ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        Name(op, start.site.channel) +
            ": the flight before was never finished; every start needs its "
            "done in the same program");
  }
  // One that arrives in the same place was left by a run that failed, else XLA
  // would not have given its memory away. It must not be taken for this one.
  CudaFlight* const left = start.flights->Find(ordinal, rows.leaves[0].out);
  if (left != nullptr) left->under_way = false;
  const cudaError_t status =
      TakeOff(rows, stream, start.flights->StreamOn(ordinal), launch, flight);
  if (status != cudaSuccess) return Failed(op, status);
  flight.rows = rows;
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
  if (rows.routes != routing.routes.typed_data() ||
      rows.num_recv != routing.num_recv.typed_data() ||
      rows.recv_src != routing.recv_src.typed_data()) {
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

ffi::Error Done(CudaDoneSite& done, int32_t ordinal, cudaStream_t stream,
                const Routing& routing, const ffi::RemainingArgs& in,
                const ffi::RemainingRets& out, const char* op) {
  if (done.flights->StreamOn(ordinal) == nullptr || out.size() == 0 ||
      in.size() != 2 * out.size() + 1) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      Name(op, done.channel) + ": not a call of jax_ep's");
  }
  CudaFlight* flight =
      done.flights->Find(ordinal, in.get<ffi::AnyBuffer>(0)->untyped_data());
  if (flight == nullptr || !IsOf(*flight, routing, in, out)) {
    // Nothing may be left in the air when XLA takes its memory back.
    done.flights->WaitForAll(ordinal, stream);
    return ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        Name(op, done.channel) +
            ": no flight has these buffers, because XLA copied them or it was "
            "finished before; start and finish a flight once, in the same jit "
            "and the same function, loop body or branch");
  }
  flight->under_way = false;
  const cudaError_t status = cudaStreamWaitEvent(stream, flight->landed, 0);
  return status == cudaSuccess ? ffi::Error::Success() : Failed(op, status);
}

ffi::Error DispatchStart(CudaStartSite* start, int32_t ordinal,
                         cudaStream_t stream, Position position,
                         ffi::BufferR3<ffi::S32> routes,
                         ffi::BufferR0<ffi::S32> num_recv,
                         ffi::BufferR1<ffi::S32> recv_src,
                         ffi::RemainingArgs in, ffi::RemainingRets out) {
  const ffi::ErrorOr<RowParams> rows = DispatchRows(
      start->site, ordinal, position, {routes, num_recv, recv_src}, in, out);
  if (rows.has_error()) return rows.error();
  return Start(*start, ordinal, stream, *rows, "dispatch_start",
               LaunchDispatch);
}

ffi::Error CombineStart(CudaStartSite* start, int32_t ordinal,
                        cudaStream_t stream, Position position,
                        ffi::BufferR3<ffi::S32> routes,
                        ffi::BufferR0<ffi::S32> num_recv,
                        ffi::BufferR1<ffi::S32> recv_src, ffi::RemainingArgs in,
                        ffi::RemainingRets out) {
  const ffi::ErrorOr<RowParams> rows = CombineRows(
      start->site, ordinal, position, {routes, num_recv, recv_src}, in, out);
  if (rows.has_error()) return rows.error();
  return Start(*start, ordinal, stream, *rows, "combine_start", LaunchCombine);
}

ffi::Error DispatchDone(CudaDoneSite* done, int32_t ordinal,
                        cudaStream_t stream, Position /*start has checked it*/,
                        ffi::BufferR3<ffi::S32> routes,
                        ffi::BufferR0<ffi::S32> num_recv,
                        ffi::BufferR1<ffi::S32> recv_src, ffi::RemainingArgs in,
                        ffi::RemainingRets out) {
  return Done(*done, ordinal, stream, {routes, num_recv, recv_src}, in, out,
              "dispatch_done");
}

ffi::Error CombineDone(CudaDoneSite* done, int32_t ordinal, cudaStream_t stream,
                       Position /*start has checked it*/,
                       ffi::BufferR3<ffi::S32> routes,
                       ffi::BufferR0<ffi::S32> num_recv,
                       ffi::BufferR1<ffi::S32> recv_src, ffi::RemainingArgs in,
                       ffi::RemainingRets out) {
  return Done(*done, ordinal, stream, {routes, num_recv, recv_src}, in, out,
              "combine_done");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EpStartInstantiate, InstantiateStart,
                              ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpDoneInstantiate, InstantiateDone,
                              ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpDispatchStart, DispatchStart,
                              BindRows<CudaStartSite>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpCombineStart, CombineStart,
                              BindRows<CudaStartSite>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpDispatchDone, DispatchDone,
                              BindRows<CudaDoneSite>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpCombineDone, CombineDone,
                              BindRows<CudaDoneSite>());

}  // namespace jax_ep
