#include "cc/cpu/channel.h"

#include <algorithm>
#include <cstring>

#include "cc/threads.h"

namespace jax_ep::cpu {
namespace {

// Packets of one call to one process, and from one process, before others have
// their turn.
constexpr int kTurn = 8;
// Looks without finding anything before the thread sleeps; others run between.
constexpr int kLooks = 20;
constexpr size_t kMaxGivenUp = 4096;

}  // namespace

std::string Describe(const CallShape& shape) {
  const auto size = [&](int i) { return std::to_string(shape.sizes[i]); };
  if (shape.op == Op::kPlan) {
    return "plan of T = " + size(0) + ", K = " + size(1) + ", C = " + size(2) +
           ", E = " + size(3) + ", expert_alignment = " + size(4);
  }
  const bool low_latency =
      shape.op == Op::kLowLatencyDispatch || shape.op == Op::kLowLatencyCombine;
  std::string rows;
  // A peer's shape is what the peer says.
  const int num_leaves = std::min<int>(shape.num_leaves, kMaxLeaves);
  for (int i = 0; i < num_leaves; ++i) {
    rows += (i == 0 ? "" : " + ") + std::to_string(shape.row_bytes[i]);
  }
  rows = std::string(NameOf(shape.op)) + " of rows of " + rows +
         " bytes, T = " + size(0);
  if (low_latency) {
    return rows + ", K = " + size(1) + ", max_tokens = " + size(2) +
           ", E = " + size(3);
  }
  return rows + ", " + size(1) + " routes a token, C = " + size(2);
}

// Peers ----------------------------------------------------------------------

std::string Peers::Ranks(const GroupPlaces& places, int process) const {
  std::string ranks;
  for (size_t rank = 0; rank < places.process.size(); ++rank) {
    if (places.process[rank] != process) continue;
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return (ranks.find(',') == std::string::npos ? "rank " : "ranks ") + ranks +
         " (" + Name(process) + ")";
}

void Peers::AddWaiting(int process, const CallKey& key,
                       const CallShape& shape) {
  std::lock_guard<std::mutex> lock(mutex_);
  waiting_[{process, key}] = shape;
}

bool Peers::TakeWaiting(int process, const CallKey& key, CallShape& shape) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = waiting_.find({process, key});
  if (found == waiting_.end()) return false;
  shape = found->second;
  waiting_.erase(found);
  return true;
}

void Peers::DropWaiting(int process, const CallKey& key) {
  constexpr size_t kMaxDropped = 64;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = waiting_.find({process, key});
  if (found == waiting_.end()) return;
  dropped_.push_back(*found);
  waiting_.erase(found);
  if (dropped_.size() > kMaxDropped) dropped_.pop_front();
}

std::string Peers::WaitsIn(int process, const CallKey& key) {
  constexpr int kMaxNamed = 3;
  std::lock_guard<std::mutex> lock(mutex_);
  std::string calls;
  int number = 0;
  const auto add = [&](const Place& place, const CallShape& shape) {
    const auto& [who, where] = place;
    if (who != process || where.group != key.group || where.share != 0) return;
    if (++number > kMaxNamed) return;
    calls += (calls.empty() ? "" : ", ") + std::string(NameOf(shape.op)) +
             " (channel " + std::to_string(where.channel) + ")";
    if (where.run != key.run) calls += " of another run or program";
  };
  for (const auto& [place, shape] : waiting_) add(place, shape);
  if (number == 0) {
    for (const auto& [place, shape] : dropped_) add(place, shape);
  }
  if (number > kMaxNamed) {
    calls += " and " + std::to_string(number - kMaxNamed) + " more";
  }
  return calls;
}

// Channel --------------------------------------------------------------------

Channel::Channel(Peers& peers, const StagingLayout& layout,
                 const std::vector<SharedMemory>& memories, int64_t channel,
                 const WaitLimits& limits)
    : peers_(peers),
      slot_bytes_(layout.slot_bytes),
      limits_(limits),
      doorbell_(memories[peers.me()].base() + layout.asleep(channel)),
      links_(peers.size()) {
  const int me = peers.me();
  for (int process = 0; process < peers.size(); ++process) {
    if (process == me) continue;
    std::byte* theirs = memories[process].base();
    links_[process].reset(
        new Link{.process = process,
                 .in = Consumer(layout, memories[me].base(), channel,
                                StagingLayout::PeerIndex(me, process),
                                Doorbell(theirs + layout.asleep(channel))),
                 .out = Producer(layout, theirs, channel,
                                 StagingLayout::PeerIndex(process, me)),
                 .aborts = {}});
  }
  thread_ = StartThread([this] { Run(); });
}

Channel::~Channel() {
  stop_ = true;
  doorbell_.Ring();
  thread_.join();
}

void Channel::Post(std::unique_ptr<ChannelCall> call) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    posted_.push_back(std::move(call));
    has_posts_ = true;
  }
  doorbell_.Ring();
}

