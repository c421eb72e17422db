// Writing to a temporary name, then renaming.
#include "files/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

#include "files/names.h"
#include "files/npy.h"
#include "files/safetensors.h"
#include "files/temporaries.h"
#include "interrupt.h"
#include "longspan/error.h"

namespace longspan::cli {
namespace {

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

/// Opens a pipe or a device. A pipe without a reader is asked again and again, so that Ctrl-C ends the waiting.
int open_existing(const std::string& path, bool pipe) {
  constexpr int kPause = 20;  // milliseconds
  int descriptor = -1;
  while ((descriptor = open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK)) < 0) {
    if (errno != EINTR && !(pipe && errno == ENXIO)) return -1;
    stop_if_interrupted();
    poll(nullptr, 0, kPause);
  }
  const int flags = fcntl(descriptor, F_GETFL);
  fcntl(descriptor, F_SETFL, flags & ~O_NONBLOCK);
  return descriptor;
}

/// Permissions of the file that is replaced, else what the umask leaves of rw-rw-rw-.
mode_t permissions_for(const struct stat* existing) {
  if (existing != nullptr) return existing->st_mode & 0777;
  const mode_t mask = umask(0);
  umask(mask);
  return 0666 & ~mask;
}

}  // namespace

OutputFile::OutputFile(const std::string& path) : path_(path), target_(final_target(path)) {
  if (is_standard_output(path)) {
    descriptor_ = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 0);
    if (descriptor_ < 0) fail("write", errno);
    return;
  }
  struct stat status = {};
  const bool exists = stat(path.c_str(), &status) == 0;
  if (!exists && errno == ELOOP) fail("write", ELOOP);  // a rename would replace the link
  if (exists && S_ISDIR(status.st_mode)) {
    throw InvalidArgument(path, fmt::format("'{}' is a folder: give a file name", path));
  }
  if (exists && !S_ISREG(status.st_mode)) {
    descriptor_ = open_existing(path, S_ISFIFO(status.st_mode));
    if (descriptor_ < 0) fail("open", errno);
    return;
  }
  const std::string name = std::filesystem::path(target_).filename().string();
  temporary_ = fmt::format("{}/.{}.XXXXXX", folder_of(target_), name.substr(0, 200));
  descriptor_ = mkostemp(temporary_.data(), O_CLOEXEC);
  if (descriptor_ < 0) {
    const int error = errno;
    temporary_.clear();
    fail("create", error);
  }
  remember_temporary(temporary_);
  if (fchmod(descriptor_, permissions_for(exists ? &status : nullptr)) != 0) {
    const int error = errno;
    discard();
    fail("create", error);
  }
}

OutputFile::~OutputFile() { discard(); }

void OutputFile::discard() noexcept {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
  if (!temporary_.empty()) unlink(temporary_.c_str());
  forget_temporary(temporary_);
  temporary_.clear();
}

void OutputFile::fail(std::string_view doing, int error) const {
  throw IoError(fmt::format("cannot {} '{}': {}", doing, path_, std::strerror(error)));
}

void OutputFile::reserve(std::size_t bytes) {
  if (temporary_.empty() || bytes == 0) return;
  // Not posix_fallocate: where the file system cannot do it, glibc would write to every block.
  while (fallocate(descriptor_, 0, 0, static_cast<off_t>(bytes)) != 0) {
    if (errno == EOPNOTSUPP || errno == ENOSYS) return;
    if (errno != EINTR) fail("write", errno);
    stop_if_interrupted();
  }
}

void OutputFile::write(std::span<const std::byte> bytes) {
  constexpr std::size_t kChunk = std::size_t{8} << 20;  // small enough to notice Ctrl-C
  while (!bytes.empty()) {
    stop_if_interrupted();
    const ssize_t written = ::write(descriptor_, bytes.data(), std::min(bytes.size(), kChunk));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write", errno);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void OutputFile::commit() {
  const bool durable = !temporary_.empty();
  if (durable && fsync(descriptor_) != 0) fail("write", errno);
  if (close(std::exchange(descriptor_, -1)) != 0) fail("write", errno);
  if (!durable) return;
  if (std::rename(temporary_.c_str(), target_.c_str()) != 0) fail("rename to", errno);
  forget_temporary(temporary_);
  temporary_.clear();
  // The rename is on disk only once the folder is; a file system that cannot do this is no error.
  const int folder = open(folder_of(target_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    fsync(folder);
    close(folder);
  }
}

struct ArrayWriter::File {
  struct Content {
    NamedArray array;
    const void* data = nullptr;
  };
  Location place;
  std::unique_ptr<OutputFile> output;
  std::vector<Content> contents;

  std::string header() const {
    if (!place.safetensors) return npy_header(contents[0].array.dtype, contents[0].array.shape);
    std::vector<NamedArray> arrays;
    for (const Content& content : contents) arrays.push_back(content.array);
    return safetensors_header(arrays);
  }
};

namespace {

std::size_t bytes_of(const NamedArray& array) { return array_bytes(array.name, array.shape, array.dtype); }

}  // namespace

ArrayWriter::ArrayWriter() = default;
ArrayWriter::~ArrayWriter() = default;

void ArrayWriter::add(const std::string& location, DType dtype, std::vector<std::int64_t> shape, const void* data) {
  const Location place = parse_location(location);
  if (place.safetensors) check_tensor_name(place.name, location);
  const std::string target = final_target(place.path);
  auto file = std::find_if(files_.begin(), files_.end(), [&](const File& other) {
    return !is_special(target) && final_target(other.place.path) == target;
  });
  if (file != files_.end()) {
    const bool clash =
        !place.safetensors || std::any_of(file->contents.begin(), file->contents.end(),
                                          [&](const auto& content) { return content.array.name == place.name; });
    if (clash)
      throw InvalidArgument(location, fmt::format("two outputs are named '{}': give each its own name", location));
  } else {
    files_.push_back({place, std::make_unique<OutputFile>(place.path), {}});
    file = files_.end() - 1;
  }
  file->contents.push_back({{place.name, dtype, std::move(shape)}, data});
}

void ArrayWriter::reserve() {
  for (const File& file : files_) {
    std::size_t bytes = file.header().size();
    for (const auto& content : file.contents) bytes += bytes_of(content.array);
    file.output->reserve(bytes);
  }
}

void ArrayWriter::commit() {
  for (const File& file : files_) {
    file.output->write(file.header());
    for (const auto& content : file.contents) {
      file.output->write({static_cast<const std::byte*>(content.data), bytes_of(content.array)});
    }
  }
  for (const File& file : files_) file.output->commit();
}

}  // namespace longspan::cli
