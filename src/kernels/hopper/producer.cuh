// The producer of the Hopper forward (see forward.cuh): gives each of its warps work, and zeroes rows that no branch
// covers.
#pragma once

#include "kernels/hopper/loader.cuh"
#include "kernels/hopper/scheduler.cuh"
#include "kernels/hopper/shared_rows.cuh"

namespace longspan::hopper {

template <class S>
struct Producer {
  using T = typename S::Element;
  const HopperLaunch& a;
  const Memory<S> memory;
  typename S::Tasks& tasks;
  typename S::Notes& notes;
  typename S::Shares& shares;
  const int stream;

  /// Writes zeros to the phases that no strand has, box by box; few at a time, because loads go through TMA, too.
  __device__ __forceinline__ void fill_boxes() const {
    const int rows = a.base.tensors.tokens;
#pragma unroll 1
    for (int b = 0; b < a.base.schedule.branch_count; ++b) {
      const cuda::DeviceBranch& branch = a.base.schedule.branches[b];
      const unsigned others = branch.dilation - 1, per_row = branch.head_count * S::kBlocks;
      if (others == 0) continue;
      const unsigned boxes = ((rows + branch.dilation - 1) / branch.dilation + kGroupRows - 1) / kGroupRows;
      const unsigned total = a.base.tensors.batch * boxes * others * per_row;
#pragma unroll 1
      for (unsigned i = blockIdx.x; i < total; i += gridDim.x) {
        const unsigned by_phase = i / per_row, by_box = by_phase / others, entry = by_box / boxes;
        const int column = i - by_phase * per_row, head = branch.head_begin + column / S::kBlocks;
        const int other = by_phase - by_box * others, phase = other + (other >= branch.phase(head));
        store_box_once(&a.out[a.map(b, phase, a.longer_queries[b])], memory.zeros(),
                       {column % S::kBlocks * kBlockColumns, static_cast<int>(by_box - entry * boxes) * kGroupRows,
                        phase, head, static_cast<int>(entry)});
        commit_stores();
        wait_stores_read<2>();
      }
    }
    wait_stores();
  }
  /// Writes lse of the same rows.
  __device__ __forceinline__ void fill_lse(unsigned worker, unsigned workers, int lane) const {
    constexpr int kRun = 1024;
    if (!a.base.tensors.lse.data) return;
#pragma unroll 1
    for (int b = 0; b < a.base.schedule.branch_count; ++b) {
      const cuda::DeviceBranch& branch = a.base.schedule.branches[b];
      const int dilation = branch.dilation, step = kWarpThreads % dilation;
      if (dilation == 1) continue;
      const unsigned runs = (a.base.tensors.tokens + kRun - 1) / kRun,
                     total = runs * branch.head_count * a.base.tensors.batch;
#pragma unroll 1
      for (unsigned i = worker; i < total; i += workers) {
        const unsigned by_head = i / runs, entry = by_head / branch.head_count;
        const int head = branch.head_begin + static_cast<int>(by_head - entry * branch.head_count);
        const int first = static_cast<int>(i - by_head * runs) * kRun, last = min(first + kRun, a.base.tensors.tokens);
        const int phase = branch.phase(head);
        float* const lse = &a.base.tensors.lse.at(entry, 0, head);
        int at = (first + lane) % dilation;
#pragma unroll 1
        for (int row = first + lane; row < last; row += kWarpThreads) {
          if (at != phase) lse[row * a.base.tensors.lse.row] = -LONGSPAN_INFINITY;
          at += step;
          if (at >= dilation) at -= dilation;
        }
      }
    }
  }

  /// Writes zeros to rows that no branch covers, where boxes do not fit; `workers` warps share the work.
  __device__ __forceinline__ void fill_rows(unsigned worker, unsigned workers) const {
#pragma unroll 1
    for (unsigned i = worker; i < a.fill_items; i += workers)
      cuda::fill_uncovered<T>(a.base, a.base.schedule.decode(a.items + i), 0, 1);
  }

  /// What each of a stream's warps does: four of them, or two where a block has two streams.
  __device__ __forceinline__ void run(int warp) const {
    constexpr bool kSecondLoads = S::kMerges || S::kSplitsLoads;
    const int lane = threadIdx.x % kWarpThreads;
    const Loader<S> loader{a, memory, tasks, notes, lane};
    const Scheduler<S> scheduler{a, memory, tasks, stream};
    const bool masks = S::kExtras && a.base.rules.key_mask;
    const unsigned first_fill = kSecondLoads ? 3 : 2, fill_warps = (masks ? 3 : 4) - first_fill;
    if (warp == 0) {
      if (lane == 0 || S::kParts) loader.load();
    } else if (warp == 1) {
      scheduler.run(lane);
      if (S::kStreams > 1 || fill_warps == 0) fill_rows(scheduler.worker(), scheduler.workers());  // nobody else does
    } else if (masks && warp == 3) {
      if constexpr (S::kExtras) loader.mask_keys();
    } else if (S::kSplitsLoads && warp == 2) {
      if constexpr (S::kSplitsLoads) {
        if (lane == 0 || S::kParts) loader.load_listed_values();
      }
    } else if (S::kMerges && warp == 2) {
      if constexpr (S::kMerges) SharedRows<S>{a, memory, tasks, shares}.run(lane);
    } else if (S::kHasZeros && a.fill_boxes) {
      if (warp == 2) fill_lse(blockIdx.x, gridDim.x, lane);
      else if (lane == 0) fill_boxes();
    } else {
      fill_rows((warp - first_fill) * gridDim.x + blockIdx.x, fill_warps * gridDim.x);
    }
  }
};

}  // namespace longspan::hopper