void Channel::Run() {
  int looks = 0;
  while (!stop_) {
    if (Work()) {
      looks = 0;
      continue;
    }
    if (!calls_.empty() && ++looks < kLooks) {
      std::this_thread::yield();
      continue;
    }
    looks = 0;
    // Deadlines of calls that are added meanwhile come with a ring.
    Clock::time_point until = Clock::now() + std::chrono::seconds(60);
    for (const auto& [key, call] : calls_) {
      until = std::min(until, call->deadline);
      if (!call->warned) until = std::min(until, WarnsAt(*call));
    }
    doorbell_.Prepare();
    if (HasWork() || stop_) {
      doorbell_.Cancel();
    } else {
      doorbell_.Sleep(until - Clock::now());
    }
  }
  for (auto call = calls_.begin(); call != calls_.end();) {
    call = Fail(call, "the communicator was released while it waited");
  }
}

// What can change while the thread looks elsewhere. Room in a ring shows as
// progress of the peer, which rings.
bool Channel::HasWork() {
  if (has_posts_) return true;
  for (const auto& link : links_) {
    if (link != nullptr && link->in.Ready()) return true;
  }
  return Work();
}

// One round over everything; whether anything moved.
bool Channel::Work() {
  // Before the rings are drained: what a process sent before it ended counts.
  std::vector<Peers::State> states(links_.size(), Peers::State::kHere);
  for (const auto& link : links_) {
    if (link != nullptr) states[link->process] = peers_.state(link->process);
  }
  bool moved = TakePosts();
  for (const auto& link : links_) {
    if (link == nullptr) continue;
    bool drained = Drain(*link);
    moved |= drained;
    while (drained && states[link->process] != Peers::State::kHere) {
      drained = Drain(*link);
    }
    if (states[link->process] == Peers::State::kHere) {
      moved |= SendAborts(*link);
    }
  }
  for (auto call = calls_.begin(); call != calls_.end();) {
    bool finished = false;
    moved |= Advance(*call->second, finished);
    if (!finished) {
      ++call;
      continue;
    }
    const std::unique_ptr<ChannelCall> owned = std::move(call->second);
    call = calls_.erase(call);
    owned->done(owned->move->Complete() ? "" : "lost rows: a bug in jax_ep");
  }
  for (const auto& link : links_) {
    if (link == nullptr) continue;
    switch (states[link->process]) {
      case Peers::State::kHere:
        break;
      case Peers::State::kClosed:
        FailLost(link->process, ": that process has closed the communicator");
        break;
      case Peers::State::kEnded:
        FailLost(link->process, ": that process has ended");
        break;
    }
  }
  FailOverdue();
  return moved;
}

bool Channel::TakePosts() {
  if (!has_posts_) return false;
  std::vector<std::unique_ptr<ChannelCall>> posted;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    posted.swap(posted_);
    has_posts_ = false;
  }
  for (std::unique_ptr<ChannelCall>& call : posted) Begin(std::move(call));
  return true;
}

