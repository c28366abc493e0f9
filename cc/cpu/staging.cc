#include "cc/cpu/staging.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>
#include <utility>

namespace jax_ep::cpu {
namespace {

static_assert(std::atomic<uint32_t>::is_always_lock_free &&
              std::atomic<uint64_t>::is_always_lock_free);

std::atomic<uint64_t>* Counter(std::byte* memory, int64_t offset) {
  return reinterpret_cast<std::atomic<uint64_t>*>(memory + offset);
}

}  // namespace

SharedMemory::SharedMemory(int descriptor, int64_t size)
    : base_(nullptr), size_(size) {
  void* base =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (base == MAP_FAILED) return;
  // A forked child must not write into the rings of its parent.
  madvise(base, size, MADV_DONTFORK);
  base_ = static_cast<std::byte*>(base);
}

SharedMemory::~SharedMemory() {
  if (base_ != nullptr) munmap(base_, size_);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), size_(other.size_) {}

void Doorbell::Ring() {
  // What was given to the thread has to be visible before its flag is read,
  // as the thread sets its flag before it looks a last time.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (asleep_->load(std::memory_order_relaxed) != 0 &&
      asleep_->exchange(0) != 0) {
    syscall(SYS_futex, asleep_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

void Doorbell::Prepare() {
  asleep_->store(1);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Doorbell::Cancel() { asleep_->store(0); }

void Doorbell::Sleep(std::chrono::nanoseconds at_most) {
  const int64_t nanoseconds = std::max<int64_t>(0, at_most.count());
  timespec timeout;
  timeout.tv_sec = nanoseconds / 1'000'000'000;
  timeout.tv_nsec = nanoseconds % 1'000'000'000;
  syscall(SYS_futex, asleep_, FUTEX_WAIT, 1, &timeout, nullptr, 0);
  asleep_->store(0);
}

Producer::Producer(const StagingLayout& layout, std::byte* memory,
                   int64_t channel, int64_t peer)
    : layout_(layout),
      memory_(memory),
      channel_(channel),
      peer_(peer),
      doorbell_(memory + layout.asleep(channel)),
      tail_(Counter(memory, layout.tail(channel, peer))),
      head_(Counter(memory, layout.head(channel, peer))) {}

bool Producer::Begin(PacketKind kind, const CallKey& key) {
  const uint64_t drained = head_->load(std::memory_order_acquire);
  if (next_ - drained >= static_cast<uint64_t>(layout_.num_slots)) return false;
  slot_ = memory_ + layout_.slot(channel_, peer_, next_ % layout_.num_slots);
  used_ = sizeof(PacketHeader);
  PacketHeader header{};
  header.key = key;
  header.kind = kind;
  std::memcpy(slot_, &header, sizeof(header));
  return true;
}

std::byte* Producer::Append(int64_t bytes) {
  std::byte* place = slot_ + used_;
  used_ += bytes;
  return place;
}

void Producer::Send() {
  const uint32_t bytes = static_cast<uint32_t>(used_ - sizeof(PacketHeader));
  std::memcpy(slot_ + offsetof(PacketHeader, bytes), &bytes, sizeof(bytes));
  tail_->store(++next_, std::memory_order_release);
  doorbell_.Ring();
}

Consumer::Consumer(const StagingLayout& layout, std::byte* memory,
                   int64_t channel, int64_t peer, Doorbell producer)
    : layout_(layout),
      memory_(memory),
      channel_(channel),
      peer_(peer),
      producer_(producer),
      tail_(Counter(memory, layout.tail(channel, peer))),
      head_(Counter(memory, layout.head(channel, peer))) {}

bool Consumer::Ready() const {
  return tail_->load(std::memory_order_acquire) != next_;
}

const std::byte* Consumer::Front(PacketHeader& header) const {
  if (!Ready()) return nullptr;
  const std::byte* slot =
      memory_ + layout_.slot(channel_, peer_, next_ % layout_.num_slots);
  std::memcpy(&header, slot, sizeof(header));
  header.bytes = static_cast<uint32_t>(std::min<int64_t>(
      header.bytes,
      layout_.slot_bytes - static_cast<int64_t>(sizeof(PacketHeader))));
  return slot + sizeof(PacketHeader);
}

void Consumer::Pop() {
  head_->store(++next_, std::memory_order_release);
  producer_.Ring();
}

}  // namespace jax_ep::cpu
