// FFI handlers of the host backend.
#ifndef JAX_EP_XLA_FFI_HOST_HANDLERS_H_
#define JAX_EP_XLA_FFI_HOST_HANDLERS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/cpu/call_sites.h"
#include "cc/cpu/exchange.h"
#include "cc/cpu/moves.h"
#include "cc/cpu/rendezvous.h"
#include "cc/mesh_place.h"
#include "cc/wait_limits.h"
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
  cpu::Rendezvous rendezvous;
};

extern const XLA_FFI_TypeInfo kHostCallSiteInfo;

XLA_FFI_DECLARE_HANDLER_SYMBOL(EpPlanInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpDispatchInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpCombineInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpPlan);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpDispatch);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpCombine);

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_HOST_HANDLERS_H_
