// Says on stderr which waits of kernels take long. A thread of the process
// looks at the notes of all communicators a few times a second.
#ifndef JAX_EP_CC_HANDSHAKE_WAIT_NOTES_H_
#define JAX_EP_CC_HANDSHAKE_WAIT_NOTES_H_

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc/handshake/wait_limits.h"
#include "cc/handshake/wait_note.h"

namespace jax_ep {

class WaitNotes {
 public:
  // One for the process, never destroyed. Throws std::runtime_error where its
  // thread cannot be started.
  static WaitNotes& Get();

  // Looks at notes[0, num_ranks) of `rank` from now on; returns a number for
  // Remove(), after which it does not.
  int64_t Add(const WaitNote* notes, int32_t rank, int32_t num_ranks,
              const WaitLimits& limits);
  void Remove(int64_t number);

 private:
  struct Table {
    const WaitNote* notes;
    int32_t rank;
    int32_t num_ranks;
    WaitLimits limits;
    // (note, peer) that were told: two operations at a time may take turns.
    std::set<std::pair<uint64_t, int32_t>> told;
  };

  WaitNotes();
  void Run();
  static void Look(Table& table);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, Table> tables_;
  int64_t next_ = 0;
};

}  // namespace jax_ep

#endif  // JAX_EP_CC_HANDSHAKE_WAIT_NOTES_H_
