// Which control slot a call site gets, equal on every process without a word
// between them.
//
// A slot comes from what the program says, not from what else a process has
// loaded: the site's channel, and for sites that share one (a function that was
// lowered once and called twice) the order in which XLA instantiates them. So
// programs share slots, which is right because a device runs one program after
// the other, in the same order everywhere; sites of one program have slots of
// their own while it has fewer channels than half the slots of their kind
// (plans have some of their own, with windows) and as many repeated sites.
// Flights have a slot beside them.
#ifndef JAX_EP_CC_CONTROL_SLOTS_H_
#define JAX_EP_CC_CONTROL_SLOTS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>

#include "cc/layout.h"

namespace jax_ep {

// The sites of one communicator.
class ControlSlots {
 public:
  struct Site {
    int32_t slot;
    uint32_t instance;  // sites of this program and channel that came before
  };

  // Called while a program is lowered, before its sites are instantiated:
  // counting starts anew.
  static void BeginProgram() { ++current_program_; }

  // Slots [first, first + count), those of plans or all others but kFlightSlot.
  struct Kind {
    int32_t first;
    uint32_t count;
  };
  static constexpr Kind kPlans = {0, ControlLayout::kPlanSlots};
  static constexpr Kind kOthers = {
      ControlLayout::kPlanSlots,
      ControlLayout::kFlightSlot - ControlLayout::kPlanSlots};

  Site Take(const Kind& kind, uint32_t channel) {
    const uint32_t half = kind.count / 2;
    std::lock_guard<std::mutex> lock(mutex_);
    if (program_ != current_program_) {
      program_ = current_program_;
      instances_.clear();
      repeated_ = 0;
    }
    const uint32_t instance = instances_[channel]++;
    const uint32_t slot = instance == 0
                              ? channel % half
                              : half + repeated_++ % (kind.count - half);
    return {kind.first + static_cast<int32_t>(slot), instance};
  }

 private:
  static inline std::atomic<int64_t> current_program_ = 0;

  std::mutex mutex_;
  int64_t program_ = -1;
  std::map<uint32_t, uint32_t> instances_;  // of `program_`, by channel
  uint32_t repeated_ = 0;  // sites that were not a channel's first
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_CONTROL_SLOTS_H_
