#include "xla_ffi/host_handlers.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "cc/cpu/completion_threads.h"
#include "cc/cpu/ops.h"
#include "cc/layout.h"
#include "xla_ffi/element.h"
#include "xla_ffi/registry.h"

namespace jax_ep {

namespace ffi = xla::ffi;

ffi::TypeId HostCallSite::id = {};
const XLA_FFI_TypeInfo kHostCallSiteInfo = ffi::MakeTypeInfo<HostCallSite>();

HostCommunicator::~HostCommunicator() {
  // A forked child has no threads to join; the sockets are its parent's.
  if (getpid() != process_id) static_cast<void>(exchange.release());
}

namespace {

// Below this a call is done by the rank that came last: handing parts to other
// threads costs some ten microseconds.
constexpr int64_t kParallelBytes = 256 << 10;
// Between processes, below this a rank's rows keep one channel busy only.
constexpr int64_t kShareBytes = 256 << 10;

ffi::ErrorOr<std::unique_ptr<HostCallSite>> Instantiate(
    const char* op, ffi::Dictionary attributes) {
  const auto comm = attributes.get<int64_t>("comm");
  const auto channel = attributes.get<int64_t>("channel");
  if (comm.has_error()) return ffi::Unexpected(comm.error());
  if (channel.has_error()) return ffi::Unexpected(channel.error());
  std::shared_ptr<HostCommunicator> communicator =
      Registry<HostCommunicator>::Get().Find(*comm);
  if (communicator == nullptr) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                                      UnknownCommunicator(*comm, "cpu")));
  }
  return std::make_unique<HostCallSite>(
      std::move(communicator),
      std::string(op) + " (channel " + std::to_string(*channel) + ")",
      *channel);
}

ffi::Future Failed(const std::string& message) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ffi::Error(ffi::ErrorCode::kInternal, message));
  return future;
}

// A meeting that is complete, and which one it is.
struct Met {
  HostCallSite* site;
  int64_t run;
  int group;
  std::shared_ptr<cpu::Meeting> meeting;

  const HostCommunicator& comm() const { return *site->communicator; }
  bool local() const { return comm().IsLocal(group); }
};

// Enters this device's rank with `arrival`; `work` runs on the last rank's
// thread, and ends in the meeting's Finish().
ffi::Future Meet(HostCallSite* site, ffi::RunId run, int32_t ordinal,
                 std::shared_ptr<void> arrival,
                 const std::function<void(const Met&)>& work) {
  const auto place = site->communicator->places.find(ordinal);
  if (place == site->communicator->places.end()) {
    return Failed("jax_ep: device " + std::to_string(ordinal) +
                  " is not on the communicator's mesh");
  }
  auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);
  std::shared_ptr<cpu::Meeting> meeting = site->rendezvous.Enter(
      run.run_id, place->second.group, place->second.rank, std::move(arrival),
      [promise](const std::string& error) {
        if (error.empty()) {
          promise->SetAvailable();
        } else {
          promise->SetError(
              ffi::Error(ffi::ErrorCode::kDeadlineExceeded, error));
        }
      });
  if (meeting != nullptr) {
    work({site, run.run_id, place->second.group, std::move(meeting)});
  }
  return future;
}

// Buffers by rank; ranks of other processes have none.
template <typename T>
std::vector<T> Arrivals(const Met& met) {
  std::vector<T> result(met.comm().num_ranks);
  const std::vector<int>& ranks = met.meeting->ranks();
  for (size_t i = 0; i < ranks.size(); ++i) {
    result[ranks[i]] = *static_cast<const T*>(met.meeting->arrivals()[i].get());
  }
  return result;
}

