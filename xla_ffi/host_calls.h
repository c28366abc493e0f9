// What the handlers of the host backend share: communicators, call sites, and
// how the ranks of a call meet.
#ifndef JAX_EP_XLA_FFI_HOST_CALLS_H_
#define JAX_EP_XLA_FFI_HOST_CALLS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/cpu/call_sites.h"
#include "cc/cpu/exchange.h"
#include "cc/cpu/moves.h"
#include "cc/cpu/rendezvous.h"
#include "cc/cpu/wire.h"
#include "cc/handshake/mesh_place.h"
#include "cc/handshake/wait_limits.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// Set up by Python, only read afterwards.
struct HostCommunicator {
  struct Place {
    int group;
    int rank;
    MeshPlace mesh;
  };

  ~HostCommunicator();

  // Whether all ranks of a group are in this process.
  bool IsLocal(int group) const {
    return static_cast<int>(local_ranks[group].size()) == num_ranks;
  }

  int num_ranks;
  WaitLimits limits;
  // What ranks are in messages, where they are not those of the mesh axis.
  std::string scope;
  std::map<int32_t, Place> places;  // by XLA's device ordinal
  // By group: its ranks in this process, and where all of them are.
  std::vector<std::vector<int>> local_ranks;
  std::vector<cpu::GroupPlaces> group_places;
  // Only where there are other processes.
  std::unique_ptr<cpu::Exchange> exchange;
  cpu::CallSites sites;
  int process_id;  // of the operating system: a forked child has another
};

// State of one call site, shared by the local devices.
struct HostCallSite {
  static xla::ffi::TypeId id;

  HostCallSite(std::shared_ptr<HostCommunicator> comm, std::string name,
               int64_t channel_id)
      : communicator(std::move(comm)),
        channel(channel_id),
        number(communicator->sites.Add(this, channel_id)),
        rendezvous(std::move(name), communicator->local_ranks,
                   communicator->limits) {}
  ~HostCallSite() { communicator->sites.Remove(this); }
  HostCallSite(const HostCallSite&) = delete;
  HostCallSite& operator=(const HostCallSite&) = delete;

  std::shared_ptr<HostCommunicator> communicator;
  const int64_t channel;
  const int32_t number;  // among the sites of a program that share a channel
  cpu::RendezvousTable rendezvous;
};

// The state of a call site of `op`, from its attributes "comm" and "channel".
xla::ffi::ErrorOr<std::unique_ptr<HostCallSite>> MakeCallSite(
    cpu::Op op, const xla::ffi::Dictionary& attributes);
template <cpu::Op op>
xla::ffi::ErrorOr<std::unique_ptr<HostCallSite>> MakeCallSiteOf(
    xla::ffi::Dictionary attributes) {
  return MakeCallSite(op, attributes);
}

// A call that ended in an error.
xla::ffi::Future Failed(const std::string& message);

// A call that all ranks here have entered: its rendezvous is complete.
struct HostCall {
  HostCallSite* site;
  int64_t run;
  int group;
  std::shared_ptr<cpu::Rendezvous> rendezvous;

  const HostCommunicator& comm() const { return *site->communicator; }
  bool local() const { return comm().IsLocal(group); }
};

// Of this device on the program's mesh; the first operand of every call.
using Position = xla::ffi::BufferR0<xla::ffi::U32>;

// What every call of a communicator binds first.
inline auto BindCall() {
  namespace ffi = xla::ffi;
  return ffi::Ffi::Bind()
      .Ctx<ffi::State<HostCallSite>>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<Position>();
}

// Enters this device's rank with `arrival`; `work` runs on the last rank's
// thread, and ends in the Finish(). Where a rank refuses, because its
// device stands elsewhere on the program's mesh, nothing is written: without
// other processes `work` does not run, else it ends in Post().
xla::ffi::Future Meet(HostCallSite* site, xla::ffi::RunId run, int32_t ordinal,
                      const Position& position, std::shared_ptr<void> arrival,
                      const std::function<void(const HostCall&)>& work);

// Buffers by rank; ranks of other processes have none.
template <typename T>
std::vector<T> Arrivals(const HostCall& call) {
  std::vector<T> result(call.comm().num_ranks);
  const std::vector<int>& ranks = call.rendezvous->ranks();
  for (size_t i = 0; i < ranks.size(); ++i) {
    result[ranks[i]] =
        *static_cast<const T*>(call.rendezvous->arrivals()[i].get());
  }
  return result;
}

// Lets other processes take part in a call whose ranks here have met, or tells
// them why one of these refuses.
void Post(const HostCall& call, const cpu::CallShape& shape,
          std::vector<std::unique_ptr<cpu::Move>> shares,
          std::function<void(const std::string& error)> done);

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_HOST_CALLS_H_
