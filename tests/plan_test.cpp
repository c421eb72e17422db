// Plans: strand arithmetic and totals against brute force, and the cache.
#include "longspan/plan.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <thread>

#include "longspan/attention.h"
#include "longspan/error.h"

namespace longspan {
namespace {

Problem problem_of(std::int64_t tokens, std::int64_t heads, std::int64_t head_dim = 8) {
  Problem problem;
  problem.tokens = problem.query_rows = tokens;
  problem.heads = problem.kv_heads = heads;
  problem.head_dim = head_dim;
  return problem;
}

/// The definition: position i of head h is covered iff ((i mod w) mod r) == phase(h), and sees its segment's like.
double brute_force_pairs(const BranchPlan& branch, std::int64_t tokens, bool causal) {
  double pairs = 0;
  for (std::int64_t head = branch.head_begin; head < branch.head_begin + branch.head_count; ++head) {
    for (std::int64_t i = 0; i < tokens; ++i) {
      if (!branch.covers(head, i)) continue;
      for (std::int64_t j = 0; j < tokens; ++j)
        pairs += i / branch.segment == j / branch.segment && branch.covers(head, j) && (!causal || j <= i);
    }
  }
  return pairs;
}

TEST(Plan, StrandsAndPairsEqualBruteForce) {
  std::mt19937 engine(1);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<std::int64_t>(low, high)(engine); };
  for (int trial = 0; trial < 300; ++trial) {
    const std::int64_t tokens = draw(1, 60), heads = draw(3, 7);
    std::vector<std::int64_t> segments, dilations;
    for (int b = 0; b < 3; ++b) {
      segments.push_back(draw(1, 80));
      dilations.push_back(draw(1, 12));
    }
    const Pattern pattern = trial % 3 == 0   ? Pattern::dilated(segments, dilations)
                            : trial % 3 == 1 ? Pattern::longnet(segments, dilations)
                                             : Pattern::longnet(segments, dilations, PhaseRule::torchscale);
    Options options;
    options.causal = trial % 2;
    const Plan plan(pattern, options, problem_of(tokens, heads));
    double total = 0;
    for (std::size_t b = 0; b < 3; ++b) {
      const BranchPlan& branch = plan.branches()[b];
      EXPECT_EQ(plan.pairs(b), brute_force_pairs(branch, tokens, options.causal)) << plan.to_string();
      total += plan.pairs(b);
      for (std::int64_t head = branch.head_begin; head < branch.head_begin + branch.head_count; ++head) {
        std::set<std::int64_t> rows;
        for (std::int64_t s = 0; s < branch.segments(tokens); ++s) {
          const Strand strand = branch.strand(head, s, tokens);
          for (std::int64_t t = 0; t < strand.count; ++t)
            EXPECT_TRUE(rows.insert(strand.start + t * strand.stride).second);
        }
        for (std::int64_t i = 0; i < tokens; ++i) EXPECT_EQ(rows.count(i) == 1, branch.covers(head, i));
      }
    }
    EXPECT_EQ(plan.totals().pairs, total);
    EXPECT_EQ(plan.totals().forward_flops, 4 * total * 8);
  }
}

TEST(Plan, MaskedPairsEqualBruteForce) {
  std::mt19937 engine(2);
  for (int trial = 0; trial < 40; ++trial) {
    const std::int64_t tokens = 33 + trial;
    const std::int64_t blocks = (tokens + 15) / 16;
    std::vector<std::uint8_t> dense(static_cast<std::size_t>(blocks * blocks));
    for (auto& bit : dense) bit = engine() % 2;
    const BlockMask mask = BlockMask::from_dense(16, 1, blocks, dense);
    Options options;
    options.causal = trial % 2;
    const Plan plan(Pattern::block_sparse(mask), options, problem_of(tokens, 1));
    double pairs = 0;
    for (std::int64_t i = 0; i < tokens; ++i)
      for (std::int64_t j = 0; j < tokens; ++j) pairs += mask.active(0, i / 16, j / 16) && (!options.causal || j <= i);
    EXPECT_EQ(plan.pairs(0), pairs);
  }
}

TEST(Plan, HeadGroupsAreCumulative) {
  const Plan plan(Pattern::dilated({16, 32, 64, 128, 256}, {1, 2, 4, 8, 16}), {}, problem_of(256, 12));
  const std::int64_t begins[] = {0, 3, 6, 8, 10}, counts[] = {3, 3, 2, 2, 2};
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(plan.branches()[i].head_begin, begins[i]);
    EXPECT_EQ(plan.branches()[i].head_count, counts[i]);
    EXPECT_EQ(plan.branches()[i].phase(begins[i]), static_cast<std::int64_t>(i) % plan.branches()[i].dilation);
  }
}

TEST(Plan, PhaseRules) {
  const Plan paper(Pattern::longnet({64}, {3}), {}, problem_of(64, 7));
  const Plan torchscale(Pattern::longnet({64}, {3}, PhaseRule::torchscale), {}, problem_of(64, 7));
  for (std::int64_t head = 0; head < 7; ++head) {
    EXPECT_EQ(paper.branches()[0].phase(head), head % 3);
    EXPECT_EQ(torchscale.branches()[0].phase(head), head / 3);
  }
}

TEST(Plan, FewerHeadsThanGroupsIsAnError) {
  EXPECT_THROW(Plan(Pattern::dilated({16, 32, 64}, {1, 2, 4}), {}, problem_of(64, 2)), InvalidArgument);
}

