#include "cc/cpu/alarms.h"

#include "cc/threads.h"

namespace jax_ep::cpu {

Alarms& Alarms::Get() {
  static Alarms* alarms = new Alarms;
  return *alarms;
}

Alarms::Alarms() {
  StartThread([this] { Run(); }).detach();
}

Alarms::Id Alarms::Set(Clock::time_point when, std::function<void()> run) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Id id(when, next_++);
  const auto entry = set_.emplace(id, std::move(run)).first;
  if (entry == set_.begin()) changed_.notify_one();
  return id;
}

void Alarms::Cancel(const Id& id) {
  std::function<void()> last;  // what it holds goes outside the lock
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = set_.find(id);
  if (entry == set_.end()) return;
  last = std::move(entry->second);
  set_.erase(entry);
}

void Alarms::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (set_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const auto first = set_.begin();
    const Clock::time_point when = first->first.first;
    if (Clock::now() < when) {
      changed_.wait_until(lock, when);
      continue;
    }
    std::function<void()> run = std::move(first->second);
    set_.erase(first);
    lock.unlock();
    run();
    run = nullptr;
    lock.lock();
  }
}

}  // namespace jax_ep::cpu
