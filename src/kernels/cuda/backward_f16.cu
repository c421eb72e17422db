// Backward kernels for f16.
#include "kernels/cuda/backward_start.cuh"

namespace longspan::cuda {

cudaError_t backward_f16(const Launch& launch, bool features, cudaStream_t stream) {
  return start_backward<__half>(launch, features, stream);
}

}  // namespace longspan::cuda
