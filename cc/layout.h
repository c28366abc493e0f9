// Sizes and offsets shared by host and device code, computed in one place.
//
// Units are bytes unless a name says otherwise. Everything is 64-bit: buffers
// past 2^31 elements are ordinary.
#ifndef JAX_EP_CC_LAYOUT_H_
#define JAX_EP_CC_LAYOUT_H_

#include <cstdint>

#if defined(__CUDACC__)
#define JAX_EP_HOST_DEVICE __host__ __device__
#else
#define JAX_EP_HOST_DEVICE
#endif

namespace jax_ep {

// Ranks of one group: an NVLink domain has up to 72. A multiple of a warp's
// lanes.
inline constexpr int kMaxRanks = 96;
// Where a set of ranks is one 64-bit word.
inline constexpr int kMaxRanksOfWord = 64;
// Experts that a token may name: the routes of a token fit a warp's lanes.
inline constexpr int kMaxTopK = 32;
// Leaves that one launch carries.
inline constexpr int kMaxLeaves = 16;
// Pieces of memory that a rank can share with other processes: the arenas in
// which XLA's buffers lie.
inline constexpr int kMaxRegions = 8;
// Set in a published address that lies in no such piece: ranks of other
// processes cannot reach it. No address has this bit.
inline constexpr uint64_t kNotExported = uint64_t{1} << 63;

// Experts that a rank owns at most: expert e lives on rank e / that number.
JAX_EP_HOST_DEVICE constexpr int32_t LocalExperts(int32_t num_experts,
                                                  int32_t num_ranks) {
  return (num_experts + num_ranks - 1) / num_ranks;
}

// Pairs (rank, slot) that a plan keeps for each token.
JAX_EP_HOST_DEVICE constexpr int32_t RoutesPerToken(int32_t top_k,
                                                    int32_t num_ranks) {
  return top_k < num_ranks ? top_k : num_ranks;
}

// How a plan by pushed ids (cc/pushed_plan.cu) is cut, from shapes alone, so
// that all ranks agree. Each rank's tokens stand in `num_parts` parts: one
// where a block can take the tokens of all ranks at once, else enough to keep
// several blocks busy.
struct PushedPlan {
  // Parts, and so blocks, at most.
  static constexpr int32_t kMaxParts = 32;
  // Words of ids that a rank has room for, from all of its peers.
  static constexpr int64_t kIdWords = 16384;
  // Tokens of all ranks that one block takes, and what it gets of more.
  static constexpr int64_t kTokensOfOneBlock = 1024;
  static constexpr int64_t kTokensPerBlock = 512;
  // A part's tokens, so that each has a thread; rows that it counts, warps
  // times ranks.
  static constexpr int64_t kMaxPartTokens = 1024;
  static constexpr int32_t kMaxPartRows = 1024;
  // Local experts that a block counts in shared memory.
  static constexpr int32_t kMaxLocalExperts = 2048;
  // What stands for "no expert" among 16-bit ids.
  static constexpr int32_t kNoExpert = 0xFFFF;

  bool fits;          // else the plan is made by cc/plan.cu
  int32_t num_words;  // of a token: two ids each
  int32_t num_parts;
  int32_t part_tokens;  // a multiple of 32; the last part may have fewer

  // Words for counts: [num_parts][R][R] fits.
  JAX_EP_HOST_DEVICE static constexpr int32_t CountWords(int32_t num_ranks) {
    constexpr int32_t kMost = kMaxRanksOfWord * kMaxRanksOfWord;
    const int32_t wanted = kMaxParts * num_ranks * num_ranks;
    return wanted < kMost ? wanted : kMost;
  }

