// Runs of a message: how many pairs they are, and what rounds cut out of them.
#pragma once

#include <span>
#include <vector>

#include "longspan/exchange.h"
#include "plan/row_set.h"

namespace longspan {

inline std::int64_t pairs_of(std::span<const ExchangeRun> runs) {
  std::int64_t pairs = 0;
  for (const ExchangeRun& run : runs) pairs += run.pairs();
  return pairs;
}

/// The runs whose positions lie in [begin, end), with offsets of their own.
inline std::vector<ExchangeRun> clip_runs(std::span<const ExchangeRun> runs, std::int64_t begin, std::int64_t end) {
  std::vector<ExchangeRun> clipped;
  std::int64_t offset = 0;
  for (const ExchangeRun& run : runs) {
    const Progression part = clip({run.first, run.step, run.count}, begin, end);
    if (part.count == 0) continue;
    clipped.push_back({run.kv_head, run.kv_heads, part.first, part.step, part.count, offset});
    offset += clipped.back().pairs();
  }
  return clipped;
}

}  // namespace longspan
