// Columns drawn at random for one block row: the lowest Philox words win.
#pragma once

#include <cstdint>
#include <vector>

namespace longspan {

/// The diagonal (column `row`) and, of the other columns below `columns`, those with the lowest first word of
/// Philox4x32-10(key = seed, counter = (row, column, head, 0)), ties to the lower column; `count` in all, ascending.
/// `scratch` is reused from call to call.
void draw_columns(std::uint64_t seed, std::int64_t row, std::int64_t head, std::int64_t columns, std::int64_t count,
                  std::vector<std::uint64_t>& scratch, std::vector<std::int32_t>& drawn);

}  // namespace longspan
