// Mapping files and finding the array in them.
#include "files/array.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "files/npy.h"
#include "files/safetensors.h"
#include "longspan/error.h"

namespace longspan::cli {
namespace {

constexpr std::size_t kMostDimensions = 8;

/// Closes a descriptor on every way out.
struct Descriptor {
  int number;
  ~Descriptor() { close(number); }
};

std::shared_ptr<const void> aligned_copy(std::span<const std::byte> bytes) {
  constexpr std::align_val_t kAlignment{64};
  void* memory = ::operator new(bytes.size(), kAlignment);
  std::memcpy(memory, bytes.data(), bytes.size());
  return {memory, [](const void* pointer) { ::operator delete(const_cast<void*>(pointer), kAlignment); }};
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const int number = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (number < 0) {
    throw InvalidArgument(path, fmt::format("cannot open '{}': {}", path, std::strerror(errno)));
  }
  const Descriptor descriptor{number};
  struct stat status = {};
  if (fstat(number, &status) != 0) throw IoError(fmt::format("cannot read '{}': {}", path, std::strerror(errno)));
  if (!S_ISREG(status.st_mode)) {
    throw InvalidArgument(
        path, fmt::format("'{}' is not a regular file: inputs are memory-mapped, save it to disk first", path));
  }
  if (status.st_size == 0) return;
  const auto size = static_cast<std::size_t>(status.st_size);
  void* memory = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, number, 0);
  if (memory == MAP_FAILED) throw IoError(fmt::format("cannot map '{}': {}", path, std::strerror(errno)));
  bytes_ = {static_cast<const std::byte*>(memory), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

Location parse_location(const std::string& location) {
  const std::size_t hash = location.rfind('#');
  Location parsed{location.substr(0, hash), hash == std::string::npos ? "" : location.substr(hash + 1), false};
  const auto ends_with = [&](std::string_view suffix) { return std::string_view(parsed.path).ends_with(suffix); };
  if (ends_with(".safetensors")) {
    parsed.safetensors = true;
    if (parsed.name.empty()) {
      throw InvalidArgument(location, fmt::format("'{}' names no tensor: write {}#name", location, parsed.path));
    }
    return parsed;
  }
  if (location.ends_with(".npy") || hash == std::string::npos) return {location, "", false};
  throw InvalidArgument(location, fmt::format("'{}': give file.npy or file.safetensors#name", location));
}

std::size_t array_bytes(const std::string& where, const std::vector<std::int64_t>& shape, DType dtype) {
  if (shape.size() > kMostDimensions) {
    throw InvalidArgument(
        where, fmt::format("{}: {} dimensions, at most {} make sense", where, shape.size(), kMostDimensions));
  }
  std::int64_t bytes = size_of(dtype);
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) throw InvalidArgument(where, fmt::format("{}: negative size {} in the shape", where, size));
    empty |= size == 0;
    if (__builtin_mul_overflow(bytes, size == 0 ? 1 : size, &bytes)) {
      throw InvalidArgument(where, fmt::format("{}: shape [{}] overflows 64 bits", where, fmt::join(shape, ", ")));
    }
  }
  return empty ? 0 : static_cast<std::size_t>(bytes);
}

Array read_array(const std::string& location, const ReadOptions& options) {
  const Location place = parse_location(location);
  const auto file = std::make_shared<const MappedFile>(place.path);
  Array array;
  array.header = place.safetensors ? read_safetensors_header(file->bytes(), place.path, place.name, options)
                                   : read_npy_header(file->bytes(), place.path, options);
  const auto bytes = file->bytes().subspan(array.header.offset, array.header.bytes);
  array.owner = file;
  array.data = bytes.data();
  const auto element = static_cast<std::size_t>(size_of(array.header.dtype));
  if (reinterpret_cast<std::uintptr_t>(array.data) % element != 0) {
    array.owner = aligned_copy(bytes);
    array.data = array.owner.get();
  }
  return array;
}

}  // namespace longspan::cli