bool Channel::Begin(std::unique_ptr<ChannelCall> call) {
  const CallKey key = call->key;
  for (const int process : call->places.process) {
    call->peers[process].member = process != peers_.me();
  }
  const auto [entry, added] = calls_.emplace(key, std::move(call));
  const auto given_up = given_up_.find(key);
  if (given_up != given_up_.end()) {
    Fail(entry, "came after its peers had given up: " + given_up->second);
    return false;
  }
  if (!entry->second->refusal.empty()) {
    Fail(entry, entry->second->refusal);
    return false;
  }
  for (int process = 0; process < peers_.size(); ++process) {
    CallShape shape;
    if (!peers_.TakeWaiting(process, key, shape)) continue;
    std::string problem;
    if (!Agrees(*entry->second, process, shape, problem)) {
      Fail(entry, problem);
      return false;
    }
    entry->second->peers[process].has_call = true;
  }
  return true;
}

bool Channel::Drain(Link& link) {
  PacketHeader header;
  for (int i = 0; i < kTurn; ++i) {
    const std::byte* data = link.in.Front(header);
    if (data == nullptr) return i > 0;
    TakePacket(link, header, data);
    link.in.Pop();
  }
  return true;
}

void Channel::TakePacket(Link& link, const PacketHeader& header,
                         const std::byte* data) {
  if (header.kind == PacketKind::kAnnounce) {
    CallShape shape;
    if (header.bytes != sizeof(shape)) return;
    std::memcpy(&shape, data, sizeof(shape));
    return TakeAnnouncement(link.process, header.key, shape);
  }
  if (header.kind == PacketKind::kAbort) {
    return TakeAbort(
        link.process, header.key,
        std::string(reinterpret_cast<const char*>(data), header.bytes));
  }
  const auto call = calls_.find(header.key);
  // The rest of a call that was given up here.
  if (call == calls_.end()) return;
  call->second->deadline = Clock::now() + limits_.timeout;
  if (header.kind == PacketKind::kEnd) {
    call->second->peers[link.process].has_ended = true;
  } else if (!call->second->move->Take(link.process, header.kind, data,
                                       header.bytes)) {
    Fail(call, "cannot use what " +
                   peers_.Ranks(call->second->places, link.process) +
                   " sent: do all processes have the same plan?");
  }
}

void Channel::TakeAnnouncement(int process, const CallKey& key,
                               const CallShape& shape) {
  const auto call = calls_.find(key);
  if (call == calls_.end()) {
    if (!given_up_.contains(key)) peers_.AddWaiting(process, key, shape);
    return;
  }
  std::string problem;
  if (Agrees(*call->second, process, shape, problem)) {
    call->second->peers[process].has_call = true;
  } else {
    Fail(call, problem);
  }
}

void Channel::TakeAbort(int process, const CallKey& key, std::string text) {
  peers_.DropWaiting(process, key);
  const auto call = calls_.find(key);
  if (call == calls_.end()) {
    RememberGivenUp(key, peers_.Name(process) + " " + text);
  } else {
    Fail(call, "heard that " + peers_.Ranks(call->second->places, process) +
                   " gave up: " + text);
  }
}

bool Channel::Advance(ChannelCall& call, bool& finished) {
  bool moved = call.move->Advance();
  finished = true;
  for (int process = 0; process < peers_.size(); ++process) {
    ChannelCall::Peer& peer = call.peers[process];
    if (!peer.member) continue;
    Producer& ring = links_[process]->out;
    if (!peer.announced && ring.Begin(PacketKind::kAnnounce, call.key)) {
      std::memcpy(ring.Append(sizeof(call.shape)), &call.shape,
                  sizeof(call.shape));
      ring.Send();
      moved = peer.announced = true;
    }
    if (peer.announced && peer.has_call) {
      Outbox out(ring, call.key, kTurn);
      call.move->Send(process, out);
      moved |= out.used();
    }
    if (peer.announced && peer.has_call && !peer.ended &&
        call.move->Ended(process) && ring.Begin(PacketKind::kEnd, call.key)) {
      ring.Send();
      moved = peer.ended = true;
    }
    finished &= peer.ended && peer.has_ended;
  }
  return moved;
}

