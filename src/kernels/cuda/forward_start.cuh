// Chooses the forward instantiation: head dims as with_head_dim has them, 48 and 96 for 16-bit types only. Block masks
// have lean instantiations of their own as lean_lists says, and run with features otherwise. What is lean and has no
// lists does not close sums, or does where there are long strands.
#pragma once

#include "kernels/cuda/forward_mma.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/start.cuh"

namespace longspan::cuda {

template <class Math>
cudaError_t start_forward(const Launch& launch, bool features, cudaStream_t stream) {
  const auto run = [&]<int kColumns, bool kFeatures, bool kLists = kFeatures, bool kCrowded = false>() {
    const auto run_shape = [&]<bool kCloses>() {
      using Shape = ForwardShape<Math, kColumns, kFeatures, kLists, kCrowded, kCloses>;
      using Tile = ForwardTile<Shape>;
      static_assert(Tile::kRows == tile_rows(kWide<Math>, kColumns));
      static_assert(Tile::kSharedBytes <= forward_shared_bytes(kWide<Math>, kColumns));
      return start<&forward_mma<Shape>>(launch.schedule.items, Tile::kThreads, Tile::kSharedBytes, stream, launch);
    };
    if constexpr (!kFeatures && !kLists) {
      if (!launch.scratch.totals) return run_shape.template operator()<false>();
    }
    return run_shape.template operator()<true>();
  };
  if constexpr (!kWide<Math>) {
    if (lean_lists(launch, features))
      return launch.tensors.columns <= 64 ? run.template operator()<64, false, true>()
                                          : run.template operator()<128, false, true>();
    if (crowded(false, launch, features)) return run.template operator()<64, false, false, true>();
  }
  return with_head_dim<!kWide<Math>, 256>(launch.tensors.columns, features || launch.schedule.listed, run);
}

}  // namespace longspan::cuda
