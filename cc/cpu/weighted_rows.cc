// Rows times weights, and products of rows: the loops of sum_rows.cc with a
// factor. Built without contraction: a product and a sum round apart.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cc/cpu/expert_ops.h"
#include "cc/cpu/widen.h"

namespace jax_ep::cpu {
namespace {

// Elements that are widened at a time: the sums stay in the first cache.
constexpr int64_t kBlock = 512;
// Sums that a product of rows is kept in, so that compilers can use vectors.
constexpr int64_t kLanes = 16;

template <typename T, typename Wide>
__attribute__((always_inline)) inline void WeightedSum(
    const std::byte* const* in, const double* weights, int32_t num_in,
    std::byte* out, int64_t num_bytes) {
  const int64_t size = num_bytes / static_cast<int64_t>(sizeof(T));
  T* result = reinterpret_cast<T*>(out);
  Wide total[kBlock];
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t n = std::min(kBlock, size - begin);
    for (int32_t r = 0; r < num_in; ++r) {
      const T* term = reinterpret_cast<const T*>(in[r]) + begin;
      const Wide weight = static_cast<Wide>(weights[r]);
      if (r == 0) {
        for (int64_t i = 0; i < n; ++i) total[i] = weight * Widen(term[i]);
      } else {
        for (int64_t i = 0; i < n; ++i) total[i] += weight * Widen(term[i]);
      }
    }
    for (int64_t i = 0; i < n; ++i) Narrow(total[i], result[begin + i]);
  }
}

template <typename T, typename Wide>
__attribute__((always_inline)) inline double Dot(const std::byte* a,
                                                 const std::byte* b,
                                                 int64_t num_bytes) {
  const int64_t size = num_bytes / static_cast<int64_t>(sizeof(T));
  const T* x = reinterpret_cast<const T*>(a);
  const T* y = reinterpret_cast<const T*>(b);
  Wide sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) {
      sums[j] += Widen(x[i + j]) * Widen(y[i + j]);
    }
  }
  for (int64_t j = 0; i < size; ++i, ++j) sums[j] += Widen(x[i]) * Widen(y[i]);
  Wide sum = 0;
  for (const Wide s : sums) sum += s;
  return sum;
}

#define JAX_EP_DEFINE(Name, T, Wide)                                          \
  JAX_EP_CLONES void WeightedSum##Name(const std::byte* const* in,            \
                                       const double* weights, int32_t num_in, \
                                       std::byte* out, int64_t num_bytes) {   \
    WeightedSum<T, Wide>(in, weights, num_in, out, num_bytes);                \
  }                                                                           \
  JAX_EP_CLONES double Dot##Name(const std::byte* a, const std::byte* b,      \
                                 int64_t num_bytes) {                         \
    return Dot<T, Wide>(a, b, num_bytes);                                     \
  }

JAX_EP_DEFINE(Bf16, Bf16, float)
JAX_EP_DEFINE(F16, _Float16, float)
JAX_EP_DEFINE(F32, float, float)
JAX_EP_DEFINE(F64, double, double)

#undef JAX_EP_DEFINE

}  // namespace

void WeightedSumRows(Element element, const std::byte* const* in,
                     const double* weights, int32_t num_in, std::byte* out,
                     int64_t num_bytes) {
  switch (element) {
    case Element::kBf16:
      return WeightedSumBf16(in, weights, num_in, out, num_bytes);
    case Element::kF16:
      return WeightedSumF16(in, weights, num_in, out, num_bytes);
    case Element::kF32:
      return WeightedSumF32(in, weights, num_in, out, num_bytes);
    case Element::kF64:
      return WeightedSumF64(in, weights, num_in, out, num_bytes);
    case Element::kNone:
      return;
  }
}

double DotRows(Element element, const std::byte* a, const std::byte* b,
               int64_t num_bytes) {
  switch (element) {
    case Element::kBf16:
      return DotBf16(a, b, num_bytes);
    case Element::kF16:
      return DotF16(a, b, num_bytes);
    case Element::kF32:
      return DotF32(a, b, num_bytes);
    case Element::kF64:
      return DotF64(a, b, num_bytes);
    case Element::kNone:
      return 0;
  }
  return 0;
}

}  // namespace jax_ep::cpu
