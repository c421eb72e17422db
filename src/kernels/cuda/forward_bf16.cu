// Forward kernels for bfloat16.
#include "kernels/cuda/forward_start.cuh"

namespace longspan::cuda {

cudaError_t forward_bf16(const Launch& launch, bool features, cudaStream_t stream) {
  return start_forward<__nv_bfloat16>(launch, features, stream);
}

}  // namespace longspan::cuda
