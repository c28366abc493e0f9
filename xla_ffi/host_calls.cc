#include "xla_ffi/host_calls.h"

#include <unistd.h>

#include <optional>
#include <utility>

#include "xla_ffi/handlers.h"
#include "xla_ffi/registry.h"

namespace jax_ep {

namespace ffi = xla::ffi;

ffi::TypeId HostCallSite::id = {};

HostCommunicator::~HostCommunicator() {
  // A forked child has no threads to join; the sockets are its parent's.
  if (getpid() != process_id) static_cast<void>(exchange.release());
}

ffi::ErrorOr<std::unique_ptr<HostCallSite>> MakeCallSite(
    cpu::Op op, const ffi::Dictionary& attributes) {
  const auto site = ReadSite<HostCommunicator>(attributes, "cpu");
  if (site.has_error()) return ffi::Unexpected(site.error());
  return std::make_unique<HostCallSite>(
      site->communicator,
      std::string(cpu::NameOf(op)) + " (channel " +
          std::to_string(site->channel) + site->communicator->scope + ")",
      site->channel);
}

ffi::Future Failed(const std::string& message) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ffi::Error(ffi::ErrorCode::kInternal, message));
  return future;
}

namespace {

const TypeRegistration call_site("jax_ep_host_call_site",
                                 static_cast<HostCallSite*>(nullptr));

// Why the rank refuses to take part, "" where it does not.
std::string WhyRefuse(const MeshPlace& mesh, uint32_t found) {
  if (found == mesh.position) return "";
  const auto place = [&](uint32_t position) {
    return "position " + std::to_string(position) + " (rank " +
           std::to_string(mesh.RankAt(position)) + ")";
  };
  return "found its device at " + place(found) +
         " of the program's mesh, but at " + place(mesh.position) +
         " of the communicator's; call the program under "
         "jax.set_mesh(comm.mesh), or make a communicator of its mesh";
}

}  // namespace

ffi::Future Meet(HostCallSite* site, ffi::RunId run, int32_t ordinal,
                 const Position& position, std::shared_ptr<void> arrival,
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
      },
      WhyRefuse(place->second.mesh, *position.typed_data()));
  if (meeting == nullptr) return future;
  const Met met = {site, run.run_id, place->second.group, std::move(meeting)};
  if (met.local() && !met.meeting->refusal().empty()) {
    met.meeting->Finish(/*on_last_ranks_thread=*/true);
  } else {
    work(met);
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
  call.refusal = met.meeting->refusal();
  call.shares = std::move(shares);
  call.warn = [meeting = met.meeting](const std::string& what) {
    meeting->Warn(what);
  };
  call.done = std::move(done);
  met.comm().exchange->Post(std::move(call));
}

}  // namespace jax_ep
