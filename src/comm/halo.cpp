// The exchange at once: rows travel while queries that need none of them are computed; then the others, each whole and
// with its keys in the order of one device, so that no bit tells how many ranks there were.
#include <algorithm>
#include <optional>

#include "comm/ring_state.h"
#include "plan/exchange_runs.h"
#include "plan/row_ranges.h"
#include "util/reject.h"

namespace longspan {
namespace {

/// Consecutive rows of a shard, and the positions they have.
struct ShardRows {
  std::int64_t row = 0;
  RowRanges positions;
  std::int64_t count() const { return rows_in(positions); }
};

/// Where positions lie in a shard.
std::vector<ShardRows> rows_at(std::span<const RowRange> positions, std::span<const RowRange> shard) {
  std::vector<ShardRows> found;
  std::int64_t row = 0;
  for (const RowRange& range : shard) {
    for (const RowRange& own : common_rows({&range, 1}, positions)) {
      const std::int64_t at = row + own.start - range.start;
      if (found.empty() || found.back().row + found.back().count() != at) found.push_back({at, {}});
      found.back().positions.push_back(own);
    }
    row += range.count;
  }
  return found;
}

struct RowsByNeed {
  std::vector<ShardRows> local, remote;  // need no remote row; need some
};

/// Rows of the shard that are local to every branch, and the rest. Each stretch is a call of its own, so of many short
/// ones only the longest are kept apart.
RowsByNeed split(const ExchangePlan& exchange, std::span<const RowRange> ranges) {
  constexpr std::size_t kMostCalls = 16;
  RowRanges local(ranges.begin(), ranges.end());
  if (!exchange.peers().empty()) {
    for (const RowRanges& of_branch : exchange.local_ranges()) local = common_rows(local, of_branch);
  }
  if (local.size() > kMostCalls) {
    const auto longer = [](const RowRange& a, const RowRange& b) { return a.count > b.count; };
    std::nth_element(local.begin(), local.begin() + kMostCalls, local.end(), longer);
    local.resize(kMostCalls);
    std::sort(local.begin(), local.end(), [](const RowRange& a, const RowRange& b) { return a.start < b.start; });
  }
  return {rows_at(local, ranges), rows_at(rows_without(ranges, local), ranges)};
}

/// The caller's progress hook as a stretch of it, and messages that move meanwhile.
class WorkProgress {
 public:
  WorkProgress(const Call& call, std::int64_t rows) : call_(call), rows_(std::max<std::int64_t>(rows, 1)) {}
  /// For the next `rows` rows; step: null if nothing travels.
  void apply(Call& inner, std::int64_t rows, MessageStep* step) {
    const double begin = static_cast<double>(done_) / static_cast<double>(rows_),
                 share = static_cast<double>(rows) / static_cast<double>(rows_);
    done_ += rows;
    inner.progress = nullptr;
    if (!call_.progress && !step) return;
    inner.progress = [this, begin, share, step](double fraction) {
      if (step) step->progress();
      return !call_.progress || call_.progress(begin + share * fraction);
    };
  }

