// Columns drawn at random for one block row: the lowest Philox words win.
#pragma once

#include <cstdint>
#include <vector>

namespace longspan {

/// Draws rows one after the other; what rows of one head share is kept between them. For one thread.
class ColumnDrawer {
 public:
  /// The diagonal (column `row`) and, of the other columns below `columns`, those with the lowest first word of
  /// Philox4x32-10(key = seed, counter = (row, column, head, 0)), ties to the lower column; `count` in all, ascending.
  void draw(std::uint64_t seed, std::int64_t row, std::int64_t head, std::int64_t columns, std::int64_t count,
            std::vector<std::int32_t>& drawn);

 private:
  std::uint64_t seed_ = 0;
  std::int64_t head_ = -1;
  std::vector<std::uint64_t> products_, found_, inside_;
  std::vector<std::uint32_t> counts_;
};

}  // namespace longspan
