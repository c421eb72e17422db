// cudaMallocFromPoolAsync on a pool of our own: it keeps what it has (the steady state asks the driver for nothing),
// and torch's allocator never sees it.
#include "device/device_pool.h"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <mutex>

#include "device/error.h"
#include "longspan/memory.h"

namespace longspan {
namespace {

constexpr int kMaxDevices = 64;

std::uint64_t attribute(cudaMemPool_t pool, cudaMemPoolAttr which) {
  std::uint64_t value = 0;
  cudaMemPoolGetAttribute(pool, which, &value);
  return value;
}

struct DevicePool {
  std::mutex mutex;
  cudaMemPool_t pool = nullptr;
  std::atomic<std::uint64_t> allocations{0};
  std::atomic<std::size_t> limit{0};

  cudaMemPool_t get(int device) {
    const std::lock_guard lock(mutex);
    if (pool) return pool;
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, device};
    cudaMemPool_t created = nullptr;
    cuda::check(cudaMemPoolCreate(&created, &properties), "making a memory pool");
    std::uint64_t keep = UINT64_MAX;
    cuda::check(cudaMemPoolSetAttribute(created, cudaMemPoolAttrReleaseThreshold, &keep), "setting up a memory pool");
    return pool = created;
  }
};

DevicePool& pool_of(int device) {
  static auto* const pools = new std::array<DevicePool, kMaxDevices>;  // never destroyed: leases may end during exit
  if (device < 0 || device >= kMaxDevices)
    throw Unsupported(fmt::format("cuda:{}: devices 0 to {} are supported", device, kMaxDevices - 1));
  return (*pools)[static_cast<std::size_t>(device)];
}

}  // namespace

DeviceLease::DeviceLease(int device, void* stream, std::size_t bytes) : stream_(stream), device_(device) {
  if (bytes == 0) return;
  const cuda::DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cuda::check(cudaStreamIsCapturing(cuda_stream, &capture), "asking whether the stream is captured");
  if (capture != cudaStreamCaptureStatusNone) {
    throw InvalidArgument(
        "workspace",
        fmt::format("workspace of {} bytes inside a graph capture: pass Call::workspace (Plan::workspace_bytes "
                    "says how much) or Call::allocate, so that replays find it where it was",
                    bytes));
  }
  DevicePool& pool = pool_of(device);
  const cudaMemPool_t handle = pool.get(device);
  const std::uint64_t used = attribute(handle, cudaMemPoolAttrUsedMemCurrent),
                      reserved = attribute(handle, cudaMemPoolAttrReservedMemCurrent);
  const std::size_t limit = pool.limit.load();
  if (limit > 0 && (bytes > limit || used > limit - bytes)) {
    throw OutOfMemory(
        fmt::format("workspace of {} bytes on cuda:{}: {} bytes are in use and the limit is {}; use a smaller problem "
                    "or a higher limit",
                    bytes, device, used, limit));
  }
  void* memory = nullptr;
  cudaError_t status = cudaMallocFromPoolAsync(&memory, bytes, handle, cuda_stream);
  if (status == cudaErrorMemoryAllocation) {  // what the pool holds may be cut too small
    cudaGetLastError();
    cudaMemPoolTrimTo(handle, 0);
    status = cudaMallocFromPoolAsync(&memory, bytes, handle, cuda_stream);
  }
  cuda::check(status, "workspace");
  if (attribute(handle, cudaMemPoolAttrReservedMemCurrent) > reserved) pool.allocations.fetch_add(1);
  data_ = static_cast<std::byte*>(memory);
}

DeviceLease::~DeviceLease() {
  if (!data_) return;
  int before = 0;
  cudaGetDevice(&before);
  if (before != device_) cudaSetDevice(device_);
  cudaFreeAsync(data_, static_cast<cudaStream_t>(stream_));
  if (before != device_) cudaSetDevice(before);
}

namespace device_memory {

MemoryStatistics statistics(int device) {
  DevicePool& pool = pool_of(device);
  MemoryStatistics result;
  result.allocations = pool.allocations.load();
  result.limit_bytes = pool.limit.load();
  const std::lock_guard lock(pool.mutex);
  if (!pool.pool) return result;
  result.reserved_bytes = attribute(pool.pool, cudaMemPoolAttrReservedMemCurrent);
  result.used_bytes = attribute(pool.pool, cudaMemPoolAttrUsedMemCurrent);
  result.peak_used_bytes = attribute(pool.pool, cudaMemPoolAttrUsedMemHigh);
  return result;
}

void reset_peak(int device) {
  DevicePool& pool = pool_of(device);
  const std::lock_guard lock(pool.mutex);
  std::uint64_t zero = 0;
  if (pool.pool) cudaMemPoolSetAttribute(pool.pool, cudaMemPoolAttrUsedMemHigh, &zero);
}

void trim(int device) {
  DevicePool& pool = pool_of(device);
  const std::lock_guard lock(pool.mutex);
  if (pool.pool) cuda::check(cudaMemPoolTrimTo(pool.pool, 0), "giving memory back");
}

void set_limit_bytes(int device, std::size_t limit) { pool_of(device).limit.store(limit); }

}  // namespace device_memory
}  // namespace longspan
