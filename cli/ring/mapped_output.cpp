// Creates, maps and renames.
#include "ring/mapped_output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "files/npy.h"
#include "longspan/error.h"

namespace longspan::cli {
namespace {

std::string temporary(const std::string& path) { return path + ".ring-partial"; }

[[noreturn]] void fail(const std::string& doing, const std::string& path) {
  throw IoError(fmt::format("{} '{}': {}", doing, path, std::strerror(errno)));
}

/// With a batch of one, three dimensions are as good as four.
std::vector<std::int64_t> four(std::vector<std::int64_t> shape) {
  if (shape.size() == 3) shape.insert(shape.begin(), 1);
  return shape;
}

}  // namespace

void MappedOutput::create(const std::string& path, DType dtype, const std::vector<std::int64_t>& shape) {
  const std::string name = temporary(path), header = npy_header(dtype, shape);
  const int file = ::open(name.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) fail("cannot create", name);
  const std::size_t bytes = header.size() + array_bytes(path, shape, dtype);
  const bool written = ::ftruncate(file, static_cast<off_t>(bytes)) == 0 &&
                       ::pwrite(file, header.data(), header.size(), 0) == static_cast<ssize_t>(header.size());
  const int error = errno;
  ::close(file);
  if (!written) {
    ::unlink(name.c_str());
    errno = error;
    fail("cannot write", name);
  }
}

MappedOutput::MappedOutput(const std::string& path, DType dtype, Layout layout,
                           const std::vector<std::int64_t>& shape) {
  const std::string name = temporary(path);
  const std::size_t header = npy_header(dtype, shape).size();
  bytes_ = header + array_bytes(path, shape, dtype);
  const int file = ::open(name.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) fail("cannot open", name);
  memory_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (memory_ == MAP_FAILED) {
    memory_ = nullptr;
    fail("cannot map", name);
  }
  const std::vector<std::int64_t> sizes = four(shape);
  const bool bnhd = layout == Layout::bnhd;
  view_ = view_of<void>(static_cast<std::byte*>(memory_) + header, dtype, layout, sizes[0], sizes[bnhd ? 1 : 2],
                        sizes[bnhd ? 2 : 1], sizes[3]);
}

MappedOutput::~MappedOutput() {
  if (memory_) ::munmap(memory_, bytes_);
}

void MappedOutput::flush() const {
  if (::msync(memory_, bytes_, MS_SYNC) != 0)
    throw IoError(fmt::format("cannot write results: {}", std::strerror(errno)));
}

void MappedOutput::publish(const std::string& path) {
  if (::rename(temporary(path).c_str(), path.c_str()) != 0) fail("cannot rename to", path);
}

void MappedOutput::discard(const std::string& path) noexcept { ::unlink(temporary(path).c_str()); }

}  // namespace longspan::cli
