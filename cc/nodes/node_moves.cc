#include "cc/nodes/node_moves.h"

#include <algorithm>

#include "cc/experts/expert_ops.h"
#include "cc/nodes/gather_rows.h"

namespace jax_ep {
namespace {

// Rows of a block that cross together.
struct Chunk {
  int32_t distance;  // of the nodes, 1 to N - 1
  int64_t begin;     // in the block
  int64_t rows;
  int32_t place;
};

class Crossing {
 public:
  Crossing(const NodeRows& params, Wire& wire, const NodeEvents& events,
           cudaStream_t stream)
      : p_(params), wire_(wire), events_(events), stream_(stream) {}

  int64_t num_chunks() const { return chunks_of_block() * (p_.num_nodes - 1); }

  Chunk At(int64_t number) const {
    const int64_t begin = number % chunks_of_block() * p_.chunk_rows;
    return {.distance = static_cast<int32_t>(number / chunks_of_block()) + 1,
            .begin = begin,
            .rows = std::min(p_.chunk_rows, p_.block - begin),
            .place = static_cast<int32_t>(number % p_.in_flight)};
  }

  // Of a chunk's first row among those that leave or arrive.
  int64_t Departure(const Chunk& chunk) const {
    return (chunk.distance - 1) * p_.block + chunk.begin;
  }
  int64_t WireRow(const Chunk& chunk) const {
    return p_.num_tokens + Departure(chunk);
  }

  int32_t After(const Chunk& chunk) const {
    return (p_.node + chunk.distance) % p_.num_nodes;
  }
  int32_t Before(const Chunk& chunk) const {
    return (p_.node + p_.num_nodes - chunk.distance) % p_.num_nodes;
  }

  // A row of a leaf's staging memory.
  std::byte* Staging(int32_t leaf, int64_t row) const {
    return p_.staging[leaf] + row * p_.rows.leaves[leaf].row_bytes;
  }

  // Sends the chunk behind what the main stream holds now. out(i) and in(i) are
  // its rows of leaf i.
  template <typename Out, typename In>
  void Cross(const Chunk& chunk, int32_t to, int32_t from, const Out& out,
             const In& in) {
    WireTransfer transfer = {.to = to, .from = from, .pieces = {}};
    for (int32_t i = 0; i < p_.rows.num_leaves; ++i) {
      transfer.pieces.push_back(
          {out(i), in(i), chunk.rows * p_.rows.leaves[i].row_bytes});
    }
    Begin(chunk.place);
    Say(wire_.Exchange({transfer}));
    Check(cudaEventRecord(events_.crossed[chunk.place], wire_.stream()));
  }

  // The wire goes on when the main stream has come here.
  void Begin(int32_t place) {
    Check(cudaEventRecord(events_.packed[place], stream_));
    Check(cudaStreamWaitEvent(wire_.stream(), events_.packed[place], 0));
  }

  // The main stream goes on when the chunk has crossed.
  void Await(int32_t place) {
    Check(cudaStreamWaitEvent(stream_, events_.crossed[place], 0));
  }

  void Check(cudaError_t status) {
    if (status != cudaSuccess) Say(cudaGetErrorString(status));
  }
  // Keeps the first problem.
  void Say(const std::string& problem) {
    if (problem_.empty()) problem_ = problem;
  }
  const std::string& problem() const { return problem_; }
  // What did not come must not be passed on: nothing is enqueued any more.
  bool Well() const { return problem_.empty(); }

  // `rows` wire rows from `first` on, which node `source` sent.
  RowParams Part(int64_t first, int64_t rows, int32_t source,
                 int64_t first_token) const {
    RowParams part = p_.rows;
    part.num_tokens = rows;
    part.routes += first * part.routes_per_token * 2;
    part.first_source = source * p_.node_size;
    part.source_tokens = p_.num_tokens;
    part.first_token = first_token;
    return part;
  }
  RowParams Part(const Chunk& chunk) const {
    return Part(WireRow(chunk), chunk.rows, Before(chunk), chunk.begin);
  }
  RowParams Own() const { return Part(0, p_.num_tokens, p_.node, 0); }

 private:
  int64_t chunks_of_block() const {
    return (p_.block + p_.chunk_rows - 1) / p_.chunk_rows;
  }

