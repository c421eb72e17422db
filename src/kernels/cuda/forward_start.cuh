// Chooses the forward instantiation: for 16-bit types head dims up to 48, 64, 96 and 128 lean, and up to 64, 128 and
// 256 with every feature; for float32 64 and 128 lean, the same three with every feature.
#pragma once

#include "kernels/cuda/forward_mma.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/start.cuh"

namespace longspan::cuda {

template <class Math>
cudaError_t start_forward(const Launch& launch, bool features, cudaStream_t stream) {
  const auto run = [&]<int kColumns, bool kFeatures>() {
    using Shape = ForwardShape<Math, kColumns, kFeatures>;
    using Tile = ForwardTile<Shape>;
    static_assert(Tile::kRows == tile_rows(kWide<Math>, kColumns));
    static_assert(Tile::kSharedBytes <= forward_shared_bytes(kWide<Math>, kColumns));
    return start<&forward_mma<Shape>>(launch.items, Tile::kThreads, Tile::kSharedBytes, stream, launch);
  };
  if (!features) {
    if constexpr (!kWide<Math>) {
      if (launch.columns <= 48) return run.template operator()<48, false>();
      if (launch.columns > 64 && launch.columns <= 96) return run.template operator()<96, false>();
    }
    if (launch.columns <= 64) return run.template operator()<64, false>();
    if (launch.columns <= 128) return run.template operator()<128, false>();
  }
  if (launch.columns <= 64) return run.template operator()<64, true>();
  if (launch.columns <= 128) return run.template operator()<128, true>();
  return run.template operator()<256, true>();
}

}  // namespace longspan::cuda
