// The memory of counters that rest at zero; see counters.h.
#include "kernels/cuda/counters.h"

#include <cuda_runtime.h>

#include "kernels/cuda/launch.h"

namespace longspan::cuda {
namespace {

__device__ unsigned resting[kCounterStreams * kCounterWords];  // zero where CUDA puts it

}  // namespace

cudaError_t find_counters(unsigned** memory) {
  void* found = nullptr;
  const cudaError_t error = cudaGetSymbolAddress(&found, resting);
  *memory = static_cast<unsigned*>(found);
  return error;
}

}  // namespace longspan::cuda
