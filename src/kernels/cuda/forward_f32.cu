// Forward kernels for float32 as sums of two TF32 numbers.
#include "kernels/cuda/forward_start.cuh"

namespace longspan::cuda {

cudaError_t forward_f32(const Launch& launch, bool features, cudaStream_t stream) {
  return start_forward<SplitFloat>(launch, features, stream);
}

}  // namespace longspan::cuda
