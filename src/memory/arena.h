// One piece of memory in parts, one after the other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace longspan {

/// Hands out parts, each at a multiple of `alignment`. Without memory it only counts, so that the function that lays a
/// workspace out also says how large it has to be.
class Arena {
 public:
  /// `spare`: bytes behind each part that may be read and written, for vectors that overhang.
  explicit Arena(std::byte* memory = nullptr, std::size_t alignment = 64, std::size_t spare = 0)
      : memory_(memory), alignment_(alignment), spare_(spare) {}

  /// Where a part of so many bytes begins.
  std::size_t place(std::size_t bytes) {
    const std::size_t begin = used_;
    used_ += (bytes + spare_ + alignment_ - 1) / alignment_ * alignment_;
    return begin;
  }
  /// The part itself; null without memory.
  template <class T = std::byte>
  T* take(std::int64_t count) {
    const std::size_t begin = place(static_cast<std::size_t>(count) * sizeof(T));
    return memory_ ? reinterpret_cast<T*>(memory_ + begin) : nullptr;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* memory_;
  std::size_t alignment_, spare_, used_ = 0;
};

}  // namespace longspan
