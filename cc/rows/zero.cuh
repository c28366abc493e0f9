// How threads zero memory together.
#ifndef JAX_EP_CC_ROWS_ZERO_CUH_
#define JAX_EP_CC_ROWS_ZERO_CUH_

#include <cstddef>
#include <cstdint>

#include "cc/rows/rows.cuh"

namespace jax_ep {

template <typename Unit>
__device__ __forceinline__ void ZeroUnits(std::byte* begin, int64_t bytes,
                                          int64_t thread, int64_t threads) {
  Unit* units = reinterpret_cast<Unit*>(begin);
  const int64_t size = bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t at = thread; at < size; at += threads) {
    StoreUnit(units + at, Unit{});
  }
}

// Zeroes `bytes` from `begin` on by `threads` threads, the caller being number
// `thread`.
__device__ __forceinline__ void ZeroBytes(std::byte* begin, int64_t bytes,
                                          int64_t thread, int64_t threads) {
  const int32_t unit = UnitBytes(reinterpret_cast<uint64_t>(begin) |
                                 static_cast<uint64_t>(bytes));
  if (unit == 16) {
    ZeroUnits<uint4>(begin, bytes, thread, threads);
  } else if (unit >= 4) {
    ZeroUnits<uint32_t>(begin, bytes, thread, threads);
  } else {
    ZeroUnits<uint8_t>(begin, bytes, thread, threads);
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_ROWS_ZERO_CUH_
