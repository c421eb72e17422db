// Rows that no branch covers: out = 0 and lse = -inf.
#pragma once

#include "kernels/cuda/arithmetic.cuh"
#include "kernels/cuda/launch.h"

namespace longspan::cuda {

inline constexpr int kWarpThreads = 32;

/// One bit for each of the 32 rows of a block of an item that no branch covers.
__device__ __forceinline__ unsigned uncovered_rows(const Launch& a, const Item& item, int block) {
  const DeviceRange& range = a.schedule.ranges[item.range];
  const int length = a.tensors.length(item.entry);
  const int local = item.tile * kFillRows + block * kWarpThreads + static_cast<int>(threadIdx.x) % kWarpThreads;
  bool uncovered = false;
  if (local < range.count) {
    const int position = range.start + local;
    uncovered = position >= length || !a.schedule.covered(item.head, position, length, 0, a.schedule.branch_count);
  }
  return __ballot_sync(~0u, uncovered);
}

/// Zeros to those of the 32 rows from `first` on that have a bit, by one warp.
template <class T>
__device__ __forceinline__ void zero_rows(const Launch& a, const Rows& rows, int entry, std::int64_t first, int head,
                                          unsigned mask) {
  T* const data = reinterpret_cast<T*>(rows.data) + rows.offset(entry, first, head);
  const int lane = threadIdx.x % kWarpThreads;
  const int elements = a.tensors.aligned ? 16 / sizeof(T) : 1, pieces = a.tensors.columns / elements;
  for (int i = lane; i < kWarpThreads * pieces; i += kWarpThreads) {
    const int row = i / pieces, piece = i - row * pieces;
    if (!(mask >> row & 1)) continue;
    T* const target = data + row * rows.row + piece * elements;
    if (a.tensors.aligned) *reinterpret_cast<uint4*>(target) = make_uint4(0, 0, 0, 0);
    else *target = from_float<T>(0.0f);
  }
}

/// Those among the rows of an item, by warp `warp` of the `warps` that share it.
template <class T>
__device__ __forceinline__ void fill_uncovered(const Launch& a, const Item& item, int warp, int warps) {
  const int lane = threadIdx.x % kWarpThreads;
  for (int block = warp; block < kFillRows / kWarpThreads; block += warps) {
    const unsigned mask = uncovered_rows(a, item, block);
    if (mask == 0) continue;
    const std::int64_t first = a.schedule.ranges[item.range].first_row + item.tile * kFillRows + block * kWarpThreads;
    if (a.tensors.lse.data && mask >> lane & 1)
      a.tensors.lse.at(item.entry, first + lane, item.head) = -LONGSPAN_INFINITY;
    zero_rows<T>(a, a.tensors.out, item.entry, first, item.head, mask);
  }
}

}  // namespace longspan::cuda
