// The exchange in rounds, for halos that exceed their limit: a rotating ring. In round d a rank hears from the rank d
// before it and talks to the rank d behind it, in chunks that fit half the limit, so that one is computed with
// while the next travels. Partial results are kept in float32 and mixed by their softmax denominators.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "comm/ring_state.h"
#include "longspan/error.h"
#include "plan/exchange_runs.h"
#include "plan/key_rows.h"
#include "plan/query_rows.h"
#include "plan/row_ranges.h"

namespace longspan {
namespace {

/// A chunk of what one rank sends another.
struct Chunk {
  int peer = 0;
  RowRanges positions;  // rows of the owner that this chunk speaks for
  std::vector<ExchangeRun> runs;

  std::int64_t pairs() const { return pairs_of(runs); }
};

/// What rows [begin, end) of their owner have of a message.
Chunk make_chunk(int peer, std::span<const ExchangeRun> runs, std::span<const RowRange> owner, std::int64_t begin,
                 std::int64_t end) {
  Chunk chunk{peer, {}, {}};
  std::int64_t row = 0;
  for (const RowRange& range : owner) {
    const std::int64_t first = std::max(begin, row), last = std::min(end, row + range.count);
    if (first < last) {
      const RowRange own{range.start + first - row, last - first};
      chunk.positions.push_back(own);
      chunk.runs = clip_runs(runs, own.start, end_of(own), std::move(chunk.runs));
    }
    row += range.count;
  }
  return chunk;
}

/// Cuts a message by its owner's rows into equal shares until each fits.
std::vector<Chunk> cut(int peer, std::span<const ExchangeRun> runs, std::span<const RowRange> owner,
                       std::int64_t most_pairs) {
  std::vector<Chunk> chunks;
  const std::int64_t pairs = pairs_of(runs), rows = rows_in(owner);
  if (pairs == 0) return chunks;
  for (std::int64_t count = std::max<std::int64_t>(1, (pairs + most_pairs - 1) / most_pairs);; count *= 2) {
    count = std::min(count, rows);
    chunks.clear();
    bool fits = true;
    for (std::int64_t i = 0; i < count; ++i) {
      chunks.push_back(make_chunk(peer, runs, owner, rows * i / count, rows * (i + 1) / count));
      fits = fits && chunks.back().pairs() <= most_pairs;
    }
    if (fits || count == rows) return chunks;
  }
}

/// What a rank sends and receives in one step; either may be nothing. All ranks have the same number of steps.
struct RoundStep {
  std::optional<Chunk> send, receive;
};

std::vector<RoundStep> schedule(const RingPlan& plan, const Shards& shards, int rank, std::size_t limit, Pass pass) {
  const int ranks = shards.ranks();
  // What one pair of a chunk takes while it is computed with and the next one travels: twice itself, its copy in the
  // type of sums, and its gradients on their way out and in.
  const bool copied = plan.problem.dtype != sum_dtype(plan.problem.dtype);
  const std::int64_t held_per_pair = 2 * plan.exchange->bytes_per_pair() + (copied + (pass == Pass::backward ? 2 : 0)) *
                                                                               plan.exchange->gradient_bytes_per_pair();
  const std::int64_t most = std::max<std::int64_t>(1, static_cast<std::int64_t>(limit) / held_per_pair);
  const auto chunks_of = [&](int from, int to, int peer) {
    return cut(peer, peer_of(*plan.all[static_cast<std::size_t>(from)], to).send, shards.ranges(from), most);
  };
  std::vector<RoundStep> steps;
  for (int distance = 1; distance < ranks; ++distance) {
    std::size_t count = 0;
    for (int one = 0; one < ranks; ++one) count = std::max(count, chunks_of(one, (one + distance) % ranks, one).size());
    const int to = (rank + distance) % ranks, from = (rank - distance + ranks) % ranks;
    std::vector<Chunk> sends = chunks_of(rank, to, to), receives = chunks_of(from, rank, from);
    for (std::size_t i = 0; i < count; ++i) {
      RoundStep& step = steps.emplace_back();
      if (i < sends.size()) step.send = std::move(sends[i]);
      if (i < receives.size()) step.receive = std::move(receives[i]);
    }
  }
  return steps;
}

/// The caller's call, narrowed to keys at some positions: by a mask, but on GPUs, whose kernels leave out keys that no
/// piece has.
class RoundCalls {
 public:
  RoundCalls(const Call& call, std::span<const RowRange> queries, std::int64_t tokens, std::int64_t batch, bool masks)
      : call_(with_ranges(call, queries)),
        entries_(masks ? (call.key_mask.given() ? batch : 1) : 0),
        batch_(batch),
        tokens_(tokens),
        memory_(static_cast<std::size_t>(entries_ * tokens)) {
    call_.progress = nullptr;
    if (entries_ > 0) std::memset(memory_.data(), 0, static_cast<std::size_t>(entries_ * tokens_));
  }

