// Work of some queries of a plan, in closed form: strands of a phase are alike, and so are whole segments.
#include <map>

#include "longspan/cost.h"
#include "plan/branch.h"
#include "plan/row_ranges.h"

namespace longspan {
namespace {

struct Count {
  double pairs = 0, rows = 0;
};

/// Of the queries of a range in one strand, all of whose keys they see, or causal those up to themselves.
Count in_strand(const Strand& strand, const RowRange& range, bool causal) {
  const QueryRun run = query_run(strand, range);
  const double rows = static_cast<double>(run.count), begin = static_cast<double>(run.begin);
  return {causal ? rows * begin + rows * (rows + 1) / 2 : rows * static_cast<double>(strand.count), rows};
}

Count in_branch(const BranchPlan& branch, std::int64_t head, const RowRange& range, std::int64_t tokens, bool causal) {
  if (range.count == 0) return {};
  const std::int64_t first = range.start / branch.segment, last = (end_of(range) - 1) / branch.segment;
  const auto of = [&](std::int64_t segment) { return in_strand(branch.strand(head, segment, tokens), range, causal); };
  Count count = of(first);
  const auto add = [&](const Count& more, double times) {
    count.pairs += times * more.pairs;
    count.rows += times * more.rows;
  };
  if (last > first) add(of(last), 1);
  if (last > first + 1) add(of(first + 1), static_cast<double>(last - first - 1));
  return count;
}

}  // namespace

WorkCounter::WorkCounter(const Plan& plan) : plan_(plan) {
  for (std::size_t index = 0; index < plan.branches().size(); ++index) {
    const BranchPlan& branch = plan.branches()[index];
    std::map<std::int64_t, Heads> phases;
    for (std::int64_t head = branch.head_begin; head < branch.head_begin + branch.head_count; ++head)
      ++phases.try_emplace(branch.phase(head), Heads{head, 0}).first->second.count;
    auto& list = phases_.emplace_back();
    for (const auto& [phase, heads] : phases) list.push_back(heads);
    kept_.push_back(1);
    if (!branch.mask) continue;
    const RowRange whole{0, plan.problem().tokens};
    const double all = of(index, {&whole, 1}, Pass::forward).flops / (4 * static_cast<double>(plan.problem().head_dim));
    kept_.back() = all > 0 ? plan.pairs(index) / all : 1;
  }
}

Work WorkCounter::of(std::size_t index, std::span<const RowRange> queries, Pass pass) const {
  const Problem& problem = plan_.problem();
  const BranchPlan& branch = plan_.branches()[index];
  Work work;
  if (problem.tokens == 0 || !branch.active(problem.tokens)) return work;
  Count count;
  for (const Heads& heads : phases_[index]) {
    for (const RowRange& range : queries) {
      const Count one = in_branch(branch, heads.head, range, problem.tokens, plan_.options().causal);
      count.pairs += one.pairs * static_cast<double>(heads.count);
      count.rows += one.rows * static_cast<double>(heads.count);
    }
  }
  const double batch = static_cast<double>(problem.batch), head_dim = static_cast<double>(problem.head_dim);
  const bool forward = pass == Pass::forward;
  work.flops = batch * count.pairs * kept_[index] * head_dim * (forward ? 4 : 10);
  work.row_bytes = batch * count.rows * head_dim * static_cast<double>(size_of(problem.dtype)) * (forward ? 4 : 8);
  return work;
}

Work WorkCounter::of_all(Pass pass) const {
  const RowRange whole{0, plan_.problem().tokens};
  Work work;
  for (std::size_t branch = 0; branch < plan_.branches().size(); ++branch) work += of(branch, {&whole, 1}, pass);
  return work;
}

}  // namespace longspan
