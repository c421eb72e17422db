// Runs the tasks of a call on the thread pool, and everything around them that no instruction set needs.
#pragma once

#include "kernels/cpu/engine.h"
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

/// Parts of a call's workspace, each aligned to a cache line; without memory it only counts.
class Workspace {
 public:
  explicit Workspace(std::byte* memory) : memory_(memory) {}
  std::byte* take(std::size_t bytes) {
    std::byte* const part = memory_ ? memory_ + used_ : nullptr;
    used_ += (bytes + 63) / 64 * 64;
    return part;
  }
  /// A contiguous [batch, rows, heads, columns] of floats.
  FloatRows rows(std::int64_t batch, std::int64_t rows, std::int64_t heads, std::int64_t columns) {
    float* const data =
        reinterpret_cast<float*>(take(static_cast<std::size_t>(batch * rows * heads * columns) * sizeof(float)));
    return {data, rows * heads * columns, heads * columns, columns};
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* memory_;
  std::size_t used_ = 0;
};

/// A float32 tensor as rows to sum in.
inline FloatRows rows_of(const TensorView& view) {
  return {static_cast<float*>(view.data), view.strides[0], view.strides[1], view.strides[2]};
}

/// Rows of a task in the forward, and bytes per thread; the split never changes bits, so it may look at `threads`.
std::int64_t forward_task_rows(const Engine& engine, const Plan& plan, int threads);
std::size_t forward_thread_bytes(const Engine& engine, const Plan& plan, int threads);

}  // namespace longspan::cpu
