// Block masks in the Hopper kernels: both block sizes they take, masks of heads and entries, strands, ranges and ends,
// against the reference, with outputs poisoned before; and the same bits again and again.
#include <gtest/gtest.h>

#include <random>
#include <tuple>

#include "gpu/hopper_case.h"
#include "kernels/cuda/prepare.h"
#include "longspan/inspect.h"

namespace longspan::testing {
namespace {

struct BlockSetting {
  const char* name;
  Pattern (*pattern)(int block);
  Shape shape;
  std::vector<std::int64_t> lengths;
  std::vector<RowRange> ranges;
};

Pattern local(int block) {
  return Pattern::block_sparse(BlockPattern::local_window(4 * block, block) |
                               BlockPattern::dilated_sparse({5, 9}, block));
}
Pattern global(int block) { return Pattern::block_sparse(BlockPattern::global_local(block, 2 * block, block)); }
Pattern random(int block) { return Pattern::block_sparse(BlockPattern::random(0.3, 7, block)); }
Pattern adaptive(int block) { return Pattern::block_sparse(BlockPattern::adaptive(0.25, block)); }
Pattern everything(int block) { return Pattern::block_sparse(BlockPattern::random(1.0, 7, block)); }
/// The strands of the second branch lie apart; the third has no mask.
Pattern strands(int block) {
  const std::string size = std::to_string(block);
  return Pattern::parse("dilated 1000/1{block=" + size + " local_window(256)} 2100/3{block=" + size +
                        " random(0.4,3)} 700/2");
}

/// Random blocks of `heads` heads, of which some rows see nothing: they have no keys at all.
BlockMask gaps(int block, std::int64_t heads, std::int64_t tokens) {
  std::mt19937 engine(5);
  const std::int64_t blocks = (tokens + block - 1) / block;
  std::vector<std::vector<std::int32_t>> rows;
  for (std::int64_t row = 0; row < heads * blocks; ++row) {
    rows.emplace_back();
    if (engine() % 4 == 0) continue;
    for (std::int32_t column = 0; column < blocks; ++column) {
      if (engine() % 3 == 0) rows.back().push_back(column);
    }
  }
  return BlockMask::from_rows(block, heads, blocks, rows);
}
Pattern gaps_of_heads(int block) { return Pattern::block_sparse(gaps(block, 4, 1200)); }
Pattern gaps_of_entries(int block) { return Pattern::block_sparse(gaps(block, 6, 900)); }

std::vector<BlockSetting> settings() {
  return {{"local", local, {1, 1536, 2, 2, 64}, {}, {}},
          {"local_ragged", local, {2, 1401, 2, 1, 64}, {}, {}},
          {"local_wide", local, {1, 1401, 2, 2, 128}, {}, {}},
          {"local_d40", local, {1, 1300, 2, 2, 40}, {}, {}},
          {"local_lengths", local, {3, 1299, 2, 2, 64}, {1299, 650, 0}, {}},
          {"local_lengths_wide", local, {2, 1299, 2, 2, 96}, {1100, 1299}, {}},
          {"local_ranges", local, {1, 1401, 2, 2, 64}, {}, {{100, 333}, {900, 64}, {1390, 11}}},
          {"local_ranges_wide", local, {1, 1401, 2, 2, 128}, {}, {{100, 333}, {900, 500}}},
          {"global", global, {1, 1300, 4, 2, 64}, {}, {}},
          {"global_wide", global, {1, 1300, 2, 2, 128}, {}, {}},
          // So many block rows see the first block that its list is cut in the backward.
          {"global_long", global, {1, 5000, 2, 2, 64}, {}, {}},
          {"global_long_wide", global, {1, 5000, 2, 2, 128}, {}, {}},
          {"global_long_grouped", global, {2, 4700, 2, 1, 64}, {4700, 4600}, {}},
          {"random", random, {2, 1100, 3, 3, 64}, {}, {}},
          {"random_wide", random, {1, 1100, 4, 2, 128}, {}, {}},
          {"adaptive", adaptive, {2, 1300, 4, 2, 64}, {}, {}},
          {"adaptive_lengths", adaptive, {3, 1299, 4, 2, 64}, {1299, 0, 650}, {}},
          {"adaptive_lengths_wide", adaptive, {2, 1299, 2, 1, 128}, {0, 1100}, {}},
          {"everything", everything, {1, 1000, 2, 2, 64}, {}, {}},
          {"short", everything, {2, 37, 2, 2, 64}, {}, {}},
          {"strands", strands, {1, 2600, 3, 3, 64}, {}, {}},
          {"strands_wide", strands, {2, 1999, 3, 3, 128}, {}, {}},
          {"strands_ranges", strands, {1, 2600, 3, 3, 64}, {}, {{777, 900}, {2000, 500}}},
          {"gaps", gaps_of_heads, {2, 1200, 4, 4, 64}, {}, {}},
          {"gaps_wide", gaps_of_heads, {1, 1200, 4, 2, 128}, {}, {}},
          {"gaps_of_entries", gaps_of_entries, {3, 900, 2, 2, 64}, {}, {}},
          {"gaps_of_entries_wide", gaps_of_entries, {3, 900, 2, 2, 128}, {}, {}}};
}

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
                         ::testing::Combine(::testing::ValuesIn(settings()), ::testing::Values(64, 128),
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
    for (const std::int64_t head_dim : {8, 64, 128, 256}) EXPECT_EQ(why(local(block), head_dim), "");
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
    return to_string(hopper::choose(Plan(local(block), {}, problem_of(4096, 2, head_dim))));
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
