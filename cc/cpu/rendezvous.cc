#include "cc/cpu/rendezvous.h"

#include <algorithm>
#include <cfenv>
#include <map>

#include "cc/cpu/alarms.h"

namespace jax_ep::cpu {

Rendezvous::Rendezvous(std::string name, const std::vector<int>& ranks,
                       const WaitLimits& limits)
    : name_(std::move(name)),
      ranks_(ranks),
      limits_(limits),
      deadline_(Clock::now() + limits.timeout),
      came_(ranks.size()),
      came_in_time_(ranks.size()),
      arrivals_(ranks.size()),
      completions_(ranks.size()),
      refusals_(ranks.size()) {}

void Rendezvous::Watch() {
  const auto call = [rendezvous =
                         shared_from_this()](void (Rendezvous::*what)()) {
    return [rendezvous, what] { (*rendezvous.*what)(); };
  };
  if (limits_.Warns()) {
    alarms_.push_back(
        Alarms::Get().Set(deadline_ - limits_.timeout + limits_.warn_after,
                          call(&Rendezvous::WarnOfMissing)));
  }
  alarms_.push_back(Alarms::Get().Set(deadline_, call(&Rendezvous::Expire)));
}

void Rendezvous::Forget() {
  for (const Alarms::Id& alarm : alarms_) Alarms::Get().Cancel(alarm);
}

size_t Rendezvous::Position(int rank) const {
  return std::lower_bound(ranks_.begin(), ranks_.end(), rank) - ranks_.begin();
}

bool Rendezvous::Enter(int rank, std::shared_ptr<void> arrival,
                       Completion completion, std::string refusal) {
  std::unique_lock<std::mutex> lock(mutex_);
  const size_t position = Position(rank);
  came_[position] = true;
  ++num_arrived_;
  if (expired_) {
    const std::string error = DescribeLate(rank, Clock::now() - deadline_);
    lock.unlock();
    completion(error);
    return false;
  }
  came_in_time_[position] = true;
  arrivals_[position] = std::move(arrival);
  if (!refusal.empty() && refusal_.empty()) {
    refusal_ = "rank " + std::to_string(rank) + " " + refusal;
  }
  refusals_[position] = std::move(refusal);
  // The rest of the program runs on another thread, and computes there as XLA's
  // own thread would: it may flush subnormal numbers.
  std::fenv_t environment;
  std::fegetenv(&environment);
  completions_[position] = [environment, completion = std::move(completion)](
                               const std::string& error) {
    std::fesetenv(&environment);
    completion(error);
  };
  last_ = position;
  return num_arrived_ == static_cast<int>(came_.size());
}

void Rendezvous::Finish(bool on_last_ranks_thread, const std::string& error) {
  for (size_t i = 0; i < completions_.size(); ++i) {
    if (on_last_ranks_thread && i == last_) continue;
    Complete(i, Outcome(i, error));
  }
  if (on_last_ranks_thread) completions_[last_](Outcome(last_, error));
}

void Rendezvous::Complete(size_t position, std::string error) {
  CompletionThreads::Get().Run(
      {.run =
           [rendezvous = shared_from_this(), position, error = std::move(error),
            completion =
                std::move(completions_[position])](const std::string& problem) {
             if (problem.empty()) return completion(error);
             completion(rendezvous->Call(rendezvous->ranks_[position]) + " " +
                        problem);
           },
       .warn =
           [rendezvous = shared_from_this(),
            position](const std::string& what) {
             rendezvous->Say(std::to_string(rendezvous->ranks_[position]),
                             what);
           },
       .limits = limits_});
}

void Rendezvous::Then(std::function<void()> next) {
  CompletionThreads::Get().Run(
      {.run =
           [rendezvous = shared_from_this(),
            next = std::move(next)](const std::string& problem) {
             if (problem.empty()) return next();
             for (size_t i = 0; i < rendezvous->ranks_.size(); ++i) {
               rendezvous->completions_[i](
                   rendezvous->Call(rendezvous->ranks_[i]) + " " + problem);
             }
           },
       .warn = [rendezvous = shared_from_this()](
                   const std::string& what) { rendezvous->Warn(what); },
       .limits = limits_});
}

void Rendezvous::Expire() {
  std::vector<std::pair<size_t, std::string>> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (num_arrived_ == static_cast<int>(came_.size())) return;
    expired_ = true;
    for (size_t i = 0; i < came_.size(); ++i) {
      if (!came_[i]) continue;
      waiting.emplace_back(
          i, refusal_.empty() ? Describe(ranks_[i]) : Outcome(i, ""));
    }
    arrivals_.clear();
  }
  for (auto& [position, error] : waiting) Complete(position, std::move(error));
}

