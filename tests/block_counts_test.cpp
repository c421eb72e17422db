// Counts of block masks without lists: closed forms against blocks counted one by one, expected numbers of random
// blocks against drawn ones, and patterns for lengths whose lists nobody could hold.
#include "pattern/block_counts.h"

#include <gtest/gtest.h>

#include <random>

#include "longspan/longspan.h"

namespace longspan {
namespace {

class Drawing {
 public:
  explicit Drawing(unsigned seed) : engine_(seed) {}
  std::int64_t number(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }
  /// One regular term in blocks of 16, with numbers up to about the sequence's.
  BlockPattern term(std::int64_t rows) {
    const auto size = [&] { return number(0, 3) == 0 ? number(0, 2 * rows) : number(0, 10) * 16; };
    const auto step = [&] { return std::max<std::int64_t>(1, size()); };
    switch (number(0, 4)) {
      case 0:
        return BlockPattern::local_window(size(), 16);
      case 1:
        return BlockPattern::strided(step(), 16);
      case 2: {
        std::vector<std::int64_t> rates;
        for (std::int64_t i = number(1, 4); i > 0; --i) rates.push_back(number(1, 30));
        return BlockPattern::dilated_sparse(rates, 16);
      }
      case 3:
        return BlockPattern::global_local(std::min(size(), rows), size(), 16);
      default: {
        std::vector<std::pair<std::int64_t, std::int64_t>> levels;
        for (std::int64_t i = number(1, 3); i > 0; --i) levels.emplace_back(step(), number(0, 3) == 0 ? -1 : size());
        return BlockPattern::hierarchical(levels, 16);
      }
    }
  }

