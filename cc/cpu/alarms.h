// One thread of the process that runs short functions when their time comes.
#ifndef JAX_EP_CC_CPU_ALARMS_H_
#define JAX_EP_CC_CPU_ALARMS_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "cc/handshake/wait_limits.h"

namespace jax_ep::cpu {

class Alarms {
 public:
  // When, and which of those at that time.
  using Id = std::pair<Clock::time_point, uint64_t>;

  // One for the process, never destroyed: rendezvous may outlive every static.
  // Throws std::runtime_error where its thread cannot be started; set-up asks
  // first, so that operations find it running.
  static Alarms& Get();

  // `run` must neither block nor throw.
  Id Set(Clock::time_point when, std::function<void()> run);
  // No effect where it has run, or runs now.
  void Cancel(const Id& id);

 private:
  Alarms();
  void Run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Id, std::function<void()>> set_;
  uint64_t next_ = 0;
};

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CC_CPU_ALARMS_H_
