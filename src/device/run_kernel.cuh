// Starting a kernel so that its status is its own.
#pragma once

#include <cuda_runtime.h>

namespace longspan::cuda {

/// The status of this launch alone. A launch also clears what cudaGetLastError would have said of work before it, so
/// calls look there first (refuse_earlier_errors).
template <class... Parameters, class... Arguments>
cudaError_t run_kernel(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                       const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace longspan::cuda
