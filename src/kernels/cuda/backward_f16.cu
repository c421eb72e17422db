// Backward kernels for float16.
#include "kernels/cuda/backward_start.cuh"

namespace longspan::cuda {

cudaError_t backward_f16(const Launch& launch, bool features, cudaStream_t stream) {
  return start_backward<__half>(launch, features, stream);
}
cudaError_t backward_queries_f16(const Launch& launch, bool features, cudaStream_t stream) {
  return start_backward_queries<__half>(launch, features, stream);
}

}  // namespace longspan::cuda
