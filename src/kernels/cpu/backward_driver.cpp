// Backward of a call: splits keys over threads, sums gradients of several branches, fills rows that nothing covers.
#include <new>

#include "kernels/cpu/drive.h"
#include "kernels/cpu/work.h"

namespace longspan::cpu {
namespace {

using strands::ceil_divide;

constexpr std::int64_t kAllHeads = std::numeric_limits<std::int64_t>::max();
// Strands are cut until there are this many parts (if their length allows). A number of the problem alone: the cut
// decides the order in which dq is summed, so it must not look at the threads.
constexpr double kPartsWanted = 64;

/// Part of the queries that are a call's own. A rank of a ring has some of them, and only segments with queries have
/// tasks.
double own_share(const Problem& problem) {
  return problem.has_piece_gradients && problem.tokens > 0
             ? std::min(1.0, static_cast<double>(problem.query_rows) / static_cast<double>(problem.tokens))
             : 1.0;
}

/// Keys of one task.
std::int64_t task_keys(const Engine& engine, const Plan& plan) {
  const Problem& problem = plan.problem();
  const std::int64_t tile = engine.backward_key_tile;
  std::int64_t keys = std::max(engine.backward_key_budget / problem.head_dim / tile, std::int64_t{2}) * tile;
  // Gradients of a rank equal one device's to rounding, whatever the cut. Half as many tasks must do: each reads all
  // queries of its strand, and the keys of a rank have few of them. (A rank alone on more than 32 cores may leave some
  // idle.)
  const double share = own_share(problem);
  const auto tasks = [&] {
    double count = 0;
    for (const BranchPlan& branch : plan.branches()) {
      count += static_cast<double>(problem.batch * branch.head_count) *
               std::max(1.0, static_cast<double>(branch.segments(problem.tokens)) * share) *
               std::max(1.0, static_cast<double>(branch.longest_strand(problem.tokens)) / static_cast<double>(keys));
    }
    return count;
  };
  const double wanted = share < 1.0 ? kPartsWanted / 2 : kPartsWanted;
  while (keys > 4 * tile && tasks() < wanted) keys = (keys / 2 + tile - 1) / tile * tile;
  return keys;
}

Section backward_section(const Engine& engine, const Plan& plan, std::int64_t branch_index) {
  const BranchPlan& branch = plan.branches()[static_cast<std::size_t>(branch_index)];
  const Problem& problem = plan.problem();
  const std::int64_t rows = branch.longest_strand(problem.tokens);
  Section section;
  section.branch = branch_index;
  section.segments = branch.segments(problem.tokens);
  section.block_rows = task_keys(engine, plan);
  section.blocks = std::max<std::int64_t>(1, ceil_divide(rows, section.block_rows));
  section.strands_per_task = strands_together(plan, section, own_share(problem));
  if (section.blocks > 1) section.tickets = ceil_divide(rows, kTicketRows);
  return section;
}

/// Whether some strand is cut, so that several tasks add to the same rows of dq.
bool strands_cut(const Engine& engine, const Plan& plan) {
  for (std::size_t branch = 0; branch < plan.branches().size(); ++branch) {
    if (backward_section(engine, plan, static_cast<std::int64_t>(branch)).blocks > 1) return true;
  }
  return false;
}

struct BackwardWorkspace {
  FloatRows dq, dk, dv, delta;
  std::atomic<std::uint32_t>* tickets;
  std::int64_t ticket_count = 0;
  std::byte* threads;
  std::size_t bytes_per_thread;

