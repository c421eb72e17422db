// The exchange at once: rows travel while queries that need none of them are computed; then the others, each whole and
// with its keys in the order of one device, so that no bit tells how many ranks there were.
#include <algorithm>
#include <optional>

#include "attention/split_forward.h"
#include "comm/ring_state.h"
#include "longspan/error.h"
#include "plan/row_ranges.h"

namespace longspan {
namespace {

/// Consecutive rows of a shard, and the positions they have.
struct RowsPart {
  std::int64_t row = 0;
  RowRanges positions;
  std::int64_t count() const { return rows_in(positions); }
};
using RowsParts = std::vector<RowsPart>;

/// Positions of the shard as parts of its rows.
RowsParts parts_of(std::span<const RowRange> positions, std::span<const RowRange> shard) {
  RowsParts parts;
  std::int64_t row = 0;
  for (const RowRange& range : shard) {
    for (const RowRange& own : common_rows({&range, 1}, positions)) {
      const std::int64_t at = row + own.start - range.start;
      if (parts.empty() || parts.back().row + parts.back().count() != at) parts.push_back({at, {}});
      parts.back().positions.push_back(own);
    }
    row += range.count;
  }
  return parts;
}

struct RowsByNeed {
  RowsParts local, remote;  // need no remote row; need some
};

/// Rows of the shard that are local to every branch, and the rest. Each part is a call of its own, so of many short
/// ones only the longest are kept apart.
RowsByNeed split(const ExchangePlan& exchange, std::span<const RowRange> ranges) {
  constexpr std::size_t kMostParts = 16;
  RowRanges local(ranges.begin(), ranges.end());
  if (!exchange.peers().empty()) {
    for (const RowRanges& of_branch : exchange.local_ranges()) local = common_rows(local, of_branch);
  }
  if (local.size() > kMostParts) {
    const auto longer = [](const RowRange& a, const RowRange& b) { return a.count > b.count; };
    std::nth_element(local.begin(), local.begin() + kMostParts, local.end(), longer);
    local.resize(kMostParts);
    std::sort(local.begin(), local.end(), [](const RowRange& a, const RowRange& b) { return a.start < b.start; });
  }
  return {parts_of(local, ranges), parts_of(rows_without(ranges, local), ranges)};
}

/// What each branch can do without remote rows, and what is left. Where branches are mixed, a row goes through them in
/// order, so a branch has to leave a row for later once one before it has.
struct WindowsByNeed {
  std::vector<RowRanges> local, remote;  // positions, by branch
};
WindowsByNeed split_windows(const Plan& plan, const ExchangePlan& exchange, std::span<const RowRange> ranges) {
  WindowsByNeed windows;
  RowRanges before(ranges.begin(), ranges.end());
  for (const RowRanges& of_branch : exchange.local_ranges()) {
    windows.local.push_back(common_rows(before, of_branch));
    windows.remote.push_back(rows_without(ranges, windows.local.back()));
    if (plan.merges_branches()) before = windows.local.back();
  }
  return windows;
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
Messages make_messages(const ExchangePlan& exchange, const MessagePlace& place, std::span<const RowRange> ranges,
                       const ConstTensorView& k, const ConstTensorView& v) {
  Messages messages;
  const auto bytes = [&](std::int64_t pairs) { return static_cast<std::size_t>(pairs * exchange.bytes_per_pair()); };
  for (const ExchangePeer& peer : exchange.peers()) {
    if (peer.send_pairs > 0) messages.sends.emplace_back(peer.rank, bytes(peer.send_pairs), place);
    if (peer.receive_pairs > 0) messages.receives.emplace_back(peer.rank, bytes(peer.receive_pairs), place);
  }
  std::vector<PackedRows> rows;
  for (const ExchangePeer& peer : exchange.peers()) {
    if (peer.send_pairs > 0) rows.push_back({messages.sends[rows.size()], peer.send});
  }
  pack(rows, ranges, k, v);
  return messages;
}

/// Memory for the gradients that travel back: sends are what receives were, set to zero.
Messages make_returns(const ExchangePlan& exchange, const MessagePlace& place, const ConstTensorView& k) {
  Messages messages;
  const DType sums = sum_dtype(k.dtype);
  const auto bytes = [&](std::int64_t pairs) {
    return static_cast<std::size_t>(pairs * exchange.gradient_bytes_per_pair());
  };
  for (const ExchangePeer& peer : exchange.peers()) {
    if (peer.receive_pairs > 0) {
      messages.sends.emplace_back(peer.rank, bytes(peer.receive_pairs), place);
      clear(message_rows(messages.sends.back().payload(), peer.receive_pairs, k, sums), place.stream);
    }
    if (peer.send_pairs > 0) messages.receives.emplace_back(peer.rank, bytes(peer.send_pairs), place);
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
  std::size_t next = 0;
  bool same = problem == plan.problem;
  for (const ExchangePeer& peer : plan.exchange->peers()) {
    if (peer.receive_pairs == 0) continue;
    same = same && next < halo.size() && halo[next].peer() == peer.rank &&
           halo[next].bytes() == static_cast<std::size_t>(peer.receive_pairs * plan.exchange->bytes_per_pair());
    ++next;
  }
  if (!same || next != halo.size()) {
    throw InvalidArgument(
        "kept",
        "the halo was kept by a forward of another problem: pass the one of these inputs, or none to fetch it again");
  }
}

/// The received rows as pieces behind the own ones.
void add_halo_pieces(std::vector<KeyPiece>& pieces, const ExchangePlan& exchange, std::span<const MessageBuffer> halo,
                     std::span<const MessageBuffer> gradients, const ConstTensorView& k) {
  std::size_t next = 0;
  for (const ExchangePeer& peer : exchange.peers()) {
    if (peer.receive_pairs == 0) continue;
    add_pieces(pieces, peer.receive, halo[next].payload(), gradients.empty() ? nullptr : gradients[next].payload(),
               k.batch(), k.columns(), k.dtype, sum_dtype(k.dtype), k.device);
    ++next;
  }
}

}  // namespace

void Ring::State::halo_forward(const RingPlan& plan, const MessageRules& rules, const ForwardTensors& t,
                               const Call& call, RingHalo* keep) {
  RingClock clock(report, rules.place);
  const ExchangePlan& exchange = *plan.exchange;
  const ConstTensorView k = shape_only(t.k, shards.tokens()), v = shape_only(t.v, shards.tokens());
  clock.waiting("compare ranks", [&] { MessageStep::greet(*communicator, rules, "ring forward"); });
  Messages messages;
  clock.working("pack", [&] { messages = make_messages(exchange, rules.place, ranges(), t.k, t.v); });
  messages.count(report);
  report.halo_bytes = total_bytes(messages.receives);
  MessageStep step(*communicator, rules, "ring forward, exchange of rows");
  clock.working("send", [&] { step.begin(messages.sends, messages.receives); });

  const RowsByNeed parts = split(exchange, ranges());
  WorkProgress progress(call, shards.rows(rank));
  std::vector<KeyPiece> pieces;
  add_own_pieces(pieces, ranges(), t.k, t.v);
  const auto attend = [&](const RowsParts& list, MessageStep* travelling) {
    for (const RowsPart& part : list) {
      Call inner = call;
      inner.query_ranges = part.positions;
      inner.pieces = pieces;
      progress.apply(inner, part.count(), travelling);
      attention.forward(rows_of(t.q, part.row, part.count()), k, v, rows_of(t.out, part.row, part.count()),
                        rows_of(t.lse, part.row, part.count()), inner);
    }
  };
  // By branches where the kernel can stop between them, else by rows.
  Call ranged = call;
  ranged.query_ranges = ranges();
  ranged.pieces = pieces;
  const SplitForward by_branch(attention, t.q, k, v, t.out, t.lse, ranged);
  if (!parts.remote.empty() && by_branch.possible()) {
    const WindowsByNeed windows = split_windows(*plan.plan, exchange, ranges());
    progress.apply(ranged, shards.rows(rank) / 2, &step);
    clock.working("work without remote keys", step, [&] { by_branch.run({windows.local, true, false}, ranged); });
    clock.waiting("wait", [&] { step.finish(); });
    add_halo_pieces(pieces, exchange, messages.receives, {}, t.k);
    ranged.pieces = pieces;
    progress.apply(ranged, shards.rows(rank) / 2, nullptr);
    clock.working("work with remote keys", [&] { by_branch.run({windows.remote, false, true}, ranged); });
  } else {
    if (!parts.local.empty()) clock.working("rows without remote keys", step, [&] { attend(parts.local, &step); });
    clock.waiting("wait", [&] { step.finish(); });
    add_halo_pieces(pieces, exchange, messages.receives, {}, t.k);
    if (!parts.remote.empty()) clock.working("rows with remote keys", [&] { attend(parts.remote, nullptr); });
  }
  if (keep) keep->data_ = std::make_shared<RingHalo::Data>(RingHalo::Data{plan.problem, std::move(messages.receives)});
}

void Ring::State::halo_backward(const RingPlan& plan, const MessageRules& rules, const BackwardTensors& t,
                                const Call& call, const RingHalo* kept) {
  RingClock clock(report, rules.place);
  const ExchangePlan& exchange = *plan.exchange;
  const ConstTensorView k = shape_only(t.k, shards.tokens()), v = shape_only(t.v, shards.tokens());
  clock.waiting("compare ranks", [&] { MessageStep::greet(*communicator, rules, "ring backward"); });

  // Sums of own rows: the caller's tensors where they can be.
  void* const stream = rules.place.stream;
  const bool in_place = sums_in_place(t.dk) && sums_in_place(t.dv);
  std::optional<ScratchTensor> dk_memory, dv_memory;
  if (!in_place) {
    dk_memory.emplace(t.k, sum_dtype(t.k.dtype), stream);
    dv_memory.emplace(t.v, sum_dtype(t.k.dtype), stream);
  }
  const TensorView dk = in_place ? t.dk : dk_memory->view(), dv = in_place ? t.dv : dv_memory->view();
  clear(dk, stream);
  clear(dv, stream);

  const RowsByNeed parts = split(exchange, ranges());
  WorkProgress progress(call, shards.rows(rank));
  std::vector<KeyPiece> pieces;
  add_own_pieces(pieces, ranges(), t.k, t.v, dk, dv);
  const auto attend = [&](const RowsParts& list, MessageStep* travelling) {
    for (const RowsPart& part : list) {
      const auto own = [&](const auto& view) { return rows_of(view, part.row, part.count()); };
      Call inner = call;
      inner.query_ranges = part.positions;
      inner.pieces = pieces;
      inner.dlse = own(call.dlse);
      progress.apply(inner, part.count(), travelling);
      attention.backward(own(t.q), k, v, own(t.out), own(t.lse), own(t.dout), own(t.dq), {}, {}, inner);
    }
  };
  const auto attend_locally = [&](MessageStep& travelling) {
    if (!parts.local.empty())
      clock.working("rows without remote keys", travelling, [&] { attend(parts.local, &travelling); });
  };

  // Rows fetched again travel while local rows are computed; a kept halo lets the gradients do so instead.
  std::vector<MessageBuffer> fetched;
  const bool fetch = !kept || kept->empty();
  if (!fetch) check_kept(plan, kept->data_->problem, kept->data_->messages);
  if (fetch) {
    Messages messages;
    clock.working("pack", [&] { messages = make_messages(exchange, rules.place, ranges(), t.k, t.v); });
    messages.count(report);
    MessageStep step(*communicator, rules, "ring backward, exchange of rows");
    clock.working("send", [&] { step.begin(messages.sends, messages.receives); });
    attend_locally(step);
    clock.waiting("wait", [&] { step.finish(); });
    fetched = std::move(messages.receives);
  }
  const std::span<const MessageBuffer> halo =
      fetch ? std::span<const MessageBuffer>(fetched) : std::span<const MessageBuffer>(kept->data_->messages);
  Messages returns = make_returns(exchange, rules.place, t.k);
  returns.count(report);
  report.halo_bytes = total_bytes(halo) + total_bytes(returns.sends) + total_bytes(returns.receives);
  const std::size_t own_pieces = pieces.size();
  add_halo_pieces(pieces, exchange, halo, returns.sends, t.k);
  if (!parts.remote.empty()) clock.working("rows with remote keys", [&] { attend(parts.remote, nullptr); });
  pieces.resize(own_pieces);
  fetched.clear();

  MessageStep step(*communicator, rules, "ring backward, return of gradients");
  clock.working("send", [&] { step.begin(returns.sends, returns.receives); });
  if (!fetch) attend_locally(step);
  clock.waiting("wait", [&] { step.finish(); });
  clock.working("add gradients", [&] {
    // In the order of ranks, whatever the order of arrival.
    std::size_t next = 0;
    for (const ExchangePeer& peer : exchange.peers()) {
      if (peer.send_pairs > 0) add_gradients(returns.receives[next++], peer.send, ranges(), dk, dv);
    }
    if (!in_place) {
      convert(t.dk, dk, stream);
      convert(t.dv, dv, stream);
    }
  });
}

}  // namespace longspan
