// The functions that start the Hopper kernels, one translation unit each.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/hopper/backward_launch.h"
#include "kernels/hopper/choice.h"
#include "kernels/hopper/launch.h"

namespace longspan::hopper {

cudaError_t forward_bf16(const HopperLaunch& launch, const Choice& choice, cudaStream_t stream);
cudaError_t forward_f16(const HopperLaunch& launch, const Choice& choice, cudaStream_t stream);

/// The three kernels of a backward.
struct BackwardStarts {
  cudaError_t (*prepare)(const PartsLaunch& launch, cudaStream_t stream);
  cudaError_t (*run)(const BackwardLaunch& launch, cudaStream_t stream);
  cudaError_t (*convert)(const PartsLaunch& launch, cudaStream_t stream);
  /// The order of a deterministic call's lists, in so many thread blocks.
  cudaError_t (*order)(const PartsLaunch& launch, unsigned blocks, cudaStream_t stream);
  /// Where lists are cut, by items of the main kernel: before it all, and after it all.
  cudaError_t (*split)(const PartsLaunch& launch, bool finish, cudaStream_t stream);
};
extern const BackwardStarts kBackwardBf16, kBackwardF16;

}  // namespace longspan::hopper
