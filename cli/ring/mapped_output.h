// An .npy file that several ranks fill together, each its own rows, through shared memory maps.
#pragma once

#include <string>

#include "problem_options.h"

namespace longspan::cli {

class MappedOutput {
 public:
  /// Creates the file under a temporary name beside `path`: one rank does, before the others open it.
  static void create(const std::string& path, DType dtype, const std::vector<std::int64_t>& shape);
  /// Opens it; view() is the whole array.
  MappedOutput(const std::string& path, DType dtype, Layout layout, const std::vector<std::int64_t>& shape);
  ~MappedOutput();
  MappedOutput(const MappedOutput&) = delete;
  MappedOutput& operator=(const MappedOutput&) = delete;

  const TensorView& view() const { return view_; }
  /// Writes this rank's part to disk.
  void flush() const;
  /// Gives the complete file its name: one rank does, after all have flushed.
  static void publish(const std::string& path);
  /// Removes what create() made, if it is still there.
  static void discard(const std::string& path) noexcept;

 private:
  TensorView view_;
  void* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace longspan::cli
