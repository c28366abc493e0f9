// Threads that end calls.
//
// Ending a call runs the rest of that device's program on the same thread, and
// that may block, say in one of XLA's collectives, until other devices come
// along. So each end gets a thread of its own: idle ones are used again, and
// where none is idle a new one is started. A pool of any fixed size would
// dead-lock.
#ifndef JAX_EP_CC_CPU_COMPLETION_THREADS_H_
#define JAX_EP_CC_CPU_COMPLETION_THREADS_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace jax_ep::cpu {

class CompletionThreads {
 public:
  // One for the process, never destroyed: calls may outlive every static.
  static CompletionThreads& Get();

  void Run(std::function<void()> task);

 private:
  void Serve();

  std::mutex mutex_;
  std::condition_variable has_task_;
  std::deque<std::function<void()>> tasks_;
  size_t num_idle_ = 0;
};

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CC_CPU_COMPLETION_THREADS_H_
