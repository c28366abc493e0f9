#include "cc/releases.h"

#include <utility>

#include "cc/threads.h"

namespace jax_ep {

std::atomic<Releases*> Releases::made_ = nullptr;

Releases& Releases::Get() {
  static Releases* releases = new Releases;
  return *releases;
}

Releases::Releases() {
  StartThread([this] { Run(); }).detach();
  made_ = this;
}

void Releases::Add(std::function<void()> release) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopped_) return;
  releases_.push_back(std::move(release));
  ++num_added_;
  changed_.notify_all();
}

void Releases::Wait() {
  Releases* const all = made_;
  if (all == nullptr) return;
  std::unique_lock<std::mutex> lock(all->mutex_);
  all->changed_.wait(lock, [all, until = all->num_added_] {
    return all->num_done_ >= until || all->stopped_;
  });
}

void Releases::Stop() {
  Releases* const all = made_;
  if (all == nullptr) return;
  std::lock_guard<std::mutex> lock(all->mutex_);
  all->stopped_ = true;
  all->changed_.notify_all();
}

void Releases::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopped_ || !releases_.empty(); });
    if (stopped_) return;
    std::function<void()> release = std::move(releases_.front());
    releases_.pop_front();
    lock.unlock();
    release();
    release = nullptr;
    lock.lock();
    ++num_done_;
    changed_.notify_all();
  }
}

}  // namespace jax_ep
