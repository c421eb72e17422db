// Chooses the backward instantiation: head dims as with_head_dim has them, 48, 96 and 256 for 16-bit types only; block
// masks as in the forward.
#pragma once

#include "kernels/cuda/backward_queries_mma.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/start.cuh"

namespace longspan::cuda {

template <class Math>
inline constexpr int kWidestBackward = kWide<Math> ? 128 : 256;

template <class Math>
cudaError_t start_backward(const Launch& launch, bool features, cudaStream_t stream) {
  const auto run = [&]<int kColumns, bool kFeatures, bool kLists = kFeatures>() {
    using Shape = BackwardShape<Math, kColumns, kFeatures, kLists>;
    using Tile = BackwardTile<Shape>;
    static_assert(Tile::kKeys == tile_rows(kWide<Math>, kColumns));
    static_assert(Tile::kSharedBytes <= backward_shared_bytes(kWide<Math>, kColumns));
    return start<&backward_mma<Shape>>(launch.items, Tile::kThreads, Tile::kSharedBytes, stream, launch);
  };
  if constexpr (!kWide<Math>) {
    const auto run_compact = [&]<bool kFeatures>() {
      using Shape = BackwardShape<Math, 128, kFeatures, kFeatures, true>;
      using Tile = BackwardTile<Shape>;
      static_assert(Tile::kKeys == kCompactKeys && Tile::kSharedBytes <= kCompactBytes);
      return start<&backward_mma<Shape>>(launch.items, Tile::kThreads, Tile::kSharedBytes, stream, launch);
    };
    if (launch.compact)
      return features || launch.listed ? run_compact.template operator()<true>()
                                       : run_compact.template operator()<false>();
    if (lean_lists(launch, features))
      return launch.columns <= 64 ? run.template operator()<64, false, true>()
                                  : run.template operator()<128, false, true>();
  }
  return with_head_dim<!kWide<Math>, kWidestBackward<Math>>(launch.columns, features || launch.listed, run);
}

template <class Math>
cudaError_t start_backward_queries(const Launch& launch, bool features, cudaStream_t stream) {
  const auto run = [&]<int kColumns, bool kFeatures>() {
    using Shape = QueryShape<Math, kColumns, kFeatures>;
    static_assert(Shape::kRows == kQueryPassRows);
    static_assert(Shape::kSharedBytes <= backward_shared_bytes(kWide<Math>, kColumns));
    return start<&backward_queries_mma<Shape>>(launch.items, Shape::kThreads, Shape::kSharedBytes, stream, launch);
  };
  return with_head_dim<false, kWidestBackward<Math>>(launch.columns, features || launch.listed, run);
}

}  // namespace longspan::cuda
