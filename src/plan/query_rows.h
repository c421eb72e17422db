// Which positions the rows of q have.
#pragma once

#include <span>

#include "longspan/attention.h"
#include "plan/branch.h"

namespace longspan {

/// The query ranges of a call; `whole` is the one that it means by none.
inline std::span<const RowRange> ranges_of(const Call& call, const RowRange& whole) {
  return call.query_ranges.empty() ? std::span<const RowRange>(&whole, 1) : call.query_ranges;
}

/// Walks over the positions of q's rows in order.
class PositionCursor {
 public:
  PositionCursor(std::span<const RowRange> ranges, std::int64_t q_row) : ranges_(ranges), offset_(q_row) { settle(); }
  std::int64_t next() {
    const std::int64_t position = ranges_[range_].start + offset_++;
    settle();
    return position;
  }

 private:
  void settle() {
    while (range_ < ranges_.size() && offset_ >= ranges_[range_].count) offset_ -= ranges_[range_++].count;
  }
  std::span<const RowRange> ranges_;
  std::size_t range_ = 0;
  std::int64_t offset_ = 0;
};

}  // namespace longspan
