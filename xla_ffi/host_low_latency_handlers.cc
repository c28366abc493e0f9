// FFI handlers of the low-latency operations, on the host.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/cpu/low_latency.h"
#include "cc/cpu/moves.h"
#include "cc/cpu/wire.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/element.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/host_calls.h"
#include "xla_ffi/low_latency_attributes.h"

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

using cpu::LowLatencyCombineBuffers;
using cpu::LowLatencyDispatchBuffers;
using cpu::LowLatencyRows;
using cpu::LowLatencySizes;

LowLatencySizes SizesOf(const HostCallSite& site,
                        const LowLatencyAttributes& attributes,
                        const ffi::AnyBuffer& topk_idx) {
  return {.num_ranks = site.communicator->num_ranks,
          .num_experts = static_cast<int32_t>(attributes.num_experts),
          .top_k = static_cast<int32_t>(topk_idx.dimensions()[1]),
          .num_tokens = topk_idx.dimensions()[0],
          .max_tokens = attributes.max_tokens,
          .by_expert = attributes.by_expert != 0};
}

cpu::CallShape ShapeOf(cpu::Op op, const LowLatencySizes& sizes) {
  return {.op = op,
          .sizes = {sizes.num_tokens, sizes.top_k, sizes.max_tokens,
                    sizes.num_experts, sizes.by_expert}};
}

// Everybody's array of the same size, by rank: those that are here, and memory
// for the others'.
class Gathered {
 public:
  Gathered(const HostCall& call, int64_t num_bytes)
      : places_(call.comm().group_places[call.group]),
        num_bytes_(num_bytes),
        bytes_(places_.process.size()),
        elsewhere_(bytes_.size()) {
    for (size_t rank = 0; rank < bytes_.size(); ++rank) {
      if (places_.Here(static_cast<int>(rank))) continue;
      elsewhere_[rank].resize(num_bytes);
      bytes_[rank] = elsewhere_[rank].data();
    }
  }

  // Only read.
  void Set(int rank, const void* bytes) {
    bytes_[rank] = static_cast<std::byte*>(const_cast<void*>(bytes));
  }
  template <typename T = std::byte>
  const T* operator[](size_t rank) const {
    return reinterpret_cast<const T*>(bytes_[rank]);
  }
  std::unique_ptr<cpu::Move> MakeMove() const {
    return cpu::MakePlanMove(places_, num_bytes_, bytes_);
  }

 private:
  const cpu::GroupPlaces& places_;
  int64_t num_bytes_;
  std::vector<std::byte*> bytes_;
  std::vector<std::vector<std::byte>> elsewhere_;
};

// Runs `next` away from the channel's thread, where others' rows wait; or ends
// the rendezvous with what went wrong.
std::function<void(const std::string& error)> Then(const HostCall& call,
                                                   std::function<void()> next) {
  return [rendezvous = call.rendezvous,
          next = std::move(next)](const std::string& error) {
    if (!error.empty()) return rendezvous->Finish(false, error);
    rendezvous->Then(next);
  };
}

// Everybody's tokens come here. Few tokens: which of them are wanted is not
// worth a question.
void DispatchBetweenProcesses(const HostCall& call,
                              const LowLatencySizes& sizes) {
  struct Shared {
    std::vector<LowLatencyDispatchBuffers> ranks;
    std::vector<Gathered> arrays;  // ids, weights, leaves
  };
  auto shared = std::make_shared<Shared>();
  shared->ranks = Arrivals<LowLatencyDispatchBuffers>(call);
  const std::vector<int>& here = call.rendezvous->ranks();
  const LowLatencyDispatchBuffers& mine = shared->ranks[here[0]];
  const bool weighted = mine.topk_weights != nullptr;
  const int64_t words = sizes.num_tokens * sizes.top_k * 4;
  shared->arrays.emplace_back(call, words);
  if (weighted) shared->arrays.emplace_back(call, words);
  for (const cpu::Leaf& leaf : mine.leaves) {
    shared->arrays.emplace_back(call, sizes.num_tokens * leaf.row_bytes);
  }
  for (const int rank : here) {
    const LowLatencyDispatchBuffers& buffers = shared->ranks[rank];
    size_t i = 0;
    shared->arrays[i++].Set(rank, buffers.topk_idx);
    if (weighted) shared->arrays[i++].Set(rank, buffers.topk_weights);
    for (const cpu::Leaf& leaf : buffers.leaves) {
      shared->arrays[i++].Set(rank, leaf.in);
    }
  }
  std::vector<std::unique_ptr<cpu::Move>> shares;
  for (const Gathered& array : shared->arrays) {
    shares.push_back(array.MakeMove());
  }
  cpu::CallShape shape = ShapeOf(cpu::Op::kLowLatencyDispatch, sizes);
  shape.num_leaves = static_cast<int32_t>(mine.leaves.size());
  for (int32_t i = 0; i < shape.num_leaves; ++i) {
    shape.row_bytes[i] = mine.leaves[i].row_bytes;
  }
  shape.elements[0] = weighted;
  Post(call, shape, std::move(shares),
       Then(call, [shared, sizes, weighted, leaves = mine.leaves,
                   rendezvous = call.rendezvous] {
         for (size_t rank = 0; rank < shared->ranks.size(); ++rank) {
           LowLatencyDispatchBuffers& buffers = shared->ranks[rank];
           if (buffers.here()) continue;
           size_t i = 0;
           const auto& arrays = shared->arrays;
           buffers.topk_idx = arrays[i++].operator[]<int32_t>(rank);
           if (weighted) {
             buffers.topk_weights = arrays[i++].operator[]<float>(rank);
           }
           buffers.leaves = leaves;
           for (cpu::Leaf& leaf : buffers.leaves) {
             leaf.in = arrays[i++][rank];
             leaf.out = nullptr;
           }
         }
         cpu::LowLatencyDispatch(sizes, shared->ranks);
         rendezvous->Finish(false);
       }));
}

