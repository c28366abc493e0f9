// Where the rows of a low-latency dispatch come from, as chunks of units that
// travel (cc/few_tokens/window.cuh): as they are, or quantised on the way.
//
// A source has Load(), which asks for a chunk of a row of x, and Finish(),
// which makes of it the units that travel.
#ifndef JAX_EP_CC_FEW_TOKENS_ROW_SOURCE_CUH_
#define JAX_EP_CC_FEW_TOKENS_ROW_SOURCE_CUH_

#include <cuda_fp8.h>

#include <cstddef>
#include <cstdint>

#include "cc/few_tokens/window_chunks.cuh"
#include "cc/rows/rows.cuh"

namespace jax_ep {

struct Plain {
  using Protocol = Lines;
  static constexpr bool kScaled = false;
  // Chunks that a warp has in flight: of what it sends, and of what it copies
  // while it counts.
  static constexpr int kSending = 6;
  static constexpr int kCopying = 5;
  struct Chunk {
    Units units;
  };

  // Of the row at `row`, from unit `first` on, `left` units to its end.
  static __device__ __forceinline__ void Load(const std::byte* row,
                                              int32_t first, int32_t left,
                                              Chunk& chunk) {
    LoadRow<Protocol>(row, first, left, chunk.units);
  }
  static __device__ __forceinline__ void Finish(const Chunk& chunk,
                                                Units& units) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) units[i] = chunk.units[i];
  }
};

// x / scale, rounded to nearest, where that counts for a float8_e4m3fn: to
// normal numbers. `reciprocal` is 1 / scale, rounded. After one correction the
// quotient is exact but for its rounding, which a second one puts right. Where
// x has 11 bits and the scale is one of those over 448, one will do: no such
// quotient is as near to the middle between two floats that it counts.
template <bool kTwice>
__device__ __forceinline__ float Quotient(float x, float scale,
                                          float reciprocal) {
  // This way round a quotient of -0 stays one.
  float q = x * reciprocal;
  q = fmaf(fmaf(q, scale, -x), -reciprocal, q);
  if (kTwice) q = fmaf(fmaf(q, scale, -x), -reciprocal, q);
  return q;
}

// Quantised as jax_ep.quantize_fp8 does it: eight neighbouring lanes hold the
// 128 columns of a block, each of them one unit of 16.
template <typename T>
struct Quantized {
  using Protocol = ScaledLines;
  static constexpr bool kScaled = true;
  static constexpr int kColumns = 16;
  static constexpr int kVectors = kColumns * sizeof(T) / 16;
  static constexpr int kSending = 8 / kVectors;
  static constexpr int kCopying = 4 / kVectors;
  struct Chunk {
    uint4 in[kPerLane][kVectors];
  };

  static __device__ __forceinline__ void Load(const std::byte* row,
                                              int32_t first, int32_t left,
                                              Chunk& chunk) {
    const auto* from =
        reinterpret_cast<const uint4*>(row) + int64_t{first} * kVectors;
    const int32_t lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int32_t unit = i * kWarpSize + lane;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        chunk.in[i][v] = uint4{};
        if (unit < min(left, Protocol::kUnits)) {
          chunk.in[i][v] = LoadUnit(from + unit * kVectors + v);
        }
      }
    }
  }

  static __device__ __forceinline__ uint4 Quantize(const uint4 (&in)[kVectors],
                                                   float& scale) {
    using Part = Elements<T, uint4>;
    float x[kColumns];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const Part part = Part::From(in[v]);
#pragma unroll
      for (int e = 0; e < Part::kSize; ++e) {
        x[v * Part::kSize + e] = Widen(part.at[e]);
      }
    }
    // Magnitudes are ordered as their bits are, NaN above all.
    uint32_t most = 0;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      most = max(most, __float_as_uint(x[c]) & 0x7FFFFFFF);
    }
#pragma unroll
    for (int other = 1; other < 8; other *= 2) {
      most = max(most, __shfl_xor_sync(kAllLanes, most, other));
    }
    scale = most < 0x7F800000
                ? __fdiv_rn(fmaxf(__uint_as_float(most), 1e-4f), 448.f)
                : __uint_as_float(0x7FC00000);
    const float reciprocal = __frcp_rn(scale);
    uint32_t words[4] = {};
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      constexpr bool kTwice = sizeof(T) == 4;
      const float2 pair = {Quotient<kTwice>(x[c], scale, reciprocal),
                           Quotient<kTwice>(x[c + 1], scale, reciprocal)};
      const uint32_t bits =
          __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
      words[c / 4] |= bits << c % 4 * 8;
    }
    return {words[0], words[1], words[2], words[3]};
  }

  static __device__ __forceinline__ void Finish(const Chunk& chunk,
                                                Units& units) {
    const int32_t lane = threadIdx.x % kWarpSize;
    float scales[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      units[i] = Quantize(chunk.in[i], scales[i]);
    }
    // The eighths of the first four lines and of the next three: to the last
    // line, which has had nothing so far.
    const int32_t from = lane % 4 * 8 + 7;
    const auto eighth = [&](uint32_t first, uint32_t second) {
      first = __shfl_sync(kAllLanes, first, from);
      second = __shfl_sync(kAllLanes, second, from);
      return lane < 28 ? first : second;
    };
    const uint4 eighths = {
        eighth(units[0].x, units[1].x), eighth(units[0].y, units[1].y),
        eighth(units[0].z, units[1].z), eighth(units[0].w, units[1].w)};
    if (lane >= 24) units[1] = eighths;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane % 8 == 7) units[i] = {__float_as_uint(scales[i]), 0, 0, 0};
    }
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_FEW_TOKENS_ROW_SOURCE_CUH_
