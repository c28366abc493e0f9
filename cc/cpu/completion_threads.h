// Threads that end calls.
//
// Ending a call runs the rest of that device's program on the same thread, and
// that may block, say in one of XLA's collectives, until other devices come
// along. So each end gets a thread of its own: idle ones are used again, and
// where none is idle a new one is started. A pool of any fixed size would
// deadlock.
//
// Where the system gives no thread, ends wait their turn: for a thread that has
// done with another end, or until one can be started, which is tried again and
// again. A call whose time is up meanwhile ends in an error.
#ifndef JAX_EP_CC_CPU_COMPLETION_THREADS_H_
#define JAX_EP_CC_CPU_COMPLETION_THREADS_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>

#include "cc/handshake/wait_limits.h"

namespace jax_ep::cpu {

class CompletionThreads {
 public:
  struct End {
    // On a thread of its own, with ""; or where none could be had in time, with
    // why: then it must not block.
    std::function<void(const std::string& problem)> run;
    std::function<void(const std::string& problem)> warn;
    WaitLimits limits;
  };

  // One for the process, never destroyed: calls may outlive every static.
  static CompletionThreads& Get();

  void Run(End end);

 private:
  // An end that waits, and since when.
  struct Task {
    End end;
    Clock::time_point since;
    bool warned = false;
  };

  void Serve();
  // Starts a thread that is counted as starting. False where the system gives
  // none; then it is tried again soon.
  bool Start();
  void TryAgain();

  std::mutex mutex_;
  std::condition_variable has_task_;
  std::deque<Task> tasks_;
  size_t num_idle_ = 0;
  size_t num_starting_ = 0;  // they will come for a task
  bool tries_again_ = false;
  std::string problem_;  // why the last one could not be started
};

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CC_CPU_COMPLETION_THREADS_H_
