// Chooses the backward instantiation: four for each 16-bit type (64 and 128, lean and with every feature).
#pragma once

#include "kernels/cuda/backward_mma.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/start.cuh"

namespace longspan::cuda {

template <class T>
cudaError_t start_backward(const Launch& launch, bool features, cudaStream_t stream) {
  const auto run = [&]<int kColumns, bool kFeatures>() {
    using Shape = BackwardShape<T, kColumns, kFeatures>;
    return start<&backward_mma<Shape>>(launch.items, Shape::kThreads, Shape::kSharedBytes, stream, launch);
  };
  if (!features && launch.columns <= 64) return run.template operator()<64, false>();
  if (!features) return run.template operator()<128, false>();
  if (launch.columns <= 64) return run.template operator()<64, true>();
  return run.template operator()<128, true>();
}

}  // namespace longspan::cuda
