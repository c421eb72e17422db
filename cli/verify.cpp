// Gathers the sampled rows of every tensor and hands them to the reference.
#include "verify.h"

#include <algorithm>
#include <random>
#include <set>

#include "longspan/reference.h"

namespace longspan::cli {
namespace {

RowCheck compare(std::string name, const ConstTensorView& actual, const std::vector<std::int64_t>& positions,
                 const reference::ExpectedTensor& expected) {
  const reference::GatheredRows rows(actual, positions);
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
  const reference::Expectation expected =
      reference::expected_rows(Attention(cached.pattern(), cached.options()), q, k, v, out, lse, dout, call, positions);
  return {compare("out", out, positions, expected.out), compare("lse", lse, positions, expected.lse),
          compare("dq", work.dq.view(), positions, expected.dq), compare("dk", work.dk.view(), positions, expected.dk),
          compare("dv", work.dv.view(), positions, expected.dv)};
}

}  // namespace longspan::cli
