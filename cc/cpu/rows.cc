#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cc/cpu/ops.h"
#include "cc/layout/limits.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace jax_ep::cpu {
namespace {

// From here on zeros go past the caches: they would push out rows that are
// about to be read, and memory would be read to be overwritten.
constexpr int64_t kStreamedBytes = 1 << 20;

void Zero(std::byte* to, int64_t bytes) {
#if defined(__x86_64__)
  constexpr int64_t kLine = 64;
  constexpr int64_t kVector = sizeof(__m128i);
  if (bytes >= kStreamedBytes) {
    const int64_t head = -reinterpret_cast<intptr_t>(to) & (kLine - 1);
    std::memset(to, 0, head);
    to += head;
    bytes -= head;
    for (; bytes >= kLine; to += kLine, bytes -= kLine) {
      for (int64_t i = 0; i < kLine; i += kVector) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                         _mm_setzero_si128());
      }
    }
    // Such stores are not ordered by the release that hands the buffer over.
    _mm_sfence();
  }
#endif
  std::memset(to, 0, bytes);
}

}  // namespace

std::vector<Part> SplitRows(const std::vector<int>& ranks, int64_t num_tokens,
                            int64_t max_parts) {
  const int64_t parts = std::max<int64_t>(1, std::min(max_parts, num_tokens));
  std::vector<Part> result;
  for (const int rank : ranks) {
    for (int64_t p = 0; p < parts; ++p) {
      result.push_back(
          {rank, num_tokens * p / parts, num_tokens * (p + 1) / parts});
    }
  }
  return result;
}

void Dispatch(const RowSizes& sizes, const std::vector<RowBuffers>& ranks,
              const Part& part) {
  const RowBuffers& from = ranks[part.rank];
  const int32_t width = sizes.routes_per_token;
  for (int64_t token = part.begin; token < part.end; ++token) {
    const int32_t* route = from.routes + token * width * 2;
    for (int32_t j = 0; j < width; ++j, route += 2) {
      if (route[0] < 0) continue;
      const RowBuffers& to = ranks[route[0]];
      if (!to.here()) continue;
      for (size_t i = 0; i < from.leaves.size(); ++i) {
        const Leaf& leaf = from.leaves[i];
        std::memcpy(to.leaves[i].out + route[1] * leaf.row_bytes,
                    leaf.in + token * leaf.row_bytes, leaf.row_bytes);
      }
    }
  }
  // This part's share of the empty slots of its own rank.
  const int64_t empty = sizes.capacity - *from.num_recv;
  const int64_t tokens = std::max<int64_t>(1, sizes.num_tokens);
  const int64_t begin = *from.num_recv + empty * part.begin / tokens;
  const int64_t end = part.end == sizes.num_tokens
                          ? sizes.capacity
                          : *from.num_recv + empty * part.end / tokens;
  for (const Leaf& leaf : from.leaves) {
    Zero(leaf.out + begin * leaf.row_bytes, (end - begin) * leaf.row_bytes);
  }
}

void Combine(const RowSizes& sizes, const std::vector<RowBuffers>& ranks,
             const Part& part) {
  const RowBuffers& home = ranks[part.rank];
  const int32_t width = sizes.routes_per_token;
  const std::byte* terms[kMaxRanks];
  for (int64_t token = part.begin; token < part.end; ++token) {
    const int32_t* routes = home.routes + token * width * 2;
    for (size_t i = 0; i < home.leaves.size(); ++i) {
      const Leaf& leaf = home.leaves[i];
      int32_t num_terms = 0;
      for (int32_t j = 0; j < width; ++j) {
        if (routes[2 * j] < 0) continue;
        terms[num_terms++] = ranks[routes[2 * j]].leaves[i].in +
                             routes[2 * j + 1] * leaf.row_bytes;
      }
      std::byte* out = leaf.out + token * leaf.row_bytes;
      if (num_terms == 0) {
        std::memset(out, 0, leaf.row_bytes);
      } else {
        SumRows(leaf.element, terms, num_terms, out, leaf.row_bytes);
      }
    }
  }
}

}  // namespace jax_ep::cpu
