// Block masks that the Hopper forward computes from lists of parts: small blocks, wide heads, branches that share rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "gpu/hopper_block_cases.h"
#include "kernels/cuda/prepare.h"

namespace longspan::testing {
namespace {

/// Branches of two block sizes and one without.
Pattern mixed_strands(int block) {
  return Pattern::parse("dilated 1000/1{block=" + std::to_string(block) + " local_window(256)} 2100/3{block=128 " +
                        "random(0.4,3)} 700/2");
}
/// Every third block row sees nothing.
Pattern blind_rows(int block) {
  const std::int64_t blocks = (700 + block - 1) / block;
  std::vector<std::vector<std::int32_t>> rows(static_cast<std::size_t>(blocks));
  for (std::int64_t row = 0; row < blocks; ++row) {
    for (std::int64_t column = row % 4; column < blocks && row % 3 != 1; column += 3)
      rows[static_cast<std::size_t>(row)].push_back(static_cast<std::int32_t>(column));
  }
  return Pattern::block_sparse(BlockMask::from_rows(block, 1, blocks, rows));
}

std::vector<BlockSetting> settings() {
  return {{"local", local_blocks, {1, 700, 2, 2, 64}, {}, {}},
          {"local_ragged", local_blocks, {2, 501, 2, 1, 48}, {}, {}},
          {"local_wide", local_blocks, {1, 601, 1, 1, 128}, {}, {}},
          {"local_d256", local_blocks, {1, 401, 2, 1, 256}, {}, {}},
          {"local_d160", local_blocks, {1, 300, 1, 1, 160}, {}, {}},
          {"local_lengths", local_blocks, {3, 799, 2, 2, 64}, {799, 450, 0}, {}},
          {"local_ranges", local_blocks, {1, 901, 2, 2, 64}, {}, {{100, 333}, {700, 64}, {890, 11}}},
          {"local_ranges_d256", local_blocks, {1, 901, 1, 1, 256}, {}, {{100, 333}, {890, 11}}},
          {"global", global, {1, 600, 2, 2, 64}, {}, {}},
          {"global_cut", global, {1, 1500, 1, 1, 64}, {}, {}},
          {"global_cut_wide", global, {2, 1400, 2, 1, 128}, {1400, 611}, {}},
          {"global_cut_d256", global, {1, 1300, 1, 1, 256}, {}, {}},
          {"global_cut_ranges", global, {1, 1500, 1, 1, 64}, {}, {{0, 31}, {31, 300}, {1490, 10}}},
          {"random_wide", random, {1, 500, 2, 1, 128}, {}, {}},
          {"everything", everything, {1, 600, 1, 1, 64}, {}, {}},
          {"short", everything, {2, 37, 2, 2, 128}, {}, {}},
          {"gaps", blind_rows, {1, 700, 2, 2, 64}, {}, {}},
          {"gaps_wide", blind_rows, {1, 700, 2, 2, 128}, {}, {}},
          {"gaps_d256", blind_rows, {1, 700, 2, 2, 256}, {}, {}},
          {"strands", mixed_strands, {1, 1500, 3, 3, 64}, {}, {}},
          {"strands_ranges", mixed_strands, {1, 1500, 3, 3, 128}, {}, {{777, 300}, {1400, 100}}},
          {"merging", merging_blocks, {1, 1000, 2, 2, 64}, {}, {}},
          {"merging_lengths", merging_blocks, {3, 901, 2, 1, 64}, {901, 333, 0}, {}},
          {"merging_wide", merging_blocks, {1, 901, 2, 2, 128}, {}, {}},
          {"merging_d256", merging_blocks, {1, 901, 2, 2, 256}, {}, {}},
          {"merging_ranges", merging_blocks, {1, 901, 2, 2, 64}, {}, {{100, 333}, {700, 64}, {890, 11}}}};
}

using Parameters = std::tuple<BlockSetting, int, bool>;
class HopperParts : public ::testing::TestWithParam<Parameters> {
 protected:
  Case make() const {
    const auto& [setting, block, causal] = GetParam();
    Case c(setting.pattern(block), with(causal), setting.shape, causal ? DType::f16 : DType::bf16,
           causal ? Layout::bhnd : Layout::bnhd, setting.ranges);
    c.lengths = setting.lengths;
    return c;
  }
};

TEST_P(HopperParts, MatchTheReference) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  expect_forward_matches_reference(make());
}

TEST_P(HopperParts, RepeatBitForBit) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  expect_same_bits(make(), 10);
}

/// Rows of a range have the bits that they have in a call of all rows.
TEST_P(HopperParts, RangesDoNotChangeBits) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  expect_bits_of_all_rows(make());
}

/// Else the cases called cut would not be.
TEST(HopperPartsLists, LongOnesAreCut) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  for (const int block : {16, 32, 64, 128}) {
    EXPECT_GT(cuda::slots_of(Plan(global(block), {}, problem_of(1300, 1, 64)), 0, 128), 0) << block;
    EXPECT_EQ(cuda::slots_of(Plan(local_blocks(block), {}, problem_of(1300, 1, 64)), 0, 128), 0) << block;
  }
}

std::string name_of_case(const ::testing::TestParamInfo<Parameters>& parameters) {
  const auto& [setting, block, causal] = parameters.param;
  return std::string(setting.name) + "_" + std::to_string(block) + (causal ? "_f16_causal" : "_bf16");
}

INSTANTIATE_TEST_SUITE_P(Hopper, HopperParts,
                         ::testing::Combine(::testing::ValuesIn(settings()), ::testing::Values(16, 32, 64, 128),
                                            ::testing::Bool()),
                         name_of_case);

}  // namespace
}  // namespace longspan::testing
