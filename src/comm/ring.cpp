// The ring's calls: checks, plans of a rank, and what all ranks must agree on.
#include "longspan/ring.h"

#include <algorithm>
#include <thread>

#include "comm/ring_state.h"
#include "longspan/version.h"
#include "plan/key_rows.h"
#include "util/hash.h"
#include "util/reject.h"

namespace longspan {
namespace {

constexpr std::size_t kPlansKept = 8;

/// Whether TMA and 16 bytes at a time reach every row; kernels for pieces take all others.
bool in_lines(std::initializer_list<ConstTensorView> tensors) {
  constexpr std::int64_t kLine = 16;
  return std::all_of(tensors.begin(), tensors.end(), [](const ConstTensorView& view) {
    if (view.batch() * view.rows() == 0) return true;
    bool fits = reinterpret_cast<std::uintptr_t>(view.data) % kLine == 0;
    for (std::size_t d = 0; d < 3; ++d)
      fits =
          fits && (view.sizes[d] <= 1 || (view.strides[d] > 0 && view.strides[d] * size_of(view.dtype) % kLine == 0));
    return fits;
  });
}

bool has_greeted(const Communicator& communicator) { return steps_of(communicator).greeted; }

/// The problem of the whole sequence, as one device would pose it.
Problem whole_problem(const ConstTensorView& q, const ConstTensorView& k, const Call& call, std::int64_t tokens) {
  Problem problem = Attention::problem(q, k, call);
  problem.tokens = problem.query_rows = tokens;
  problem.has_pieces = problem.has_piece_gradients = false;
  return problem;
}

/// The caller's call with a report of its own, which goes into the ring's and the caller's when the call is over.
class RingCallReport {
 public:
  RingCallReport(RingReport& report, const Call& callers) : call(callers), report_(report), callers_(callers.report) {
    call.report = &own_;
  }
  ~RingCallReport() {
    report_.kernel = own_.kernel;
    if (callers_) *callers_ = own_;
  }
  RingCallReport(const RingCallReport&) = delete;
  RingCallReport& operator=(const RingCallReport&) = delete;
  Call call;

