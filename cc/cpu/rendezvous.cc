#include "cc/cpu/rendezvous.h"

#include <algorithm>
#include <cfenv>
#include <condition_variable>
#include <cstdio>
#include <map>
#include <thread>

#include "cc/cpu/completion_threads.h"

namespace jax_ep::cpu {
namespace {

// Expires meetings whose time is up. One thread for the process, started with
// the first meeting and never joined: meetings may outlive every static.
class Watchdog {
 public:
  static Watchdog& Get() {
    static Watchdog* watchdog = new Watchdog;
    return *watchdog;
  }

  void Watch(const std::shared_ptr<Meeting>& meeting) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [entry, inserted] =
        watched_.emplace(Key(meeting->deadline(), meeting.get()), meeting);
    if (entry == watched_.begin()) changed_.notify_one();
  }

  void Forget(const Meeting& meeting) {
    std::lock_guard<std::mutex> lock(mutex_);
    watched_.erase(Key(meeting.deadline(), &meeting));
  }

 private:
  using Key = std::pair<Meeting::Clock::time_point, const Meeting*>;

  Watchdog() {
    std::thread([this] { Run(); }).detach();
  }

  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (watched_.empty()) {
        changed_.wait(lock);
        continue;
      }
      const auto first = watched_.begin();
      const Meeting::Clock::time_point deadline = first->first.first;
      if (Meeting::Clock::now() < deadline) {
        changed_.wait_until(lock, deadline);
        continue;
      }
      const std::shared_ptr<Meeting> meeting = std::move(first->second);
      watched_.erase(first);
      lock.unlock();
      meeting->Expire();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, std::shared_ptr<Meeting>> watched_;
};

Meeting::Clock::duration Seconds(double seconds) {
  return std::chrono::duration_cast<Meeting::Clock::duration>(
      std::chrono::duration<double>(seconds));
}

std::string InSeconds(Meeting::Clock::duration duration) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s",
                std::chrono::duration<double>(duration).count());
  return text;
}

}  // namespace

Meeting::Meeting(std::string name, const std::vector<int>& ranks,
                 Clock::duration timeout)
    : name_(std::move(name)),
      ranks_(ranks),
      timeout_(timeout),
      deadline_(Clock::now() + timeout),
      came_(ranks.size()),
      came_in_time_(ranks.size()),
      arrivals_(ranks.size()),
      completions_(ranks.size()) {}

size_t Meeting::Position(int rank) const {
  return std::lower_bound(ranks_.begin(), ranks_.end(), rank) - ranks_.begin();
}

bool Meeting::Enter(int rank, std::shared_ptr<void> arrival,
                    Completion completion) {
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

void Meeting::Finish(bool on_last_ranks_thread, const std::string& error) {
  const auto text = [&](size_t i) {
    if (error.empty()) return error;
    return "jax_ep " + name_ + ": rank " + std::to_string(ranks_[i]) + " " +
           error;
  };
  for (size_t i = 0; i < completions_.size(); ++i) {
    if (on_last_ranks_thread && i == last_) continue;
    CompletionThreads::Get().Run([completion = std::move(completions_[i]),
                                  outcome = text(i)] { completion(outcome); });
  }
  if (on_last_ranks_thread) completions_[last_](text(last_));
}

void Meeting::Expire() {
  std::vector<std::pair<Completion, std::string>> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (num_arrived_ == static_cast<int>(came_.size())) return;
    expired_ = true;
    for (size_t i = 0; i < came_.size(); ++i) {
      if (!came_[i]) continue;
      waiting.emplace_back(std::move(completions_[i]), Describe(ranks_[i]));
    }
    arrivals_.clear();
  }
  for (auto& [completion, error] : waiting) {
    CompletionThreads::Get().Run(
        [completion = std::move(completion), error = std::move(error)] {
          completion(error);
        });
  }
}

bool Meeting::Has(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  return came_[Position(rank)];
}

bool Meeting::complete() {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_arrived_ == static_cast<int>(came_.size());
}

std::string Meeting::Ranks(bool in_time) const {
  std::string text;
  for (size_t i = 0; i < came_in_time_.size(); ++i) {
    if (came_in_time_[i] != in_time) continue;
    if (!text.empty()) text += ", ";
    text += std::to_string(ranks_[i]);
  }
  return text;
}

std::string Meeting::Describe(int rank) const {
  return "jax_ep " + name_ + ": rank " + std::to_string(rank) + " waited " +
         InSeconds(timeout_) + "; missing ranks: " + Ranks(/*in_time=*/false);
}

std::string Meeting::DescribeLate(int rank, Clock::duration late) const {
  return "jax_ep " + name_ + ": rank " + std::to_string(rank) +
         " came after its peers had given up: waiting ranks: " +
         Ranks(/*in_time=*/true) + ", for " + InSeconds(timeout_) +
         "; it came " + InSeconds(late) + " later";
}

Rendezvous::Rendezvous(std::string name,
                       const std::vector<std::vector<int>>& ranks,
                       double timeout_s)
    : name_(std::move(name)), ranks_(ranks), timeout_(Seconds(timeout_s)) {}

std::shared_ptr<Meeting> Rendezvous::Enter(int64_t run_id, int group, int rank,
                                           std::shared_ptr<void> arrival,
                                           Completion completion) {
  std::shared_ptr<Meeting> meeting;
  bool last = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const std::pair<int64_t, int> key(run_id, group);
    const auto [begin, end] = meetings_.equal_range(key);
    auto found = begin;
    while (found != end && found->second->Has(rank)) ++found;
    if (found == end) {
      found = meetings_.emplace(
          key, std::make_shared<Meeting>(name_, ranks_[group], timeout_));
      if (ranks_[group].size() > 1) Watchdog::Get().Watch(found->second);
    }
    meeting = found->second;
    last = meeting->Enter(rank, std::move(arrival), std::move(completion));
    // Everybody came: nobody will look for this meeting again.
    if (meeting->complete()) {
      meetings_.erase(found);
      Watchdog::Get().Forget(*meeting);
    }
  }
  return last ? meeting : nullptr;
}

}  // namespace jax_ep::cpu
