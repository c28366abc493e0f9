#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cc/cpu/ops.h"
#include "cc/cpu/wire.h"
#include "cc/layout/limits.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/host_calls.h"
#include "xla_ffi/leaves.h"

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

// Below this a call is done by the rank that came last: handing parts to other
// threads costs some ten microseconds.
constexpr int64_t kParallelBytes = 256 << 10;
// Between processes, below this a rank's rows keep one channel busy only.
constexpr int64_t kShareBytes = 256 << 10;

// The leaves of one rank; `capacity` rows stand on the receiver's side.
std::vector<cpu::Leaf> Leaves(const ffi::RemainingArgs& in,
                              const ffi::RemainingRets& out,
                              bool capacity_is_out) {
  std::vector<cpu::Leaf> leaves;
  for (size_t i = 0; i < in.size(); ++i) {
    const ffi::AnyBuffer from = *in.get<ffi::AnyBuffer>(i);
    const ffi::AnyBuffer to = **out.get<ffi::AnyBuffer>(i);
    // The capacity is never 0, the number of tokens may be.
    leaves.push_back(LeafOf<cpu::Leaf>(from, to, capacity_is_out ? to : from));
  }
  return leaves;
}

int64_t RowBytes(const cpu::RowBuffers& rank) {
  int64_t bytes = 0;
  for (const cpu::Leaf& leaf : rank.leaves) bytes += leaf.row_bytes;
  return bytes;
}

using RowWork = void (*)(const cpu::RowSizes&,
                         const std::vector<cpu::RowBuffers>&, const cpu::Part&);

// Runs `work` over all parts of `ranks`, on XLA's threads where it is worth it,
// and calls finish(on this thread) with the last part. Never waits.
void RunParts(const std::vector<int>& here, std::vector<cpu::RowBuffers> ranks,
              const cpu::RowSizes& sizes, RowWork work,
              ffi::ThreadPool& threads, std::function<void(bool)> finish) {
  struct Shared {
    std::function<void(bool)> finish;
    cpu::RowSizes sizes;
    RowWork work;
    std::vector<cpu::RowBuffers> ranks;
    std::vector<cpu::Part> parts;
    std::atomic<size_t> next{0};
    std::atomic<size_t> done{0};

    void Run(bool on_this_thread) {
      for (;;) {
        const size_t i = next.fetch_add(1);
        if (i >= parts.size()) return;
        work(sizes, ranks, parts[i]);
        if (done.fetch_add(1) + 1 == parts.size()) {
          finish(on_this_thread);
        }
      }
    }
  };
  auto shared = std::make_shared<Shared>();
  shared->ranks = std::move(ranks);
  const int64_t bytes = RowBytes(shared->ranks[here[0]]) *
                        static_cast<int64_t>(here.size()) *
                        (sizes.num_tokens + sizes.capacity);
  const bool parallel = bytes >= kParallelBytes;
  const int64_t workers =
      parallel ? std::max<int64_t>(1, threads.num_threads()) : 1;
  shared->finish = std::move(finish);
  shared->sizes = sizes;
  shared->work = work;
  // A few parts a worker: one that starts late does not hold the rest up.
  shared->parts =
      cpu::SplitRows(here, sizes.num_tokens, parallel ? workers : 1);
  for (int64_t i = 1; i < workers; ++i) {
    threads.Schedule([shared] { shared->Run(false); });
  }
  shared->Run(true);
}

// All ranks are here.
void RunRows(const HostCall& call, const cpu::RowSizes& sizes, RowWork work,
             ffi::ThreadPool& threads) {
  RunParts(call.rendezvous->ranks(), Arrivals<cpu::RowBuffers>(call), sizes,
           work, threads,
           [rendezvous = call.rendezvous](bool on_last_ranks_thread) {
             rendezvous->Finish(on_last_ranks_thread);
           });
}

// The ranks here move their rows directly, or through `make_share` where other
// processes take part.
using MakeShare = std::unique_ptr<cpu::Move> (*)(const cpu::GroupPlaces&,
                                                 const cpu::RowSizes&,
                                                 std::vector<cpu::RowBuffers>,
                                                 cpu::TokenRange);

void PostRows(const HostCall& call, cpu::Op op, const cpu::RowSizes& sizes,
              const std::vector<cpu::RowBuffers>& ranks, MakeShare make_share,
              std::function<void(const std::string& error)> done) {
  const cpu::RowBuffers& mine = ranks[call.rendezvous->ranks()[0]];
  cpu::CallShape shape = {
      .op = op,
      .num_leaves = static_cast<int32_t>(mine.leaves.size()),
      .sizes = {sizes.num_tokens, sizes.routes_per_token, sizes.capacity}};
  for (int32_t i = 0; i < std::min(shape.num_leaves, kMaxLeaves); ++i) {
    shape.row_bytes[i] = mine.leaves[i].row_bytes;
    shape.elements[i] = static_cast<int32_t>(mine.leaves[i].element);
  }
  // From sizes alone, so that every process cuts the work alike.
  const int64_t tokens = sizes.num_tokens;
  const int64_t num_shares =
      tokens * RowBytes(mine) < kShareBytes
          ? 1
          : std::min<int64_t>(tokens, call.comm().exchange->num_channels());
  std::vector<std::unique_ptr<cpu::Move>> shares;
  for (int64_t i = 0; i < num_shares; ++i) {
    shares.push_back(
        make_share(call.comm().group_places[call.group], sizes, ranks,
                   {tokens * i / num_shares, tokens * (i + 1) / num_shares}));
  }
  Post(call, shape, std::move(shares), std::move(done));
}

