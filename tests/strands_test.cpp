// Strand arithmetic against positions written out, in both widths: what every engine's schedule is made of.
#include "plan/strands.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

namespace longspan::strands {
namespace {

template <class Index>
struct Drawn {
  BranchOf<Index> branch;
  Index length, heads;
};

/// A small random branch: head groups, or all heads by one of two phase rules.
template <class Index>
Drawn<Index> draw(std::mt19937& engine) {
  const auto number = [&](int low, int high) {
    return static_cast<Index>(std::uniform_int_distribution<int>(low, high)(engine));
  };
  const Index heads = number(1, 9), dilation = number(1, 12);
  BranchOf<Index> branch{number(1, 70), dilation, 0, heads, -1, 0, number(0, 3) == 0, number(0, 1) == 0};
  switch (number(0, 2)) {
    case 0:
      branch.head_begin = number(0, static_cast<int>(heads) - 1);
      branch.head_count = number(0, static_cast<int>(heads - branch.head_begin));
      branch.fixed_phase = number(0, static_cast<int>(dilation) - 1);
      break;
    case 1:
      branch.phase_divisor = (heads + dilation - 1) / dilation;
      break;
    default:
      break;
  }
  return {branch, number(0, 64), heads};
}

/// Positions of a segment that a head's phase selects: the definition, position by position.
template <class Index>
std::vector<Index> written_out(const BranchOf<Index>& branch, Index head, Index segment, Index length) {
  std::vector<Index> positions;
  if (branch.skip_if_longer && branch.segment > length) return positions;
  const Index phase = branch.fixed_phase >= 0    ? branch.fixed_phase
                      : branch.phase_divisor > 0 ? head / branch.phase_divisor
                                                 : head % branch.dilation;
  for (Index i = 0; i < length; ++i) {
    if (i / branch.segment == segment && i % branch.segment % branch.dilation == phase) positions.push_back(i);
  }
  return positions;
}

template <class Index>
class Strands : public ::testing::Test {};
using Widths = ::testing::Types<std::int32_t, std::int64_t>;
TYPED_TEST_SUITE(Strands, Widths);

TYPED_TEST(Strands, AreThePositionsWrittenOut) {
  std::mt19937 engine(1);
  for (int trial = 0; trial < 4000; ++trial) {
    const auto [branch, length, heads] = draw<TypeParam>(engine);
    for (TypeParam head = 0; head < heads; ++head) {
      TypeParam longest = 0;
      std::size_t covered = 0;
      for (TypeParam segment = 0; segment < branch.segments(length); ++segment) {
        const std::vector<TypeParam> expected = written_out(branch, head, segment, length);
        const auto strand = branch.strand(head, segment, length);
        ASSERT_EQ(strand.count, static_cast<TypeParam>(expected.size()));
        for (std::size_t t = 0; t < expected.size(); ++t) {
          ASSERT_EQ(strand.start + static_cast<TypeParam>(t) * strand.stride, expected[t]);
          ASSERT_TRUE(branch.covers(head, expected[t]));
        }
        covered += expected.size();
        longest = std::max(longest, strand.count);
        const TypeParam grid = (std::min(branch.segment, length) + branch.dilation - 1) / branch.dilation;
        ASSERT_EQ(branch.padding(strand.count, length, false), branch.pad_keys ? grid - strand.count : 0);
        ASSERT_EQ(branch.padding(strand.count, length, true), 0);
      }
      ASSERT_LE(longest, branch.longest_strand(length));
      if (branch.active(length) && length > 0 && branch.phase(head) == 0) {
        ASSERT_EQ(longest, branch.longest_strand(length));
      }
      std::size_t expected_covered = 0;
      for (TypeParam i = 0; i < length; ++i) expected_covered += branch.active(length) && branch.covers(head, i);
      ASSERT_EQ(covered, expected_covered);
    }
  }
}

TYPED_TEST(Strands, QueryRunsAreTheRowsOfARange) {
  std::mt19937 engine(2);
  for (int trial = 0; trial < 4000; ++trial) {
    const auto [branch, length, heads] = draw<TypeParam>(engine);
    if (length == 0) continue;
    const auto up_to = [&](TypeParam high) {
      return static_cast<TypeParam>(std::uniform_int_distribution<int>(0, static_cast<int>(high))(engine));
    };
    const TypeParam start = up_to(length - 1), count = up_to(length - start), head = up_to(heads - 1);
    const std::int64_t q_first = 5;
    for (TypeParam segment = 0; segment < branch.segments(length); ++segment) {
      const std::vector<TypeParam> rows = written_out(branch, head, segment, length);
      const auto run = query_run(branch.strand(head, segment, length), start, count, q_first);
      std::vector<TypeParam> inside;
      for (std::size_t t = 0; t < rows.size(); ++t) {
        if (rows[t] >= start && rows[t] < start + count) inside.push_back(static_cast<TypeParam>(t));
      }
      ASSERT_EQ(run.count, static_cast<TypeParam>(inside.size()));
      if (inside.empty()) continue;
      ASSERT_EQ(run.begin, inside.front());
      ASSERT_EQ(run.q_row, q_first + rows[static_cast<std::size_t>(run.begin)] - start);
    }
  }
}

TYPED_TEST(Strands, PiecesHoldTheirRows) {
  std::mt19937 engine(3);
  const auto number = [&](int low, int high) {
    return static_cast<TypeParam>(std::uniform_int_distribution<int>(low, high)(engine));
  };
  for (int trial = 0; trial < 2000; ++trial) {
    const TypeParam first = number(0, 20), step = number(1, 5), rows = number(0, 9);
    for (TypeParam position = 0; position < 80; ++position) {
      std::optional<TypeParam> expected;
      for (TypeParam row = 0; row < rows; ++row) {
        if (first + row * step == position) expected = row;
      }
      ASSERT_EQ(piece_row(first, step, rows, position), expected.value_or(-1));
    }
  }
}

TEST(Strands, ReachTheEndsOfTheirWidth) {
  constexpr std::int64_t kMost = INT64_MAX;
  static_assert(ceil_divide<std::int64_t>(kMost, 1) == kMost && ceil_divide<std::int64_t>(0, 7) == 0);
  static_assert(ceil_divide<std::int32_t>(INT32_MAX, 2) == 1 << 30);
  const BranchOf<std::int64_t> whole{kMost, 3, 0, 2, -1, 0, false, false};
  EXPECT_EQ(whole.segments(1000), 1);
  EXPECT_EQ(whole.strand(1, 0, 1000).count, 333);
  const BranchOf<std::int64_t> far{4, kMost, 0, 2, 0, 0, false, false};
  EXPECT_EQ(far.strand(0, 5, 1000).count, 1);
  // The last segment of a sequence of almost 2^31 rows.
  const BranchOf<std::int32_t> last{1 << 30, 7, 0, 1, 6, 0, false, false};
  EXPECT_EQ(last.strand(0, 1, INT32_MAX).start, (1 << 30) + 6);
  EXPECT_EQ(last.strand(0, 1, INT32_MAX).count, ((1 << 30) - 1 - 6 + 6) / 7);
}

}  // namespace
}  // namespace longspan::strands
