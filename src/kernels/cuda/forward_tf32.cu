// Forward kernels for float32 by way of TF32.
#include "kernels/cuda/forward_start.cuh"

namespace longspan::cuda {

cudaError_t forward_tf32(const Launch& launch, bool features, cudaStream_t stream) {
  return start_forward<Tf32>(launch, features, stream);
}

}  // namespace longspan::cuda
