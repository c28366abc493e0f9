// Rings between processes: shared memory, its producers and its consumers.
//
// The memory of a process is written by its peers and read by itself; see
// StagingLayout. A ring has one producer, one consumer and no lock: a process
// that is killed leaves nothing behind that others could wait for.
//
// Ordering: the producer fills a slot and releases the tail; the consumer
// acquires the tail, drains the slot and releases the head; the producer
// acquires the head before it fills that slot again.
#ifndef JAX_EP_CC_CPU_STAGING_H_
#define JAX_EP_CC_CPU_STAGING_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cc/cpu/wire.h"
#include "cc/layout/staging.h"

namespace jax_ep::cpu {

// A mapping of shared memory, unmapped at the end.
class SharedMemory {
 public:
  // Maps `size` bytes of `descriptor`, which stays the caller's. base() is
  // nullptr where that failed.
  SharedMemory(int descriptor, int64_t size);
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* base() const { return base_; }

 private:
  std::byte* base_;
  int64_t size_;
};

// Wakes the thread that serves one channel of one process.
class Doorbell {
 public:
  explicit Doorbell(std::byte* word)
      : asleep_(reinterpret_cast<std::atomic<uint32_t>*>(word)) {}

  // Anybody, after giving the thread something to do.
  void Ring();

  // The served thread: announces that it goes to sleep. It then has to look
  // once more for something to do, and call Sleep() or Cancel().
  void Prepare();
  void Cancel();
  void Sleep(std::chrono::nanoseconds at_most);

 private:
  std::atomic<uint32_t>* asleep_;
};

// The end of a ring that fills slots. They are in the consumer's memory.
class Producer {
 public:
  // `peer` is this process's index in the consumer's memory.
  Producer(const StagingLayout& layout, std::byte* memory, int64_t channel,
           int64_t peer);

  // Begins a packet; false where every slot is taken.
  bool Begin(PacketKind kind, const CallKey& key);
  // Bytes that the packet has room for.
  int64_t room() const { return layout_.slot_bytes - used_; }
  // The next `bytes` of the packet, at most room().
  std::byte* Append(int64_t bytes);
  // Hands the packet over and wakes the consumer.
  void Send();

 private:
  const StagingLayout layout_;
  std::byte* const memory_;
  const int64_t channel_;
  const int64_t peer_;
  Doorbell doorbell_;
  std::atomic<uint64_t>* tail_;
  std::atomic<uint64_t>* head_;
  uint64_t next_ = 0;
  std::byte* slot_ = nullptr;
  int64_t used_ = 0;
};

// The end of a ring that drains slots, in this process's memory.
class Consumer {
 public:
  // `producer` wakes the other end, which may wait for a free slot.
  Consumer(const StagingLayout& layout, std::byte* memory, int64_t channel,
           int64_t peer, Doorbell producer);

  // Whether a packet is there.
  bool Ready() const;
  // Copies the header of the first packet and returns what follows it, or
  // nullptr where there is none. A length beyond the slot is cut to it.
  const std::byte* Front(PacketHeader& header) const;
  void Pop();

 private:
  const StagingLayout layout_;
  std::byte* const memory_;
  const int64_t channel_;
  const int64_t peer_;
  Doorbell producer_;
  std::atomic<uint64_t>* tail_;
  std::atomic<uint64_t>* head_;
  uint64_t next_ = 0;
};

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CC_CPU_STAGING_H_