  const NodeRows& p_;
  Wire& wire_;
  const NodeEvents& events_;
  const cudaStream_t stream_;
  std::string problem_;
};

}  // namespace

std::string NodeDispatch(const NodeRows& params, Wire& wire,
                         const NodeEvents& events, cudaStream_t stream) {
  Crossing crossing(params, wire, events, stream);
  const int32_t num_leaves = params.rows.num_leaves;
  const auto leaving = [&](int32_t leaf, const Chunk& chunk) {
    return crossing.Staging(leaf, chunk.place * params.chunk_rows);
  };
  const auto arriving = [&](int32_t leaf, const Chunk& chunk) {
    return crossing.Staging(
        leaf, (params.in_flight + chunk.place) * params.chunk_rows);
  };
  const auto send = [&](const Chunk& chunk) {
    GatherRowsParams pack = {};
    pack.num_leaves = num_leaves;
    pack.num_rows = chunk.rows;
    pack.index = params.sends + crossing.Departure(chunk);
    for (int32_t i = 0; i < num_leaves; ++i) {
      pack.leaves[i] = params.rows.leaves[i];
      pack.leaves[i].out = leaving(i, chunk);
    }
    crossing.Check(LaunchGatherRows(pack, stream));
    if (!crossing.Well()) return;
    crossing.Cross(
        chunk, crossing.After(chunk), crossing.Before(chunk),
        [&](int32_t i) { return leaving(i, chunk); },
        [&](int32_t i) { return arriving(i, chunk); });
  };
  const auto pass_on = [&](const Chunk& chunk) {
    crossing.Await(chunk.place);
    DispatchParams part = crossing.Part(chunk);
    part.keeps_empty = true;
    for (int32_t i = 0; i < num_leaves; ++i) {
      part.leaves[i].in = arriving(i, chunk);
    }
    crossing.Check(LaunchDispatch(part, stream));
  };

  const Operation& op = params.rows.op;
  crossing.Check(LaunchWireCheck({.position = op.position,
                                  .mesh = op.view.mesh,
                                  .channel = op.channel,
                                  .rank = op.view.rank,
                                  .exchanges = false},
                                 stream));
  const int64_t count = crossing.num_chunks();
  const int64_t ahead = std::min<int64_t>(params.in_flight, count);
  for (int64_t c = 0; c < ahead && crossing.Well(); ++c) send(crossing.At(c));
  if (crossing.Well()) {
    crossing.Check(LaunchDispatch(crossing.Own(), stream));
  }
  for (int64_t c = 0; c < count && crossing.Well(); ++c) {
    pass_on(crossing.At(c));
    if (c + ahead < count && crossing.Well()) send(crossing.At(c + ahead));
  }
  return crossing.problem();
}

std::string NodeCombine(const NodeRows& params, Wire& wire,
                        const NodeEvents& events, cudaStream_t stream) {
  Crossing crossing(params, wire, events, stream);
  const int32_t num_leaves = params.rows.num_leaves;
  const int64_t num_wire_rows =
      params.num_tokens + (params.num_nodes - 1) * params.block;
  const auto leaving = [&](int32_t leaf, const Chunk& chunk) {
    return crossing.Staging(leaf,
                            num_wire_rows + chunk.place * params.chunk_rows);
  };
  const int64_t count = crossing.num_chunks();
  const int64_t ahead = std::min<int64_t>(params.in_flight, count);
  const auto send = [&](int64_t number) {
    const Chunk chunk = crossing.At(number);
    // The chunk that had this place has left.
    if (number >= ahead) crossing.Await(chunk.place);
    CombineParams part = crossing.Part(chunk);
    for (int32_t i = 0; i < num_leaves; ++i) {
      part.leaves[i].out = leaving(i, chunk);
    }
    crossing.Check(LaunchCombine(part, stream));
    if (!crossing.Well()) return;
    crossing.Cross(
        chunk, crossing.Before(chunk), crossing.After(chunk),
        [&](int32_t i) { return leaving(i, chunk); },
        [&](int32_t i) {
          return crossing.Staging(i, crossing.WireRow(chunk));
        });
  };

  for (int64_t c = 0; c < ahead && crossing.Well(); ++c) send(c);
  CombineParams own = crossing.Own();
  for (int32_t i = 0; i < num_leaves; ++i) {
    own.leaves[i].out = crossing.Staging(i, 0);
  }
  if (crossing.Well()) crossing.Check(LaunchCombine(own, stream));
  for (int64_t c = ahead; c < count && crossing.Well(); ++c) send(c);
  if (!crossing.Well()) return crossing.problem();
  // The wire's stream has it behind all others.
  crossing.Await(crossing.At(count - 1).place);

  UnpermuteParams sum = {};
  sum.top_k = params.places_per_token;
  sum.num_leaves = num_leaves;
  sum.capacity = params.num_tokens;
  sum.expert_capacity = num_wire_rows;
  sum.expert_rows = params.places;
  for (int32_t i = 0; i < num_leaves; ++i) {
    sum.leaves[i] = params.rows.leaves[i];
    sum.leaves[i].in = crossing.Staging(i, 0);
  }
  crossing.Check(LaunchUnpermute(sum, stream));
  return crossing.problem();
}

std::string NodeExchange(const std::byte* in, std::byte* out,
                         int64_t block_bytes, int32_t node, int32_t num_nodes,
                         const WireCheck& check, Wire& wire,
                         const NodeEvents& events, cudaStream_t stream) {
  NodeRows none = {};
  Crossing crossing(none, wire, events, stream);
  crossing.Check(LaunchWireCheck(check, stream));
  if (!crossing.Well()) return crossing.problem();
  std::vector<WireTransfer> transfers;
  for (int32_t distance = 1; distance < num_nodes; ++distance) {
    const int64_t begin = (distance - 1) * block_bytes;
    transfers.push_back({
        .to = (node + distance) % num_nodes,
        .from = (node + num_nodes - distance) % num_nodes,
        .pieces = {{in + begin, out + begin, block_bytes}},
    });
  }
  crossing.Begin(0);
  crossing.Say(wire.Exchange(transfers));
  crossing.Check(cudaEventRecord(events.crossed[0], wire.stream()));
  crossing.Await(0);
  return crossing.problem();
}

}  // namespace jax_ep
