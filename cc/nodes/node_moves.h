// dispatch and combine between nodes: what one rank enqueues.
//
// T tokens, N nodes, W = T + (N - 1) * block wire rows, as in
// jax_ep/_operations/node_plan.py: this rank's own tokens, then a block for
// each other node by its distance. A block crosses in chunks of chunk_rows, and
// `in_flight` chunks have a place in staging memory, which is cut [place][row]
// for each leaf and direction. While one chunk is on the wire, the next is
// packed and the one before it is passed on inside the node (dispatch), or the
// next is summed inside the node (combine).
//
//   main stream  pack 0  pack 1  own rows  pass 0 on  pack 2  pass 1 on ...
//                   \       \               /          \       /
//   wire stream      chunk 0 .. chunk 1 ................ chunk 2 ...
//
// A chunk's place is free for the next one when the main stream has passed it
// on, behind which that next one is packed. All work is behind what the main
// stream held before, and the main stream is behind all of it afterwards.
#ifndef JAX_EP_CC_NODES_NODE_MOVES_H_
#define JAX_EP_CC_NODES_NODE_MOVES_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/layout/limits.h"
#include "cc/nodes/gather_rows.h"
#include "cc/nodes/wire.h"
#include "cc/ops.h"

namespace jax_ep {

// Chunks that can have a place at a time.
inline constexpr int32_t kMaxInFlight = 8;

// What orders the streams: events without timing, of the rank's device. Used by
// one operation after the other, under a lock.
struct NodeEvents {
  cudaEvent_t packed[kMaxInFlight];   // on the main stream
  cudaEvent_t crossed[kMaxInFlight];  // on the wire's
};

struct NodeRows {
  // As inside a node: leaves [T, ...] and [C, ...], routes [W, ...], recv_src
  // is Crossing.arrivals.
  RowParams rows;
  int32_t node;
  int32_t num_nodes;
  int32_t node_size;
  int64_t num_tokens;  // T
  int64_t block;       // rows from a node to another
  int64_t chunk_rows;
  int32_t in_flight;
  const int32_t* sends;      // dispatch: [(N - 1) * block], tokens or -1
  const int32_t* places;     // combine: [T, places_per_token], wire rows or -1
  int32_t places_per_token;  // min(K, N)
  // For each leaf, in rows of it: dispatch [2 * in_flight * chunk_rows]: what
  // leaves, what arrives; combine [W + in_flight * chunk_rows]: sums of the
  // tokens by wire row, then what leaves.
  std::byte* staging[kMaxLeaves];
};

// Each says what went wrong, "" where nothing did. What is enqueued then is
// part of the operation, and the peers run into their timeouts.
std::string NodeDispatch(const NodeRows& params, Wire& wire,
                         const NodeEvents& events, cudaStream_t stream);
std::string NodeCombine(const NodeRows& params, Wire& wire,
                        const NodeEvents& events, cudaStream_t stream);
// [(N - 1) * block_bytes]: block d - 1 goes to the d-th node after this one,
// and what comes is from the d-th before.
std::string NodeExchange(const std::byte* in, std::byte* out,
                         int64_t block_bytes, int32_t node, int32_t num_nodes,
                         const WireCheck& check, Wire& wire,
                         const NodeEvents& events, cudaStream_t stream);

}  // namespace jax_ep

#endif  // JAX_EP_CC_NODES_NODE_MOVES_H_
