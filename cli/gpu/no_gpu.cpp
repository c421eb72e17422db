// Stands in for gpu.cpp in builds without CUDA: the CPU's part works, everything else says how to get a GPU.
#include "gpu/gpu.h"

#include <cstring>

#include "machine.h"
#include "timing.h"

namespace longspan::cli {

std::string gpu_driver() { return {}; }

void* gpu_allocate(Device device, std::size_t, std::string_view) {
  require_device(device);
  return nullptr;
}
void gpu_free(Device, void*) noexcept {}
double gpu_free_bytes(Device) { return 0; }

void copy_bytes(void* to, Device to_device, const void* from, Device from_device, std::size_t bytes) {
  require_device(to_device);
  require_device(from_device);
  if (bytes > 0) std::memcpy(to, from, bytes);
}

double seconds_on(Device device, const std::function<void()>& work) {
  require_device(device);
  const Stopwatch watch;
  work();
  return watch.seconds();
}

GpuPeak measured_gpu_peak(Device device, DType) {
  require_device(device);
  return {};
}

}  // namespace longspan::cli
