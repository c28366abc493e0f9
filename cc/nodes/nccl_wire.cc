#include "cc/nodes/nccl_wire.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "cc/current_device.h"
#include "cc/threads.h"

namespace jax_ep {
namespace {

constexpr std::chrono::milliseconds kLookEvery(50);

std::string Problem(int32_t ordinal, const char* step, cudaError_t status) {
  return "GPU " + std::to_string(ordinal) + ": " + step +
         " failed: " + cudaGetErrorString(status);
}

template <typename Word>
Word Load(const Word& word) {
  return *static_cast<const volatile Word*>(&word);
}

}  // namespace

NcclWire::~NcclWire() {
  const OnDevice current(place_.ordinal);
  if (current.status() != cudaSuccess) return;
  // Not abort(): what has left the GPU may still be on its way out.
  if (comm_ != nullptr && !given_up_) nccl::Loaded()->destroy(comm_);
  for (cudaEvent_t event : events_.packed) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  for (cudaEvent_t event : events_.crossed) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
  if (progress_ != nullptr) cudaFreeHost(progress_);
}

std::string NcclWire::Failure(const char* step, int result) const {
  return "rank " + std::to_string(place_.rank) + " on node " +
         std::to_string(place_.node) + ": NCCL: " + step + ": " +
         nccl::Loaded()->get_error_string(result);
}

std::string NcclWire::Allocate() {
  const OnDevice current(place_.ordinal);
  cudaError_t status = current.status();
  const auto check = [&](cudaError_t next) {
    if (status == cudaSuccess) status = next;
  };
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  // High priority: NCCL's few blocks take their places before a large kernel's.
  check(
      cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
  for (int32_t i = 0; i < kMaxInFlight; ++i) {
    check(cudaEventCreateWithFlags(&events_.packed[i], cudaEventDisableTiming));
    check(
        cudaEventCreateWithFlags(&events_.crossed[i], cudaEventDisableTiming));
  }
  if (status == cudaSuccess) {
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, sizeof(WireProgress), cudaHostAllocMapped));
    if (status == cudaSuccess) {
      progress_ = new (memory) WireProgress{};
      check(cudaHostGetDevicePointer(&memory, progress_, 0));
      progress_gpu_ = static_cast<WireProgress*>(memory);
    }
  }
  // Loads the kernels, as set-up does with all others.
  for (const void* kernel :
       {GatherRowsKernelAddress(), WireCheckKernelAddress(),
        WireBegunKernelAddress(), WireEndedKernelAddress()}) {
    cudaFuncAttributes attributes;
    if (status == cudaSuccess) {
      check(cudaFuncGetAttributes(&attributes, kernel));
    }
  }
  return status == cudaSuccess
             ? ""
             : Problem(place_.ordinal, "setting the wire up", status);
}