ffi::Future Dispatch(HostCallSite* site, ffi::RunId run, int32_t ordinal,
                     Position position, ffi::RemainingArgs in,
                     ffi::RemainingRets out, ffi::Dictionary dictionary) {
  const auto attributes = LowLatencyAttributes::Read(dictionary);
  if (attributes.has_error()) return Failed(attributes.error().message());
  const ffi::AnyBuffer topk_idx = *in.get<ffi::AnyBuffer>(0);
  const LowLatencySizes sizes = SizesOf(*site, *attributes, topk_idx);
  auto buffers = std::make_shared<LowLatencyDispatchBuffers>();
  buffers->topk_idx = topk_idx.typed_data<int32_t>();
  size_t operand = 1, result = 0;
  if (attributes->weighted != 0) {
    buffers->topk_weights =
        in.get<ffi::AnyBuffer>(operand++)->typed_data<float>();
  }
  for (int64_t i = 0; i < attributes->num_leaves; ++i) {
    const ffi::AnyBuffer from = *in.get<ffi::AnyBuffer>(operand++);
    const ffi::AnyBuffer to = **out.get<ffi::AnyBuffer>(result++);
    buffers->leaves.push_back(
        {.in = static_cast<const std::byte*>(from.untyped_data()),
         .out = static_cast<std::byte*>(to.untyped_data()),
         .row_bytes =
             static_cast<int64_t>(from.size_bytes()) / sizes.num_tokens,
         .element = Element::kNone});
  }
  if (sizes.by_expert) {
    buffers->counts =
        (**out.get<ffi::AnyBuffer>(result++)).typed_data<int32_t>();
  }
  buffers->places = (**out.get<ffi::AnyBuffer>(result++)).typed_data<int32_t>();
  if (attributes->weighted != 0) {
    buffers->recv_weights =
        (**out.get<ffi::AnyBuffer>(result++)).typed_data<float>();
  }
  return Meet(site, run, ordinal, position, std::move(buffers),
              [&](const HostCall& call) {
                if (!call.local()) return DispatchBetweenProcesses(call, sizes);
                cpu::LowLatencyDispatch(
                    sizes, Arrivals<LowLatencyDispatchBuffers>(call));
                call.rendezvous->Finish(/*on_last_ranks_thread=*/true);
              });
}

// Weights first, by expert; then everybody's sums for everybody.
struct CombineCall {
  HostCall call;
  LowLatencySizes sizes;
  LowLatencyRows rows;
  std::vector<LowLatencyCombineBuffers> ranks;
  std::unique_ptr<Gathered> weights;
  std::unique_ptr<Gathered> sums;
  std::vector<std::vector<std::byte>> mine;  // sums of the ranks here
};

cpu::CallShape CombineShape(const CombineCall& combine) {
  cpu::CallShape shape = ShapeOf(cpu::Op::kLowLatencyCombine, combine.sizes);
  shape.num_leaves = 1;
  shape.row_bytes[0] = combine.rows.row_bytes;
  shape.elements[0] = static_cast<int32_t>(combine.rows.element);
  return shape;
}

void PostArray(const CombineCall& combine, const Gathered& array,
               std::function<void()> next) {
  std::vector<std::unique_ptr<cpu::Move>> shares;
  shares.push_back(array.MakeMove());
  Post(combine.call, CombineShape(combine), std::move(shares),
       Then(combine.call, std::move(next)));
}

