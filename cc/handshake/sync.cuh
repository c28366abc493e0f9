// Handshakes between the ranks of a group, inside one kernel.
//
// An operation opens (block 0 publishes this rank's buffer addresses, every
// block waits for the peers') and closes (the last block to finish tells the
// peers and waits for them). Words written by peers hold (epoch << 32 |
// payload): they grow, and nothing is reset. The epoch lives in device memory,
// so that a replayed CUDA graph goes on counting; each block reads it before
// the last block advances it.
//
// Before that every block looks whether the program has this device where the
// communicator has it, and whether another launch uses the control slot
// (Opening).
//
// No block waits for another block of its own launch that may not be resident:
// block 0 publishes before it waits, and only the last block closes.
//
// Every wait is bounded. One that runs out prints what it saw and traps: the
// error reaches the host, wrong rows never do.
#ifndef JAX_EP_CC_HANDSHAKE_SYNC_CUH_
#define JAX_EP_CC_HANDSHAKE_SYNC_CUH_

#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "cc/handshake/mesh.cuh"
#include "cc/handshake/patience.cuh"
#include "cc/handshake/peer_view.h"
#include "cc/layout/control.h"
#include "cc/layout/limits.h"
#include "cc/ptx.cuh"

namespace jax_ep {

// Words that nobody has written yet hold epoch 0, so none is called that; odd
// and even epochs take turns.
static __device__ __forceinline__ uint32_t EpochAfter(uint32_t last) {
  return last == 0xFFFFFFFF ? 2 : last + 1;
}

// What every block looks at first. All of it is asked for at once, so that
// waiting for it takes no longer than for the epoch alone.
struct Opening {
  uint32_t position;  // of this device on the program's mesh
  uint64_t use;  // of the control slot: user and epoch, see cc/layout/control.h

  // Called by all threads of a block, of which one takes the slot.
  static __device__ __forceinline__ Opening Ask(const Operation& op,
                                                const ControlLayout& layout) {
    auto* use =
        reinterpret_cast<uint64_t*>(op.view.control[op.view.rank] +
                                    op.slot * layout.slot_bytes + layout.epoch);
    Opening opening;
    opening.position = LoadPosition(op);
    opening.use = Takes() ? ptx::OrRelaxedGpu(use, uint64_t{op.tag} << 32)
                          : *static_cast<const volatile uint64_t*>(use);
    return opening;
  }

  __device__ __forceinline__ uint32_t epoch() const {
    return EpochAfter(static_cast<uint32_t>(use));
  }
  // Before a block publishes anything or touches what a peer published.
  __device__ __forceinline__ void Check(const Operation& op,
                                        const char* name) const {
    CheckPosition(op, position, name);
    const auto user = static_cast<uint32_t>(use >> 32);
    // The others may see that this launch has the slot.
    if (user != 0 && (Takes() || user != op.tag)) InUse(op, name, user);
  }

 private:
  static __device__ __forceinline__ bool Takes() {
    return blockIdx.x == 0 && threadIdx.x == blockDim.x - 1;
  }
  [[noreturn]] static __device__ __noinline__ void InUse(const Operation& op,
                                                         const char* name,
                                                         uint32_t user) {
    // Two tags in one word: who came second read the first alone, and traps.
    while (!Takes() && (user & op.tag) == op.tag) __nanosleep(1000);
    if (TellsWhy()) {
      printf(
          "jax_ep %s (channel %u): rank %d found its control slot in use by "
          "channel %u; make one of the two depend on the other\n",
          name, op.channel, op.view.rank, user & 0xffff);
    }
    __trap();
    __builtin_unreachable();
  }
};

// An operation's place in the control memory of all ranks.
struct Control {
  const Operation& op;
  const char* name;  // of the operation, for messages
  ControlLayout layout;
  uint32_t epoch;  // of this operation

