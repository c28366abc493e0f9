// How a warp moves and sums rows.
//
// A row's destinations (or sources) stand in the registers of a warp: lane j
// holds the j-th address, bit j of a mask says whether there is one. Rows are
// walked in vectors of 16 bytes, several loads in flight before the first
// store; where size or address does not allow that, in narrower units by the
// same loops.
#ifndef JAX_EP_CC_ROWS_ROWS_CUH_
#define JAX_EP_CC_ROWS_ROWS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "cc/ptx.cuh"

namespace jax_ep {

inline constexpr int kWarpSize = 32;
inline constexpr uint32_t kAllLanes = 0xFFFFFFFF;

// [begin, end) in units of a row.
struct Range {
  int64_t begin;
  int64_t end;
};

// Part `index` of `count` about equal parts of `size` units.
__device__ __forceinline__ Range PartOf(int64_t size, int32_t index,
                                        int32_t count) {
  // Whole warps' worth of units, so that all lanes have work.
  const int64_t share = (size + int64_t{count} * kWarpSize - 1) /
                        (int64_t{count} * kWarpSize) * kWarpSize;
  const int64_t begin = share * index < size ? share * index : size;
  const int64_t end = begin + share < size ? begin + share : size;
  return {begin, end};
}

// The widest unit of 16, 8, 4, 2 or 1 bytes that divides all of `bits`: the OR
// of a row's size and addresses.
__device__ __forceinline__ int32_t UnitBytes(uint64_t bits) {
  const uint64_t lowest = bits & -bits;
  return lowest == 0 || lowest > 16 ? 16 : static_cast<int32_t>(lowest);
}

// OR over the warp of those low bits that tell an alignment.
__device__ __forceinline__ uint32_t OrOverWarp(uint64_t bits) {
  return __reduce_or_sync(kAllLanes, static_cast<uint32_t>(bits & 0x1F));
}

__device__ __forceinline__ uint64_t AddressOf(uint64_t lane_value, int lane) {
  return __shfl_sync(kAllLanes, lane_value, lane);
}

__device__ __forceinline__ uint4 LoadUnit(const uint4* p) {
  return ptx::LoadStreaming(p);
}
__device__ __forceinline__ void StoreUnit(uint4* p, uint4 v) {
  ptx::StoreStreaming(p, v);
}
template <typename Unit>
__device__ __forceinline__ Unit LoadUnit(const Unit* p) {
  return *p;
}
template <typename Unit>
__device__ __forceinline__ void StoreUnit(Unit* p, Unit v) {
  *p = v;
}

// Reads units `range` of the row at `in` once and stores them to the same place
// of every row in `targets`.
template <typename Unit, int kInFlight>
__device__ __forceinline__ void CopyUnits(const std::byte* in, uint64_t target,
                                          uint32_t targets, Range range) {
  const int lane = threadIdx.x % kWarpSize;
  const Unit* from = reinterpret_cast<const Unit*>(in);
  for (int64_t base = range.begin; base < range.end;
       base += kInFlight * kWarpSize) {
    Unit units[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t at = base + i * kWarpSize + lane;
      if (at < range.end) units[i] = LoadUnit(from + at);
    }
    for (uint32_t left = targets; left != 0; left &= left - 1) {
      Unit* to = reinterpret_cast<Unit*>(AddressOf(target, __ffs(left) - 1));
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int64_t at = base + i * kWarpSize + lane;
        if (at < range.end) StoreUnit(to + at, units[i]);
      }
    }
  }
}

// Copies part `index` of `count` of a row of `row_bytes` to every row in
// `targets`. Called by all lanes of a warp.
__device__ __forceinline__ void CopyRow(const std::byte* in, uint64_t target,
                                        uint32_t targets, int64_t row_bytes,
                                        int32_t index, int32_t count) {
  const uint32_t bits = OrOverWarp(
      reinterpret_cast<uint64_t>(in) | static_cast<uint64_t>(row_bytes) |
      (targets >> (threadIdx.x % kWarpSize) & 1 ? target : 0));
  switch (UnitBytes(bits)) {
    case 16:
      return CopyUnits<uint4, 8>(in, target, targets,
                                 PartOf(row_bytes / 16, index, count));
    case 8:
      return CopyUnits<uint2, 8>(in, target, targets,
                                 PartOf(row_bytes / 8, index, count));
    case 4:
      return CopyUnits<uint32_t, 8>(in, target, targets,
                                    PartOf(row_bytes / 4, index, count));
    case 2:
      return CopyUnits<uint16_t, 8>(in, target, targets,
                                    PartOf(row_bytes / 2, index, count));
    default:
      return CopyUnits<uint8_t, 8>(in, target, targets,
                                   PartOf(row_bytes, index, count));
  }
}

