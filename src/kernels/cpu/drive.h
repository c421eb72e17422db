// Runs the tasks of a call on the thread pool, and everything around them that no instruction set needs.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/cpu/engine.h"
#include "memory/arena.h"
#include "plan/strands.h"
#include "util/parallel.h"

namespace longspan::cpu {

Verdict can_run(const Engine& engine, const Plan& plan, Pass pass);
std::size_t workspace_bytes(const Engine& engine, const Plan& plan, Pass pass, int threads);
std::size_t forward_workspace(const Engine& engine, const Plan& plan, int threads);
std::size_t backward_workspace(const Engine& engine, const Plan& plan, int threads);
void run_forward(const Engine& engine, const ForwardArguments& arguments);
void run_backward(const Engine& engine, const BackwardArguments& arguments);

/// detached_mix: for each row of one branch, output_scale * <dout, the branch's own result>.
void run_branch_deltas(const Engine& engine, const BackwardArguments& arguments, std::int64_t branch,
                       const FloatRows& delta, std::byte* memory, std::size_t bytes_per_thread,
                       const LoopControl& control);

/// A contiguous [batch, rows, heads, columns] of floats.
inline FloatRows take_rows(Arena& workspace, std::int64_t batch, std::int64_t rows, std::int64_t heads,
                           std::int64_t columns) {
  return {workspace.take<float>(batch * rows * heads * columns), rows * heads * columns, heads * columns, columns};
}

/// A float32 tensor as rows to sum in.
inline FloatRows rows_of(const TensorView& view) {
  return {static_cast<float*>(view.data), view.strides[0], view.strides[1], view.strides[2]};
}

/// body(entry, row, head) over all rows, in parallel over chunks of rows of one head.
template <class Body>
void sweep(std::int64_t batch, std::int64_t rows, std::int64_t heads, int threads, const LoopControl& control,
           Body&& body) {
  constexpr std::int64_t kRowsPerSweep = 256;
  const std::int64_t chunks = strands::ceil_divide(rows, kRowsPerSweep);
  parallel_for(threads, batch * heads * chunks, control, [&](int, std::int64_t item) {
    const std::int64_t chunk = item % chunks, head = item / chunks % heads, entry = item / chunks / heads;
    const std::int64_t end = std::min((chunk + 1) * kRowsPerSweep, rows);
    for (std::int64_t row = chunk * kRowsPerSweep; row < end; ++row) body(entry, row, head);
  });
}

/// The last step of a pass: a row without keys is 0, others leave the sums they are in, if they are in any.
inline void finish_rows(const Engine& engine, const TensorView& out, const ConstTensorView& lse, const FloatRows& sums,
                        int threads, const LoopControl& control) {
  const std::size_t bytes = static_cast<std::size_t>(out.columns() * size_of(out.dtype));
  sweep(out.batch(), out.rows(), out.heads(), threads, control,
        [&](std::int64_t entry, std::int64_t row, std::int64_t head) {
          std::byte* const target = row_place(out, entry, row, head);
          if (*lse.at<float>(entry, row, head) == -std::numeric_limits<float>::infinity())
            std::memset(target, 0, bytes);
          else if (sums.data) engine.store_row(out.dtype, target, sums.at(entry, row, head), 1.0f, out.columns());
        });
}

/// Rows of a task in the forward, and bytes per thread; the split never changes bits, so it may look at `threads`.
std::int64_t forward_task_rows(const Engine& engine, const Plan& plan, int threads);
std::size_t forward_thread_bytes(const Engine& engine, const Plan& plan, int threads);

}  // namespace longspan::cpu
