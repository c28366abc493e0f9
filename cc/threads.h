// Starts threads where there may be a limit on them.
#ifndef JAX_EP_CC_THREADS_H_
#define JAX_EP_CC_THREADS_H_

#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace jax_ep {

// What std::thread's constructor says, and what to do about it.
inline std::string NoThread(const std::system_error& error) {
  return "no thread could be started (" + error.code().message() +
         "); raise the limit on processes and threads (ulimit -u, or the "
         "container's)";
}

// For set-up, whose caller hears of it: throws std::runtime_error where the
// system gives no thread. What std::thread itself throws inside an operation
// leaves calls without an end, and on a thread of ours it ends the process.
template <typename Function>
std::thread StartThread(Function&& run) {
  try {
    return std::thread(std::forward<Function>(run));
  } catch (const std::system_error& error) {
    throw std::runtime_error("jax_ep: " + NoThread(error));
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_THREADS_H_
