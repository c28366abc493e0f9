// Gives back what takes long to give back, on a thread of its own.
//
// A communicator's memory can only go when no kernel uses it any more, so its
// destructor waits for the GPU. The last reference may go anywhere: in Python,
// under the interpreter's lock, when an executable is collected, or on a thread
// of XLA's. The kernel may be waiting for a peer that comes only when that
// thread gets on: one that waits for a Python callback, say. So whoever lets go
// does not wait. close() does, without the lock, so that memory is back when it
// returns.
//
// What does not need this thread: cudaStreamDestroy() and cudaEventDestroy()
// return at once, whatever is on its way, and the destructors of the host
// backend join threads that neither block nor want the interpreter's lock.
#ifndef JAX_EP_CC_RELEASES_H_
#define JAX_EP_CC_RELEASES_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace jax_ep {

class Releases {
 public:
  // One for the process, never destroyed. Throws std::runtime_error where its
  // thread cannot be started; set-up asks first, so that it runs when it is
  // needed.
  static Releases& Get();

  // Never waits. After Stop(), no effect.
  void Add(std::function<void()> release);
  // Returns when all that were added before have run, or after Stop(). These
  // two have no effect where nobody has called Get().
  static void Wait();
  // At the end of the process, which takes everything with it: the driver may
  // go before the thread has got there.
  static void Stop();

 private:
  Releases();
  void Run();

  static std::atomic<Releases*> made_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> releases_;
  uint64_t num_added_ = 0;
  uint64_t num_done_ = 0;
  bool stopped_ = false;
};

// A new T, which the last reference gives to that thread.
template <typename T>
std::shared_ptr<T> MakeReleased() {
  Releases& releases = Releases::Get();
  return std::shared_ptr<T>(
      new T, [&releases](T* held) { releases.Add([held] { delete held; }); });
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_RELEASES_H_