  BackwardWorkspace(Arena& workspace, const Engine& engine, const Plan& plan, int thread_count) {
    const Problem& p = plan.problem();
    const bool narrow = p.dtype != DType::f32;
    if (narrow && (plan.merges_branches() || strands_cut(engine, plan)))
      dq = take_rows(workspace, p.batch, p.query_rows, p.heads, p.head_dim);
    if (narrow && kv_heads_shared(plan) && !p.has_piece_gradients) {
      dk = take_rows(workspace, p.batch, p.tokens, p.kv_heads, p.head_dim);
      dv = take_rows(workspace, p.batch, p.tokens, p.kv_heads, p.head_dim);
    }
    if (plan.options().detached_mix) delta = take_rows(workspace, p.batch, p.query_rows, p.heads, 1);
    for (std::size_t branch = 0; branch < plan.branches().size(); ++branch) {
      const Section section = backward_section(engine, plan, static_cast<std::int64_t>(branch));
      ticket_count += section.all_tickets(plan);
    }
    tickets = workspace.take<std::atomic<std::uint32_t>>(ticket_count);
    bytes_per_thread = engine.backward_bytes(p.head_dim, task_keys(engine, plan));
    if (plan.options().detached_mix)
      bytes_per_thread = std::max(bytes_per_thread, forward_thread_bytes(engine, plan, thread_count));
    threads = workspace.take(static_cast<std::int64_t>(bytes_per_thread) * thread_count);
  }
};

/// Whether a query of the call lies in the task's strand.
bool any_query(const BackwardShared& shared, const StrandTask& task) {
  for (const RowRange& range : shared.ranges) {
    if (query_run(task.strand, range, 0).count > 0) return true;
  }
  return false;
}

void run_sections(const Engine& engine, const BackwardShared& shared, std::int64_t first, std::int64_t last,
                  int threads, const BackwardWorkspace& memory, const LoopControl& control) {
  const Plan& plan = shared.plan;
  std::int64_t total = 0, tickets_before = 0;
  const auto section_of = [&](std::int64_t branch) { return backward_section(engine, plan, branch); };
  for (std::int64_t branch = first; branch < last; ++branch) total += section_of(branch).tasks(plan);
  for (std::int64_t branch = 0; branch < first; ++branch) {
    const Section section = section_of(branch);
    tickets_before += section.all_tickets(plan);
  }
  parallel_for(threads, total, control, [&](int worker, std::int64_t item) {
    std::int64_t branch = first, first_ticket = tickets_before;
    Section section = section_of(branch);
    for (std::int64_t tasks; item >= (tasks = section.tasks(plan)); section = section_of(++branch)) {
      item -= tasks;
      first_ticket += section.all_tickets(plan);
    }
    const TaskPlace place = locate(plan, section, item);
    const auto find = [&](std::int64_t strand, BackwardTask& task) {
      if (!fill_strand(shared, section, place, strand, kAllHeads, task)) return false;
      task.block = place.block;
      task.key_begin = place.block * section.block_rows;
      task.key_end = std::min(task.key_begin + section.block_rows, task.strand.count);
      if (task.key_begin >= task.strand.count) return false;
      // With keys in pieces most strands may have no query here; every task of such a strand is left out alike.
      if (plan.problem().has_piece_gradients && !any_query(shared, task)) return false;
      const std::int64_t ordinal = place.entry * section.strands(plan) + strand;
      task.tickets = section.blocks > 1 ? memory.tickets + first_ticket + ordinal * section.tickets : nullptr;
      return true;
    };
    run_strands<BackwardTask>(place, find, [&](const BackwardTask& task) {
      engine.backward(shared, task, memory.threads + memory.bytes_per_thread * static_cast<std::size_t>(worker));
    });
  });
}

/// Zeros in dk and dv where no strand has the row; every other row is written by the one task that owns it.
void clear_uncovered_keys(const BackwardShared& shared, int threads, const LoopControl& control) {
  const Plan& plan = shared.plan;
  const Problem& problem = plan.problem();
  const std::int64_t group = problem.heads / problem.kv_heads;
  const std::size_t bytes = static_cast<std::size_t>(problem.head_dim * size_of(problem.dtype));
  const auto covered = [&](std::int64_t length, std::int64_t kv_head, std::int64_t position) {
    if (position >= length) return false;
    for (const BranchPlan& branch : plan.branches()) {
      if (!branch.active(length)) continue;
      const std::int64_t first = std::max(kv_head * group, branch.head_begin);
      const std::int64_t last = std::min((kv_head + 1) * group, branch.head_begin + branch.head_count);
      if (first < last && branch.dilation == 1) return true;
      for (std::int64_t head = first; head < last; ++head) {
        if (branch.covers(head, position)) return true;
      }
    }
    return false;
  };
  sweep(problem.batch, problem.tokens, problem.kv_heads, threads, control,
        [&](std::int64_t entry, std::int64_t row, std::int64_t kv_head) {
          if (covered(shared.length(entry), kv_head, row)) return;
          std::memset(row_place(shared.dk, entry, row, kv_head), 0, bytes);
          std::memset(row_place(shared.dv, entry, row, kv_head), 0, bytes);
        });
}

void clear_sums(const FloatRows& sums, std::int64_t rows, std::int64_t heads, const Problem& problem, int threads,
                const LoopControl& control) {
  sweep(problem.batch, rows, heads, threads, control, [&](std::int64_t entry, std::int64_t row, std::int64_t head) {
    std::memset(sums.at(entry, row, head), 0, static_cast<std::size_t>(problem.head_dim) * sizeof(float));
  });
}

void convert_sums(const Engine& engine, const TensorView& view, const FloatRows& sums, int threads,
                  const LoopControl& control) {
  sweep(view.batch(), view.rows(), view.heads(), threads, control,
        [&](std::int64_t entry, std::int64_t row, std::int64_t head) {
          engine.store_row(view.dtype, row_place(view, entry, row, head), sums.at(entry, row, head), 1.0f,
                           view.columns());
        });
}

}  // namespace

std::size_t backward_workspace(const Engine& engine, const Plan& plan, int threads) {
  Arena workspace;
  BackwardWorkspace(workspace, engine, plan, threads);
  return workspace.used();
}

void run_backward(const Engine& engine, const BackwardArguments& a) {
  const Problem& problem = a.plan.problem();
  Arena workspace(a.workspace);
  const BackwardWorkspace memory(workspace, engine, a.plan, a.threads);
  for (std::int64_t i = 0; i < memory.ticket_count; ++i) new (memory.tickets + i) std::atomic<std::uint32_t>(0);
  const bool narrow = problem.dtype != DType::f32;
  BackwardShared shared(a.plan, a.call, a.ranges, a.q, a.k, a.v);
  shared.out = a.out;
  shared.lse = a.lse;
  shared.dout = a.dout;
  shared.dq = a.dq;
  shared.dk = a.dk;
  shared.dv = a.dv;
  shared.add_queries = a.plan.merges_branches();
  shared.add_keys = kv_heads_shared(a.plan);
  shared.dq_sums = narrow ? memory.dq : rows_of(a.dq);
  if (!problem.has_piece_gradients) {
    shared.dk_sums = narrow ? memory.dk : rows_of(a.dk);
    shared.dv_sums = narrow ? memory.dv : rows_of(a.dv);
  }
  shared.delta = memory.delta;

  LoopControl control{a.call.cancel, &a.call.progress, 0.0, 0.02};
  if (shared.add_queries) clear_sums(shared.dq_sums, problem.query_rows, problem.heads, problem, a.threads, control);
  if (problem.has_piece_gradients) {
    // The caller's rows are added to.
  } else if (shared.add_keys) {
    clear_sums(shared.dk_sums, problem.tokens, problem.kv_heads, problem, a.threads, control);
    clear_sums(shared.dv_sums, problem.tokens, problem.kv_heads, problem, a.threads, control);
  } else {
    clear_uncovered_keys(shared, a.threads, control);
  }
  const std::int64_t branches = static_cast<std::int64_t>(a.plan.branches().size());
  const bool apart = shared.add_queries || shared.add_keys || a.plan.options().detached_mix;
  const std::int64_t steps = apart ? branches : 1;
  for (std::int64_t step = 0; step < steps; ++step) {
    control.progress_begin = control.progress_end;
    control.progress_end = 0.02 + 0.95 * static_cast<double>(step + 1) / static_cast<double>(steps);
    if (memory.delta.data) {
      LoopControl deltas = control;
      deltas.progress_end = control.progress_begin = (control.progress_begin + control.progress_end) / 2;
      run_branch_deltas(engine, a, step, memory.delta, memory.threads, memory.bytes_per_thread, deltas);
    }
    run_sections(engine, shared, apart ? step : 0, apart ? step + 1 : branches, a.threads, memory, control);
  }
  control.progress_begin = control.progress_end;
  control.progress_end = 1.0;
  if (memory.dk.data) {
    convert_sums(engine, a.dk, memory.dk, a.threads, control);
    convert_sums(engine, a.dv, memory.dv, a.threads, control);
  }
  finish_rows(engine, a.dq, a.lse, memory.dq, a.threads, control);  // whether a branch covers a row or not
}

}  // namespace longspan::cpu
