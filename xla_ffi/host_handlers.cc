#include "xla_ffi/host_handlers.h"

#include <atomic>
#include <functional>
#include <vector>

#include "cc/cpu/ops.h"
#include "xla_ffi/element.h"
#include "xla_ffi/registry.h"

namespace jax_ep {

namespace ffi = xla::ffi;

ffi::TypeId HostCallSite::id = {};
const XLA_FFI_TypeInfo kHostCallSiteInfo = ffi::MakeTypeInfo<HostCallSite>();

namespace {

// Below this a call is done by the rank that came last: handing parts to other
// threads costs some ten microseconds.
constexpr int64_t kParallelBytes = 256 << 10;

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
      std::string(op) + " (channel " + std::to_string(*channel) + ")");
}

ffi::Future Failed(const std::string& message) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ffi::Error(ffi::ErrorCode::kInternal, message));
  return future;
}

// Enters this device's rank with `arrival`; `work` runs on the last rank's
// thread with the meeting, and ends in its Finish().
ffi::Future Meet(
    HostCallSite* site, ffi::RunId run, int32_t ordinal,
    std::shared_ptr<void> arrival,
    const std::function<void(std::shared_ptr<cpu::Meeting>)>& work) {
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
  if (meeting != nullptr) work(std::move(meeting));
  return future;
}

template <typename T>
std::vector<T> Arrivals(const cpu::Meeting& meeting) {
  std::vector<T> result;
  for (const std::shared_ptr<void>& arrival : meeting.arrivals()) {
    result.push_back(*static_cast<const T*>(arrival.get()));
  }
  return result;
}

// Plan -----------------------------------------------------------------------

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
  return Meet(site, run, ordinal, std::move(buffers),
              [&](std::shared_ptr<cpu::Meeting> meeting) {
                cpu::Plan(sizes, Arrivals<cpu::PlanBuffers>(*meeting));
                meeting->Finish(/*on_last_ranks_thread=*/true);
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

using RowWork = void (*)(const cpu::RowSizes&,
                         const std::vector<cpu::RowBuffers>&, const cpu::Part&);

// Runs `work` over all parts, on XLA's threads where it is worth it, and
// finishes the meeting with the last part. Never waits.
void RunParts(std::shared_ptr<cpu::Meeting> meeting, const cpu::RowSizes& sizes,
              RowWork work, ffi::ThreadPool& threads) {
  struct Shared {
    std::shared_ptr<cpu::Meeting> meeting;
    cpu::RowSizes sizes;
    RowWork work;
    std::vector<cpu::RowBuffers> ranks;
    std::vector<cpu::Part> parts;
    std::atomic<size_t> next{0};
    std::atomic<size_t> done{0};

    void Run(bool on_last_ranks_thread) {
      for (;;) {
        const size_t i = next.fetch_add(1);
        if (i >= parts.size()) return;
        work(sizes, ranks, parts[i]);
        if (done.fetch_add(1) + 1 == parts.size()) {
          meeting->Finish(on_last_ranks_thread);
        }
      }
    }
  };
  auto shared = std::make_shared<Shared>();
  shared->ranks = Arrivals<cpu::RowBuffers>(*meeting);
  int64_t row_bytes = 0;
  for (const cpu::Leaf& leaf : shared->ranks[0].leaves) {
    row_bytes += leaf.row_bytes;
  }
  const int64_t num_ranks = static_cast<int64_t>(shared->ranks.size());
  const int64_t bytes =
      row_bytes * num_ranks * (sizes.num_tokens + sizes.capacity);
  const bool parallel = bytes >= kParallelBytes;
  const int64_t workers =
      parallel ? std::max<int64_t>(1, threads.num_threads()) : 1;
  shared->meeting = std::move(meeting);
  shared->sizes = sizes;
  shared->work = work;
  // A few parts a worker: one that starts late does not hold the rest up.
  shared->parts = cpu::SplitRows(static_cast<int32_t>(num_ranks),
                                 sizes.num_tokens, parallel ? workers : 1);
  for (int64_t i = 1; i < workers; ++i) {
    threads.Schedule([shared] { shared->Run(false); });
  }
  shared->Run(true);
}

ffi::Future Dispatch(HostCallSite* site, ffi::RunId run, int32_t ordinal,
                     ffi::ThreadPool threads, ffi::BufferR3<ffi::S32> routes,
                     ffi::BufferR0<ffi::S32> num_recv, ffi::RemainingArgs in,
                     ffi::RemainingRets out) {
  const cpu::RowSizes sizes = {
      .routes_per_token = static_cast<int32_t>(routes.dimensions()[1]),
      .num_tokens = routes.dimensions()[0],
      .capacity = (**out.get<ffi::AnyBuffer>(0)).dimensions()[0],
  };
  auto buffers = std::make_shared<cpu::RowBuffers>(
      cpu::RowBuffers{.routes = routes.typed_data(),
                      .num_recv = num_recv.typed_data(),
                      .leaves = Leaves(in, out, /*capacity_is_out=*/true)});
  return Meet(site, run, ordinal, std::move(buffers),
              [&](std::shared_ptr<cpu::Meeting> meeting) {
                RunParts(std::move(meeting), sizes, cpu::Dispatch, threads);
              });
}

ffi::Future Combine(HostCallSite* site, ffi::RunId run, int32_t ordinal,
                    ffi::ThreadPool threads, ffi::BufferR3<ffi::S32> routes,
                    ffi::RemainingArgs in, ffi::RemainingRets out) {
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
  return Meet(site, run, ordinal, std::move(buffers),
              [&](std::shared_ptr<cpu::Meeting> meeting) {
                RunParts(std::move(meeting), sizes, cpu::Combine, threads);
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
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EpCombine, Combine,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<HostCallSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR3<ffi::S32>>()  // routes
                                  .RemainingArgs()
                                  .RemainingRets());

}  // namespace jax_ep
