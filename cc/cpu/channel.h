// A channel: the thread of one process that moves the rows of its calls through
// one ring to and one from every other process.
//
// A call begins with an announcement to every process of its group, and rows
// only move between two processes once both have announced it. See
// docs/design.md for why no order of calls can deadlock.
#ifndef JAX_EP_CC_CPU_CHANNEL_H_
#define JAX_EP_CC_CPU_CHANNEL_H_

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/cpu/moves.h"
#include "cc/cpu/staging.h"
#include "cc/cpu/wire.h"
#include "cc/handshake/wait_limits.h"
#include "cc/layout/staging.h"

namespace jax_ep::cpu {

// The other processes of a communicator, by position. What all its channels
// know.
class Peers {
 public:
  enum class State { kHere, kClosed, kEnded };

  // numbers: JAX's process indices by position.
  Peers(std::vector<int> numbers, int me)
      : numbers_(std::move(numbers)), me_(me), states_(numbers_.size()) {}

  int me() const { return me_; }
  int size() const { return static_cast<int>(numbers_.size()); }
  // "process 3"
  std::string Name(int process) const {
    return "process " + std::to_string(numbers_[process]);
  }
  // "ranks 2, 3 (process 1)" of a group.
  std::string Ranks(const GroupPlaces& places, int process) const;

  State state(int process) const { return states_[process].load(); }
  void SetState(int process, State state) { states_[process].store(state); }

  // Calls that peers have announced and this process does not have yet.
  void AddWaiting(int process, const CallKey& key, const CallShape& shape);
  bool TakeWaiting(int process, const CallKey& key, CallShape& shape);
  // A peer has given such a call up; it still tells where the peer was.
  void DropWaiting(int process, const CallKey& key);
  // Where a process waits, apart from `key`: "combine (channel 9)", or "".
  std::string WaitsIn(int process, const CallKey& key);

 private:
  const std::vector<int> numbers_;
  const int me_;
  std::vector<std::atomic<State>> states_;
  std::mutex mutex_;
  using Place = std::pair<int, CallKey>;
  std::map<Place, CallShape> waiting_;
  std::deque<std::pair<Place, CallShape>> dropped_;  // the latest
};

// "dispatch of rows of 18 + 4 bytes, T = 13, C = 26"
std::string Describe(const CallShape& shape);

// A share of one call, on its way through a channel.
struct ChannelCall {
  ChannelCall(const CallKey& call_key, int num_processes)
      : key(call_key), peers(num_processes) {}

  // What this process and another have told each other.
  struct Peer {
    bool member = false;
    bool announced = false;  // by us
    bool has_call = false;   // it announced
    bool ended = false;      // by us
    bool has_ended = false;  // by it
  };

  const CallKey key;
  CallShape shape;
  GroupPlaces places;
  Clock::time_point deadline;
  std::string refusal;      // Exchange::Call
  std::vector<Peer> peers;  // by process
  std::unique_ptr<Move> move;
  // Run on the channel's thread; must not block. `warn` says for what it waits,
  // once. `done`: empty means success.
  std::function<void(const std::string& what)> warn;
  std::function<void(const std::string& error)> done;
  bool warned = false;
};

class Channel {
 public:
  // memories: staging memory of every process by position, mapped here.
  Channel(Peers& peers, const StagingLayout& layout,
          const std::vector<SharedMemory>& memories, int64_t channel,
          const WaitLimits& limits);
  // Ends the thread. Calls in flight fail.
  ~Channel();

  void Post(std::unique_ptr<ChannelCall> call);
  // Makes the thread look at the peers' states.
  void Wake() { doorbell_.Ring(); }

 private:
  using Calls = std::map<CallKey, std::unique_ptr<ChannelCall>>;
  // Everything between this process and one other.
  struct Link {
    int process;
    Consumer in;
    Producer out;
    std::deque<std::pair<CallKey, std::string>> aborts;  // to be sent
  };

  void Run();
  bool Work();
  bool TakePosts();
  bool Begin(std::unique_ptr<ChannelCall> call);
  bool Drain(Link& link);
  void TakePacket(Link& link, const PacketHeader& header,
                  const std::byte* data);
  void TakeAnnouncement(int process, const CallKey& key,
                        const CallShape& shape);
  void TakeAbort(int process, const CallKey& key, std::string text);
  bool Advance(ChannelCall& call, bool& finished);
  bool SendAborts(Link& link);
  void FailOverdue();
  void FailLost(int process, const std::string& what);
  bool Agrees(const ChannelCall& call, int process, const CallShape& shape,
              std::string& problem) const;
  // When the call's wait, which began anew with the last row, is a long one.
  Clock::time_point WarnsAt(const ChannelCall& call) const;
  // Who is missing where.
  std::string Missing(const ChannelCall& call);
  void RememberGivenUp(const CallKey& key, std::string text);
  Calls::iterator Fail(Calls::iterator call, const std::string& error);
  bool HasWork();

  Peers& peers_;
  const int64_t slot_bytes_;
  const WaitLimits limits_;
  Doorbell doorbell_;
  std::vector<std::unique_ptr<Link>> links_;  // by process, none to itself

  // The thread's own.
  Calls calls_;
  // Why calls were given up that have not come here yet; the oldest go.
  std::map<CallKey, std::string> given_up_;
  std::deque<CallKey> given_up_order_;

  std::mutex mutex_;
  std::vector<std::unique_ptr<ChannelCall>> posted_;
  std::atomic<bool> has_posts_ = false;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CC_CPU_CHANNEL_H_