TEST(Plan, MaskMustFitTheStrand) {
  const BlockMask mask = BlockMask::from_rows(16, 1, 2, {{0}, {1}});
  EXPECT_NO_THROW(Plan(Pattern::block_sparse(mask), {}, problem_of(32, 2)));
  EXPECT_THROW(Plan(Pattern::block_sparse(mask), {}, problem_of(33, 2)), InvalidArgument);
  EXPECT_THROW(Plan(Pattern::block_sparse(mask), {}, problem_of(16, 2)), InvalidArgument);
  const BlockMask three_heads = BlockMask::from_rows(16, 3, 1, {{0}, {0}, {0}});
  EXPECT_THROW(Plan(Pattern::block_sparse(three_heads), {}, problem_of(16, 2)), InvalidArgument);
}

TEST(Plan, ProblemsThatMakeNoSenseAreRefusedByName) {
  const auto argument_of = [](auto&& spoil) {
    Problem problem = problem_of(64, 4);
    spoil(problem);
    try {
      Plan(Pattern::dense(), {}, problem);
    } catch (const InvalidArgument& error) {
      return error.argument();
    }
    return std::string("nothing");
  };
  EXPECT_EQ(argument_of([](Problem&) {}), "nothing");
  EXPECT_EQ(argument_of([](Problem& p) { p.tokens = 0; }), "nothing");
  EXPECT_EQ(argument_of([](Problem& p) { p.batch = -1; }), "batch");
  EXPECT_EQ(argument_of([](Problem& p) { p.tokens = -1; }), "tokens");
  EXPECT_EQ(argument_of([](Problem& p) { p.query_rows = -1; }), "query_rows");
  EXPECT_EQ(argument_of([](Problem& p) { p.heads = 0; }), "heads");
  EXPECT_EQ(argument_of([](Problem& p) { p.heads = std::int64_t{1} << 62; }), "heads");
  EXPECT_EQ(argument_of([](Problem& p) { p.kv_heads = 0; }), "kv_heads");
  EXPECT_EQ(argument_of([](Problem& p) { p.kv_heads = 3; }), "kv_heads");
  EXPECT_EQ(argument_of([](Problem& p) { p.head_dim = 0; }), "head_dim");
}

TEST(Plan, BranchesOutsideAreRefused) {
  const Plan plan(Pattern::dilated({16, 32}, {1, 2}), {}, problem_of(32, 2));
  const BlockMask mask = BlockMask::from_rows(16, 1, 2, {{0}, {1}});
  EXPECT_THROW(plan.pairs(2), InvalidArgument);
  EXPECT_THROW(plan.with_mask(2, mask), InvalidArgument);
}

TEST(Plan, TrillionTokensAreInstant) {
  const std::int64_t tokens = std::int64_t{1} << 40;
  const Plan plan(Pattern::dilated({2048, 1 << 20, tokens}, {1, 512, tokens / 2048}), {}, problem_of(tokens, 8, 64));
  EXPECT_GT(plan.totals().pairs, 1e15);
  EXPECT_GT(plan.items(64), 1e9);
  EXPECT_GT(Plan(Pattern::dense(), {}, problem_of(tokens, 8, 64)).totals().pairs, 1e24);
}

TEST(PlanCache, HitsMissesAndBound) {
  plan_cache::clear();
  const Attention attention(Pattern::dilated({64}, {1}));
  const auto before = plan_cache::statistics();
  const auto first = attention.plan(problem_of(100, 2));
  EXPECT_EQ(attention.plan(problem_of(100, 2)), first);
  EXPECT_EQ(Attention(Pattern::dilated({64}, {1})).plan(problem_of(100, 2)), first);  // equal, not the same object
  EXPECT_NE(attention.plan(problem_of(101, 2)), first);
  const auto after = plan_cache::statistics();
  EXPECT_EQ(after.hits - before.hits, 2u);
  EXPECT_EQ(after.misses - before.misses, 2u);
  EXPECT_EQ(after.entries, 2u);

  plan_cache::set_limit_bytes(after.bytes);
  for (std::int64_t tokens = 200; tokens < 300; ++tokens) {
    attention.plan(problem_of(100, 2));  // used all the time, so it must survive
    attention.plan(problem_of(tokens, 2));
    EXPECT_LE(plan_cache::statistics().bytes, after.bytes);
  }
  EXPECT_EQ(attention.plan(problem_of(100, 2)), first);
  EXPECT_GE(plan_cache::statistics().evictions, 99u);
  plan_cache::set_limit_bytes(std::size_t{64} << 20);
}

/// Else a mask larger than the cache would be made again by every call.
TEST(PlanCache, KeepsTheNewestHoweverLarge) {
  plan_cache::clear();
  const Attention attention(Pattern::block_sparse(BlockPattern::local_window(64, 16)));
  const auto first = attention.plan(problem_of(4000, 2));
  const std::size_t limit = plan_cache::statistics().limit_bytes;
  plan_cache::set_limit_bytes(1);
  EXPECT_EQ(plan_cache::statistics().entries, 0u);
  for (const std::int64_t tokens : {4000, 5000}) {
    const auto plan = attention.plan(problem_of(tokens, 2));
    EXPECT_EQ(attention.plan(problem_of(tokens, 2)), plan);
    EXPECT_EQ(plan_cache::statistics().entries, 1u);
  }
  plan_cache::set_limit_bytes(0);
  EXPECT_NE(attention.plan(problem_of(4000, 2)), attention.plan(problem_of(4000, 2)));
  EXPECT_EQ(plan_cache::statistics().bytes, 0u);
  plan_cache::set_limit_bytes(limit);
}

TEST(PlanCache, ManyThreadsShareIt) {
  plan_cache::clear();
  const Attention attention(Pattern::dense());
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (std::int64_t i = 0; i < 200; ++i)
        EXPECT_EQ(attention.plan(problem_of(1 + (i * (t + 1)) % 17, 1))->problem().tokens, 1 + (i * (t + 1)) % 17);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(plan_cache::statistics().entries, 17u);
}

}  // namespace
}  // namespace longspan
