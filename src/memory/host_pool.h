// Workspace of CPU calls, kept between calls.
#pragma once

#include <cstddef>

namespace longspan {

/// Memory lent by the host pool until the lease ends. Aligned to 4096 bytes, contents unspecified.
class HostLease {
 public:
  HostLease() = default;
  /// Throws OutOfMemory when the system, or the limit set by the caller, refuses.
  explicit HostLease(std::size_t bytes);
  ~HostLease();
  HostLease(const HostLease&) = delete;
  HostLease& operator=(const HostLease&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
};

}  // namespace longspan
