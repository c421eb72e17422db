// Rows that no branch covers: out = 0 and lse = -inf.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"

namespace longspan::cuda {

inline constexpr int kWarpThreads = 32;

/// Those among the rows of an item, by warp `warp` of the `warps` that share it.
template <class T>
__device__ __forceinline__ void fill_uncovered(const Launch& a, const Item& item, int warp, int warps) {
  const DeviceRange& range = a.ranges[item.range];
  const int length = a.length(item.entry), lane = threadIdx.x % kWarpThreads;
  for (int block = warp; block < kFillRows / kWarpThreads; block += warps) {
    const int first = item.tile * kFillRows + block * kWarpThreads, local = first + lane;
    bool uncovered = false;
    if (local < range.count) {
      const int position = range.start + local;
      uncovered = position >= length || !a.covered(item.head, position, length, 0, a.branch_count);
      if (uncovered && a.lse) a.lse[a.lse_offset(item.entry, range.first_row + local, item.head)] = -LONGSPAN_INFINITY;
    }
    const unsigned mask = __ballot_sync(~0u, uncovered);
    if (mask == 0) continue;
    T* const out = reinterpret_cast<T*>(a.out.data) + a.out.offset(item.entry, range.first_row + first, item.head);
    const int elements = a.aligned ? 16 / sizeof(T) : 1, pieces = a.columns / elements;
    for (int i = lane; i < kWarpThreads * pieces; i += kWarpThreads) {
      const int row = i / pieces, piece = i - row * pieces;
      if (!(mask >> row & 1)) continue;
      T* const target = out + row * a.out.row + piece * elements;
      if (a.aligned) *reinterpret_cast<uint4*>(target) = make_uint4(0, 0, 0, 0);
      else *target = from_float<T>(0.0f);
    }
  }
}

}  // namespace longspan::cuda
