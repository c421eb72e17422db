// Gathers the sampled rows of every tensor and hands them to the reference.
#include "verify.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <set>

#include "attention/call_masks.h"
#include "kernels/reference/expectation.h"
#include "longspan/threads.h"

namespace longspan::cli {
namespace {

/// Rows `positions` of a tensor, one behind the other.
Tensor gather(std::string_view name, const ConstTensorView& view, const std::vector<std::int64_t>& positions) {
  const auto rows = static_cast<std::int64_t>(positions.size());
  Tensor gathered(name, view.dtype, Layout::bnhd, view.batch(), rows, view.heads(), view.columns());
  const auto row_bytes = static_cast<std::size_t>(view.columns() * size_of(view.dtype));
  for (std::int64_t entry = 0; entry < view.batch(); ++entry) {
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t head = 0; head < view.heads(); ++head) {
        const std::int64_t from = view.offset(entry, positions[static_cast<std::size_t>(row)], head);
        const std::int64_t to = gathered.view().offset(entry, row, head);
        std::memcpy(static_cast<std::byte*>(gathered.data()) + to * size_of(view.dtype),
                    static_cast<const std::byte*>(view.data) + from * size_of(view.dtype), row_bytes);
      }
    }
  }
  return gathered;
}

RowCheck compare(std::string name, const ConstTensorView& actual, const std::vector<std::int64_t>& positions,
                 const reference::ExpectedTensor& expected) {
  const Tensor rows = gather(name, actual, positions);
  const reference::Comparison comparison = reference::compare(rows.view(), expected);
  const double count = static_cast<double>(actual.batch() * actual.heads()) * static_cast<double>(positions.size());
  return {
      std::move(name),  count,          comparison.largest_error, comparison.over_tolerance, comparison.rms_over_model,
      comparison.worst, comparison.ok()};
}

}  // namespace

std::vector<std::int64_t> sample_positions(const Plan& plan, std::uint64_t seed) {
  constexpr int kMost = 6;          // random rows of one strand
  constexpr double kPairs = 1.5e7;  // pairs the reference may look at, so that dense patterns stay quick
  const std::int64_t tokens = plan.problem().tokens;
  std::mt19937_64 random(seed);
  std::set<std::int64_t> positions;
  for (const BranchPlan& branch : plan.branches()) {
    if (tokens == 0 || branch.head_count == 0 || !branch.active(tokens)) continue;
    for (const std::int64_t segment : {std::int64_t{0}, branch.segments(tokens) - 1}) {
      for (const std::int64_t head : {branch.head_begin, branch.head_begin + branch.head_count - 1}) {
        const Strand strand = branch.strand(head, segment, tokens);
        if (strand.count == 0) continue;
        const double cost =
            static_cast<double>(strand.count) * static_cast<double>(branch.head_count * plan.problem().batch);
        const double share = kPairs / static_cast<double>(plan.branches().size());
        const int chosen = static_cast<int>(std::clamp(share / cost, 0.0, static_cast<double>(kMost)));
        std::vector<std::int64_t> indices = {0, strand.count / 2, strand.count - 1};
        for (int i = 0; i < chosen; ++i) {
          indices.push_back(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(strand.count)));
        }
        for (const std::int64_t index : indices) positions.insert(strand.start + index * strand.stride);
      }
    }
  }
  return {positions.begin(), positions.end()};
}

std::vector<RowCheck> verify(const Plan& cached, const Call& call, const Workload& work) {
  const std::vector<std::int64_t> positions = sample_positions(cached, call.dropout_seed);
  if (positions.empty()) return {};
  const ConstTensorView q = work.q.view(), k = work.k.view(), v = work.v.view(), out = work.out.view(),
                        lse = work.lse.view(), dout = work.dout.view();
  const RowRange whole{0, cached.problem().tokens};
  CallPlan own(cached, call);
  own.choose(q, k, call, {&whole, 1}, num_threads());
  const Plan& plan = *own;
  std::vector<RowCheck> checks;
  {
    Problem problem = plan.problem();
    problem.query_rows = static_cast<std::int64_t>(positions.size());
    Plan few(plan.pattern(), plan.options(), problem);
    for (std::size_t branch = 0; branch < plan.branches().size(); ++branch) {  // masks of all rows, not of these few
      if (plan.branches()[branch].mask) few = few.with_mask(branch, *plan.branches()[branch].mask);
    }
    std::vector<RowRange> ranges;
    for (const std::int64_t position : positions) ranges.push_back({position, 1});
    const Tensor few_q = gather("q", q, positions), few_dout = gather("dout", dout, positions);
    const reference::Expectation expected = reference::expect_queries(
        {few, call, ranges, few_q.view(), k, v, {}, {}, few_dout.view(), {}, {}, {}, num_threads(), nullptr});
    checks.push_back(compare("out", out, positions, expected.out));
    checks.push_back(compare("lse", lse, positions, expected.lse));
    checks.push_back(compare("dq", work.dq.view(), positions, expected.dq));
  }
  const reference::Expectation expected = reference::expect_keys(
      {plan, call, {&whole, 1}, q, k, v, out, lse, dout, {}, {}, {}, num_threads(), nullptr}, positions);
  checks.push_back(compare("dk", work.dk.view(), positions, expected.dk));
  checks.push_back(compare("dv", work.dv.view(), positions, expected.dv));
  return checks;
}

}  // namespace longspan::cli
