// SVG pictures of a plan. Drawings only: labels are HTML beside them, so that they stay readable at any width.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "longspan/plan.h"

namespace longspan::cli {

/// Text made safe for HTML and SVG.
std::string escape_html(std::string_view text);

/// Which keys one row of each branch sees: the whole sequence, then a window around the row.
std::string keys_picture(const Plan& plan);
/// Rows (across) by heads (down) for a window, coloured by the branch that covers them.
std::string coverage_picture(const Plan& plan);
/// Two bars on a logarithmic scale: memory used, and the score matrix of dense attention.
std::string memory_picture(double extra_bytes, double dense_bytes);

}  // namespace longspan::cli
