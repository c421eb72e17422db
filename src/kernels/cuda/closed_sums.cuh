// Sums over long strands. Tensor cores truncate what they add instead of rounding it, so a running sum loses about half
// a unit of its last place with every product. Sums are therefore closed after kRowsOfSum keys (of dk and dv: queries),
// counted from the first tile, and what was closed is added up in float32. A block takes a place for its totals when it
// closes its first sums and gives it back at its end, so their memory is for blocks that run at once, not for rows.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/ptx/ampere.cuh"

namespace longspan::cuda {

/// This thread's totals, kStep floats apart, after all threads have come here with the block's first sums (`first`) or
/// later ones.
__device__ __forceinline__ float* find_totals(const Launch& a, bool first, int& place) {
  if (first) {
    if (threadIdx.x == 0) {
      place = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.scratch.total_count));
      while (atomicExch(a.scratch.total_places + place, 1u) != 0) {
        place = place + 1 == a.scratch.total_count ? 0 : place + 1;
        __nanosleep(64);
      }
      __threadfence();
    }
    __syncthreads();
  }
  return a.scratch.totals + static_cast<std::int64_t>(place) * a.scratch.total_floats + computed_here(threadIdx.x);
}

/// Lets another block have the place; all threads come here after their last use of it.
__device__ __forceinline__ void leave_totals(const Launch& a, int place) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  atomicExch(a.scratch.total_places + place, 0u);
}

}  // namespace longspan::cuda