void ExchangeSums(const std::shared_ptr<CombineCall>& combine) {
  const int64_t bytes = combine->sizes.num_ranks * combine->sizes.num_tokens *
                        combine->rows.row_bytes;
  combine->sums = std::make_unique<Gathered>(combine->call, bytes);
  for (const int rank : combine->call.rendezvous->ranks()) {
    combine->mine.emplace_back(bytes);
    cpu::SumForOthers(combine->sizes, combine->rows, combine->ranks, rank,
                      combine->mine.back().data());
    combine->sums->Set(rank, combine->mine.back().data());
  }
  PostArray(*combine, *combine->sums, [combine] {
    for (size_t rank = 0; rank < combine->ranks.size(); ++rank) {
      combine->ranks[rank].sums = (*combine->sums)[rank];
    }
    cpu::LowLatencyCombine(combine->sizes, combine->rows, combine->ranks);
    combine->call.rendezvous->Finish(false);
  });
}

void CombineBetweenProcesses(const HostCall& call, const LowLatencySizes& sizes,
                             const LowLatencyRows& rows) {
  auto combine = std::make_shared<CombineCall>(
      CombineCall{.call = call,
                  .sizes = sizes,
                  .rows = rows,
                  .ranks = Arrivals<LowLatencyCombineBuffers>(call),
                  .weights = nullptr,
                  .sums = nullptr,
                  .mine = {}});
  if (!sizes.by_expert) return ExchangeSums(combine);
  combine->weights =
      std::make_unique<Gathered>(call, sizes.num_tokens * sizes.top_k * 4);
  for (const int rank : call.rendezvous->ranks()) {
    combine->weights->Set(rank, combine->ranks[rank].topk_weights);
  }
  PostArray(*combine, *combine->weights, [combine] {
    for (size_t rank = 0; rank < combine->ranks.size(); ++rank) {
      combine->ranks[rank].topk_weights =
          combine->weights->operator[]<float>(rank);
    }
    ExchangeSums(combine);
  });
}

ffi::Future Combine(HostCallSite* site, ffi::RunId run, int32_t ordinal,
                    Position position, ffi::RemainingArgs in,
                    ffi::RemainingRets out, ffi::Dictionary dictionary) {
  const auto attributes = LowLatencyAttributes::Read(dictionary);
  if (attributes.has_error()) return Failed(attributes.error().message());
  const ffi::AnyBuffer topk_idx = *in.get<ffi::AnyBuffer>(0);
  const LowLatencySizes sizes = SizesOf(*site, *attributes, topk_idx);
  size_t operand = 1;
  auto buffers = std::make_shared<LowLatencyCombineBuffers>();
  buffers->topk_idx = topk_idx.typed_data<int32_t>();
  if (attributes->weighted != 0) {
    buffers->topk_weights =
        in.get<ffi::AnyBuffer>(operand++)->typed_data<float>();
  }
  buffers->places = in.get<ffi::AnyBuffer>(operand++)->typed_data<int32_t>();
  const ffi::AnyBuffer y = *in.get<ffi::AnyBuffer>(operand);
  buffers->y = static_cast<const std::byte*>(y.untyped_data());
  const ffi::AnyBuffer result = **out.get<ffi::AnyBuffer>(0);
  buffers->out = static_cast<std::byte*>(result.untyped_data());
  const LowLatencyRows rows = {
      .row_bytes = static_cast<int64_t>(result.size_bytes()) / sizes.num_tokens,
      .element = ElementOf(y.element_type())};
  if (rows.element == Element::kNone) {
    return Failed("jax_ep low_latency_combine: rows cannot be summed");
  }
  return Meet(site, run, ordinal, position, std::move(buffers),
              [&](const HostCall& call) {
                if (!call.local())
                  return CombineBetweenProcesses(call, sizes, rows);
                cpu::LowLatencyCombine(
                    sizes, rows, Arrivals<LowLatencyCombineBuffers>(call));
                call.rendezvous->Finish(/*on_last_ranks_thread=*/true);
              });
}

// Operands: the position; topk_idx, weights where there are any; dispatch: the
// leaves; combine: places, y. Then what the call has to come after.
auto BindAll() { return BindCall().RemainingArgs().RemainingRets().Attrs(); }

const HandlerRegistration dispatch(
    "jax_ep_low_latency_dispatch", Execute<Dispatch, BindAll>,
    Instantiate<MakeCallSiteOf<cpu::Op::kLowLatencyDispatch>>);
const HandlerRegistration combine(
    "jax_ep_low_latency_combine", Execute<Combine, BindAll>,
    Instantiate<MakeCallSiteOf<cpu::Op::kLowLatencyCombine>>);

}  // namespace

}  // namespace jax_ep
