// Elements of rows: how they are widened for a sum and rounded after it.
//
// Inlined into loops that compilers turn into vector code; where the compiler
// can, those are built once for each x86 level (JAX_EP_CLONES).
#ifndef JAX_EP_CC_CPU_WIDEN_H_
#define JAX_EP_CC_CPU_WIDEN_H_

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define JAX_EP_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define JAX_EP_CLONES
#endif

namespace jax_ep::cpu {

struct Bf16 {
  uint16_t bits;
};

__attribute__((always_inline)) inline float Widen(Bf16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}
__attribute__((always_inline)) inline float Widen(_Float16 x) { return x; }
__attribute__((always_inline)) inline float Widen(float x) { return x; }
__attribute__((always_inline)) inline double Widen(double x) { return x; }

__attribute__((always_inline)) inline void Narrow(float x, Bf16& out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t rounded = bits + 0x7FFF + (bits >> 16 & 1);
  // Rounding could carry a NaN's payload into an infinity.
  const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  out.bits = static_cast<uint16_t>((nan ? bits | 0x400000 : rounded) >> 16);
}
__attribute__((always_inline)) inline void Narrow(float x, _Float16& out) {
  out = static_cast<_Float16>(x);
}
__attribute__((always_inline)) inline void Narrow(float x, float& out) {
  out = x;
}
__attribute__((always_inline)) inline void Narrow(double x, double& out) {
  out = x;
}

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CC_CPU_WIDEN_H_
