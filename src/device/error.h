// CUDA status codes to typed errors, and the device of a call.
#pragma once

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "longspan/error.h"

namespace longspan::cuda {

/// Whether nothing on the GPU works any more after an error.
inline bool ends_process(cudaError_t status) {
  switch (status) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorMisalignedAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorECCUncorrectable:
      return true;
    default:
      return false;
  }
}

/// Throws CudaError (or OutOfMemory) unless status is success. Errors that earlier work left behind are named as such.
inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a failed launch must not be reported again by the next call
  if (status == cudaErrorMemoryAllocation) {
    throw OutOfMemory(fmt::format("{}: the GPU has no more memory; free tensors, or use a smaller problem", what));
  }
  if (ends_process(status)) {
    throw CudaError(
        fmt::format("earlier work on this GPU failed ({}: {}), so the process can no longer use it; found before: {}",
                    cudaGetErrorName(status), cudaGetErrorString(status), what));
  }
  throw CudaError(fmt::format("{}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status)));
}

/// Throws CudaError if an earlier CUDA call of this thread failed and nobody looked: a launch would clear that. Asking
/// whether work is done leaves cudaErrorNotReady, which is an answer.
inline void refuse_earlier_errors() {
  const cudaError_t earlier = cudaPeekAtLastError();
  if (earlier == cudaSuccess || earlier == cudaErrorNotReady) return;
  if (ends_process(earlier)) check(earlier, "starting a call");
  throw CudaError(
      fmt::format("an earlier CUDA call of this thread failed ({}: {}) and was not looked at; nothing was started: ask "
                  "cudaGetLastError after your own calls, which also clears it",
                  cudaGetErrorName(earlier), cudaGetErrorString(earlier)));
}

/// Makes a device current and gives the caller's back.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "asking for the current GPU");
    if (before_ != device) check(cudaSetDevice(device), "choosing a GPU");
    changed_ = before_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace longspan::cuda
