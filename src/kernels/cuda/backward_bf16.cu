// Backward kernels for bfloat16.
#include "kernels/cuda/backward_start.cuh"

namespace longspan::cuda {

cudaError_t backward_bf16(const Launch& launch, bool features, cudaStream_t stream) {
  return start_backward<__nv_bfloat16>(launch, features, stream);
}
cudaError_t backward_queries_bf16(const Launch& launch, bool features, cudaStream_t stream) {
  return start_backward_queries<__nv_bfloat16>(launch, features, stream);
}

}  // namespace longspan::cuda
