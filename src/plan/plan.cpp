// Compiling a pattern for a problem, and what a plan costs.
#include "longspan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "pattern/block_counts.h"
#include "plan/branch.h"
#include "plan/check_problem.h"
#include "util/reject.h"

namespace longspan {
namespace {

using strands::ceil_divide;

/// Counts pairs of strands of one branch, each length once: strands of a branch have few lengths, and heads are many.
class StrandPairs {
 public:
  StrandPairs(const BranchPlan& branch, const Plan& plan)
      : mask_(branch.mask), causal_(plan.options().causal), alike_(!mask_ || mask_->heads_count_alike()) {
    if (branch.adaptive_density > 0) {
      adaptive_ = BlockCounts::expected({.block_size = mask_->block_size(),
                                         .terms = BlockPattern::adaptive(branch.adaptive_density).terms(),
                                         .rows = plan.problem().tokens,
                                         .causal = causal_});
    }
  }
  /// Of a strand of `count` rows of a head of the mask.
  double of(std::int64_t count, std::int64_t mask_head) {
    const auto [known, added] = counted_.try_emplace({alike_ ? 0 : mask_head, count});
    if (added) known->second = this->count(count, mask_head);
    exact_ = exact_ && known->second.exact;
    return known->second.value;
  }
  bool exact() const { return exact_; }

 private:
  BlockCount count(std::int64_t count, std::int64_t mask_head) const {
    if (adaptive_) return {adaptive_->pairs(count, causal_).value, false};
    if (mask_ && count > 0) return mask_->count_pairs(mask_head, count, causal_);
    const double rows = static_cast<double>(count);
    return {causal_ ? rows * (rows + 1) / 2 : rows * rows, true};
  }

