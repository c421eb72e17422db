// Block masks and block patterns: every pattern against its definition written as a predicate, set operations,
// transposed lists, text, planning time, bad input.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <random>

#include "longspan/longspan.h"
#include "util/philox.h"

namespace longspan {
namespace {

BlockMask some_mask(std::int64_t heads, std::int64_t blocks, unsigned seed, int block_size = 16) {
  std::mt19937 engine(seed);
  std::vector<std::uint8_t> dense(static_cast<std::size_t>(heads * blocks * blocks));
  for (auto& bit : dense) bit = engine() % 3 == 0;
  return BlockMask::from_dense(block_size, heads, blocks, dense);
}

using Predicate = std::function<bool(std::int64_t head, std::int64_t row, std::int64_t column)>;

void expect_mask(const BlockMask& mask, std::int64_t heads, const Predicate& active, const std::string& what) {
  for (std::int64_t head = 0; head < heads; ++head) {
    for (std::int64_t row = 0; row < mask.blocks(); ++row) {
      for (std::int64_t column = 0; column < mask.blocks(); ++column) {
        ASSERT_EQ(mask.active(head, row, column), active(head, row, column))
            << what << " head " << head << " (" << row << ", " << column << ")";
      }
    }
  }
}

std::int64_t floor_mod(std::int64_t a, std::int64_t b) { return (a % b + b) % b; }

/// The definition of random(density, seed): rank every candidate by its Philox word.
Predicate random_definition(double density, std::uint64_t seed, std::int64_t blocks, bool causal) {
  return [=](std::int64_t head, std::int64_t row, std::int64_t column) {
    if (column == row) return true;
    const std::int64_t candidates = causal ? row + 1 : blocks;
    if (column >= candidates) return false;
    const auto word = [&](std::int64_t j) {
      return philox4x32(seed, {static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(j),
                               static_cast<std::uint32_t>(head), 0})[0];
    };
    std::int64_t before = 1;  // the diagonal
    for (std::int64_t j = 0; j < candidates; ++j)
      before += j != row && std::pair(word(j), j) < std::pair(word(column), column);
    return before < std::max<std::int64_t>(
                        1, static_cast<std::int64_t>(std::floor(density * static_cast<double>(candidates) + 0.5)));
  };
}

TEST(BlockPatterns, EqualTheirDefinitions) {
  for (const int b : {16, 32, 64, 128}) {
    for (const std::int64_t rows : {std::int64_t{1}, std::int64_t{b}, std::int64_t{9 * b + 5}, std::int64_t{40 * b}}) {
      const std::int64_t blocks = (rows + b - 1) / b;
      for (const bool causal : {false, true}) {
        const auto check = [&](const BlockPattern& pattern, const Predicate& active) {
          const BlockMask mask = pattern.mask(rows, 3, causal);
          EXPECT_EQ(mask.blocks(), blocks);
          expect_mask(mask, 3, active, pattern.to_string());
        };
        for (const std::int64_t window : {0, 64, 200, 1000}) {
          check(BlockPattern::local_window(window, b),
                [&](auto, auto i, auto j) { return std::abs(i - j) <= window / b / 2; });
        }
        for (const std::int64_t stride : {1, 100, 512}) {
          check(BlockPattern::strided(stride, b),
                [&](auto, auto i, auto j) { return floor_mod(i - j, std::max<std::int64_t>(1, stride / b)) == 0; });
        }
        check(BlockPattern::dilated_sparse({1, 4, 2, 4}, b), [&](auto, auto i, auto j) {
          const std::int64_t distance = std::abs(i - j);
          return distance == 0 || distance == 1 || distance == 2 || distance == 4;
        });
        const std::int64_t global = std::min<std::int64_t>(rows, 70);
        check(BlockPattern::global_local(global, 300, b), [&](auto, auto i, auto j) {
          const std::int64_t heads_of_all = (global + b - 1) / b;
          return std::abs(i - j) <= 300 / b / 2 || j < heads_of_all || i < heads_of_all;
        });
        check(BlockPattern::hierarchical({{64, 256}, {256, 1024}, {1024, -1}}, b), [&](auto, auto i, auto j) {
          const auto level = [&](std::int64_t stride, std::int64_t window) {
            return i % std::max<std::int64_t>(1, stride / b) == 0 &&
                   (window == -1 || std::abs(i - j) <= window / b / 2);
          };
          return i == j || level(64, 256) || level(256, 1024) || level(1024, -1);
        });
        for (const double density : {0.02, 0.3, 1.0}) {
          check(BlockPattern::random(density, 0x123456789abcdefu, b),
                random_definition(density, 0x123456789abcdefu, blocks, causal));
        }
        check(BlockPattern::local_window(2 * b, b) | BlockPattern::random(0.1, 7, b), [&](auto h, auto i, auto j) {
          return std::abs(i - j) <= 1 || random_definition(0.1, 7, blocks, causal)(h, i, j);
        });
      }
    }
  }
}

// Long rows: many vectors, few and many words below the limit, and heads that follow each other.
TEST(BlockPatterns, LongRowsDrawTheLowestWords) {
  constexpr std::int64_t kBlocks = 3001;
  for (const double density : {0.001, 0.004, 0.06, 0.7}) {
    for (const bool causal : {false, true}) {
      const BlockMask mask = BlockPattern::random(density, 0xfedcba9876543210u, 16).mask(16 * kBlocks, 2, causal);
      for (std::int64_t head = 0; head < 2; ++head) {
        for (const std::int64_t row : {0, 1, 63, 64, 1500, 2999, 3000}) {
          const std::int64_t candidates = causal ? row + 1 : kBlocks;
          std::vector<std::pair<std::uint32_t, std::int32_t>> ranked;
          for (std::int32_t column = 0; column < candidates; ++column) {
            const std::array<std::uint32_t, 4> counter = {static_cast<std::uint32_t>(row),
                                                          static_cast<std::uint32_t>(column),
                                                          static_cast<std::uint32_t>(head), 0};
            if (column != row) ranked.emplace_back(philox4x32(0xfedcba9876543210u, counter)[0], column);
          }
          std::sort(ranked.begin(), ranked.end());
          const auto kept = std::max<std::int64_t>(
              1, static_cast<std::int64_t>(std::floor(density * static_cast<double>(candidates) + 0.5)));
          std::vector<std::int32_t> wanted = {static_cast<std::int32_t>(row)};
          for (std::size_t i = 0; i + 1 < static_cast<std::size_t>(kept); ++i) wanted.push_back(ranked[i].second);
          std::sort(wanted.begin(), wanted.end());
          const auto drawn = mask.row(head, row);
          EXPECT_EQ(std::vector<std::int32_t>(drawn.begin(), drawn.end()), wanted)
              << density << " head " << head << " row " << row << " causal " << causal;
        }
      }
    }
  }
}

TEST(BlockPatterns, PresetsAreUnions) {
  const auto spelled_out = BlockPattern::global_local(128, 192) | BlockPattern::random(0.05, 0);
  EXPECT_EQ(BlockPattern::bigbird().mask(5000, 2, false), spelled_out.mask(5000, 2, false));
  EXPECT_EQ(BlockPattern::bigbird(128, 192), spelled_out);
  // Only what was asked for can be too much.
  for (const std::int64_t rows : {0, 1, 100, 127, 128}) {
    EXPECT_EQ(BlockPattern::bigbird().mask(rows, 1, false).density(), rows > 0 ? 1.0 : 0.0);
    EXPECT_NO_THROW(BlockPattern::parse("longformer").mask(rows, 1, true));
    if (rows > 0 && rows < 128) {
      EXPECT_THROW(BlockPattern::bigbird(128).mask(rows, 1, false), InvalidArgument);
    } else {  // an empty sequence has no tokens that could be too few
      EXPECT_NO_THROW(BlockPattern::bigbird(128).mask(rows, 1, false));
    }
  }
  EXPECT_EQ(BlockPattern::longformer(256, 32, 16), BlockPattern::global_local(32, 256, 16));
  EXPECT_EQ(Pattern::parse("bigbird"), Pattern::block_sparse(BlockPattern::bigbird()));
  EXPECT_EQ(Pattern::parse("bigbird(64,96,0.1,3) block=32"),
            Pattern::block_sparse(BlockPattern::bigbird(64, 96, 0.1, 3, 32)));
  EXPECT_EQ(Pattern::parse("block_sparse block=16 local_window(64) + random(0.5,1)"),
            Pattern::block_sparse(BlockPattern::local_window(64, 16) | BlockPattern::random(0.5, 1, 16)));
}

// "ignored density": earlier code drew what it liked. Every row keeps what was asked for, rounded to whole blocks.
TEST(BlockPatterns, DensityIsHonoured) {
  for (const double density : {0.01, 0.1, 0.25, 0.5, 0.9}) {
    const BlockMask mask = BlockPattern::random(density, 5).mask(64 * 200, 4, false);
    EXPECT_EQ(mask.heads(), 4);
    for (std::int64_t head = 0; head < 4; ++head) {
      for (std::int64_t row = 0; row < 200; ++row)
        EXPECT_EQ(mask.row(head, row).size(), static_cast<std::size_t>(density * 200 + 0.5));
    }
    EXPECT_NEAR(mask.density(), density, 0.5 / 200);
    EXPECT_NE(mask, BlockPattern::random(density, 6).mask(64 * 200, 4, false));
  }
}

TEST(BlockPatterns, UnionWithAMaskOfOnesOwn) {
  const BlockMask own = some_mask(2, 10, 3);
  const BlockPattern both = BlockPattern::local_window(32, 16) | BlockPattern(own);
  expect_mask(
      both.mask(160, 2, false), 2, [&](auto h, auto i, auto j) { return std::abs(i - j) <= 1 || own.active(h, i, j); },
      both.to_string());
  EXPECT_THROW(both.mask(161, 2, false), InvalidArgument);
  EXPECT_THROW(BlockPattern::local_window(32, 32) | BlockPattern(own), InvalidArgument);
}

// A mask for every batch entry and head: random terms still draw by head, the same for all entries.
TEST(BlockPatterns, RandomTermsDrawByHeadBesideAMaskOfAllEntries) {
  const BlockMask own = some_mask(2 * 3, 20, 3);
  const BlockMask both = (BlockPattern::random(0.2, 9, 16) | BlockPattern(own)).mask(320, 3, false);
  const Predicate drawn = random_definition(0.2, 9, 20, false);
  expect_mask(
      both, 6, [&](auto h, auto i, auto j) { return drawn(h % 3, i, j) || own.active(h, i, j); },
      "2 entries of 3 heads");
}

TEST(BlockMask, SetOperations) {
  const BlockMask a = some_mask(3, 7, 1), b = some_mask(1, 7, 2);
  expect_mask(
      a | b, 3, [&](auto h, auto i, auto j) { return a.active(h, i, j) || b.active(h, i, j); }, "union");
  expect_mask(
      a & b, 3, [&](auto h, auto i, auto j) { return a.active(h, i, j) && b.active(h, i, j); }, "intersection");
  expect_mask(
      a - b, 3, [&](auto h, auto i, auto j) { return a.active(h, i, j) && !b.active(h, i, j); }, "difference");
  EXPECT_EQ((a | b) - b, a - b);
  EXPECT_EQ((a - b).active_blocks() + (a & b).active_blocks(), a.active_blocks());
  EXPECT_THROW(a | some_mask(3, 8, 1), InvalidArgument);
  EXPECT_THROW(a | some_mask(2, 7, 1), InvalidArgument);
  EXPECT_THROW(a | some_mask(3, 7, 1, 32), InvalidArgument);
}

TEST(BlockMask, DenseAndBack) {
  const BlockMask mask = some_mask(3, 9, 4);
  EXPECT_EQ(BlockMask::from_dense(16, 3, 9, mask.to_dense()), mask);
  EXPECT_EQ(BlockMask::from_dense(16, 3, 9, mask.to_dense()).hash(), mask.hash());
  EXPECT_NE(some_mask(3, 9, 5).hash(), mask.hash());
  EXPECT_NE(mask.to_string().find("9 x 9 blocks of 16, 3 heads"), std::string::npos) << mask.to_string();
}

TEST(BlockMask, TransposedListsHoldTheSameBlocks) {
  for (const std::int64_t heads : {1, 3}) {
    const BlockMask mask = some_mask(heads, 11, 6);
    for (std::int64_t head = 0; head < heads; ++head) {
      for (std::int64_t column = 0; column < 11; ++column) {
        std::vector<std::int32_t> rows;
        for (std::int32_t row = 0; row < 11; ++row) {
          if (mask.active(head, row, column)) rows.push_back(row);
        }
        const auto listed = mask.column(head, column);
        EXPECT_TRUE(std::equal(rows.begin(), rows.end(), listed.begin(), listed.end()));
      }
    }
  }
}

// Full blocks hold attended pairs only, partial ones some, and together they are everything that attends.
TEST(BlockMask, FullAndPartialBlocks) {
  const BlockMask mask = some_mask(2, 6, 8);
  for (const std::int64_t rows : {96, 85, 81, 40}) {
    for (const bool causal : {false, true}) {
      const auto attends = [&](std::int64_t i, std::int64_t j) { return i < rows && j < rows && (!causal || j <= i); };
      const auto pairs = [&](std::int64_t block_row, std::int64_t block_column) {
        int count = 0, present = 0;
        for (std::int64_t i = block_row * 16; i < block_row * 16 + 16; ++i) {
          present += i < rows;
          for (std::int64_t j = block_column * 16; j < block_column * 16 + 16; ++j) count += attends(i, j);
        }
        return std::pair(count, count == present * 16);
      };
      for (std::int64_t head = 0; head < 2; ++head) {
        for (std::int64_t row = 0; row * 16 < rows; ++row) {
          const BlockList seen = mask.visible_row(head, row, rows, causal);
          for (std::int64_t column = 0; column < 6; ++column) {
            const bool full = std::count(seen.full.begin(), seen.full.end(), column) > 0;
            const bool partial = std::count(seen.partial.begin(), seen.partial.end(), column) > 0;
            const auto [count, whole] = pairs(row, column);
            EXPECT_EQ(full || partial, mask.active(head, row, column) && count > 0);
            EXPECT_TRUE(!full || whole);
            EXPECT_TRUE(!partial || !whole);
            if (column * 16 >= rows) continue;
            const BlockList back = mask.visible_column(head, column, rows, causal);
            EXPECT_EQ(std::count(back.full.begin(), back.full.end(), row) > 0, full);
            EXPECT_EQ(std::count(back.partial.begin(), back.partial.end(), row) > 0, partial);
          }
        }
      }
    }
  }
}

TEST(BlockPatterns, TextReadsBack) {
  const BlockPattern patterns[] = {BlockPattern::local_window(512),
                                   BlockPattern::strided(300, 32),
                                   BlockPattern::dilated_sparse({1, 2, 16}, 128),
                                   BlockPattern::global_local(64, 512),
                                   BlockPattern::hierarchical(),
                                   BlockPattern::hierarchical({{16, -1}}, 16),
                                   BlockPattern::random(1.0 / 3, 0xffffffffffffffffu),
                                   BlockPattern::adaptive(0.1, 128),
                                   BlockPattern::bigbird(),
                                   BlockPattern::longformer(256),
                                   BlockPattern::parse("longformer"),
                                   some_mask(2, 4, 1),
                                   BlockPattern::local_window(64, 16) | BlockPattern(some_mask(2, 4, 1))};
  for (const BlockPattern& pattern : patterns) {
    EXPECT_EQ(BlockPattern::parse(pattern.to_string()), pattern) << pattern.to_string();
    for (const Pattern& whole :
         {Pattern::block_sparse(pattern), Pattern::dilated({64, 256}, {1, 4}).with_mask(1, pattern)}) {
      EXPECT_EQ(Pattern::parse(whole.to_string()), whole) << whole.to_string();
      EXPECT_EQ(Pattern::parse(whole.to_string()).hash(), whole.hash());
    }
    for (const BlockPattern& other : patterns) EXPECT_EQ(&pattern == &other, pattern.to_string() == other.to_string());
  }
}

TEST(BlockPatterns, RefuseBadInput) {
  EXPECT_THROW(BlockPattern::local_window(64, 24), InvalidArgument);
  EXPECT_THROW(BlockPattern::local_window(-1), InvalidArgument);
  EXPECT_THROW(BlockPattern::strided(0), InvalidArgument);
  EXPECT_THROW(BlockPattern::dilated_sparse({}), InvalidArgument);
  EXPECT_THROW(BlockPattern::dilated_sparse({0}), InvalidArgument);
  EXPECT_THROW(BlockPattern::hierarchical({}), InvalidArgument);
  EXPECT_THROW(BlockPattern::hierarchical({{0, 64}}), InvalidArgument);
  EXPECT_THROW(BlockPattern::hierarchical({{64, -2}}), InvalidArgument);
  for (const double density : {0.0, -0.1, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW(BlockPattern::random(density), InvalidArgument);
    EXPECT_THROW(BlockPattern::adaptive(density), InvalidArgument);
  }
  EXPECT_THROW(BlockPattern::adaptive(0.5) | BlockPattern::local_window(64), InvalidArgument);
  EXPECT_THROW(BlockPattern::global_local(-1, 64), InvalidArgument);
  try {
    BlockPattern::global_local(1000, 64).mask(999, 1, false);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.argument(), "global_tokens");
    EXPECT_NE(std::string(error.what()).find("1000"), std::string::npos) << error.what();
  }
  EXPECT_THROW(BlockMask::from_lists(16, 1, 2, {0, 1}, {0}), InvalidArgument);
  EXPECT_THROW(BlockMask::from_lists(16, 1, 2, {0, 2, 1}, {0}), InvalidArgument);
  EXPECT_THROW(BlockMask::from_lists(16, 1, 2, {0, 5, 1}, {0}), InvalidArgument);
  EXPECT_THROW(BlockMask::from_lists(16, 1, 2, {0, 1, 2}, {0, 2}), InvalidArgument);
  for (const char* text : {"bigbird(",
                           "bigbird(1,2,3,4,5)",
                           "bigbird(64,64,0)",
                           "random",
                           "random(0)",
                           "random(0.1,-1)",
                           "local_window",
                           "local_window()",
                           "local_window(x)",
                           "local_window(64) block=65",
                           "hierarchical(64)",
                           "+local_window(64)x",
                           "+",
                           "strided(64) 4/1",
                           "adaptive(0.5)+strided(64)",
                           "global_local(-1,64)",
                           "global_local(<=-1,64)",
                           "global_local(64,<=64)",
                           "block_sparse",
                           "block_sparse block=64",
                           "longformer(1,2,3)"}) {
    EXPECT_THROW(Pattern::parse(text), InvalidArgument) << text;
  }
}

TEST(BlockPatterns, AdaptiveNeedsTheWholeSequence) {
  Problem problem;
  problem.tokens = problem.query_rows = 256;
  EXPECT_NO_THROW(Plan(Pattern::block_sparse(BlockPattern::adaptive(0.5)), {}, problem));
  EXPECT_THROW(Plan(Pattern::longnet({128}, {1}).with_mask(0, BlockPattern::adaptive(0.5)), {}, problem),
               InvalidArgument);
  EXPECT_THROW(Plan(Pattern::longnet({256}, {2}).with_mask(0, BlockPattern::adaptive(0.5)), {}, problem),
               InvalidArgument);
}

// A million tokens in 8,192 block rows: 67 million Philox words, and lists of the active blocks only.
// bench/block_plan.py has the time; the bound here only catches what grows with the square in memory or allocations.
TEST(BlockPatterns, MillionTokensPlanQuickly) {
  Problem problem;
  problem.tokens = problem.query_rows = 1 << 20;
  const auto start = std::chrono::steady_clock::now();
  const Plan plan(Pattern::block_sparse(BlockPattern::bigbird(256, 384, 0.001, 0, 128)), {}, problem);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  EXPECT_EQ(plan.branches()[0].mask->blocks(), 8192);
  EXPECT_LT(plan.bytes(), std::size_t{4} << 20);
  EXPECT_LT(seconds, 5.0);
  RecordProperty("milliseconds", static_cast<int>(seconds * 1e3));
}

TEST(BlockMask, IndicesOutsideAreRefused) {
  const BlockMask mask = BlockMask::from_rows(16, 2, 2, {{0}, {1}, {0}, {0, 1}});
  for (const std::int64_t head : {-1, 2}) {
    EXPECT_THROW(mask.row(head, 0), InvalidArgument);
    EXPECT_THROW(mask.column(head, 0), InvalidArgument);
  }
  for (const std::int64_t block : {std::int64_t{-1}, std::int64_t{2}, std::int64_t{1} << 32}) {
    EXPECT_THROW(mask.row(0, block), InvalidArgument);
    EXPECT_THROW(mask.column(0, block), InvalidArgument);
    EXPECT_THROW(mask.active(0, block, 0), InvalidArgument);
    EXPECT_THROW(mask.active(0, 0, block), InvalidArgument);
    EXPECT_THROW(mask.visible_row(0, block, 32, false), InvalidArgument);
    EXPECT_THROW(mask.visible_column(0, block, 32, false), InvalidArgument);
  }
}

}  // namespace
}  // namespace longspan
