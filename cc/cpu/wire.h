// What processes write into each other's slots (cc/layout/staging.h,
// StagingLayout).
//
// A slot holds one packet: a header and so many bytes. Packets name their call
// by a key, so that any mixture of calls may share a ring. Both ends run the
// same build on the same machine: structs travel as they are.
#ifndef JAX_EP_CC_CPU_WIRE_H_
#define JAX_EP_CC_CPU_WIRE_H_

#include <compare>
#include <cstdint>

#include "cc/layout/limits.h"
#include "cc/layout/staging.h"

namespace jax_ep::cpu {

// One call of one group, equal on all of its processes.
struct CallKey {
  int64_t run = 0;       // XLA's run id
  int64_t sequence = 0;  // how often the call site was used in this run
  int64_t channel = 0;   // from the program
  int32_t site = 0;      // tells call sites apart that share a channel
  int32_t group = 0;
  int32_t share = 0;  // part of the tokens, see Exchange
  int32_t reserved = 0;

  auto operator<=>(const CallKey&) const = default;
};

enum class PacketKind : uint32_t {
  kAnnounce,  // CallShape: this process has the call; rows may come
  kRows,      // Pieces
  kRequests,  // RowRequests
  kEnd,       // nothing more will come, and nothing more is wanted
  kAbort,     // text: this process has given the call up
};

struct PacketHeader {
  CallKey key;
  PacketKind kind;
  uint32_t bytes;  // that follow
};

enum class Op : int32_t {
  kPlan,
  kDispatch,
  kCombine,
  kLowLatencyDispatch,
  kLowLatencyCombine,
};
// `op` may come from a peer.
constexpr const char* NameOf(Op op) {
  switch (op) {
    case Op::kPlan:
      return "plan";
    case Op::kDispatch:
      return "dispatch";
    case Op::kCombine:
      return "combine";
    case Op::kLowLatencyDispatch:
      return "low_latency_dispatch";
    case Op::kLowLatencyCombine:
      return "low_latency_combine";
  }
  return "unknown operation";
}

// What all ranks have to agree on.
struct CallShape {
  Op op{};
  int32_t num_leaves = 0;
  // plan: T, K, C, experts, alignment; low-latency: T, K, max_tokens, experts,
  // by expert; else T, routes a token, C.
  int64_t sizes[5] = {};
  int64_t row_bytes[kMaxLeaves] = {};
  int32_t elements[kMaxLeaves] = {};

  bool operator==(const CallShape&) const = default;
};

// Bytes of one row. They follow, padded to kPieceAlignment.
struct Piece {
  int32_t from;   // rank; plan: whose ids these are
  int32_t to;     // rank; dispatch: owner of the slot, combine: of the token
  int64_t index;  // dispatch: slot, combine: landing place of the request
  int64_t offset = 0;  // within the row, all leaves one after the other
  int64_t bytes = 0;
};
inline constexpr int64_t kPieceAlignment = 8;

constexpr int64_t PaddedPiece(int64_t bytes) {
  return (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
}

// combine: rank `home` wants the row in `slot` of rank `holder`.
struct RowRequest {
  int32_t home;
  int32_t holder;
  int64_t slot;
  int64_t landing;  // comes back as Piece::index
};

static_assert(sizeof(PacketHeader) % kPieceAlignment == 0);
static_assert(sizeof(Piece) % kPieceAlignment == 0);
static_assert(sizeof(PacketHeader) + sizeof(CallShape) <=
              StagingLayout::kMinSlotBytes);

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CC_CPU_WIRE_H_