// Rows for ranks here go straight, beside the exchange with other processes.
void DispatchBetweenProcesses(const HostCall& call, const cpu::RowSizes& sizes,
                              ffi::ThreadPool& threads) {
  // Buffers are XLA's again once both parts have ended.
  struct BothParts {
    std::shared_ptr<cpu::Rendezvous> rendezvous;
    std::mutex mutex;
    int left = 2;
    std::string error;

    void End(const std::string& problem) {
      std::unique_lock<std::mutex> lock(mutex);
      if (error.empty()) error = problem;
      if (--left > 0) return;
      lock.unlock();
      rendezvous->Finish(false, error);
    }
  };
  auto parts = std::make_shared<BothParts>();
  parts->rendezvous = call.rendezvous;
  std::vector<cpu::RowBuffers> ranks = Arrivals<cpu::RowBuffers>(call);
  PostRows(call, cpu::Op::kDispatch, sizes, ranks, cpu::MakeDispatchMove,
           [parts](const std::string& error) { parts->End(error); });
  if (!call.rendezvous->refusal().empty()) return parts->End("");
  RunParts(call.rendezvous->ranks(), std::move(ranks), sizes, cpu::Dispatch,
           threads, [parts](bool) { parts->End(""); });
}

ffi::Future Dispatch(HostCallSite* site, ffi::RunId run, int32_t ordinal,
                     Position position, ffi::ThreadPool threads,
                     ffi::BufferR3<ffi::S32> routes,
                     ffi::BufferR0<ffi::S32> num_recv,
                     ffi::BufferR1<ffi::S32> /*recv_src*/,
                     ffi::RemainingArgs in, ffi::RemainingRets out) {
  const cpu::RowSizes sizes = {
      .routes_per_token = static_cast<int32_t>(routes.dimensions()[1]),
      .num_tokens = routes.dimensions()[0],
      .capacity = (**out.get<ffi::AnyBuffer>(0)).dimensions()[0],
  };
  auto buffers = std::make_shared<cpu::RowBuffers>(
      cpu::RowBuffers{.routes = routes.typed_data(),
                      .num_recv = num_recv.typed_data(),
                      .leaves = Leaves(in, out, /*capacity_is_out=*/true)});
  return Meet(site, run, ordinal, position, std::move(buffers),
              [&](const HostCall& call) {
                if (call.local()) {
                  RunRows(call, sizes, cpu::Dispatch, threads);
                } else {
                  DispatchBetweenProcesses(call, sizes, threads);
                }
              });
}

ffi::Future Combine(HostCallSite* site, ffi::RunId run, int32_t ordinal,
                    Position position, ffi::ThreadPool threads,
                    ffi::BufferR3<ffi::S32> routes,
                    ffi::BufferR0<ffi::S32> /*num_recv*/,
                    ffi::BufferR1<ffi::S32> /*recv_src*/, ffi::RemainingArgs in,
                    ffi::RemainingRets out) {
  const cpu::RowSizes sizes = {
      .routes_per_token = static_cast<int32_t>(routes.dimensions()[1]),
      .num_tokens = routes.dimensions()[0],
      .capacity = in.get<ffi::AnyBuffer>(0)->dimensions()[0],
  };
  auto buffers = std::make_shared<cpu::RowBuffers>(
      cpu::RowBuffers{.routes = routes.typed_data(),
                      .num_recv = nullptr,
                      .leaves = Leaves(in, out, /*capacity_is_out=*/false)});
  for (const cpu::Leaf& leaf : buffers->leaves) {
    if (leaf.element == Element::kNone) {
      return Failed("jax_ep combine: a leaf's dtype cannot be summed");
    }
  }
  return Meet(site, run, ordinal, position, std::move(buffers),
              [&](const HostCall& call) {
                if (call.local()) {
                  return RunRows(call, sizes, cpu::Combine, threads);
                }
                PostRows(
                    call, cpu::Op::kCombine, sizes,
                    Arrivals<cpu::RowBuffers>(call), cpu::MakeCombineMove,
                    [rendezvous = call.rendezvous](const std::string& error) {
                      rendezvous->Finish(false, error);
                    });
              });
}

// What dispatch and combine bind: the position, the routing, then the leaves.
auto BindRows() {
  return BindCall()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::BufferR3<ffi::S32>>()  // routes
      .Arg<ffi::BufferR0<ffi::S32>>()  // num_recv
      .Arg<ffi::BufferR1<ffi::S32>>()  // recv_src
      .RemainingArgs()
      .RemainingRets();
}

const HandlerRegistration dispatch(
    "jax_ep_dispatch", Execute<Dispatch, BindRows>,
    Instantiate<MakeCallSiteOf<cpu::Op::kDispatch>>);
const HandlerRegistration combine(
    "jax_ep_combine", Execute<Combine, BindRows>,
    Instantiate<MakeCallSiteOf<cpu::Op::kCombine>>);

}  // namespace

}  // namespace jax_ep
