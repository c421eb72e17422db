// Arrays in files: what a header says about the bytes that follow, checked before anybody believes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "longspan/tensor_view.h"

namespace longspan::cli {

/// A regular file, memory-mapped for reading.
class MappedFile {
 public:
  /// Throws InvalidArgument if there is no such regular file, IoError if it cannot be mapped.
  explicit MappedFile(const std::string& path);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::string path_;
  std::span<const std::byte> bytes_;
};

/// Where an array lies in its file. The sizes were checked: `bytes` is exactly the product of shape and element size.
struct ArrayHeader {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

/// How to read element types that have more than one meaning.
struct ReadOptions {
  bool uint16_is_bf16 = false;  ///< the user said --dtype bf16
};

/// A read-only array; keeps its file mapped (or its own copy, where the file's offset is not aligned to the element).
struct Array {
  ArrayHeader header;
  const void* data = nullptr;
  std::shared_ptr<const void> owner;
};

/// Reads `file.npy` or `file.safetensors#name`.
Array read_array(const std::string& location, const ReadOptions& options = {});

/// The part of a location before '#', and the part behind it.
struct Location {
  std::string path;
  std::string name;  ///< empty for .npy
  bool safetensors = false;
};
Location parse_location(const std::string& location);

/// Product of shape times element size, or InvalidArgument saying `where` the header lies. At most 8 dimensions.
std::size_t array_bytes(const std::string& where, const std::vector<std::int64_t>& shape, DType dtype);

}  // namespace longspan::cli
