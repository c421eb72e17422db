// Writing to a temporary name, then renaming.
#include "files/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

#include "files/npy.h"
#include "files/safetensors.h"
#include "interrupt.h"
#include "longspan/error.h"

namespace longspan::cli {
namespace {

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

std::string resolve_links(const std::string& path) {
  char* resolved = realpath(path.c_str(), nullptr);
  if (resolved == nullptr) return path;
  std::string text = resolved;
  std::free(resolved);
  return text;
}

/// Permissions of the file that is replaced, else what the umask leaves of rw-rw-rw-.
mode_t permissions_for(const struct stat* existing) {
  if (existing != nullptr) return existing->st_mode & 0777;
  const mode_t mask = umask(0);
  umask(mask);
  return 0666 & ~mask;
}

}  // namespace

OutputFile::OutputFile(const std::string& path) : path_(path), target_(resolve_links(path)) {
  struct stat status = {};
  const bool exists = stat(target_.c_str(), &status) == 0;
  if (exists && S_ISDIR(status.st_mode)) {
    throw InvalidArgument(path, fmt::format("'{}' is a folder: give a file name", path));
  }
  if (exists && !S_ISREG(status.st_mode)) {
    descriptor_ = open(path.c_str(), O_WRONLY | O_CLOEXEC);
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
  temporary_.clear();
}

void OutputFile::fail(std::string_view doing, int error) const {
  throw IoError(fmt::format("cannot {} '{}': {}", doing, path_, std::strerror(error)));
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
};

ArrayWriter::ArrayWriter() = default;
ArrayWriter::~ArrayWriter() = default;

void ArrayWriter::add(const std::string& location, DType dtype, std::vector<std::int64_t> shape, const void* data) {
  const Location place = parse_location(location);
  auto file =
      std::find_if(files_.begin(), files_.end(), [&](const File& other) { return other.place.path == place.path; });
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

void ArrayWriter::commit() {
  for (File& file : files_) {
    std::vector<NamedArray> arrays;
    for (const auto& content : file.contents) arrays.push_back(content.array);
    file.output->write(file.place.safetensors ? safetensors_header(arrays)
                                              : npy_header(arrays[0].dtype, arrays[0].shape));
    for (const auto& content : file.contents) {
      const std::size_t bytes = array_bytes(content.array.name, content.array.shape, content.array.dtype);
      file.output->write({static_cast<const std::byte*>(content.data), bytes});
    }
  }
  for (File& file : files_) file.output->commit();
}

bool same_file(const std::string& left, const std::string& right) {
  struct stat first = {}, second = {};
  return stat(left.c_str(), &first) == 0 && stat(right.c_str(), &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

}  // namespace longspan::cli
