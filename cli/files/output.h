// Output files that appear complete or not at all.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "files/array.h"

namespace longspan::cli {

/// A file under a temporary name in the folder of its final one. commit() makes it durable and renames it; without
/// commit() the destructor removes it. A link is followed, whether its target exists or not. Things that are not
/// regular files (a pipe, standard output, which is also "-") are written directly.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  /// Sets the space for `bytes` aside, so that a disk without it is an IoError now and not after the work. Does nothing
  /// for pipes, and on file systems that cannot do it; there, write() reports the full disk.
  void reserve(std::size_t bytes);
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void commit();
  const std::string& path() const { return path_; }
  /// The temporary name, for others who write into the same file before commit().
  const std::string& written_name() const { return temporary_; }

 private:
  [[noreturn]] void fail(std::string_view doing, int error) const;
  void discard() noexcept;

  std::string path_;       // as the user wrote it
  std::string target_;     // where that leads
  std::string temporary_;  // empty when written directly
  int descriptor_ = -1;
};

/// Arrays to be written to `file.npy` or `file.safetensors#name`. Files are opened at once, so that a folder that does
/// not exist is reported before any work; arrays that share a .safetensors file are written into it together.
class ArrayWriter {
 public:
  ArrayWriter();
  ~ArrayWriter();
  /// Announces an array; its data must stay valid until commit().
  void add(const std::string& location, DType dtype, std::vector<std::int64_t> shape, const void* data);
  /// Sets the space of everything announced aside. Throws IoError where a disk is too full.
  void reserve();
  /// Writes everything; all files are complete on disk before the first is renamed.
  void commit();

 private:
  struct File;
  std::vector<File> files_;
};

}  // namespace longspan::cli