  JAX_EP_HOST_DEVICE constexpr PushedPlan(int32_t num_ranks, int64_t num_tokens,
                                          int32_t top_k, int32_t num_experts)
      : fits(false), num_words((top_k + 1) / 2), num_parts(1), part_tokens(32) {
    const int64_t peers = num_ranks > 1 ? num_ranks - 1 : 1;
    if (num_ranks > kMaxRanksOfWord) return;
    if (num_tokens * num_words * peers > kIdWords) return;
    if (num_experts > kNoExpert) return;
    if (LocalExperts(num_experts, num_ranks) > kMaxLocalExperts) return;
    const int64_t tokens = num_tokens * num_ranks;
    int64_t parts = tokens <= kTokensOfOneBlock
                        ? 1
                        : (tokens + kTokensPerBlock - 1) / kTokensPerBlock;
    if (parts > kMaxParts) parts = kMaxParts;
    const int32_t room = CountWords(num_ranks) / (num_ranks * num_ranks);
    if (parts > room) parts = room;
    const int64_t share = (num_tokens + parts * 32 - 1) / (parts * 32) * 32;
    if (share > kMaxPartTokens || share / 32 * num_ranks > kMaxPartRows) return;
    fits = true;
    if (share == 0) return;
    part_tokens = static_cast<int32_t>(share);
    num_parts = static_cast<int32_t>((num_tokens + share - 1) / share);
  }
};

// Where tokens are few (cc/device/few_tokens.cuh) rows are cut into pieces of
// at most so many bytes, and a rank has no more than so many pieces: 256 tokens
// of 14 KB. All ranks have to agree, so it is a matter of sizes alone.
inline constexpr int64_t kPieceBytes = 5120;
inline constexpr int64_t kFewPieces = 768;
JAX_EP_HOST_DEVICE constexpr int64_t PiecesOfRow(int64_t row_bytes) {
  return (row_bytes + kPieceBytes - 1) / kPieceBytes;
}

// Ranks of plan_dispatch at most: a lane each.
inline constexpr int32_t kPlanDispatchRanks = 32;

// Whether one launch makes a plan by pushed ids and dispatches `num_leaves`
// leaves, of row_bytes [num_leaves] a row (cc/plan_dispatch.cu).
constexpr bool PlanDispatchFits(int32_t num_ranks, int64_t num_tokens,
                                int32_t top_k, int32_t num_experts,
                                const int64_t* row_bytes, int64_t num_leaves) {
  if (num_ranks > kPlanDispatchRanks || num_tokens < 1) return false;
  if (num_leaves < 1 || num_leaves > kMaxLeaves) return false;
  int64_t pieces = 0;
  for (int64_t i = 0; i < num_leaves; ++i) {
    const int64_t of_row = PiecesOfRow(row_bytes[i]);
    if (of_row < 1 || of_row > kFewPieces) return false;
    pieces += of_row * num_tokens;
    if (pieces > kFewPieces) return false;
  }
  return PushedPlan(num_ranks, num_tokens, top_k, num_experts).fits;
}

// Scratch of a plan, in int32 elements. By pushed ids: counts of the local
// experts by each block. Else received [R][L], what each source sends to each
// local expert, added up there by the sources themselves.
JAX_EP_HOST_DEVICE constexpr int64_t PlanWorkspaceSize(int32_t num_ranks,
                                                       int32_t num_experts) {
  const int32_t local_experts = LocalExperts(num_experts, num_ranks);
  const bool pushed = local_experts <= PushedPlan::kMaxLocalExperts;
  const int32_t rows = pushed && num_ranks < PushedPlan::kMaxParts
                           ? PushedPlan::kMaxParts
                           : num_ranks;
  return int64_t{rows} * local_experts;
}

// Control memory of one rank: kSlots control slots, one for each call site in
// flight, the first kPlanSlots of them for plans, which have two windows each
// behind all slots. Words written by peers hold (epoch << 32 | payload), so
// that they are never reset. A slot is cut as
//   epoch     u32 of the last finished operation, advanced by its last block
//   user      u32, the tag of the running operation, 0 for none; read and
//             written together with the epoch
//   finished  u32, blocks of the running operation that are done
//   ticket    u32, parts of the running operation that blocks have taken, or
//             blocks that have begun (combine of few tokens)
//   ready     [R][kReadyWords] u64 that a peer publishes before rows may move:
//             its tag, then both halves of each of its addresses
//   done      [R] u64, a peer's last row has landed
//   counts    [R][R] u64, rows from source to destination (plan)
//   turn      u64, rank 0 says that staging memory is this operation's
//   blocks    [R][kDoneBlocks] u64, a block of a peer is done (few tokens);
//             says how many blocks there are
// and a window, which takes turns with its twin from epoch to epoch (plan by
// pushed ids), as
//   ids       [R - 1][num_words][T] u64, from the peers in order: two ids each
//   counts    [num_parts][R][R] u64, as above, for each part of the tokens
//   tags      [R] u64
struct ControlLayout {
  static constexpr int64_t kSlots = 1024;
  static constexpr int64_t kPlanSlots = 128;
  // The last slot serves all flights: they follow each other on a stream of
  // their own, beside which the other slots are used.
  static constexpr int64_t kFlightSlot = kSlots - 1;
  static constexpr int32_t kReadyWords = 1 + 2 * kMaxLeaves;
  // Blocks of an operation on few tokens at most.
  static constexpr int32_t kDoneBlocks = 32;

