// What the Hopper forward promises besides matching the reference (which gpu_matches_reference_test checks for every
// kernel): long strands and ragged ends, exact lse, bits that repeat, errors no larger than the portable kernel's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "gpu/hopper_case.h"

namespace longspan::testing {
namespace {

/// The tile shape follows the strands, not the sequence, and can be printed.
TEST(HopperChoice, FollowsStrandsAndHeadDim) {
  const auto shape = [](const Pattern& pattern, std::int64_t tokens, std::int64_t head_dim) {
    return to_string(hopper::choose(Plan(pattern, {}, problem_of(tokens, 4, head_dim))));
  };
  EXPECT_EQ(shape(Pattern::dense(), 65536, 64),
            "192 x 128 tiles for strands of about 65536 rows, head dim as 64, 4 stages");
  EXPECT_EQ(shape(Pattern::dilated({2048}, {1}), 40960, 64),  // 80 strands: 5 rounds of 256 rows, or 7 of 192
            "256 x 64 tiles for strands of about 2048 rows, head dim as 64, 6 stages");
  EXPECT_EQ(shape(Pattern::dense(), 512, 64), "256 x 64 tiles for strands of about 512 rows, head dim as 64, 6 stages");
  EXPECT_EQ(shape(Pattern::dilated({4096}, {8}), 131072, 40),
            "256 x 64 tiles for strands of about 512 rows, head dim as 48, 6 stages");
  EXPECT_EQ(shape(Pattern::dilated({2048, 8192}, {1, 4}), 262144, 48),
            "192 x 128 tiles for strands of about 2048 rows, head dim as 48, 4 stages");
  EXPECT_EQ(shape(Pattern::dilated({128, 1024}, {1, 16}), 4096, 64),
            "256 x 64 tiles for strands of about 126 rows, 2 to a tile, head dim as 64, 6 stages");
  EXPECT_EQ(shape(Pattern::dense(), 60, 128),
            "192 x 80 tiles for strands of about 60 rows, 3 to a tile, head dim as 128, 3 stages");
  EXPECT_EQ(shape(Pattern::dense(), 300, 72), "192 x 80 tiles for strands of about 300 rows, head dim as 96, 3 stages");
  EXPECT_EQ(shape(Pattern::dense(), 8192, 128),
            "192 x 80 tiles for strands of about 8192 rows, head dim as 128, 3 stages");
  EXPECT_EQ(shape(Pattern::dense(), 8192, 136),
            "128 x 80 tiles for strands of about 8192 rows, head dim as 192, 2 stages");
  EXPECT_EQ(shape(Pattern::dense(), 60, 256),
            "128 x 48 tiles for strands of about 60 rows, 2 to a tile, head dim as 256, 2 stages");
  EXPECT_EQ(shape(Pattern::longnet({2048, 8192}, {1, 2}), 131072, 48),  // branches that merge hold state, too
            "192 x 128 tiles for strands of about 3072 rows, head dim as 48, 3 stages");
}

/// Several tiles of keys and of queries, ends in the middle of both, two kinds of phases, several entries.
std::vector<Setting> settings() {
  const auto [groups, ragged, slide] = several_strands();
  return {{"dense", Pattern::dense(), {1, 2048, 2, 2, 64}, {}, {}},
          {"dense_ragged", Pattern::dense(), {2, 1501, 2, 1, 64}, {}, {}},
          {"dense_wide", Pattern::dense(), {1, 1300, 2, 2, 128}, {}, {}},
          {"short_strands", Pattern::dilated({400, 800}, {1, 2}), {2, 2000, 4, 2, 64}, {}, {}},
          {"pairs_of_strands", Pattern::dilated({100, 512}, {1, 4}), {2, 1111, 3, 3, 64}, {}, {}},
          {"packed_strands", Pattern::dilated({64, 500}, {1, 9}), {2, 1111, 4, 2, 64}, {}, {}},
          {"packed_wide", Pattern::dilated({61, 122}, {1, 2}), {1, 1111, 4, 4, 128}, {}, {}},
          {"packed_lengths", Pattern::dilated({64, 128}, {1, 2}), {3, 700, 2, 2, 48}, {0, 65, 700}, {}},
          {"packed_ranges", Pattern::dilated({64, 128}, {1, 2}), {1, 700, 2, 2, 96}, {}, {{100, 3}, {300, 90}}},
          {"groups", groups, {1, 4096, 3, 3, 64}, {}, {}},
          {"groups_wide", groups, {1, 4096, 3, 3, 128}, {}, {}},
          {"groups_ragged", ragged, {2, 2999, 4, 2, 64}, {}, {}},
          {"groups_d96", ragged, {1, 2999, 2, 2, 96}, {}, {}},
          {"groups_d40", ragged, {1, 2999, 2, 2, 40}, {}, {}},
          {"lengths", groups, {2, 2048, 3, 3, 64}, {1777, 300}, {}},
          {"ranges", ragged, {1, 2999, 2, 2, 64}, {}, {{700, 900}, {2900, 99}}},
          {"slide", slide, {1, 2001, 4, 4, 48}, {}, {}},
          {"slide_lengths", slide, {2, 1201, 4, 4, 64}, {1200, 77}, {}},
          {"slide_wide", slide, {1, 1201, 4, 4, 128}, {}, {}},
          {"slide_d96", slide, {1, 1201, 4, 4, 96}, {}, {}},
          {"slide_d160", slide, {1, 1201, 2, 2, 160}, {}, {}},
          {"slide_d256", slide, {1, 1201, 4, 2, 256}, {}, {}},
          {"slide_many", Pattern::longnet({128, 300, 900, 2000}, {1, 2, 3, 4}), {2, 3001, 6, 3, 32}, {}, {}},
          {"groups_d192", ragged, {1, 2999, 2, 2, 192}, {}, {}},
          {"groups_d256", groups, {1, 4096, 3, 3, 256}, {}, {}},
          {"dense_d256", Pattern::dense(), {2, 1501, 2, 1, 256}, {}, {}},
          {"packed_d256", Pattern::dilated({61, 122}, {1, 2}), {1, 1111, 4, 4, 248}, {}, {}},
          {"lengths_d256", groups, {2, 2048, 3, 3, 256}, {1777, 300}, {}},
          {"ranges_d136", ragged, {1, 2999, 2, 2, 136}, {}, {{700, 900}, {2900, 99}}},
          {"slide_ranges", slide, {1, 2001, 4, 4, 48}, {}, {{1000, 1001}, {5, 300}}},
          {"slide_short", Pattern::longnet({64, 300}, {1, 3}), {1, 700, 4, 4, 64}, {}, {}}};
}

using Parameters = std::tuple<Setting, DType, bool>;
class HopperForward : public ::testing::TestWithParam<Parameters> {
 protected:
  Case make(const char* kernel = kHopper) const {
    const auto& [setting, dtype, causal] = GetParam();
    Case c(setting.pattern, with(causal, false, kernel), setting.shape, dtype, causal ? Layout::bhnd : Layout::bnhd,
           setting.ranges);
    c.lengths = setting.lengths;
    return c;
  }
};

TEST_P(HopperForward, MatchesWithExactLseAndNoMoreErrorThanThePortableKernel) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  const Case c = make(), portable_case = make("cuda-mma");
  const reference::Expectation want = c.expected(false);
  DeviceCase device(c), portable(portable_case);
  device.forward(Attention(c.pattern, c.options), device.call());
  portable.forward(Attention(c.pattern, portable_case.options), portable.call());
  const Results &got = device.download(), &other = portable.download();
  const auto out = reference::compare(got.out.view(), want.out),
             beside = reference::compare(other.out.view(), want.out);
  EXPECT_LE(out.over_tolerance, 1) << out.worst;
  EXPECT_LE(out.rms_over_model, 1.1 * beside.rms_over_model);
  const auto lse = reference::compare(got.lse.view(), want.lse);
  EXPECT_LE(lse.over_tolerance, 1) << lse.worst;
  EXPECT_LE(lse.largest_error, 1e-5);
}

TEST_P(HopperForward, RepeatsBitForBit) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  expect_same_bits(make(), 100);
}

