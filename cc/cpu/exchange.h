// How the processes of one host exchange the rows of a communicator's calls.
#ifndef JAX_EP_CC_CPU_EXCHANGE_H_
#define JAX_EP_CC_CPU_EXCHANGE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cc/cpu/channel.h"
#include "cc/cpu/moves.h"
#include "cc/cpu/staging.h"
#include "cc/cpu/wire.h"
#include "cc/handshake/wait_limits.h"
#include "cc/layout/staging.h"

namespace jax_ep::cpu {

class Exchange {
 public:
  // By position among the communicator's processes, in the order of their
  // numbers. `memories` are descriptors of staging memory, `sockets` are
  // connected to each process (-1 for this one); all stay the caller's.
  struct Setup {
    std::vector<int> numbers;
    int me;
    WaitLimits limits;
    StagingLayout layout;
    std::vector<int> memories;
    std::vector<int> sockets;
  };

  // One call of one group on this process.
  struct Call {
    CallKey key;
    CallShape shape;
    GroupPlaces places;
    Clock::time_point deadline;
    // Not empty: why the call fails here and, told so, in its other processes.
    std::string refusal;
    // One or more parts of the work, which may run beside each other. As many
    // on every process.
    std::vector<std::unique_ptr<Move>> shares;
    // Both run once at most, on a thread that must not block. `warn`: for what
    // the call waits. `done`, after all shares have ended: empty means success;
    // else what happened to "rank <r>".
    std::function<void(const std::string& what)> warn;
    std::function<void(const std::string& error)> done;
  };

  // nullptr where memory or files could not be had. Throws std::runtime_error
  // where threads could not.
  static std::unique_ptr<Exchange> Create(const Setup& setup);
  // Tells the peers, and fails calls in flight.
  ~Exchange();

  // In a forked child: closes the sockets of every exchange of the parent. The
  // child must not destroy them: their threads are not there.
  static void AbandonAfterFork();

  void Post(Call call);
  int num_channels() const { return static_cast<int>(channels_.size()); }

 private:
  Exchange(const Setup& setup, std::vector<SharedMemory> memories,
           std::vector<int> sockets, int wake);
  void Start(const Setup& setup);
  void Watch();

  Peers peers_;
  std::vector<int> sockets_;
  int wake_;  // eventfd that ends the watching thread
  std::vector<SharedMemory> memories_;
  std::vector<std::unique_ptr<Channel>> channels_;
  std::thread watch_;
};

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CC_CPU_EXCHANGE_H_
