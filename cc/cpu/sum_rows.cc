// Sums of rows. Written as plain loops over small blocks that compilers turn
// into vector code; where the compiler can, one clone for each x86 level.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cc/cpu/ops.h"
#include "cc/cpu/widen.h"

namespace jax_ep::cpu {
namespace {

// Elements that are widened at a time: the sums stay in the first cache.
constexpr int64_t kBlock = 512;

template <typename T, typename Wide>
__attribute__((always_inline)) inline void Sum(const std::byte* const* in,
                                               int32_t num_in, std::byte* out,
                                               int64_t num_bytes) {
  const int64_t size = num_bytes / static_cast<int64_t>(sizeof(T));
  T* result = reinterpret_cast<T*>(out);
  Wide total[kBlock];
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t n = std::min(kBlock, size - begin);
    const T* first = reinterpret_cast<const T*>(in[0]) + begin;
    for (int64_t i = 0; i < n; ++i) total[i] = Widen(first[i]);
    for (int32_t r = 1; r < num_in; ++r) {
      const T* term = reinterpret_cast<const T*>(in[r]) + begin;
      for (int64_t i = 0; i < n; ++i) total[i] += Widen(term[i]);
    }
    for (int64_t i = 0; i < n; ++i) Narrow(total[i], result[begin + i]);
  }
}

JAX_EP_CLONES void SumBf16(const std::byte* const* in, int32_t num_in,
                           std::byte* out, int64_t num_bytes) {
  Sum<Bf16, float>(in, num_in, out, num_bytes);
}
JAX_EP_CLONES void SumF16(const std::byte* const* in, int32_t num_in,
                          std::byte* out, int64_t num_bytes) {
  Sum<_Float16, float>(in, num_in, out, num_bytes);
}
JAX_EP_CLONES void SumF32(const std::byte* const* in, int32_t num_in,
                          std::byte* out, int64_t num_bytes) {
  Sum<float, float>(in, num_in, out, num_bytes);
}
JAX_EP_CLONES void SumF64(const std::byte* const* in, int32_t num_in,
                          std::byte* out, int64_t num_bytes) {
  Sum<double, double>(in, num_in, out, num_bytes);
}

}  // namespace

void SumRows(Element element, const std::byte* const* in, int32_t num_in,
             std::byte* out, int64_t num_bytes) {
  if (num_in == 1) {
    std::memcpy(out, in[0], num_bytes);
    return;
  }
  switch (element) {
    case Element::kBf16:
      return SumBf16(in, num_in, out, num_bytes);
    case Element::kF16:
      return SumF16(in, num_in, out, num_bytes);
    case Element::kF32:
      return SumF32(in, num_in, out, num_bytes);
    case Element::kF64:
      return SumF64(in, num_in, out, num_bytes);
    case Element::kNone:
      return;
  }
}

}  // namespace jax_ep::cpu