  int64_t epoch;
  int64_t finished;
  int64_t ticket;
  int64_t ready;
  int64_t done;
  int64_t counts;
  int64_t turn;
  int64_t blocks;
  int64_t slot_bytes;
  int64_t windows;
  int64_t window_counts;
  int64_t window_tags;
  int64_t window_bytes;

  JAX_EP_HOST_DEVICE constexpr explicit ControlLayout(int32_t num_ranks)
      : epoch(0),
        finished(8),
        ticket(12),
        ready(16),
        done(ready + int64_t{num_ranks} * kReadyWords * 8),
        counts(done + num_ranks * 8),
        turn(counts + int64_t{num_ranks} * num_ranks * 8),
        blocks(turn + 8),
        slot_bytes((blocks + int64_t{num_ranks} * kDoneBlocks * 8 + 127) / 128 *
                   128),
        windows(kSlots * slot_bytes),
        window_counts(num_ranks > 1 ? PushedPlan::kIdWords * 8 : 0),
        window_tags(window_counts +
                    int64_t{PushedPlan::CountWords(num_ranks)} * 8),
        window_bytes((window_tags + num_ranks * 8 + 127) / 128 * 128) {}

  // Of a plan's slot at this epoch.
  JAX_EP_HOST_DEVICE constexpr int64_t window(int32_t slot,
                                              uint32_t epoch) const {
    return windows + (int64_t{slot} * 2 + epoch % 2) * window_bytes;
  }
  JAX_EP_HOST_DEVICE constexpr int64_t size() const {
    return windows + 2 * kPlanSlots * window_bytes;
  }
};

// Staging memory: what the peers of its owner write and the owner reads, cut as
// [channel][peer][slot]. On the host the owner is a process, in shared memory;
// on GPUs it is a rank, behind its control memory. Every word has a cache line
// of its own, so that channels never contend. It begins with a header of one
// line: what set-up writes (host), or in rank 0's memory the word that says
// which operation's turn it is (GPUs). A channel is cut as
//   asleep  u32, the reader's thread sleeps on this futex (host)
//   tail    [peer] u64, slots filled so far; the peer is the producer
//   head    [peer] u64, slots drained so far: host, of what the owner consumes;
//           GPUs, of what it produces, so that it polls its own memory
//   slots   [peer][num_slots][slot_bytes]
// On GPUs the second word of a tail's line is the owner's own: slots drained so
// far. Peers are the other owners in order: p of P stands at p in the memory of
// those below it, and at p - 1 in the memory of those above.
struct StagingLayout {
  static constexpr int64_t kLine = 128;
  // A call is announced in one slot.
  static constexpr int64_t kMinSlotBytes = 1024;
  static constexpr int64_t kMaxSlotBytes = 64 << 10;
  static constexpr int64_t kMinSlots = 2;

  int64_t num_channels;
  int64_t num_peers;
  int64_t num_slots;
  int64_t slot_bytes;
  int64_t channel_bytes;

