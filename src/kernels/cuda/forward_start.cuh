// Chooses the forward instantiation: head dims as with_head_dim has them, 48 and 96 for 16-bit types only, and those of
// with_one_of. What has neither options nor lists closes sums only where there are long strands.
#pragma once

#include "kernels/cuda/forward_mma.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/start.cuh"

namespace longspan::cuda {

template <class Math>
cudaError_t start_forward(const Launch& launch, bool features, cudaStream_t stream) {
  const auto run = [&]<int kColumns, bool kRuled, bool kLists = kRuled, bool kCrowded = false>() {
    const auto run_shape = [&]<bool kCloses>() {
      using Shape = ForwardShape<Math, kColumns, PairsOf<kRuled>, kLists, kCrowded, kCloses>;
      using Tile = ForwardTile<Shape>;
      static_assert(Tile::kRows == tile_rows(kWide<Math>, kColumns));
      static_assert(Tile::kSharedBytes <= forward_shared_bytes(kWide<Math>, kColumns));
      return start<&forward_mma<Shape>>(launch.schedule.items, Tile::kThreads, Tile::kSharedBytes, stream, launch);
    };
    if constexpr (!kRuled && !kLists) {
      if (!launch.scratch.totals) return run_shape.template operator()<false>();
    }
    return run_shape.template operator()<true>();
  };
  if constexpr (!kWide<Math>) {
    if (crowded(false, launch, features)) return run.template operator()<64, false, false, true>();
    if (launch.tensors.columns <= 128 && launch.schedule.listed != features) return with_one_of(launch, features, run);
  }
  return with_head_dim<!kWide<Math>, 256>(launch.tensors.columns, features || launch.schedule.listed, run);
}

}  // namespace longspan::cuda
