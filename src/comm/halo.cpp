// The exchange at once: rows travel while queries that need none of them are computed; then the others, each whole and
// with its keys in the order of one device, so that no bit tells how many ranks there were.
#include <algorithm>
#include <optional>

#include "attention/split_forward.h"
#include "comm/ring_state.h"
#include "longspan/error.h"

namespace longspan {
namespace {

/// Consecutive rows of a shard, and the positions they have.
struct RowsPart {
  std::int64_t row = 0;
  std::vector<RowRange> positions;
  std::int64_t count() const {
    std::int64_t rows = 0;
    for (const RowRange& range : positions) rows += range.count;
    return rows;
  }
};

struct RowsByNeed {
  std::vector<RowsPart> local, remote;  // need no remote row; need some
};

/// Rows of the shard that lie in every branch's local range, and the rest.
RowsByNeed split(const ExchangePlan& exchange, std::span<const RowRange> ranges) {
  RowsByNeed parts;
  std::int64_t row = 0;
  const auto add = [](std::vector<RowsPart>& list, std::int64_t at, std::int64_t begin, std::int64_t end) {
    if (begin >= end) return;
    if (!list.empty() && list.back().row + list.back().count() == at)
      list.back().positions.push_back({begin, end - begin});
    else list.push_back({at, {{begin, end - begin}}});
  };
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const std::int64_t first = ranges[i].start, last = first + ranges[i].count;
    std::int64_t begin = first, end = last;
    for (const auto& of_branch : exchange.local_ranges()) {
      begin = std::max(begin, of_branch[i].start);
      end = std::min(end, of_branch[i].start + of_branch[i].count);
    }
    if (exchange.peers().empty()) begin = first, end = last;
    if (begin >= end) begin = end = last;
    add(parts.remote, row, first, begin);
    add(parts.local, row + begin - first, begin, end);
    add(parts.remote, row + end - first, end, last);
    row += ranges[i].count;
  }
  return parts;
}

using Windows = std::vector<std::vector<RowRange>>;  // positions, by branch

/// What each branch can do without remote rows, and what is left. Where branches are mixed, a row goes through them in
/// order, so a branch has to leave a row for later once one before it has.
struct WindowsByNeed {
  Windows local, remote;
};
WindowsByNeed split_windows(const Plan& plan, const ExchangePlan& exchange, std::span<const RowRange> ranges) {
  WindowsByNeed windows;
  std::vector<RowRange> before(ranges.begin(), ranges.end());
  for (const std::vector<RowRange>& of_branch : exchange.local_ranges()) {
    std::vector<RowRange>& local = windows.local.emplace_back();
    std::vector<RowRange>& remote = windows.remote.emplace_back();
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      const std::int64_t first = ranges[i].start, last = first + ranges[i].count;
      std::int64_t begin = std::max(of_branch[i].start, before[i].start);
      std::int64_t end = std::min(of_branch[i].start + of_branch[i].count, before[i].start + before[i].count);
      if (begin >= end) begin = end = first;
      local.push_back({begin, end - begin});
      remote.push_back({first, begin - first});
      remote.push_back({end, last - end});
      if (plan.merges_branches()) before[i] = local.back();
    }
  }
  return windows;
}

std::int64_t rows_in(const std::vector<RowsPart>& parts) {
  std::int64_t rows = 0;
  for (const RowsPart& part : parts) rows += part.count();
  return rows;
}

/// The caller's progress hook as a stretch of it.
class ProgressShare {
 public:
  ProgressShare(const Call& call, std::int64_t rows) : call_(call), rows_(std::max<std::int64_t>(rows, 1)) {}
  void apply(Call& inner, std::int64_t rows) {
    if (!call_.progress) return;
    const double begin = static_cast<double>(done_) / static_cast<double>(rows_),
                 share = static_cast<double>(rows) / static_cast<double>(rows_);
    inner.progress = [this, begin, share](double fraction) { return call_.progress(begin + share * fraction); };
    done_ += rows;
  }

 private:
  const Call& call_;
  std::int64_t rows_, done_ = 0;
};

