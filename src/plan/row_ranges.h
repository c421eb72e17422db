// Ascending lists of disjoint ranges of positions: what two have in common, and what one leaves of another.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "longspan/plan.h"

namespace longspan {

using RowRanges = std::vector<RowRange>;

inline std::int64_t end_of(const RowRange& range) { return range.start + range.count; }

inline std::int64_t rows_in(std::span<const RowRange> ranges) {
  std::int64_t rows = 0;
  for (const RowRange& range : ranges) rows += range.count;
  return rows;
}

/// The row of a shard that holds a position.
inline std::int64_t row_of(std::span<const RowRange> ranges, std::int64_t position) {
  std::int64_t row = 0;
  for (const RowRange& range : ranges) {
    if (position < end_of(range)) return row + position - range.start;
    row += range.count;
  }
  return row;
}

/// Ranges of `a` stay apart where they meet.
inline RowRanges common_rows(std::span<const RowRange> a, std::span<const RowRange> b) {
  RowRanges common;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const std::int64_t begin = std::max(a[i].start, b[j].start), end = std::min(end_of(a[i]), end_of(b[j]));
    if (begin < end) common.push_back({begin, end - begin});
    if (end_of(a[i]) < end_of(b[j])) ++i;
    else ++j;
  }
  return common;
}

/// What is left of `all` without `taken`.
inline RowRanges rows_without(std::span<const RowRange> all, std::span<const RowRange> taken) {
  RowRanges left;
  std::size_t next = 0;
  for (const RowRange& range : all) {
    std::int64_t begin = range.start;
    while (next < taken.size() && end_of(taken[next]) <= begin) ++next;
    for (std::size_t i = next; i < taken.size() && taken[i].start < end_of(range); ++i) {
      if (taken[i].start > begin) left.push_back({begin, taken[i].start - begin});
      begin = std::max(begin, end_of(taken[i]));
    }
    if (begin < end_of(range)) left.push_back({begin, end_of(range) - begin});
  }
  return left;
}

}  // namespace longspan
