// Reading the canonical text: words, numbers, and errors that show where they are.
#pragma once

#include <charconv>
#include <string>
#include <string_view>

#include "util/reject.h"

namespace longspan {

/// At most so many bytes, cut between characters.
inline std::string shortened(std::string_view text, std::size_t most) {
  if (text.size() <= most) return std::string(text);
  std::size_t end = most - 3;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;  // within a UTF-8 character
  return std::string(text.substr(0, end)) + "...";
}

class TextReader {
 public:
  explicit TextReader(std::string_view text) : text_(text) {}

  [[noreturn]] void fail(std::string_view word, std::string_view message) const {
    reject("pattern", "pattern '{}': '{}' {}", shortened(text_, 120), shortened(word, 120), message);
  }

  /// Next word; a mask in braces belongs to the word it follows.
  std::string_view next() {
    while (position_ < text_.size() && text_[position_] == ' ') ++position_;
    const std::size_t begin = position_;
    bool braces = false;
    while (position_ < text_.size() && (braces || text_[position_] != ' ')) {
      if (text_[position_] == '{') braces = true;
      if (text_[position_] == '}') braces = false;
      ++position_;
    }
    const std::string_view word = text_.substr(begin, position_ - begin);
    if (braces) fail(word, "has a brace that is never closed");
    return word;
  }

  template <class Number>
  Number number(std::string_view word, std::string_view digits) const {
    Number value{};
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc{} || end != digits.data() + digits.size() || digits.empty()) fail(word, "needs a number");
    return value;
  }

 private:
  std::string_view text_;
  std::size_t position_ = 0;
};

}  // namespace longspan
