// The ceilings that dispatch and combine are held against: plain copies of the
// same bytes between GPUs, contiguous, with no plan and no handshake.
// copy_bench.cu launches and times them.
//
// Every GPU holds, for `peers` = number of GPUs - 1 and n bytes a peer:
//   source  [n]         what Store reads, what Sum writes
//   inbox   [peers][n]  region i is written by the i-th next GPU (Store) and
//                       read by it (Sum)
//   local   [n]         the copy that stays (StoreLocal writes, Sum reads)
// Launch shape of the copies: one block an SM, grid = the SM count under test.

#ifndef JAX_EP_BENCHMARKS_COPY_KERNELS_CUH_
#define JAX_EP_BENCHMARKS_COPY_KERNELS_CUH_

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace copy_bench {

constexpr int kMaxGpus = 8;
constexpr int kMaxPeers = kMaxGpus - 1;
constexpr unsigned long long kMaxWaitNs = 5000000000ull;

struct CopyParams {
  uint4* remote[kMaxPeers];  // one region on each peer, nearest peer first
  uint4* source;
  uint4* local;
  uint64_t units;        // 16-byte units a peer
  uint64_t local_units;  // units that also stay here, <= units
  int peers;
};

struct FlagParams {
  uint32_t* remote[kMaxPeers];  // this rank's word on each peer
  uint32_t* own[kMaxPeers];     // the word that each peer writes here
  uint32_t* timed_out;
  uint32_t epoch;
  int peers;
  int rounds;
};

__device__ __forceinline__ uint4 Load(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ unsigned long long NowNs() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
  return t;
}

// Adds the two bfloat16 of a.
__device__ __forceinline__ void Accumulate(float2* acc, uint32_t a) {
  acc->x += __uint_as_float(a << 16);
  acc->y += __uint_as_float(a & 0xffff0000u);
}

__device__ __forceinline__ uint32_t Pack(float2 v) {
  __nv_bfloat162 r = __floats2bfloat162_rn(v.x, v.y);
  return *reinterpret_cast<uint32_t*>(&r);
}

// Reads the source once and stores it to every peer and, if asked, here too.
template <int kThreads, int kUnroll, bool kLocal>
__global__ void __launch_bounds__(kThreads, 1)
    StoreKernel(const __grid_constant__ CopyParams p) {
  constexpr uint64_t kTile = uint64_t{kThreads} * kUnroll;
  for (uint64_t tile = blockIdx.x * kTile; tile < p.units;
       tile += gridDim.x * kTile) {
    const uint64_t first = tile + threadIdx.x;
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint64_t i = first + uint64_t{kThreads} * u;
      if (i < p.units) v[u] = Load(p.source + i);
    }
    for (int peer = 0; peer < p.peers; ++peer) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const uint64_t i = first + uint64_t{kThreads} * u;
        if (i < p.units) p.remote[peer][i] = v[u];
      }
    }
    if (kLocal) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const uint64_t i = first + uint64_t{kThreads} * u;
        if (i < p.local_units) p.local[i] = v[u];
      }
    }
  }
}

// Loads one row piece from every peer and from here, adds in float32, writes.
template <int kThreads, int kUnroll, int kPeers>
__global__ void __launch_bounds__(kThreads, 1)
    SumKernel(const __grid_constant__ CopyParams p) {
  constexpr uint64_t kTile = uint64_t{kThreads} * kUnroll;
  for (uint64_t tile = blockIdx.x * kTile; tile < p.units;
       tile += gridDim.x * kTile) {
    const uint64_t first = tile + threadIdx.x;
    uint4 v[kUnroll][kPeers + 1];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint64_t i = first + uint64_t{kThreads} * u;
      if (i < p.units) {
#pragma unroll
        for (int peer = 0; peer < kPeers; ++peer) {
          v[u][peer] = Load(p.remote[peer] + i);
        }
      }
      if (i < p.local_units) {
        v[u][kPeers] = Load(p.local + i);
      } else {
        v[u][kPeers] = make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint64_t i = first + uint64_t{kThreads} * u;
      if (i >= p.units) continue;
      float2 acc[4] = {};
#pragma unroll
      for (int part = 0; part <= kPeers; ++part) {
        Accumulate(&acc[0], v[u][part].x);
        Accumulate(&acc[1], v[u][part].y);
        Accumulate(&acc[2], v[u][part].z);
        Accumulate(&acc[3], v[u][part].w);
      }
      p.source[i] =
          make_uint4(Pack(acc[0]), Pack(acc[1]), Pack(acc[2]), Pack(acc[3]));
    }
  }
}

// What an operation between GPUs costs before it moves a byte: each rank tells
// every peer, and waits for every peer, once or twice.
// st.release.sys here pairs with ld.acquire.sys of the same word on the peer.
__global__ void HandshakeKernel(const __grid_constant__ FlagParams p) {
  const int peer = threadIdx.x;
  for (int round = 1; round <= p.rounds; ++round) {
    const uint32_t epoch = p.epoch + round;
    if (peer < p.peers) {
      asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p.remote[peer]),
                   "r"(epoch)
                   : "memory");
      const unsigned long long start = NowNs();
      uint32_t seen;
      do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                     : "=r"(seen)
                     : "l"(p.own[peer])
                     : "memory");
        if (NowNs() - start > kMaxWaitNs) {
          *p.timed_out = 1;
          return;
        }
      } while (static_cast<int32_t>(seen - epoch) < 0);
    }
    __syncwarp();
  }
}

__global__ void EmptyKernel() {}

__global__ void GateKernel(const volatile uint32_t* open, uint32_t turn,
                           uint32_t* timed_out) {
  const unsigned long long start = NowNs();
  while (static_cast<int32_t>(*open - turn) < 0) {
    if (NowNs() - start > kMaxWaitNs) {
      *timed_out = 1;
      return;
    }
  }
}

// Pseudo-random bfloat16 in [-2, -1) and [1, 2): nothing is zero or NaN.
__global__ void FillKernel(uint32_t* out, uint64_t words, uint32_t seed) {
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < words;
       i += gridDim.x * uint64_t{blockDim.x}) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed;
    h = (h ^ (h >> 16)) * 0x85ebca6bu;
    h = (h ^ (h >> 13)) * 0xc2b2ae35u;
    h ^= h >> 16;
    out[i] = (h & 0x807f807fu) | 0x3f803f80u;
  }
}

// Counts the words that the last Store or Sum got wrong.
__global__ void CheckKernel(const __grid_constant__ CopyParams p, bool sum,
                            bool local, unsigned long long* wrong) {
  const uint32_t* source = reinterpret_cast<const uint32_t*>(p.source);
  const uint32_t* kept = reinterpret_cast<const uint32_t*>(p.local);
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x;
       i < p.units * 4; i += gridDim.x * uint64_t{blockDim.x}) {
    const bool stays = i < p.local_units * 4;
    bool bad = false;
    float2 acc = {0.f, 0.f};
    for (int peer = 0; peer < p.peers; ++peer) {
      const uint32_t w = reinterpret_cast<const uint32_t*>(p.remote[peer])[i];
      if (sum) {
        Accumulate(&acc, w);
      } else {
        bad |= w != source[i];
      }
    }
    if (sum) {
      if (stays) Accumulate(&acc, kept[i]);
      bad = Pack(acc) != source[i];
    } else if (local && stays) {
      bad |= kept[i] != source[i];
    }
    if (bad) atomicAdd(wrong, 1ull);
  }
}

}  // namespace copy_bench

#endif  // JAX_EP_BENCHMARKS_COPY_KERNELS_CUH_
