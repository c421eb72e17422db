// Forward of a call: splits query rows over threads, mixes branches in their order, fills rows that nothing covers.
#include "kernels/cpu/drive.h"
#include "kernels/cpu/work.h"

namespace longspan::cpu {
namespace {

using strands::ceil_divide;

constexpr std::int64_t kMostSharedHeads = 64;  // of one task
constexpr std::size_t kMostSections = 64;      // of one loop; calls with many query ranges take several loops
constexpr std::int64_t kTasksPerThread = 4;

struct ForwardWorkspace {
  FloatRows sums, lse;
  std::byte* threads;
  std::size_t bytes_per_thread;

  ForwardWorkspace(Arena& workspace, const Engine& engine, const Plan& plan, int thread_count) {
    const Problem& p = plan.problem();
    if (plan.merges_branches() && p.dtype != DType::f32)
      sums = take_rows(workspace, p.batch, p.query_rows, p.heads, p.head_dim);
    lse = take_rows(workspace, p.batch, p.heads, p.query_rows, 1);
    bytes_per_thread = forward_thread_bytes(engine, plan, thread_count);
    threads = workspace.take(static_cast<std::int64_t>(bytes_per_thread) * thread_count);
  }
};

bool has_masks(const Plan& plan) {
  return std::ranges::any_of(plan.branches(), [](const BranchPlan& branch) { return branch.mask.has_value(); });
}

/// Heads whose masks differ cannot share a task.
std::int64_t most_shared_heads(const BranchPlan& branch) {
  return branch.mask && branch.mask->heads() > 1 ? 1 : kMostSharedHeads;
}

Section forward_section(const Plan& plan, std::int64_t branch_index, const RowRange& range, std::int64_t q_first,
                        std::int64_t task_rows) {
  const BranchPlan& branch = plan.branches()[static_cast<std::size_t>(branch_index)];
  Section section;
  section.branch = branch_index;
  section.range = range;
  section.q_first = q_first;
  if (range.count == 0) return section;
  section.first_segment = range.start / branch.segment;
  section.segments = (range.start + range.count - 1) / branch.segment - section.first_segment + 1;
  const std::int64_t rows =
      std::min(branch.longest_strand(plan.problem().tokens), ceil_divide(range.count, branch.dilation));
  section.block_rows = std::max<std::int64_t>(1, task_rows / largest_head_set(plan, most_shared_heads(branch)));
  section.blocks = ceil_divide(rows, section.block_rows);
  section.strands_per_task = strands_together(plan, section);
  return section;
}

/// Runs the tasks of some sections, all in one loop.
void run_sections(const Engine& engine, const ForwardShared& shared, std::span<const Section> sections, int threads,
                  std::byte* memory, std::size_t bytes_per_thread, const LoopControl& control) {
  std::array<std::int64_t, kMostSections + 1> begins{};
  for (std::size_t i = 0; i < sections.size(); ++i) begins[i + 1] = begins[i] + sections[i].tasks(shared.plan);
  parallel_for(threads, begins[sections.size()], control, [&](int worker, std::int64_t item) {
    const std::size_t which = static_cast<std::size_t>(
        std::upper_bound(begins.begin(), begins.begin() + static_cast<std::ptrdiff_t>(sections.size()) + 1, item) -
        begins.begin() - 1);
    const Section& section = sections[which];
    const TaskPlace place = locate(shared.plan, section, item - begins[which]);
    // Causal rows near the end see the most keys: they come first.
    const std::int64_t block = shared.causal ? section.blocks - 1 - place.block : place.block;
    const std::int64_t most_heads = most_shared_heads(shared.plan.branches()[static_cast<std::size_t>(section.branch)]);
    const auto find = [&](std::int64_t strand, ForwardTask& task) {
      if (!fill_strand(shared, section, place, strand, most_heads, task)) return false;
      const QueryRun run = query_run(task.strand, section.range, section.q_first);
      const std::int64_t first = block * section.block_rows;
      if (first >= run.count) return false;
      task.rows = {run.begin + first, std::min(section.block_rows, run.count - first),
                   run.q_row + first * task.strand.stride};
      return true;
    };
    run_strands<ForwardTask>(place, find, [&](const ForwardTask& task) {
      engine.forward(shared, task, memory + bytes_per_thread * static_cast<std::size_t>(worker));
    });
  });
}

/// Every branch of [first, last) over all ranges, or the branches' windows in them.
void run_branches(const Engine& engine, const ForwardShared& shared, std::int64_t first, std::int64_t last, int threads,
                  std::byte* memory, std::size_t bytes_per_thread, LoopControl control,
                  const ForwardPart* part = nullptr) {
  const std::int64_t task_rows = forward_task_rows(engine, shared.plan, threads);
  std::array<Section, kMostSections> sections;
  std::size_t count = 0;
  const auto flush = [&] {
    run_sections(engine, shared, std::span(sections.data(), count), threads, memory, bytes_per_thread, control);
    count = 0;
  };
  for (std::int64_t branch = first; branch < last; ++branch) {
    std::int64_t q_first = 0;
    for (const RowRange& range : shared.ranges) {
      const auto windows = part ? std::span<const RowRange>(part->windows[static_cast<std::size_t>(branch)])
                                : std::span<const RowRange>(&range, 1);
      for (const RowRange& window : windows) {
        const std::int64_t begin = std::max(range.start, window.start),
                           end = std::min(range.start + range.count, window.start + window.count);
        if (begin >= end) continue;
        if (count == sections.size()) flush();
        sections[count++] =
            forward_section(shared.plan, branch, {begin, end - begin}, q_first + begin - range.start, task_rows);
      }
      q_first += range.count;
    }
  }
  flush();
}

}  // namespace

std::int64_t forward_task_rows(const Engine& engine, const Plan& plan, int threads) {
  const Problem& problem = plan.problem();
  // Under a mask rows have less to do with each key that was packed for them: tasks are twice as large, and half as
  // many.
  const std::int64_t larger = has_masks(plan) ? 2 : 1;
  const std::int64_t most =
      std::max<std::int64_t>(larger * engine.forward_row_budget / problem.head_dim, kMostSharedHeads);
  double strands = 0, longest = 0;
  for (const BranchPlan& branch : plan.branches()) {
    strands +=
        static_cast<double>(problem.batch * branch.head_count) * static_cast<double>(branch.segments(problem.tokens));
    longest = std::max(longest, static_cast<double>(branch.longest_strand(problem.tokens)));
  }
  // Fewer rows per task pack the same keys more often: only as far as the threads need it.
  const double wanted = static_cast<double>(kTasksPerThread / larger * threads);
  const auto too_few = [&](double of, std::int64_t rows) {
    return of * std::max(1.0, longest / static_cast<double>(rows)) < wanted;
  };
  std::int64_t rows = most;
  while (rows > 2 * kMostSharedHeads && too_few(strands, rows)) rows /= 2;
  // A call with some of the queries, as a rank of a ring makes it, has some of the strands. Ranks share the threads:
  // what a rank must not have is one long task at its end.
  const double own = strands * static_cast<double>(problem.query_rows) /
                     static_cast<double>(std::max<std::int64_t>(problem.tokens, 1));
  while (rows > most / 4 && rows > 2 * kMostSharedHeads && too_few(own, rows)) rows /= 2;
  return rows;
}

std::size_t forward_thread_bytes(const Engine& engine, const Plan& plan, int threads) {
  const std::int64_t heads = largest_head_set(plan, kMostSharedHeads);
  std::int64_t slots = std::max(forward_task_rows(engine, plan, threads), heads);
  // Every block row (of 16 rows at least, or cut by the task) is rounded up to what products take together.
  const bool masked = has_masks(plan);
  if (masked) slots += slots / 2 + kMostSharedHeads;
  return engine.forward_bytes(plan.problem().head_dim, slots, masked);
}

std::size_t forward_workspace(const Engine& engine, const Plan& plan, int threads) {
  Arena workspace;
  ForwardWorkspace(workspace, engine, plan, threads);
  return workspace.used();
}

void run_forward(const Engine& engine, const ForwardArguments& a) {
  const Problem& problem = a.plan.problem();
  Arena workspace(a.workspace);
  const ForwardWorkspace memory(workspace, engine, a.plan, a.threads);
  ForwardShared shared(a.plan, a.call, a.ranges, a.q, a.k, a.v);
  shared.out = a.out;
  shared.lse =
      a.lse.given() ? a.lse : TensorView::lse(memory.lse.data, problem.batch, problem.query_rows, problem.heads);
  const bool mixing = a.plan.merges_branches();
  if (mixing) shared.sums = memory.sums.data ? memory.sums : rows_of(a.out);

  LoopControl control{a.call.cancel, &a.call.progress, 0.0, 0.01};
  if (!a.part || a.part->first) {
    sweep(problem.batch, problem.query_rows, problem.heads, a.threads, control,
          [&](std::int64_t entry, std::int64_t row, std::int64_t head) {
            *shared.lse.at<float>(entry, row, head) = -std::numeric_limits<float>::infinity();
          });
  }
  const std::int64_t branches = static_cast<std::int64_t>(a.plan.branches().size());
  const std::int64_t steps = mixing ? branches : 1;
  for (std::int64_t step = 0; step < steps; ++step) {
    control.progress_begin = control.progress_end;
    control.progress_end = 0.01 + 0.97 * static_cast<double>(step + 1) / static_cast<double>(steps);
    // Branches that share heads run one after the other, so that rows are mixed in the order of the list.
    run_branches(engine, shared, mixing ? step : 0, mixing ? step + 1 : branches, a.threads, memory.threads,
                 memory.bytes_per_thread, control, a.part);
  }
  if (a.part && !a.part->last) return;
  // A row that no branch wrote still has its first lse.
  control.progress_begin = control.progress_end;
  control.progress_end = 1.0;
  finish_rows(engine, a.out, shared.lse, memory.sums, a.threads, control);
}

void run_branch_deltas(const Engine& engine, const BackwardArguments& a, std::int64_t branch, const FloatRows& delta,
                       std::byte* memory, std::size_t bytes_per_thread, const LoopControl& control) {
  ForwardShared shared(a.plan, a.call, a.ranges, a.q, a.k, a.v);
  shared.dout = a.dout;
  shared.delta = delta;
  run_branches(engine, shared, branch, branch + 1, a.threads, memory, bytes_per_thread, control);
}

}  // namespace longspan::cpu
