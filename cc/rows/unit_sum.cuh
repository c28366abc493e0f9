// Sums of rows, 16 bytes at a time, with as few instructions as there are.
#ifndef JAX_EP_CC_ROWS_UNIT_SUM_CUH_
#define JAX_EP_CC_ROWS_UNIT_SUM_CUH_

#include <cstdint>

#include "cc/ptx.cuh"
#include "cc/rows/rows.cuh"

namespace jax_ep {

// Some bytes of a row as numbers, widened to be added up.
template <typename T>
struct Numbers;

template <>
struct Numbers<Bf16> {
  float low, high;
  static __device__ __forceinline__ Numbers Of(uint32_t word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000)};
  }
  __device__ __forceinline__ void operator+=(const Numbers& other) {
    low += other.low;
    high += other.high;
  }
  __device__ __forceinline__ uint32_t Rounded() const {
    return ptx::RoundToBf16Pair(low, high);
  }
};

template <>
struct Numbers<F16> {
  float low, high;
  static __device__ __forceinline__ Numbers Of(uint32_t word) {
    return {Widen(F16{static_cast<uint16_t>(word)}),
            Widen(F16{static_cast<uint16_t>(word >> 16)})};
  }
  __device__ __forceinline__ void operator+=(const Numbers& other) {
    low += other.low;
    high += other.high;
  }
  __device__ __forceinline__ uint32_t Rounded() const {
    return ptx::RoundToF16Pair(low, high);
  }
};

template <>
struct Numbers<float> {
  float value;
  static __device__ __forceinline__ Numbers Of(uint32_t word) {
    return {__uint_as_float(word)};
  }
  __device__ __forceinline__ void operator+=(const Numbers& other) {
    value += other.value;
  }
  __device__ __forceinline__ uint32_t Rounded() const {
    return __float_as_uint(value);
  }
};

// The sum of units of several rows, added in the order of the calls and rounded
// once.
template <typename T>
struct UnitSum {
  Numbers<T> words[4];

  static __device__ __forceinline__ UnitSum Of(uint4 unit) {
    return {{Numbers<T>::Of(unit.x), Numbers<T>::Of(unit.y),
             Numbers<T>::Of(unit.z), Numbers<T>::Of(unit.w)}};
  }
  // The neutral element: a lone -0.0 stays what it is. A sum of no rows is plus
  // zero.
  static __device__ __forceinline__ uint4 Neutral(bool any_rows) {
    const uint32_t minus_zeros = sizeof(T) == 2 ? 0x80008000u : 0x80000000u;
    const uint32_t word = any_rows ? minus_zeros : 0;
    return {word, word, word, word};
  }
  __device__ __forceinline__ void operator+=(uint4 unit) {
    words[0] += Numbers<T>::Of(unit.x);
    words[1] += Numbers<T>::Of(unit.y);
    words[2] += Numbers<T>::Of(unit.z);
    words[3] += Numbers<T>::Of(unit.w);
  }
  __device__ __forceinline__ uint4 Rounded() const {
    return {words[0].Rounded(), words[1].Rounded(), words[2].Rounded(),
            words[3].Rounded()};
  }
};

template <>
struct UnitSum<double> {
  using Pair = Elements<double, uint4>;
  Pair pair;

  static __device__ __forceinline__ UnitSum Of(uint4 unit) {
    return {Pair::From(unit)};
  }
  static __device__ __forceinline__ uint4 Neutral(bool any_rows) {
    const uint32_t high = any_rows ? 0x80000000u : 0;
    return {0, high, 0, high};
  }
  __device__ __forceinline__ void operator+=(uint4 unit) {
    const Pair other = Pair::From(unit);
    pair.at[0] += other.at[0];
    pair.at[1] += other.at[1];
  }
  __device__ __forceinline__ uint4 Rounded() const { return pair.ToUnit(); }
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_ROWS_UNIT_SUM_CUH_
