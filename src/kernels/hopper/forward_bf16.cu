// Hopper forward kernels for bf16.
#include "kernels/hopper/forward.cuh"

namespace longspan::hopper {

cudaError_t forward_bf16(const HopperLaunch& launch, const Choice& choice, cudaStream_t stream) {
  return start_forward<__nv_bfloat16>(launch, choice, stream);
}

}  // namespace longspan::hopper