  /// Valid until the next one is asked for. Messages of `travelling`, if there are any, move meanwhile.
  Call only(std::span<const KeyPiece> pieces, std::span<const RowRange> positions, MessageStep* travelling) {
    Call call = call_;
    if (travelling) {
      call.progress = [travelling](double) {
        travelling->progress();
        return true;
      };
    }
    call.pieces = pieces;
    if (entries_ == 0) return call;
    set(open_, false);
    open_.assign(positions.begin(), positions.end());
    set(open_, true);
    call.key_mask = ConstTensorView::mask(memory_.data(), batch_, tokens_);
    if (entries_ == 1) call.key_mask.strides[0] = 0;
    return call;
  }

 private:
  void set(std::span<const RowRange> positions, bool open) {
    auto* const mask = reinterpret_cast<std::uint8_t*>(memory_.data());
    for (std::int64_t entry = 0; entry < entries_; ++entry) {
      for (const RowRange& range : positions) {
        for (std::int64_t position = range.start; position < end_of(range); ++position)
          mask[entry * tokens_ + position] = open && key_allowed(call_.key_mask, entry, position);
      }
    }
  }
  Call call_;
  std::int64_t entries_, batch_, tokens_;
  HostLease memory_;
  RowRanges open_;
};

/// A tensor in the type that rounds compute with: itself, or a wider copy.
class Widened {
 public:
  Widened(const ConstTensorView& source, void* stream) : view_(source) {
    if (source.dtype == sum_dtype(source.dtype)) return;
    copy_.emplace(source, sum_dtype(source.dtype), stream);
    convert(copy_->view(), source, stream);
    view_ = copy_->view();
  }
  const ConstTensorView& view() const { return view_; }

 private:
  std::optional<ScratchTensor> copy_;
  ConstTensorView view_;
};

/// Received rows in that type, with memory for their gradients if asked for.
struct RoundPieces {
  std::vector<KeyPiece> pieces;
  Widened rows;
  std::int64_t copy_bytes = 0;

