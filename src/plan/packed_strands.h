// The strands of a rank that cross ranks, packed: where each begins, and where its rows come from. Pure integers.
#pragma once

#include <cstdint>
#include <vector>

#include "longspan/exchange.h"

namespace longspan {

/// Ordered sums: target i is the sum of sources[first[i]] .. sources[first[i + 1] - 1].
struct RowSums {
  std::vector<std::int32_t> targets, first, sources;
};

/// Rows of one batch entry. A pair is a row of the rank times its key/value heads, plus the head; pairs of messages are
/// numbered through all peers in the order of their ranks.
struct PackedPlan {
  static constexpr std::int32_t kZeros = -1;
  static constexpr std::int64_t kZeroRows = 128;  // behind each strand: a tile of keys may end after it
  /// Pair i of the received messages, as a source.
  static constexpr std::int32_t received(std::int64_t pair) { return static_cast<std::int32_t>(-2 - pair); }

  std::int64_t rows = 0;              // of packed strands
  std::size_t range_places = 0;       // of one range of the shard
  std::vector<std::int32_t> places;   // for each range and branch: {segment, first row by head} twice; -1: in place
  std::vector<std::int32_t> sources;  // of each packed row: a pair of the rank, received() or kZeros
  std::vector<std::int32_t> sends;    // of each pair that is sent: the pair of the rank
  /// Gradients. Of received pairs: sums of packed rows. Of pairs of the rank: of packed rows in the order of branches,
  /// and then of pairs that come back, as received(), in the order of ranks.
  RowSums returned, own;

  /// Throws Unsupported where 32 bits do not number all rows, and for block masks.
  PackedPlan(const Plan& plan, const ExchangePlan& exchange);
};

}  // namespace longspan
