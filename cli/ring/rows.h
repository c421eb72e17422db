// Walking over the rows of one rank.
#pragma once

#include <cstddef>
#include <span>

#include "longspan/plan.h"
#include "longspan/tensor_view.h"

namespace longspan::cli {

inline std::size_t row_bytes(const ConstTensorView& view) {
  return static_cast<std::size_t>(view.columns() * size_of(view.dtype));
}

inline const std::byte* row_at(const ConstTensorView& view, std::int64_t entry, std::int64_t row, std::int64_t head) {
  return static_cast<const std::byte*>(view.data) + view.offset(entry, row, head) * size_of(view.dtype);
}

/// body(row of the rank, position) over its rows.
template <class Body>
void for_each_position(std::span<const RowRange> ranges, Body&& body) {
  std::int64_t row = 0;
  for (const RowRange& range : ranges) {
    for (std::int64_t position = range.start; position < range.start + range.count; ++position) body(row++, position);
  }
}

}  // namespace longspan::cli
