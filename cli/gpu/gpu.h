// GPUs as the command uses them: memory, copies, time and a peak. gpu.cpp is the real thing, no_gpu.cpp stands in for
// it in builds without CUDA; neither shows a CUDA type.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "longspan/tensor_view.h"

namespace longspan::cli {

/// "580.65.06, CUDA 13.0": the driver's version and the newest CUDA it runs; empty where there is none.
std::string gpu_driver();

/// Memory of a GPU, aligned to 256 bytes; throws OutOfMemory with `name`. Free with gpu_free.
void* gpu_allocate(Device device, std::size_t bytes, std::string_view name);
void gpu_free(Device device, void* memory) noexcept;
/// Bytes that could be allocated now.
double gpu_free_bytes(Device device);

/// Copies between any two devices and returns when it is done.
void copy_bytes(void* to, Device to_device, const void* from, Device from_device, std::size_t bytes);

/// Seconds that work takes on a device by the device's own clock: a GPU is still busy when launches have returned.
double seconds_on(Device device, const std::function<void()>& work);

struct GpuPeak {
  double gflops = 0;
  std::string source;  ///< what was measured
};
/// The fastest matrix product there is to compare with: cuBLAS if the machine has it, else multiply-adds of the units
/// that the dtype uses (tensor cores by mma.sync, CUDA cores for float32) on registers.
GpuPeak measured_gpu_peak(Device device, DType dtype);

}  // namespace longspan::cli
