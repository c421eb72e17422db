// Pictures of what attends to what: queries down, keys across, for any plan.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "longspan/export.h"
#include "longspan/plan.h"

namespace longspan {

/// A square of cells; share is how much of the keys that a cell's strands have in it is attended, from 0 to 1.
struct LONGSPAN_API PatternPicture {
  std::int64_t cells = 0;
  std::int64_t cell_tokens = 0;
  std::vector<float> share;  ///< [cells][cells]

  float at(std::int64_t row, std::int64_t column) const {
    return share[static_cast<std::size_t>(row * cells + column)];
  }
  /// Lines of two characters per cell; ASCII leaves the block elements out.
  std::string to_text(bool ascii = false) const;
  /// A drawing of its own, readable on light and dark pages.
  std::string to_svg(std::string_view title) const;
};

/// One head of a plan in at most `most_cells` cells a side; block masks show whole blocks. Adaptive masks, which only
/// data decide, show nothing.
LONGSPAN_API PatternPicture picture(const Plan& plan, std::int64_t head = 0, std::int64_t most_cells = 48);

}  // namespace longspan
