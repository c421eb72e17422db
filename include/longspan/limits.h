// Bounds of sizes: far beyond what any machine holds, and low enough that their products fit 64 bits.
#pragma once

#include <cstdint>

namespace longspan {

inline constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;  ///< also of query rows and batch entries
inline constexpr std::int64_t kMostHeads = std::int64_t{1} << 20;

inline constexpr std::int64_t kMostDropoutRows = (std::int64_t{1} << 35) - 1;  ///< of a strand with dropout
inline constexpr double kLeastDropout = 1.0 / 65536;                           ///< smaller ones drop nothing

}  // namespace longspan
