// Chooses the backward instantiation: head dims as forward_start.cuh has them, but float32 stops at 128. dq in a pass
// of its own has them as 64, 128 and, with features, 256.
#pragma once

#include "kernels/cuda/backward_queries_mma.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/start.cuh"

namespace longspan::cuda {

template <class Math>
cudaError_t start_backward(const Launch& launch, bool features, cudaStream_t stream) {
  const auto run = [&]<int kColumns, bool kFeatures>() {
    using Shape = BackwardShape<Math, kColumns, kFeatures>;
    using Tile = BackwardTile<Shape>;
    static_assert(Tile::kKeys == tile_rows(kWide<Math>, kColumns));
    static_assert(Tile::kSharedBytes <= backward_shared_bytes(kWide<Math>, kColumns));
    return start<&backward_mma<Shape>>(launch.items, Tile::kThreads, Tile::kSharedBytes, stream, launch);
  };
  if constexpr (!kWide<Math>) {
    const auto run_compact = [&]<bool kFeatures>() {
      using Shape = BackwardShape<Math, 128, kFeatures, true>;
      using Tile = BackwardTile<Shape>;
      static_assert(Tile::kKeys == kCompactKeys && Tile::kSharedBytes <= kCompactBytes);
      return start<&backward_mma<Shape>>(launch.items, Tile::kThreads, Tile::kSharedBytes, stream, launch);
    };
    if (launch.compact)
      return features ? run_compact.template operator()<true>() : run_compact.template operator()<false>();
  }
  if (!features) {
    if constexpr (!kWide<Math>) {
      if (launch.columns <= 48) return run.template operator()<48, false>();
      if (launch.columns > 64 && launch.columns <= 96) return run.template operator()<96, false>();
    }
    if (launch.columns <= 64) return run.template operator()<64, false>();
    if (launch.columns <= 128) return run.template operator()<128, false>();
  }
  if (launch.columns <= 64) return run.template operator()<64, true>();
  if constexpr (!kWide<Math>) {
    if (launch.columns > 128) return run.template operator()<256, true>();
  }
  return run.template operator()<128, true>();
}

template <class Math>
cudaError_t start_backward_queries(const Launch& launch, bool features, cudaStream_t stream) {
  const auto run = [&]<int kColumns, bool kFeatures>() {
    using Shape = QueryShape<Math, kColumns, kFeatures>;
    static_assert(Shape::kRows == kQueryPassRows);
    static_assert(Shape::kSharedBytes <= backward_shared_bytes(kWide<Math>, kColumns));
    return start<&backward_queries_mma<Shape>>(launch.items, Shape::kThreads, Shape::kSharedBytes, stream, launch);
  };
  if (!features && launch.columns <= 64) return run.template operator()<64, false>();
  if (!features && launch.columns <= 128) return run.template operator()<128, false>();
  if (launch.columns <= 64) return run.template operator()<64, true>();
  if constexpr (!kWide<Math>) {
    if (launch.columns > 128) return run.template operator()<256, true>();
  }
  return run.template operator()<128, true>();
}

}  // namespace longspan::cuda