// Lets other processes take part in a call whose ranks here have met.
void Post(const Met& met, const cpu::CallShape& shape,
          std::vector<std::unique_ptr<cpu::Move>> shares,
          std::function<void(const std::string& error)> done) {
  const std::optional<int64_t> sequence =
      met.site->communicator->sites.Next(met.site, met.run, met.group);
  if (!sequence) {
    return done(
        "found two call sites of one channel that its peers could not tell "
        "apart; do not compile programs in several threads at a time");
  }
  cpu::Exchange::Call call;
  call.key = {.run = met.run,
              .sequence = *sequence,
              .channel = met.site->channel,
              .site = met.site->number,
              .group = met.group};
  call.shape = shape;
  call.places = met.comm().group_places[met.group];
  call.deadline = met.meeting->deadline();
  call.shares = std::move(shares);
  call.done = std::move(done);
  met.comm().exchange->Post(std::move(call));
}

// Plan -----------------------------------------------------------------------

// Everybody's ids come here; then the plan of the ranks here is as with all
// ranks in one process.
void PlanBetweenProcesses(const Met& met, const cpu::PlanSizes& sizes) {
  struct Shared {
    std::vector<std::vector<std::byte>> elsewhere;
    std::vector<cpu::PlanBuffers> ranks;
  };
  auto shared = std::make_shared<Shared>();
  shared->ranks = Arrivals<cpu::PlanBuffers>(met);
  shared->elsewhere.resize(shared->ranks.size());
  const int64_t num_bytes =
      sizes.num_tokens * sizes.top_k * int64_t{sizeof(int32_t)};
  std::vector<std::byte*> ids;
  for (size_t rank = 0; rank < shared->ranks.size(); ++rank) {
    cpu::PlanBuffers& buffers = shared->ranks[rank];
    if (!buffers.here()) {
      shared->elsewhere[rank].resize(num_bytes);
      buffers.topk_idx =
          reinterpret_cast<const int32_t*>(shared->elsewhere[rank].data());
    }
    // Those that are here are only read.
    ids.push_back(
        reinterpret_cast<std::byte*>(const_cast<int32_t*>(buffers.topk_idx)));
  }
  const cpu::CallShape shape = {
      .op = cpu::Op::kPlan,
      .sizes = {sizes.num_tokens, sizes.top_k, sizes.capacity,
                sizes.num_experts, sizes.expert_alignment}};
  std::vector<std::unique_ptr<cpu::Move>> shares;
  shares.push_back(cpu::MakePlanMove(met.comm().group_places[met.group],
                                     num_bytes, std::move(ids)));
  Post(met, shape, std::move(shares),
       [shared, sizes, meeting = met.meeting](const std::string& error) {
         if (!error.empty()) return meeting->Finish(false, error);
         // Not on the channel's thread: others' rows wait there.
         cpu::CompletionThreads::Get().Run([shared, sizes, meeting] {
           cpu::Plan(sizes, shared->ranks);
           meeting->Finish(false);
         });
       });
}

