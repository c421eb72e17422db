// What a ring will take: exact bytes and work of each rank, and rates of its device and link.
#include <algorithm>
#include <map>
#include <set>

#include "longspan/cost.h"
#include "plan/branch.h"
#include "plan/row_ranges.h"
#include "util/reject.h"

namespace longspan {
namespace {

/// All ranks, or those at both ends and in the middle, where shards and segments end otherwise than elsewhere, and some
/// between.
std::vector<int> ranks_to_list(int ranks, int most) {
  std::set<int> list;
  if (ranks <= most) {
    for (int rank = 0; rank < ranks; ++rank) list.insert(rank);
    return {list.begin(), list.end()};
  }
  const int parts = ranks <= 1024 ? 8 : 4;
  for (int part = 0; part <= parts; ++part) {
    const auto at = static_cast<int>(static_cast<std::int64_t>(ranks) * part / parts);
    for (const int rank : {at - 1, at}) list.insert(std::clamp(rank, 0, ranks - 1));
  }
  return {list.begin(), list.end()};
}

/// Queries of a rank, by branch, that run while its messages travel, as the ring cuts them: forward by branches (where
/// they are mixed a row goes through them in order, so a branch leaves a row for later once one before it has),
/// backward by rows.
std::vector<RowRanges> hiding_ranges(const Plan& plan, const ExchangePlan& exchange, std::span<const RowRange> own,
                                     Pass pass) {
  std::vector<RowRanges> hiding;
  RowRanges before(own.begin(), own.end());
  if (pass == Pass::backward) {
    for (const RowRanges& local : exchange.local_ranges()) before = common_rows(before, local);
    return std::vector<RowRanges>(exchange.local_ranges().size(), before);
  }
  for (const RowRanges& local : exchange.local_ranges()) {
    hiding.push_back(common_rows(before, local));
    if (plan.merges_branches()) before = hiding.back();
  }
  return hiding;
}

/// Rows of other ranks, counted with each key/value head, that one branch alone makes a rank receive.
double branch_rows(const Plan& plan, const BranchPlan& branch, std::span<const RowRange> own) {
  const Problem& problem = plan.problem();
  if (!branch.active(problem.tokens)) return 0;
  std::map<std::int64_t, std::int64_t> reach;  // of each segment, where the rank's last query ends
  for (const RowRange& range : own) {
    for (const std::int64_t segment : {range.start / branch.segment, (end_of(range) - 1) / branch.segment})
      reach[segment] = std::max(reach[segment], end_of(range));
  }
  const std::int64_t group = problem.heads / problem.kv_heads;
  std::set<std::pair<std::int64_t, std::int64_t>> seen;  // key/value head and phase
  double rows = 0;
  for (std::int64_t head = branch.head_begin; head < branch.head_begin + branch.head_count; ++head) {
    if (!seen.emplace(head / group, branch.phase(head)).second) continue;
    for (const auto& [segment, end] : reach) {
      const Strand strand = branch.strand(head, segment, problem.tokens);
      rows += static_cast<double>(plan.options().causal ? rows_below(strand, end) : strand.count);
      for (const RowRange& range : own) rows -= static_cast<double>(query_run(strand, range).count);
    }
  }
  return rows;
}

class Predictor {
 public:
  Predictor(const Plan& plan, const Shards& shards, const RingModel& model)
      : plan_(plan), shards_(shards), model_(model), work_(plan) {}

  RankPrediction rank(int rank) const {
    const ExchangePlan exchange(plan_, shards_, rank);
    const std::span<const RowRange> own = shards_.ranges(rank);
    RankPrediction one;
    one.rank = rank;
    one.rows = shards_.rows(rank);
    for (const ExchangePeer& peer : exchange.peers()) {
      one.messages_sent += peer.send_pairs > 0;
      one.messages_received += peer.receive_pairs > 0;
    }
    one.bytes_sent = exchange.bytes_sent();
    one.bytes_received = exchange.bytes_received();
    one.gradient_bytes_sent = exchange.receive_pairs() * exchange.gradient_bytes_per_pair();
    one.gradient_bytes_received = exchange.send_pairs() * exchange.gradient_bytes_per_pair();
    one.forward = computing(Pass::forward, own, hiding_ranges(plan_, exchange, own, Pass::forward));
    one.backward = computing(Pass::backward, own, hiding_ranges(plan_, exchange, own, Pass::backward));
    const std::int64_t messages = one.messages_sent + one.messages_received;
    add_messages(one.forward, model_.device.forward, messages, one.bytes_sent, one.bytes_received);
    add_messages(one.backward, model_.device.backward, messages, one.gradient_bytes_sent, one.gradient_bytes_received);
    return one;
  }

  /// Ranks that share a device compute in turn, each as long as the mean of them.
  void share(std::vector<RankPrediction>& ranks) const {
    for (PassPrediction RankPrediction::*const pass : {&RankPrediction::forward, &RankPrediction::backward}) {
      double compute = 0, hiding = 0, messages = 0;
      for (const RankPrediction& one : ranks) {
        compute += (one.*pass).compute;
        hiding += (one.*pass).hiding;
        messages += (one.*pass).messages;
      }
      const double times = model_.ranks_per_device / static_cast<double>(ranks.size());
      for (RankPrediction& one : ranks) {
        PassPrediction& of = one.*pass;
        const bool shared = model_.ranks_per_device > 1;
        const double all = shared ? compute * times : of.compute, hidden = shared ? hiding * times : of.hiding;
        const double packing = shared ? messages * times : of.messages;
        of.waiting = std::max(0.0, of.transfer - hidden);
        of.total = all + packing + of.waiting;
      }
    }
  }

