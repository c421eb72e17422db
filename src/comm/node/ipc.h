// GPU memory that processes of one node share: whoever has a handle of it maps it.
#pragma once

#include <array>
#include <cstddef>

namespace longspan::ipc {

using Handle = std::array<char, 64>;

/// Whether this build can share a GPU's memory.
bool available();

/// Memory of this process, for others to map. Frees it; theirs lives until they let go of it.
class Exported {
 public:
  Exported(int device, std::size_t bytes);
  Exported(const Exported&) = delete;
  Exported& operator=(const Exported&) = delete;
  ~Exported();
  std::byte* data() const { return data_; }
  Handle handle() const;

 private:
  int device_;
  std::byte* data_ = nullptr;
};

/// Memory of another process. Throws CommError where the driver does not map it.
class Imported {
 public:
  Imported(int device, const Handle& handle);
  Imported(const Imported&) = delete;
  Imported& operator=(const Imported&) = delete;
  ~Imported();
  const std::byte* data() const { return data_; }

 private:
  int device_;
  std::byte* data_ = nullptr;
};

}  // namespace longspan::ipc