ffi::Future Plan(HostCallSite* site, ffi::RunId run, int32_t ordinal,
                 ffi::BufferR2<ffi::S32> topk_idx,
                 ffi::ResultBufferR3<ffi::S32> routes,
                 ffi::ResultBufferR0<ffi::S32> num_recv,
                 ffi::ResultBufferR0<ffi::S32> num_demand,
                 ffi::ResultBufferR0<ffi::PRED> overflow,
                 ffi::ResultBufferR1<ffi::S32> recv_counts,
                 ffi::ResultBufferR2<ffi::S32> recv_topk_idx,
                 ffi::ResultBufferR1<ffi::S32> recv_src,
                 ffi::ResultBufferR1<ffi::S32> expert_counts,
                 ffi::ResultBufferR1<ffi::S32> group_sizes,
                 ffi::ResultBufferR1<ffi::S32> /*workspace*/,
                 ffi::Dictionary attributes) {
  const auto num_experts = attributes.get<int64_t>("num_experts");
  const auto alignment = attributes.get<int64_t>("expert_alignment");
  if (num_experts.has_error()) return Failed(num_experts.error().message());
  if (alignment.has_error()) return Failed(alignment.error().message());
  const cpu::PlanSizes sizes = {
      .num_ranks = site->communicator->num_ranks,
      .num_experts = static_cast<int32_t>(*num_experts),
      .expert_alignment = static_cast<int32_t>(*alignment),
      .top_k = static_cast<int32_t>(topk_idx.dimensions()[1]),
      .num_tokens = topk_idx.dimensions()[0],
      .capacity = recv_src->dimensions()[0],
  };
  auto buffers = std::make_shared<cpu::PlanBuffers>(cpu::PlanBuffers{
      .topk_idx = topk_idx.typed_data(),
      .routes = routes->typed_data(),
      .num_recv = num_recv->typed_data(),
      .num_demand = num_demand->typed_data(),
      .overflow = overflow->typed_data(),
      .recv_counts = recv_counts->typed_data(),
      .recv_topk_idx = recv_topk_idx->typed_data(),
      .recv_src = recv_src->typed_data(),
      .expert_counts = expert_counts->typed_data(),
      .group_sizes = group_sizes->typed_data(),
  });
  return Meet(site, run, ordinal, std::move(buffers), [&](const Met& met) {
    if (!met.local()) return PlanBetweenProcesses(met, sizes);
    cpu::Plan(sizes, Arrivals<cpu::PlanBuffers>(met));
    met.meeting->Finish(/*on_last_ranks_thread=*/true);
  });
}

// Dispatch and combine -------------------------------------------------------