std::string name_of_case(const ::testing::TestParamInfo<Parameters>& parameters) {
  const auto& [setting, dtype, causal] = parameters.param;
  return std::string(setting.name) + "_" + std::string(name_of(dtype)) + (causal ? "_causal" : "");
}

INSTANTIATE_TEST_SUITE_P(Hopper, HopperForward,
                         ::testing::Combine(::testing::ValuesIn(settings()), ::testing::Values(DType::bf16, DType::f16),
                                            ::testing::Bool()),
                         name_of_case);

/// NaN in rows beyond `lengths`, or in one strand, reaches no other strand, although tiles end between strands.
TEST(HopperValues, NaNStaysInItsStrand) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  for (const std::int64_t head_dim : {64, 128, 192, 256}) {
    Case c(Pattern::dilated({200, 400}, {1, 2}), with(false), {2, 1000, 2, 2, head_dim}, DType::bf16);
    c.lengths = {1000, 333};
    for (std::int64_t column = 0; column < head_dim; ++column) {
      for (std::int64_t head = 0; head < 2; ++head) {
        for (std::int64_t row = 333; row < 1000; ++row) {
          c.k.set(1, row, head, column, std::nan(""));
          c.v.set(1, row, head, column, std::nan(""));
        }
        for (std::int64_t row = 400; row < 600; ++row) c.v.set(0, row, head, column, std::nan(""));
      }
    }
    DeviceCase device(c);
    device.forward(Attention(c.pattern, c.options), device.call());
    const Results& got = device.download();
    got.out.for_each([&](auto entry, auto row, auto head, auto column) {
      const bool poisoned =
          entry == 0 && (head == 0 ? row >= 400 && row < 600 : row >= 400 && row < 800 && row % 2 == 1);
      ASSERT_EQ(std::isnan(got.out.at(entry, row, head, column)), poisoned)
          << "entry " << entry << " row " << row << " head " << head << " head_dim " << head_dim;
    });
  }
}

