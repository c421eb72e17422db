// Unions of arithmetic progressions of rows, kept as disjoint progressions.
#pragma once

#include <cstdint>
#include <vector>

namespace longspan {

/// first, first + step, ..., `count` of them.
struct Progression {
  std::int64_t first = 0;
  std::int64_t step = 1;
  std::int64_t count = 0;

  std::int64_t last() const { return first + (count - 1) * step; }
  bool contains(std::int64_t row) const { return row >= first && row <= last() && (row - first) % step == 0; }
  bool operator==(const Progression&) const = default;
};

/// The part of a progression in [begin, end).
Progression clip(const Progression& rows, std::int64_t begin, std::int64_t end);

/// The same rows, each once, as few progressions in ascending order of their first rows.
std::vector<Progression> disjoint_union(std::vector<Progression> rows);

}  // namespace longspan
