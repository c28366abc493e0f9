// Where the ranks of one process meet for a call on the host.
//
// XLA runs calls in different orders on different devices, so a handler must
// not block: each rank leaves its buffers and a completion, and the last rank
// to arrive gets all of them to do the work. The thread of alarms warns of a
// rendezvous whose last rank does not come, and fails it in the end.
#ifndef JAX_EP_CC_CPU_RENDEZVOUS_H_
#define JAX_EP_CC_CPU_RENDEZVOUS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cc/cpu/alarms.h"
#include "cc/cpu/completion_threads.h"
#include "cc/handshake/wait_limits.h"

namespace jax_ep::cpu {

// Ends one rank's call: with success where the message is empty.
using Completion = std::function<void(const std::string& error)>;

// One rendezvous of the ranks that a group has in this process.
class Rendezvous : public std::enable_shared_from_this<Rendezvous> {
 public:
  Rendezvous(std::string name, const std::vector<int>& ranks,
             const WaitLimits& limits);

  // Sets the alarms, and cancels them. Nobody enters meanwhile.
  void Watch();
  void Forget();

  // Enters a rank. Returns true to the last one, which then owns the work and
  // calls Finish(). `arrival` is that rank's buffers, kept until then.
  // `refusal`: why the rank does not take part, "" where it does.
  bool Enter(int rank, std::shared_ptr<void> arrival, Completion completion,
             std::string refusal);

  // Who meets here, ascending.
  const std::vector<int>& ranks() const { return ranks_; }
  // Their buffers in that order; for the last rank only.
  const std::vector<std::shared_ptr<void>>& arrivals() const {
    return arrivals_;
  }

  // "rank 2 <why it refuses>" of one that does, else ""; for the last rank
  // only.
  const std::string& refusal() const { return refusal_; }

  // Completes every rank's call. A call's completion runs the rest of that
  // device's program, so each gets a thread of its own; where this is the last
  // rank's thread, inside its call, that rank's is done here. `error` is empty,
  // or what happened to each rank. A rank that refused is told so, and so are
  // the others.
  void Finish(bool on_last_ranks_thread, const std::string& error = "");

  // Runs `next`, which calls Finish(), on a thread of its own.
  void Then(std::function<void()> next);

  // Says on stderr that all ranks here have waited long for `what`.
  void Warn(const std::string& what) const;

  bool Has(int rank);
  // Whether every rank came, in time or not: nobody will ask for it again.
  bool complete();
  Clock::time_point deadline() const { return deadline_; }

 private:
  // Fails every rank that waits; no effect once all have come. Ranks that come
  // later fail at once.
  void Expire();
  void WarnOfMissing();
  // Of ranks `who`, as "0, 2".
  void Say(const std::string& who, const std::string& what) const;
  // Ends the call of one rank on a thread of its own.
  void Complete(size_t position, std::string error);
  size_t Position(int rank) const;
  // "jax_ep dispatch (channel 7): rank 1"
  std::string Call(int rank) const;
  // Who came in time, or who did not, as "0, 2".
  std::string Ranks(bool in_time) const;
  // What a call of the rank at `position` ends with, if with `error`.
  std::string Outcome(size_t position, const std::string& error) const;
  std::string Describe(int rank) const;
  std::string DescribeLate(int rank, Clock::duration late) const;

  const std::string name_;
  const std::vector<int> ranks_;
  const WaitLimits limits_;
  const Clock::time_point deadline_;
  std::vector<Alarms::Id> alarms_;
  std::mutex mutex_;
  int num_arrived_ = 0;
  size_t last_ = 0;
  bool expired_ = false;
  // By position in ranks_.
  std::vector<bool> came_;
  std::vector<bool> came_in_time_;
  std::vector<std::shared_ptr<void>> arrivals_;
  std::vector<Completion> completions_;
  std::vector<std::string> refusals_;
  std::string refusal_;
};

// The rendezvous of one call site: one for each run and group in flight.
class RendezvousTable {
 public:
  // `name` is what errors call the site, such as "dispatch (channel 7)";
  // `ranks` are those of each group that are in this process.
  RendezvousTable(std::string name, const std::vector<std::vector<int>>& ranks,
                  const WaitLimits& limits);

  // Enters `rank` of `group` in run `run_id`. Where it is the last, returns the
  // rendezvous, whose Finish() the caller owes; else nullptr. Never blocks.
  // `refusal` as in Rendezvous::Enter().
  std::shared_ptr<Rendezvous> Enter(int64_t run_id, int group, int rank,
                                    std::shared_ptr<void> arrival,
                                    Completion completion, std::string refusal);

 private:
  const std::string name_;
  const std::vector<std::vector<int>> ranks_;
  const WaitLimits limits_;
  std::mutex mutex_;
  // A loop meets again at the same site in the same run. Rank r joins the first
  // rendezvous that it has not been to.
  std::multimap<std::pair<int64_t, int>, std::shared_ptr<Rendezvous>>
      under_way_;
};

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CC_CPU_RENDEZVOUS_H_
