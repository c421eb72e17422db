// Patterns: their text reads back, equal patterns hash alike, nonsense is refused by name.
#include "longspan/pattern.h"

#include <gtest/gtest.h>

#include <random>

#include "longspan/error.h"

namespace longspan {
namespace {

BlockMask some_mask(std::int64_t heads, std::int64_t blocks, unsigned seed) {
  std::mt19937 engine(seed);
  std::vector<std::uint8_t> dense(static_cast<std::size_t>(heads * blocks * blocks));
  for (auto& bit : dense) bit = engine() % 2;
  return BlockMask::from_dense(16, heads, blocks, dense);
}

std::vector<Pattern> many_patterns() {
  std::vector<Pattern> patterns = {
      Pattern::dense(),
      Pattern::dense().with_output_scale(1.0 / 3).with_pad_keys(),
      Pattern::dilated({2048, 4096, 8192}, {1, 2, 4}),
      Pattern::dilated({2048, 4096, 8192}, {1, 2, 4}).with_output_scale(1.0 / 3),
      Pattern::dilated({1}, {7}),
      Pattern::longnet({1024, 5792, 32768, 185363, 1048576}, {1, 2, 4, 8, 16}, PhaseRule::torchscale).with_pad_keys(),
      Pattern::longnet({64, kWholeSequence}, {1, 512}).with_long_segments(LongSegments::skip),
      Pattern::longnet({kWholeSequence}, {1}),
      Pattern::block_sparse(some_mask(1, 5, 1)),
      Pattern::block_sparse(some_mask(3, 4, 2)).with_pad_keys(),
      Pattern::longnet({64, 256}, {1, 4}).with_mask(1, some_mask(2, 3, 3)),
      Pattern::block_sparse(BlockMask::from_rows(128, 1, 3, {{}, {0, 2}, {0, 1, 2}}))};
  return patterns;
}

TEST(PatternText, ReadsBackWhatItPrints) {
  for (const Pattern& pattern : many_patterns()) {
    const std::string text = pattern.to_string();
    const Pattern read = Pattern::parse(text);
    EXPECT_EQ(read, pattern) << text;
    EXPECT_EQ(read.to_string(), text);
    EXPECT_EQ(read.hash(), pattern.hash());
    EXPECT_TRUE(text.starts_with("longspan/1 ")) << text;
  }
}

TEST(PatternText, DifferentPatternsDiffer) {
  const auto patterns = many_patterns();
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (i == 7 && j == 0) continue;  // longnet over the whole sequence with dilation 1 is dense
      EXPECT_NE(patterns[i], patterns[j]) << patterns[i].to_string();
      EXPECT_NE(patterns[i].hash(), patterns[j].hash()) << patterns[i].to_string();
      EXPECT_NE(patterns[i].to_string(), patterns[j].to_string());
    }
  }
  EXPECT_EQ(patterns[7], patterns[0]);
}

TEST(PatternText, VersionMayBeLeftOut) {
  EXPECT_EQ(Pattern::parse("dilated 2048/1 4096/2"), Pattern::dilated({2048, 4096}, {1, 2}));
  EXPECT_EQ(Pattern::parse("dense"), Pattern::dense());
}

TEST(PatternText, RefusesNonsense) {
  for (const char* text : {"",
                           "longspan/2 dense",
                           "longspan/1",
                           "cubist 1/1",
                           "dilated",
                           "dilated 2048",
                           "dilated 2048/",
                           "dilated /1",
                           "dilated 0/1",
                           "dilated 4/0",
                           "dilated -4/1",
                           "dilated 4/1x",
                           "dense 4/1",
                           "dilated phase=paper 4/1",
                           "longnet phase=other 4/1",
                           "longnet 4/1 output_scale=nan",
                           "longnet 4/1 output_scale=",
                           "longnet 99999999999999999999/1",
                           "longnet 4/1{",
                           "longnet 4/1{}",
                           "longnet 4/1{block=16 heads=1 blocks=1 rows=0}",
                           "longnet 4/1{block=16 heads=1 blocks=1 rows=1;}",
                           "longnet 4/1{block=17 heads=1 blocks=1 rows=0;}",
                           "longnet 4/1{block=16 heads=1 blocks=1 rows=0;}x",
                           "longnet 4/1{block=16 heads=1 blocks=2000000000 rows=0-1999999999;}",
                           "longnet 4/1{block=16 heads=1 blocks=2 rows=1,0;;}"}) {
    EXPECT_THROW(Pattern::parse(text), InvalidArgument) << text;
  }
}

TEST(Pattern, ListsOfUnequalLengthNameBoth) {
  try {
    Pattern::dilated({1, 2, 3}, {1, 2});
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.argument(), "dilations");
    EXPECT_NE(std::string(error.what()).find("3 entries"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("has 2"), std::string::npos) << error.what();
  }
  EXPECT_THROW(Pattern::dilated({}, {}), InvalidArgument);
  EXPECT_THROW(Pattern::longnet({}, {}), InvalidArgument);
  EXPECT_THROW(Pattern::dense().with_output_scale(std::numeric_limits<double>::infinity()), InvalidArgument);
  EXPECT_THROW(Pattern::dense().with_mask(1, some_mask(1, 1, 1)), InvalidArgument);
}

TEST(BlockMask, RowsAndDenseAgree) {
  const BlockMask mask = some_mask(2, 6, 4);
  std::int64_t active = 0;
  for (std::int64_t head = 0; head < 2; ++head) {
    for (std::int64_t row = 0; row < 6; ++row) {
      const auto list = mask.row(head, row);
      for (std::int64_t column = 0; column < 6; ++column) {
        const bool listed = std::find(list.begin(), list.end(), column) != list.end();
        EXPECT_EQ(mask.active(head, row, column), listed);
        active += listed;
      }
    }
  }
  EXPECT_EQ(mask.active_blocks(), active);
  EXPECT_DOUBLE_EQ(mask.density(), static_cast<double>(active) / 72);
}

TEST(BlockMask, RefusesBadLists) {
  EXPECT_THROW(BlockMask::from_rows(24, 1, 1, {{0}}), InvalidArgument);
  EXPECT_THROW(BlockMask::from_rows(16, 0, 1, {}), InvalidArgument);
  EXPECT_THROW(BlockMask::from_rows(16, 1, 2, {{0}}), InvalidArgument);
  EXPECT_THROW(BlockMask::from_rows(16, 1, 2, {{0}, {2}}), InvalidArgument);
  EXPECT_THROW(BlockMask::from_rows(16, 1, 2, {{0}, {-1}}), InvalidArgument);
  EXPECT_THROW(BlockMask::from_rows(16, 1, 2, {{0}, {1, 1}}), InvalidArgument);
  EXPECT_THROW(BlockMask::from_rows(16, 1, 2, {{0}, {1, 0}}), InvalidArgument);
  EXPECT_THROW(BlockMask::from_dense(16, 1, 2, std::vector<std::uint8_t>(3)), InvalidArgument);
}

}  // namespace
}  // namespace longspan
