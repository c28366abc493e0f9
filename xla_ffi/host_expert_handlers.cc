// FFI handlers of the operations between rows and experts, on the host. They
// are local to a device: no state, no rendezvous of ranks.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "cc/cpu/expert_ops.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/attributes.h"
#include "xla_ffi/expert_calls.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/leaves.h"

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

// Below this other threads are not worth waking.
constexpr int64_t kParallelBytes = 1 << 20;

// Runs `work(rows, index, count)` over all rows, with the help of XLA's threads
// where that is worth it. Waits only for parts that run already, so it cannot
// deadlock whatever else those threads do.
void ForEachPart(
    ffi::ThreadPool& threads, int64_t num_rows, int64_t bytes,
    const std::function<void(cpu::RowRange, int64_t, int64_t)>& work) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  const int64_t workers =
      bytes < kParallelBytes ? 1 : std::max<int64_t>(1, threads.num_threads());
  const int64_t count = std::max<int64_t>(1, std::min(num_rows, workers));
  auto shared = std::make_shared<Shared>();
  // `work` lives until the last part is done; a thread that comes later only
  // looks at `shared`.
  const auto run = [shared, num_rows, count, work = &work] {
    for (;;) {
      const int64_t i = shared->next.fetch_add(1);
      if (i >= count) return;
      (*work)({num_rows * i / count, num_rows * (i + 1) / count}, i, count);
      if (shared->done.fetch_add(1) + 1 == count) shared->done.notify_all();
    }
  };
  for (int64_t i = 1; i < count; ++i) threads.Schedule([run] { run(); });
  run();
  for (int64_t done = shared->done; done < count; done = shared->done) {
    shared->done.wait(done);
  }
}

ffi::Error ExpertRows(ffi::ThreadPool, ffi::BufferR2<ffi::S32> recv_topk_idx,
                      ffi::ResultBufferR2<ffi::S32> expert_rows,
                      ffi::ResultBufferR2<ffi::S32> empty_ranges,
                      ffi::ResultBufferR1<ffi::S32> /*workspace*/,
                      int64_t expert_alignment, int64_t expert_capacity) {
  cpu::ExpertRows({
      .local_experts = static_cast<int32_t>(empty_ranges->dimensions()[0] - 1),
      .expert_alignment = static_cast<int32_t>(expert_alignment),
      .num_pairs = static_cast<int64_t>(recv_topk_idx.element_count()),
      .expert_capacity = expert_capacity,
      .recv_topk_idx = recv_topk_idx.typed_data(),
      .expert_rows = expert_rows->typed_data(),
      .empty_ranges = empty_ranges->typed_data(),
  });
  return ffi::Error::Success();
}

// What permute and unpermute share: operands are the weights, if there are any,
// and the leaves.
cpu::PermuteParams Params(const ffi::BufferR2<ffi::S32>& expert_rows,
                          const ffi::RemainingArgs& in,
                          const ffi::RemainingRets& out) {
  const size_t num_weights = in.size() - out.size();
  cpu::PermuteParams params = {};
  params.top_k = static_cast<int32_t>(expert_rows.dimensions()[1]);
  params.capacity = expert_rows.dimensions()[0];
  params.expert_rows = expert_rows.typed_data();
  if (num_weights > 0) {
    params.weights = in.get<ffi::AnyBuffer>(0)->untyped_data();
  }
  for (size_t i = 0; i < out.size(); ++i) {
    params.leaves.push_back(LeafOf<cpu::Leaf>(in, num_weights + i, out, i));
  }
  return params;
}

bool CanSum(const cpu::PermuteParams& params) {
  return std::none_of(
      params.leaves.begin(), params.leaves.end(),
      [](const cpu::Leaf& leaf) { return leaf.element == Element::kNone; });
}

int64_t Bytes(const cpu::PermuteParams& params) {
  int64_t row_bytes = 0;
  for (const cpu::Leaf& leaf : params.leaves) row_bytes += leaf.row_bytes;
  return row_bytes * params.capacity * params.top_k;
}

ffi::Error Permute(ffi::ThreadPool threads, ffi::BufferR2<ffi::S32> expert_rows,
                   ffi::BufferR2<ffi::S32> empty_ranges, ffi::RemainingArgs in,
                   ffi::RemainingRets out) {
  cpu::PermuteParams params = Params(expert_rows, in, out);
  params.num_ranges = static_cast<int32_t>(empty_ranges.dimensions()[0]);
  params.empty_ranges = empty_ranges.typed_data();
  if (params.weights != nullptr && !CanSum(params)) {
    return Invalid("jax_ep permute: a leaf's dtype takes no weights");
  }
  ForEachPart(threads, params.capacity, Bytes(params),
              [&](cpu::RowRange rows, int64_t index, int64_t count) {
                cpu::Permute(params, rows, index, count);
              });
  return ffi::Error::Success();
}

ffi::Error Unpermute(ffi::ThreadPool threads,
                     ffi::BufferR2<ffi::S32> expert_rows, ffi::RemainingArgs in,
                     ffi::RemainingRets out) {
  const cpu::PermuteParams params = Params(expert_rows, in, out);
  if (!CanSum(params)) {
    return Invalid("jax_ep unpermute: a leaf's dtype cannot be summed");
  }
  ForEachPart(threads, params.capacity, Bytes(params),
              [&](cpu::RowRange rows, int64_t, int64_t) {
                cpu::Unpermute(params, rows);
              });
  return ffi::Error::Success();
}

ffi::Error RowDots(ffi::ThreadPool threads, ffi::BufferR2<ffi::S32> expert_rows,
                   ffi::RemainingArgs in, ffi::Result<ffi::AnyBuffer> dots) {
  cpu::RowDotsParams params = {};
  params.top_k = static_cast<int32_t>(expert_rows.dimensions()[1]);
  params.expert_rows = expert_rows.typed_data();
  params.dots = dots->untyped_data();
  const size_t count = in.size() / 2;
  int64_t row_bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    params.leaves.push_back(PairOf<cpu::RowDotsParams::Pair>(in, i, count));
    row_bytes += params.leaves.back().row_bytes;
    if (params.leaves.back().element == Element::kNone) {
      return Invalid("jax_ep row_dots: a leaf's dtype cannot be summed");
    }
  }
  const int64_t rows = expert_rows.dimensions()[0];
  ForEachPart(threads, rows, row_bytes * rows * params.top_k,
              [&](cpu::RowRange range, int64_t, int64_t) {
                cpu::RowDots(params, range);
              });
  return ffi::Error::Success();
}

const HandlerRegistration expert_rows(
    "jax_ep_expert_rows", Execute<ExpertRows, BindExpertRows<ffi::ThreadPool>>);
const HandlerRegistration permute(
    "jax_ep_permute", Execute<Permute, BindPermute<ffi::ThreadPool>>);
const HandlerRegistration unpermute(
    "jax_ep_unpermute", Execute<Unpermute, BindUnpermute<ffi::ThreadPool>>);
const HandlerRegistration row_dots(
    "jax_ep_row_dots", Execute<RowDots, BindRowDots<ffi::ThreadPool>>);

}  // namespace

}  // namespace jax_ep
