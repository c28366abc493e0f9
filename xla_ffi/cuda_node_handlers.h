// FFI handlers of operations between nodes, on GPUs.
//
// Not for command buffers: a handler works on two streams and enqueues NCCL's
// operations, whose host threads follow them; XLA captures handlers of which
// that is not known to work in each NCCL.
#ifndef JAX_EP_XLA_FFI_CUDA_NODE_HANDLERS_H_
#define JAX_EP_XLA_FFI_CUDA_NODE_HANDLERS_H_

#include <cstdint>
#include <memory>

#include "cc/nccl_wire.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/cuda_handlers.h"

namespace jax_ep {

// State of a call site of dispatch or combine: the node's, and the rails.
struct CudaNodeSite {
  static xla::ffi::TypeId id;

  CudaCallSite site;
  std::shared_ptr<NcclRails> rails;
};

// State of a call site of an exchange: the rails alone.
struct CudaRailSite {
  static xla::ffi::TypeId id;

  std::shared_ptr<NcclRails> rails;
  int64_t channel;
};

extern const XLA_FFI_TypeInfo kCudaNodeSiteInfo;
extern const XLA_FFI_TypeInfo kCudaRailSiteInfo;

XLA_FFI_DECLARE_HANDLER_SYMBOL(EpNodeInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpRailInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpNodeDispatch);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpNodeCombine);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EpNodeExchange);

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_CUDA_NODE_HANDLERS_H_
