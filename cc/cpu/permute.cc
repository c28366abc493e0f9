#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cc/cpu/expert_ops.h"
#include "cc/layout/limits.h"

namespace jax_ep::cpu {
namespace {

// The weight of a pair, whichever type the array has.
double WeightOf(const void* weights, Element element, int64_t pair) {
  return element == Element::kF64
             ? static_cast<const double*>(weights)[pair]
             : double{static_cast<const float*>(weights)[pair]};
}

// Part `index` of `count` of the empty places.
void ZeroEmpty(const PermuteParams& params, int64_t index, int64_t count) {
  for (int32_t r = 0; r < params.num_ranges; ++r) {
    const int64_t first = params.empty_ranges[2 * r];
    const int64_t size = params.empty_ranges[2 * r + 1] - first;
    if (size <= 0) continue;
    const int64_t begin = first + size * index / count;
    const int64_t end = first + size * (index + 1) / count;
    for (const Leaf& leaf : params.leaves) {
      std::memset(leaf.out + begin * leaf.row_bytes, 0,
                  (end - begin) * leaf.row_bytes);
    }
  }
}

}  // namespace

void Permute(const PermuteParams& params, RowRange rows, int64_t index,
             int64_t count) {
  ZeroEmpty(params, index, count);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int32_t k = 0; k < params.top_k; ++k) {
      const int64_t pair = row * params.top_k + k;
      const int64_t place = params.expert_rows[pair];
      if (place < 0) continue;
      for (const Leaf& leaf : params.leaves) {
        const std::byte* in = leaf.in + row * leaf.row_bytes;
        std::byte* out = leaf.out + place * leaf.row_bytes;
        if (params.weights == nullptr) {
          std::memcpy(out, in, leaf.row_bytes);
        } else {
          const double weight = WeightOf(params.weights, leaf.element, pair);
          WeightedSumRows(leaf.element, &in, &weight, 1, out, leaf.row_bytes);
        }
      }
    }
  }
}

void Unpermute(const PermuteParams& params, RowRange rows) {
  const std::byte* terms[kMaxTopK];
  double weights[kMaxTopK];
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (const Leaf& leaf : params.leaves) {
      int32_t num_terms = 0;
      for (int32_t k = 0; k < params.top_k; ++k) {
        const int64_t pair = row * params.top_k + k;
        const int64_t place = params.expert_rows[pair];
        if (place < 0) continue;
        if (params.weights != nullptr) {
          weights[num_terms] = WeightOf(params.weights, leaf.element, pair);
        }
        terms[num_terms++] = leaf.in + place * leaf.row_bytes;
      }
      std::byte* out = leaf.out + row * leaf.row_bytes;
      if (num_terms == 0) {
        std::memset(out, 0, leaf.row_bytes);
      } else if (params.weights == nullptr) {
        SumRows(leaf.element, terms, num_terms, out, leaf.row_bytes);
      } else {
        WeightedSumRows(leaf.element, terms, weights, num_terms, out,
                        leaf.row_bytes);
      }
    }
  }
}

void RowDots(const RowDotsParams& params, RowRange rows) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int32_t k = 0; k < params.top_k; ++k) {
      const int64_t pair = row * params.top_k + k;
      const int64_t place = params.expert_rows[pair];
      double dot = 0;
      bool wide = false;
      for (const RowDotsParams::Pair& leaf : params.leaves) {
        wide = leaf.element == Element::kF64;
        if (place < 0) continue;
        dot +=
            DotRows(leaf.element, leaf.row + row * leaf.row_bytes,
                    leaf.expert_row + place * leaf.row_bytes, leaf.row_bytes);
      }
      // All leaves of a call are float64, or none is.
      if (wide) {
        static_cast<double*>(params.dots)[pair] = dot;
      } else {
        static_cast<float*>(params.dots)[pair] = static_cast<float>(dot);
      }
    }
  }
}

}  // namespace jax_ep::cpu