std::string NcclWire::Exchange(const std::vector<WireTransfer>& transfers) {
  const nccl::Functions& nccl = *nccl::Loaded();
  if (given_up_) {
    return "rank " + std::to_string(place_.rank) +
           ": the wire to other nodes has failed before";
  }
  const uint64_t number = count_ + 1;
  cudaError_t status = LaunchWireBegun(progress_gpu_, number, stream_);
  if (status != cudaSuccess) return cudaGetErrorString(status);
  count_ = number;
  {
    std::lock_guard<std::mutex> lock(transfers_mutex_);
    transfers_.push_back({number, operation_, channel_});
  }
  int result = nccl.group_start();
  const char* step = "ncclGroupStart";
  const auto run = [&](const char* name, int next) {
    if (result != nccl::kSuccess) return;
    result = next;
    step = name;
  };
  for (const WireTransfer& transfer : transfers) {
    for (const WirePiece& piece : transfer.pieces) {
      if (result != nccl::kSuccess || piece.bytes == 0) continue;
      run("ncclSend", nccl.send(piece.out, piece.bytes, nccl::kByte,
                                transfer.to, comm_, stream_));
      run("ncclRecv", nccl.receive(piece.in, piece.bytes, nccl::kByte,
                                   transfer.from, comm_, stream_));
    }
  }
  // A group that was begun has to end.
  const int ended = nccl.group_end();
  run("ncclGroupEnd", ended);
  if (result != nccl::kSuccess) return Failure(step, result);
  status = LaunchWireEnded(progress_gpu_, number, stream_);
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

std::string NcclWire::Who(uint64_t transfer) {
  std::lock_guard<std::mutex> lock(transfers_mutex_);
  std::string who = "jax_ep";
  for (const Transfer& one : transfers_) {
    if (one.number != transfer) continue;
    who += std::string(" ") + one.operation + " (channel " +
           std::to_string(one.channel) + ")";
  }
  return who + ": rank " + std::to_string(place_.rank) + " on node " +
         std::to_string(place_.node);
}

std::string NcclWire::Look(Clock::time_point now, const WaitLimits& limits) {
  const uint64_t begun = Load(progress_->begun);
  const uint64_t ended = Load(progress_->ended);
  if (begun != ended) {
    // A peer may end before this rank does; that matters when it is needed.
    int error = nccl::kSuccess;
    const int asked = nccl::Loaded()->get_async_error(comm_, &error);
    if (asked != nccl::kSuccess) return Failure("ncclCommGetAsyncError", asked);
    if (error != nccl::kSuccess && error != nccl::kInProgress) {
      return Failure("a peer is lost", error);
    }
  }
  if (begun == ended || begun != seen_begun_ || ended != seen_ended_) {
    seen_begun_ = begun;
    seen_ended_ = ended;
    since_ = now;
    warned_ = false;
    std::lock_guard<std::mutex> lock(transfers_mutex_);
    while (!transfers_.empty() && transfers_.front().number <= ended) {
      transfers_.pop_front();
    }
    return "";
  }
  const std::string number = "(transfer " + std::to_string(begun) + ")";
  if (limits.Warns() && !warned_ && now - since_ >= limits.warn_after) {
    warned_ = true;
    limits.Warn(Who(begun), /*several=*/false,
                "missing: its peers on other nodes " + number);
  }
  if (now - since_ < limits.timeout) return "";
  return "rank " + std::to_string(place_.rank) + " on node " +
         std::to_string(place_.node) + " waited " + InSeconds(limits.timeout) +
         " for its peers on other nodes " + number;
}

void NcclWire::GiveUp(const std::string& reason) {
  std::fprintf(stderr, "jax_ep: %s; the wire between nodes is given up\n",
               reason.c_str());
  std::fflush(stderr);
  *static_cast<volatile uint32_t*>(&progress_->failed) = 1;
  given_up_ = true;
  // Nobody may be using what abort() frees, but for a thread that waits inside
  // NCCL: only this lets it go on.
  std::unique_lock<std::timed_mutex> idle(mutex_, std::chrono::seconds(1));
  nccl::Loaded()->abort(comm_);
}

NcclRails::~NcclRails() {
  // Watched on: what does not end is given up.
  for (const auto& [ordinal, wire] : wires_) {
    const OnDevice current(ordinal);
    if (current.status() == cudaSuccess && wire->stream_ != nullptr) {
      cudaStreamSynchronize(wire->stream_);
    }
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  stops_.notify_all();
  if (watcher_.joinable()) watcher_.join();
}

NcclWire* NcclRails::WireOn(int32_t ordinal) const {
  const auto found = wires_.find(ordinal);
  return found == wires_.end() ? nullptr : found->second.get();
}

std::string NcclRails::Connect(const std::vector<WirePlace>& places,
                               Clock::duration setup_timeout,
                               const WaitLimits& limits) {
  limits_ = limits;
  for (const WirePlace& place : places) {
    auto wire = std::make_unique<NcclWire>(place);
    const std::string problem = wire->Allocate();
    if (!problem.empty()) return problem;
    wires_[place.ordinal] = std::move(wire);
  }
  std::string problem = Initialize();
  if (!problem.empty()) return problem;
  try {
    watcher_ = StartThread([this] { Watch(); });
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return Test(setup_timeout);
}

std::string NcclRails::Initialize() {
  const nccl::Functions& nccl = *nccl::Loaded();
  // One thread for all devices: in a group, else the first would wait for the
  // others for ever.
  int result = nccl.group_start();
  for (const auto& [ordinal, wire] : wires_) {
    const OnDevice current(ordinal);
    if (current.status() != cudaSuccess) {
      nccl.group_end();
      return Problem(ordinal, "cudaSetDevice", current.status());
    }
    if (result == nccl::kSuccess) {
      result = nccl.init_rank(&wire->comm_, wire->place_.num_nodes,
                              wire->place_.id, wire->place_.node);
    }
  }
  const int ended = nccl.group_end();
  if (result == nccl::kSuccess) result = ended;
  if (result == nccl::kSuccess) return "";
  // What NCCL has left behind of them is not known.
  for (const auto& [ordinal, wire] : wires_) wire->comm_ = nullptr;
  return wires_.begin()->second->Failure("ncclCommInitRank", result);
}

std::string NcclRails::Test(Clock::duration timeout) {
  struct Words {
    uint64_t* gpu = nullptr;
    std::vector<uint64_t> host;
  };
  std::map<int32_t, Words> words;
  std::string problem;
  const nccl::Functions& nccl = *nccl::Loaded();
  // [node]: what goes there, then what comes from there.
  int result = nccl.group_start();
  for (const auto& [ordinal, wire] : wires_) {
    const OnDevice current(ordinal);
    Words& mine = words[ordinal];
    const int32_t nodes = wire->place_.num_nodes;
    const int64_t bytes = 2 * nodes * sizeof(uint64_t);
    mine.host.assign(2 * nodes, 0);
    for (int32_t node = 0; node < nodes; ++node) {
      mine.host[node] = uint64_t{1} << 32 | wire->place_.node << 16 | node;
    }
    cudaError_t status = cudaMalloc(reinterpret_cast<void**>(&mine.gpu), bytes);
    if (status == cudaSuccess) {
      status = cudaMemcpyAsync(mine.gpu, mine.host.data(), bytes,
                               cudaMemcpyHostToDevice, wire->stream_);
    }
    if (status != cudaSuccess) {
      problem = Problem(ordinal, "testing the wire", status);
      break;
    }
    for (int32_t node = 0; node < nodes; ++node) {
      if (node == wire->place_.node || result != nccl::kSuccess) continue;
      result = nccl.send(mine.gpu + node, sizeof(uint64_t), nccl::kByte, node,
                         wire->comm_, wire->stream_);
      if (result != nccl::kSuccess) continue;
      result = nccl.receive(mine.gpu + nodes + node, sizeof(uint64_t),
                            nccl::kByte, node, wire->comm_, wire->stream_);
    }
  }
  const int ended = nccl.group_end();
  if (result == nccl::kSuccess) result = ended;
  for (auto& [ordinal, mine] : words) {
    const OnDevice current(ordinal);
    NcclWire& wire = *WireOn(ordinal);
    if (problem.empty() && result != nccl::kSuccess) {
      problem = wire.Failure("testing the wire", result);
    }
    const Clock::time_point deadline = Clock::now() + timeout;
    cudaError_t status = cudaStreamQuery(wire.stream_);
    while (problem.empty() && status == cudaErrorNotReady) {
      if (Clock::now() > deadline) {
        problem = "rank " + std::to_string(wire.place_.rank) +
                  ": no word came over the wire from other nodes";
        wire.GiveUp(problem);
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      status = cudaStreamQuery(wire.stream_);
    }
    const int32_t nodes = wire.place_.num_nodes;
    if (problem.empty()) {
      status = cudaMemcpy(mine.host.data(), mine.gpu,
                          mine.host.size() * sizeof(uint64_t),
                          cudaMemcpyDeviceToHost);
      if (status != cudaSuccess) {
        problem = Problem(ordinal, "testing the wire", status);
      }
    }
    for (int32_t node = 0; problem.empty() && node < nodes; ++node) {
      const uint64_t right = uint64_t{1} << 32 | node << 16 | wire.place_.node;
      if (node != wire.place_.node && mine.host[nodes + node] != right) {
        problem = "rank " + std::to_string(wire.place_.rank) +
                  ": what came over the wire from node " +
                  std::to_string(node) + " is not what it sent";
      }
    }
    cudaFree(mine.gpu);
  }
  return problem;
}

void NcclRails::Watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stops_.wait_for(lock, kLookEvery, [this] { return stopping_; })) {
    for (const auto& [ordinal, wire] : wires_) {
      if (wire->given_up_) continue;
      const std::string problem = wire->Look(Clock::now(), limits_);
      if (!problem.empty()) wire->GiveUp(problem);
    }
  }
}

}  // namespace jax_ep
