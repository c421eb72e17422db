// Hopper forward kernels for f16.
#include "kernels/hopper/forward.cuh"

namespace longspan::hopper {

cudaError_t forward_f16(const HopperLaunch& launch, const Choice& choice, cudaStream_t stream) {
  return start_forward<__half>(launch, choice, stream);
}

}  // namespace longspan::hopper
