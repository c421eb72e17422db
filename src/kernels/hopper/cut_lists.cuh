// Lists of a block mask that are cut into several items, so that rows that see everything do not keep one block busy
// long after the others: each part leaves maxima, sums and values of its rows in memory, and another kernel joins them.
#pragma once

#include "kernels/hopper/scheduler.cuh"
#include "kernels/hopper/softmax.cuh"

namespace longspan::hopper {

/// Whether a row of an item's tile is of its strand and range.
template <class S>
__device__ __forceinline__ bool exists(const typename S::Item& task, int row) {
  if constexpr (S::kLists) return row < task.rows && row >= task.first_row;
  else return row < task.rows;
}
/// Whether the item writes it.
template <class S>
__device__ __forceinline__ bool writes(const typename S::Item& task, int row) {
  if constexpr (S::kLists) return exists<S>(task, row) && !task.cut;
  else return exists<S>(task, row);
}

/// What a consumer thread found for its two rows, in memory.
template <class S>
struct PartOfRows {
  float* own;
  __device__ __forceinline__ PartOfRows(const HopperLaunch& a, std::int64_t slot, int group)
      : own(a.parts + (slot * S::kGroups + group) * (S::kTotals * kGroupThreads) + threadIdx.x % kGroupThreads) {}
  __device__ __forceinline__ float& largest(int half) const { return own[half * kGroupThreads]; }
  __device__ __forceinline__ float& sum(int half) const { return own[(2 + half) * kGroupThreads]; }
  __device__ __forceinline__ float& value(int j) const { return own[(4 + j) * kGroupThreads]; }
};
/// The first of a thread's rows in a tile.
__device__ __forceinline__ int row_of_thread(int group) {
  const int thread = threadIdx.x % kGroupThreads;
  return group * kGroupRows + thread / kWarpThreads * 16 + thread % kWarpThreads / 4;
}

/// Items of several ranges may have rows of one tile, so each leaves only its own.
template <class S, class Softmax>
__device__ __forceinline__ void store_part(const HopperLaunch& a, const typename S::Item& task, int group,
                                           const Softmax& softmax, const float (&out)[S::kColumns / 2],
                                           const float (&factor)[2]) {
  const PartOfRows<S> part(a, task.slot, group);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!exists<S>(task, row_of_thread(group) + 8 * half)) continue;
    part.largest(half) = softmax.found[half];
    part.sum(half) = softmax.sum[half];
#pragma unroll
    for (int j = 2 * half; j < S::kColumns / 2; j += 4) {
      part.value(j) = out[j] * factor[half];
      part.value(j + 1) = out[j + 1] * factor[half];
    }
  }
}

/// Joins the parts of a tile, in order, by as many threads as wrote them.
template <class S>
__device__ __forceinline__ void join_tile(const HopperLaunch& a, const typename S::Item& task, int parts) {
  using T = typename S::Element;
  const int group = threadIdx.x / kGroupThreads, column = threadIdx.x % 4 * 2;
  const cuda::Tensors& tensors = a.base.tensors;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_of_thread(group) + 8 * half;
    if (!exists<S>(task, row)) continue;
    float top = -LONGSPAN_INFINITY, sum = 0.0f, out[S::kColumns / 4];
    for (int p = 0; p < parts; ++p) top = fmaxf(top, PartOfRows<S>(a, task.slot + p, group).largest(half));
#pragma unroll
    for (int j = 0; j < S::kColumns / 4; ++j) out[j] = 0.0f;
    for (int p = 0; p < parts; ++p) {
      const PartOfRows<S> part(a, task.slot + p, group);
      const float factor = fast_exp2(part.largest(half) - finite(top));
      sum = fmaf(part.sum(half), factor, sum);
#pragma unroll
      for (int j = 0; j < S::kColumns / 4; ++j) out[j] = fmaf(part.value(j / 2 * 4 + 2 * half + j % 2), factor, out[j]);
    }
    const std::int64_t q_row = task.q_row + static_cast<std::int64_t>(row) * task.stride;
    const float scale = sum == 0.0f ? 0.0f : __fdividef(a.base.rules.output_scale * a.base.rules.keep_factor, sum);
    T* const place = reinterpret_cast<T*>(tensors.out.data) + tensors.out.offset(task.entry, q_row, task.head);
#pragma unroll
    for (int j = 0; j < S::kColumns / 4; j += 2) {
      if (4 * j + column < tensors.columns)
        *reinterpret_cast<std::uint32_t*>(place + 4 * j + column) = cuda::pack<T>(out[j] * scale, out[j + 1] * scale);
    }
    if (tensors.lse.data && threadIdx.x % 4 == 0) {
      tensors.lse.at(task.entry, q_row, task.head) =
          sum == 0.0f ? -LONGSPAN_INFINITY : (finite(top) + __log2f(sum)) * cuda::kLn2;
    }
  }
}

/// Of the tile whose first part an item is.
__device__ __forceinline__ int count_parts(const HopperLaunch& a, const cuda::Item& item) {
  const cuda::BlockLists& lists = a.base.schedule.lists[item.branch];
  const cuda::BlockPlace* const first = &lists.place(item.entry, item.head, item.tile);
  int parts = 1;
  while (item.tile + parts < lists.place_count && first[parts].tile == first->tile) ++parts;
  return parts;
}

/// After the forward: blocks of two groups look for first parts, a thread each, and join what they found together.
template <class S>
__global__ void __launch_bounds__(S::kGroups* kGroupThreads) join_parts(const __grid_constant__ HopperLaunch a) {
  __shared__ typename S::Tasks tasks;
  __shared__ unsigned found[S::kGroups * kGroupThreads];
  __shared__ unsigned count;
  __shared__ int parts;
  const Scheduler<S> scheduler{a, Memory<S>{0}, tasks, 0};
  for (unsigned first = blockIdx.x * blockDim.x; first < a.items; first += gridDim.x * blockDim.x) {
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    if (const unsigned flat = first + threadIdx.x; flat < a.items) {
      const cuda::Item item = a.base.schedule.decode(flat);
      const cuda::BlockLists& lists = a.base.schedule.lists[item.branch];
      if (lists.places) {
        const cuda::BlockPlace& place = lists.place(item.entry, item.head, item.tile);
        if (place.tile >= 0 && place.slot > 0 && scheduler.is_first_part(&place, item.tile))
          found[atomicAdd(&count, 1u)] = flat;
      }
    }
    __syncthreads();
    for (unsigned i = 0; i < count; ++i) {
      if (threadIdx.x == 0) {
        scheduler.describe(found[i], tasks[0][0]);
        parts = count_parts(a, a.base.schedule.decode(found[i]));
      }
      __syncthreads();
      if (tasks[0][0].tiles > 0) join_tile<S>(a, tasks[0][0], parts);
      __syncthreads();
    }
  }
}

}  // namespace longspan::hopper