 private:
  const Call& call_;
  std::int64_t rows_, done_ = 0;
};

/// Memory for what a forward exchanges, with the sends packed.
Messages make_messages(const ExchangePlan& exchange, const MessageMemory& memory, std::span<const RowRange> ranges,
                       const ConstTensorView& k, const ConstTensorView& v) {
  Messages messages;
  for (const ExchangePeer& peer : exchange.peers()) {
    if (peer.send_pairs > 0)
      messages.sends.emplace_back(peer.rank, peer.send_pairs * exchange.bytes_per_pair(), memory);
    if (peer.receive_pairs > 0)
      messages.receives.emplace_back(peer.rank, peer.receive_pairs * exchange.bytes_per_pair(), memory);
  }
  std::vector<PackedRows> rows;
  for (const MessageBuffer& send : messages.sends) rows.push_back({send, peer_of(exchange, send.peer()).send});
  pack(rows, ranges, k, v);
  return messages;
}

/// Memory for the gradients that travel back: sends are what receives were, set to zero.
Messages make_returns(const ExchangePlan& exchange, const MessageMemory& memory, const ConstTensorView& k) {
  Messages messages;
  for (const ExchangePeer& peer : exchange.peers()) {
    if (peer.receive_pairs > 0) {
      messages.sends.emplace_back(peer.rank, peer.receive_pairs * exchange.gradient_bytes_per_pair(), memory);
      clear(message_rows(messages.sends.back().payload(), peer.receive_pairs, k, sum_dtype(k.dtype)), memory.stream);
    }
    if (peer.send_pairs > 0)
      messages.receives.emplace_back(peer.rank, peer.send_pairs * exchange.gradient_bytes_per_pair(), memory);
  }
  return messages;
}

/// Whether gradients of this dtype can be summed up in the tensor itself. GPUs add 16 bytes at a time.
bool sums_in_place(const TensorView& view) {
  if (view.dtype != sum_dtype(view.dtype)) return false;
  if (view.device.type == DeviceType::cpu) return true;
  std::uint64_t bits = reinterpret_cast<std::uintptr_t>(view.data);
  for (std::size_t d = 0; d < 3; ++d) bits |= static_cast<std::uint64_t>(view.strides[d] * size_of(view.dtype));
  return bits % 16 == 0;
}

/// A halo of other inputs would give other gradients.
void check_kept(const RingPlan& plan, const Problem& problem, std::span<const MessageBuffer> halo) {
  const ExchangePlan& exchange = *plan.exchange;
  const auto received = std::count_if(exchange.peers().begin(), exchange.peers().end(),
                                      [](const ExchangePeer& peer) { return peer.receive_pairs > 0; });
  const bool same =
      problem == plan.problem && received == static_cast<std::ptrdiff_t>(halo.size()) &&
      std::all_of(halo.begin(), halo.end(), [&](const MessageBuffer& message) {
        return message.bytes() == peer_of(exchange, message.peer()).receive_pairs * exchange.bytes_per_pair();
      });
  if (!same) reject("kept", kOtherHalo);
}

/// The received rows as pieces behind the own ones.
void add_halo_pieces(std::vector<KeyPiece>& pieces, const ExchangePlan& exchange, std::span<const MessageBuffer> halo,
                     std::span<const MessageBuffer> gradients, const ConstTensorView& k) {
  for (std::size_t i = 0; i < halo.size(); ++i) {
    add_pieces(pieces, peer_of(exchange, halo[i].peer()).receive, halo[i].payload(),
               gradients.empty() ? nullptr : gradients[i].payload(), k, k.dtype);
  }
}

}  // namespace

void Ring::State::halo_forward(const RingPlan& plan, const MessageRules& rules, RingClock& clock,
                               const ForwardTensors& t, const Call& call, RingHalo* keep) {
  const ExchangePlan& exchange = *plan.exchange;
  const ForwardTensors whole = of_sequence(t);
  Messages messages;
  clock.working("pack", [&] { messages = make_messages(exchange, rules.memory, ranges(), t.k, t.v); });
  messages.count(report);
  report.halo_bytes = total_bytes(messages.receives);
  MessageStep step(*communicator, rules, "ring forward, exchange of rows");
  clock.working("send", [&] { step.begin(messages.sends, messages.receives); });

  const RowsByNeed rows = split(exchange, ranges());
  WorkProgress progress(call, shards.rows(rank));
  std::vector<KeyPiece> pieces = own_pieces(ranges(), t.k, t.v);
  const auto attend = [&](const std::vector<ShardRows>& list, MessageStep* travelling) {
    for (const ShardRows& own : list) {
      Call inner = call;
      inner.query_ranges = own.positions;
      inner.pieces = pieces;
      progress.apply(inner, own.count(), travelling);
      const auto of = [&](const auto& view) { return rows_of(view, own.row, own.count()); };
      run_forward(attention, {of(t.q), whole.k, whole.v, of(t.out), of(t.lse)}, inner, KeysGiven::all, shards.tokens());
    }
  };
  // By branches where the kernel can stop between them, else by rows.
  Call ranged = with_ranges(call, ranges());
  ranged.pieces = pieces;
  SplitForward by_branch(attention, whole, ranged);
  if (!rows.remote.empty() && by_branch.possible()) {
    const WindowsByNeed windows = split_windows(*plan.plan, exchange, ranges());
    progress.apply(ranged, shards.rows(rank) / 2, &step);
    clock.working("work without remote keys", step, [&] { by_branch.run({windows.local, true, false}, ranged); });
    clock.waiting("wait", [&] { step.finish(); });
    add_halo_pieces(pieces, exchange, messages.receives, {}, t.k);
    ranged.pieces = pieces;
    progress.apply(ranged, shards.rows(rank) / 2, nullptr);
    clock.working("work with remote keys", [&] { by_branch.run({windows.remote, false, true}, ranged); });
  } else {
    if (!rows.local.empty()) clock.working("rows without remote keys", step, [&] { attend(rows.local, &step); });
    clock.waiting("wait", [&] { step.finish(); });
    add_halo_pieces(pieces, exchange, messages.receives, {}, t.k);
    if (!rows.remote.empty()) clock.working("rows with remote keys", [&] { attend(rows.remote, nullptr); });
  }
  if (keep)
    keep->data_ = std::make_shared<RingHalo::Data>(RingHalo::Data{plan.problem, std::move(messages.receives), nullptr});
}

void Ring::State::halo_backward(const RingPlan& plan, const MessageRules& rules, RingClock& clock,
                                const BackwardTensors& t, const Call& call, const RingHalo* kept) {
  const ExchangePlan& exchange = *plan.exchange;
  const ConstTensorView k = shape_only(t.k, shards.tokens()), v = shape_only(t.v, shards.tokens());
  // Sums of own rows: the caller's tensors where they can be.
  void* const stream = rules.memory.stream;
  const bool in_place = sums_in_place(t.dk) && sums_in_place(t.dv);
  std::optional<ScratchTensor> dk_memory, dv_memory;
  if (!in_place) {
    dk_memory.emplace(t.k, sum_dtype(t.k.dtype), stream);
    dv_memory.emplace(t.v, sum_dtype(t.k.dtype), stream);
  }
  const TensorView dk = in_place ? t.dk : dk_memory->view(), dv = in_place ? t.dv : dv_memory->view();
  clear(dk, stream);
  clear(dv, stream);

  const RowsByNeed rows = split(exchange, ranges());
  WorkProgress progress(call, shards.rows(rank));
  std::vector<KeyPiece> pieces = own_pieces(ranges(), t.k, t.v, dk, dv);
  const auto attend = [&](const std::vector<ShardRows>& list, MessageStep* travelling) {
    for (const ShardRows& own : list) {
      const auto of = [&](const auto& view) { return rows_of(view, own.row, own.count()); };
      Call inner = call;
      inner.query_ranges = own.positions;
      inner.pieces = pieces;
      inner.dlse = of(call.dlse);
      progress.apply(inner, own.count(), travelling);
      attention.backward(of(t.q), k, v, of(t.out), of(t.lse), of(t.dout), of(t.dq), {}, {}, inner);
    }
  };
  const auto attend_locally = [&](MessageStep& travelling) {
    if (!rows.local.empty())
      clock.working("rows without remote keys", travelling, [&] { attend(rows.local, &travelling); });
  };

  // Rows fetched again travel while local rows are computed; a kept halo lets the gradients do so instead.
  std::vector<MessageBuffer> fetched;
  const bool fetch = !kept || kept->empty();
  if (!fetch) check_kept(plan, kept->data_->problem, kept->data_->messages);
  if (fetch) {
    Messages messages;
    clock.working("pack", [&] { messages = make_messages(exchange, rules.memory, ranges(), t.k, t.v); });
    messages.count(report);
    MessageStep step(*communicator, rules, "ring backward, exchange of rows");
    clock.working("send", [&] { step.begin(messages.sends, messages.receives); });
    attend_locally(step);
    clock.waiting("wait", [&] { step.finish(); });
    fetched = std::move(messages.receives);
  }
  const std::span<const MessageBuffer> halo =
      fetch ? std::span<const MessageBuffer>(fetched) : std::span<const MessageBuffer>(kept->data_->messages);
  Messages returns = make_returns(exchange, rules.memory, t.k);
  returns.count(report);
  report.halo_bytes = total_bytes(halo) + total_bytes(returns.sends) + total_bytes(returns.receives);
  const std::size_t own_pieces = pieces.size();
  add_halo_pieces(pieces, exchange, halo, returns.sends, t.k);
  if (!rows.remote.empty()) clock.working("rows with remote keys", [&] { attend(rows.remote, nullptr); });
  pieces.resize(own_pieces);
  fetched.clear();

  MessageStep step(*communicator, rules, "ring backward, return of gradients");
  clock.working("send", [&] { step.begin(returns.sends, returns.receives); });
  if (!fetch) attend_locally(step);
  clock.waiting("wait", [&] { step.finish(); });
  clock.working("add gradients", [&] {
    // In the order of ranks, whatever the order of arrival.
    for (const MessageBuffer& receive : returns.receives)
      add_gradients(receive, peer_of(exchange, receive.peer()).send, ranges(), dk, dv);
    if (!in_place) {
      convert(t.dk, dk, stream);
      convert(t.dv, dv, stream);
    }
  });
}

}  // namespace longspan