  RoundPieces(const Chunk& chunk, const MessageBuffer& message, std::byte* gradients, const ConstTensorView& k)
      : rows(message_rows(message.payload(), chunk.pairs(), k, k.dtype), message.memory().stream) {
    const ConstTensorView& wide = rows.view();
    if (k.dtype != wide.dtype) copy_bytes = wide.rows() * wide.columns() * size_of(wide.dtype);
    auto* const data = static_cast<std::byte*>(const_cast<void*>(wide.data));
    add_pieces(pieces, chunk.runs, data, gradients, k, wide.dtype);
  }
};

/// One row becomes the mix of itself and further keys'; no values: of zeros. Two empty rows stay empty.
template <class Real>
void mix_row(Real& total, Real* values, Real more, const Real* more_values, std::int64_t columns) {
  if (more == -std::numeric_limits<Real>::infinity()) return;
  const Real largest = std::max(total, more);
  const Real sum = largest + std::log(std::exp(total - largest) + std::exp(more - largest));
  const Real keep = std::exp(total - sum), add = std::exp(more - sum);
  for (std::int64_t column = 0; column < columns; ++column)
    values[column] = keep * values[column] + (more_values ? add * more_values[column] : Real{0});
  total = sum;
}

/// (out, lse) becomes the mix of itself and further keys'; no more_out: of zeros.
void mix(const TensorView& out, const TensorView& lse, const ConstTensorView& more_out, const ConstTensorView& more_lse,
         void* stream) {
  if (out.device.type == DeviceType::cuda) return gpu::mix(out, lse, more_out, more_lse, stream);
  with_sums(out.dtype, [&]<class Real>() {
    for_each_row(out, [&](std::int64_t entry, std::int64_t row, std::int64_t head) {
      mix_row(*lse.at<Real>(entry, row, head), out.at<Real>(entry, row, head), *more_lse.at<Real>(entry, row, head),
              more_out.given() ? more_out.at<Real>(entry, row, head) : nullptr, out.columns());
    });
  });
}

/// Zero keys of score 0 (pad_keys) join every row that has some.
void mix_padding(const Plan& plan, const Call& call, std::span<const RowRange> ranges, const TensorView& out,
                 const TensorView& lse) {
  const OnHost lengths(call.lengths, call.stream);
  ConstTensorView shape = lse;
  shape.device = {};
  const ScratchTensor padding(shape, lse.dtype);
  with_sums(lse.dtype, [&]<class Real>() {
    for_each_row(padding.view(), [&](std::int64_t entry, std::int64_t row, std::int64_t head) {
      const std::int64_t position = PositionCursor(ranges, row).next();
      const std::int64_t length = rows_of_entry(lengths.view(), entry, plan.problem().tokens);
      Real keys = 0;
      for (const BranchPlan& branch : plan.branches()) {
        if (position >= length || !branch.owns(head) || !branch.active(length) || !branch.covers(head, position))
          continue;
        keys += static_cast<Real>(
            branch.padding(branch.strand(head, position / branch.segment, length), length, plan.options().causal));
      }
      *padding.view().at<Real>(entry, row, head) = std::log(keys);
    });
  });
  if (lse.device.type == DeviceType::cpu) return mix(out, lse, {}, padding.view(), nullptr);
  const ScratchTensor there(lse, lse.dtype, call.stream);
  gpu::copy(there.view().data, padding.view().data, padding.bytes(), lse.device.index, call.stream);
  mix(out, lse, {}, there.view(), call.stream);
  gpu::wait(lse.device.index, call.stream);  // until the host's copy has been read
}

void add(const TensorView& target, const ConstTensorView& source, void* stream) {
  if (target.device.type == DeviceType::cuda) return gpu::add(target, source, stream);
  with_sums(target.dtype, [&]<class Real>() {
    for_each_row(target, [&](std::int64_t entry, std::int64_t row, std::int64_t head) {
      Real* const to = target.at<Real>(entry, row, head);
      const Real* const from = source.at<Real>(entry, row, head);
      for (std::int64_t column = 0; column < target.columns(); ++column) to[column] += from[column];
    });
  });
}

/// Steps of a call, each fetched while the one before is computed with.
class Rounds {
 public:
  Rounds(Communicator& communicator, const MessageRules& rules, RingReport& report, RingClock& clock,
         const RingPlan& plan, std::string name)
      : communicator_(communicator),
        rules_(rules),
        report_(report),
        clock_(clock),
        plan_(plan),
        name_(std::move(name)) {}

  /// local(travelling) and compute(step, message, travelling): message is null where nothing was received, travelling
  /// where nothing is on its way meanwhile. settle(step, index) follows it, and may
  /// exchange messages of its own; null if there is nothing to settle.
  template <class Local, class Compute, class Settle>
  void run(std::span<const RoundStep> steps, std::span<const RowRange> ranges, const ConstTensorView& k,
           const ConstTensorView& v, Local&& local, Compute&& compute, Settle&& settle) {
    report_.rounds = static_cast<std::int64_t>(steps.size());
    begin(steps, 0, ranges, k, v);
    compute_while_travelling("own keys", [&] { local(travelling()); });
    for (std::size_t i = 0; i < steps.size(); ++i) {
      finish();
      Messages arrived = std::move(messages_);
      arrived.sends.clear();
      begin(steps, i + 1, ranges, k, v);
      held(arrived.receives, 0);
      compute_while_travelling("keys of a round", [&] {
        compute(steps[i], arrived.receives.empty() ? nullptr : arrived.receives.data(), travelling());
      });
      if constexpr (!std::is_same_v<std::remove_cvref_t<Settle>, std::nullptr_t>) {
        arrived.receives.clear();
        finish();  // one exchange at a time
        settle(steps[i], i);
      }
    }
  }

