// Sums of rows. A block of columns is summed over all rows before the next one,
// so that sums stay in registers; where the compiler can, one clone for each
// x86 level, which cuts the vectors below to what the machine has.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cc/cpu/ops.h"
#include "cc/cpu/widen.h"

namespace jax_ep::cpu {
namespace {

// Bytes of a row that are summed together: two cache lines.
constexpr int64_t kVectorBytes = 64;
constexpr int kVectors = 2;
constexpr int64_t kBlockBytes = kVectors * kVectorBytes;

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef double Doubles __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef int32_t Mask __attribute__((vector_size(kVectorBytes)));

// kVectorBytes of a row, widened. Bfloat16 are the halves of 32-bit words, so
// they are widened and rounded in place: those at even places apart from those
// at odd ones (little-endian).
struct Bf16Lanes {
  Floats even, odd;

  __attribute__((always_inline)) void Load(const std::byte* from) {
    Words words;
    std::memcpy(&words, from, sizeof(words));
    const Words low = words << 16;
    const Words high = words & 0xFFFF0000u;
    std::memcpy(&even, &low, sizeof(even));
    std::memcpy(&odd, &high, sizeof(odd));
  }
  __attribute__((always_inline)) void Add(const Bf16Lanes& term) {
    even += term.even;
    odd += term.odd;
  }
  __attribute__((always_inline)) void Store(std::byte* to) const {
    Words low, high;
    Round(even, low);
    Round(odd, high);
    const Words words = (high & 0xFFFF0000u) | (low >> 16);
    std::memcpy(to, &words, sizeof(words));
  }

 private:
  // As Narrow() does; the result stands in the upper half.
  __attribute__((always_inline)) static void Round(const Floats& x,
                                                   Words& out) {
    Words bits;
    std::memcpy(&bits, &x, sizeof(bits));
    const Mask is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    Words nan;
    std::memcpy(&nan, &is_nan, sizeof(nan));
    const Words rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
    out = (nan & (bits | 0x400000u)) | (~nan & rounded);
  }
};

// kVectorBytes of a row whose elements need no widening.
template <typename Vector>
struct WideLanes {
  Vector values;

  __attribute__((always_inline)) void Load(const std::byte* from) {
    std::memcpy(&values, from, sizeof(values));
  }
  __attribute__((always_inline)) void Add(const WideLanes& term) {
    values += term.values;
  }
  __attribute__((always_inline)) void Store(std::byte* to) const {
    std::memcpy(to, &values, sizeof(values));
  }
};

// Sums kVectors vectors of each row; in(r) says where those of row r stand.
template <typename Lanes, typename Place>
__attribute__((always_inline)) inline void SumBlock(const Place& in,
                                                    int32_t num_in,
                                                    std::byte* out) {
  Lanes total[kVectors];
  const std::byte* first = in(0);
  for (int i = 0; i < kVectors; ++i) total[i].Load(first + i * kVectorBytes);
  for (int32_t r = 1; r < num_in; ++r) {
    const std::byte* next = in(r);
    for (int i = 0; i < kVectors; ++i) {
      Lanes term;
      term.Load(next + i * kVectorBytes);
      total[i].Add(term);
    }
  }
  for (int i = 0; i < kVectors; ++i) total[i].Store(out + i * kVectorBytes);
}

template <typename Lanes>
__attribute__((always_inline)) inline void Sum(const std::byte* const* in,
                                               int32_t num_in, std::byte* out,
                                               int64_t num_bytes) {
  int64_t offset = 0;
  for (; offset + kBlockBytes <= num_bytes; offset += kBlockBytes) {
    SumBlock<Lanes>([=](int32_t r) { return in[r] + offset; }, num_in,
                    out + offset);
  }
  const int64_t rest = num_bytes - offset;
  if (rest == 0) return;
  // The last columns, with zeros behind them.
  std::byte padded[kBlockBytes] = {};
  std::byte sums[kBlockBytes];
  SumBlock<Lanes>(
      [&](int32_t r) {
        std::memcpy(padded, in[r] + offset, rest);
        return static_cast<const std::byte*>(padded);
      },
      num_in, sums);
  std::memcpy(out + offset, sums, rest);
}

// Float16 in blocks of elements, which the compiler makes vector code of.
__attribute__((always_inline)) inline void SumHalves(const std::byte* const* in,
                                                     int32_t num_in,
                                                     std::byte* out,
                                                     int64_t num_bytes) {
  constexpr int64_t kBlock = 512;
  const int64_t size = num_bytes / static_cast<int64_t>(sizeof(_Float16));
  _Float16* result = reinterpret_cast<_Float16*>(out);
  float total[kBlock];
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t n = std::min(kBlock, size - begin);
    const _Float16* first = reinterpret_cast<const _Float16*>(in[0]) + begin;
    for (int64_t i = 0; i < n; ++i) total[i] = Widen(first[i]);
    for (int32_t r = 1; r < num_in; ++r) {
      const _Float16* term = reinterpret_cast<const _Float16*>(in[r]) + begin;
      for (int64_t i = 0; i < n; ++i) total[i] += Widen(term[i]);
    }
    for (int64_t i = 0; i < n; ++i) Narrow(total[i], result[begin + i]);
  }
}

JAX_EP_CLONES void SumBf16(const std::byte* const* in, int32_t num_in,
                           std::byte* out, int64_t num_bytes) {
  Sum<Bf16Lanes>(in, num_in, out, num_bytes);
}
JAX_EP_CLONES void SumF16(const std::byte* const* in, int32_t num_in,
                          std::byte* out, int64_t num_bytes) {
  SumHalves(in, num_in, out, num_bytes);
}
JAX_EP_CLONES void SumF32(const std::byte* const* in, int32_t num_in,
                          std::byte* out, int64_t num_bytes) {
  Sum<WideLanes<Floats>>(in, num_in, out, num_bytes);
}
JAX_EP_CLONES void SumF64(const std::byte* const* in, int32_t num_in,
                          std::byte* out, int64_t num_bytes) {
  Sum<WideLanes<Doubles>>(in, num_in, out, num_bytes);
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
