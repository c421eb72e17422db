// How many columns of a block row a density keeps.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace longspan {

/// Of `candidates` columns, at least one: the diagonal.
inline std::int64_t kept_columns(double density, std::int64_t candidates) {
  return std::max<std::int64_t>(1,
                                static_cast<std::int64_t>(std::floor(density * static_cast<double>(candidates) + 0.5)));
}

}  // namespace longspan
