// The windows of a low-latency buffer, in each rank's memory: where peers put
// rows before the rank's kernel copies them to XLA's buffers. Host and device.
//
// One piece of memory for each rank, zeroed when it is made and never reset. It
// begins with a header of 4096 bytes:
//   state  [2 kinds] of kLine bytes, the rank's own (LowLatencyState)
//   heads  [2 kinds][2 parities][kMaxRanks] u64 (epoch << 32 | tag), a word
//          that every rank sends to every rank in every operation
// and holds for both kinds of operation and both parities of their epoch
//   rows   [R][max_tokens][row_bytes]; from each rank, of each token
//   words  [R][max_tokens * kMaxTopK] u64 (epoch << 32 | value), packed by the
//          K of the call: dispatch: expert ids; combine: weights
// and, of dispatch alone,
//   weights  as words
// A row has whole blocks of 16 columns. It is cut into chunks, each of which
// tells that it has come whole (cc/few_tokens/window.cuh).
#ifndef JAX_EP_CC_LAYOUT_LOW_LATENCY_H_
#define JAX_EP_CC_LAYOUT_LOW_LATENCY_H_

#include <cstdint>

#include "cc/layout/limits.h"

namespace jax_ep {

enum class WindowKind : int32_t { kDispatch = 0, kCombine = 1 };

// Columns that share a scale, where dispatch quantises.
inline constexpr int32_t kScaleBlock = 128;

struct LowLatencyState {
  uint32_t epoch;    // of the last operation of this kind
  uint32_t started;  // blocks of the running launch that have begun
  uint32_t busy;     // not all blocks of a launch have begun
  // By parity of the epoch: warps of all launches, and those that have ended.
  uint32_t launched[2];
  uint32_t done[2];
};

struct LowLatencyLayout {
  static constexpr int64_t kLine = 128;
  static constexpr int64_t kHeaderBytes = 4096;
  // A chunk holds at least so many units of 16 bytes, see window.cuh.
  static constexpr int64_t kChunkBytes = 1024;
  static constexpr int64_t kMinChunkUnits = 48;
  // Rows have a multiple of so many columns; one is element_bytes units.
  static constexpr int64_t kColumns = 16;

  int64_t num_ranks;
  int64_t max_tokens;
  int64_t row_bytes;  // of a row in a window

  // element_bytes: of one of the `hidden` numbers of a row.
  JAX_EP_HOST_DEVICE constexpr LowLatencyLayout(int64_t ranks, int64_t tokens,
                                                int64_t hidden,
                                                int64_t element_bytes)
      : num_ranks(ranks),
        max_tokens(tokens),
        row_bytes(((hidden + kColumns - 1) / kColumns * element_bytes +
                   2 * kMinChunkUnits - 1) /
                  (2 * kMinChunkUnits) * 2 * kChunkBytes) {}

  JAX_EP_HOST_DEVICE constexpr int64_t rows_bytes() const {
    return num_ranks * max_tokens * row_bytes;
  }
  JAX_EP_HOST_DEVICE constexpr int64_t words_bytes() const {
    return num_ranks * max_tokens * kMaxTopK * 8;
  }

  // Bytes of a rank's memory.
  JAX_EP_HOST_DEVICE constexpr int64_t size() const {
    return kHeaderBytes + 2 * (2 * rows_bytes() + 3 * words_bytes());
  }

  JAX_EP_HOST_DEVICE static constexpr int64_t state(WindowKind kind) {
    return static_cast<int64_t>(kind) * kLine;
  }
  JAX_EP_HOST_DEVICE static constexpr int64_t heads(WindowKind kind,
                                                    uint32_t parity) {
    return 2 * kLine + Index(kind, parity) * kMaxRanks * 8;
  }
  // Windows by kind and parity; from one rank to the next in each of them
  // max_tokens rows, or max_tokens * kMaxTopK words.
  JAX_EP_HOST_DEVICE constexpr int64_t rows(WindowKind kind,
                                            uint32_t parity) const {
    return kHeaderBytes + Index(kind, parity) * rows_bytes();
  }
  JAX_EP_HOST_DEVICE constexpr int64_t words(WindowKind kind,
                                             uint32_t parity) const {
    return kHeaderBytes + 4 * rows_bytes() +
           Index(kind, parity) * words_bytes();
  }
  JAX_EP_HOST_DEVICE constexpr int64_t weights(uint32_t parity) const {
    return kHeaderBytes + 4 * rows_bytes() + (4 + parity) * words_bytes();
  }

 private:
  JAX_EP_HOST_DEVICE static constexpr int64_t Index(WindowKind kind,
                                                    uint32_t parity) {
    return static_cast<int64_t>(kind) * 2 + parity;
  }
};

static_assert(LowLatencyLayout::heads(WindowKind::kCombine, 1) +
                  kMaxRanks * 8 <=
              LowLatencyLayout::kHeaderBytes);
static_assert(sizeof(LowLatencyState) <= LowLatencyLayout::kLine);

}  // namespace jax_ep

#endif  // JAX_EP_CC_LAYOUT_LOW_LATENCY_H_
