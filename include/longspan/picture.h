// Pictures of what attends to what: queries down, keys across, for any plan.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "longspan/export.h"
#include "longspan/plan.h"

namespace longspan {

/// A square of cells; share is how many of a cell's (query, key) pairs attend, from 0 to 1. A pair that two branches
/// give counts twice, as it does in the softmax.
struct LONGSPAN_API PatternPicture {
  std::int64_t tokens = 0;
  std::int64_t head = 0;
  std::int64_t cells = 0;
  std::int64_t cell_tokens = 0;
  std::vector<float> share;  ///< [cells][cells]

  float at(std::int64_t row, std::int64_t column) const {
    return share[static_cast<std::size_t>(row * cells + column)];
  }
  /// Lines of two characters per cell; ASCII leaves the block elements out.
  std::string to_text(bool ascii = false) const;
  /// A drawing of its own, readable on light and dark pages: title, axes with positions, legend.
  std::string to_svg(std::string_view title) const;
};

/// What the characters of to_text() mean, in one line.
LONGSPAN_API std::string shade_legend(bool ascii = false);
/// Several heads side by side in one drawing.
LONGSPAN_API std::string to_svg(std::span<const PatternPicture> pictures, std::string_view title);

/// One head of a plan in at most `most_cells` cells a side; block masks show whole blocks. Cells of many rows are
/// judged by some of them. Adaptive masks, which only data decide, show nothing.
LONGSPAN_API PatternPicture picture(const Plan& plan, std::int64_t head = 0, std::int64_t most_cells = 48);

}  // namespace longspan
