// Decoding UTF-8 strictly, and what may reach a terminal.
#include "text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <optional>

namespace longspan::cli {
namespace {

struct Character {
  std::uint32_t code = 0;
  std::size_t bytes = 1;
};

/// The character at the front of a non-empty text, or nothing if its bytes are no UTF-8.
std::optional<Character> first_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x80) return Character{byte(0), 1};
  const std::size_t bytes = byte(0) >= 0xF0 ? 4 : byte(0) >= 0xE0 ? 3 : 2;
  if (byte(0) < 0xC2 || byte(0) > 0xF4 || text.size() < bytes) return std::nullopt;
  std::uint32_t code = byte(0) & (0xFFu >> (bytes + 1));
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0u) != 0x80u) return std::nullopt;
    code = code << 6 | (byte(i) & 0x3Fu);
  }
  constexpr std::uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  if (code < kSmallest[bytes] || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return std::nullopt;
  return Character{code, bytes};
}

bool is_control(std::uint32_t code) { return code < 0x20 || (code >= 0x7F && code < 0xA0); }

/// Separators of lines, and marks that change the direction of what follows.
bool is_layout(std::uint32_t code) {
  return code == 0x200E || code == 0x200F || code == 0x061C || (code >= 0x2028 && code <= 0x202E) ||
         (code >= 0x2066 && code <= 0x2069);
}

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const auto character = first_character(text);
    if (!character) return false;
    text.remove_prefix(character->bytes);
  }
  return true;
}

std::string printable(std::string_view text) {
  std::string safe;
  while (!text.empty()) {
    const auto character = first_character(text);
    const std::size_t bytes = character ? character->bytes : 1;
    if (!character) safe += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
    else if (character->code == '\n') safe += "\\n";
    else if (character->code == '\t') safe += "\\t";
    else if (is_control(character->code)) safe += fmt::format("\\x{:02x}", character->code);
    else if (is_layout(character->code)) safe += fmt::format("\\u{:04x}", character->code);
    else safe += text.substr(0, bytes);
    text.remove_prefix(bytes);
  }
  return safe;
}

std::size_t visible_width(std::string_view text) {
  std::size_t width = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\x1b') {
      while (i < text.size() && text[i] != 'm') ++i;
    } else if ((static_cast<unsigned char>(text[i]) & 0xC0u) != 0x80u) {
      ++width;
    }
  }
  return width;
}

std::string wrapped(std::string_view text, std::size_t columns) {
  std::string lines;
  std::size_t used = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, end);
    const std::size_t width = visible_width(word);
    if (!lines.empty()) {
      const bool fits = used + 1 + width <= columns;
      lines += fits ? ' ' : '\n';
      used = fits ? used + 1 : 0;
    }
    lines += word;
    used += width;
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

std::string elided(std::string_view text, std::size_t columns) {
  constexpr std::string_view kDots = "...";
  if (text.size() <= columns || columns <= kDots.size()) return std::string(text);
  const std::size_t kept = columns - kDots.size(), front = (kept + 1) / 2;
  // A cut inside a character would leave bytes that are no UTF-8.
  const auto continues = [&](std::size_t i) { return (static_cast<unsigned char>(text[i]) & 0xC0u) == 0x80u; };
  std::size_t first = front, last = text.size() - (kept - front);
  while (first > 0 && continues(first)) --first;
  while (last < text.size() && continues(last)) ++last;
  return std::string(text.substr(0, first)).append(kDots).append(text.substr(last));
}

}  // namespace longspan::cli
