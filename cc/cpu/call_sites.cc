#include "cc/cpu/call_sites.h"

#include <algorithm>
#include <atomic>

namespace jax_ep::cpu {
namespace {

constexpr size_t kMaxRuns = 256;

std::atomic<int64_t> current_program = 0;

}  // namespace

void CallSites::BeginProgram() { ++current_program; }

int32_t CallSites::Add(const void* site, int64_t channel) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (program_ != current_program) {
    program_ = current_program;
    counts_.clear();
  }
  const Identity identity(channel, counts_[channel]++);
  sites_[site].identity = identity;
  same_.emplace(identity, site);
  return identity.second;
}

void CallSites::Remove(const void* site) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sites_.find(site);
  if (found == sites_.end()) return;
  const auto [begin, end] = same_.equal_range(found->second.identity);
  for (auto it = begin; it != end; ++it) {
    if (it->second != site) continue;
    same_.erase(it);
    break;
  }
  sites_.erase(found);
}

std::optional<int64_t> CallSites::Next(const void* site, int64_t run,
                                       int32_t group) {
  std::lock_guard<std::mutex> lock(mutex_);
  Site& mine = sites_[site];
  const Run key(run, group);
  auto found = mine.runs.find(key);
  if (found == mine.runs.end()) {
    const auto [begin, end] = same_.equal_range(mine.identity);
    for (auto it = begin; it != end; ++it) {
      if (it->second != site && sites_[it->second].runs.contains(key)) {
        return std::nullopt;
      }
    }
    if (mine.runs.size() >= kMaxRuns) {
      mine.runs.erase(std::min_element(
          mine.runs.begin(), mine.runs.end(), [](const auto& a, const auto& b) {
            return a.second.last_use < b.second.last_use;
          }));
    }
    found = mine.runs.emplace(key, Uses{}).first;
  }
  found->second.last_use = ++clock_;
  return found->second.count++;
}

}  // namespace jax_ep::cpu