 private:
  std::mt19937 engine_;
};

/// Pairs of a strand, block by block from the lists.
double counted_pairs(const std::vector<std::uint8_t>& dense, std::int64_t blocks, std::int64_t rows, bool causal) {
  double pairs = 0;
  const auto held = [&](std::int64_t block) {
    return static_cast<double>(std::clamp<std::int64_t>(rows - block * 16, 0, 16));
  };
  for (std::int64_t i = 0; i < blocks; ++i) {
    for (std::int64_t j = 0; j < (causal ? i + 1 : blocks); ++j) {
      if (dense[static_cast<std::size_t>(i * blocks + j)] == 0) continue;
      pairs += causal && i == j ? held(i) * (held(i) + 1) / 2 : held(i) * held(j);
    }
  }
  return pairs;
}

TEST(BlockCounts, ClosedFormsEqualBlocksCountedOneByOne) {
  Drawing draw(3);
  int closed = 0;
  for (int trial = 0; trial < 6000; ++trial) {
    const std::int64_t rows = draw.number(1, trial % 50 == 0 ? 3000 : 500);
    BlockPattern pattern = draw.term(rows);
    for (std::int64_t more = draw.number(0, 3); more > 0; --more) pattern = pattern | draw.term(rows);
    const BlockMask mask = pattern.mask(rows, 2, trial % 2 == 0);
    const auto dense = mask.to_dense();
    const BlockCount all = mask.count_blocks();
    closed += mask.heads_count_alike() && all.exact;
    ASSERT_EQ(all.value, static_cast<double>(mask.active_blocks())) << pattern.to_string() << " of " << rows;
    for (const std::int64_t strand : {rows, draw.number(0, rows), rows / 16 * 16}) {
      for (const bool causal : {false, true}) {
        const BlockCount pairs = mask.count_pairs(1, strand, causal);
        ASSERT_TRUE(pairs.exact);
        ASSERT_EQ(pairs.value, counted_pairs(dense, mask.blocks(), strand, causal))
            << pattern.to_string() << " of " << rows << ", strand of " << strand << ", causal " << causal;
      }
    }
  }
  EXPECT_EQ(closed, 6000);
}

TEST(BlockCounts, RandomBlocksAreCountedByTheirExpectedNumber) {
  for (const char* text :
       {"block=16 random(0.1,3)", "block=16 bigbird", "block=16 random(0.05,1)+random(0.2,1)+strided(64)",
        "block=16 random(0.3,1)+random(0.2,2)+hierarchical(64:256,128:-1)"}) {
    for (const bool causal : {false, true}) {
      const BlockPattern pattern = BlockPattern::parse(text);
      const std::int64_t rows = 16 * 300;
      const BlockMask mask = pattern.mask(rows, 8, causal);
      EXPECT_TRUE(mask.count_blocks().exact);  // few enough to be drawn
      const BlockCounts expected = BlockCounts::expected({16, pattern.terms(), {}, rows, 8, causal});
      EXPECT_FALSE(expected.blocks().exact);
      EXPECT_NEAR(8 * expected.blocks().value / static_cast<double>(mask.active_blocks()), 1, 0.005) << text;
      double pairs = 0;
      for (std::int64_t head = 0; head < 8; ++head) pairs += mask.count_pairs(head, rows - 100, causal).value;
      EXPECT_NEAR(8 * expected.pairs(rows - 100, causal).value / pairs, 1, 0.01) << text << " causal " << causal;
    }
  }
}

// Lists of 2^40 tokens would hold 2^34 rows at least: whoever makes them here runs out of memory and time.
TEST(BlockCounts, PlansOfATrillionTokensNeedNoLists) {
  const std::int64_t tokens = std::int64_t{1} << 40;
  Problem problem;
  problem.tokens = problem.query_rows = tokens;
  problem.heads = problem.kv_heads = 8;
  const double dense = static_cast<double>(tokens) * static_cast<double>(tokens) * 8;
  for (const char* text : {"local_window(512)", "strided(512)", "dilated_sparse(1,2,1048576)", "global_local(64,512)",
                           "hierarchical", "random(0.01,1)", "bigbird", "longformer", "adaptive(0.1)",
                           "strided(4K)+local_window(512)+hierarchical(64:256)+random(0.01,3)"}) {
    std::string pattern = text;
    if (const auto position = pattern.find("4K"); position != pattern.npos) pattern.replace(position, 2, "4096");
    for (const bool causal : {false, true}) {
      Options options;
      options.causal = causal;
      const Plan plan(Pattern::parse(pattern), options, problem);
      const PlanTotals totals = plan.totals();
      EXPECT_GT(totals.pairs, 8.0 * static_cast<double>(tokens)) << text;
      EXPECT_LT(totals.pairs, dense) << text;
      EXPECT_EQ(totals.exact, pattern.find("random") == pattern.npos && pattern != "bigbird" && pattern[0] != 'a');
      EXPECT_LT(plan.bytes(), 10'000u);
      EXPECT_FALSE(plan.to_string().empty());
      EXPECT_THROW(plan.branches()[0].mask->row(0, 0), InvalidArgument);
      const auto known = Attention(Pattern::parse(pattern), options).plan(problem);
      EXPECT_EQ(known->kernel_name(Pass::forward), "");
      EXPECT_NE(known->why_no_kernel(Pass::forward).find("blocks"), std::string::npos);
    }
  }
  // Exact to the last pair: a window of one block on each side.
  const Plan window(Pattern::parse("block=128 local_window(256)"), {}, problem);
  const double blocks = static_cast<double>(tokens / 128);
  EXPECT_EQ(window.totals().pairs, 8 * (3 * blocks - 2) * 128 * 128);
}

TEST(BlockCounts, CountsInsideStrandsEqualLists) {
  Problem problem;
  problem.tokens = problem.query_rows = 1000;
  problem.heads = problem.kv_heads = 3;
  for (const char* blocks : {"block=16 local_window(48)+strided(64)", "block=16 bigbird(16,48,0.2,1)"}) {
    for (const bool causal : {false, true}) {
      Options options;
      options.causal = causal;
      const Pattern pattern = Pattern::parse("longnet 300/3{" + std::string(blocks) + "}");
      const Plan plan(pattern, options, problem);
      const BlockMask& mask = *plan.branches()[0].mask;
      double pairs = 0;
      for (std::int64_t head = 0; head < 3; ++head) {
        for (std::int64_t segment = 0; segment < 4; ++segment) {
          const std::int64_t rows = plan.branches()[0].strand(head, segment, 1000).count;
          for (std::int64_t i = 0; i < rows; ++i)
            for (std::int64_t j = 0; j < rows; ++j) pairs += mask.active(head, i / 16, j / 16) && (!causal || j <= i);
        }
      }
      EXPECT_EQ(plan.totals().pairs, pairs) << blocks;
    }
  }
}

TEST(BlockCounts, AdaptivePatternsCountWhatEachCallKeeps) {
  Problem problem;
  problem.tokens = problem.query_rows = 64 * 20;
  const Plan plan(Pattern::parse("adaptive(0.25)"), {}, problem);
  EXPECT_FALSE(plan.totals().exact);
  EXPECT_DOUBLE_EQ(plan.totals().pairs, 20.0 * 5 * 64 * 64);
}

// Strides without common factors have more common multiples than a sum should have terms: lists count them.
// As many distances as a moment suffices for are gone through one by one instead.
TEST(BlockCounts, StridesThatNoShortSumUnitesAreCountedByDistances) {
  BlockPattern pattern = BlockPattern::strided(16 * 2, 16);
  for (const std::int64_t prime : {3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73})
    pattern = pattern | BlockPattern::strided(16 * prime, 16);
  for (const BlockPattern& more : {BlockPattern::global_local(100, 16 * 90, 16), BlockPattern::dilated_sparse({79}, 16),
                                   BlockPattern::hierarchical({{16 * 4, 16 * 300}, {16 * 6, -1}}, 16)}) {
    const std::int64_t rows = 16 * 500 - 3;
    const BlockMask mask = (pattern | more).mask(rows, 1, false);
    ASSERT_TRUE(BlockCounts::of({16, (pattern | more).terms(), {}, rows, 1, false}));
    EXPECT_EQ(mask.count_blocks().value, static_cast<double>(mask.active_blocks()));
    const auto dense = mask.to_dense();
    for (const bool causal : {false, true}) {
      for (const std::int64_t strand : {rows, rows - 1000})
        EXPECT_EQ(mask.count_pairs(0, strand, causal).value, counted_pairs(dense, mask.blocks(), strand, causal));
    }
  }
  EXPECT_TRUE(BlockCounts::of({16, pattern.terms(), {}, std::int64_t{1} << 20, 1, false}));
  EXPECT_FALSE(BlockCounts::of({16, pattern.terms(), {}, std::int64_t{1} << 30, 1, false}));
  // Lists that no memory holds are refused before they are begun.
  const BlockMask large = pattern.planned_mask(std::int64_t{1} << 32, 1, false);
  EXPECT_NE(large.why_no_lists(), "");
  EXPECT_THROW(large.count_blocks(), InvalidArgument);
}

// As above, with the strides of hierarchical rows.
TEST(BlockCounts, LevelsThatNoShortSumUnitesAreCountedByDistances) {
  std::vector<std::pair<std::int64_t, std::int64_t>> levels;
  std::int64_t reach = 40;
  for (const std::int64_t prime : {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73})
    levels.emplace_back(16 * prime, 2 * 16 * ++reach);
  const BlockPattern pattern = BlockPattern::hierarchical(levels, 16);
  const BlockRecipe recipe{16, pattern.terms(), {}, 16 * 60000, 1, false};
  const BlockMask mask = pattern.mask(recipe.rows, 1, false);
  ASSERT_TRUE(BlockCounts::of(recipe));
  EXPECT_EQ(BlockCounts::of(recipe)->blocks().value, static_cast<double>(mask.active_blocks()));
  EXPECT_EQ(BlockCounts::at_least(recipe), static_cast<double>(mask.active_blocks()));
  // Where there are too many, far rows that a sum leaves out count as near ones.
  const BlockRecipe longer{16, pattern.terms(), {}, std::int64_t{1} << 30, 1, false};
  EXPECT_FALSE(BlockCounts::of(longer));
  const double share = static_cast<double>(longer.rows) / static_cast<double>(recipe.rows);
  EXPECT_LE(BlockCounts::at_least(longer), 1.001 * share * static_cast<double>(mask.active_blocks()));
  EXPECT_GE(BlockCounts::at_least(longer), 0.3 * share * static_cast<double>(mask.active_blocks()));
}

TEST(BlockMask, MakingListsStopsWhenTold) {
  const BlockMask mask = BlockPattern::local_window(64, 16).planned_mask(16 * 100000, 1, false);
  std::atomic<bool> cancel = true;
  EXPECT_THROW(mask.make_lists(&cancel), Cancelled);
  cancel = false;
  mask.make_lists(&cancel);
  EXPECT_EQ(mask.row(0, 5).size(), 5u);
  EXPECT_EQ(mask, BlockPattern::local_window(64, 16).mask(16 * 100000, 1, false));
}

}  // namespace
}  // namespace longspan
