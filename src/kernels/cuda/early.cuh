// Starting kernels that may begin while the one before them ends (kernels/ptx/streams.cuh).
#pragma once

#include <cuda_runtime.h>

namespace longspan::cuda {

/// run_kernel (device/run_kernel.cuh) of a kernel that waits itself. `overlaps`: the device can do so, from compute
/// capability 9.0 on.
template <class... Parameters, class... Arguments>
cudaError_t run_early_kernel(void (*kernel)(Parameters...), bool overlaps, dim3 grid, int threads, cudaStream_t stream,
                             const Arguments&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace longspan::cuda
