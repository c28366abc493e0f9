// FFI handlers of the operations between rows and experts, on the host. They
// are local to a device: no state, no meeting of ranks.
#ifndef JAX_EP_XLA_FFI_HOST_EXPERT_HANDLERS_H_
#define JAX_EP_XLA_FFI_HOST_EXPERT_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

XLA_FFI_DECLARE_HANDLER_SYMBOL(EpExpertRows);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpPermute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpUnpermute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpRowDots);

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_HOST_EXPERT_HANDLERS_H_