/// Memory for what a forward exchanges, with the sends packed.
Messages make_messages(const ExchangePlan& exchange, std::span<const RowRange> ranges, const ConstTensorView& k,
                       const ConstTensorView& v) {
  Messages messages;
  for (const ExchangePeer& peer : exchange.peers()) {
    if (peer.send_pairs > 0) {
      messages.sends.emplace_back(peer.rank, static_cast<std::size_t>(peer.send_pairs * exchange.bytes_per_pair()));
      pack(messages.sends.back().payload(), peer.send, ranges, k, v);
    }
    if (peer.receive_pairs > 0)
      messages.receives.emplace_back(peer.rank,
                                     static_cast<std::size_t>(peer.receive_pairs * exchange.bytes_per_pair()));
  }
  return messages;
}

/// Memory for the gradients that travel back: sends are what receives were, set to zero.
Messages make_returns(const ExchangePlan& exchange) {
  Messages messages;
  for (const ExchangePeer& peer : exchange.peers()) {
    if (peer.receive_pairs > 0) {
      messages.sends.emplace_back(peer.rank,
                                  static_cast<std::size_t>(peer.receive_pairs * exchange.gradient_bytes_per_pair()));
      std::memset(messages.sends.back().payload(), 0, messages.sends.back().bytes());
    }
    if (peer.send_pairs > 0)
      messages.receives.emplace_back(peer.rank,
                                     static_cast<std::size_t>(peer.send_pairs * exchange.gradient_bytes_per_pair()));
  }
  return messages;
}

std::int64_t total_bytes(std::span<const MessageBuffer> messages) {
  std::int64_t bytes = 0;
  for (const MessageBuffer& message : messages) bytes += static_cast<std::int64_t>(message.bytes());
  return bytes;
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
               k.batch(), k.columns(), k.dtype, sum_dtype(k.dtype));
    ++next;
  }
}

}  // namespace

void Ring::State::halo_forward(const RingPlan& plan, const MessageRules& rules, const ForwardTensors& t,
                               const Call& call, RingHalo* keep) {
  RingClock clock(report);
  const ExchangePlan& exchange = *plan.exchange;
  const ConstTensorView k = shape_only(t.k, shards.tokens()), v = shape_only(t.v, shards.tokens());
  clock.waiting("compare ranks", [&] { MessageStep::greet(*communicator, rules, "ring forward"); });
  Messages messages;
  clock.working("pack", false, [&] { messages = make_messages(exchange, ranges(), t.k, t.v); });
  messages.count(report);
  report.halo_bytes = total_bytes(messages.receives);
  MessageStep step(*communicator, rules, "ring forward, exchange of rows");
  step.begin(messages.sends, messages.receives);

  const RowsByNeed parts = split(exchange, ranges());
  ProgressShare progress(call, shards.rows(rank));
  std::vector<KeyPiece> pieces;
  add_own_pieces(pieces, ranges(), t.k, t.v);
  const auto attend = [&](const std::vector<RowsPart>& list) {
    for (const RowsPart& part : list) {
      Call inner = call;
      inner.query_ranges = part.positions;
      inner.pieces = pieces;
      progress.apply(inner, part.count());
      attention.forward(rows_of(t.q, part.row, part.count()), k, v, rows_of(t.out, part.row, part.count()),
                        rows_of(t.lse, part.row, part.count()), inner);
    }
  };
  // By branches where the kernel can stop between them, else by rows.
  Call ranged = call;
  ranged.query_ranges = ranges();
  ranged.pieces = pieces;
  const SplitForward by_branch(attention, t.q, k, v, t.out, t.lse, ranged);
  if (rows_in(parts.remote) > 0 && by_branch.possible()) {
    const WindowsByNeed windows = split_windows(*plan.plan, exchange, ranges());
    progress.apply(ranged, shards.rows(rank) / 2);
    clock.working("work without remote keys", true, [&] { by_branch.run({windows.local, true, false}, ranged); });
    clock.waiting("wait", [&] { step.finish(); });
    add_halo_pieces(pieces, exchange, messages.receives, {}, t.k);
    ranged.pieces = pieces;
    progress.apply(ranged, shards.rows(rank) / 2);
    clock.working("work with remote keys", false, [&] { by_branch.run({windows.remote, false, true}, ranged); });
  } else {
    if (rows_in(parts.local) > 0)
      clock.working("rows without remote keys", !exchange.peers().empty(), [&] { attend(parts.local); });
    clock.waiting("wait", [&] { step.finish(); });
    add_halo_pieces(pieces, exchange, messages.receives, {}, t.k);
    if (rows_in(parts.remote) > 0) clock.working("rows with remote keys", false, [&] { attend(parts.remote); });
  }
  if (keep) keep->data_ = std::make_shared<RingHalo::Data>(RingHalo::Data{plan.problem, std::move(messages.receives)});
}

