#include "cc/cpu/completion_threads.h"

#include <chrono>
#include <thread>
#include <utility>

namespace jax_ep::cpu {
namespace {

// A thread that had nothing to do for this long ends.
constexpr std::chrono::seconds kIdle(5);

}  // namespace

CompletionThreads& CompletionThreads::Get() {
  static CompletionThreads* threads = new CompletionThreads;
  return *threads;
}

void CompletionThreads::Run(std::function<void()> task) {
  bool start = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    // A thread that was woken counts as idle until it has its task.
    start = tasks_.size() > num_idle_;
  }
  if (start) {
    std::thread([this] { Serve(); }).detach();
  } else {
    has_task_.notify_one();
  }
}

void CompletionThreads::Serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (tasks_.empty()) {
      ++num_idle_;
      const bool got_task =
          has_task_.wait_for(lock, kIdle, [this] { return !tasks_.empty(); });
      --num_idle_;
      if (!got_task) return;
    }
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

}  // namespace jax_ep::cpu
