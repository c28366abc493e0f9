#include "cc/cpu/moves.h"

#include <algorithm>
#include <utility>

#include "cc/cpu/rows_between.h"

namespace jax_ep::cpu {

int64_t Outbox::Room(PacketKind kind, int64_t at_least) {
  if (open_ && ring_.room() >= at_least) return ring_.room();
  Flush();
  if (packets_left_ == 0 || !ring_.Begin(kind, key_)) return 0;
  --packets_left_;
  open_ = used_ = true;
  return ring_.room();
}

void Outbox::Flush() {
  if (open_) ring_.Send();
  open_ = false;
}

namespace {

class PlanMove : public Move {
 public:
  PlanMove(const GroupPlaces& places, int64_t num_bytes,
           std::vector<std::byte*> ids)
      : places_(places), num_bytes_(num_bytes) {
    for (size_t rank = 0; rank < ids.size(); ++rank) {
      RowStore row;
      row.Add(ids[rank], num_bytes, num_bytes);
      row.num_rows = 1;
      ids_.push_back(std::move(row));
      if (!places.Here(static_cast<int>(rank))) missing_ += num_bytes;
    }
    cursors_.resize(
        1 + *std::max_element(places.process.begin(), places.process.end()));
  }

  void Send(int process, Outbox& out) override {
    Cursor& at = cursors_[process];
    for (; at.rank < ids_.size(); ++at.rank) {
      const int rank = static_cast<int>(at.rank);
      if (!places_.Here(rank) || num_bytes_ == 0) continue;
      const Piece piece = {.from = rank, .to = -1, .index = 0};
      if (!SendRow(out, ids_[rank], 0, piece, at.sent)) return;
    }
  }

  bool Take(int process, PacketKind kind, const std::byte* data,
            int64_t bytes) override {
    if (kind != PacketKind::kRows) return false;
    return TakePieces(
        data, bytes, [&](const Piece& piece, const std::byte* from) {
          if (piece.from < 0 || piece.from >= static_cast<int>(ids_.size()) ||
              places_.process[piece.from] != process ||
              !ids_[piece.from].Has(0, piece.offset, piece.bytes)) {
            return false;
          }
          ids_[piece.from].Scatter(0, piece.offset, piece.bytes, from);
          missing_ -= piece.bytes;
          return true;
        });
  }

  bool Ended(int process) const override {
    return cursors_[process].rank == ids_.size();
  }
  bool Complete() const override { return missing_ == 0; }

 private:
  struct Cursor {
    size_t rank = 0;
    int64_t sent = 0;
  };

  const GroupPlaces places_;
  const int64_t num_bytes_;
  std::vector<RowStore> ids_;
  std::vector<Cursor> cursors_;  // by process
  int64_t missing_ = 0;
};

class DispatchMove : public Move {
 public:
  DispatchMove(const GroupPlaces& places, const RowSizes& sizes,
               std::vector<RowBuffers> ranks, TokenRange tokens)
      : places_(places),
        sizes_(sizes),
        tokens_(tokens),
        ranks_(std::move(ranks)),
        in_(ranks_.size()),
        out_(ranks_.size()) {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      for (const Leaf& leaf : ranks_[rank].leaves) {
        // Only read.
        in_[rank].Add(const_cast<std::byte*>(leaf.in), leaf.row_bytes,
                      leaf.row_bytes);
        out_[rank].Add(leaf.out, leaf.row_bytes, leaf.row_bytes);
      }
      in_[rank].num_rows = sizes.num_tokens;
      out_[rank].num_rows = sizes.capacity;
    }
    cursors_.resize(
        1 + *std::max_element(places.process.begin(), places.process.end()),
        Cursor{.token = tokens.begin});
  }

  void Send(int process, Outbox& out) override {
    const int32_t width = sizes_.routes_per_token;
    Cursor& at = cursors_[process];
    for (; at.rank < ranks_.size(); ++at.rank, at.token = tokens_.begin) {
      if (!places_.Here(static_cast<int>(at.rank))) continue;
      for (; at.token < tokens_.end; ++at.token, at.route = 0) {
        const int32_t* routes = ranks_[at.rank].routes + at.token * width * 2;
        for (; at.route < width; ++at.route) {
          const int32_t to = routes[2 * at.route];
          if (to < 0 || places_.process[to] != process) continue;
          const Piece piece = {.from = static_cast<int32_t>(at.rank),
                               .to = to,
                               .index = routes[2 * at.route + 1]};
          if (!SendRow(out, in_[at.rank], at.token, piece, at.sent)) return;
        }
      }
    }
  }

  bool Take(int, PacketKind kind, const std::byte* data,
            int64_t bytes) override {
    if (kind != PacketKind::kRows) return false;
    return TakePieces(
        data, bytes, [&](const Piece& piece, const std::byte* from) {
          if (piece.to < 0 || piece.to >= static_cast<int>(out_.size()) ||
              !places_.Here(piece.to) ||
              !out_[piece.to].Has(piece.index, piece.offset, piece.bytes)) {
            return false;
          }
          out_[piece.to].Scatter(piece.index, piece.offset, piece.bytes, from);
          return true;
        });
  }

  bool Ended(int process) const override {
    return cursors_[process].rank == ranks_.size();
  }
  bool Complete() const override { return true; }

 private:
  struct Cursor {
    size_t rank = 0;
    int64_t token = 0;
    int32_t route = 0;
    int64_t sent = 0;
  };

  const GroupPlaces places_;
  const RowSizes sizes_;
  const TokenRange tokens_;
  const std::vector<RowBuffers> ranks_;
  std::vector<RowStore> in_;
  std::vector<RowStore> out_;
  std::vector<Cursor> cursors_;  // by process
};

}  // namespace

std::unique_ptr<Move> MakePlanMove(const GroupPlaces& places, int64_t num_bytes,
                                   std::vector<std::byte*> ids) {
  return std::make_unique<PlanMove>(places, num_bytes, std::move(ids));
}

std::unique_ptr<Move> MakeDispatchMove(const GroupPlaces& places,
                                       const RowSizes& sizes,
                                       std::vector<RowBuffers> ranks,
                                       TokenRange tokens) {
  return std::make_unique<DispatchMove>(places, sizes, std::move(ranks),
                                        tokens);
}

}  // namespace jax_ep::cpu
