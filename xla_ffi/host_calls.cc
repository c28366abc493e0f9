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
                 const std::function<void(const HostCall&)>& work) {
  const auto place = site->communicator->places.find(ordinal);
  if (place == site->communicator->places.end()) {
    return Failed("jax_ep: device " + std::to_string(ordinal) +
                  " is not on the communicator's mesh");
  }
  auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);
  std::shared_ptr<cpu::Rendezvous> rendezvous = site->rendezvous.Enter(
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
  if (rendezvous == nullptr) return future;
  const HostCall call = {site, run.run_id, place->second.group,
                         std::move(rendezvous)};
  if (call.local() && !call.rendezvous->refusal().empty()) {
    call.rendezvous->Finish(/*on_last_ranks_thread=*/true);
  } else {
    work(call);
  }
  return future;
}

void Post(const HostCall& call, const cpu::CallShape& shape,
          std::vector<std::unique_ptr<cpu::Move>> shares,
          std::function<void(const std::string& error)> done) {
  const std::optional<int64_t> sequence =
      call.site->communicator->sites.Next(call.site, call.run, call.group);
  if (!sequence) {
    return done(
        "found two call sites of one channel that its peers could not tell "
        "apart; do not compile programs in several threads at a time");
  }
  cpu::Exchange::Call shared;
  shared.key = {.run = call.run,
                .sequence = *sequence,
                .channel = call.site->channel,
                .site = call.site->number,
                .group = call.group};
  shared.shape = shape;
  shared.places = call.comm().group_places[call.group];
  shared.deadline = call.rendezvous->deadline();
  shared.refusal = call.rendezvous->refusal();
  shared.shares = std::move(shares);
  shared.warn = [rendezvous = call.rendezvous](const std::string& what) {
    rendezvous->Warn(what);
  };
  shared.done = std::move(done);
  call.comm().exchange->Post(std::move(shared));
}

}  // namespace jax_ep
