// The wire between nodes, as one rank sees it: the ranks with the same local
// index, one in each node, send each other blocks of memory.
#ifndef JAX_EP_CC_NODES_WIRE_H_
#define JAX_EP_CC_NODES_WIRE_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace jax_ep {

// `bytes` that leave at `out` and as many that arrive at `in`; one buffer may
// not be the other.
struct WirePiece {
  const std::byte* out;
  std::byte* in;
  int64_t bytes;
};

// Pieces sent to node `to` and received from node `from`. Node `from` sends the
// same number of the same sizes at the same step.
struct WireTransfer {
  int32_t to;
  int32_t from;
  std::vector<WirePiece> pieces;
};

class Wire {
 public:
  virtual ~Wire() = default;

  // Enqueues all transfers, at the same time, on stream(), and returns at once.
  // All ranks of the rail call it in the same order. Says what went wrong, ""
  // where nothing did.
  virtual std::string Exchange(const std::vector<WireTransfer>& transfers) = 0;

  // Of this rank's device; nothing else is on it.
  virtual cudaStream_t stream() const = 0;
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_NODES_WIRE_H_
