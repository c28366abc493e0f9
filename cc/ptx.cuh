// PTX, one instruction a function. All carry a "memory" clobber where order
// matters: the compiler must not move accesses across them.
#ifndef JAX_EP_CC_PTX_CUH_
#define JAX_EP_CC_PTX_CUH_

#include <cstdint>

namespace jax_ep::ptx {

// Later accesses of this thread see what the releasing thread had seen. System
// scope: the writer may be another GPU.
__device__ __forceinline__ uint64_t LoadAcquireSys(const uint64_t* p) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
               : "=l"(value)
               : "l"(p)
               : "memory");
  return value;
}

// Whoever acquires the value sees all that this thread had seen before.
__device__ __forceinline__ void StoreReleaseSys(uint64_t* p, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value)
               : "memory");
}

// Relaxed stores that follow are releases: of all that this thread had seen
// before.
__device__ __forceinline__ void FenceSys() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// A word that is its own message: no order with other accesses.
__device__ __forceinline__ void StoreRelaxedSys(uint64_t* p, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value)
               : "memory");
}

// A lane's 16 bytes of a line of 128, all of which eight neighbouring lanes
// store, or load, in one instruction. Of 16 bytes all are seen, or none: PTX
// promises that of one 128-bit access, and not of a vector of four words. A
// line is seen whole between GPUs on NVLink; see cc/few_tokens/window.cuh.
__device__ __forceinline__ void StoreLine(uint4* p, uint4 v) {
  const uint64_t low = uint64_t{v.y} << 32 | v.x;
  const uint64_t high = uint64_t{v.w} << 32 | v.z;
  asm volatile(
      "{\n\t"
      ".reg .b128 all;\n\t"
      "mov.b128 all, {%1, %2};\n\t"
      "st.relaxed.sys.global.b128 [%0], all;\n\t"
      "}" ::"l"(p),
      "l"(low), "l"(high)
      : "memory");
}
__device__ __forceinline__ uint4 LoadLine(const uint4* p) {
  uint64_t low, high;
  asm volatile(
      "{\n\t"
      ".reg .b128 all;\n\t"
      "ld.relaxed.sys.global.b128 all, [%2];\n\t"
      "mov.b128 {%0, %1}, all;\n\t"
      "}"
      : "=l"(low), "=l"(high)
      : "l"(p)
      : "memory");
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
          static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)};
}

// Pairs with StoreRelaxedSys. Not served from the first-level cache.
__device__ __forceinline__ uint64_t LoadRelaxedSys(const uint64_t* p) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];"
               : "=l"(value)
               : "l"(p)
               : "memory");
  return value;
}

// Adds without an answer. The word may stand on a peer.
__device__ __forceinline__ void AddRelaxedSys(int32_t* p, int32_t value) {
  asm volatile("red.relaxed.sys.global.add.s32 [%0], %1;" ::"l"(p), "r"(value)
               : "memory");
}

// The same for a word of this GPU's.
__device__ __forceinline__ void AddRelaxedGpu(uint32_t* p, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value)
               : "memory");
}

// Stores `value`; returns the old one.
__device__ __forceinline__ uint32_t ExchangeRelaxedGpu(uint32_t* p,
                                                       uint32_t value) {
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(value)
               : "memory");
  return old;
}

// Sets the bits of `value`; returns the old value.
__device__ __forceinline__ uint64_t OrRelaxedGpu(uint64_t* p, uint64_t value) {
  uint64_t old;
  asm volatile("atom.relaxed.gpu.global.or.b64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(p), "l"(value)
               : "memory");
  return old;
}

// Adds one, or wraps to 0 past `limit`; returns the old value. What the threads
// that came before had seen is visible afterwards, and so on.
__device__ __forceinline__ uint32_t IncrementAcqRelGpu(uint32_t* p,
                                                       uint32_t limit) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(limit)
               : "memory");
  return old;
}

// The same for handing out numbers: no order with other accesses.
__device__ __forceinline__ uint32_t IncrementRelaxedGpu(uint32_t* p,
                                                        uint32_t limit) {
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(limit)
               : "memory");
  return old;
}

// Adds one, or wraps to 0 past `limit`, to a word in shared memory; returns the
// old value. Acquires and releases between the warps of a block.
__device__ __forceinline__ uint32_t IncrementAcqRelCta(uint32_t* p,
                                                       uint32_t limit) {
  uint32_t old;
  asm volatile("atom.acq_rel.cta.shared.inc.u32 %0, [%1], %2;"
               : "=r"(old)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(p))),
                 "r"(limit)
               : "memory");
  return old;
}

// Acquire and release between the warps of a block, through shared memory.
__device__ __forceinline__ uint32_t LoadAcquireCta(const uint32_t* p) {
  uint32_t value;
  asm volatile("ld.acquire.cta.u32 %0, [%1];"
               : "=r"(value)
               : "l"(p)
               : "memory");
  return value;
}
__device__ __forceinline__ void StoreReleaseCta(uint32_t* p, uint32_t value) {
  asm volatile("st.release.cta.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// Stores `value` where the word is 0; returns the old value. Acquires what the
// thread that released the 0 had seen.
__device__ __forceinline__ uint64_t TakeAcquireGpu(uint64_t* p,
                                                   uint64_t value) {
  uint64_t old;
  asm volatile("atom.acquire.gpu.global.cas.b64 %0, [%1], 0, %2;"
               : "=l"(old)
               : "l"(p), "l"(value)
               : "memory");
  return old;
}

// Goes on when the load of `value`, which is not 0, has answered.
__device__ __forceinline__ void AwaitNonzero(uint32_t value) {
  asm volatile(
      "{\n\t"
      ".reg .pred zero;\n\t"
      "setp.eq.u32 zero, %0, 0;\n\t"
      "@zero trap;\n\t"
      "}" ::"r"(value)
      : "memory");
}

// Some whole warps of a block wait for each other, `threads` threads in all.
// `barrier` is one of 1 to 15; 0 is __syncthreads().
__device__ __forceinline__ void SyncThreads(int32_t barrier, int32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A warp's share of such a barrier, for which it does not wait.
__device__ __forceinline__ void ArriveThreads(int32_t barrier,
                                              int32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Nanoseconds, the same clock on all multiprocessors of a GPU.
__device__ __forceinline__ uint64_t GlobalTimer() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Rows are read once: kept out of the first-level cache.
__device__ __forceinline__ uint4 LoadStreaming(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ void StoreStreaming(uint4* p, uint4 v) {
  asm volatile(
      "st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}

// A copy of 16, or 4, bytes to shared memory that holds no registers. It
// belongs to the thread's open group, until that is committed.
__device__ __forceinline__ void CopyAsync(uint4* shared, const uint4* global) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
               "l"(global)
               : "memory");
}
__device__ __forceinline__ void CopyAsync(int32_t* shared,
                                          const int32_t* global) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global)
               : "memory");
}
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most kGroups of this thread's groups are still on their way.
// The others' bytes are then here for this thread.
template <int kGroups>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Two numbers rounded to nearest even, the first in the low half.
__device__ __forceinline__ uint32_t RoundToBf16Pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ uint32_t RoundToF16Pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace jax_ep::ptx

#endif  // JAX_EP_CC_PTX_CUH_
