// Reading the small Python literal in front of an .npy array without trusting it.
#include "files/npy.h"

#include <fmt/format.h>

#include <bit>
#include <charconv>
#include <cstring>
#include <optional>

#include "longspan/error.h"

namespace longspan::cli {
namespace {

static_assert(std::endian::native == std::endian::little,
              "files hold little-endian numbers, which are mapped as they are");

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kMostHeaderBytes = 1 << 20;

/// A cursor over the header's text.
class Literal {
 public:
  Literal(std::string_view text, const std::string& where) : text_(text), where_(where) {}

  [[noreturn]] void fail(std::string_view message) const {
    throw InvalidArgument(where_, fmt::format("{}: bad .npy header: {}", where_, message));
  }
  bool at_end() {
    skip_space();
    return position_ >= text_.size();
  }
  bool take(char wanted) {
    skip_space();
    if (position_ >= text_.size() || text_[position_] != wanted) return false;
    ++position_;
    return true;
  }
  void expect(char wanted) {
    if (!take(wanted)) fail(fmt::format("expected '{}' at byte {}", wanted, position_));
  }
  std::string_view quoted() {
    skip_space();
    const char quote = position_ < text_.size() ? text_[position_] : '\0';
    if (quote != '\'' && quote != '"') fail(fmt::format("expected a quoted word at byte {}", position_));
    const std::size_t end = text_.find(quote, position_ + 1);
    if (end == std::string_view::npos) fail("a quote is never closed");
    const std::string_view word = text_.substr(position_ + 1, end - position_ - 1);
    position_ = end + 1;
    return word;
  }
  std::string_view word() {
    skip_space();
    std::size_t end = position_;
    while (end < text_.size() && ((text_[end] | 0x20) >= 'a' && (text_[end] | 0x20) <= 'z')) ++end;
    const std::string_view found = text_.substr(position_, end - position_);
    position_ = end;
    return found;
  }
  std::int64_t integer() {
    skip_space();
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text_.data() + position_, text_.data() + text_.size(), value);
    if (error == std::errc::result_out_of_range) fail("a size in the shape overflows 64 bits");
    if (error != std::errc{}) fail(fmt::format("expected a number at byte {}", position_));
    position_ = static_cast<std::size_t>(end - text_.data());
    take('L');  // Python 2 wrote long integers so
    return value;
  }

 private:
  void skip_space() {
    while (position_ < text_.size() && (text_[position_] == ' ' || text_[position_] == '\n')) ++position_;
  }
  std::string_view text_;
  const std::string& where_;
  std::size_t position_ = 0;
};

DType dtype_of(std::string_view descr, const std::string& where, const ReadOptions& options) {
  if (descr == "<f4") return DType::f32;
  if (descr == "<f2") return DType::f16;
  if (descr == "<f8") return DType::f64;
  if (descr == "<i4") return DType::i32;
  if (descr == "<i8") return DType::i64;
  if (descr == "|b1" || descr == "|u1") return DType::boolean;
  if (descr == "<V2" || descr == "|V2" || descr == "bfloat16") return DType::bf16;
  if (descr == "<u2") {
    if (options.uint16_is_bf16) return DType::bf16;
    throw InvalidArgument(where, fmt::format("{}: uint16 may be bfloat16 bits: say so with --dtype bf16", where));
  }
  if (!descr.empty() && descr.front() == '>') {
    throw InvalidArgument(
        where, fmt::format("{}: element type '{}' is big-endian: save x.astype('<{}')", where, descr, descr.substr(1)));
  }
  throw InvalidArgument(where, fmt::format("{}: element type '{}' is not one of float32, float16, bfloat16 (as V2), "
                                           "float64, int32, int64, bool",
                                           where, descr.substr(0, 40)));
}

std::vector<std::int64_t> shape_of(Literal& literal) {
  std::vector<std::int64_t> shape;
  literal.expect('(');
  while (!literal.take(')')) {
    if (shape.size() >= 64) literal.fail("the shape has more than 64 sizes");
    shape.push_back(literal.integer());
    if (!literal.take(',')) {
      literal.expect(')');
      break;
    }
  }
  return shape;
}

}  // namespace

