// Reading and writing the JSON table of a safetensors file without trusting it.
#include "files/safetensors.h"

#include <fmt/format.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "longspan/error.h"
#include "text.h"

namespace longspan::cli {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kLengthBytes = 8;
constexpr std::uint64_t kMostHeaderBytes = 100'000'000;
constexpr std::size_t kAlignment = 64;

constexpr std::pair<std::string_view, DType> kTypes[] = {
    {"F32", DType::f32}, {"F16", DType::f16}, {"BF16", DType::bf16},   {"F64", DType::f64},
    {"I32", DType::i32}, {"I64", DType::i64}, {"BOOL", DType::boolean}};

[[noreturn]] void refuse(const std::string& where, const std::string& message) {
  throw InvalidArgument(where, fmt::format("{}: {}", where, message));
}

DType dtype_of(const std::string& text, const std::string& where, const ReadOptions& options) {
  for (const auto& [name, dtype] : kTypes) {
    if (name == text) return dtype;
  }
  if (text == "U8") return DType::boolean;
  if (text == "U16" && options.uint16_is_bf16) return DType::bf16;
  refuse(where, fmt::format("element type '{}' is not one of F32, F16, BF16, F64, I32, I64, BOOL", text.substr(0, 40)));
}

/// A non-negative whole number; JSON also allows 1e300 and -1.
std::int64_t whole_number(const Json& value, const std::string& where, std::string_view what) {
  if (value.is_number_unsigned() && value.get<std::uint64_t>() <= std::uint64_t{INT64_MAX}) {
    return static_cast<std::int64_t>(value.get<std::uint64_t>());
  }
  refuse(where, fmt::format("{} is not a whole number below 2^63", what));
}

Json parse_table(std::string_view text, const std::string& where) {
  std::set<std::string> names;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > 4) refuse(where, "the header nests too deeply to be a table of tensors");
    if (depth == 1 && event == Json::parse_event_t::key && !names.insert(parsed.get<std::string>()).second) {
      refuse(where, fmt::format("the header names '{}' twice", parsed.get<std::string>()));
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), watch);
  } catch (const Json::exception& error) {
    refuse(where, fmt::format("the header is not JSON ({})", error.what()));
  }
}

}  // namespace

ArrayHeader read_safetensors_header(std::span<const std::byte> file, const std::string& where, const std::string& name,
                                    const ReadOptions& options) {
  std::uint64_t length = 0;
  if (file.size() < kLengthBytes) refuse(where, "truncated: a safetensors file begins with 8 bytes of length");
  std::memcpy(&length, file.data(), kLengthBytes);
  if (length > kMostHeaderBytes) {
    refuse(where, fmt::format("a header of {} bytes; safetensors allows {}", length, kMostHeaderBytes));
  }
  if (length > file.size() - kLengthBytes) {
    refuse(where, fmt::format("truncated: the header has {} bytes, the file {}", length, file.size()));
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes, length);
  const Json table = parse_table(text, where);
  if (!table.is_object()) refuse(where, "the header is not a table of tensors");
  const auto found = table.find(name);
  if (found == table.end() || name == "__metadata__") {
    std::string names;
    for (const auto& [key, value] : table.items()) {
      if (key != "__metadata__" && names.size() < 200) names += (names.empty() ? "" : ", ") + key;
    }
    refuse(where, fmt::format("no tensor '{}'; it holds: {}", name, names.empty() ? "none" : names));
  }
  const std::string label = fmt::format("{}#{}", where, name);
  const Json& entry = *found;
  if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string() || !entry.contains("shape") ||
      !entry["shape"].is_array() || !entry.contains("data_offsets") || !entry["data_offsets"].is_array() ||
      entry["data_offsets"].size() != 2) {
    refuse(label, "its entry lacks dtype, shape or data_offsets of the right kind");
  }
  ArrayHeader header;
  header.dtype = dtype_of(entry["dtype"].get<std::string>(), label, options);
  for (const Json& size : entry["shape"]) header.shape.push_back(whole_number(size, label, "a size in the shape"));
  header.bytes = array_bytes(label, header.shape, header.dtype);

  const auto begin = static_cast<std::uint64_t>(whole_number(entry["data_offsets"][0], label, "a data offset"));
  const auto end = static_cast<std::uint64_t>(whole_number(entry["data_offsets"][1], label, "a data offset"));
  const std::uint64_t data_bytes = file.size() - kLengthBytes - length;
  if (begin > end || end > data_bytes) {
    refuse(label, fmt::format("data offsets [{}, {}] lie outside the file's {} bytes of data", begin, end, data_bytes));
  }
  if (end - begin != header.bytes) {
    refuse(label, fmt::format("its shape needs {} bytes, its data offsets hold {}", header.bytes, end - begin));
  }
  header.offset = kLengthBytes + length + begin;
  return header;
}

void check_tensor_name(const std::string& name, const std::string& location) {
  constexpr std::size_t kMostNameBytes = 4096;
  const auto fail = [&](std::string_view message) {
    throw InvalidArgument(location, fmt::format("'{}': {}", elided(location, 100), message));
  };
  if (name == "__metadata__")
    fail("__metadata__ is not the name of a tensor in safetensors files: choose another name");
  if (!is_utf8(name)) fail("the name of the tensor is not UTF-8, which safetensors files require: choose another name");
  if (name.size() > kMostNameBytes)
    fail(fmt::format("the name of the tensor has {} bytes: give at most {}", name.size(), kMostNameBytes));
}

std::string safetensors_header(const std::vector<NamedArray>& arrays) {
  Json table = Json::object();
  std::size_t offset = 0;
  for (const NamedArray& array : arrays) {
    const std::size_t bytes = array_bytes(array.name, array.shape, array.dtype);
    std::string_view type_name;
    for (const auto& [name, dtype] : kTypes) {
      if (dtype == array.dtype) type_name = name;
    }
    table[array.name] = {{"dtype", type_name}, {"shape", array.shape}, {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = table.dump();
  text.append((kAlignment - (kLengthBytes + text.size()) % kAlignment) % kAlignment, ' ');
  const std::uint64_t length = text.size();
  std::string header(kLengthBytes, '\0');
  std::memcpy(header.data(), &length, kLengthBytes);
  return header + text;
}

}  // namespace longspan::cli