  /// The branch that counts most, and its share.
  void name_limit(RingPrediction& prediction) const {
    const RankPrediction& slow = prediction.listed[prediction.slowest];
    const RankPrediction& receiving = *std::max_element(
        prediction.listed.begin(), prediction.listed.end(),
        [](const RankPrediction& a, const RankPrediction& b) { return a.bytes_received < b.bytes_received; });
    const double waiting = slow.forward.waiting + slow.backward.waiting;
    const double handling = slow.forward.messages + slow.backward.messages;
    if (waiting > 0.1 * slow.total()) prediction.limit = RingPrediction::Limit::link;
    else if (handling > 0.1 * slow.total()) prediction.limit = RingPrediction::Limit::messages;
    const bool computing = prediction.limit == RingPrediction::Limit::compute;
    double sum = 0, most = 0;
    for (std::size_t index = 0; index < plan_.branches().size(); ++index) {
      const std::span<const RowRange> own = shards_.ranges((computing ? slow : receiving).rank);
      const double value = !computing ? branch_rows(plan_, plan_.branches()[index], own)
                                      : seconds_of(work_.of(index, own, Pass::forward), model_.device.forward) +
                                            seconds_of(work_.of(index, own, Pass::backward), model_.device.backward);
      sum += value;
      if (value > most) prediction.limiting_branch = index;
      most = std::max(most, value);
    }
    prediction.limiting_share = sum > 0 ? most / sum : 0;
  }

  double one_device(Pass pass) const {
    const PassRates& rates = pass == Pass::forward ? model_.device.forward : model_.device.backward;
    return seconds_of(work_.of_all(pass), rates) + rates.call_seconds;
  }

 private:
  PassPrediction computing(Pass pass, std::span<const RowRange> own, const std::vector<RowRanges>& hiding) const {
    const PassRates& rates = pass == Pass::forward ? model_.device.forward : model_.device.backward;
    PassPrediction prediction;
    for (std::size_t index = 0; index < hiding.size(); ++index) {
      prediction.compute += seconds_of(work_.of(index, own, pass), rates);
      prediction.hiding += seconds_of(work_.of(index, hiding[index], pass), rates);
    }
    prediction.compute += rates.call_seconds;
    return prediction;
  }

  void add_messages(PassPrediction& pass, const PassRates& rates, std::int64_t messages, std::int64_t sent,
                    std::int64_t received) const {
    if (messages == 0) return;
    const double larger = static_cast<double>(std::max(sent, received));
    pass.transfer = larger / model_.link.bytes_per_second + model_.link.latency_seconds;
    pass.messages = static_cast<double>(sent + received) / rates.message_bytes_per_second +
                    model_.device.exchange_seconds + static_cast<double>(messages) * model_.device.message_seconds;
  }

  const Plan& plan_;
  const Shards& shards_;
  const RingModel& model_;
  const WorkCounter work_;
};

void check_model(const RingModel& model, const Shards& shards) {
  const auto above_zero = [](const char* what, double value) {
    if (!(value > 0)) reject(what, "{} is {}: give a rate above 0", what, value);
  };
  above_zero("link", model.link.bytes_per_second);
  for (const PassRates& rates : {model.device.forward, model.device.backward}) {
    above_zero("flops_per_second", rates.flops_per_second);
    above_zero("row_bytes_per_second", rates.row_bytes_per_second);
    above_zero("message_bytes_per_second", rates.message_bytes_per_second);
  }
  if (!(model.link.latency_seconds >= 0))
    reject("latency", "a latency of {} s: give 0 or more", model.link.latency_seconds);
  if (model.ranks_per_device < 1 || model.ranks_per_device > shards.ranks())
    reject("ranks_per_device", "{} ranks per device of {} ranks: give 1 to {}", model.ranks_per_device, shards.ranks(),
           shards.ranks());
}

}  // namespace

RingPrediction predict_ring(const Plan& plan, const Shards& shards, const RingModel& model, int most_listed,
                            const std::function<void()>& stop) {
  check_model(model, shards);
  const Predictor predictor(plan, shards, model);
  RingPrediction prediction;
  prediction.ranks = shards.ranks();
  for (const int rank : ranks_to_list(shards.ranks(), most_listed)) {
    if (stop) stop();
    prediction.listed.push_back(predictor.rank(rank));
  }
  auto& listed = prediction.listed;
  predictor.share(listed);
  const auto slowest =
      std::max_element(listed.begin(), listed.end(),
                       [](const RankPrediction& a, const RankPrediction& b) { return a.total() < b.total(); });
  prediction.slowest = static_cast<std::size_t>(slowest - listed.begin());
  prediction.forward_seconds = slowest->forward.total;
  prediction.backward_seconds = slowest->backward.total;
  prediction.one_device_forward_seconds = predictor.one_device(Pass::forward);
  prediction.one_device_backward_seconds = predictor.one_device(Pass::backward);
  const double devices = static_cast<double>(shards.ranks()) / model.ranks_per_device;
  const double one = prediction.one_device_forward_seconds + prediction.one_device_backward_seconds;
  if (plan.problem().tokens > 0) prediction.efficiency = one / (devices * slowest->total());
  predictor.name_limit(prediction);
  return prediction;
}

}  // namespace longspan