void Ring::State::halo_backward(const RingPlan& plan, const MessageRules& rules, const BackwardTensors& t,
                                const Call& call, const RingHalo* kept) {
  RingClock clock(report);
  const ExchangePlan& exchange = *plan.exchange;
  const ConstTensorView k = shape_only(t.k, shards.tokens()), v = shape_only(t.v, shards.tokens());
  const DType sums = sum_dtype(t.k.dtype);
  clock.waiting("compare ranks", [&] { MessageStep::greet(*communicator, rules, "ring backward"); });

  // Sums of own rows: the caller's tensors where they are wide enough.
  const bool wide = t.k.dtype == sums;
  std::optional<PoolTensor> dk_memory, dv_memory;
  if (!wide) {
    dk_memory.emplace(t.k, sums);
    dv_memory.emplace(t.v, sums);
  }
  const TensorView dk = wide ? t.dk : dk_memory->view(), dv = wide ? t.dv : dv_memory->view();
  clear(dk);
  clear(dv);

  const RowsByNeed parts = split(exchange, ranges());
  ProgressShare progress(call, shards.rows(rank));
  std::vector<KeyPiece> pieces;
  add_own_pieces(pieces, ranges(), t.k, t.v, dk, dv);
  const auto attend = [&](const std::vector<RowsPart>& list) {
    for (const RowsPart& part : list) {
      const auto own = [&](const auto& view) { return rows_of(view, part.row, part.count()); };
      Call inner = call;
      inner.query_ranges = part.positions;
      inner.pieces = pieces;
      inner.dlse = own(call.dlse);
      progress.apply(inner, part.count());
      attention.backward(own(t.q), k, v, own(t.out), own(t.lse), own(t.dout), own(t.dq), {}, {}, inner);
    }
  };

  // Rows fetched again travel while local rows are computed; a kept halo lets the gradients do so instead.
  std::vector<MessageBuffer> fetched;
  const bool fetch = !kept || kept->empty();
  if (!fetch) check_kept(plan, kept->data_->problem, kept->data_->messages);
  if (fetch) {
    Messages messages;
    clock.working("pack", false, [&] { messages = make_messages(exchange, ranges(), t.k, t.v); });
    messages.count(report);
    MessageStep step(*communicator, rules, "ring backward, exchange of rows");
    step.begin(messages.sends, messages.receives);
    if (rows_in(parts.local) > 0)
      clock.working("rows without remote keys", !exchange.peers().empty(), [&] { attend(parts.local); });
    clock.waiting("wait", [&] { step.finish(); });
    fetched = std::move(messages.receives);
  }
  const std::span<const MessageBuffer> halo =
      fetch ? std::span<const MessageBuffer>(fetched) : std::span<const MessageBuffer>(kept->data_->messages);
  Messages returns = make_returns(exchange);
  returns.count(report);
  report.halo_bytes = total_bytes(halo) + total_bytes(returns.sends);
  const std::size_t own_pieces = pieces.size();
  add_halo_pieces(pieces, exchange, halo, returns.sends, t.k);
  if (rows_in(parts.remote) > 0) clock.working("rows with remote keys", false, [&] { attend(parts.remote); });
  pieces.resize(own_pieces);
  fetched.clear();

  MessageStep step(*communicator, rules, "ring backward, return of gradients");
  step.begin(returns.sends, returns.receives);
  if (!fetch && rows_in(parts.local) > 0)
    clock.working("rows without remote keys", !exchange.peers().empty(), [&] { attend(parts.local); });
  clock.waiting("wait", [&] { step.finish(); });
  clock.working("add gradients", false, [&] {
    // In the order of ranks, whatever the order of arrival.
    std::size_t next = 0;
    for (const ExchangePeer& peer : exchange.peers()) {
      if (peer.send_pairs == 0) continue;
      std::byte* const payload = returns.receives[next++].payload();
      if (sums == DType::f64) add_gradients<double>(payload, peer.send, ranges(), dk, dv);
      else add_gradients<float>(payload, peer.send, ranges(), dk, dv);
    }
    if (!wide) {
      convert(t.dk, dk);
      convert(t.dv, dv);
    }
  });
}

}  // namespace longspan
