// Bulk copies between global and shared memory (sm_90 and newer): one thread
// asks, the copy engine of the multiprocessor moves.
//
// Bulk copies see memory through the asynchronous proxy. FenceProxy() stands
// wherever they meet ordinary loads and stores of the same bytes.
#ifndef JAX_EP_CC_ROWS_BULK_CUH_
#define JAX_EP_CC_ROWS_BULK_CUH_

#include <cstdint>

namespace jax_ep::bulk {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define JAX_EP_HAS_BULK 1
#else
#define JAX_EP_HAS_BULK 0
#endif

// Whether this code was compiled for a GPU that has bulk copies.
inline constexpr bool kAvailable = JAX_EP_HAS_BULK == 1;

#if JAX_EP_HAS_BULK && defined(__CUDACC__)

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void InitBarrier(uint64_t* barrier,
                                            uint32_t arrivals) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(arrivals)
      : "memory");
}

// Makes initialised barriers visible to the asynchronous proxy.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives and says how many bytes the phase waits for.
__device__ __forceinline__ void ArriveExpecting(uint64_t* barrier,
                                                uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   SharedAddress(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void Arrive(uint64_t* barrier) {
  asm volatile(
      "mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier))
      : "memory");
}

// Whether the phase with this parity is over; may suspend the thread a while.
__device__ __forceinline__ bool TryWait(uint64_t* barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(over)
      : "r"(SharedAddress(barrier)), "r"(parity)
      : "memory");
  return over != 0;
}

__device__ __forceinline__ void WaitBarrier(uint64_t* barrier,
                                            uint32_t parity) {
  while (!TryWait(barrier, parity)) {
  }
}

// Both addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void Load(void* shared, const void* global,
                                     uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

__device__ __forceinline__ void Store(void* global, const void* shared,
                                      uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
          global),
      "r"(SharedAddress(shared)), "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void CommitStores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most kGroups of this thread's groups still read shared memory.
template <int kGroups>
__device__ __forceinline__ void WaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

// Waits until at most kGroups of this thread's groups have still to be made.
// The others are visible to this thread, and to whoever acquires what it
// releases: a proxy fence comes with their completion.
template <int kGroups>
__device__ __forceinline__ void WaitStoresMade() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Waits until all of this thread's stores have been made.
__device__ __forceinline__ void WaitStores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Orders ordinary accesses with those of bulk copies, both ways. Waits for all
// of the thread's accesses: for the ends of a kernel.
__device__ __forceinline__ void FenceProxy() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// The same for global memory alone: waits for none of them.
__device__ __forceinline__ void FenceProxyGlobal() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// The same for shared memory alone: cheap enough for every piece.
__device__ __forceinline__ void FenceProxyShared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#endif

}  // namespace jax_ep::bulk

#endif  // JAX_EP_CC_ROWS_BULK_CUH_
