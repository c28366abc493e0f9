// Launches and times the kernels of copy_kernels.cuh.
//
// Built at run time by copies.py (nvcc -shared) and driven through ctypes:
// the functions named CopyBench* are its interface. One thread drives all GPUs;
// each GPU has its own stream.
//
// A timing is, on each GPU: a gate (a kernel that waits for a word in host
// memory), an event, `launches` kernels back to back, an event. The gate opens
// when all of it is enqueued, so the GPUs start together and the host is never
// part of the time. Kernels are loaded before a gate is closed, because loading
// one behind a waiting kernel can deadlock. Every wait is bounded.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "copy_kernels.cuh"

namespace copy_bench {
namespace {

// Keep kinds and variants in step with copies.py.
enum Kind { kStore, kStoreLocal, kSum, kLaunch, kHandshake, kHandshakeTwice };
constexpr int kNumKinds = 6;
constexpr int kNumVariants = 3;

std::string g_error;

struct Gpu {
  int device;
  cudaStream_t stream;
  cudaEvent_t start, stop;
  char* memory;  // source, inbox, local
  uint64_t words;
  uint32_t* flags;
  uint32_t* timed_out;
  unsigned long long* wrong;
  CopyParams copy;
  FlagParams flag;
};

struct Bench {
  std::vector<Gpu> gpus;
  uint32_t* gate = nullptr;  // host memory
  uint32_t turn = 0;
  uint32_t epoch = 0;
};

// The best of a few shapes counts: 1024 threads with 4 or 8 loads in flight
// each, 512 or 768 with 8 or 16. Sum needs peers + 1 loads for each store.
template <int kThreads, int kLoads, int kPeers>
void LaunchSumShape(const Gpu& g, int num_sms) {
  constexpr int kUnroll = kLoads > kPeers ? kLoads / (kPeers + 1) : 1;
  SumKernel<kThreads, kUnroll, kPeers>
      <<<num_sms, kThreads, 0, g.stream>>>(g.copy);
}

template <int kPeers>
void LaunchSum(const Gpu& g, int num_sms, int variant) {
  if (variant == 0) {
    LaunchSumShape<1024, 8, kPeers>(g, num_sms);
  } else if (variant == 1) {
    LaunchSumShape<512, 16, kPeers>(g, num_sms);
  } else {
    LaunchSumShape<1024, 4, kPeers>(g, num_sms);
  }
}

template <bool kLocal>
void LaunchStore(const Gpu& g, int num_sms, int variant) {
  if (variant == 0) {
    StoreKernel<1024, 4, kLocal><<<num_sms, 1024, 0, g.stream>>>(g.copy);
  } else if (variant == 1) {
    StoreKernel<512, 8, kLocal><<<num_sms, 512, 0, g.stream>>>(g.copy);
  } else {
    StoreKernel<768, 8, kLocal><<<num_sms, 768, 0, g.stream>>>(g.copy);
  }
}

void Launch(const Gpu& g, Kind kind, int variant, int num_sms, uint32_t epoch) {
  if (kind == kStore) {
    LaunchStore<false>(g, num_sms, variant);
  } else if (kind == kStoreLocal) {
    LaunchStore<true>(g, num_sms, variant);
  } else if (kind == kLaunch) {
    EmptyKernel<<<num_sms, 128, 0, g.stream>>>();
  } else if (kind == kSum) {
    switch (g.copy.peers) {
      case 0:
        return LaunchSum<0>(g, num_sms, variant);
      case 1:
        return LaunchSum<1>(g, num_sms, variant);
      case 2:
        return LaunchSum<2>(g, num_sms, variant);
      case 3:
        return LaunchSum<3>(g, num_sms, variant);
      case 4:
        return LaunchSum<4>(g, num_sms, variant);
      case 5:
        return LaunchSum<5>(g, num_sms, variant);
      case 6:
        return LaunchSum<6>(g, num_sms, variant);
      default:
        return LaunchSum<7>(g, num_sms, variant);
    }
  } else {
    FlagParams p = g.flag;
    p.epoch = epoch;
    p.rounds = kind == kHandshake ? 1 : 2;
    HandshakeKernel<<<1, 32, 0, g.stream>>>(p);
  }
}

bool Ok(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return true;
  if (g_error.empty()) {
    g_error = std::string(what) + ": " + cudaGetErrorString(e);
  }
  cudaGetLastError();  // a failure here is reported once, not to the next call
  return false;
}

#define CB_TRY(call)                      \
  do {                                    \
    if (!Ok((call), #call)) return false; \
  } while (0)

// Enqueues `launches` kernels on every GPU behind a gate, opens it and waits.
bool RunOnce(Bench* b, Kind kind, int variant, int num_sms, int launches,
             float* slowest_us) {
  const uint32_t turn = ++b->turn;
  for (Gpu& g : b->gpus) {
    CB_TRY(cudaSetDevice(g.device));
    GateKernel<<<1, 1, 0, g.stream>>>(b->gate, turn, g.timed_out);
    CB_TRY(cudaEventRecord(g.start, g.stream));
    for (int i = 0; i < launches; ++i) {
      Launch(g, kind, variant, num_sms, b->epoch + 2 * i);
    }
    CB_TRY(cudaEventRecord(g.stop, g.stream));
    CB_TRY(cudaGetLastError());
  }
  b->epoch += 2 * launches;
  __atomic_store_n(b->gate, turn, __ATOMIC_RELEASE);
  *slowest_us = 0;
  for (Gpu& g : b->gpus) {
    float ms = 0;
    uint32_t timed_out = 0;
    CB_TRY(cudaSetDevice(g.device));
    CB_TRY(cudaStreamSynchronize(g.stream));
    CB_TRY(cudaEventElapsedTime(&ms, g.start, g.stop));
    CB_TRY(cudaMemcpy(&timed_out, g.timed_out, 4, cudaMemcpyDeviceToHost));
    if (timed_out) {
      g_error = "a wait on GPU " + std::to_string(g.device) + " timed out";
      return false;
    }
    *slowest_us = std::max(*slowest_us, ms * 1000 / launches);
  }
  return true;
}

bool Open(Bench* b, int count, const int* devices, uint64_t bytes,
          uint64_t local_bytes) {
  const int peers = count - 1;
  const uint64_t n = std::max<uint64_t>((bytes + 15) / 16, 1) * 16;
  b->gpus.resize(count);
  CB_TRY(cudaHostAlloc(&b->gate, 4, cudaHostAllocPortable));
  *b->gate = 0;
  for (int r = 0; r < count; ++r) {
    Gpu& g = b->gpus[r];
    g = Gpu{};
    g.device = devices[r];
    CB_TRY(cudaSetDevice(g.device));
    for (int q = 0; q < count; ++q) {
      if (q == r) continue;
      const cudaError_t e = cudaDeviceEnablePeerAccess(devices[q], 0);
      if (e == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
      } else {
        CB_TRY(e);
      }
    }
    CB_TRY(cudaStreamCreateWithFlags(&g.stream, cudaStreamNonBlocking));
    CB_TRY(cudaEventCreate(&g.start));
    CB_TRY(cudaEventCreate(&g.stop));
    CB_TRY(cudaMalloc(&g.memory, n * (peers + 2)));
    CB_TRY(cudaMalloc(&g.flags, kMaxGpus * 128));
    CB_TRY(cudaMalloc(&g.timed_out, 16));
    CB_TRY(cudaMemset(g.flags, 0, kMaxGpus * 128));
    CB_TRY(cudaMemset(g.timed_out, 0, 16));
    g.wrong = reinterpret_cast<unsigned long long*>(g.timed_out + 2);
    g.words = n * (peers + 2) / 4;
    CB_TRY(cudaDeviceSynchronize());
    cudaFuncAttributes unused;  // asking for them loads the kernel
    CB_TRY(cudaFuncGetAttributes(&unused, GateKernel));
    CB_TRY(cudaFuncGetAttributes(&unused, HandshakeKernel));
    CB_TRY(cudaFuncGetAttributes(&unused, EmptyKernel));
  }
  for (int r = 0; r < count; ++r) {
    Gpu& g = b->gpus[r];
    g.copy.peers = g.flag.peers = peers;
    g.copy.units = n / 16;
    g.copy.local_units = std::min<uint64_t>(local_bytes / 16, n / 16);
    g.copy.source = reinterpret_cast<uint4*>(g.memory);
    g.copy.local = reinterpret_cast<uint4*>(g.memory + n * (peers + 1));
    g.flag.timed_out = g.timed_out;
    for (int i = 0; i < peers; ++i) {  // start with the next rank: no hot spot
      const int q = (r + 1 + i) % count;
      g.copy.remote[i] = reinterpret_cast<uint4*>(
          b->gpus[q].memory + n * (1 + (r - q - 1 + count) % count));
      g.flag.remote[i] = b->gpus[q].flags + 32 * r;
      g.flag.own[i] = g.flags + 32 * q;
    }
  }
  return true;
}

// Counts wrong words of the last run of `kind`, over all GPUs.
bool Check(Bench* b, Kind kind, int64_t* wrong) {
  *wrong = 0;
  for (Gpu& g : b->gpus) {
    unsigned long long count = 0;
    CB_TRY(cudaSetDevice(g.device));
    CB_TRY(cudaMemsetAsync(g.wrong, 0, 8, g.stream));
    CheckKernel<<<256, 256, 0, g.stream>>>(g.copy, kind == kSum,
                                           kind == kStoreLocal, g.wrong);
    CB_TRY(cudaGetLastError());
    CB_TRY(cudaStreamSynchronize(g.stream));
    CB_TRY(cudaMemcpy(&count, g.wrong, 8, cudaMemcpyDeviceToHost));
    *wrong += static_cast<int64_t>(count);
  }
  return true;
}

void Close(Bench* b) {
  for (Gpu& g : b->gpus) {
    cudaSetDevice(g.device);
    if (g.stream) cudaStreamSynchronize(g.stream);
    cudaFree(g.memory);
    cudaFree(g.flags);
    cudaFree(g.timed_out);
    if (g.start) cudaEventDestroy(g.start);
    if (g.stop) cudaEventDestroy(g.stop);
    if (g.stream) cudaStreamDestroy(g.stream);
  }
  cudaFreeHost(b->gate);
  cudaGetLastError();
  delete b;
}

// Fills all memory with new values, so that what an earlier run wrote cannot
// pass for this one's, then loads the kernel on every GPU by running it once,
// ungated: copies wait for nobody. Open loaded the kernels that do wait.
bool Prepare(Bench* b, Kind kind, int variant, int num_sms) {
  if (kind > kSum) return true;
  for (Gpu& g : b->gpus) {
    CB_TRY(cudaSetDevice(g.device));
    FillKernel<<<256, 256, 0, g.stream>>>(reinterpret_cast<uint32_t*>(g.memory),
                                          g.words,
                                          977u * (b->turn + g.device + 1));
    CB_TRY(cudaGetLastError());
    CB_TRY(cudaStreamSynchronize(g.stream));
  }
  for (Gpu& g : b->gpus) {
    CB_TRY(cudaSetDevice(g.device));
    Launch(g, kind, variant, num_sms, 0);
    CB_TRY(cudaGetLastError());
  }
  for (Gpu& g : b->gpus) {
    CB_TRY(cudaSetDevice(g.device));
    CB_TRY(cudaStreamSynchronize(g.stream));
  }
  return true;
}

// Leaves the calling thread on the GPU that it was on.
struct KeepDevice {
  int device = 0;
  KeepDevice() { cudaGetDevice(&device); }
  ~KeepDevice() { cudaSetDevice(device); }
};

}  // namespace
}  // namespace copy_bench

extern "C" {

// Text of the last failure of a function below.
const char* CopyBenchError() { return copy_bench::g_error.c_str(); }

int CopyBenchNumVariants() { return copy_bench::kNumVariants; }

// bytes go to each peer, local_bytes (no more than bytes) stay. Null: failed.
void* CopyBenchOpen(int count, const int* devices, uint64_t bytes,
                    uint64_t local_bytes) {
  using namespace copy_bench;
  g_error.clear();
  if (count < 1 || count > kMaxGpus) {
    g_error = "1 to " + std::to_string(kMaxGpus) + " GPUs are supported";
    return nullptr;
  }
  KeepDevice keep;
  Bench* b = new Bench;
  if (Open(b, count, devices, bytes, local_bytes)) return b;
  Close(b);
  return nullptr;
}

void CopyBenchClose(void* bench) {
  copy_bench::KeepDevice keep;
  copy_bench::Close(static_cast<copy_bench::Bench*>(bench));
}

// Fills us[reps] with the slowest GPU's time a launch. 0: failed.
int CopyBenchRun(void* bench, int kind, int variant, int num_sms, int launches,
                 int reps, float* us) {
  using namespace copy_bench;
  g_error.clear();
  if (kind < 0 || kind >= kNumKinds || launches < 1 || launches > 256) {
    g_error = "no such kind, or not 1 to 256 launches";
    return 0;
  }
  KeepDevice keep;
  Bench* b = static_cast<Bench*>(bench);
  const Kind k = static_cast<Kind>(kind);
  if (!Prepare(b, k, variant, num_sms)) return 0;
  for (int i = -1; i < reps; ++i) {  // the first one is not kept
    float t;
    if (!RunOnce(b, k, variant, num_sms, launches, &t)) return 0;
    if (i >= 0) us[i] = t;
  }
  return 1;
}

// Words that the last run of this kind got wrong, or -1: failed.
int64_t CopyBenchCheck(void* bench, int kind) {
  using namespace copy_bench;
  g_error.clear();
  KeepDevice keep;
  int64_t wrong;
  const Kind k = static_cast<Kind>(kind);
  return Check(static_cast<Bench*>(bench), k, &wrong) ? wrong : -1;
}

}  // extern "C"
