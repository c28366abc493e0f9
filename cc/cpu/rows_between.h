// Rows as they travel between processes: all leaves one after the other, in
// pieces of any size.
#ifndef JAX_EP_CC_CPU_ROWS_BETWEEN_H_
#define JAX_EP_CC_CPU_ROWS_BETWEEN_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cc/cpu/moves.h"
#include "cc/cpu/wire.h"

namespace jax_ep::cpu {

// Rows in memory: leaf by leaf, `stride` bytes from row to row.
struct RowStore {
  struct Leaf {
    std::byte* base;
    int64_t stride;
    int64_t bytes;
  };
  std::vector<Leaf> leaves = {};
  int64_t num_rows = 0;
  int64_t row_bytes = 0;

  void Add(std::byte* base, int64_t stride, int64_t bytes) {
    leaves.push_back({base, stride, bytes});
    row_bytes += bytes;
  }

  // Whether a peer may name this part of this row.
  bool Has(int64_t row, int64_t offset, int64_t bytes) const {
    return row >= 0 && row < num_rows && offset >= 0 && bytes >= 0 &&
           offset <= row_bytes && bytes <= row_bytes - offset;
  }
  void Gather(int64_t row, int64_t offset, int64_t bytes, std::byte* to) const {
    Visit(row, offset, bytes, [&to](std::byte* place, int64_t n) {
      std::memcpy(to, place, n);
      to += n;
    });
  }
  void Scatter(int64_t row, int64_t offset, int64_t bytes,
               const std::byte* from) const {
    Visit(row, offset, bytes, [&from](std::byte* place, int64_t n) {
      std::memcpy(place, from, n);
      from += n;
    });
  }

 private:
  template <typename Part>
  void Visit(int64_t row, int64_t offset, int64_t bytes, Part part) const {
    for (const Leaf& leaf : leaves) {
      if (bytes == 0) return;
      if (offset >= leaf.bytes) {
        offset -= leaf.bytes;
        continue;
      }
      const int64_t n = std::min(bytes, leaf.bytes - offset);
      part(leaf.base + row * leaf.stride + offset, n);
      offset = 0;
      bytes -= n;
    }
  }
};

// Sends row `row` of `rows` from byte `sent` on; false where the room ends
// before the row does. `piece` says whose row it is.
inline bool SendRow(Outbox& out, const RowStore& rows, int64_t row, Piece piece,
                    int64_t& sent) {
  // Not worth a piece of its own: better the next packet.
  constexpr int64_t kShort = 256;
  do {
    const int64_t left = rows.row_bytes - sent;
    const int64_t room =
        out.Room(PacketKind::kRows, static_cast<int64_t>(sizeof(Piece)) +
                                        PaddedPiece(std::min(left, kShort)));
    if (room == 0) return false;
    piece.offset = sent;
    piece.bytes = std::min(left, (room - static_cast<int64_t>(sizeof(Piece))) /
                                     kPieceAlignment * kPieceAlignment);
    std::byte* to = out.Append(sizeof(Piece) + PaddedPiece(piece.bytes));
    std::memcpy(to, &piece, sizeof(piece));
    rows.Gather(row, sent, piece.bytes, to + sizeof(piece));
    sent += piece.bytes;
  } while (sent < rows.row_bytes);
  sent = 0;
  return true;
}

// Calls take(piece, data) for every piece; false where one makes no sense.
template <typename TakePiece>
bool TakePieces(const std::byte* data, int64_t bytes, TakePiece take) {
  const std::byte* end = data + bytes;
  while (data < end) {
    Piece piece;
    if (end - data < static_cast<int64_t>(sizeof(piece))) return false;
    std::memcpy(&piece, data, sizeof(piece));
    data += sizeof(piece);
    if (piece.bytes < 0 || piece.bytes > end - data) return false;
    if (!take(piece, data)) return false;
    data += PaddedPiece(piece.bytes);
  }
  return true;
}

}  // namespace jax_ep::cpu

#endif  // JAX_EP_CC_CPU_ROWS_BETWEEN_H_