/// Scores of 1e10 and more lie further apart than any exponent reaches, and their rounding is larger than 1: a row is
/// then the value of its best key, and nothing overflows. The rows of one warp differ in size.
TEST(HopperValues, HugeScoresPickTheBestKey) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  for (const std::int64_t head_dim : {48, 64, 128, 192, 256}) {
    for (const bool causal : {false, true}) {
      for (const Pattern& pattern : {Pattern::dense(), Pattern::longnet({100, 300}, {1, 2}),
                                     Pattern::block_sparse(BlockPattern::local_window(128, 64))}) {
        if (pattern == Pattern::block_sparse(BlockPattern::local_window(128, 64)) && head_dim > 128) continue;
        Options options = with(causal);
        options.scale = 1.0;
        Case c(pattern, options, {1, 300, 2, 2, head_dim}, DType::bf16, Layout::bnhd, {}, 1e5);
        const Tensor q = c.q;
        q.for_each([&](auto entry, auto row, auto head, auto column) {
          if (row % 3 == 0) return;
          c.q.set(entry, row, head, column, row % 3 == 1 ? q.at(entry, row, head, column) * 1e-10 : 0);
        });
        const reference::Expectation want = c.expected(false);
        DeviceCase device(c);
        device.forward(Attention(c.pattern, c.options), device.call());
        const Results& got = device.download();
        std::size_t i = 0;
        double worst = 0;
        got.out.for_each([&](auto entry, auto row, auto head, auto column) {
          const double error = std::abs(got.out.at(entry, row, head, column) - want.out.value[i++]);
          worst = std::isnan(error) ? error : std::max(worst, error);
        });
        EXPECT_LE(worst, 0.05) << "d" << head_dim << " " << pattern.to_string();
        got.lse.for_each([&](auto entry, auto row, auto head, auto) {
          ASSERT_TRUE(std::isfinite(got.lse.at(entry, row, head))) << "row " << row;
        });
      }
    }
  }
}

/// Inputs whose rows or entries repeat (strides of 0) are computed too, if not by the copy engine: another kernel takes
/// them, and one that was asked for by name refuses them.
TEST(HopperValues, ExpandedInputs) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  const Case c(Pattern::dense(), with(false), {1, 300, 2, 2, 64}, DType::bf16);
  const reference::Expectation want = c.expected(false);
  DeviceCase device(c);
  const Tensor twice(DType::bf16, 2, 300, 2, 64);
  const DeviceTensor out(twice.view());
  const auto expand = [](ConstTensorView view) {
    view.sizes[0] = 2;
    view.strides[0] = 0;
    return view;
  };
  CallReport report;
  const auto run = [&](const Options& options) {
    Attention(c.pattern, options)
        .forward(expand(device.q.view()), expand(device.k.view()), expand(device.v.view()), out.output(), {},
                 {.report = &report});
  };
  Options unnamed = c.options;
  unnamed.kernel.clear();
  run(unnamed);
  EXPECT_EQ(report.kernel, "cuda-mma");
  Options named = c.options;
  named.kernel = "hopper-wgmma";
  EXPECT_THROW(run(named), Unsupported);
  expect_success(cudaDeviceSynchronize());
  for (std::int64_t entry = 0; entry < 2; ++entry) {
    ConstTensorView half = out.view();
    half.sizes[0] = 1;
    half.data = static_cast<const std::byte*>(half.data) + entry * half.strides[0] * 2;
    Tensor host(DType::bf16, 1, 300, 2, 64);
    expect_success(cudaMemcpy(host.view().data, half.data, 300 * 2 * 64 * 2, cudaMemcpyDeviceToHost));
    const auto comparison = reference::compare(std::as_const(host).view(), want.out);
    EXPECT_TRUE(comparison.ok()) << comparison.worst;
  }
}

/// What it refuses it refuses by name, and the portable kernel takes it.
TEST(HopperRefusals, SayWhy) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  const auto why = [](Problem problem, const Pattern& pattern = Pattern::dense()) {
    const auto plan = Attention(pattern, {}).plan(problem);
    const Verdict verdict = hopper::kKernel.can_run(*plan, Pass::forward);
    EXPECT_FALSE(verdict.ok);
    EXPECT_NE(plan->kernel_name(Pass::forward), "") << plan->why_no_kernel(Pass::forward);
    return verdict.reason;
  };
  const auto names = [](const std::string& reason, const char* words) {
    EXPECT_NE(reason.find(words), std::string::npos) << reason;
  };
  Problem problem = problem_of(300, 4, 64);
  problem.alignment = 8;
  names(why(problem), "multiples of 16 bytes, here of 8");
  problem = problem_of(300, 4, 64);
  problem.dtype = DType::f32;
  names(why(problem), "tensors are f32");
  names(why(problem_of(301, 16, 64),
            Pattern::longnet({64, 64, 64, 64, 64, 64, 64, 64, 64}, {2, 3, 4, 5, 6, 8, 9, 10, 11})),
        "this pattern needs 18");
  const auto plan = Attention(Pattern::dense(), {}).plan(problem_of(300, 4, 64));
  EXPECT_EQ(plan->kernel_name(Pass::forward), kHopper);
}

}  // namespace
}  // namespace longspan::testing