void Rendezvous::WarnOfMissing() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (num_arrived_ == static_cast<int>(came_.size())) return;
  const std::string who = Ranks(/*in_time=*/true);
  const std::string missing = Ranks(/*in_time=*/false);
  lock.unlock();
  Say(who, "missing ranks: " + missing);
}

void Rendezvous::Warn(const std::string& what) const {
  std::string who;
  for (const int rank : ranks_) {
    who += (who.empty() ? "" : ", ") + std::to_string(rank);
  }
  Say(who, what);
}

void Rendezvous::Say(const std::string& who, const std::string& what) const {
  const bool several = who.find(',') != std::string::npos;
  limits_.Warn("jax_ep " + name_ + (several ? ": ranks " : ": rank ") + who,
               several, what);
}

bool Rendezvous::Has(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  return came_[Position(rank)];
}

bool Rendezvous::complete() {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_arrived_ == static_cast<int>(came_.size());
}

std::string Rendezvous::Ranks(bool in_time) const {
  std::string text;
  for (size_t i = 0; i < came_in_time_.size(); ++i) {
    if (came_in_time_[i] != in_time) continue;
    if (!text.empty()) text += ", ";
    text += std::to_string(ranks_[i]);
  }
  return text;
}

std::string Rendezvous::Call(int rank) const {
  return "jax_ep " + name_ + ": rank " + std::to_string(rank);
}

std::string Rendezvous::Outcome(size_t position,
                                const std::string& error) const {
  std::string what = error;
  if (!refusals_[position].empty()) {
    what = refusals_[position];
  } else if (!refusal_.empty()) {
    what = "heard that " + refusal_;
  }
  if (what.empty()) return what;
  return Call(ranks_[position]) + " " + what;
}

std::string Rendezvous::Describe(int rank) const {
  return Call(rank) + " waited " + InSeconds(limits_.timeout) +
         "; missing ranks: " + Ranks(/*in_time=*/false);
}

std::string Rendezvous::DescribeLate(int rank, Clock::duration late) const {
  return Call(rank) + " came after its peers had given up: waiting ranks: " +
         Ranks(/*in_time=*/true) + ", for " + InSeconds(limits_.timeout) +
         "; it came " + InSeconds(late) + " later";
}

RendezvousTable::RendezvousTable(std::string name,
                                 const std::vector<std::vector<int>>& ranks,
                                 const WaitLimits& limits)
    : name_(std::move(name)), ranks_(ranks), limits_(limits) {}

std::shared_ptr<Rendezvous> RendezvousTable::Enter(
    int64_t run_id, int group, int rank, std::shared_ptr<void> arrival,
    Completion completion, std::string refusal) {
  std::shared_ptr<Rendezvous> rendezvous;
  bool last = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const std::pair<int64_t, int> key(run_id, group);
    const auto [begin, end] = under_way_.equal_range(key);
    auto found = begin;
    while (found != end && found->second->Has(rank)) ++found;
    if (found == end) {
      found = under_way_.emplace(
          key, std::make_shared<Rendezvous>(name_, ranks_[group], limits_));
      if (ranks_[group].size() > 1) found->second->Watch();
    }
    rendezvous = found->second;
    last = rendezvous->Enter(rank, std::move(arrival), std::move(completion),
                             std::move(refusal));
    // Everybody came: nobody will look for this rendezvous again.
    if (rendezvous->complete()) {
      under_way_.erase(found);
      rendezvous->Forget();
    }
  }
  return last ? rendezvous : nullptr;
}

}  // namespace jax_ep::cpu
