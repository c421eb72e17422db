// Backward kernels for float32 by way of TF32.
#include "kernels/cuda/backward_start.cuh"

namespace longspan::cuda {

cudaError_t backward_tf32(const Launch& launch, bool features, cudaStream_t stream) {
  return start_backward<Tf32>(launch, features, stream);
}
cudaError_t backward_queries_tf32(const Launch& launch, bool features, cudaStream_t stream) {
  return start_backward_queries<Tf32>(launch, features, stream);
}

}  // namespace longspan::cuda
