// What an ExchangePlan says moves, against counting every attended pair.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "longspan/error.h"
#include "longspan/exchange.h"
#include "plan/exchange_runs.h"
#include "plan/row_set.h"

namespace longspan {
namespace {

using Pairs = std::set<std::pair<std::int64_t, std::int64_t>>;  // (key/value head, row)

Plan make_plan(const Pattern& pattern, std::int64_t tokens, std::int64_t heads, std::int64_t kv_heads, bool causal,
               DType dtype = DType::f32, std::int64_t head_dim = 64) {
  Problem problem;
  problem.dtype = dtype;
  problem.tokens = problem.query_rows = tokens;
  problem.heads = heads;
  problem.kv_heads = kv_heads;
  problem.head_dim = head_dim;
  Options options;
  options.causal = causal;
  return Plan(pattern, options, problem);
}

int owner_of(const Shards& shards, std::int64_t row) {
  for (int rank = 0; rank < shards.ranks(); ++rank) {
    for (const RowRange& range : shards.ranges(rank)) {
      if (row >= range.start && row < range.start + range.count) return rank;
    }
  }
  return -1;
}

/// The definition of one pair.
bool attends(const Plan& plan, const BranchPlan& branch, std::int64_t head, std::int64_t query, std::int64_t key) {
  if (!branch.covers(head, query) || !branch.covers(head, key) || key / branch.segment != query / branch.segment)
    return false;
  if (plan.options().causal && key > query) return false;
  if (!branch.mask) return true;
  const std::int64_t step = branch.dilation * branch.mask->block_size();
  return branch.mask->active(head, query % branch.segment / step, key % branch.segment / step);
}

/// Pair by pair: what queries of `rank` attend to and `owner` owns.
Pairs counted(const Plan& plan, const Shards& shards, int rank, int owner) {
  Pairs pairs;
  const Problem& problem = plan.problem();
  for (const BranchPlan& branch : plan.branches()) {
    if (!branch.active(problem.tokens)) continue;
    for (const RowRange& range : shards.ranges(rank)) {
      for (std::int64_t query = range.start; query < range.start + range.count; ++query) {
        for (std::int64_t head = branch.head_begin; head < branch.head_begin + branch.head_count; ++head) {
          for (std::int64_t key = 0; key < problem.tokens; ++key) {
            if (attends(plan, branch, head, query, key) && owner_of(shards, key) == owner)
              pairs.insert({head / (problem.heads / problem.kv_heads), key});
          }
        }
      }
    }
  }
  return pairs;
}

Pairs listed(const std::vector<ExchangeRun>& runs) {
  Pairs pairs;
  std::int64_t offset = 0;
  for (const ExchangeRun& run : runs) {
    EXPECT_EQ(run.offset, offset);
    offset += run.pairs();
    for (std::int64_t head = run.kv_head; head < run.kv_head + run.kv_heads; ++head) {
      for (std::int64_t i = 0; i < run.count; ++i) {
        EXPECT_TRUE(pairs.insert({head, run.first + i * run.step}).second) << "a row twice";
      }
    }
  }
  return pairs;
}

void expect_counted(const Plan& plan, const Shards& shards) {
  std::int64_t sent = 0, received = 0;
  for (int rank = 0; rank < shards.ranks(); ++rank) {
    const ExchangePlan exchange(plan, shards, rank);
    sent += exchange.bytes_sent();
    received += exchange.bytes_received();
    for (int other = 0; other < shards.ranks(); ++other) {
      const auto peer = std::find_if(exchange.peers().begin(), exchange.peers().end(),
                                     [&](const auto& p) { return p.rank == other; });
      const bool there = peer != exchange.peers().end();
      if (other == rank) {
        EXPECT_FALSE(there);
        continue;
      }
      EXPECT_EQ(there ? listed(peer->receive) : Pairs{}, counted(plan, shards, rank, other))
          << plan.to_string() << exchange.to_string();
      EXPECT_EQ(there ? listed(peer->send) : Pairs{}, counted(plan, shards, other, rank))
          << plan.to_string() << exchange.to_string();
    }
    // Queries in local ranges attend to nothing remote in that branch.
    ASSERT_EQ(exchange.local_ranges().size(), plan.branches().size());
    for (std::size_t b = 0; b < plan.branches().size(); ++b) {
      const BranchPlan& branch = plan.branches()[b];
      std::int64_t last = -1;
      for (const RowRange& local : exchange.local_ranges()[b]) {
        EXPECT_GT(local.start, last);
        last = local.start + local.count - 1;
        for (std::int64_t query = local.start; query <= last; ++query) {
          EXPECT_EQ(owner_of(shards, query), rank);
          if (!branch.active(plan.problem().tokens)) continue;
          for (std::int64_t head = branch.head_begin; head < branch.head_begin + branch.head_count; ++head) {
            for (std::int64_t key = 0; key < plan.problem().tokens; ++key) {
              EXPECT_TRUE(!attends(plan, branch, head, query, key) || owner_of(shards, key) == rank)
                  << query << " " << key;
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(sent, received);
}

TEST(RowSet, UnionsListEveryRowOnce) {
  std::mt19937 random(5);
  const auto draw = [&](int most) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(most)); };
  for (int trial = 0; trial < 500; ++trial) {
    std::vector<Progression> parts;
    std::set<std::int64_t> rows;
    for (std::int64_t i = draw(6); i >= 0; --i) {
      parts.push_back({draw(80), 1 + draw(12), draw(20)});
      for (std::int64_t j = 0; j < parts.back().count; ++j) rows.insert(parts.back().first + j * parts.back().step);
    }
    std::vector<std::int64_t> found;
    for (const Progression& run : disjoint_union(parts)) {
      for (std::int64_t j = 0; j < run.count; ++j) found.push_back(run.first + j * run.step);
    }
    std::sort(found.begin(), found.end());
    EXPECT_EQ(found, std::vector<std::int64_t>(rows.begin(), rows.end()));
  }
}

TEST(RowSet, NestedStridesCostNothing) {
  const std::vector<Progression> rows = disjoint_union({{0, 128, 1024}, {0, 256, 512}, {0, 512, 256}, {131072, 1, 0}});
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0], (Progression{0, 128, 1024}));
}

TEST(Exchange, EqualsCountingPairs) {
  std::mt19937 random(11);
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
  };
  for (int trial = 0; trial < 150; ++trial) {
    const std::int64_t tokens = draw(1, 90), branches = draw(1, 3), kv_heads = draw(1, 3),
                       heads = kv_heads * draw(1, 2) * (branches > 2 ? 3 : 2);
    std::vector<std::int64_t> segments, dilations;
    for (std::int64_t b = 0; b < branches; ++b) {
      segments.push_back(draw(1, 120));
      dilations.push_back(draw(1, 7));
    }
    Pattern pattern = trial % 4 == 0   ? Pattern::dilated(segments, dilations)
                      : trial % 4 == 1 ? Pattern::longnet(segments, dilations, PhaseRule::torchscale)
                                       : Pattern::longnet(segments, dilations);
    if (trial % 5 == 0) pattern = pattern.with_long_segments(LongSegments::skip);
    const Plan plan = make_plan(pattern, tokens, heads, kv_heads, trial % 3 == 0);
    const int ranks = static_cast<int>(draw(1, 5));
    std::vector<std::int64_t> offsets = {0};  // uneven, some ranks without rows
    for (int rank = 1; rank < ranks; ++rank) offsets.push_back(draw(0, tokens));
    offsets.push_back(tokens);
    std::sort(offsets.begin(), offsets.end());
    expect_counted(plan, trial % 6 == 5 ? Shards::zigzag(tokens, ranks) : Shards::contiguous(offsets));
  }
}

TEST(Exchange, BlockMasksMoveActiveBlocksOnly) {
  std::mt19937 random(3);
  for (const bool causal : {false, true}) {
    const std::int64_t tokens = 16 * 11 - 5, blocks = 11, heads = 2;
    std::vector<std::uint8_t> dense(static_cast<std::size_t>(heads * blocks * blocks));
    for (auto& one : dense) one = random() % 4 == 0;
    const BlockMask mask = BlockMask::from_dense(16, heads, blocks, dense);
    const Plan plan = make_plan(Pattern::block_sparse(mask), tokens, heads, heads, causal);
    expect_counted(plan, Shards::even(tokens, 3));
    const std::int64_t offsets[] = {0, 1, 1, 100, tokens};
    expect_counted(plan, Shards::contiguous(offsets));
  }
}

TEST(Exchange, BlockRowsThatSeeNoRemoteBlockAreLocal) {
  // Blocks of 16, one neighbour on each side: of 160 rows in the middle the outer blocks look across.
  const Plan plan = make_plan(Pattern::block_sparse(BlockPattern::local_window(32, 16)), 480, 2, 2, false);
  const ExchangePlan exchange(plan, Shards::even(480, 3), 1);
  EXPECT_EQ(exchange.local_ranges()[0], (std::vector<RowRange>{{176, 128}}));
  const Plan causal = make_plan(Pattern::block_sparse(BlockPattern::local_window(32, 16)), 480, 2, 2, true);
  EXPECT_EQ(ExchangePlan(causal, Shards::even(480, 3), 1).local_ranges()[0], (std::vector<RowRange>{{176, 144}}));
}

TEST(Exchange, ClosedForms) {
  constexpr std::int64_t kTokens = 1 << 14;
  for (const int ranks : {2, 4, 8, 16}) {
    const std::int64_t rows = kTokens / ranks;
    for (std::int64_t segment = 64; segment <= 2 * kTokens; segment *= 2) {
      for (const std::int64_t dilation : {1, 2, 8, 64}) {
        for (const bool causal : {false, true}) {
          const Plan plan = make_plan(Pattern::longnet({segment}, {dilation}), kTokens, 2, 2, causal);
          const std::int64_t w = std::min(segment, kTokens), shared = std::max<std::int64_t>(1, w / rows);
          for (int rank = 0; rank < ranks; ++rank) {
            const ExchangePlan exchange(plan, Shards::even(kTokens, ranks), rank);
            const std::int64_t before = causal ? rank % shared : shared - 1;
            EXPECT_EQ(exchange.receive_pairs(), 2 * before * rows / dilation)
                << plan.to_string() << exchange.to_string();
            EXPECT_EQ(exchange.peers().size(), static_cast<std::size_t>(shared - 1));
          }
        }
      }
    }
  }
}

TEST(Exchange, OneMillionTokensOverEightRanks) {
  std::vector<std::int64_t> segments, dilations;
  for (int i = 0; i < 10; ++i) {
    segments.push_back(std::int64_t{2048} << i);
    dilations.push_back(std::int64_t{1} << i);
  }
  const std::int64_t tokens = 1 << 20;
  const Shards shards = Shards::even(tokens, 8);
  const Plan all = make_plan(Pattern::longnet(segments, dilations), tokens, 12, 12, false, DType::bf16);
  const Plan groups = make_plan(Pattern::dilated(segments, dilations), tokens, 12, 12, false, DType::bf16);
  for (int rank = 0; rank < 8; ++rank) {
    const ExchangePlan exchange(all, shards, rank);
    EXPECT_EQ(exchange.receive_pairs(), 12 * 3072);
    EXPECT_EQ(exchange.bytes_received(), std::int64_t{9} << 20);
    EXPECT_EQ(exchange.naive_ring_bytes(), std::int64_t{2688} << 20);
    EXPECT_EQ(exchange.all_gather_bytes(), std::int64_t{3675} * (1 << 20) / 100);
    EXPECT_EQ(ExchangePlan(groups, shards, rank).bytes_received(), 4352 * 256);  // 1.06 MiB
  }
}

TEST(Exchange, BillionTokensAreListedAtOnce) {
  const std::int64_t tokens = std::int64_t{1} << 30;
  const Plan plan =
      make_plan(Pattern::longnet({2048, 1 << 20, kWholeSequence}, {1, 512, tokens / 2048}), tokens, 4, 4, true);
  const ExchangePlan exchange(plan, Shards::even(tokens, 64), 40);
  EXPECT_EQ(exchange.receive_pairs(), 4 * 40 * 32);
}

TEST(Exchange, StridesThatDoNotNestAreArithmeticToo) {
  // Of every 12 rows, strides 4 and 6 from row 0 of head 0 take rows 0, 4, 6 and 8.
  const std::int64_t tokens = std::int64_t{3} << 29, ranks = 8, shard = tokens / ranks;
  const Plan plan = make_plan(Pattern::longnet({kWholeSequence, kWholeSequence}, {4, 6}), tokens, 1, 1, false);
  const ExchangePlan exchange(plan, Shards::even(tokens, ranks), 2);
  EXPECT_EQ(exchange.receive_pairs(), (ranks - 1) * (shard / 12 * 4));
  for (const ExchangePeer& peer : exchange.peers()) EXPECT_LE(peer.receive.size(), 4u);
}

TEST(Exchange, MessagesCutByPositionsKeepEveryRow) {
  const Plan plan = make_plan(Pattern::longnet({40, 90}, {3, 4}), 90, 4, 2, false);
  const ExchangePlan exchange(plan, Shards::even(90, 3), 1);
  for (const ExchangePeer& peer : exchange.peers()) {
    Pairs joined;
    for (std::int64_t begin = 0; begin < 90; begin += 7)
      joined.merge(listed(clip_runs(peer.receive, begin, begin + 7)));
    EXPECT_EQ(joined, listed(peer.receive));
  }
}

TEST(Shards, RanksOutsideAreRefused) {
  for (const Shards& shards : {Shards::even(10, 2), Shards::zigzag(10, 2)}) {
    for (const int rank : {-1, 2, 1 << 30}) {
      EXPECT_THROW(shards.rows(rank), InvalidArgument) << rank;
      EXPECT_THROW(shards.ranges(rank), InvalidArgument) << rank;
    }
  }
}

TEST(Shards, AreCheckedAndBalanced) {
  EXPECT_EQ(Shards::even(10, 3).rows(0), 4);
  EXPECT_EQ(Shards::even(10, 3).rows(2), 3);
  EXPECT_EQ(Shards::even(2, 4).rows(3), 0);
  const Shards zigzag = Shards::zigzag(16, 2);
  EXPECT_EQ(zigzag.ranges(0)[1], (RowRange{12, 4}));
  EXPECT_EQ(zigzag.ranges(1).size(), 1u);
  const std::int64_t falling[] = {0, 5, 3}, late[] = {1, 5};
  EXPECT_THROW(Shards::contiguous(falling), InvalidArgument);
  EXPECT_THROW(Shards::contiguous(late), InvalidArgument);
  EXPECT_THROW(Shards::even(5, 0), InvalidArgument);
  EXPECT_THROW(Shards::even(5, 1000000000), InvalidArgument);
  EXPECT_THROW(Shards::zigzag(5, 1000000000), InvalidArgument);
  const Plan plan = make_plan(Pattern::dense(), 12, 1, 1, false);
  EXPECT_THROW(ExchangePlan(plan, Shards::even(11, 2), 0), InvalidArgument);
  EXPECT_THROW(ExchangePlan(plan, Shards::even(12, 2), 2), InvalidArgument);
}

}  // namespace
}  // namespace longspan
