#include "cc/cpu/exchange.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>
#include <set>
#include <utility>

#include "cc/threads.h"

namespace jax_ep::cpu {
namespace {

// Sent before a socket is closed on purpose.
constexpr char kClosing = 'c';

// Of all exchanges of the process, for forked children.
struct OpenSockets {
  static OpenSockets& Get() {
    static OpenSockets* sockets = new OpenSockets;
    return *sockets;
  }
  std::mutex mutex;
  std::set<int> descriptors;
};

// The shares of a call that are not done, and the first error of any.
struct Outcome {
  std::atomic<size_t> left;
  std::mutex mutex;
  std::string error;
  std::atomic<bool> warned{false};
  std::function<void(const std::string&)> warn;
  std::function<void(const std::string&)> done;
};

}  // namespace

std::unique_ptr<Exchange> Exchange::Create(const Setup& setup) {
  std::vector<SharedMemory> memories;
  for (const int descriptor : setup.memories) {
    memories.emplace_back(descriptor, setup.layout.size());
    if (memories.back().base() == nullptr) return nullptr;
  }
  std::vector<int> sockets;
  const int wake = eventfd(0, EFD_CLOEXEC);
  bool failed = wake < 0;
  for (const int socket : setup.sockets) {
    sockets.push_back(socket < 0 ? -1 : fcntl(socket, F_DUPFD_CLOEXEC, 0));
    failed |= socket >= 0 && sockets.back() < 0;
  }
  if (failed) {
    for (const int socket : sockets) {
      if (socket >= 0) close(socket);
    }
    if (wake >= 0) close(wake);
    return nullptr;
  }
  std::unique_ptr<Exchange> exchange(
      new Exchange(setup, std::move(memories), std::move(sockets), wake));
  exchange->Start(setup);
  return exchange;
}

void Exchange::AbandonAfterFork() {
  OpenSockets& open = OpenSockets::Get();
  // Another thread of the parent may have held it: then its sockets stay.
  std::unique_lock<std::mutex> lock(open.mutex, std::try_to_lock);
  if (!lock) return;
  for (const int socket : open.descriptors) close(socket);
  open.descriptors.clear();
}

Exchange::Exchange(const Setup& setup, std::vector<SharedMemory> memories,
                   std::vector<int> sockets, int wake)
    : peers_(setup.numbers, setup.me),
      sockets_(std::move(sockets)),
      wake_(wake),
      memories_(std::move(memories)) {
  OpenSockets& open = OpenSockets::Get();
  std::lock_guard<std::mutex> lock(open.mutex);
  for (const int socket : sockets_) {
    if (socket >= 0) open.descriptors.insert(socket);
  }
}

// Starts the threads. Where one cannot be started the destructor ends the rest.
void Exchange::Start(const Setup& setup) {
  for (int64_t i = 0; i < setup.layout.num_channels; ++i) {
    channels_.push_back(std::make_unique<Channel>(peers_, setup.layout,
                                                  memories_, i, setup.limits));
  }
  watch_ = StartThread([this] { Watch(); });
}

Exchange::~Exchange() {
  const uint64_t one = 1;
  if (watch_.joinable() && write(wake_, &one, sizeof(one)) == sizeof(one)) {
    watch_.join();
  }
  for (const int socket : sockets_) {
    if (socket < 0) continue;
    send(socket, &kClosing, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  channels_.clear();
  {
    OpenSockets& open = OpenSockets::Get();
    std::lock_guard<std::mutex> lock(open.mutex);
    for (const int socket : sockets_) {
      if (socket < 0) continue;
      open.descriptors.erase(socket);
      close(socket);
    }
  }
  close(wake_);
}

void Exchange::Post(Call call) {
  auto outcome = std::make_shared<Outcome>();
  const size_t num_shares = call.shares.size();
  outcome->left = num_shares;
  outcome->warn = std::move(call.warn);
  outcome->done = std::move(call.done);
  // Equal on all processes: both ends of a ring serve the same channel.
  const uint64_t first =
      static_cast<uint64_t>(call.key.channel + call.key.run +
                            call.key.sequence + call.key.site + call.key.group);
  for (size_t share = 0; share < num_shares; ++share) {
    CallKey key = call.key;
    key.share = static_cast<int32_t>(share);
    auto part = std::make_unique<ChannelCall>(key, peers_.size());
    part->shape = call.shape;
    part->places = call.places;
    part->deadline = call.deadline;
    part->refusal = call.refusal;
    part->move = std::move(call.shares[share]);
    part->warn = [outcome](const std::string& what) {
      if (!outcome->warned.exchange(true)) outcome->warn(what);
    };
    part->done = [outcome](const std::string& error) {
      {
        std::lock_guard<std::mutex> lock(outcome->mutex);
        if (outcome->error.empty()) outcome->error = error;
      }
      if (outcome->left.fetch_sub(1) == 1) outcome->done(outcome->error);
    };
    channels_[(first + share) % channels_.size()]->Post(std::move(part));
  }
}

void Exchange::Watch() {
  std::vector<pollfd> polled = {{.fd = wake_, .events = POLLIN, .revents = 0}};
  for (const int socket : sockets_) {
    polled.push_back({.fd = socket, .events = POLLIN, .revents = 0});
  }
  for (;;) {
    if (poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) return;
    if (polled[0].revents != 0) return;
    for (size_t i = 1; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      polled[i].revents = 0;
      const int process = static_cast<int>(i - 1);
      char word = 0;
      const ssize_t size = recv(sockets_[process], &word, 1, MSG_DONTWAIT);
      if (size < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      const bool closing = size == 1 && word == kClosing;
      peers_.SetState(process,
                      closing ? Peers::State::kClosed : Peers::State::kEnded);
      polled[i].fd = -1;  // nothing else will come
      for (const auto& channel : channels_) channel->Wake();
    }
  }
}

}  // namespace jax_ep::cpu
