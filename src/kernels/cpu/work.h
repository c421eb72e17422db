// Cuts a call into tasks: pure integer arithmetic from a flat index, no lists.
#pragma once

#include <array>

#include "kernels/cpu/engine.h"

namespace longspan::cpu {

/// Whether two branches own query heads of one key/value head.
bool kv_heads_shared(const Plan& plan);

/// The heads that share the strands of `head` in a branch, if `head` is the first of them (at most `most` per set).
/// count is 0 if it is not the first.
HeadSet shared_heads(const Plan& plan, const BranchPlan& branch, std::int64_t head, std::int64_t most);

/// Most heads any set of the plan has.
std::int64_t largest_head_set(const Plan& plan, std::int64_t most);

/// Tasks of one branch and (forward) one query range: blocks x entries x groups of strands. Strands are counted segment
/// by segment, all heads of one before the next: they lie in the same pages of memory.
struct Section {
  std::int64_t branch = 0;
  RowRange range;
  std::int64_t q_first = 0;  // row of q where the range begins
  std::int64_t first_segment = 0;
  std::int64_t segments = 0;
  std::int64_t strands_per_task = 1;
  std::int64_t blocks = 1;      // a strand is cut into this many parts
  std::int64_t block_rows = 0;  // of this many rows each
  std::int64_t tickets = 0;     // backward: counters per strand

  std::int64_t strands(const Plan& plan) const {
    return segments * plan.branches()[static_cast<std::size_t>(branch)].head_count;
  }
  std::int64_t all_tickets(const Plan& plan) const { return tickets * plan.problem().batch * strands(plan); }
  std::int64_t groups(const Plan& plan) const { return (strands(plan) + strands_per_task - 1) / strands_per_task; }
  std::int64_t tasks(const Plan& plan) const { return blocks * plan.problem().batch * groups(plan); }
};

/// How many strands of a section one task takes, one after the other: as many as leave the threads tasks enough.
/// `share` of the strands have something to do.
std::int64_t strands_together(const Plan& plan, const Section& section, double share = 1.0);

/// Where task `index` of a section is. Blocks are the slowest index, and the longest come first.
struct TaskPlace {
  std::int64_t block, entry, first_strand, last_strand;
};
TaskPlace locate(const Plan& plan, const Section& section, std::int64_t index);

/// Fills everything of a task but its rows. False if there is nothing to do.
bool fill_strand(const CallShared& shared, const Section& section, const TaskPlace& place, std::int64_t strand,
                 std::int64_t most_heads, StrandTask& task);

/// run(task) for the strands of a place that find(strand, task) has; each task knows the one after it.
template <class Task, class Find, class Run>
void run_strands(const TaskPlace& place, Find&& find, Run&& run) {
  Task task, next;
  std::int64_t strand = place.first_strand;
  const auto find_next = [&] {
    for (; strand < place.last_strand; ++strand) {
      if (!find(strand, next)) continue;
      ++strand;
      return true;
    }
    return false;
  };
  for (bool found = find_next(); found;) {
    task = next;
    found = find_next();
    task.next = found ? &next : nullptr;
    run(task);
  }
}

}  // namespace longspan::cpu