 private:
  CallReport own_;
  RingReport& report_;
  CallReport* callers_;
};

}  // namespace

std::int64_t RingHalo::bytes() const {
  if (!data_) return 0;
  return data_->packed ? data_->packed->bytes() : total_bytes(data_->messages);
}

Ring::Ring(Attention attention, std::shared_ptr<Communicator> communicator, Shards shards, RingOptions options)
    : state_(std::make_unique<State>(
          State{std::move(attention), std::move(communicator), std::move(shards), options, 0, {}, {}})) {
  const int ranks = state_->shards.ranks();
  if (!state_->communicator) {
    if (ranks != 1) reject("communicator", "no communicator for {} ranks: only a ring of one needs none", ranks);
    return;
  }
  if (state_->communicator->size() != ranks)
    reject("shards", "shards for {} ranks and a communicator of {}: they must be equal", ranks,
           state_->communicator->size());
  state_->rank = state_->communicator->rank();
  if (state_->rank < 0 || state_->rank >= ranks)
    reject("communicator", "the communicator says it is rank {} of {}: ranks are 0 to {}", state_->rank, ranks,
           ranks - 1);
}

Ring::~Ring() = default;

int Ring::rank() const { return state_->rank; }
const Shards& Ring::shards() const { return state_->shards; }
const RingReport& Ring::report() const {
  state_->report.late_error.clear();
  for (const auto& plan : state_->plans) {
    if (plan->packed && state_->report.late_error.empty()) state_->report.late_error = plan->packed->late_error(false);
  }
  return state_->report;
}

std::shared_ptr<const Plan> Ring::plan(const ConstTensorView& q, const ConstTensorView& k, const Call& call) const {
  return state_->attention.plan(whole_problem(q, k, call, state_->shards.tokens()));
}

std::shared_ptr<const ExchangePlan> Ring::exchange(const Plan& plan) const {
  return std::make_shared<const ExchangePlan>(plan, state_->shards, state_->rank);
}

std::shared_ptr<const RingPlan> Ring::State::plan(const Problem& whole) {
  const auto found = std::find_if(plans.begin(), plans.end(), [&](const auto& kept) { return kept->problem == whole; });
  if (found != plans.end()) {
    std::rotate(found, found + 1, plans.end());
    return plans.back();
  }
  auto made = make_plan(whole);
  if (plans.size() == kPlansKept) plans.erase(plans.begin());
  plans.push_back(made);
  return made;
}

std::shared_ptr<RingPlan> Ring::State::make_plan(const Problem& whole) const {
  auto made = std::make_shared<RingPlan>();
  made->problem = whole;
  made->plan = attention.plan(whole);
  for (const BranchPlan& branch : made->plan->branches()) {
    if (branch.adaptive_density > 0) {
      throw Unsupported(
          "adaptive block masks over a ring: they are chosen from the whole sequence, which no rank has; give the mask "
          "itself");
    }
  }
  for (const Branch& branch : attention.pattern().branches()) {
    if (whole.has_lengths && branch.mask && branch.mask->depends_on_length(attention.options().causal)) {
      throw Unsupported(
          "lengths with random blocks over a ring: blocks are drawn anew for each length; give the mask itself, or no "
          "lengths");
    }
  }
  const auto of_rank = [&](int one) { return std::make_shared<const ExchangePlan>(*made->plan, shards, one); };
  if (options.halo_limit_bytes > 0) {
    // Whether rounds are needed is a question of the fullest rank, so that all answer alike.
    const std::int64_t limit = static_cast<std::int64_t>(options.halo_limit_bytes);
    for (int one = 0; one < shards.ranks(); ++one) {
      made->all.push_back(of_rank(one));
      const ExchangePlan& exchange = *made->all.back();
      // Gradients of remote rows go out, those of own rows that others found come in.
      const std::int64_t gradients =
          (exchange.receive_pairs() + exchange.send_pairs()) * exchange.gradient_bytes_per_pair();
      made->in_rounds[0] = made->in_rounds[0] || exchange.bytes_received() > limit;
      made->in_rounds[1] = made->in_rounds[1] || exchange.bytes_received() + gradients > limit;
    }
    made->exchange = made->all[static_cast<std::size_t>(rank)];
    if (!made->in_rounds[1]) made->all.clear();
  } else {
    made->exchange = of_rank(rank);
  }
  made->digest = digest_of(*made);
  const bool on_gpu = whole.device.type == DeviceType::cuda;
  if (on_gpu && shards.ranks() > 1 && options.halo_limit_bytes == 0) {
    Problem share = whole;
    share.query_rows = shards.rows(rank);
    share.is_share = true;
    made->packed = PackedExchange::make(attention, *made, share, communicator);
  }
  return made;
}

std::uint64_t Ring::State::digest_of(const RingPlan& plan) const {
  const Problem& problem = plan.problem;
  const Options& chosen = attention.options();
  Hasher hasher;
  hasher.add(std::string_view(version()));
  hasher.add(std::string_view(attention.pattern().to_string()));
  hasher.add(std::string_view(chosen.kernel));
  for (const bool flag :
       {chosen.causal, chosen.detached_mix, chosen.deterministic, chosen.allow_tf32, problem.has_lengths,
        problem.has_key_mask, problem.has_alibi, options.checksums, problem.device.type == DeviceType::cuda})
    hasher.add(flag);
  for (const double factor : {plan.plan->scale(), plan.plan->output_scale(), chosen.dropout}) hasher.add(factor);
  for (const std::int64_t number :
       {static_cast<std::int64_t>(problem.dtype), problem.batch, problem.tokens, problem.heads, problem.kv_heads,
        problem.head_dim, static_cast<std::int64_t>(options.halo_limit_bytes)})
    hasher.add(number);
  for (int one = 0; one < shards.ranks(); ++one) {
    hasher.add(shards.ranges(one).size());
    for (const RowRange& range : shards.ranges(one)) {
      hasher.add(range.start);
      hasher.add(range.count);
    }
  }
  return hasher.value();
}

MessageRules Ring::State::rules(const RingPlan& plan, const Call& call, Pass pass, bool fetch) const {
  const Problem& problem = plan.problem;
  const Options& chosen = attention.options();
  Hasher hasher;
  hasher.add(plan.digest);
  for (const bool flag : {call.dlse.given(), pass == Pass::backward, fetch}) hasher.add(flag);
  ConstTensorView seed = ConstTensorView::per_batch(call.dropout_seed_pointer, DType::i64, 1, problem.device);
  const OnHost lengths(call.lengths, call.stream), slopes(call.alibi_slopes, call.stream),
      mask(call.key_mask, call.stream), seed_there(chosen.dropout > 0 ? seed : ConstTensorView{}, call.stream);
  if (chosen.dropout > 0)
    hasher.add(seed_there.view().data ? *seed_there.view().at<std::uint64_t>(0, 0, 0) : call.dropout_seed);
  if (call.lengths.given()) {
    for (std::int64_t entry = 0; entry < problem.batch; ++entry)
      hasher.add(rows_of_entry(lengths.view(), entry, problem.tokens));
  }
  if (call.alibi_slopes.given()) {
    for (std::int64_t head = 0; head < problem.heads; ++head) hasher.add(*slopes.view().at<float>(0, 0, head));
  }
  if (call.key_mask.given()) {
    for (std::int64_t entry = 0; entry < problem.batch; ++entry) {
      for (std::int64_t row = 0; row < problem.tokens; ++row) hasher.add(key_allowed(mask.view(), entry, row));
    }
  }
  MessageMemory memory;
  if (problem.device.type == DeviceType::cuda)
    memory = {problem.device, call.stream, !communicator->takes(problem.device)};
  return {hasher.value(), options.checksums, options.deadline, memory};
}

void Ring::State::greet(const RingPlan& plan, const Call& call, Pass pass, bool fetch) {
  if (has_greeted(*communicator)) return;
  const MessageRules compared = rules(plan, call, pass, fetch);
  RingClock clock(report, compared.memory);
  clock.waiting("compare ranks", [&] {
    MessageStep::greet(*communicator, compared, pass == Pass::forward ? "ring forward" : "ring backward");
  });
}

void Ring::State::check_call(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                             const Call& call) const {
  if (q.device.type == DeviceType::cuda) gpu::refuse_earlier_errors();
  if (!call.query_ranges.empty())
    reject("query_ranges", "query_ranges over a ring: the queries of a rank are its shard");
  if (!call.pieces.empty()) reject("pieces", "pieces over a ring: k and v are the rank's own rows");
  for (const auto& [name, view] : {std::pair<const char*, const ConstTensorView&>{"q", q}, {"k", k}, {"v", v}}) {
    if (view.rows() != shards.rows(rank))
      reject(name, "{} has {} rows: the shard of rank {} has {}", name, view.rows(), rank, shards.rows(rank));
  }
  if (shards.ranks() == 1) return;
  if (call.workspace) reject("workspace", "workspace over a ring: a rank makes several calls; leave it to the pool");
  if (q.device.type == DeviceType::cpu && !communicator->takes(q.device))
    throw Unsupported("a ring over CPU tensors: this communicator moves GPU memory only; use a local or an MPI ring");
}

ForwardTensors Ring::State::of_sequence(const ForwardTensors& t) const {
  return {t.q, shape_only(t.k, shards.tokens()), shape_only(t.v, shards.tokens()), t.out, t.lse};
}

void Ring::State::check_shard(const ForwardTensors& t, const Call& call) const {
  const std::vector<KeyPiece> own = own_pieces(ranges(), t.k, t.v);
  Call ranged = with_ranges(call, ranges());
  ranged.pieces = own;
  check_forward(of_sequence(t), ranged);
}

void Ring::State::raise_late_errors() {
  for (const auto& plan : plans) {
    const std::string text = plan->packed ? plan->packed->late_error(true) : std::string();
    if (text.empty()) continue;
    communicator->fail(text);
    communicator->abort();  // peers learn of it now, not at their deadline
    throw CommError(text);
  }
}

void Ring::check(std::chrono::milliseconds deadline) {
  const auto end = std::chrono::steady_clock::now() + deadline;
  for (const auto& plan : state_->plans) {
    if (!plan->packed) continue;
    while (plan->packed->busy()) {
      if (std::chrono::steady_clock::now() >= end)
        raise<CommError>("rank {} was not done on {} within {} ms", rank(), to_string(plan->problem.device),
                         deadline.count());
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  state_->raise_late_errors();
}

/// One rank's call over packed strands, phase by phase.
class Ring::PackedRun {
 public:
  /// Checks everything. `tensors` of a forward, or of a backward.
  template <class Tensors>
  PackedRun(State& state, std::shared_ptr<const RingPlan> plan, Pass pass, const Tensors& tensors, const Call& call,
            RingHalo* keep, const RingHalo* kept)
      : reported_(state.report, call),
        plan_(std::move(plan)),
        rules_(in_order(state.rules(*plan_, call, pass, !kept || kept->empty()), *state.communicator)),
        clock_(state.report, rules_.memory),
        keep_(keep) {
    const PackedExchange::Context context{rules_, state.report, clock_, state.ranges(), reported_.call};
    if constexpr (std::is_same_v<Tensors, ForwardTensors>) {
      call_ = plan_->packed->forward(context, tensors, keep ? &rows_ : nullptr);
    } else {
      if (kept && !kept->empty() && (!kept->data_->packed || !(kept->data_->problem == plan_->problem)))
        reject("kept", kOtherHalo);
      call_ = plan_->packed->backward(context, tensors, kept && !kept->empty() ? kept->data_->packed : nullptr);
    }
  }
  int phases() const { return call_->phases(); }
  void phase(int index) {
    call_->phase(index);
    if (index + 1 == phases() && keep_)
      keep_->data_ = std::make_shared<RingHalo::Data>(RingHalo::Data{plan_->problem, {}, rows_});
  }

 private:
  static MessageRules in_order(MessageRules rules, const Communicator& communicator) {
    rules.in_order = communicator.in_stream_order();
    return rules;
  }
  const RingCallReport reported_;
  const std::shared_ptr<const RingPlan> plan_;
  const MessageRules rules_;
  RingClock clock_;
  RingHalo* const keep_;
  std::shared_ptr<KeptStrands> rows_;
  std::unique_ptr<PackedCall> call_;
};

void Ring::State::check_tensors(const ForwardTensors& t, const Call& call) const {
  check_call(t.q, t.k, t.v, call);
  if (shards.ranks() > 1) check_shard(t, call);
}

void Ring::State::check_tensors(const BackwardTensors& t, const Call& call) const {
  check_call(t.q, t.k, t.v, call);
  if (shards.ranks() == 1) return;
  // As a call on the shard alone, whose dk and dv have k's rows; then what speaks of the whole sequence.
  Call shard_call = call;
  shard_call.lengths = shard_call.key_mask = {};
  check_backward(attention.options(), t, shard_call);
  check_shard({t.q, t.k, t.v, t.dq, {}}, call);
}

void Ring::forward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v, const TensorView& out,
                   const TensorView& lse, const Call& call, RingHalo* keep) {
  State& state = *state_;
  if (keep) keep->clear();
  const ForwardTensors tensors{q, k, v, out, lse};
  state.check_tensors(tensors, call);
  if (state.shards.ranks() == 1) {
    const RingCallReport reported(state.report, call);
    const RingClock clock(state.report);
    return state.attention.forward(q, k, v, out, lse, reported.call);
  }
  state.raise_late_errors();
  const auto plan = state.plan(whole_problem(q, k, call, state.shards.tokens()));
  state.greet(*plan, call, Pass::forward, true);
  if (plan->packed && in_lines({q, k, v, out})) {
    PackedRun run(state, plan, Pass::forward, tensors, call, keep, nullptr);
    for (int i = 0; i < run.phases(); ++i) run.phase(i);
    return;
  }
  const RingCallReport reported(state.report, call);
  const MessageRules rules = state.rules(*plan, call, Pass::forward, true);
  RingClock clock(state.report, rules.memory);
  if (plan->rounds(Pass::forward)) state.rounds_forward(*plan, rules, clock, tensors, reported.call);
  else state.halo_forward(*plan, rules, clock, tensors, reported.call, plan->rounds(Pass::backward) ? nullptr : keep);
}

void Ring::backward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                    const ConstTensorView& out, const ConstTensorView& lse, const ConstTensorView& dout,
                    const TensorView& dq, const TensorView& dk, const TensorView& dv, const Call& call,
                    const RingHalo* kept) {
  State& state = *state_;
  const BackwardTensors tensors{q, k, v, out, lse, dout, dq, dk, dv};
  state.check_tensors(tensors, call);
  if (state.shards.ranks() == 1) {
    const RingCallReport reported(state.report, call);
    const RingClock clock(state.report);
    return state.attention.backward(q, k, v, out, lse, dout, dq, dk, dv, reported.call);
  }
  state.raise_late_errors();
  const auto plan = state.plan(whole_problem(q, k, call, state.shards.tokens()));
  const bool fetch = !kept || kept->empty();
  state.greet(*plan, call, Pass::backward, fetch);
  const bool kept_packed = !fetch && kept->data_->packed;
  const bool packs = plan->packed && (fetch || kept_packed) && in_lines({q, k, v, out, dout, dq, dk, dv});
  if (kept_packed && !packs)
    throw Unsupported(
        "backward of a forward that kept packed strands: give tensors whose rows are aligned to 16 bytes and do not "
        "repeat, as dout may; or no halo");
  if (packs) {
    PackedRun run(state, plan, Pass::backward, tensors, call, nullptr, kept);
    for (int i = 0; i < run.phases(); ++i) run.phase(i);
    return;
  }
  const RingCallReport reported(state.report, call);
  const MessageRules rules = state.rules(*plan, call, Pass::backward, fetch);
  RingClock clock(state.report, rules.memory);
  if (plan->rounds(Pass::backward)) state.rounds_backward(*plan, rules, clock, tensors, reported.call);
  else state.halo_backward(*plan, rules, clock, tensors, reported.call, kept);
}

/// Runs the calls of all ranks phase by phase. False, with nothing done, where one cannot.
template <class RankCall>
bool Ring::run_together(std::span<const RankCall> calls) {
  std::vector<std::shared_ptr<const RingPlan>> plans;
  for (const RankCall& one : calls) {
    State& state = *one.ring->state_;
    if (state.shards.ranks() != static_cast<int>(calls.size()) || !state.communicator ||
        !state.communicator->in_stream_order() || !has_greeted(*state.communicator))
      return false;
    state.raise_late_errors();
    plans.push_back(state.plan(whole_problem(one.q, one.k, one.call, state.shards.tokens())));
    if (!plans.back()->packed || !in_lines({one.q, one.k, one.v, one.out})) return false;
    if constexpr (std::is_same_v<RankCall, RingBackward>)
      if (!in_lines({one.dout, one.dq, one.dk, one.dv})) return false;
  }
  std::vector<std::unique_ptr<PackedRun>> runs;
  for (std::size_t rank = 0; rank < calls.size(); ++rank) {
    const RankCall& one = calls[rank];
    State& state = *one.ring->state_;
    if constexpr (std::is_same_v<RankCall, RingForward>) {
      if (one.keep) one.keep->clear();
      const ForwardTensors tensors{one.q, one.k, one.v, one.out, one.lse};
      state.check_tensors(tensors, one.call);
      runs.push_back(
          std::make_unique<PackedRun>(state, plans[rank], Pass::forward, tensors, one.call, one.keep, nullptr));
    } else {
      const BackwardTensors tensors{one.q, one.k, one.v, one.out, one.lse, one.dout, one.dq, one.dk, one.dv};
      state.check_tensors(tensors, one.call);
      runs.push_back(
          std::make_unique<PackedRun>(state, plans[rank], Pass::backward, tensors, one.call, nullptr, one.kept));
    }
  }
  for (std::size_t rank = 0; rank < runs.size(); ++rank) {
    if (runs[rank]->phases() != runs[0]->phases())
      reject("kept", "rank {} and rank 0 differ in whether rows were kept: give kept of every rank, or of none", rank);
  }
  for (int i = 0; i < runs[0]->phases(); ++i) {
    for (const auto& run : runs) run->phase(i);
  }
  return true;
}

bool Ring::forward_together(std::span<const RingForward> ranks) { return !ranks.empty() && run_together(ranks); }
bool Ring::backward_together(std::span<const RingBackward> ranks) { return !ranks.empty() && run_together(ranks); }

}  // namespace longspan
