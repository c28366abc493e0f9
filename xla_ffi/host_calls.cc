#include "xla_ffi/host_calls.h"

#include <unistd.h>

#include <optional>
#include <utility>

#include "xla_ffi/registry.h"

namespace jax_ep {

namespace ffi = xla::ffi;

ffi::TypeId HostCallSite::id = {};
const XLA_FFI_TypeInfo kHostCallSiteInfo = ffi::MakeTypeInfo<HostCallSite>();

HostCommunicator::~HostCommunicator() {
  // A forked child has no threads to join; the sockets are its parent's.
  if (getpid() != process_id) static_cast<void>(exchange.release());
}

ffi::ErrorOr<std::unique_ptr<HostCallSite>> InstantiateHostCall(
    const char* op, ffi::Dictionary attributes) {
  const auto site = ReadSite<HostCommunicator>(attributes, "cpu");
  if (site.has_error()) return ffi::Unexpected(site.error());
  return std::make_unique<HostCallSite>(site->communicator,
                                        std::string(op) + " (channel " +
                                            std::to_string(site->channel) +
                                            site->communicator->scope + ")",
                                        site->channel);
}

ffi::Future Failed(const std::string& message) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ffi::Error(ffi::ErrorCode::kInternal, message));
  return future;
}

ffi::Future Meet(HostCallSite* site, ffi::RunId run, int32_t ordinal,
                 std::shared_ptr<void> arrival,
                 const std::function<void(const Met&)>& work) {
  const auto place = site->communicator->places.find(ordinal);
  if (place == site->communicator->places.end()) {
    return Failed("jax_ep: device " + std::to_string(ordinal) +
                  " is not on the communicator's mesh");
  }
  auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);
  std::shared_ptr<cpu::Meeting> meeting = site->rendezvous.Enter(
      run.run_id, place->second.group, place->second.rank, std::move(arrival),
      [promise](const std::string& error) {
        if (error.empty()) {
          promise->SetAvailable();
        } else {
          promise->SetError(
              ffi::Error(ffi::ErrorCode::kDeadlineExceeded, error));
        }
      });
  if (meeting != nullptr) {
    work({site, run.run_id, place->second.group, std::move(meeting)});
  }
  return future;
}

void Post(const Met& met, const cpu::CallShape& shape,
          std::vector<std::unique_ptr<cpu::Move>> shares,
          std::function<void(const std::string& error)> done) {
  const std::optional<int64_t> sequence =
      met.site->communicator->sites.Next(met.site, met.run, met.group);
  if (!sequence) {
    return done(
        "found two call sites of one channel that its peers could not tell "
        "apart; do not compile programs in several threads at a time");
  }
  cpu::Exchange::Call call;
  call.key = {.run = met.run,
              .sequence = *sequence,
              .channel = met.site->channel,
              .site = met.site->number,
              .group = met.group};
  call.shape = shape;
  call.places = met.comm().group_places[met.group];
  call.deadline = met.meeting->deadline();
  call.shares = std::move(shares);
  call.warn = [meeting = met.meeting](const std::string& what) {
    meeting->Warn(what);
  };
  call.done = std::move(done);
  met.comm().exchange->Post(std::move(call));
}

}  // namespace jax_ep
