// Backward kernels for float32 as sums of two TF32 numbers.
#include "kernels/cuda/backward_start.cuh"

namespace longspan::cuda {

cudaError_t backward_f32(const Launch& launch, bool features, cudaStream_t stream) {
  return start_backward<SplitFloat>(launch, features, stream);
}
cudaError_t backward_queries_f32(const Launch& launch, bool features, cudaStream_t stream) {
  return start_backward_queries<SplitFloat>(launch, features, stream);
}

}  // namespace longspan::cuda