  // All threads of a block construct it first of all.
  __device__ Control(const Operation& operation, const char* operation_name)
      : Control(operation, operation_name,
                ControlLayout(operation.view.num_ranks)) {}
  // The same where the host has worked the layout out.
  __device__ Control(const Operation& operation, const char* operation_name,
                     const ControlLayout& control_layout)
      : Control(operation, operation_name, control_layout,
                Opening::Ask(operation, control_layout)) {}
  __device__ Control(const Operation& operation, const char* operation_name,
                     const ControlLayout& control_layout,
                     const Opening& opening)
      : Control(operation, operation_name, control_layout, opening.epoch()) {
    opening.Check(operation, operation_name);
  }
  // With an epoch that was asked for earlier in this launch. Some thread of the
  // block checks its opening.
  __device__ Control(const Operation& operation, const char* operation_name,
                     const ControlLayout& control_layout, uint32_t this_epoch)
      : op(operation),
        name(operation_name),
        layout(control_layout),
        epoch(this_epoch) {}

  static __device__ uint32_t ReadEpoch(const Operation& operation,
                                       const ControlLayout& layout) {
    const std::byte* slot = operation.view.control[operation.view.rank] +
                            operation.slot * layout.slot_bytes;
    return EpochAfter(
        *reinterpret_cast<const volatile uint32_t*>(slot + layout.epoch));
  }

  __device__ int32_t rank() const { return op.view.rank; }
  __device__ int32_t num_ranks() const { return op.view.num_ranks; }

