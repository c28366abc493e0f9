#include "cc/handshake/wait_notes.h"

#include <atomic>
#include <chrono>
#include <cstring>

#include "cc/threads.h"

namespace jax_ep {
namespace {

constexpr std::chrono::milliseconds kLookEvery(250);
// Notes that were told and can be forgotten: their operations are long over.
constexpr size_t kMaxTold = 4096;

uint64_t Load(const uint64_t& word) {
  const uint64_t value = *static_cast<const volatile uint64_t*>(&word);
  std::atomic_thread_fence(std::memory_order_acquire);
  return value;
}

// A note as it stands; false where there is none, or one is being written.
bool Read(const WaitNote& note, WaitNote& copy) {
  copy.end = Load(note.end);
  if (copy.end == 0) return false;
  std::memcpy(copy.operation, note.operation, sizeof(copy.operation));
  std::memcpy(copy.step, note.step, sizeof(copy.step));
  std::atomic_thread_fence(std::memory_order_acquire);
  copy.begin = Load(note.begin);
  copy.operation[WaitNote::kTextBytes - 1] = 0;
  copy.step[WaitNote::kTextBytes - 1] = 0;
  return copy.begin == copy.end;
}

}  // namespace

WaitNotes& WaitNotes::Get() {
  static WaitNotes* notes = new WaitNotes;
  return *notes;
}

WaitNotes::WaitNotes() {
  StartThread([this] { Run(); }).detach();
}

int64_t WaitNotes::Add(const WaitNote* notes, int32_t rank, int32_t num_ranks,
                       const WaitLimits& limits) {
  std::lock_guard<std::mutex> lock(mutex_);
  tables_[next_] = {.notes = notes,
                    .rank = rank,
                    .num_ranks = num_ranks,
                    .limits = limits,
                    .told = {}};
  changed_.notify_one();
  return next_++;
}

void WaitNotes::Remove(int64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  tables_.erase(number);
}

void WaitNotes::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (tables_.empty()) {
      changed_.wait(lock);
    } else {
      changed_.wait_for(lock, kLookEvery);
    }
    for (auto& [number, table] : tables_) Look(table);
  }
}

// One line for the peers that a rank waits for in one step of one operation.
void WaitNotes::Look(Table& table) {
  std::map<std::pair<uint64_t, std::string>, std::string> peers;
  std::map<uint64_t, std::string> operations;
  for (int32_t peer = 0; peer < table.num_ranks; ++peer) {
    WaitNote note;
    if (!Read(table.notes[peer], note)) continue;
    if (table.told.size() >= kMaxTold) table.told.clear();
    if (!table.told.emplace(note.end, peer).second) continue;
    std::string& list = peers[{note.end, note.step}];
    list += (list.empty() ? "" : ", ") + std::to_string(peer);
    operations[note.end] = note.operation;
  }
  for (const auto& [what, list] : peers) {
    const auto& [key, step] = what;
    const bool several = list.find(',') != std::string::npos;
    table.limits.Warn(
        "jax_ep " + operations[key] + " (channel " +
            std::to_string(static_cast<uint32_t>(key)) + "): rank " +
            std::to_string(table.rank),
        /*several=*/false,
        "missing: " + step + " of rank" + (several ? "s " : " ") + list);
  }
}

}  // namespace jax_ep
