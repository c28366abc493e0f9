// Leaves of a call as buffers of bytes, for the operations of both platforms.
#ifndef JAX_EP_XLA_FFI_LEAVES_H_
#define JAX_EP_XLA_FFI_LEAVES_H_

#include <cstddef>
#include <cstdint>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/element.h"

namespace jax_ep {

// Bytes of a row; 0 where there are no rows.
inline int64_t RowBytes(const xla::ffi::AnyBuffer& buffer) {
  const int64_t rows = buffer.dimensions()[0];
  return rows == 0 ? 0 : static_cast<int64_t>(buffer.size_bytes()) / rows;
}

// `rows`: which of the two says how large a row is; the other may have none.
template <typename Leaf>
Leaf LeafOf(const xla::ffi::AnyBuffer& from, const xla::ffi::AnyBuffer& to,
            const xla::ffi::AnyBuffer& rows) {
  return {.in = static_cast<const std::byte*>(from.untyped_data()),
          .out = static_cast<std::byte*>(to.untyped_data()),
          .row_bytes = RowBytes(rows),
          .element = ElementOf(from.element_type())};
}

template <typename Leaf>
Leaf LeafOf(const xla::ffi::RemainingArgs& in, size_t from,
            const xla::ffi::RemainingRets& out, size_t to) {
  const xla::ffi::AnyBuffer rows = *in.get<xla::ffi::AnyBuffer>(from);
  return LeafOf<Leaf>(rows, **out.get<xla::ffi::AnyBuffer>(to), rows);
}

// Leaf i of row_dots: operands i and i + count.
template <typename Pair>
Pair PairOf(const xla::ffi::RemainingArgs& in, size_t i, size_t count) {
  const xla::ffi::AnyBuffer row = *in.get<xla::ffi::AnyBuffer>(i);
  const xla::ffi::AnyBuffer other = *in.get<xla::ffi::AnyBuffer>(i + count);
  return {.row = static_cast<const std::byte*>(row.untyped_data()),
          .expert_row = static_cast<const std::byte*>(other.untyped_data()),
          .row_bytes = RowBytes(row),
          .element = ElementOf(row.element_type())};
}

}  // namespace jax_ep

#endif  // JAX_EP_XLA_FFI_LEAVES_H_
