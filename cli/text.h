// Text from files and arguments, made fit for a terminal.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace longspan::cli {

/// Whether the bytes are UTF-8 (no overlong forms, no surrogates).
bool is_utf8(std::string_view text);

/// The text with control characters, marks that reorder text, and bytes that are no UTF-8 written as escapes: "\x1b",
/// "\n", "\u202e". A hostile file name or header can thus neither move the cursor nor change the window's title.
std::string printable(std::string_view text);

/// Columns that the text takes on screen: colour codes and UTF-8 continuation bytes take none.
std::size_t visible_width(std::string_view text);

/// Breaks lines at spaces so that none is wider than `columns`; longer words stay whole.
std::string wrapped(std::string_view text, std::size_t columns);

/// At most `columns` wide, the middle replaced by "..." where it is longer.
std::string elided(std::string_view text, std::size_t columns);

}  // namespace longspan::cli
