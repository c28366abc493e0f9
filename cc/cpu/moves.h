// What one call sends to other processes and takes from them, apart from how.
//
// A Move belongs to one thread. It never waits: Send() gives what there is room
// for, and what Take() gets always has its place already, in an output buffer,
// a window of bounded size or a list. That is why rings always drain, whatever
// order calls come in; see docs/design.md.
#ifndef JAX_EP_CC_CPU_MOVES_H_
#define JAX_EP_CC_CPU_MOVES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cc/cpu/ops.h"
#include "cc/cpu/staging.h"
#include "cc/cpu/wire.h"

namespace jax_ep::cpu {

// Packets of one call to one process, until the ring or the allowance is used
// up: calls that share a ring take turns.
class Outbox {
 public:
  Outbox(Producer& ring, const CallKey& key, int max_packets)
      : ring_(ring), key_(key), packets_left_(max_packets) {}
  ~Outbox() { Flush(); }
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  // Room for at least `at_least` bytes in a packet of `kind`, 0 for now where
  // there is none.
  int64_t Room(PacketKind kind, int64_t at_least);
  std::byte* Append(int64_t bytes) { return ring_.Append(bytes); }
  void Flush();
  bool used() const { return used_; }

 private:
  Producer& ring_;
  const CallKey key_;
  int packets_left_;
  bool open_ = false;
  bool used_ = false;
};

class Move {
 public:
  virtual ~Move() = default;

  // Sends to a process that has the call, as much as goes.
  virtual void Send(int process, Outbox& out) = 0;
  // Takes what a process sent; false where it makes no sense.
  virtual bool Take(int process, PacketKind kind, const std::byte* data,
                    int64_t bytes) = 0;
  // Works on what has arrived; whether there was something to do.
  virtual bool Advance() { return false; }
  // Whether nothing more has to go to a process or come from it on our behalf.
  // Its wishes are served until it says the same.
  virtual bool Ended(int process) const = 0;
  // Whether everything came, once all processes have ended.
  virtual bool Complete() const = 0;
};

// Who is where: processes by their position among the communicator's.
struct GroupPlaces {
  int me;
  std::vector<int> process;  // of each rank
  bool Here(int rank) const { return process[rank] == me; }
};

// plan: everybody's expert ids to everybody. `ids` has T * K of each rank and
// is filled for ranks elsewhere; both vectors outlive the move.
std::unique_ptr<Move> MakePlanMove(const GroupPlaces& places, int64_t num_bytes,
                                   std::vector<std::byte*> ids);

// dispatch and combine over tokens [begin, end) of each rank. `ranks` has the
// buffers of the ranks here and nothing of the others.
struct TokenRange {
  int64_t begin;
  int64_t end;
};
std::unique_ptr<Move> MakeDispatchMove(const GroupPlaces& places,
                                       const RowSizes& sizes,
                                       std::vector<RowBuffers> ranks,
                                       TokenRange tokens);
// Also sums: rows that are here directly, others through a window.
std::unique_ptr<Move> MakeCombineMove(const GroupPlaces& places,
                                      const RowSizes& sizes,
                                      std::vector<RowBuffers> ranks,
                                      TokenRange tokens);

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CC_CPU_MOVES_H_
