// FFI handlers of the host backend.
#ifndef JAX_EP_XLA_FFI_HOST_HANDLERS_H_
#define JAX_EP_XLA_FFI_HOST_HANDLERS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "cc/cpu/rendezvous.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// Set up by Python, only read afterwards.
struct HostCommunicator {
  struct Place {
    int group;
    int rank;
  };

  int num_ranks;
  double timeout_s;
  std::map<int32_t, Place> places;  // by XLA's device ordinal
};

// State of one call site, shared by the local devices.
struct HostCallSite {
  static xla::ffi::TypeId id;

  HostCallSite(std::shared_ptr<HostCommunicator> comm, std::string name)
      : communicator(std::move(comm)),
        rendezvous(std::move(name), communicator->num_ranks,
                   communicator->timeout_s) {}

  std::shared_ptr<HostCommunicator> communicator;
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
