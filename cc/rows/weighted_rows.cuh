// Rows times weights. As in rows.cuh, lane j holds the j-th address, and here
// the j-th weight. A product and a sum round apart, on every backend.
#ifndef JAX_EP_CC_ROWS_WEIGHTED_ROWS_CUH_
#define JAX_EP_CC_ROWS_WEIGHTED_ROWS_CUH_

#include <cstddef>
#include <cstdint>

#include "cc/rows/rows.cuh"

namespace jax_ep {

// The compiler would contract a * b + c.
__device__ __forceinline__ float Times(float a, float b) {
  return __fmul_rn(a, b);
}
__device__ __forceinline__ double Times(double a, double b) {
  return __dmul_rn(a, b);
}

// Reads units `range` of the row at `in` once and stores them, times lane j's
// weight, to the same place of the j-th row in `targets`.
template <typename T, typename Wide, typename Unit, int kInFlight>
__device__ __forceinline__ void ScaleUnits(const std::byte* in, uint64_t target,
                                           Wide weight, uint32_t targets,
                                           Range range) {
  using Row = Elements<T, Unit>;
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
      const int j = __ffs(left) - 1;
      Unit* to = reinterpret_cast<Unit*>(AddressOf(target, j));
      const Wide scale = __shfl_sync(kAllLanes, weight, j);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int64_t at = base + i * kWarpSize + lane;
        if (at >= range.end) continue;
        Row row = Row::From(units[i]);
#pragma unroll
        for (int e = 0; e < Row::kSize; ++e) {
          row.at[e] = Narrow<T>(Times(scale, Widen(row.at[e])));
        }
        StoreUnit(to + at, row.ToUnit());
      }
    }
  }
}

// Sums units `range` of the rows in `sources`, each times its lane's weight, in
// the order of their lanes, and writes them to `out`.
template <typename T, typename Wide, typename Unit, int kInFlight>
__device__ __forceinline__ void WeightedSumUnits(uint64_t source, Wide weight,
                                                 uint32_t sources,
                                                 std::byte* out, Range range) {
  using Row = Elements<T, Unit>;
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t base = range.begin; base < range.end;
       base += kInFlight * kWarpSize) {
    // As in SumUnits: a lone -0.0 stays what it is.
    const Wide neutral = sources == 0 ? Wide(0) : -Wide(0);
    Wide total[kInFlight][Row::kSize];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
#pragma unroll
      for (int e = 0; e < Row::kSize; ++e) total[i][e] = neutral;
    }
    const auto load = [&](int j, Unit(&units)[kInFlight]) {
      const Unit* from = reinterpret_cast<const Unit*>(AddressOf(source, j));
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int64_t at = base + i * kWarpSize + lane;
        if (at < range.end) units[i] = LoadUnit(from + at);
      }
    };
    const auto add = [&](int j, const Unit(&units)[kInFlight]) {
      const Wide scale = __shfl_sync(kAllLanes, weight, j);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const Row row = Row::From(units[i]);
#pragma unroll
        for (int e = 0; e < Row::kSize; ++e) {
          total[i][e] += Times(scale, Widen(row.at[e]));
        }
      }
    };
    for (uint32_t left = sources; left != 0;) {
      Unit first[kInFlight], second[kInFlight];
      const int a = __ffs(left) - 1;
      load(a, first);
      left &= left - 1;
      const int b = left != 0 ? __ffs(left) - 1 : -1;
      if (b >= 0) {
        load(b, second);
        left &= left - 1;
      }
      add(a, first);
      if (b >= 0) add(b, second);
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

// The lane's part of the product of units [0, size) of two rows.
template <typename T, typename Wide, typename Unit, int kInFlight>
__device__ __forceinline__ Wide DotUnits(const std::byte* a, const std::byte* b,
                                         int64_t size) {
  using Row = Elements<T, Unit>;
  const int lane = threadIdx.x % kWarpSize;
  const Unit* left = reinterpret_cast<const Unit*>(a);
  const Unit* right = reinterpret_cast<const Unit*>(b);
  Wide sums[kInFlight] = {};
  for (int64_t base = 0; base < size; base += kInFlight * kWarpSize) {
    Unit x[kInFlight], y[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t at = base + i * kWarpSize + lane;
      if (at >= size) continue;
      // The left row comes again for the next choice: it may stay in the cache.
      x[i] = left[at];
      y[i] = LoadUnit(right + at);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (base + i * kWarpSize + lane >= size) continue;
      const Row p = Row::From(x[i]), q = Row::From(y[i]);
#pragma unroll
      for (int e = 0; e < Row::kSize; ++e) {
        sums[i] += Widen(p.at[e]) * Widen(q.at[e]);
      }
    }
  }
  Wide sum = 0;
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) sum += sums[i];
  return sum;
}

// Whether rows of this size at these addresses move in 16-byte units. `bits` is
// the lane's own address, or 0. Called by all lanes of a warp.
__device__ __forceinline__ bool WideUnits(uint64_t bits, const std::byte* row,
                                          int64_t row_bytes) {
  return UnitBytes(OrOverWarp(bits | reinterpret_cast<uint64_t>(row) |
                              static_cast<uint64_t>(row_bytes))) == 16;
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_ROWS_WEIGHTED_ROWS_CUH_
