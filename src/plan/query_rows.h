// Which rows of q lie in a strand: positions of the strand intersected with the query ranges.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "longspan/attention.h"

namespace longspan {

/// Rows [begin, begin + count) of a strand are rows q_row, q_row + stride, ... of q.
struct QueryRun {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int64_t q_row = 0;
};

/// The part of a strand that lies in one range whose first row is row `q_first` of q.
inline QueryRun query_run(const Strand& strand, const RowRange& range, std::int64_t q_first) {
  const std::int64_t low = std::max<std::int64_t>(range.start - strand.start, 0);
  const std::int64_t high = range.start + range.count - strand.start;  // exclusive
  const std::int64_t begin = (low + strand.stride - 1) / strand.stride;
  const std::int64_t end = high <= 0 ? 0 : std::min(strand.count, (high + strand.stride - 1) / strand.stride);
  if (begin >= end) return {};
  return {begin, end - begin, q_first + strand.start + begin * strand.stride - range.start};
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
