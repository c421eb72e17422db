// Block masks in the Hopper kernels: both block sizes they take, masks of heads and entries, strands, ranges and ends,
// against the reference, with outputs poisoned before; and the same bits again and again.
#include <gtest/gtest.h>

#include <tuple>

#include "gpu/hopper_block_cases.h"
#include "kernels/cuda/prepare.h"
#include "longspan/inspect.h"

namespace longspan::testing {
namespace {

using Parameters = std::tuple<BlockSetting, int, DType, bool>;
class HopperBlocks : public ::testing::TestWithParam<Parameters> {
 protected:
  Case make() const {
    const auto& [setting, block, dtype, causal] = GetParam();
    Case c(setting.pattern(block), with(causal), setting.shape, dtype, causal ? Layout::bhnd : Layout::bnhd,
           setting.ranges);
    c.lengths = setting.lengths;
    return c;
  }
};

void expect_close(const char* name, const Tensor& got, const reference::ExpectedTensor& want) {
  const auto comparison = reference::compare(got.view(), want);
  EXPECT_LE(comparison.over_tolerance, 1) << name << " " << comparison.worst;
  EXPECT_LE(comparison.rms_over_model, 2) << name;
}

TEST_P(HopperBlocks, MatchesReference) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  const Case c = make();
  DeviceCase device(c);
  const Attention attention(c.pattern, c.options);
  Case fixed = c;
  if (c.pattern.branches()[0].mask->adaptive_density() > 0)
    fixed.pattern = Pattern::block_sparse(adaptive_mask(attention, device.q.view(), device.k.view(), device.call()));
  const reference::Expectation want = fixed.expected(true);
  const auto plan = attention.plan(device.problem());
  device.forward(attention, device.call());
  ASSERT_NE(plan->kernel_name(Pass::backward), "") << plan->why_no_kernel(Pass::backward);
  if (c.ranges.empty()) {
    device.backward(attention, device.call());
  } else {  // lists go by tiles of the whole strand
    EXPECT_THROW(device.backward(attention, device.call()), Unsupported);
    Options unnamed = c.options;
    unnamed.kernel.clear();
    device.backward(Attention(c.pattern, unnamed), device.call());
  }
  const Results& got = device.download();
  expect_close("out", got.out, want.out);
  expect_close("lse", got.lse, want.lse);
  EXPECT_LE(reference::compare(got.lse.view(), want.lse).largest_error, 1e-5);
  expect_close("dq", got.dq, want.dq);
  expect_close("dk", got.dk, want.dk);
  expect_close("dv", got.dv, want.dv);
}

TEST_P(HopperBlocks, RepeatsBitForBit) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  expect_same_bits(make(), 20);
}

std::string name_of_case(const ::testing::TestParamInfo<Parameters>& parameters) {
  const auto& [setting, block, dtype, causal] = parameters.param;
  return std::string(setting.name) + "_" + std::to_string(block) + "_" + std::string(name_of(dtype)) +
         (causal ? "_causal" : "");
}

INSTANTIATE_TEST_SUITE_P(Hopper, HopperBlocks,
                         ::testing::Combine(::testing::ValuesIn(block_settings()), ::testing::Values(64, 128),
                                            ::testing::Values(DType::bf16, DType::f16), ::testing::Bool()),
                         name_of_case);

/// Rows without keys are zeros even where the tile that stands in for their keys holds NaN; NaN in keys that lengths
/// exclude reaches nobody.
TEST(HopperBlockValues, NaNReachesNoRowWithoutItsBlock) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  for (const int block : {64, 128}) {
    for (const std::int64_t head_dim : {64, 128}) {
      const std::int64_t tokens = 8 * block, end = 5 * block + 17;
      // Block rows 2 and 3 see nothing, the others see blocks 2 to 7.
      std::vector<std::vector<std::int32_t>> rows(8, {2, 3, 4, 5, 6, 7});
      rows[2] = rows[3] = {};
      Case c(Pattern::block_sparse(BlockMask::from_rows(block, 1, 8, rows)), with(false), {1, tokens, 2, 2, head_dim},
             DType::bf16);
      c.lengths = {end};
      for (std::int64_t row = 0; row < tokens; ++row) {
        if (row >= 2 * block && row < end) continue;
        for (std::int64_t column = 0; column < head_dim; ++column) {
          for (std::int64_t head = 0; head < 2; ++head) c.v.set(0, row, head, column, std::nan(""));
        }
      }
      DeviceCase device(c);
      device.forward(Attention(c.pattern, c.options), device.call());
      const Results& got = device.download();
      got.out.for_each([&](auto entry, auto row, auto head, auto column) {
        const double value = got.out.at(entry, row, head, column);
        const bool empty = (row >= 2 * block && row < 4 * block) || row >= end;
        ASSERT_TRUE(empty ? value == 0 : std::isfinite(value)) << "block " << block << " row " << row << ": " << value;
      });
    }
  }
}

/// The forward refuses no block mask.
TEST(HopperBlockRefusals, TheForwardHasNone) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  const auto why = [](const Pattern& pattern, std::int64_t head_dim) {
    return hopper::kKernel.can_run(Plan(pattern, {}, problem_of(512, 2, head_dim)), Pass::forward).reason;
  };
  for (const int block : {16, 32, 64, 128}) {
    for (const std::int64_t head_dim : {8, 64, 128, 256}) EXPECT_EQ(why(local_blocks(block), head_dim), "");
  }
  EXPECT_EQ(why(Pattern::parse("longnet 256/1{block=64 local_window(64)} 512/2"), 64), "");
}

/// Else the cases called long would not be.
TEST(HopperBlockLists, LongColumnsAreCut) {
  for (const int block : {64, 128}) {
    EXPECT_TRUE(cuda::splits_lists(Plan(global(block), {}, problem_of(4700, 2, 64))));
    EXPECT_FALSE(cuda::splits_lists(Plan(global(block), {}, problem_of(1300, 2, 64))));
  }
}

TEST(HopperBlockChoice, CanBePrinted) {
  const auto shape = [](int block, std::int64_t head_dim) {
    return to_string(hopper::choose(Plan(local_blocks(block), {}, problem_of(4096, 2, head_dim))));
  };
  EXPECT_EQ(
      shape(64, 48),
      "128 x 64 tiles for strands of about 4096 rows by lists of blocks, 2 side by side, head dim as 64, 4 stages");
  EXPECT_EQ(
      shape(64, 128),
      "128 x 64 tiles for strands of about 4096 rows by lists of blocks, 1 side by side, head dim as 128, 4 stages");
  EXPECT_EQ(
      shape(128, 72),
      "128 x 128 tiles for strands of about 4096 rows by lists of blocks, 1 side by side, head dim as 128, 2 stages");
}

}  // namespace
}  // namespace longspan::testing
