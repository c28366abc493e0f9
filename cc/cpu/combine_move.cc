// combine between processes: the owner of the tokens asks for the rows it
// needs, in the order of its tokens, and sums a window of tokens once they are
// all there. Two windows are open at a time: one fills while the other is
// summed.
#include <algorithm>
#include <cfenv>
#include <deque>
#include <memory>
#include <utility>

#include "cc/cpu/moves.h"
#include "cc/cpu/rows_between.h"
#include "cc/layout/limits.h"

namespace jax_ep::cpu {
namespace {

// Bytes that rows from elsewhere may take up in one window of one rank; one
// token's rows always fit.
constexpr int64_t kWindowBytes = 256 << 10;
constexpr int64_t kWindowTokens = 1024;

class CombineMove : public Move {
 public:
  CombineMove(const GroupPlaces& places, const RowSizes& sizes,
              std::vector<RowBuffers> ranks, TokenRange tokens)
      : places_(places),
        sizes_(sizes),
        tokens_(tokens),
        ranks_(std::move(ranks)),
        in_(ranks_.size()) {
    std::fegetenv(&environment_);
    const int num_processes =
        1 + *std::max_element(places.process.begin(), places.process.end());
    wishes_.resize(num_processes);
    owed_.resize(num_processes);
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      if (!places.Here(rank)) continue;
      for (const Leaf& leaf : ranks_[rank].leaves) {
        in_[rank].Add(const_cast<std::byte*>(leaf.in), leaf.row_bytes,
                      leaf.row_bytes);
      }
      in_[rank].num_rows = sizes.capacity;
      AddHome(rank);
    }
    for (Home& home : homes_) {
      for (int window = 0; window < kWindows; ++window) Open(home, window);
    }
  }

  void Send(int process, Outbox& out) override {
    std::deque<RowRequest>& wishes = wishes_[process];
    while (!wishes.empty() &&
           out.Room(PacketKind::kRequests, sizeof(RowRequest)) > 0) {
      std::memcpy(out.Append(sizeof(RowRequest)), &wishes.front(),
                  sizeof(RowRequest));
      wishes.pop_front();
    }
    out.Flush();  // the other kind of packet
    Owed& owed = owed_[process];
    for (; !owed.requests.empty(); owed.requests.pop_front()) {
      const RowRequest& request = owed.requests.front();
      const Piece piece = {
          .from = request.holder, .to = request.home, .index = request.landing};
      if (!SendRow(out, in_[request.holder], request.slot, piece, owed.sent)) {
        return;
      }
    }
  }

  bool Take(int process, PacketKind kind, const std::byte* data,
            int64_t bytes) override {
    if (kind == PacketKind::kRequests)
      return TakeRequests(process, data, bytes);
    return kind == PacketKind::kRows &&
           TakePieces(data, bytes,
                      [&](const Piece& piece, const std::byte* from) {
                        return TakePiece(piece, from);
                      });
  }

  bool Advance() override {
    // Sums are those of XLA's own threads, which may flush subnormal numbers.
    std::fenv_t own;
    std::fegetenv(&own);
    std::fesetenv(&environment_);
    const bool worked = SumFullWindows();
    std::fesetenv(&own);
    return worked;
  }

  bool Ended(int process) const override {
    return wishes_[process].empty() && Complete();
  }

  bool Complete() const override {
    for (const Home& home : homes_) {
      for (const Window& window : home.windows) {
        if (window.open) return false;
      }
    }
    return true;
  }

 private:
  static constexpr int kWindows = 2;

  struct Window {
    bool open = false;
    int64_t begin = 0;  // tokens
    int64_t end = 0;
    int64_t missing = 0;  // bytes
  };
  // A rank of this process, as the owner of tokens.
  struct Home {
    int rank;
    int64_t next;  // the first token that no window has had
    int64_t window_rows = 0;
    std::unique_ptr<std::byte[]> memory = nullptr;
    RowStore landing = {};  // window_rows for each window
    Window windows[kWindows] = {};
  };
  struct Owed {
    std::deque<RowRequest> requests;
    int64_t sent = 0;  // of the first one's row
  };

  const int32_t* Routes(int rank, int64_t token) const {
    return ranks_[rank].routes + token * sizes_.routes_per_token * 2;
  }

  int64_t RowsFromElsewhere(int rank, int64_t token) const {
    const int32_t* routes = Routes(rank, token);
    int64_t rows = 0;
    for (int32_t j = 0; j < sizes_.routes_per_token; ++j) {
      rows += routes[2 * j] >= 0 && !places_.Here(routes[2 * j]);
    }
    return rows;
  }

