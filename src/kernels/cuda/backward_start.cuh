// Chooses the backward instantiation: head dims as with_head_dim has them, 48, 96 and 256 for 16-bit types only; block
// masks as in the forward.
#pragma once

#include "kernels/cuda/backward_queries_mma.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/start.cuh"

namespace longspan::cuda {

template <class Math>
inline constexpr int kWidestBackward = kWide<Math> ? 128 : 256;

template <class Math, int kColumns, bool kFeatures, bool kLists, bool kCompact>
cudaError_t start_backward_shape(const Launch& launch, cudaStream_t stream) {
  const auto run = [&]<bool kCloses>() {
    using Shape = BackwardShape<Math, kColumns, kFeatures, kLists, kCompact, kCloses>;
    using Tile = BackwardTile<Shape>;
    return start<&backward_mma<Shape>>(launch.schedule.items, Tile::kThreads, Tile::kSharedBytes, stream, launch);
  };
  if constexpr (!kFeatures && !kLists) {
    if (!launch.scratch.totals) return run.template operator()<false>();
  }
  return run.template operator()<true>();
}

template <class Math>
cudaError_t start_backward(const Launch& launch, bool features, cudaStream_t stream) {
  const auto run = [&]<int kColumns, bool kFeatures, bool kLists = kFeatures>() {
    using Tile = BackwardTile<BackwardShape<Math, kColumns, kFeatures, kLists, false, true>>;
    static_assert(Tile::kKeys == tile_rows(kWide<Math>, kColumns));
    static_assert(Tile::kSharedBytes <= backward_shared_bytes(kWide<Math>, kColumns));
    return start_backward_shape<Math, kColumns, kFeatures, kLists, false>(launch, stream);
  };
  if constexpr (!kWide<Math>) {
    const auto run_compact = [&]<bool kFeatures>() {
      using Tile = BackwardTile<BackwardShape<Math, 128, kFeatures, kFeatures, true, true>>;
      static_assert(Tile::kKeys == kCompactKeys && Tile::kSharedBytes <= kCompactBytes);
      return start_backward_shape<Math, 128, kFeatures, kFeatures, true>(launch, stream);
    };
    if (launch.gradients.compact)
      return features || launch.schedule.listed ? run_compact.template operator()<true>()
                                                : run_compact.template operator()<false>();
    if (lean_lists(launch, features))
      return launch.tensors.columns <= 64 ? run.template operator()<64, false, true>()
                                          : run.template operator()<128, false, true>();
  }
  return with_head_dim<!kWide<Math>, kWidestBackward<Math>>(launch.tensors.columns, features || launch.schedule.listed,
                                                            run);
}

template <class Math>
cudaError_t start_backward_queries(const Launch& launch, bool features, cudaStream_t stream) {
  const auto run = [&]<int kColumns, bool kFeatures>() {
    using Shape = QueryShape<Math, kColumns, kFeatures>;
    static_assert(Shape::kRows == kQueryPassRows);
    static_assert(Shape::kSharedBytes <= backward_shared_bytes(kWide<Math>, kColumns));
    return start<&backward_queries_mma<Shape>>(launch.schedule.items, Shape::kThreads, Shape::kSharedBytes, stream,
                                               launch);
  };
  return with_head_dim<false, kWidestBackward<Math>>(launch.tensors.columns, features || launch.schedule.listed, run);
}

}  // namespace longspan::cuda
