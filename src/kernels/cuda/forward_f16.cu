// Forward kernels for float16.
#include "kernels/cuda/forward_start.cuh"

namespace longspan::cuda {

cudaError_t forward_f16(const Launch& launch, bool features, cudaStream_t stream) {
  return start_forward<__half>(launch, features, stream);
}

}  // namespace longspan::cuda