  /// Notes how much memory messages take, with `more` bytes that the caller holds beside them.
  void held(std::span<const MessageBuffer> arrived, std::int64_t more) {
    report_.halo_bytes = std::max(report_.halo_bytes, total_bytes(arrived) + total_bytes(messages_.receives) + more);
  }

 private:
  MessageStep* travelling() { return step_ ? &*step_ : nullptr; }
  template <class Body>
  void compute_while_travelling(const char* name, Body&& body) {
    if (step_) clock_.working(name, *step_, body);
    else clock_.working(name, body);
  }
  void finish() {
    if (!step_) return;
    clock_.waiting("wait", [&] { step_->finish(); });
    step_.reset();
  }
  void begin(std::span<const RoundStep> steps, std::size_t index, std::span<const RowRange> ranges,
             const ConstTensorView& k, const ConstTensorView& v) {
    messages_ = {};
    if (index >= steps.size()) return;
    const std::int64_t per_pair = plan_.exchange->bytes_per_pair();
    const auto& [send, receive] = steps[index];
    if (send) {
      messages_.sends.emplace_back(send->peer, send->pairs() * per_pair, rules_.memory);
      const PackedRows rows{messages_.sends.back(), send->runs};
      pack({&rows, 1}, ranges, k, v);
    }
    if (receive) messages_.receives.emplace_back(receive->peer, receive->pairs() * per_pair, rules_.memory);
    messages_.count(report_);
    step_.emplace(communicator_, rules_, fmt::format("{}, round {} of {}", name_, index + 1, steps.size()));
    step_->begin(messages_.sends, messages_.receives);
  }

