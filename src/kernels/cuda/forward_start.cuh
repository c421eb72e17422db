// Chooses the forward instantiation: five for each 16-bit type (up to 64 and 128 lean; up to 64, 128 and 256 with every
// feature).
#pragma once

#include "kernels/cuda/forward_mma.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/start.cuh"

namespace longspan::cuda {

template <class T>
cudaError_t start_forward(const Launch& launch, bool features, cudaStream_t stream) {
  const auto run = [&]<int kColumns, bool kFeatures>() {
    using Shape = ForwardShape<T, kColumns, kFeatures>;
    return start<&forward_mma<Shape>>(launch.items, Shape::kThreads, Shape::kSharedBytes, stream, launch);
  };
  if (!features && launch.columns <= 64) return run.template operator()<64, false>();
  if (!features && launch.columns <= 128) return run.template operator()<128, false>();
  if (launch.columns <= 64) return run.template operator()<64, true>();
  if (launch.columns <= 128) return run.template operator()<128, true>();
  return run.template operator()<256, true>();
}

}  // namespace longspan::cuda