bool Channel::SendAborts(Link& link) {
  bool moved = false;
  while (!link.aborts.empty() &&
         link.out.Begin(PacketKind::kAbort, link.aborts.front().first)) {
    const std::string& text = link.aborts.front().second;
    const int64_t bytes =
        std::min<int64_t>(link.out.room(), static_cast<int64_t>(text.size()));
    std::memcpy(link.out.Append(bytes), text.data(), bytes);
    link.out.Send();
    link.aborts.pop_front();
    moved = true;
  }
  return moved;
}

// Failing --------------------------------------------------------------------

bool Channel::Agrees(const ChannelCall& call, int process,
                     const CallShape& shape, std::string& problem) const {
  if (shape == call.shape) return true;
  problem = "called " + Describe(call.shape) + ", but " +
            peers_.Ranks(call.places, process) + " called " + Describe(shape);
  return false;
}

void Channel::RememberGivenUp(const CallKey& key, std::string text) {
  if (!given_up_.emplace(key, std::move(text)).second) return;
  given_up_order_.push_back(key);
  if (given_up_order_.size() <= kMaxGivenUp) return;
  given_up_.erase(given_up_order_.front());
  given_up_order_.pop_front();
}

Channel::Calls::iterator Channel::Fail(Calls::iterator call,
                                       const std::string& error) {
  const std::unique_ptr<ChannelCall> owned = std::move(call->second);
  const auto next = calls_.erase(call);
  for (int process = 0; process < peers_.size(); ++process) {
    if (owned->peers[process].member && !owned->peers[process].ended) {
      links_[process]->aborts.emplace_back(owned->key, error);
    }
  }
  // Announcements that are still to come are of no use.
  RememberGivenUp(owned->key, error);
  owned->done(error);
  return next;
}

void Channel::FailLost(int process, const std::string& what) {
  for (auto call = calls_.begin(); call != calls_.end();) {
    const ChannelCall::Peer& peer = call->second->peers[process];
    if (peer.member && !peer.has_ended) {
      call = Fail(call,
                  "lost " + peers_.Ranks(call->second->places, process) + what);
    } else {
      ++call;
    }
  }
}

void Channel::FailOverdue() {
  if (calls_.empty()) return;
  const Clock::time_point now = Clock::now();
  for (auto entry = calls_.begin(); entry != calls_.end();) {
    ChannelCall& call = *entry->second;
    if (now >= call.deadline) {
      entry = Fail(
          entry, "waited " + InSeconds(limits_.timeout) + "; " + Missing(call));
      continue;
    }
    if (!call.warned && now >= WarnsAt(call)) {
      call.warned = true;
      call.warn(Missing(call));
    }
    ++entry;
  }
}

Clock::time_point Channel::WarnsAt(const ChannelCall& call) const {
  if (!limits_.Warns()) return call.deadline;
  return call.deadline - limits_.timeout + limits_.warn_after;
}

std::string Channel::Missing(const ChannelCall& call) {
  std::string missing;
  std::string elsewhere;
  std::string slow;
  for (int process = 0; process < peers_.size(); ++process) {
    const ChannelCall::Peer& peer = call.peers[process];
    if (!peer.member || peer.has_ended) continue;
    const std::string ranks = peers_.Ranks(call.places, process);
    if (peer.has_call) {
      slow += (slow.empty() ? "" : ", ") + ranks;
      continue;
    }
    // "ranks 2, 3 (process 1)" without the first word.
    missing +=
        (missing.empty() ? "" : ", ") + ranks.substr(ranks.find(' ') + 1);
    const std::string calls = peers_.WaitsIn(process, call.key);
    if (!calls.empty()) elsewhere += "; " + ranks + " waiting in " + calls;
  }
  if (!missing.empty()) missing = "missing ranks: " + missing + elsewhere;
  if (slow.empty()) return missing;
  return missing + (missing.empty() ? "" : "; ") +
         "came and did not finish: " + slow;
}

}  // namespace jax_ep::cpu
