// The wire between nodes over NCCL: a communicator of NCCL's for each rail.
//
// A transfer is a group of sends and receives on a stream of its own, between
// two marks (cc/nodes/gather_rows.h) by which a thread of the host watches it:
// one that stays in the air for too long, or of which NCCL reports an error, is
// given up. NCCL's kernels then end, and the mark behind them traps, so that
// nobody sees rows that did not come.
#ifndef JAX_EP_CC_NODES_NCCL_WIRE_H_
#define JAX_EP_CC_NODES_NCCL_WIRE_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cc/handshake/mesh_place.h"
#include "cc/handshake/wait_limits.h"
#include "cc/nodes/gather_rows.h"
#include "cc/nodes/nccl.h"
#include "cc/nodes/node_moves.h"
#include "cc/nodes/wire.h"

namespace jax_ep {

// One local device on its rail.
struct WirePlace {
  int32_t ordinal;
  int32_t rank;  // of the communicator, for messages
  int32_t node;
  int32_t num_nodes;
  MeshPlace mesh;
  nccl::UniqueId id;  // of the rail
};

class NcclWire final : public Wire {
 public:
  explicit NcclWire(const WirePlace& place) : place_(place) {}
  NcclWire(const NcclWire&) = delete;
  NcclWire& operator=(const NcclWire&) = delete;
  ~NcclWire() override;

  std::string Exchange(const std::vector<WireTransfer>& transfers) override;
  cudaStream_t stream() const override { return stream_; }

  const WirePlace& place() const { return place_; }
  const NodeEvents& events() const { return events_; }
  // Whose transfers follow, for messages. Under mutex(), as they.
  void Begin(const char* operation, int64_t channel) {
    operation_ = operation;
    channel_ = channel;
  }
  // Held while an operation is enqueued: events and NCCL's communicator are for
  // one thread at a time.
  std::timed_mutex& mutex() { return mutex_; }

 private:
  friend class NcclRails;

  // Streams, events and marks.
  std::string Allocate();
  // What is wrong with the transfer in the air; says before that it takes long.
  // The watching thread's; does not take mutex_, because whoever enqueues may
  // be the one that does not get on.
  std::string Look(Clock::time_point now, const WaitLimits& limits);
  // "jax_ep node_dispatch (channel 7): rank 0 on node 1", of a transfer.
  std::string Who(uint64_t transfer);
  // Ends what is in the air. What stands behind it traps.
  void GiveUp(const std::string& reason);
  std::string Failure(const char* step, int result) const;

  const WirePlace place_;
  std::timed_mutex mutex_;
  nccl::Communicator* comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  NodeEvents events_ = {};
  WireProgress* progress_ = nullptr;      // as the host sees it
  WireProgress* progress_gpu_ = nullptr;  // as the GPU does
  uint64_t count_ = 0;                    // of transfers enqueued
  const char* operation_ = "";
  int64_t channel_ = 0;
  std::atomic<bool> given_up_{false};
  // The watching thread's: what it saw last and since when.
  uint64_t seen_begun_ = 0;
  uint64_t seen_ended_ = 0;
  Clock::time_point since_;
  bool warned_ = false;
  // Whose the transfers are that have not ended; its lock is held by nobody who
  // waits.
  struct Transfer {
    uint64_t number;
    const char* operation;
    int64_t channel;
  };
  std::mutex transfers_mutex_;
  std::deque<Transfer> transfers_;
};

// The wires of a process's devices in one communicator.
class NcclRails {
 public:
  NcclRails() = default;
  NcclRails(const NcclRails&) = delete;
  NcclRails& operator=(const NcclRails&) = delete;
  ~NcclRails();

  // Connects all rails and sends a word both ways between all nodes, so that no
  // later transfer has to connect. Blocks until every rank of the rails is
  // here. Says what went wrong, "" where nothing did.
  std::string Connect(const std::vector<WirePlace>& places,
                      Clock::duration setup_timeout, const WaitLimits& limits);

  // nullptr where the device is not the communicator's.
  NcclWire* WireOn(int32_t ordinal) const;

 private:
  std::string Initialize();
  std::string Test(Clock::duration timeout);
  void Watch();

  std::map<int32_t, std::unique_ptr<NcclWire>> wires_;
  WaitLimits limits_ = {};
  std::mutex mutex_;
  std::condition_variable stops_;
  bool stopping_ = false;
  std::thread watcher_;
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_NODES_NCCL_WIRE_H_
