// The CUDA run time behind gpu.h. It is linked statically and loads the driver itself, so this runs without a GPU, too.
#include "gpu/gpu.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>
#include <regex>

#include "device/error.h"
#include "gpu/peak.h"
#include "longspan/machine.h"
#include "machine.h"
#include "timing.h"

namespace longspan::cli {
namespace {

/// The kernel module's own words; the run time only knows which CUDA the driver can run.
std::string module_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  std::smatch match;
  if (std::getline(file, line) && std::regex_search(line, match, std::regex(R"(\s(\d+\.\d+(\.\d+)?)\s)")))
    return match[1];
  return {};
}

class Event {
 public:
  Event() { cuda::check(cudaEventCreate(&handle_), "making an event"); }
  ~Event() { cudaEventDestroy(handle_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record() const { cuda::check(cudaEventRecord(handle_), "recording an event"); }
  /// Waits for the event; seconds since an earlier one.
  double seconds_since(const Event& begin) const {
    cuda::check(cudaEventSynchronize(handle_), "waiting for the GPU");
    float milliseconds = 0;
    cuda::check(cudaEventElapsedTime(&milliseconds, begin.handle_, handle_), "reading an event");
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t handle_ = nullptr;
};

struct FreeOnGpu {
  Device device;
  void operator()(void* memory) const { gpu_free(device, memory); }
};

}  // namespace

std::string gpu_driver() {
  int cuda = 0;
  if (cudaDriverGetVersion(&cuda) != cudaSuccess || cuda == 0) return {};
  const std::string module = module_version();
  return fmt::format("{}{}CUDA {}.{}", module, module.empty() ? "" : ", ", cuda / 1000, cuda % 1000 / 10);
}

void* gpu_allocate(Device device, std::size_t bytes, std::string_view name) {
  require_device(device);
  const cuda::DeviceGuard guard(device.index);
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, std::max<std::size_t>(bytes, 1));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw OutOfMemory(fmt::format("{} needs {} bytes and {} has {:.0f} free: use fewer tokens", name, bytes,
                                  to_string(device), gpu_free_bytes(device)));
  }
  cuda::check(status, "allocating a tensor");
  return memory;
}

void gpu_free(Device device, void* memory) noexcept {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device.index);
  cudaFree(memory);
  cudaSetDevice(before);
}

double gpu_free_bytes(Device device) {
  const cuda::DeviceGuard guard(device.index);
  std::size_t available = 0, total = 0;
  cuda::check(cudaMemGetInfo(&available, &total), "asking for free memory");
  return static_cast<double>(available);
}

void copy_bytes(void* to, Device to_device, const void* from, Device from_device, std::size_t bytes) {
  if (bytes == 0) return;
  if (to_device.type == DeviceType::cpu && from_device.type == DeviceType::cpu) {
    std::memcpy(to, from, bytes);
    return;
  }
  const cuda::DeviceGuard guard(to_device.type == DeviceType::cuda ? to_device.index : from_device.index);
  cuda::check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "copying a tensor");
}

double seconds_on(Device device, const std::function<void()>& work) {
  if (device.type == DeviceType::cpu) {
    const Stopwatch watch;
    work();
    return watch.seconds();
  }
  const cuda::DeviceGuard guard(device.index);
  const Event begin, end;
  begin.record();
  work();
  end.record();
  return end.seconds_since(begin);
}

GpuPeak measured_gpu_peak(Device device, DType dtype) {
  require_device(device);
  const cuda::DeviceGuard guard(device.index);
  constexpr int kRounds = 5;
  const auto best_seconds = [&](const std::function<void()>& work) {
    work();  // loads code, picks algorithms
    double best = seconds_on(device, work);
    for (int round = 1; round < kRounds; ++round) best = std::min(best, seconds_on(device, work));
    return best;
  };
  if (const std::unique_ptr<MatrixProduct> product = MatrixProduct::make(dtype)) {
    const std::int64_t side = dtype == DType::f32 ? 4096 : 8192;
    const auto bytes = static_cast<std::size_t>(side * side * size_of(dtype));
    const auto matrix = [&](std::string_view name) {
      return std::unique_ptr<void, FreeOnGpu>(gpu_allocate(device, bytes, name), FreeOnGpu{device});
    };
    const auto a = matrix("a matrix of the peak"), b = matrix("a matrix of the peak"),
               c = matrix("a matrix of the peak");
    for (void* input : {a.get(), b.get()}) cuda::check(fill_uniform(input, dtype, side * side), "filling a matrix");
    const double seconds = best_seconds([&] { product->multiply(side, a.get(), b.get(), c.get()); });
    const double flops = 2.0 * static_cast<double>(side) * static_cast<double>(side) * static_cast<double>(side);
    return {flops / seconds * 1e-9,
            fmt::format("{} matrix product of {} x {} {}", product->name(), side, side, name_of(dtype))};
  }
  const std::unique_ptr<void, FreeOnGpu> sink(gpu_allocate(device, sizeof(float), "the peak"), FreeOnGpu{device});
  const int blocks = gpus()[static_cast<std::size_t>(device.index)].multiprocessors * 4;
  double flops = 0;
  const double seconds = best_seconds([&] {
    cuda::check(multiply_registers(dtype, blocks, static_cast<float*>(sink.get()), flops), "starting multiply-adds");
  });
  return {flops / seconds * 1e-9, dtype == DType::f32 ? "multiply-adds of CUDA cores on registers (no cuBLAS found)"
                                                      : "mma.sync on registers (no cuBLAS found)"};
}

}  // namespace longspan::cli
