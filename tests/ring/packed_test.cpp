// Packed strands of every rank, as integers: rows are numbers that say which they are, moved by the tables that GPUs
// move them by, and gradients are counted back to where they belong.
#include "plan/packed_strands.h"

#include <gtest/gtest.h>

#include <map>

#include "plan/branch.h"
#include "plan/row_ranges.h"
#include "ring/ring_cases.h"

namespace longspan::testing {
namespace {

using Pair = std::pair<std::int64_t, std::int64_t>;  // position, key/value head
constexpr Pair kNoRow{-1, -1};

struct Rank {
  ExchangePlan exchange;
  PackedPlan packed;
  std::span<const RowRange> ranges;
  std::vector<Pair> own, received, rows;  // pairs of the rank, of messages, and packed
};

/// All ranks, with their messages exchanged.
std::vector<Rank> ranks_of(const Plan& plan, const Shards& shards) {
  const std::int64_t heads = plan.problem().kv_heads;
  std::vector<Rank> ranks;
  for (int r = 0; r < shards.ranks(); ++r) {
    ExchangePlan exchange(plan, shards, r);
    PackedPlan packed(plan, exchange);
    ranks.push_back({std::move(exchange), std::move(packed), shards.ranges(r), {}, {}, {}});
    for (const RowRange& range : shards.ranges(r)) {
      for (std::int64_t position = range.start; position < end_of(range); ++position)
        for (std::int64_t head = 0; head < heads; ++head) ranks.back().own.push_back({position, head});
    }
  }
  for (int r = 0; r < shards.ranks(); ++r) {
    Rank& rank = ranks[static_cast<std::size_t>(r)];
    for (const ExchangePeer& from : rank.exchange.peers()) {
      const Rank& peer = ranks[static_cast<std::size_t>(from.rank)];
      std::size_t pair = 0;
      for (const ExchangePeer& to : peer.exchange.peers()) {
        for (std::int64_t i = 0; i < to.send_pairs; ++i, ++pair)
          if (to.rank == r) rank.received.push_back(peer.own[static_cast<std::size_t>(peer.packed.sends[pair])]);
      }
    }
    for (const std::int32_t source : rank.packed.sources) {
      rank.rows.push_back(source >= 0                    ? rank.own[static_cast<std::size_t>(source)]
                          : source == PackedPlan::kZeros ? kNoRow
                                                         : rank.received[static_cast<std::size_t>(-2 - source)]);
    }
  }
  return ranks;
}

/// Where a strand begins among packed rows; -1: in place.
std::int64_t place_of(const Rank& rank, std::size_t r, std::size_t b, std::int64_t segment, std::int64_t head,
                      std::int64_t heads) {
  for (std::size_t i = 0; i < 2; ++i) {
    const std::int32_t* const at =
        rank.packed.places.data() + r * rank.packed.range_places + (2 * b + i) * static_cast<std::size_t>(1 + heads);
    if (at[0] == segment) return at[1 + head];
  }
  return -1;
}

/// Every row that a query of a rank attends to is where its kernel looks for it.
void expect_rows(const Plan& plan, const Rank& rank, const std::string& what) {
  const Problem& problem = plan.problem();
  const std::int64_t group = problem.heads / problem.kv_heads;
  std::int64_t first_row = 0;
  for (std::size_t r = 0; r < rank.ranges.size(); first_row += rank.ranges[r++].count) {
    const RowRange& range = rank.ranges[r];
    for (std::size_t b = 0; b < plan.branches().size() && range.count > 0; ++b) {
      const BranchPlan& branch = plan.branches()[b];
      if (!branch.active(problem.tokens)) continue;
      for (std::int64_t segment = range.start / branch.segment; segment <= (end_of(range) - 1) / branch.segment;
           ++segment) {
        for (std::int64_t head = branch.head_begin; head < branch.head_begin + branch.head_count; ++head) {
          const Strand strand = branch.strand(head, segment, problem.tokens);
          const QueryRun queries = query_run(strand, range);
          if (queries.count == 0) continue;
          const std::int64_t end = plan.options().causal ? queries.begin + queries.count : strand.count;
          const std::int64_t place = place_of(rank, r, b, segment, head, problem.heads);
          for (std::int64_t t = 0; t < end; ++t) {
            const std::int64_t position = strand.start + t * strand.stride;
            const std::int64_t row =
                place >= 0 ? place + t : (position - range.start + first_row) * problem.kv_heads + head / group;
            const std::vector<Pair>& list = place >= 0 ? rank.rows : rank.own;
            ASSERT_TRUE(row >= 0 && row < static_cast<std::int64_t>(list.size())) << what;
            ASSERT_EQ(list[static_cast<std::size_t>(row)], Pair(position, head / group)) << what;
          }
        }
      }
    }
  }
}

/// Each packed row and each row in place counts once; what owners have in the end is all of it.
void expect_gradients(const std::vector<Rank>& ranks, const std::string& what) {
  std::map<Pair, std::int64_t> want, got;
  std::vector<std::vector<std::int64_t>> returned(ranks.size());
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const Rank& rank = ranks[r];
    const auto weight = [&](std::size_t row) { return static_cast<std::int64_t>(1000 * r + row + 1); };
    for (std::size_t row = 0; row < rank.rows.size(); ++row)
      if (rank.rows[row] != kNoRow) want[rank.rows[row]] += weight(row);
    const RowSums& sums = rank.packed.returned;
    ASSERT_EQ(sums.targets.size(), rank.received.size()) << what;
    returned[r].resize(rank.received.size());
    for (std::size_t i = 0; i < sums.targets.size(); ++i) {
      for (std::int32_t s = sums.first[i]; s < sums.first[i + 1]; ++s)
        returned[r][static_cast<std::size_t>(sums.targets[i])] +=
            weight(static_cast<std::size_t>(sums.sources[static_cast<std::size_t>(s)]));
    }
  }
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const Rank& rank = ranks[r];
    std::vector<std::int64_t> back;  // of each pair that was sent
    for (const ExchangePeer& to : rank.exchange.peers()) {
      const Rank& peer = ranks[static_cast<std::size_t>(to.rank)];
      std::size_t pair = 0;
      for (const ExchangePeer& from : peer.exchange.peers()) {
        for (std::int64_t i = 0; i < from.receive_pairs; ++i, ++pair)
          if (from.rank == static_cast<int>(r)) back.push_back(returned[static_cast<std::size_t>(to.rank)][pair]);
      }
    }
    ASSERT_EQ(back.size(), rank.packed.sends.size()) << what;
    const RowSums& sums = rank.packed.own;
    for (std::size_t i = 0; i < sums.targets.size(); ++i) {
      for (std::int32_t s = sums.first[i]; s < sums.first[i + 1]; ++s) {
        const std::int32_t source = sums.sources[static_cast<std::size_t>(s)];
        got[rank.own[static_cast<std::size_t>(sums.targets[i])]] +=
            source >= 0 ? static_cast<std::int64_t>(1000 * r) + source + 1
                        : back[static_cast<std::size_t>(-2 - source)];
      }
    }
  }
  EXPECT_EQ(got, want) << what;
}

