// What tells calls apart on every process alike.
//
// XLA gives a run of a program the same id on all processes, and the program
// gives a call site its channel. Two more numbers are needed: sites that share
// a channel (a function that was lowered once and called twice) are counted in
// the order in which XLA instantiated them, and uses of one site in one run, in
// a loop, are counted as they come.
#ifndef JAX_EP_CC_CPU_CALL_SITES_H_
#define JAX_EP_CC_CPU_CALL_SITES_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

namespace jax_ep::cpu {

// The call sites of one communicator.
class CallSites {
 public:
  // Called while a program is lowered, before its sites are instantiated:
  // counting starts anew, so that it does not matter what else one of the
  // processes has compiled before.
  static void BeginProgram();

  // Registers a site. Returns how many of this program share its channel and
  // came before.
  int32_t Add(const void* site, int64_t channel);
  void Remove(const void* site);

  // How often a group has used the site in this run before. Nothing where
  // another site has the same numbers in the same run: then peers could not
  // tell the two apart.
  std::optional<int64_t> Next(const void* site, int64_t run, int32_t group);

 private:
  using Identity = std::pair<int64_t, int32_t>;  // channel, site number
  using Run = std::pair<int64_t, int32_t>;       // run id, group
  struct Uses {
    int64_t count = 0;
    int64_t last_use = 0;
  };
  struct Site {
    Identity identity;
    // The latest runs; XLA keeps far fewer in flight than are remembered.
    std::map<Run, Uses> runs;
  };

  std::mutex mutex_;
  int64_t program_ = 0;
  int64_t clock_ = 0;
  std::map<int64_t, int32_t> counts_;  // sites of `program_` by channel
  std::map<const void*, Site> sites_;
  std::multimap<Identity, const void*> same_;
};

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CC_CPU_CALL_SITES_H_