  Communicator& communicator_;
  const MessageRules& rules_;
  RingReport& report_;
  RingClock& clock_;
  const RingPlan& plan_;
  std::string name_;
  Messages messages_;
  std::optional<MessageStep> step_;
};

/// The attention of one chunk: without pad keys, which are counted once at the end.
Attention without_padding(const Attention& whole) {
  if (whole.options().detached_mix) {
    throw Unsupported(
        "detached_mix over a ring in rounds: a branch's own result needs all its keys at once; raise halo_limit_bytes");
  }
  return Attention(whole.pattern().with_pad_keys(false), whole.options());
}

}  // namespace

void Ring::State::rounds_forward(const RingPlan& plan, const MessageRules& rules, RingClock& clock,
                                 const ForwardTensors& t, const Call& call) {
  void* const stream = rules.memory.stream;
  const Attention unpadded = without_padding(attention);
  const std::vector<RoundStep> steps = schedule(plan, shards, rank, options.halo_limit_bytes, Pass::forward);
  const DType sums = sum_dtype(t.q.dtype);
  const Widened q(t.q, stream), k(t.k, stream), v(t.v, stream);
  ConstTensorView row_sums = t.q;
  row_sums.sizes[3] = 1;
  const ScratchTensor out(t.q, sums, stream), more_out(t.q, sums, stream), lse(row_sums, sums, stream),
      more_lse(row_sums, sums, stream);
  RoundCalls calls(call, ranges(), shards.tokens(), t.q.batch(), !rules.memory.on_gpu());
  const auto attend = [&](std::span<const KeyPiece> pieces, std::span<const RowRange> positions, const TensorView& to,
                          const TensorView& to_lse, MessageStep* travelling) {
    run_forward(unpadded, of_sequence({q.view(), k.view(), v.view(), to, to_lse}),
                calls.only(pieces, positions, travelling), KeysGiven::some, shards.tokens());
  };
  const auto local = [&](MessageStep* travelling) {
    attend(own_pieces(ranges(), k.view(), v.view()), ranges(), out.view(), lse.view(), travelling);
  };
  Rounds rounds(*communicator, rules, report, clock, plan, "ring forward");
  const auto compute = [&](const RoundStep& step, const MessageBuffer* message, MessageStep* travelling) {
    if (!message || step.receive->runs.empty()) return;
    const RoundPieces received(*step.receive, *message, nullptr, t.k);
    rounds.held({message, 1}, received.copy_bytes);
    attend(received.pieces, step.receive->positions, more_out.view(), more_lse.view(), travelling);
    mix(out.view(), lse.view(), more_out.view(), more_lse.view(), stream);
  };
  rounds.run(steps, ranges(), t.k, t.v, local, compute, nullptr);
  if (attention.pattern().pad_keys()) mix_padding(*plan.plan, call, ranges(), out.view(), lse.view());
  convert(t.out, out.view(), stream);
  if (t.lse.given()) convert(t.lse, lse.view(), stream);
}

void Ring::State::rounds_backward(const RingPlan& plan, const MessageRules& rules, RingClock& clock,
                                  const BackwardTensors& t, const Call& call) {
  void* const stream = rules.memory.stream;
  const Attention unpadded = without_padding(attention);
  const std::vector<RoundStep> steps = schedule(plan, shards, rank, options.halo_limit_bytes, Pass::backward);
  const DType sums = sum_dtype(t.q.dtype);
  const Widened q(t.q, stream), k(t.k, stream), v(t.v, stream), out(t.out, stream), dout(t.dout, stream);
  const ScratchTensor dq(t.q, sums, stream), more_dq(t.q, sums, stream), dk(t.k, sums, stream), dv(t.v, sums, stream);
  clear(dk.view(), stream);
  clear(dv.view(), stream);
  RoundCalls calls(call, ranges(), shards.tokens(), t.q.batch(), !rules.memory.on_gpu());
  const auto attend = [&](std::span<const KeyPiece> pieces, std::span<const RowRange> positions, const TensorView& to,
                          MessageStep* travelling) {
    run_backward(unpadded,
                 {q.view(),
                  shape_only(k.view(), shards.tokens()),
                  shape_only(v.view(), shards.tokens()),
                  out.view(),
                  t.lse,
                  dout.view(),
                  to,
                  {},
                  {}},
                 calls.only(pieces, positions, travelling), KeysGiven::some);
  };
  const auto local = [&](MessageStep* travelling) {
    attend(own_pieces(ranges(), k.view(), v.view(), dk.view(), dv.view()), ranges(), dq.view(), travelling);
  };
  const std::int64_t per_pair = plan.exchange->gradient_bytes_per_pair();
  Rounds rounds(*communicator, rules, report, clock, plan, "ring backward");
  Messages home;  // gradients of one chunk at a time, which go back as soon as it is done
  const auto compute = [&](const RoundStep& step, const MessageBuffer* message, MessageStep* travelling) {
    home = {};
    if (!message) return;
    home.sends.emplace_back(step.receive->peer, step.receive->pairs() * per_pair, rules.memory);
    if (step.receive->runs.empty()) return;
    clear(message_rows(home.sends[0].payload(), step.receive->pairs(), t.k, sums), stream);
    const RoundPieces received(*step.receive, *message, home.sends[0].payload(), t.k);
    rounds.held({message, 1}, received.copy_bytes + total_bytes(home.sends));
    attend(received.pieces, step.receive->positions, more_dq.view(), travelling);
    add(dq.view(), more_dq.view(), stream);
  };
  const auto send_back = [&](const RoundStep& step, std::size_t index) {
    if (step.send) home.receives.emplace_back(step.send->peer, step.send->pairs() * per_pair, rules.memory);
    home.count(report);
    rounds.held({}, total_bytes(home.sends) + total_bytes(home.receives));
    MessageStep exchange(*communicator, rules,
                         fmt::format("ring backward, gradients of round {} of {}", index + 1, steps.size()));
    exchange.begin(home.sends, home.receives);
    clock.waiting("return gradients", [&] { exchange.finish(); });
    if (step.send) add_gradients(home.receives[0], step.send->runs, ranges(), dk.view(), dv.view());
  };
  rounds.run(steps, ranges(), t.k, t.v, local, compute, send_back);
  convert(t.dq, dq.view(), stream);
  convert(t.dk, dk.view(), stream);
  convert(t.dv, dv.view(), stream);
}

}  // namespace longspan