  __device__ std::byte* Slot(int32_t owner) const {
    return op.view.control[owner] + op.slot * layout.slot_bytes;
  }
  // The words that `from` keeps on `owner`.
  __device__ uint64_t* Ready(int32_t owner, int32_t from) const {
    return reinterpret_cast<uint64_t*>(Slot(owner) + layout.ready) +
           from * ControlLayout::kReadyWords;
  }
  __device__ uint64_t* Done(int32_t owner, int32_t from) const {
    return reinterpret_cast<uint64_t*>(Slot(owner) + layout.done) + from;
  }
  // Rows that `from` has for `to`, as told to `owner`.
  __device__ uint64_t* Counts(int32_t owner, int32_t from, int32_t to) const {
    return reinterpret_cast<uint64_t*>(Slot(owner) + layout.counts) +
           from * num_ranks() + to;
  }
  // What rank 0 tells `owner` of staging memory (cc/rings/channel.cuh).
  __device__ uint64_t* Turn(int32_t owner) const {
    return reinterpret_cast<uint64_t*>(Slot(owner) + layout.turn);
  }
  // What block `block` of `from` keeps on `owner`
  // (cc/few_tokens/few_tokens.cuh).
  __device__ uint64_t* BlockDone(int32_t owner, int32_t from,
                                 int32_t block) const {
    return reinterpret_cast<uint64_t*>(Slot(owner) + layout.blocks) +
           from * ControlLayout::kDoneBlocks + block;
  }
  __device__ uint64_t Word(uint32_t payload) const {
    return uint64_t{epoch} << 32 | payload;
  }
};

// Ends a launch that cannot go on. To say so keeps registers from being saved
// where this is called.
[[noreturn]] static __device__ __forceinline__ void Trap() {
  __trap();
  __builtin_unreachable();
}

// Out of line: keeps printf's stack out of the waiting code.
[[noreturn]] static __device__ __noinline__ void TimedOut(
    const Control& control, const char* step, int32_t peer, uint64_t seen) {
  printf(
      "jax_ep %s (channel %u): rank %d waited %.1f s for %s of rank %d: "
      "expected epoch %u, seen %u (channel or count %u)\n",
      control.name, control.op.channel, control.rank(),
      static_cast<double>(control.op.view.timeout_ns) * 1e-9, step, peer,
      control.epoch, static_cast<uint32_t>(seen >> 32),
      static_cast<uint32_t>(seen));
  Trap();
}

// Whether a wait of this operation has to end; see cc/handshake/patience.cuh.
static __device__ __forceinline__ bool RanOut(const Control& control,
                                              uint64_t waited, const char* step,
                                              int32_t peer) {
  return RanOut(control.op, control.name, control.epoch, waited, step, peer);
}

// Waits until `word` holds this epoch; returns its payload. Acquire: what the
// writer had done before it released the word is visible afterwards.
static __device__ __forceinline__ uint32_t Wait(const Control& control,
                                                const uint64_t* word,
                                                const char* step,
                                                int32_t peer) {
  uint64_t seen = ptx::LoadAcquireSys(word);
  if (static_cast<uint32_t>(seen >> 32) == control.epoch) {
    return static_cast<uint32_t>(seen);
  }
  const uint64_t start = ptx::GlobalTimer();
  for (;;) {
    seen = ptx::LoadAcquireSys(word);
    if (static_cast<uint32_t>(seen >> 32) == control.epoch) {
      return static_cast<uint32_t>(seen);
    }
    if (RanOut(control, ptx::GlobalTimer() - start, step, peer)) {
      // A copy: what stands in registers has no address.
      TimedOut(Control(control), step, peer, seen);
    }
  }
}

// What a rank publishes of a buffer: its address, marked where ranks of other
// processes cannot reach it.
static __device__ std::byte* Published(const Control& control,
                                       const void* buffer, bool exported) {
  uint64_t address = reinterpret_cast<uint64_t>(buffer);
  if (control.op.view.regions != nullptr && !exported) address |= kNotExported;
  return reinterpret_cast<std::byte*>(address);
}

// Tells every peer where this rank's buffers are. Called by all threads of
// block 0 before any wait; in stream order the buffers are free for the peers,
// or full. `addresses` [count] stands in shared memory, marked kNotExported
// where other processes cannot reach them. Every word holds its epoch, so that
// no word waits for another. Release: pairs with the acquire in WaitReady.
static __device__ void PublishReady(const Control& control,
                                    std::byte* const* addresses,
                                    int32_t count) {
  const int32_t words = 1 + 2 * count;
  for (int32_t i = threadIdx.x; i < control.num_ranks() * words;
       i += blockDim.x) {
    const int32_t peer = i / words;
    const int32_t word = i % words;
    uint32_t payload = control.op.tag;
    if (word > 0) {
      const uint64_t address =
          reinterpret_cast<uint64_t>(addresses[(word - 1) / 2]);
      payload = static_cast<uint32_t>(word % 2 == 1 ? address : address >> 32);
    }
    ptx::StoreReleaseSys(control.Ready(peer, control.rank()) + word,
                         control.Word(payload));
  }
}

[[noreturn]] static __device__ __noinline__ void OtherOperation(
    const Control& control, int32_t peer, uint32_t tag) {
  printf(
      "jax_ep %s (channel %u): rank %d found rank %d in another operation "
      "(channel %u)\n",
      control.name, control.op.channel, control.rank(), peer, tag & 0xffff);
  Trap();
}

[[noreturn]] static __device__ __noinline__ void NoRegion(
    const Control& control, int32_t peer, uint64_t address) {
  printf(
      "jax_ep %s (channel %u): rank %d has no region for address %llx of rank "
      "%d\n",
      control.name, control.op.channel, control.rank(),
      static_cast<unsigned long long>(address), peer);
  Trap();
}

// Where this rank sees an address that `peer` published; nullptr where it
// cannot reach it, so that rows go through staging memory.
static __device__ std::byte* Reach(const Control& control, int32_t peer,
                                   uint64_t address) {
  const PeerView& view = control.op.view;
  if (view.same_process.Has(peer)) {
    return reinterpret_cast<std::byte*>(address & ~kNotExported);
  }
  if (address & kNotExported) return nullptr;
  const Region* region = view.regions + peer * kMaxRegions;
  for (int32_t i = 0; i < kMaxRegions && region[i].bytes != 0; ++i) {
    const uint64_t offset = address - region[i].begin;
    if (offset < region[i].bytes) {
      return reinterpret_cast<std::byte*>(region[i].here + offset);
    }
  }
  NoRegion(Control(control), peer, address);
}

// Waits for word `word` of a peer's tag and addresses, and puts it where it
// belongs.
static __device__ __forceinline__ void TakeWord(const Control& control,
                                                std::byte** peers, int32_t peer,
                                                int32_t word) {
  const uint32_t payload = Wait(
      control, control.Ready(control.rank(), peer) + word, "the buffers", peer);
  if (word == 0) {
    if (payload != control.op.tag) {
      OtherOperation(Control(control), peer, payload);
    }
  } else {
    // Little endian: the low half stands first.
    const int32_t address = (word - 1) / 2 * control.num_ranks() + peer;
    reinterpret_cast<uint32_t*>(peers)[2 * address + (word - 1) % 2] = payload;
  }
}

// Makes of published addresses those by which this rank reaches them. Called
// by all threads of a block, behind and before a barrier as WaitReady() is.
static __device__ __forceinline__ bool ReachAll(const Control& control,
                                                std::byte** peers,
                                                int32_t count) {
  const int32_t num_ranks = control.num_ranks();
  if (control.op.view.regions == nullptr) return false;
  bool out_of_reach = false;
  for (int32_t i = threadIdx.x; i < num_ranks * count; i += blockDim.x) {
    const uint64_t address = reinterpret_cast<uint64_t>(peers[i]);
    out_of_reach |= (address & kNotExported) != 0;
    peers[i] = Reach(control, i % num_ranks, address);
  }
  return __syncthreads_or(out_of_reach);
}

// Waits for every peer's addresses: peers[i * R + r] is address i of rank r as
// this rank reaches it, nullptr where it cannot. Called by all threads of a
// block; `peers` is shared memory. Ends in a barrier, so that the whole block
// may touch the peers' buffers. Returns whether some rank's buffer is out of
// reach of other processes: the same on all ranks.
static __device__ bool WaitReady(const Control& control, std::byte** peers,
                                 int32_t count) {
  const int32_t words = 1 + 2 * count;
  const int32_t num_ranks = control.num_ranks();
  for (int32_t i = threadIdx.x; i < num_ranks * words; i += blockDim.x) {
    TakeWord(control, peers, i / words, i % words);
  }
  __syncthreads();
  return ReachAll(control, peers, count);
}

// Ends a block's part; true in the last block of the launch, whose threads then
// see what all other blocks wrote. Called by all threads.
static __device__ bool IsLastBlock(const Control& control) {
  __shared__ bool last;
  __syncthreads();
  if (gridDim.x == 1) return true;
  if (threadIdx.x == 0) {
    // Releases the block's accesses (the barrier made them this thread's past)
    // and acquires those of the blocks that came before. Of these GPU alone:
    // the releases that close the operation carry them on to the peers.
    auto* finished = reinterpret_cast<uint32_t*>(control.Slot(control.rank()) +
                                                 control.layout.finished);
    // Wraps to 0 with the last block: only blocks of this launch count here.
    last = ptx::IncrementAcqRelGpu(finished, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  return last;
}

// Tells the peers that this rank's rows have landed and waits for theirs.
// Called by all threads of the last block. Release: pairs with the peer's
// acquire below, so the kernel that follows on each rank sees all rows.
static __device__ void CloseWithPeers(const Control& control) {
  for (int32_t peer = threadIdx.x; peer < control.num_ranks();
       peer += blockDim.x) {
    ptx::StoreReleaseSys(control.Done(peer, control.rank()),
                         control.Word(control.op.channel));
  }
  for (int32_t peer = threadIdx.x; peer < control.num_ranks();
       peer += blockDim.x) {
    Wait(control, control.Done(control.rank(), peer), "the end", peer);
  }
  __syncthreads();
}

// The very last act of an operation: the next one in this slot counts from it,
// and finds the slot free.
static __device__ void StoreEpoch(const Control& control) {
  *reinterpret_cast<volatile uint64_t*>(control.Slot(control.rank()) +
                                        control.layout.epoch) = control.epoch;
}
static __device__ void AdvanceEpoch(const Control& control) {
  if (threadIdx.x == 0) StoreEpoch(control);
}

}  // namespace jax_ep

#endif  // JAX_EP_CC_HANDSHAKE_SYNC_CUH_