// The leaves of one rank; `capacity` rows stand on the receiver's side.
std::vector<cpu::Leaf> Leaves(const ffi::RemainingArgs& in,
                              const ffi::RemainingRets& out,
                              bool capacity_is_out) {
  std::vector<cpu::Leaf> leaves;
  for (size_t i = 0; i < in.size(); ++i) {
    const ffi::AnyBuffer from = *in.get<ffi::AnyBuffer>(i);
    const ffi::AnyBuffer to = **out.get<ffi::AnyBuffer>(i);
    // The capacity is never 0, the number of tokens may be.
    const ffi::AnyBuffer& rows = capacity_is_out ? to : from;
    leaves.push_back({
        .in = static_cast<const std::byte*>(from.untyped_data()),
        .out = static_cast<std::byte*>(to.untyped_data()),
        .row_bytes =
            static_cast<int64_t>(rows.size_bytes()) / rows.dimensions()[0],
        .element = ElementOf(from.element_type()),
    });
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
void RunRows(const Met& met, const cpu::RowSizes& sizes, RowWork work,
             ffi::ThreadPool& threads) {
  RunParts(met.meeting->ranks(), Arrivals<cpu::RowBuffers>(met), sizes, work,
           threads, [meeting = met.meeting](bool on_last_ranks_thread) {
             meeting->Finish(on_last_ranks_thread);
           });
}

// The ranks here move their rows directly, or through `make_share` where other
// processes take part.
using MakeShare = std::unique_ptr<cpu::Move> (*)(const cpu::GroupPlaces&,
                                                 const cpu::RowSizes&,
                                                 std::vector<cpu::RowBuffers>,
                                                 cpu::TokenRange);

void PostRows(const Met& met, cpu::Op op, const cpu::RowSizes& sizes,
              const std::vector<cpu::RowBuffers>& ranks, MakeShare make_share,
              std::function<void(const std::string& error)> done) {
  const cpu::RowBuffers& mine = ranks[met.meeting->ranks()[0]];
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
          : std::min<int64_t>(tokens, met.comm().exchange->num_channels());
  std::vector<std::unique_ptr<cpu::Move>> shares;
  for (int64_t i = 0; i < num_shares; ++i) {
    shares.push_back(
        make_share(met.comm().group_places[met.group], sizes, ranks,
                   {tokens * i / num_shares, tokens * (i + 1) / num_shares}));
  }
  Post(met, shape, std::move(shares), std::move(done));
}

// Rows for ranks here go straight, beside the exchange with other processes.
void DispatchBetweenProcesses(const Met& met, const cpu::RowSizes& sizes,
                              ffi::ThreadPool& threads) {
  // Buffers are XLA's again once both halves have ended.
  struct Halves {
    std::shared_ptr<cpu::Meeting> meeting;
    std::mutex mutex;
    int left = 2;
    std::string error;

    void End(const std::string& problem) {
      std::unique_lock<std::mutex> lock(mutex);
      if (error.empty()) error = problem;
      if (--left > 0) return;
      lock.unlock();
      meeting->Finish(false, error);
    }
  };
  auto halves = std::make_shared<Halves>();
  halves->meeting = met.meeting;
  std::vector<cpu::RowBuffers> ranks = Arrivals<cpu::RowBuffers>(met);
  PostRows(met, cpu::Op::kDispatch, sizes, ranks, cpu::MakeDispatchMove,
           [halves](const std::string& error) { halves->End(error); });
  RunParts(met.meeting->ranks(), std::move(ranks), sizes, cpu::Dispatch,
           threads, [halves](bool) { halves->End(""); });
}

ffi::Future Dispatch(HostCallSite* site, ffi::RunId run, int32_t ordinal,
                     ffi::ThreadPool threads, ffi::BufferR3<ffi::S32> routes,
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
  return Meet(site, run, ordinal, std::move(buffers), [&](const Met& met) {
    if (met.local()) {
      RunRows(met, sizes, cpu::Dispatch, threads);
    } else {
      DispatchBetweenProcesses(met, sizes, threads);
    }
  });
}

ffi::Future Combine(HostCallSite* site, ffi::RunId run, int32_t ordinal,
                    ffi::ThreadPool threads, ffi::BufferR3<ffi::S32> routes,
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
  return Meet(site, run, ordinal, std::move(buffers), [&](const Met& met) {
    if (met.local()) {
      return RunRows(met, sizes, cpu::Combine, threads);
    }
    PostRows(met, cpu::Op::kCombine, sizes, Arrivals<cpu::RowBuffers>(met),
             cpu::MakeCombineMove,
             [meeting = met.meeting](const std::string& error) {
               meeting->Finish(false, error);
             });
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    EpPlanInstantiate,
    [](ffi::Dictionary attributes) { return Instantiate("plan", attributes); },
    ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    EpDispatchInstantiate,
    [](ffi::Dictionary attributes) {
      return Instantiate("dispatch", attributes);
    },
    ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    EpCombineInstantiate,
    [](ffi::Dictionary attributes) {
      return Instantiate("combine", attributes);
    },
    ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    EpPlan, Plan,
    ffi::Ffi::Bind()
        .Ctx<ffi::State<HostCallSite>>()
        .Ctx<ffi::RunId>()
        .Ctx<ffi::DeviceOrdinal>()
        .Arg<ffi::BufferR2<ffi::S32>>()   // topk_idx
        .Ret<ffi::BufferR3<ffi::S32>>()   // routes
        .Ret<ffi::BufferR0<ffi::S32>>()   // num_recv
        .Ret<ffi::BufferR0<ffi::S32>>()   // num_demand
        .Ret<ffi::BufferR0<ffi::PRED>>()  // overflow
        .Ret<ffi::BufferR1<ffi::S32>>()   // recv_counts
        .Ret<ffi::BufferR2<ffi::S32>>()   // recv_topk_idx
        .Ret<ffi::BufferR1<ffi::S32>>()   // recv_src
        .Ret<ffi::BufferR1<ffi::S32>>()   // expert_counts
        .Ret<ffi::BufferR1<ffi::S32>>()   // group_sizes
        .Ret<ffi::BufferR1<ffi::S32>>()   // workspace
        .Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpDispatch, Dispatch,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<HostCallSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR3<ffi::S32>>()  // routes
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // num_recv
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // recv_src
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpCombine, Combine,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<HostCallSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR3<ffi::S32>>()  // routes
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // num_recv
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // recv_src
                                  .RemainingArgs()
                                  .RemainingRets());

}  // namespace jax_ep
