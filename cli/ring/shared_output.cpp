// Runs of rows that are contiguous in the file go out in one write.
#include "ring/shared_output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "files/npy.h"
#include "interrupt.h"
#include "longspan/error.h"

namespace longspan::cli {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{1} << 20;

class RowFile {
 public:
  explicit RowFile(const std::string& name) : name_(name), descriptor_(::open(name.c_str(), O_WRONLY | O_CLOEXEC)) {
    if (descriptor_ < 0) fail("open");
  }
  RowFile(const RowFile&) = delete;
  RowFile& operator=(const RowFile&) = delete;
  ~RowFile() { ::close(descriptor_); }

  void write(std::span<const std::byte> bytes, std::size_t offset) const {
    while (!bytes.empty()) {
      stop_if_interrupted();
      const ssize_t written = ::pwrite(descriptor_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail("write");
      bytes = bytes.subspan(static_cast<std::size_t>(written));
      offset += static_cast<std::size_t>(written);
    }
  }
  void sync() const {
    if (::fsync(descriptor_) != 0) fail("write");
  }

 private:
  [[noreturn]] void fail(const char* doing) const {
    throw IoError(fmt::format("cannot {} '{}': {}", doing, name_, std::strerror(errno)));
  }
  const std::string& name_;
  int descriptor_;
};

/// The array as it lies in the file; offsets count elements from the end of the header.
ConstTensorView file_view(const SharedArray& array) {
  std::vector<std::int64_t> sizes = array.shape;
  if (sizes.size() == 3) sizes.insert(sizes.begin(), 1);
  const bool bnhd = array.layout == Layout::bnhd;
  return view_of<const void>(nullptr, array.dtype, array.layout, sizes[0], sizes[bnhd ? 1 : 2], sizes[bnhd ? 2 : 1],
                             sizes[3]);
}

}  // namespace

void begin_shared_output(OutputFile& file, const SharedArray& array) {
  const std::string header = npy_header(array.dtype, array.shape);
  file.reserve(header.size() + array_bytes(file.path(), array.shape, array.dtype));
  file.write(header);
}

void write_shared_rows(const std::string& name, const SharedArray& array, const ConstTensorView& rows,
                       std::span<const RowRange> ranges) {
  const RowFile file(name);
  const ConstTensorView whole = file_view(array);
  const auto element = static_cast<std::size_t>(size_of(array.dtype));
  const std::size_t header = npy_header(array.dtype, array.shape).size();
  const auto row_bytes = static_cast<std::size_t>(rows.columns()) * element;
  const bool bnhd = array.layout == Layout::bnhd;
  // In [B, N, H, D] all heads of consecutive rows are contiguous, in [B, H, N, D] the consecutive rows of one head.
  const std::int64_t heads_together = bnhd ? rows.heads() : 1;
  const auto slice = static_cast<std::size_t>(heads_together) * row_bytes;  // of one position
  const auto most = static_cast<std::int64_t>(std::max<std::size_t>(1, kBufferBytes / std::max<std::size_t>(slice, 1)));
  std::vector<std::byte> buffer;
  for (std::int64_t entry = 0; entry < rows.batch(); ++entry) {
    for (std::int64_t head = 0; head < rows.heads(); head += heads_together) {
      std::int64_t first = 0;  // row of the rank
      for (const RowRange& range : ranges) {
        for (std::int64_t done = 0; done < range.count; done += most) {
          const std::int64_t count = std::min(most, range.count - done);
          buffer.resize(static_cast<std::size_t>(count) * slice);
          std::byte* to = buffer.data();
          for (std::int64_t row = first + done; row < first + done + count; ++row) {
            for (std::int64_t one = head; one < head + heads_together; ++one, to += row_bytes) {
              std::memcpy(to,
                          static_cast<const std::byte*>(rows.data) + rows.offset(entry, row, one) * size_of(rows.dtype),
                          row_bytes);
            }
          }
          const auto offset = static_cast<std::size_t>(whole.offset(entry, range.start + done, head)) * element;
          file.write(buffer, header + offset);
        }
        first += range.count;
      }
    }
  }
  file.sync();
}

}  // namespace longspan::cli
