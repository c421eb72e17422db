// Chooses the backward instantiation: head dims as with_head_dim has them, 48, 96 and 256 for 16-bit types only; block
// masks as in the forward.
#pragma once

#include "kernels/cuda/backward_queries_mma.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/start.cuh"

namespace longspan::cuda {

template <class Math>
inline constexpr int kWidestBackward = kWide<Math> ? 128 : 256;

template <class Math, int kColumns, bool kRuled, bool kLists, bool kCompact>
cudaError_t start_backward_shape(const Launch& launch, cudaStream_t stream) {
  const auto run = [&]<bool kCloses>() {
    using Shape = BackwardShape<Math, kColumns, PairsOf<kRuled>, kLists, kCompact, kCloses>;
    using Tile = BackwardTile<Shape>;
    return start<&backward_mma<Shape>>(launch.schedule.items, Tile::kThreads, Tile::kSharedBytes, stream, launch);
  };
  if constexpr (!kRuled && !kLists) {
    if (!launch.scratch.totals) return run.template operator()<false>();
  }
  return run.template operator()<true>();
}

template <class Math>
cudaError_t start_backward(const Launch& launch, bool features, cudaStream_t stream) {
  const auto run = [&]<int kColumns, bool kRuled, bool kLists = kRuled>() {
    using Tile = BackwardTile<BackwardShape<Math, kColumns, PairsOf<kRuled>, kLists, false, true>>;
    static_assert(Tile::kKeys == tile_rows(kWide<Math>, kColumns));
    static_assert(Tile::kSharedBytes <= backward_shared_bytes(kWide<Math>, kColumns));
    return start_backward_shape<Math, kColumns, kRuled, kLists, false>(launch, stream);
  };
  if constexpr (!kWide<Math>) {
    const auto run_compact = [&]<bool kRuled>() {
      using Tile = BackwardTile<BackwardShape<Math, 128, PairsOf<kRuled>, kRuled, true, true>>;
      static_assert(Tile::kKeys == kCompactKeys && Tile::kSharedBytes <= kCompactBytes);
      return start_backward_shape<Math, 128, kRuled, kRuled, true>(launch, stream);
    };
    if (launch.gradients.compact)
      return features || launch.schedule.listed ? run_compact.template operator()<true>()
                                                : run_compact.template operator()<false>();
    if (launch.tensors.columns <= 128 && launch.schedule.listed != features) return with_one_of(launch, features, run);
  }
  return with_head_dim<!kWide<Math>, kWidestBackward<Math>>(launch.tensors.columns, features || launch.schedule.listed,
                                                            run);
}

template <class Math>
cudaError_t start_backward_queries(const Launch& launch, bool features, cudaStream_t stream) {
  const auto run = [&]<int kColumns, bool kRuled>() {
    using Shape = QueryShape<Math, kColumns, PairsOf<kRuled>, kRuled>;
    static_assert(Shape::kRows == kQueryPassRows);
    static_assert(Shape::kSharedBytes <= backward_shared_bytes(kWide<Math>, kColumns));
    return start<&backward_queries_mma<Shape>>(launch.schedule.items, Shape::kThreads, Shape::kSharedBytes, stream,
                                               launch);
  };
  return with_head_dim<false, kWidestBackward<Math>>(launch.tensors.columns, features || launch.schedule.listed, run);
}

}  // namespace longspan::cuda
