// Workspace of GPU calls: one stream-ordered pool per device, kept between calls. no_device_pool.cpp stands in for it
// in builds without CUDA.
#pragma once

#include <cstddef>

namespace longspan {

/// Memory lent in the order of a stream: usable by work that the stream gets from now on, and given back, when the
/// lease ends, after all work that it has by then. Aligned to 256 bytes, contents unspecified.
class DeviceLease {
 public:
  DeviceLease() = default;
  /// Throws OutOfMemory when the GPU, or the limit set by the caller, refuses; InvalidArgument inside a graph capture.
  DeviceLease(int device, void* stream, std::size_t bytes);
  ~DeviceLease();
  DeviceLease(const DeviceLease&) = delete;
  DeviceLease& operator=(const DeviceLease&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  [[maybe_unused]] void* stream_ = nullptr;  // builds without CUDA have no use for these two
  [[maybe_unused]] int device_ = 0;
};

}  // namespace longspan