ArrayHeader read_npy_header(std::span<const std::byte> file, const std::string& where, const ReadOptions& options) {
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
  const auto refuse = [&](const std::string& message) {
    throw InvalidArgument(where, fmt::format("{}: {}", where, message));
  };
  if (text.size() < kMagic.size() + 4 || !text.starts_with(kMagic)) {
    refuse("not an .npy file: it does not begin with NumPy's magic bytes");
  }
  const int major = static_cast<unsigned char>(text[6]);
  if (major < 1 || major > 3) refuse(fmt::format("version {} of the .npy format; versions 1 to 3 are known", major));
  const std::size_t length_bytes = major == 1 ? 2 : 4;
  const std::size_t begin = kMagic.size() + 2 + length_bytes;
  if (text.size() < begin) refuse("truncated inside the .npy header");
  std::size_t length = 0;
  std::memcpy(&length, file.data() + kMagic.size() + 2, length_bytes);
  if (length > kMostHeaderBytes)
    refuse(fmt::format("an .npy header of {} bytes; at most {} make sense", length, kMostHeaderBytes));
  if (length > text.size() - begin) refuse("truncated inside the .npy header");

  Literal literal(text.substr(begin, length), where);
  std::optional<DType> dtype;
  std::optional<bool> fortran;
  std::optional<std::vector<std::int64_t>> shape;
  literal.expect('{');
  while (!literal.take('}')) {
    const std::string_view key = literal.quoted();
    literal.expect(':');
    if (key == "descr" && !dtype) {
      if (literal.take('[')) literal.fail("structured element types are not supported");
      dtype = dtype_of(literal.quoted(), where, options);
    } else if (key == "fortran_order" && !fortran) {
      const std::string_view value = literal.word();
      if (value != "True" && value != "False") literal.fail("fortran_order is neither True nor False");
      fortran = value == "True";
    } else if (key == "shape" && !shape) {
      shape = shape_of(literal);
    } else {
      literal.fail(fmt::format("unexpected key '{}'", key.substr(0, 40)));
    }
    if (!literal.take(',')) {
      literal.expect('}');
      break;
    }
  }
  if (!literal.at_end()) literal.fail("text after the closing brace");
  if (!dtype || !fortran || !shape) literal.fail("descr, fortran_order or shape is missing");
  if (*fortran) refuse("Fortran order: save np.ascontiguousarray(x)");

  const std::size_t bytes = array_bytes(where, *shape, *dtype);
  const std::size_t present = text.size() - begin - length;
  if (bytes != present) {
    refuse(fmt::format("the header promises {} bytes of data, the file holds {}: {}", bytes, present,
                       bytes > present ? "it is truncated" : "it holds more than one array"));
  }
  return {*dtype, std::move(*shape), begin + length, bytes};
}

std::string npy_header(DType dtype, const std::vector<std::int64_t>& shape) {
  const auto descr = [&]() -> std::string_view {
    switch (dtype) {
      case DType::f32:
        return "<f4";
      case DType::f16:
        return "<f2";
      case DType::f64:
        return "<f8";
      case DType::bf16:
        return "<V2";
      case DType::i32:
        return "<i4";
      case DType::i64:
        return "<i8";
      case DType::boolean:
        return "|b1";
    }
    throw Unsupported("an element type that .npy cannot hold");
  }();
  std::string sizes;
  for (const std::int64_t size : shape) sizes += fmt::format("{}, ", size);
  if (shape.size() > 1) sizes.resize(sizes.size() - 2);
  if (shape.size() == 1) sizes.resize(sizes.size() - 1);
  std::string literal = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}", descr, sizes);
  constexpr std::size_t kPrefix = 10;  // magic, version, length
  const std::size_t total = (kPrefix + literal.size() + 1 + 63) / 64 * 64;
  literal.append(total - kPrefix - literal.size() - 1, ' ');
  literal += '\n';
  std::string header(kMagic);
  header += '\x01';
  header += '\x00';
  header += static_cast<char>(literal.size() & 0xFF);
  header += static_cast<char>(literal.size() >> 8);
  return header + literal;
}

}  // namespace longspan::cli