// Elements by their bits: plain data that stays in registers.
struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

__device__ __forceinline__ float Widen(Bf16 x) {
  return __uint_as_float(uint32_t{x.bits} << 16);
}
__device__ __forceinline__ float Widen(F16 x) {
  return __half2float(__ushort_as_half(x.bits));
}
__device__ __forceinline__ float Widen(float x) { return x; }
__device__ __forceinline__ double Widen(double x) { return x; }

// Rounds to nearest even.
template <typename T>
__device__ __forceinline__ T Narrow(float x) {
  return x;
}
template <>
__device__ __forceinline__ Bf16 Narrow<Bf16>(float x) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}
template <>
__device__ __forceinline__ F16 Narrow<F16>(float x) {
  return {__half_as_ushort(__float2half_rn(x))};
}
template <typename T>
__device__ __forceinline__ T Narrow(double x) {
  return x;
}

// A unit of a row as elements.
template <typename T, typename Unit>
struct Elements {
  static constexpr int kSize = sizeof(Unit) / sizeof(T);
  T at[kSize];

  static __device__ __forceinline__ Elements From(Unit unit) {
    return __builtin_bit_cast(Elements, unit);
  }
  __device__ __forceinline__ Unit ToUnit() const {
    return __builtin_bit_cast(Unit, *this);
  }
};

// Sums units `range` of the rows in `sources`, in the order of their lanes, and
// writes them to `out`. Two sources' loads are in flight at a time.
template <typename T, typename Wide, typename Unit, int kInFlight>
__device__ __forceinline__ void SumUnits(uint64_t source, uint32_t sources,
                                         std::byte* out, Range range) {
  using Row = Elements<T, Unit>;
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t base = range.begin; base < range.end;
       base += kInFlight * kWarpSize) {
    // Minus zero is the neutral element: a lone -0.0 stays what it is. A token
    // without rows gets plus zero.
    const Wide neutral = sources == 0 ? Wide(0) : -Wide(0);
    Wide total[kInFlight][Row::kSize];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
#pragma unroll
      for (int e = 0; e < Row::kSize; ++e) total[i][e] = neutral;
    }
    const auto load = [&](uint32_t left, Unit(&units)[kInFlight]) {
      const Unit* from =
          reinterpret_cast<const Unit*>(AddressOf(source, __ffs(left) - 1));
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int64_t at = base + i * kWarpSize + lane;
        if (at < range.end) units[i] = LoadUnit(from + at);
      }
    };
    const auto add = [&](const Unit(&units)[kInFlight]) {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const Row row = Row::From(units[i]);
#pragma unroll
        for (int e = 0; e < Row::kSize; ++e) total[i][e] += Widen(row.at[e]);
      }
    };
    for (uint32_t left = sources; left != 0;) {
      Unit first[kInFlight], second[kInFlight];
      load(left, first);
      left &= left - 1;
      const bool two = left != 0;
      if (two) {
        load(left, second);
        left &= left - 1;
      }
      add(first);
      if (two) add(second);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t at = base + i * kWarpSize + lane;
      Row sum;
#pragma unroll
      for (int e = 0; e < Row::kSize; ++e) sum.at[e] = Narrow<T>(total[i][e]);
      if (at < range.end) {
        StoreUnit(reinterpret_cast<Unit*>(out) + at, sum.ToUnit());
      }
    }
  }
}

// Sums part `index` of `count` of a row of `row_bytes`, elements of type T,
// over `sources` into `out`. Called by all lanes of a warp.
template <typename T, typename Wide>
__device__ __forceinline__ void SumRow(uint64_t source, uint32_t sources,
                                       std::byte* out, int64_t row_bytes,
                                       int32_t index, int32_t count) {
  const uint32_t bits = OrOverWarp(
      reinterpret_cast<uint64_t>(out) | static_cast<uint64_t>(row_bytes) |
      (sources >> (threadIdx.x % kWarpSize) & 1 ? source : 0));
  if (UnitBytes(bits) == 16) {
    SumUnits<T, Wide, uint4, 2>(source, sources, out,
                                PartOf(row_bytes / 16, index, count));
  } else {
    SumUnits<T, Wide, T, 4>(
        source, sources, out,
        PartOf(row_bytes / static_cast<int64_t>(sizeof(T)), index, count));
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_ROWS_ROWS_CUH_
