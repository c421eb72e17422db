// Runs of a message: how many pairs they are, and what rounds cut out of them.
#pragma once

#include <algorithm>
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

/// What a rank exchanges with another; nothing where they exchange nothing.
inline const ExchangePeer& peer_of(const ExchangePlan& exchange, int rank) {
  static const ExchangePeer kNone;
  const auto& peers = exchange.peers();
  const auto found = std::lower_bound(peers.begin(), peers.end(), rank,
                                      [](const ExchangePeer& peer, int wanted) { return peer.rank < wanted; });
  return found != peers.end() && found->rank == rank ? *found : kNone;
}

/// The runs whose positions lie in [begin, end), with offsets of their own, behind those of `clipped`.
inline std::vector<ExchangeRun> clip_runs(std::span<const ExchangeRun> runs, std::int64_t begin, std::int64_t end,
                                          std::vector<ExchangeRun> clipped = {}) {
  for (const ExchangeRun& run : runs) {
    const Progression rows = clip({run.first, run.step, run.count}, begin, end);
    if (rows.count == 0) continue;
    const std::int64_t offset = clipped.empty() ? 0 : clipped.back().offset + clipped.back().pairs();
    clipped.push_back({run.kv_head, run.kv_heads, rows.first, rows.step, rows.count, offset});
  }
  return clipped;
}

}  // namespace longspan
