// How long an operation waits for others, and what it says meanwhile.
#ifndef JAX_EP_CC_HANDSHAKE_WAIT_LIMITS_H_
#define JAX_EP_CC_HANDSHAKE_WAIT_LIMITS_H_

#include <chrono>
#include <cstdio>
#include <string>

namespace jax_ep {

using Clock = std::chrono::steady_clock;

inline Clock::duration Duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(seconds));
}

// "30.0 s"
inline std::string InSeconds(Clock::duration duration) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s",
                std::chrono::duration<double>(duration).count());
  return text;
}

struct WaitLimits {
  Clock::duration warn_after;  // says once that it waits; never if >= timeout
  Clock::duration timeout;     // gives up

  bool Warns() const { return warn_after < timeout; }
  // Says on stderr that `who` ("jax_ep dispatch (channel 7): ranks 0, 1")
  // waits, and `what` for ("missing ranks: 2, 3").
  void Warn(const std::string& who, bool several,
            const std::string& what) const {
    const std::string line = who +
                             (several ? " have waited " : " has waited ") +
                             InSeconds(warn_after) + " and will wait " +
                             InSeconds(timeout) + " in all; " + what + "\n";
    std::fputs(line.c_str(), stderr);
    std::fflush(stderr);
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_HANDSHAKE_WAIT_LIMITS_H_
