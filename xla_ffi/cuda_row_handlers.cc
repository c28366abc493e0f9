#include "xla_ffi/cuda_row_handlers.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cc/experts/expert_ops.h"
#include "cc/handshake/tag.h"
#include "cc/layout/limits.h"
#include "cc/ops.h"
#include "xla_ffi/attributes.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/leaves.h"

namespace jax_ep {

namespace ffi = xla::ffi;

ffi::ErrorOr<RowParams> RowsOf(const RowOperation& operation,
                               const CudaCallSite& site, int32_t ordinal,
                               const Position& position, const Routing& routing,
                               const ffi::RemainingArgs& in,
                               const ffi::RemainingRets& out,
                               size_t first_result) {
  const ffi::ErrorOr<Operation> op = OperationOn(site, ordinal, position);
  if (op.has_error()) return ffi::Unexpected(op.error());
  if (in.size() > kMaxLeaves) {
    return ffi::Unexpected(Invalid("jax_ep: too many leaves in one call"));
  }
  RowParams params = {};
  Tag tag(site.channel, site.instance, operation.name);
  params.op = *op;
  params.routes_per_token = routing.routes_per_token;
  params.num_leaves = static_cast<int32_t>(in.size());
  params.num_tokens = routing.num_tokens;
  params.routes = routing.routes;
  params.num_recv = routing.num_recv;
  params.recv_src = routing.recv_src;
  for (size_t i = 0; i < in.size(); ++i) {
    const ffi::AnyBuffer from = *in.get<ffi::AnyBuffer>(i);
    const ffi::AnyBuffer to = **out.get<ffi::AnyBuffer>(first_result + i);
    // The capacity is never 0, the number of tokens may be.
    const ffi::AnyBuffer& rows = operation.capacity_is_out ? to : from;
    Leaf& leaf = params.leaves[i] = LeafOf<Leaf>(from, to, rows);
    if (!operation.capacity_is_out && leaf.element == Element::kNone) {
      return ffi::Unexpected(
          Invalid("jax_ep combine: a leaf's dtype cannot be summed"));
    }
    params.capacity = rows.dimensions()[0];
    leaf.exported =
        IsExported(site, ordinal, rows.untyped_data(), rows.size_bytes());
    tag.Add(leaf.row_bytes);
    tag.Add(static_cast<uint64_t>(leaf.element));
  }
  tag.Add(params.routes_per_token);
  tag.Add(params.num_tokens);
  tag.Add(params.capacity);
  params.op.tag = tag.value();
  return params;
}

namespace {

template <const RowOperation& operation>
ffi::Error MoveRows(CudaCallSite* site, int32_t ordinal, cudaStream_t stream,
                    Position position, Routes routes, NumRecv num_recv,
                    RecvSrc recv_src, ffi::RemainingArgs in,
                    ffi::RemainingRets out) {
  const ffi::ErrorOr<RowParams> params =
      RowsOf(operation, *site, ordinal, position, {routes, num_recv, recv_src},
             in, out);
  if (params.has_error()) return params.error();
  return Launched(operation.name, operation.launch(*params, stream, nullptr));
}

// Operands: N leaves [T, ...]. Results: G leaves [S, ...] and N - G leaves
// [C, ...]; then scratch, [C, ...] for each of the first G and the workspace.
ffi::Error DispatchPermute(CudaCallSite* site, int32_t ordinal,
                           cudaStream_t stream, Position position,
                           ffi::BufferR3<ffi::S32> routes,
                           ffi::BufferR1<ffi::S32> recv_counts,
                           ffi::BufferR1<ffi::S32> recv_src,
                           ffi::BufferR2<ffi::S32> expert_rows,
                           ffi::BufferR2<ffi::S32> empty_ranges,
                           ffi::RemainingArgs in, ffi::RemainingRets out) {
  const ffi::ErrorOr<Operation> op = OperationOn(*site, ordinal, position);
  if (op.has_error()) return op.error();
  const size_t leaves = in.size();
  if (leaves >= kMaxLeaves || out.size() <= leaves ||
      out.size() > 2 * leaves + 1) {
    return Invalid("jax_ep: too many leaves in one call");
  }
  const size_t grouped = out.size() - leaves - 1;
  Tag tag(site->channel, site->instance, "dispatch_permute");
  DispatchPermuteParams params = {};
  params.rows.op = *op;
  params.rows.routes_per_token = static_cast<int32_t>(routes.dimensions()[1]);
  params.rows.num_leaves = static_cast<int32_t>(leaves);
  params.rows.num_tokens = routes.dimensions()[0];
  params.rows.capacity = recv_src.dimensions()[0];
  params.rows.routes = routes.typed_data();
  params.num_grouped = static_cast<int32_t>(grouped);
  params.top_k = static_cast<int32_t>(expert_rows.dimensions()[1]);
  params.num_ranges = static_cast<int32_t>(empty_ranges.dimensions()[0]);
  params.recv_counts = recv_counts.typed_data();
  params.recv_src = recv_src.typed_data();
  params.expert_rows = expert_rows.typed_data();
  params.empty_ranges = empty_ranges.typed_data();
  params.workspace = static_cast<uint64_t*>(
      (**out.get<ffi::AnyBuffer>(out.size() - 1)).untyped_data());
  for (size_t i = 0; i < leaves; ++i) {
    const bool is_grouped = i < grouped;
    const ffi::AnyBuffer landing =
        **out.get<ffi::AnyBuffer>(is_grouped ? leaves + i : i);
    params.rows.leaves[i] = {
        .in = static_cast<const std::byte*>(
            in.get<ffi::AnyBuffer>(i)->untyped_data()),
        .out = static_cast<std::byte*>(landing.untyped_data()),
        .row_bytes =
            static_cast<int64_t>(landing.size_bytes()) / params.rows.capacity,
        .element = Element::kNone,
    };
    if (is_grouped) {
      params.grouped[i] = static_cast<std::byte*>(
          (**out.get<ffi::AnyBuffer>(i)).untyped_data());
    }
    tag.Add(params.rows.leaves[i].row_bytes);
  }
  tag.Add(params.rows.num_tokens);
  tag.Add(params.rows.capacity);
  params.rows.op.tag = tag.value();
  return Launched("dispatch_permute", LaunchDispatchPermute(params, stream));
}

auto BindDispatchPermute() {
  return BindCall<CudaCallSite>()
      .Arg<Routes>()
      .Arg<ffi::BufferR1<ffi::S32>>()  // recv_counts
      .Arg<RecvSrc>()
      .Arg<ffi::BufferR2<ffi::S32>>()  // expert_rows
      .Arg<ffi::BufferR2<ffi::S32>>()  // empty_ranges
      .RemainingArgs()
      .RemainingRets();
}

const HandlerRegistration dispatch(
    "jax_ep_dispatch",
    Execute<MoveRows<kDispatch>, BindRows<CudaCallSite>, kInGraphs>,
    Instantiate<MakeCallSiteOf<SlotKind::kRows>>);
const HandlerRegistration combine(
    "jax_ep_combine",
    Execute<MoveRows<kCombine>, BindRows<CudaCallSite>, kInGraphs>,
    Instantiate<MakeCallSiteOf<SlotKind::kRows>>);
const HandlerRegistration dispatch_permute(
    "jax_ep_dispatch_permute",
    Execute<DispatchPermute, BindDispatchPermute, kInGraphs>,
    Instantiate<MakeCallSiteOf<SlotKind::kRows>>);

}  // namespace

}  // namespace jax_ep
