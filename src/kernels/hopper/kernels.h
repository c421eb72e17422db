// The functions that start the Hopper kernels, one translation unit each.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/hopper/choice.h"
#include "kernels/hopper/launch.h"

namespace longspan::hopper {

cudaError_t forward_bf16(const HopperLaunch& launch, const Choice& choice, cudaStream_t stream);
cudaError_t forward_f16(const HopperLaunch& launch, const Choice& choice, cudaStream_t stream);

}  // namespace longspan::hopper