  void AddHome(int rank) {
    Home home{.rank = rank, .next = tokens_.begin};
    int64_t needed = 0;
    for (int64_t token = tokens_.begin; token < tokens_.end; ++token) {
      needed += RowsFromElsewhere(rank, token);
    }
    // Leaves stand one after the other, each aligned for vector loads.
    constexpr int64_t kAlignment = 64;
    int64_t stride = 0;
    for (const Leaf& leaf : ranks_[rank].leaves) {
      stride += (leaf.row_bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
    home.window_rows = std::min(
        needed, std::max<int64_t>(sizes_.routes_per_token,
                                  kWindowBytes / std::max<int64_t>(1, stride)));
    home.memory.reset(
        new std::byte[kWindows * home.window_rows * stride + kAlignment]);
    std::byte* base = home.memory.get();
    base += kAlignment - reinterpret_cast<uintptr_t>(base) % kAlignment;
    for (const Leaf& leaf : ranks_[rank].leaves) {
      home.landing.Add(base, stride, leaf.row_bytes);
      base += (leaf.row_bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
    home.landing.num_rows = kWindows * home.window_rows;
    homes_.push_back(std::move(home));
  }

  bool SumFullWindows() {
    bool worked = false;
    for (Home& home : homes_) {
      for (int window = 0; window < kWindows; ++window) {
        if (!home.windows[window].open || home.windows[window].missing != 0) {
          continue;
        }
        Sum(home, window);
        Open(home, window);
        worked = true;
      }
    }
    return worked;
  }

  // Takes the next tokens into a window and asks for their rows.
  void Open(Home& home, int number) {
    Window& window = home.windows[number];
    window.open = home.next < tokens_.end;
    window.begin = window.end = home.next;
    const int64_t first = number * home.window_rows;
    int64_t rows = 0;
    while (window.end < tokens_.end &&
           window.end - window.begin < kWindowTokens) {
      if (rows + RowsFromElsewhere(home.rank, window.end) > home.window_rows) {
        break;
      }
      const int32_t* routes = Routes(home.rank, window.end++);
      for (int32_t j = 0; j < sizes_.routes_per_token; ++j, routes += 2) {
        if (routes[0] < 0 || places_.Here(routes[0])) continue;
        wishes_[places_.process[routes[0]]].push_back(
            {.home = home.rank,
             .holder = routes[0],
             .slot = routes[1],
             .landing = first + rows});
        ++rows;
      }
    }
    home.next = window.end;
    window.missing = rows * home.landing.row_bytes;
  }

  void Sum(const Home& home, int number) {
    const RowBuffers& mine = ranks_[home.rank];
    const Window& window = home.windows[number];
    int64_t landed = number * home.window_rows;
    int32_t holders[kMaxRanks];
    int64_t rows[kMaxRanks];
    const std::byte* terms[kMaxRanks];
    for (int64_t token = window.begin; token < window.end; ++token) {
      const int32_t* routes = Routes(home.rank, token);
      int32_t num_terms = 0;
      for (int32_t j = 0; j < sizes_.routes_per_token; ++j, routes += 2) {
        if (routes[0] < 0) continue;
        const bool here = places_.Here(routes[0]);
        holders[num_terms] = here ? routes[0] : -1;
        rows[num_terms++] = here ? routes[1] : landed++;
      }
      for (size_t i = 0; i < mine.leaves.size(); ++i) {
        const Leaf& leaf = mine.leaves[i];
        std::byte* out = leaf.out + token * leaf.row_bytes;
        const RowStore::Leaf& landing = home.landing.leaves[i];
        for (int32_t n = 0; n < num_terms; ++n) {
          terms[n] = holders[n] < 0 ? landing.base + rows[n] * landing.stride
                                    : ranks_[holders[n]].leaves[i].in +
                                          rows[n] * leaf.row_bytes;
        }
        if (num_terms == 0) {
          std::memset(out, 0, leaf.row_bytes);
        } else {
          SumRows(leaf.element, terms, num_terms, out, leaf.row_bytes);
        }
      }
    }
  }

  bool TakeRequests(int process, const std::byte* data, int64_t bytes) {
    for (; bytes >= static_cast<int64_t>(sizeof(RowRequest));
         bytes -= sizeof(RowRequest), data += sizeof(RowRequest)) {
      RowRequest request;
      std::memcpy(&request, data, sizeof(request));
      if (request.holder < 0 ||
          request.holder >= static_cast<int>(ranks_.size()) ||
          !places_.Here(request.holder) || request.slot < 0 ||
          request.slot >= sizes_.capacity) {
        return false;
      }
      owed_[process].requests.push_back(request);
    }
    return bytes == 0;
  }

  bool TakePiece(const Piece& piece, const std::byte* from) {
    for (Home& home : homes_) {
      if (home.rank != piece.to) continue;
      if (!home.landing.Has(piece.index, piece.offset, piece.bytes)) {
        return false;
      }
      Window& window = home.windows[piece.index / home.window_rows];
      if (!window.open || window.missing < piece.bytes) return false;
      home.landing.Scatter(piece.index, piece.offset, piece.bytes, from);
      window.missing -= piece.bytes;
      return true;
    }
    return false;
  }

  const GroupPlaces places_;
  const RowSizes sizes_;
  const TokenRange tokens_;
  const std::vector<RowBuffers> ranks_;
  std::fenv_t environment_;
  std::vector<RowStore> in_;
  std::vector<Home> homes_;
  std::vector<std::deque<RowRequest>> wishes_;  // by process, to be sent
  std::vector<Owed> owed_;                      // by process, to be answered
};

}  // namespace

std::unique_ptr<Move> MakeCombineMove(const GroupPlaces& places,
                                      const RowSizes& sizes,
                                      std::vector<RowBuffers> ranks,
                                      TokenRange tokens) {
  return std::make_unique<CombineMove>(places, sizes, std::move(ranks), tokens);
}

}  // namespace jax_ep::cpu
