// By CUDA's IPC handles, which name whole allocations of cudaMalloc.
#include "comm/node/ipc.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>

#include "device/error.h"
#include "util/reject.h"

namespace longspan::ipc {

static_assert(sizeof(Handle) == sizeof(cudaIpcMemHandle_t));

bool available() { return true; }

Exported::Exported(int device, std::size_t bytes) : device_(device) {
  const cuda::DeviceGuard guard(device);
  cuda::check(cudaMalloc(reinterpret_cast<void**>(&data_), std::max<std::size_t>(bytes, 1)), "memory for messages");
}

Exported::~Exported() {
  const cuda::DeviceGuard guard(device_);
  cudaFree(data_);
}

Handle Exported::handle() const {
  const cuda::DeviceGuard guard(device_);
  cudaIpcMemHandle_t made{};
  cuda::check(cudaIpcGetMemHandle(&made, data_), "a handle for other processes");
  Handle handle;
  std::memcpy(handle.data(), &made, sizeof(made));
  return handle;
}

Imported::Imported(int device, const Handle& handle) : device_(device) {
  const cuda::DeviceGuard guard(device);
  cudaIpcMemHandle_t theirs{};
  std::memcpy(&theirs, handle.data(), sizeof(theirs));
  const cudaError_t status =
      cudaIpcOpenMemHandle(reinterpret_cast<void**>(&data_), theirs, cudaIpcMemLazyEnablePeerAccess);
  if (status != cudaSuccess) {
    cudaGetLastError();
    raise<CommError>("mapping another process's GPU memory: {}", cudaGetErrorString(status));
  }
}

Imported::~Imported() {
  const cuda::DeviceGuard guard(device_);
  cudaIpcCloseMemHandle(data_);
}

}  // namespace longspan::ipc
