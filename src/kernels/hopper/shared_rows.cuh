// Rows that branches share: a producer warp loads the state that earlier branches left of an item's rows (forward.cuh).
#pragma once

#include "kernels/hopper/shape.cuh"

namespace longspan::hopper {

template <class S>
struct SharedRows {
  const HopperLaunch& a;
  const Memory<S> memory;
  typename S::Tasks& tasks;
  typename S::Shares& shares;

  /// Whether earlier (1) and later (2) branches cover rows of a task: two bits for each of a thread's, which are every
  /// 32nd. They are equal steps apart, so that only the first needs divisions; those that all threads need are done by
  /// one of them for each branch.
  __device__ __forceinline__ unsigned other_branches(const typename S::Item& task, int lane) const {
    static_assert(cuda::kMaxBranches <= kWarpThreads);
    const unsigned step = static_cast<unsigned>(kWarpThreads) * task.stride;
    const cuda::DeviceBranch& mine = a.base.schedule.branches[min(lane, a.base.schedule.branch_count - 1)];
    const unsigned my_phase = mine.phase(task.head), my_advance = step % mine.segment;
    const unsigned my_turn = my_advance % mine.dilation, my_loss = static_cast<unsigned>(mine.segment) % mine.dilation;
    unsigned left = __ballot_sync(~0u, lane < a.base.schedule.branch_count && lane != task.branch &&
                                           mine.owns(task.head) && mine.active(task.length));
    unsigned others = 0;
    for (; left != 0; left &= left - 1) {
      const int b = __ffs(left) - 1;
      const unsigned phase = __shfl_sync(~0u, my_phase, b), advance = __shfl_sync(~0u, my_advance, b);
      const unsigned turn = __shfl_sync(~0u, my_turn, b), loss = __shfl_sync(~0u, my_loss, b);
      const unsigned segment = a.base.schedule.branches[b].segment, dilation = a.base.schedule.branches[b].dilation;
      unsigned place = (static_cast<unsigned>(task.position) + lane * static_cast<unsigned>(task.stride)) % segment;
      unsigned rest = place % dilation;
#pragma unroll
      for (int i = 0; i < S::kRows / kWarpThreads; ++i) {
        if (rest == phase) others |= (b < task.branch ? 1u : 2u) << 2 * i;
        place += advance;
        rest += turn;
        if (rest >= dilation) rest -= dilation;
        if (place >= segment) {
          place -= segment;
          rest += rest < loss ? dilation - loss : 0 - loss;
        }
      }
    }
    const int own_rows = max((task.rows - lane + kWarpThreads - 1) / kWarpThreads, 0);
    others &= (1u << 2 * own_rows) - 1;
    if constexpr (S::kLists) {  // rows before the query range
      const int before = max((task.first_row - lane + kWarpThreads - 1) / kWarpThreads, 0);
      others &= ~0u << 2 * before;
    }
    return others;
  }
  /// Waits until the earlier branches of a task's rows are done; each thread waits for one of them.
  __device__ __forceinline__ void await_earlier(const Task& task, int lane) const {
    static_assert(cuda::kMaxWork <= kWarpThreads);
    if (lane < a.base.schedule.work_count) {
      const cuda::Work& work = a.base.schedule.work[lane];
      if (work.branch >= 0 && work.branch < task.branch && work.range == task.range) {
        const unsigned expected = static_cast<unsigned>(work.segments * work.tiles);
        const unsigned* const counter = a.finished(work.branch, task.range, task.entry, task.head);
        while (cuda::load_acquire(counter) < expected) __nanosleep(64);
      }
    }
    __syncwarp();
  }
  /// Loads the state of each task's rows while consumers compute the task.
  __device__ __forceinline__ void run(int lane) const {
    constexpr int kEach = S::kRows / kWarpThreads;  // rows of a thread
    for (std::uint32_t number = 0;; ++number) {
      const std::uint32_t slot = number % kTaskSlots, full = memory.state_full(slot);
      wait(memory.task_full(slot), number / kTaskSlots & 1);
      const typename S::Item& task = tasks[slot][0];
      if (task.tiles < 0) return;
      const unsigned others = other_branches(task, lane);
      int count = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) count += __popc(__ballot_sync(~0u, others >> 2 * i & 1));
      await_earlier(task, lane);
      // There is one buffer: consumers must be done with the task before.
      if (number > 0) wait(memory.task_free((number - 1) % kTaskSlots), (number - 1) / kTaskSlots & 1);
      fence_memory();  // other blocks wrote the state and consumers read the buffer; TMA does both now
      std::int64_t packed = a.base.tensors.packed_row(task.entry, task.q_row + lane * task.stride, task.head);
#pragma unroll 2
      for (int i = 0, row = lane; i < kEach; ++i, row += kWarpThreads, packed += kWarpThreads * task.stride) {
        float2 found = make_float2(-LONGSPAN_INFINITY, 0.0f);
        if (others >> 2 * i & 1) {
          if constexpr (S::kHoldsState)
            load_bytes(memory.state(row), a.base.scratch.state + packed * a.base.tensors.columns,
                       a.base.tensors.columns * 4, full);
          found = __ldcg(reinterpret_cast<const float2*>(a.base.scratch.state_sums) + packed);
        }
        shares.found[row] = found;
        shares.others[row] = others >> 2 * i & 3;
      }
      if (lane == 0 && S::kHoldsState) arrive_and_expect(full, count * a.base.tensors.columns * 4);
      else arrive(full);
    }
  }
};

}  // namespace longspan::hopper
