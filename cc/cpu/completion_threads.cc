#include "cc/cpu/completion_threads.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "cc/cpu/alarms.h"
#include "cc/threads.h"

namespace jax_ep::cpu {
namespace {

// A thread that had nothing to do for this long ends.
constexpr std::chrono::seconds kIdle(5);
// How often a thread that could not be started is tried again.
constexpr std::chrono::milliseconds kTryEvery(10);

}  // namespace

CompletionThreads& CompletionThreads::Get() {
  static CompletionThreads* threads = new CompletionThreads;
  return *threads;
}

void CompletionThreads::Run(End end) {
  bool start = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back({.end = std::move(end), .since = Clock::now()});
    // A thread that was woken counts as idle until it has its task.
    start = tasks_.size() > num_idle_ + num_starting_;
    if (start) ++num_starting_;
  }
  if (start) {
    Start();
  } else {
    has_task_.notify_one();
  }
}

bool CompletionThreads::Start() {
  try {
    std::thread([this] { Serve(); }).detach();
    return true;
  } catch (const std::system_error& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    --num_starting_;
    problem_ = NoThread(error);
    if (!tries_again_) {
      tries_again_ = true;
      Alarms::Get().Set(Clock::now() + kTryEvery, [this] { TryAgain(); });
    }
    return false;
  }
}

// On the thread of alarms, which must not be held up. An end with an error does
// not: XLA drops the rest of that device's program.
void CompletionThreads::TryAgain() {
  std::vector<Task> overdue;
  std::vector<std::function<void(const std::string&)>> warnings;
  std::string problem;
  size_t to_start = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tries_again_ = false;
    problem = problem_;
    const Clock::time_point now = Clock::now();
    const auto first_overdue = std::stable_partition(
        tasks_.begin(), tasks_.end(), [&](const Task& task) {
          return now - task.since < task.end.limits.timeout;
        });
    std::move(first_overdue, tasks_.end(), std::back_inserter(overdue));
    tasks_.erase(first_overdue, tasks_.end());
    for (Task& task : tasks_) {
      if (task.warned || now - task.since < task.end.limits.warn_after) {
        continue;
      }
      task.warned = true;
      warnings.push_back(task.end.warn);
    }
    const size_t have = num_idle_ + num_starting_;
    if (tasks_.size() > have) to_start = tasks_.size() - have;
    num_starting_ += to_start;
  }
  for (const auto& warn : warnings) warn(problem);
  for (const Task& task : overdue) {
    task.end.run("waited " + InSeconds(task.end.limits.timeout) + "; " +
                 problem);
  }
  while (to_start > 0 && Start()) --to_start;
  if (to_start > 1) {
    std::lock_guard<std::mutex> lock(mutex_);
    num_starting_ -= to_start - 1;  // those that were not tried
  }
}

void CompletionThreads::Serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  --num_starting_;
  for (;;) {
    if (tasks_.empty()) {
      ++num_idle_;
      const bool got_task =
          has_task_.wait_for(lock, kIdle, [this] { return !tasks_.empty(); });
      --num_idle_;
      if (!got_task) return;
    }
    End end = std::move(tasks_.front().end);
    tasks_.pop_front();
    lock.unlock();
    end.run("");
    end = {};
    lock.lock();
  }
}

}  // namespace jax_ep::cpu
