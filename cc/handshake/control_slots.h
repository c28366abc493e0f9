// Which control slot a call site gets, equal on every process without a word
// between them.
//
// A slot comes from what the program says, not from what else a process has
// loaded: from the site's number among those of its kind in the program, which
// counts up from 0. Sites that share a number, because a function was lowered
// once and called twice, or because a program that was exported is part of this
// one, are dealt out in the order in which XLA instantiates them, from the last
// slot downwards. So sites of one program have slots of their own until there
// are no more; they may run side by side, as branches of a CUDA graph. Programs
// share slots, which is right because a device runs one program after the
// other, in the same order everywhere. What uses a slot at the same time
// nevertheless is found by the kernels (Opening in cc/handshake/sync.cuh).
#ifndef JAX_EP_CC_HANDSHAKE_CONTROL_SLOTS_H_
#define JAX_EP_CC_HANDSHAKE_CONTROL_SLOTS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>

#include "cc/layout/control.h"

namespace jax_ep {

// What a site takes, by its operation.
enum class SlotKind : int32_t {
  kPlan,    // a slot with windows
  kRows,    // any of the others
  kFlight,  // the one that all flights share
  kNone,    // none: low-latency operations have windows of their own
};

constexpr bool IsNumbered(SlotKind kind) {
  return kind == SlotKind::kPlan || kind == SlotKind::kRows;
}

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

  // `number`: the site's among those of its kind in the program; looked at only
  // where the kind IsNumbered().
  Site Take(SlotKind kind, uint32_t number, uint32_t channel) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (program_ != current_program_) {
      program_ = current_program_;
      instances_.clear();
      plans_ = rows_ = {};
    }
    const uint32_t instance = instances_[channel]++;
    switch (kind) {
      case SlotKind::kPlan:
        return {plans_.Take(number, ControlLayout::kPlanSlots), instance};
      case SlotKind::kRows:
        return {static_cast<int32_t>(ControlLayout::kPlanSlots) +
                    rows_.Take(number, ControlLayout::kFlightSlot -
                                           ControlLayout::kPlanSlots),
                instance};
      case SlotKind::kFlight:
        return {ControlLayout::kFlightSlot, instance};
      case SlotKind::kNone:
        break;
    }
    return {0, instance};
  }

 private:
  // Sites of one kind, of `program_`.
  struct Taken {
    std::set<uint32_t> numbers;
    uint32_t repeated = 0;  // sites that were not a number's first

    // One of `count` slots.
    int32_t Take(uint32_t number, uint32_t count) {
      return static_cast<int32_t>(numbers.insert(number).second
                                      ? number % count
                                      : count - 1 - repeated++ % count);
    }
  };

  static inline std::atomic<int64_t> current_program_ = 0;

  std::mutex mutex_;
  int64_t program_ = -1;
  std::map<uint32_t, uint32_t> instances_;  // of `program_`, by channel
  Taken plans_;
  Taken rows_;
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_HANDSHAKE_CONTROL_SLOTS_H_
