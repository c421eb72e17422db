// Cuts a call into tasks. See work.h.
#include "kernels/cpu/work.h"

#include <algorithm>

namespace longspan::cpu {
namespace {

std::int64_t group_size(const Plan& plan) { return plan.problem().heads / plan.problem().kv_heads; }

}  // namespace

bool kv_heads_shared(const Plan& plan) {
  const auto& branches = plan.branches();
  const std::int64_t group = group_size(plan);
  for (std::size_t i = 0; i < branches.size(); ++i) {
    for (std::size_t j = i + 1; j < branches.size(); ++j) {
      const BranchPlan &a = branches[i], &b = branches[j];
      if (a.head_count == 0 || b.head_count == 0) continue;
      const std::int64_t a_last = (a.head_begin + a.head_count - 1) / group,
                         b_last = (b.head_begin + b.head_count - 1) / group;
      if (a.head_begin / group <= b_last && b.head_begin / group <= a_last) return true;
    }
  }
  return false;
}

HeadSet shared_heads(const Plan& plan, const BranchPlan& branch, std::int64_t head, std::int64_t most) {
  const std::int64_t group = group_size(plan);
  const std::int64_t begin = std::max(head / group * group, branch.head_begin);
  const std::int64_t end = std::min((head / group + 1) * group, branch.head_begin + branch.head_count);
  const bool interleaved = !branch.fixed_phase && !branch.heads_per_phase;
  const std::int64_t step = interleaved ? branch.dilation : 1;
  std::int64_t before = 0;
  for (std::int64_t other = head - step; other >= begin && branch.phase(other) == branch.phase(head); other -= step)
    ++before;
  if (before % most != 0) return {head, step, 0};
  std::int64_t count = 1;
  while (count < most && head + count * step < end && branch.phase(head + count * step) == branch.phase(head)) ++count;
  return {head, step, count};
}

std::int64_t largest_head_set(const Plan& plan, std::int64_t most) {
  std::int64_t largest = 1;
  for (const BranchPlan& branch : plan.branches()) {
    for (std::int64_t head = branch.head_begin; head < branch.head_begin + branch.head_count; ++head) {
      largest = std::max(largest, shared_heads(plan, branch, head, most).count);
    }
  }
  return largest;
}

std::int64_t strands_together(const Plan& plan, const Section& section, double share) {
  constexpr std::int64_t kTinyKeys = 256;       // strands of fewer are not worth a task
  constexpr std::int64_t kKeysTogether = 2048;  // strands that share a task fetch each other's rows
  constexpr double kTasksWanted = 24;           // of a section: some patterns run theirs one after the other
  const BranchPlan& branch = plan.branches()[static_cast<std::size_t>(section.branch)];
  const std::int64_t keys = std::max<std::int64_t>(branch.longest_strand(plan.problem().tokens), 1);
  const double strands = static_cast<double>(section.strands(plan) * plan.problem().batch) * share;
  const std::int64_t spared = std::min(kKeysTogether / keys, static_cast<std::int64_t>(strands / kTasksWanted));
  return std::max({kTinyKeys / keys, spared, std::int64_t{1}});
}

TaskPlace locate(const Plan& plan, const Section& section, std::int64_t index) {
  const std::int64_t groups = section.groups(plan), first = index % groups * section.strands_per_task;
  index /= groups;
  return {index / plan.problem().batch, index % plan.problem().batch, first,
          std::min(first + section.strands_per_task, section.strands(plan))};
}

bool fill_strand(const CallShared& shared, const Section& section, const TaskPlace& place, std::int64_t strand,
                 std::int64_t most_heads, StrandTask& task) {
  const BranchPlan& branch = shared.plan.branches()[static_cast<std::size_t>(section.branch)];
  const std::int64_t length = shared.length(place.entry), head = branch.head_begin + strand % branch.head_count;
  const std::int64_t segment = section.first_segment + strand / branch.head_count;
  if (!branch.active(length) || segment >= branch.segments(length)) return false;
  task.heads = shared_heads(shared.plan, branch, head, most_heads);
  if (task.heads.count == 0) return false;
  task.strand = branch.strand(head, segment, length);
  if (task.strand.count == 0) return false;
  task.entry = place.entry;
  task.branch = section.branch;
  task.kv_head = head / group_size(shared.plan);
  task.padding = branch.padding(task.strand, length, shared.causal);
  return true;
}

}  // namespace longspan::cpu
