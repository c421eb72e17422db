// Array files: what was written is read back, and no header, however broken, does more than throw.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <vector>

#include "files/npy.h"
#include "files/output.h"
#include "files/safetensors.h"
#include "longspan/error.h"

namespace longspan::cli {
namespace {

namespace fs = std::filesystem;

/// A folder that goes away with the test.
class Files : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "longspan_files.XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::size_t entries() const { return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), {})); }
  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
  }
  fs::path folder_;
};

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

std::string npy_file(const std::string& literal, std::size_t data_bytes, char major = 1) {
  std::string file = "\x93NUMPY";
  file += major;
  file += '\0';
  file += static_cast<char>(literal.size() & 255);
  file += static_cast<char>(literal.size() >> 8);
  if (major > 1) file += std::string(2, '\0');
  return file + literal + std::string(data_bytes, '\1');
}

std::string safetensors_file(const std::string& table, std::size_t data_bytes) {
  const std::uint64_t length = table.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file + table + std::string(data_bytes, '\1');
}

ArrayHeader read_npy(const std::string& file, ReadOptions options = {}) {
  const auto bytes = bytes_of(file);  // exactly as long as the file, so that a sanitizer sees reads beyond
  return read_npy_header(bytes, "test.npy", options);
}
ArrayHeader read_safe(const std::string& file, const std::string& name) {
  const auto bytes = bytes_of(file);
  return read_safetensors_header(bytes, "test.safetensors", name, {});
}

TEST_F(Files, ACircleOfLinksIsNotReplaced) {
  fs::create_symlink("circle.npy", path("circle.npy"));
  EXPECT_THROW(OutputFile(path("circle.npy")), IoError);
  EXPECT_TRUE(fs::is_symlink(path("circle.npy")));
  EXPECT_EQ(entries(), 1u);
}

TEST_F(Files, EveryTypeAndShapeComesBack) {
  const std::vector<std::vector<std::int64_t>> shapes = {{}, {3}, {2, 3}, {1, 4, 2, 8}, {0, 5}};
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64, DType::i32, DType::i64, DType::boolean}) {
    for (const auto& shape : shapes) {
      std::vector<std::byte> data(array_bytes("data", shape, dtype));
      for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 7 + 1);
      for (const std::string& location : {path("a.npy"), path("b.safetensors") + "#tensor"}) {
        ArrayWriter writer;
        writer.add(location, dtype, shape, data.data());
        writer.commit();
        const Array array = read_array(location);
        EXPECT_EQ(array.header.dtype, dtype);
        EXPECT_EQ(array.header.shape, shape);
        ASSERT_EQ(array.header.bytes, data.size());
        EXPECT_TRUE(data.empty() || std::memcmp(array.data, data.data(), data.size()) == 0);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(array.data) % static_cast<std::uintptr_t>(size_of(dtype)), 0u);
      }
    }
  }
}

TEST_F(Files, NpyHeadersOfNumPyAreUnderstood) {
  EXPECT_EQ(read_npy(npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }   \n", 24)).shape,
            (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(read_npy(npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': (6,), }\n", 24, 2)).shape,
            (std::vector<std::int64_t>{6}));
  EXPECT_EQ(read_npy(npy_file("{\"shape\":(),\"descr\":\"<f8\",\"fortran_order\":False}", 8, 3)).dtype, DType::f64);
  for (const char* descr : {"<V2", "|V2", "bfloat16"}) {
    EXPECT_EQ(
        read_npy(npy_file(std::string("{'descr': '") + descr + "', 'fortran_order': False, 'shape': (3,), }", 6)).dtype,
        DType::bf16);
  }
  const std::string words = npy_file("{'descr': '<u2', 'fortran_order': False, 'shape': (3,), }", 6);
  EXPECT_THROW(read_npy(words), InvalidArgument);
  EXPECT_EQ(read_npy(words, {.uint16_is_bf16 = true}).dtype, DType::bf16);
}

TEST_F(Files, UnalignedTensorsAreCopied) {
  // One byte of another tensor first, so that the floats begin at an odd offset.
  write("odd.safetensors", safetensors_file(R"({"a":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]},)"
                                            R"("b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})",
                                            9));
  const Array array = read_array(path("odd.safetensors") + "#b");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(array.data) % 4, 0u);
  EXPECT_EQ(static_cast<const std::uint32_t*>(array.data)[1], 0x01010101u);
}

