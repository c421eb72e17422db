// Every kernel of this machine against the float64 reference: pattern x dtype x causal x shape, out, lse and all three
// gradients, for each kernel that can run it. Then every option, alone and together.
#include "support/suite.h"

namespace longspan::testing {
namespace {

std::vector<NamedPattern> patterns() {
  return suite_patterns({{16, 32, 64}, {23, 50}, {16, 48, 1024}, {20, 57, 100}, 16});
}

std::vector<NamedShape> shapes() {
  return {{"even", {1, 128, 4, 4, 32}},  {"ragged", {2, 101, 5, 5, 24}}, {"grouped_queries", {1, 131, 6, 2, 16}},
          {"tiny", {1, 3, 3, 1, 8}},     {"odd_dim", {1, 67, 3, 3, 13}}, {"wide", {1, 70, 3, 3, 160}},
          {"longer", {1, 700, 3, 3, 64}}};
}

class MatchesReference : public ::testing::TestWithParam<SuiteParameters> {};

TEST_P(MatchesReference, ForwardAndGradients) {
  const auto& [pattern, dtype, causal, shape] = GetParam();
  Options options;
  options.causal = causal;
  const Layout layout = shape.shape.batch > 1 ? Layout::padded : causal ? Layout::bhnd : Layout::bnhd;
  Case(pattern.pattern, options, shape.shape, dtype, layout).expect_matches();
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, MatchesReference,
                         ::testing::Combine(::testing::ValuesIn(patterns()),
                                            ::testing::Values(DType::f32, DType::bf16, DType::f16), ::testing::Bool(),
                                            ::testing::ValuesIn(shapes())),
                         suite_name);

class EveryKernelOption : public ::testing::TestWithParam<DType> {
 protected:
  DType dtype() const { return GetParam(); }
  Pattern mixed() const { return Pattern::longnet({24, 70, 300}, {1, 3, 5}); }
  Shape shape() const { return {2, 150, 4, 2, 40}; }
  Case make(Options options = {}, std::vector<RowRange> ranges = {}) const {
    return Case(mixed(), options, shape(), dtype(), Layout::bnhd, std::move(ranges));
  }
};

TEST_P(EveryKernelOption, ScaleAndOutputScale) {
  Options options;
  options.scale = 0.3;
  options.output_scale = 0.25;
  make(options).expect_matches();
  options.scale = -0.2;
  make(options).expect_matches();
}

TEST_P(EveryKernelOption, Dropout) {
  for (const bool causal : {false, true}) {
    Options options;
    options.causal = causal;
    options.dropout = 0.3;
    Case c = make(options);
    c.seed = 0x1234567890abcdefu;
    c.expect_matches();
  }
}

TEST_P(EveryKernelOption, Lengths) {
  for (const bool causal : {false, true}) {
    Options options;
    options.causal = causal;
    Case c = make(options);
    c.lengths = {97, 0};
    c.expect_matches();
    c.pattern = Pattern::longnet({24, 120}, {1, 3}, PhaseRule::torchscale)
                    .with_pad_keys()
                    .with_long_segments(LongSegments::skip);
    c.lengths = {150, 61};
    c.expect_matches();
  }
}

TEST_P(EveryKernelOption, KeyMask) {
  for (const bool causal : {false, true}) {
    Options options;
    options.causal = causal;
    Case c = make(options);
    c.key_mask.assign(300, 1);
    for (std::size_t i = 0; i < 300; i += 3) c.key_mask[i] = 0;
    for (std::size_t i = 20; i < 110; ++i) c.key_mask[i] = 0;  // whole segments without keys
    c.expect_matches();
    c.pattern = Pattern::longnet({24, 70}, {1, 4}, PhaseRule::torchscale).with_pad_keys();
    c.expect_matches();
  }
}

TEST_P(EveryKernelOption, Alibi) {
  for (const bool causal : {false, true}) {
    Options options;
    options.causal = causal;
    Case c = make(options);
    c.alibi_slopes = {0.5f, 0.25f, 0.0f, -0.01f};
    c.expect_matches();
  }
}

TEST_P(EveryKernelOption, QueryRanges) {
  for (const bool causal : {false, true}) {
    Options options;
    options.causal = causal;
    make(options, {{149, 1}}).expect_matches();
    make(options, {{3, 40}, {43, 2}, {100, 50}}).expect_matches();
    make(options, {{60, 10}, {5, 1}, {0, 0}, {60, 10}}).expect_matches();  // any order, repeated
  }
}

TEST_P(EveryKernelOption, GradientOfLse) {
  Case c = make();
  c.dlse = Tensor::lse(dtype(), 2, 150, 4);
  c.dlse->fill_random(9);
  c.expect_matches();
}

TEST_P(EveryKernelOption, DetachedMix) {
  for (const double dropout : {0.0, 0.2}) {
    Options options;
    options.detached_mix = true;
    options.dropout = dropout;
    options.output_scale = 0.5;
    Case c = make(options);
    c.expect_matches();
    c.pattern = Pattern::longnet({20, 57, 100}, {1, 2, 4}, PhaseRule::torchscale).with_pad_keys();
    c.expect_matches();
  }
}

TEST_P(EveryKernelOption, BlockMask) {
  std::mt19937 engine(5);
  for (const std::int64_t mask_heads : {1, 4}) {
    for (const bool causal : {false, true}) {
      std::vector<std::uint8_t> dense(static_cast<std::size_t>(mask_heads * 10 * 10));
      for (auto& bit : dense) bit = engine() % 3 == 0;
      Options options;
      options.causal = causal;
      Case c = make(options);
      c.pattern = Pattern::block_sparse(BlockMask::from_dense(16, mask_heads, 10, dense));
      c.expect_matches();
      // In strand coordinates of a dilated branch: strands of up to 50 rows, 4 blocks of 16.
      dense.resize(static_cast<std::size_t>(mask_heads * 4 * 4));
      c.pattern = Pattern::longnet({32, 150}, {1, 3}).with_mask(1, BlockMask::from_dense(16, mask_heads, 4, dense));
      c.expect_matches();
    }
  }
}

TEST_P(EveryKernelOption, Everything) {
  Options options;
  options.causal = true;
  options.dropout = 0.1;
  options.output_scale = 0.5;
  Case c = make(options, {{10, 60}, {90, 60}});
  c.lengths = {140, 99};
  c.key_mask.assign(300, 1);
  for (std::size_t i = 0; i < 300; i += 5) c.key_mask[i] = 0;
  c.alibi_slopes = {0.1f, 0.2f, 0.3f, 0.4f};
  c.dlse = Tensor::lse(dtype(), 2, 120, 4);
  c.dlse->fill_random(9);
  c.seed = 77;
  c.expect_matches();
}

TEST_P(EveryKernelOption, LargeScoresStayExact) {
  Options options;
  options.scale = 1e3;  // scores of about +-1e4
  Case c = make(options);
  c.expect_matches();
  options.scale = 0.0;  // all scores equal
  make(options).expect_matches();
}

TEST_P(EveryKernelOption, DenormalInputs) {
  Case c(mixed(), {}, shape(), dtype(), Layout::bnhd, {}, 1e-20);
  c.expect_matches();
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, EveryKernelOption, ::testing::Values(DType::f32, DType::bf16, DType::f16),
                         [](const auto& parameter) { return std::string(name_of(parameter.param)); });

}  // namespace
}  // namespace longspan::testing
