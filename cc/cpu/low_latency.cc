#include "cc/cpu/low_latency.h"

#include <algorithm>
#include <cstring>

#include "cc/cpu/expert_ops.h"
#include "cc/layout/limits.h"

namespace jax_ep::cpu {
namespace {

// The local id of an expert on `rank`, -1 for none of its.
int32_t LocalId(const LowLatencySizes& sizes, int32_t rank, int32_t id) {
  const int32_t local_experts =
      LocalExperts(sizes.num_experts, sizes.num_ranks);
  if (id < 0 || id >= sizes.num_experts || id / local_experts != rank) {
    return -1;
  }
  return id % local_experts;
}

void CopyRow(const std::vector<Leaf>& from, const std::vector<Leaf>& to,
             int64_t token, int64_t place) {
  for (size_t i = 0; i < from.size(); ++i) {
    std::memcpy(to[i].out + place * from[i].row_bytes,
                from[i].in + token * from[i].row_bytes, from[i].row_bytes);
  }
}

void DispatchByRank(const LowLatencySizes& sizes,
                    const std::vector<LowLatencyDispatchBuffers>& ranks,
                    int32_t to) {
  const LowLatencyDispatchBuffers& mine = ranks[to];
  const int64_t pairs = sizes.num_ranks * sizes.max_tokens * sizes.top_k;
  std::fill_n(mine.places, pairs, -1);
  if (mine.recv_weights != nullptr) std::fill_n(mine.recv_weights, pairs, 0.f);
  for (int32_t source = 0; source < sizes.num_ranks; ++source) {
    const LowLatencyDispatchBuffers& from = ranks[source];
    for (int64_t token = 0; token < sizes.num_tokens; ++token) {
      const int64_t row = source * sizes.max_tokens + token;
      bool comes = false;
      for (int32_t k = 0; k < sizes.top_k; ++k) {
        const int64_t pair = token * sizes.top_k + k;
        const int32_t local = LocalId(sizes, to, from.topk_idx[pair]);
        if (local < 0) continue;
        comes = true;
        mine.places[row * sizes.top_k + k] = local;
        if (mine.recv_weights != nullptr) {
          mine.recv_weights[row * sizes.top_k + k] = from.topk_weights[pair];
        }
      }
      if (comes) CopyRow(from.leaves, mine.leaves, token, row);
    }
  }
}

void DispatchByExpert(const LowLatencySizes& sizes,
                      const std::vector<LowLatencyDispatchBuffers>& ranks,
                      int32_t to) {
  const LowLatencyDispatchBuffers& mine = ranks[to];
  const int64_t rows = sizes.num_ranks * sizes.max_tokens;
  std::fill_n(mine.counts, LocalExperts(sizes.num_experts, sizes.num_ranks), 0);
  int32_t* places = mine.places;
  for (int32_t source = 0; source < sizes.num_ranks; ++source) {
    const LowLatencyDispatchBuffers& from = ranks[source];
    for (int64_t token = 0; token < sizes.num_tokens; ++token) {
      const int32_t* ids = from.topk_idx + token * sizes.top_k;
      for (int32_t k = 0; k < sizes.top_k; ++k) {
        const int32_t local = LocalId(sizes, to, ids[k]);
        const int64_t first = std::find(ids, ids + k, ids[k]) - ids;
        if (local < 0) {
          places[k] = -1;
        } else if (first < k) {
          places[k] = places[first];
        } else {
          places[k] = static_cast<int32_t>(local * rows + mine.counts[local]++);
          CopyRow(from.leaves, mine.leaves, token, places[k]);
        }
      }
      places += sizes.top_k;
    }
  }
}

// A token's row as the experts of `from` leave it; nullptr where it has none.
// `scratch` holds a row.
const std::byte* RowFrom(const LowLatencySizes& sizes,
                         const LowLatencyRows& rows,
                         const std::vector<LowLatencyCombineBuffers>& ranks,
                         int32_t from, int32_t source, int64_t token,
                         std::byte* scratch) {
  const LowLatencyCombineBuffers& buffers = ranks[from];
  const int64_t row = source * sizes.stride() + token;
  const int32_t* places = buffers.places + row * sizes.top_k;
  const std::byte* terms[kMaxTopK];
  double weights[kMaxTopK];
  int32_t num_terms = 0;
  for (int32_t k = 0; k < sizes.top_k; ++k) {
    if (places[k] < 0) continue;
    if (!sizes.by_expert) return buffers.y + row * rows.row_bytes;
    terms[num_terms] = buffers.y + places[k] * rows.row_bytes;
    weights[num_terms] = ranks[source].topk_weights[token * sizes.top_k + k];
    ++num_terms;
  }
  if (num_terms == 0) return nullptr;
  WeightedSumRows(rows.element, terms, weights, num_terms, scratch,
                  rows.row_bytes);
  return scratch;
}

}  // namespace

void LowLatencyDispatch(const LowLatencySizes& sizes,
                        const std::vector<LowLatencyDispatchBuffers>& ranks) {
  for (int32_t to = 0; to < sizes.num_ranks; ++to) {
    if (!ranks[to].here()) continue;
    if (sizes.by_expert) {
      DispatchByExpert(sizes, ranks, to);
    } else {
      DispatchByRank(sizes, ranks, to);
    }
  }
}

void SumForOthers(const LowLatencySizes& sizes, const LowLatencyRows& rows,
                  const std::vector<LowLatencyCombineBuffers>& ranks,
                  int32_t from, std::byte* sums) {
  for (int32_t source = 0; source < sizes.num_ranks; ++source) {
    if (ranks[source].here()) continue;
    for (int64_t token = 0; token < sizes.num_tokens; ++token) {
      std::byte* to =
          sums + (source * sizes.num_tokens + token) * rows.row_bytes;
      const std::byte* row =
          RowFrom(sizes, rows, ranks, from, source, token, to);
      if (row != nullptr && row != to) std::memcpy(to, row, rows.row_bytes);
    }
  }
}

void LowLatencyCombine(const LowLatencySizes& sizes, const LowLatencyRows& rows,
                       const std::vector<LowLatencyCombineBuffers>& ranks) {
  // Aligned for any element.
  std::vector<std::max_align_t> scratch(
      (rows.row_bytes / static_cast<int64_t>(sizeof(std::max_align_t)) + 1) *
      sizes.num_ranks);
  const int64_t stride =
      static_cast<int64_t>(scratch.size() * sizeof(std::max_align_t)) /
      sizes.num_ranks;
  auto* const bytes = reinterpret_cast<std::byte*>(scratch.data());
  for (int32_t me = 0; me < sizes.num_ranks; ++me) {
    const LowLatencyCombineBuffers& mine = ranks[me];
    if (!mine.here()) continue;
    for (int64_t token = 0; token < sizes.num_tokens; ++token) {
      const int32_t* ids = mine.topk_idx + token * sizes.top_k;
      const std::byte* terms[kMaxRanks];
      int32_t num_terms = 0;
      for (int32_t rank = 0; rank < sizes.num_ranks; ++rank) {
        const bool goes = std::any_of(ids, ids + sizes.top_k, [&](int32_t id) {
          return LocalId(sizes, rank, id) >= 0;
        });
        if (!goes) continue;
        const std::byte* term =
            ranks[rank].here()
                ? RowFrom(sizes, rows, ranks, rank, me, token,
                          bytes + rank * stride)
                : ranks[rank].sums +
                      (me * sizes.num_tokens + token) * rows.row_bytes;
        // A handle of other ids: nothing came.
        if (term != nullptr) terms[num_terms++] = term;
      }
      std::byte* out = mine.out + token * rows.row_bytes;
      if (num_terms == 0) {
        std::memset(out, 0, rows.row_bytes);
      } else {
        SumRows(rows.element, terms, num_terms, out, rows.row_bytes);
      }
    }
  }
}

}  // namespace jax_ep::cpu