/// Calls a reader with broken variants; anything but InvalidArgument (or success) is a bug, and sanitizers watch.
void torment(const std::string& good, std::size_t header, const std::function<ArrayHeader(const std::string&)>& read) {
  const auto attempt = [&](const std::string& file) {
    try {
      const ArrayHeader found = read(file);
      ASSERT_LE(found.offset, file.size());
      ASSERT_LE(found.bytes, file.size() - found.offset);
    } catch (const InvalidArgument&) {}
  };
  for (std::size_t length = 0; length < good.size(); ++length) {
    EXPECT_THROW(read(good.substr(0, length)), InvalidArgument) << "truncated to " << length;
  }
  for (std::size_t i = 0; i < header; ++i) {
    for (const int value : {0, 1, 9, 32, 34, 39, 40, 41, 44, 45, 48, 57, 58, 91, 93, 123, 125, 127, 128, 255}) {
      std::string broken = good;
      broken[i] = static_cast<char>(value);
      attempt(broken);
    }
    attempt(good.substr(0, i) + good.substr(i + 1));
    attempt(good.substr(0, i) + good[i] + good.substr(i));
  }
}

TEST_F(Files, NoBrokenNpyHeaderDoesMoreThanThrow) {
  const std::string good = npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n", 24);
  torment(good, good.size() - 24, [](const std::string& file) { return read_npy(file); });
}

TEST_F(Files, NoBrokenSafetensorsHeaderDoesMoreThanThrow) {
  const std::string good =
      safetensors_file(R"({"__metadata__":{"a":"b"},"q":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})", 24);
  torment(good, good.size() - 24, [](const std::string& file) { return read_safe(file, "q"); });
}

TEST_F(Files, DeepHeadersAreRefusedWithoutRecursion) {
  EXPECT_THROW(read_safe(safetensors_file(std::string(1 << 20, '['), 0), "q"), InvalidArgument);
}

TEST_F(Files, AnUncommittedFileLeavesNothing) {
  write("kept.npy", "old");
  {
    OutputFile file(path("kept.npy"));
    file.write("half a fi");
    EXPECT_EQ(entries(), 2u);
  }
  EXPECT_EQ(entries(), 1u);
  EXPECT_EQ(fs::file_size(path("kept.npy")), 3u);
}

TEST_F(Files, NoFileAppearsUntilAllAreWritten) {
  const std::vector<float> data(4);
  ArrayWriter writer;
  writer.add(path("one.npy"), DType::f32, {4}, data.data());
  writer.add("/dev/full", DType::f32, {4}, data.data());
  EXPECT_THROW(writer.commit(), IoError);
  EXPECT_FALSE(fs::exists(path("one.npy")));
}

TEST_F(Files, LinksAreFollowedNotReplaced) {
  write("real.npy", "old");
  fs::create_symlink("real.npy", path("link.npy"));
  OutputFile file(path("link.npy"));
  file.write("newer");
  file.commit();
  EXPECT_TRUE(fs::is_symlink(path("link.npy")));
  EXPECT_EQ(fs::file_size(path("real.npy")), 5u);
}

TEST_F(Files, LocationsAreChecked) {
  EXPECT_EQ(parse_location("a.safetensors#x.y").name, "x.y");
  EXPECT_EQ(parse_location("dir#1/a.npy").path, "dir#1/a.npy");
  EXPECT_THROW(parse_location("a.safetensors"), InvalidArgument);
  EXPECT_THROW(parse_location("a.safetensors#"), InvalidArgument);
  EXPECT_THROW(parse_location("a.bin#x"), InvalidArgument);
  EXPECT_THROW(read_array(path("none.npy")), InvalidArgument);
  EXPECT_THROW(read_array(folder_.string()), InvalidArgument);
}

}  // namespace
}  // namespace longspan::cli