  const std::optional<BlockMask>& mask_;
  bool causal_, alike_, exact_ = true;
  std::optional<BlockCounts> adaptive_;
  std::map<std::pair<std::int64_t, std::int64_t>, BlockCount> counted_;
};

void check_mask(const BlockMask& mask, std::size_t branch, std::int64_t rows, const Problem& problem) {
  const std::int64_t needed = ceil_divide<std::int64_t>(rows, mask.block_size());
  if (mask.blocks() != needed) {
    reject("mask",
           "the block mask of branch {} has {} block rows: strands of up to {} rows in "
           "blocks of {} need {}",
           branch, mask.blocks(), rows, mask.block_size(), needed);
  }
  if (mask.heads() != 1 && mask.heads() != problem.heads && mask.heads() != problem.batch * problem.heads)
    reject("mask", "the block mask of branch {} has {} heads: give 1, {} or, for a mask per batch entry, {}", branch,
           mask.heads(), problem.heads, problem.batch * problem.heads);
}

}  // namespace

bool BranchPlan::owns(std::int64_t head) const { return branch_of(*this).owns(head); }
std::int64_t BranchPlan::phase(std::int64_t head) const { return branch_of(*this).phase(head); }
bool BranchPlan::active(std::int64_t length) const { return branch_of(*this).active(length); }
std::int64_t BranchPlan::segments(std::int64_t length) const { return branch_of(*this).segments(length); }
std::int64_t BranchPlan::longest_strand(std::int64_t length) const { return branch_of(*this).longest_strand(length); }
bool BranchPlan::covers(std::int64_t head, std::int64_t position) const {
  return branch_of(*this).covers(head, position);
}

Strand BranchPlan::strand(std::int64_t head, std::int64_t index, std::int64_t length) const {
  const auto strand = branch_of(*this).strand(head, index, length);
  return {strand.start, strand.stride, strand.count};
}

std::int64_t BranchPlan::padding(const Strand& strand, std::int64_t length, bool causal) const {
  return branch_of(*this).padding(strand.count, length, causal);
}

Plan::Plan(Pattern pattern, Options options, Problem problem)
    : pattern_(std::move(pattern)), options_(std::move(options)), problem_(problem) {
  check_options(options_);
  check_problem(problem_);
  const auto& branches = pattern_.branches();
  const std::int64_t groups = static_cast<std::int64_t>(branches.size());
  const std::int64_t heads = problem_.heads;
  const bool by_groups = pattern_.assignment() == HeadAssignment::groups;
  if (by_groups && heads < groups) {
    reject("heads",
           "{} heads for {} branches: head groups need at least one head per branch; use "
           "fewer segments, more heads, or a longnet pattern",
           heads, groups);
  }
  scale_ = options_.scale.value_or(1.0 / std::sqrt(static_cast<double>(problem_.head_dim)));
  output_scale_ = options_.output_scale.value_or(pattern_.output_scale());
  merges_branches_ = !by_groups && groups > 1;

  std::int64_t head_begin = 0;
  for (std::int64_t i = 0; i < groups; ++i) {
    const Branch& source = branches[static_cast<std::size_t>(i)];
    BranchPlan branch;
    branch.segment = source.segment;
    // A dilation beyond segment, sequence and heads selects the same rows as this one, whose products do not overflow.
    branch.dilation =
        std::min(source.dilation, std::max({std::min(source.segment, problem_.tokens), heads, std::int64_t{1}}));
    branch.head_begin = by_groups ? head_begin : 0;
    branch.head_count = by_groups ? heads / groups + (i < heads % groups ? 1 : 0) : heads;
    head_begin += branch.head_count;
    if (by_groups) branch.fixed_phase = i % source.dilation;
    else if (pattern_.phase_rule() == PhaseRule::torchscale)
      branch.heads_per_phase = ceil_divide(heads, source.dilation);
    branch.skip_if_longer = pattern_.long_segments() == LongSegments::skip && source.segment != kWholeSequence;
    branch.pad_keys = pattern_.pad_keys();
    if (const std::int64_t rows = branch.longest_strand(problem_.tokens);
        options_.dropout > 0 && rows > kMostDropoutRows) {
      throw InvalidArgument(
          "dropout", fmt::format("dropout is {}, but branch {} has strands of {} rows: dropout takes at most {}; "
                                 "use shorter segments or no dropout",
                                 options_.dropout, i, rows, kMostDropoutRows));
    }
    branches_.push_back(std::move(branch));
    if (source.mask) make_mask(static_cast<std::size_t>(i), *source.mask);
  }
}

void Plan::make_mask(std::size_t index, const BlockPattern& blocks) {
  const Branch& source = pattern_.branches()[index];
  BranchPlan& branch = branches_[index];
  if (blocks.adaptive_density() > 0 && (source.dilation != 1 || source.segment < problem_.tokens)) {
    reject("mask",
           "branch {} is adaptive in segments of {} with dilation {}: adaptive masks need a branch "
           "over the whole sequence, such as whole/1",
           index, source.segment, source.dilation);
  }
  branch.adaptive_density = blocks.adaptive_density();
  const std::int64_t rows = branch.longest_strand(problem_.tokens);
  BlockMask mask = blocks.planned_mask(rows, problem_.heads, options_.causal);
  check_mask(mask, index, rows, problem_);
  branch.mask_entry_stride = mask.heads() > problem_.heads ? problem_.heads : 0;
  branch.mask = std::move(mask);
}

Plan Plan::with_mask(std::size_t index, BlockMask mask) const {
  check_branch(index);
  check_mask(mask, index, branches_[index].longest_strand(problem_.tokens), problem_);
  Plan plan = *this;
  BranchPlan& branch = plan.branches_[index];
  branch.mask_entry_stride = mask.heads() > problem_.heads ? problem_.heads : 0;
  branch.adaptive_density = 0;
  branch.mask = std::move(mask);
  return plan;
}

void Plan::check_branch(std::size_t index) const {
  if (index >= branches_.size()) reject("branch", "branch {}: the plan has {} branches", index, branches_.size());
}

double Plan::pairs(std::size_t index) const { return count_pairs(index).value; }

BlockCount Plan::count_pairs(std::size_t index) const {
  check_branch(index);
  const BranchPlan& branch = branches_[index];
  const std::int64_t length = problem_.tokens;
  if (length == 0 || !branch.active(length)) return {};
  const std::int64_t segments = branch.segments(length);
  double total = 0;
  StrandPairs pairs(branch, *this);
  const bool entries_differ = branch.mask_entry_stride > 0;
  for (std::int64_t entry = 0; entry < (entries_differ ? problem_.batch : 1); ++entry) {
    for (std::int64_t head = branch.head_begin; head < branch.head_begin + branch.head_count; ++head) {
      const auto of = [&](std::int64_t segment) {
        return pairs.of(branch.strand(head, segment, length).count, branch.mask_head(entry, head));
      };
      // All segments but the last are alike.
      total += static_cast<double>(segments - 1) * of(0) + of(segments - 1);
    }
  }
  return {entries_differ ? total : total * static_cast<double>(problem_.batch), pairs.exact()};
}

PlanTotals Plan::totals() const {
  PlanTotals totals;
  const std::int64_t length = problem_.tokens;
  const double batch = static_cast<double>(problem_.batch), heads = static_cast<double>(problem_.heads);
  for (std::size_t i = 0; i < branches_.size(); ++i) {
    const BlockCount counted = count_pairs(i);
    totals.pairs += counted.value;
    totals.exact = totals.exact && counted.exact;
    const BranchPlan& branch = branches_[i];
    if (!branch.active(length)) continue;
    for (std::int64_t head = branch.head_begin; head < branch.head_begin + branch.head_count; ++head)
      totals.strand_rows += batch * static_cast<double>(CoveredRows(branch, head, length).below(length));
  }
  const double rows = static_cast<double>(length);
  totals.dense_pairs = batch * heads * (options_.causal ? rows * (rows + 1) / 2 : rows * rows);
  const double head_dim = static_cast<double>(problem_.head_dim);
  totals.forward_flops = 4 * totals.pairs * head_dim;
  totals.backward_flops = 10 * totals.pairs * head_dim;
  const double element = static_cast<double>(size_of(problem_.dtype));
  const double query = batch * static_cast<double>(problem_.query_rows) * heads;
  const double key = batch * rows * static_cast<double>(problem_.kv_heads);
  totals.forward_bytes = (2 * query + 2 * key) * head_dim * element + 4 * query;
  totals.backward_bytes = (4 * query + 4 * key) * head_dim * element + 4 * query;
  return totals;
}

double Plan::items(std::int64_t query_tile) const {
  double total = 0;
  const std::int64_t length = problem_.tokens;
  for (const BranchPlan& branch : branches_) {
    if (length == 0 || !branch.active(length)) continue;
    total += static_cast<double>(problem_.batch) * static_cast<double>(branch.head_count) *
             static_cast<double>(branch.segments(length)) *
             static_cast<double>(ceil_divide(branch.longest_strand(length), query_tile));
  }
  return total;
}

std::string Plan::to_string() const {
  const Problem& p = problem_;
  std::string text = fmt::format("{}{}\n{} tokens, batch {}, {} heads ({} key/value) of {}, {} on {}\n",
                                 pattern_.to_string(), options_.causal ? ", causal" : "", p.tokens, p.batch, p.heads,
                                 p.kv_heads, p.head_dim, name_of(p.dtype), longspan::to_string(p.device));
  for (std::size_t i = 0; i < branches_.size(); ++i) {
    const BranchPlan& branch = branches_[i];
    const bool active = branch.active(p.tokens);
    text += fmt::format(
        "branch {}: heads {}..{}, {} segments of {}, dilation {}, strands of up to {} rows{}{}, {:.4g} pairs\n", i,
        branch.head_begin, branch.head_begin + branch.head_count - 1, active ? branch.segments(p.tokens) : 0,
        std::min(branch.segment, p.tokens), branch.dilation, branch.longest_strand(p.tokens),
        branch.adaptive_density > 0 ? fmt::format(", adaptive blocks of density {:.3g}", branch.adaptive_density)
        : branch.mask               ? fmt::format(", block mask of density {:.3g}", branch.mask->density())
                                    : "",
        active ? "" : ", skipped: the segment is longer than the sequence", pairs(i));
  }
  return text;
}

}  // namespace longspan