  // Shares `staging_bytes` out over channels and peers. Large slots first: they
  // cost the least; then as many as there is room for.
  JAX_EP_HOST_DEVICE constexpr StagingLayout(int64_t staging_bytes,
                                             int64_t channels,
                                             int64_t num_owners)
      : num_channels(channels),
        num_peers(num_owners > 1 ? num_owners - 1 : 1),
        num_slots(0),
        slot_bytes(0),
        channel_bytes(0) {
    const int64_t ring_bytes = staging_bytes / (num_channels * num_peers);
    slot_bytes = ring_bytes / kMinSlots / kLine * kLine;
    if (slot_bytes > kMaxSlotBytes) slot_bytes = kMaxSlotBytes;
    num_slots = slot_bytes > 0 ? ring_bytes / slot_bytes : 0;
    channel_bytes =
        kLine * (1 + 2 * num_peers) + num_peers * num_slots * slot_bytes;
  }

  // The least staging_bytes that Valid() accepts.
  static constexpr int64_t MinBytes(int64_t channels, int64_t num_owners) {
    const int64_t peers = num_owners > 1 ? num_owners - 1 : 1;
    return channels * peers * kMinSlots * kMinSlotBytes;
  }

  constexpr bool Valid() const { return slot_bytes >= kMinSlotBytes; }
  constexpr int64_t size() const {
    return kLine + num_channels * channel_bytes;
  }

  // Where `peer` stands in the memory of `owner`.
  JAX_EP_HOST_DEVICE static constexpr int64_t PeerIndex(int64_t owner,
                                                        int64_t peer) {
    return peer < owner ? peer : peer - 1;
  }

  JAX_EP_HOST_DEVICE constexpr int64_t asleep(int64_t channel) const {
    return kLine + channel * channel_bytes;
  }
  JAX_EP_HOST_DEVICE constexpr int64_t tail(int64_t channel,
                                            int64_t peer) const {
    return asleep(channel) + kLine * (1 + peer);
  }
  JAX_EP_HOST_DEVICE constexpr int64_t drained(int64_t channel,
                                               int64_t peer) const {
    return tail(channel, peer) + 8;
  }
  JAX_EP_HOST_DEVICE constexpr int64_t head(int64_t channel,
                                            int64_t peer) const {
    return asleep(channel) + kLine * (1 + num_peers + peer);
  }
  JAX_EP_HOST_DEVICE constexpr int64_t slot(int64_t channel, int64_t peer,
                                            int64_t i) const {
    return asleep(channel) + kLine * (1 + 2 * num_peers) +
           (peer * num_slots + i) * slot_bytes;
  }
};

// How rows fill the slots of a ring on GPUs. Rows that fit stand whole, as many
// to a slot as there is room for; a larger one is cut into about equal pieces,
// a piece to a slot. Both ends know it from the sizes alone.
struct RowCut {
  int64_t row_bytes;
  int64_t pieces;       // of a row
  int64_t piece_bytes;  // from piece to piece, a multiple of 16
  int64_t per_slot;     // pieces; 1 where rows are cut

  // `slot_bytes` is a multiple of 16.
  JAX_EP_HOST_DEVICE constexpr RowCut(int64_t row, int64_t slot_bytes)
      : row_bytes(row),
        pieces((row + slot_bytes - 1) / slot_bytes),
        piece_bytes(((row + pieces - 1) / pieces + 15) / 16 * 16),
        per_slot(slot_bytes / piece_bytes) {}

  // The first byte of piece `part` in its row, and its size.
  JAX_EP_HOST_DEVICE constexpr int64_t begin(int64_t part) const {
    return part * piece_bytes;
  }
  JAX_EP_HOST_DEVICE constexpr int64_t bytes(int64_t part) const {
    return part < pieces - 1 ? piece_bytes : row_bytes - begin(part);
  }
  // Slots that so many pieces take.
  JAX_EP_HOST_DEVICE constexpr int64_t slots(int64_t count) const {
    return (count + per_slot - 1) / per_slot;
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_LAYOUT_H_