TEST(PackedStrands, HoldEveryRowAndReturnEveryGradient) {
  const std::int64_t tokens = 211;
  const std::vector<Pattern> patterns = {
      Pattern::dense(),
      Pattern::longnet({16, 60, 400}, {1, 3, 6}),
      Pattern::longnet({30, 211}, {2, 7}, PhaseRule::torchscale),
      Pattern::dilated({32, 64, 211}, {1, 5, 4}),
      Pattern::longnet({50}, {64}),
  };
  for (const Pattern& pattern : patterns) {
    for (const bool causal : {false, true}) {
      for (const std::int64_t kv_heads : {6, 2}) {
        Options options;
        options.causal = causal;
        Problem problem;
        problem.tokens = problem.query_rows = tokens;
        problem.heads = 6;
        problem.kv_heads = kv_heads;
        const Plan plan(pattern, options, problem);
        std::vector<Shards> all;
        for (const int ranks : {1, 2, 3, 5, 8}) all.push_back(uneven(tokens, ranks));
        all.push_back(Shards::even(tokens, 13));
        for (const int ranks : {2, 3, 13}) all.push_back(Shards::zigzag(tokens, ranks));
        const std::int64_t with_empty[] = {0, 0, 100, 100, 211};
        all.push_back(Shards::contiguous(with_empty));
        for (const Shards& shards : all) {
          const std::string what = fmt::format("{}{}, {} key/value heads, {} ranks", pattern.to_string(),
                                               causal ? " causal" : "", kv_heads, shards.ranks());
          const std::vector<Rank> ranks = ranks_of(plan, shards);
          for (const Rank& rank : ranks) expect_rows(plan, rank, what);
          expect_gradients(ranks, what);
        }
      }
    }
  }
}

TEST(PackedStrands, AreOnlyThoseThatCrossRanks) {
  Problem problem;
  problem.tokens = problem.query_rows = 256;
  problem.heads = problem.kv_heads = 2;
  const Plan plan(Pattern::longnet({32, 128}, {1, 4}), {}, problem);
  const ExchangePlan exchange(plan, Shards::even(256, 4), 1);
  const PackedPlan packed(plan, exchange);
  // Segments of 32 lie within shards of 64. The strand of each head in the second segment of 128 has 32 rows.
  EXPECT_EQ(packed.rows, 2 * (32 + PackedPlan::kZeroRows));
}

}  // namespace
}  // namespace longspan::testing
