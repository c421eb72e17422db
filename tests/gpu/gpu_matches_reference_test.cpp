// Every GPU kernel against the float64 reference: pattern x dtype x causal x shape, then every option alone and
// together.
#include <array>
#include <cstring>

#include "gpu/device_case.h"
#include "support/suite.h"

namespace longspan::testing {
namespace {

std::vector<NamedPattern> patterns() {
  return suite_patterns({{64, 128, 512}, {150, 230}, {64, 200, 1024}, {60, 157, 400}, 64});
}

std::vector<NamedShape> shapes() {
  return {{"d64", {1, 384, 4, 4, 64}},   {"d128_ragged", {2, 301, 3, 3, 128}}, {"grouped_queries", {1, 331, 6, 2, 64}},
          {"tiny", {1, 3, 3, 1, 8}},     {"d48", {2, 267, 4, 4, 48}},          {"d96", {1, 200, 3, 3, 96}},
          {"d256", {1, 170, 3, 3, 256}}, {"d200", {1, 131, 3, 3, 200}},        {"long_d64", {1, 1100, 4, 4, 64}}};
}

class GpuMatchesReference : public ::testing::TestWithParam<SuiteParameters> {
 protected:
  Case make(Options options = {}) const {
    const auto& [pattern, dtype, causal, shape] = GetParam();
    options.causal = causal;
    const Layout layout = shape.shape.head_dim == 48 && causal ? Layout::padded : causal ? Layout::bhnd : Layout::bnhd;
    return Case(pattern.pattern, options, shape.shape, dtype, layout);
  }
};

TEST_P(GpuMatchesReference, ForwardAndGradients) {
  LONGSPAN_NEEDS_GPU();
  expect_gpu_matches(make());
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, GpuMatchesReference,
                         ::testing::Combine(::testing::ValuesIn(patterns()),
                                            ::testing::Values(DType::f32, DType::bf16, DType::f16), ::testing::Bool(),
                                            ::testing::ValuesIn(shapes())),
                         suite_name);

/// float32 that may be rounded to TF32: within its own tolerance, and, so that this is no test of cuda-simt, further
/// from the exact result than exact arithmetic would be.
class GpuTf32 : public GpuMatchesReference {};

TEST_P(GpuTf32, ForwardAndGradients) {
  LONGSPAN_NEEDS_GPU();
  Options options;
  options.allow_tf32 = true;
  const Case c = make(options);
  expect_gpu_matches(c);
  Case exact = make();
  const reference::Expectation want = exact.expected(false);
  DeviceCase device(c);
  options = c.options;
  options.kernel = "cuda-mma";
  device.forward(Attention(c.pattern, options), device.call());
  const auto comparison = reference::compare(std::as_const(device.download().out).view(), want.out);
  EXPECT_TRUE(c.shape.tokens < 100 || !comparison.ok());
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, GpuTf32,
                         ::testing::Combine(::testing::ValuesIn(patterns()), ::testing::Values(DType::f32),
                                            ::testing::Bool(), ::testing::ValuesIn(shapes())),
                         suite_name);

/// Small problems of head dim 64 have half tiles for the last ones, so that no multiprocessor has much more to do than
/// others: none, all and some of them, ragged, with rows that no branch covers, with lengths and ranges.
class GpuHalfTiles : public ::testing::TestWithParam<DType> {};

TEST_P(GpuHalfTiles, ForwardAndGradients) {
  LONGSPAN_NEEDS_GPU();
  const std::int64_t each = cuda::devices()[0].multiprocessors, more = each / 4;
  for (const std::int64_t tiles : {each, more, each + more, 2 * each + more})  // three in a strand
    expect_gpu_matches(Case(Pattern::dense(), {}, {(tiles + 2) / 3, 301, 1, 1, 64}, GetParam()));
  const Pattern sparse = Pattern::dilated({160, 320}, {1, 2});
  expect_gpu_matches(Case(sparse, {}, {(2 * each + more) / 12, 320, 4, 2, 56}, GetParam()));  // 12 in an entry
  Case ranged(sparse, {}, {(each + more) / 14, 320, 4, 2, 64}, GetParam(), Layout::bhnd, {{150, 170}, {3, 77}});
  for (std::int64_t entry = 0; entry < ranged.shape.batch; ++entry) ranged.lengths.push_back(320 - 31 * (entry % 9));
  expect_gpu_matches(ranged);
}
/// How many other entries there are decides which tiles come in halves, but no bits.
TEST_P(GpuHalfTiles, ForwardBitsOfAnEntryAreItsOwn) {
  LONGSPAN_NEEDS_GPU();
  const std::int64_t each = cuda::devices()[0].multiprocessors, more = each / 4, tokens = 301;  // three tiles a head
  Options options;
  options.kernel = "cuda-mma";
  for (const Pattern& pattern : {Pattern::dense(), Pattern::dilated({150, 301}, {1, 2})}) {
    Results want;
    for (const std::int64_t tiles : {std::int64_t{6}, each, each + more, 2 * each + more, 4 * each}) {
      const std::int64_t last = (tiles + 5) / 6 - 1;
      Case c(pattern, options, {last + 1, tokens, 2, 2, 64}, GetParam());
      for (Tensor* tensor : {&c.q, &c.k, &c.v})  // what the first entry holds does not depend on `last`
        for (std::int64_t row = 0; row < tokens; ++row)
          for (std::int64_t head = 0; head < 2; ++head)
            for (std::int64_t d = 0; d < 64; ++d) tensor->set(last, row, head, d, tensor->at(0, row, head, d));
      DeviceCase device(c);
      device.forward(Attention(pattern, options), device.call());
      const Results& got = device.download();
      if (last == 0) want = got;
      for (const std::int64_t entry : {std::int64_t{0}, last}) {
        bool equal = true;
        want.out.for_each([&](auto, auto row, auto head, auto d) {
          equal = equal && got.out.at(entry, row, head, d) == want.out.at(0, row, head, d);
        });
        want.lse.for_each([&](auto, auto row, auto head, auto) {
          equal = equal && got.lse.at(entry, row, head) == want.lse.at(0, row, head);
        });
        EXPECT_TRUE(equal) << pattern.to_string() << " entry " << entry << " of " << last + 1;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, GpuHalfTiles, ::testing::Values(DType::bf16, DType::f16),
                         [](const auto& test) { return std::string(name_of(test.param)); });

/// Tensor cores cut sums off: added up there alone, thousands of terms of one sign would lose far more than by
/// rounding.
TEST(GpuFloat32, LongSumsOfOneSign) {
  LONGSPAN_NEEDS_GPU();
  Case c(Pattern::dense(), {}, {1, 8192, 1, 1, 64}, DType::f32, Layout::bnhd, {{0, 64}});
  c.v.for_each([&](auto entry, auto row, auto head, auto column) {
    c.v.set(entry, row, head, column, std::abs(c.v.at(entry, row, head, column)));
  });
  expect_gpu_matches(c);
}

class GpuOption : public ::testing::TestWithParam<std::tuple<DType, std::int64_t>> {
 protected:
  DType dtype() const { return std::get<0>(GetParam()); }
  Pattern mixed() const { return Pattern::longnet({48, 140, 600}, {1, 3, 5}); }
  Shape shape() const { return {2, 250, 4, 2, std::get<1>(GetParam())}; }
  Case make(Options options = {}, std::vector<RowRange> ranges = {}) const {
    return Case(mixed(), options, shape(), dtype(), Layout::bnhd, std::move(ranges));
  }
  static Options causal(bool value) {
    Options options;
    options.causal = value;
    return options;
  }
};

TEST_P(GpuOption, ScaleAndOutputScale) {
  LONGSPAN_NEEDS_GPU();
  for (const double scale : {0.3, -0.2, 0.0, 100.0}) {
    Options options;
    options.scale = scale;
    options.output_scale = 0.25;
    expect_gpu_matches(make(options));
  }
}

TEST_P(GpuOption, Dropout) {
  LONGSPAN_NEEDS_GPU();
  for (const bool is_causal : {false, true}) {
    Options options = causal(is_causal);
    options.dropout = 0.3;
    Case c = make(options);
    c.seed = 0x1234567890abcdefu;
    expect_gpu_matches(c);
    c.pattern = Pattern::dilated({100, 250}, {1, 2});
    expect_gpu_matches(c);
  }
}

TEST_P(GpuOption, Lengths) {
  LONGSPAN_NEEDS_GPU();
  for (const bool is_causal : {false, true}) {
    Case c = make(causal(is_causal));
    c.lengths = {197, 0};
    expect_gpu_matches(c);
    c.pattern = Pattern::dilated({100, 250}, {1, 2});
    c.lengths = {250, 77};
    expect_gpu_matches(c);
    c.pattern = Pattern::longnet({48, 220}, {1, 3}, PhaseRule::torchscale)
                    .with_pad_keys()
                    .with_long_segments(LongSegments::skip);
    c.lengths = {250, 161};
    expect_gpu_matches(c);
  }
}

TEST_P(GpuOption, LengthsOnTheHost) {
  LONGSPAN_NEEDS_GPU();
  Case c = make();
  c.lengths = {197, 33};
  const reference::Expectation want = c.expected(false);
  DeviceCase device(c);
  Call call = device.call();
  call.lengths = c.call().lengths;
  device.forward(Attention(c.pattern, c.options), call);
  const auto comparison = reference::compare(std::as_const(device.download().out).view(), want.out);
  EXPECT_TRUE(comparison.ok()) << comparison.worst;
}

TEST_P(GpuOption, KeyMask) {
  LONGSPAN_NEEDS_GPU();
  for (const bool is_causal : {false, true}) {
    Case c = make(causal(is_causal));
    c.key_mask.assign(500, 1);
    for (std::size_t i = 0; i < 500; i += 3) c.key_mask[i] = 0;
    for (std::size_t i = 20; i < 190; ++i) c.key_mask[i] = 0;
    expect_gpu_matches(c);
    c.pattern = Pattern::longnet({48, 140}, {1, 4}, PhaseRule::torchscale).with_pad_keys();
    expect_gpu_matches(c);
  }
}

TEST_P(GpuOption, ExcludedKeysMayHoldNaN) {
  LONGSPAN_NEEDS_GPU();
  Case c = make();
  c.lengths = {200, 250};
  c.key_mask.assign(500, 1);
  c.key_mask[30] = 0;
  for (std::int64_t head = 0; head < 2; ++head) {
    for (std::int64_t column = 0; column < c.shape.head_dim; ++column) {
      for (Tensor* tensor : {&c.k, &c.v}) {
        tensor->set(0, 30, head, column, std::nan(""));
        tensor->set(0, 220, head, column, std::nan(""));
      }
    }
  }
  for (const std::string& kernel : gpu_kernels_for(c)) {
    Options options = c.options;
    options.kernel = kernel;
    const Attention attention(c.pattern, options);
    DeviceCase device(c);
    const Call call = device.call();
    device.forward(attention, call);
    device.backward(attention, call);
    const Results& got = device.download();
    for (const Tensor* tensor : {&got.out, &got.dq, &got.dk, &got.dv}) {
      bool finite = true;
      tensor->for_each([&](auto b, auto row, auto head, auto column) {
        finite = finite && std::isfinite(tensor->at(b, row, head, column));
      });
      EXPECT_TRUE(finite) << kernel;
    }
  }
}

TEST_P(GpuOption, Alibi) {
  LONGSPAN_NEEDS_GPU();
  for (const bool is_causal : {false, true}) {
    Case c = make(causal(is_causal));
    c.alibi_slopes = {0.5f, 0.25f, 0.0f, -0.01f};
    expect_gpu_matches(c);
  }
}

/// Rows past a strand's end, which tiles have, must not overflow where distance raises scores.
TEST(GpuAlibi, NegativeSlopesAtRaggedEnds) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const std::int64_t head_dim : {64, 128, 256}) {
      Case c(Pattern::dense(), {}, {1, 250, 2, 2, head_dim}, dtype);
      c.alibi_slopes = {-0.5f, -0.5f};
      expect_gpu_matches(c);
    }
  }
}

/// A NaN of all ones, which a careless rounding carries over into 0, reaches every row that sees it and no other.
TEST(GpuFloat32, NaNOfAllOnes) {
  LONGSPAN_NEEDS_GPU();
  constexpr std::int64_t kRow = 70, kSegment = 64;  // in the second of three segments
  const std::uint32_t ones = 0x7fffffffu;
  for (const bool allow_tf32 : {false, true}) {
    for (int which = 0; which < 4; ++which) {
      Options options;
      options.allow_tf32 = allow_tf32;
      options.kernel = "cuda-mma";
      Case c(Pattern::dilated({kSegment}, {1}), options, {1, 3 * kSegment, 1, 1, 64}, DType::f32);
      Tensor& input = *std::array{&c.q, &c.k, &c.v, &c.dout}[static_cast<std::size_t>(which)];
      const TensorView view = input.view();
      std::memcpy(static_cast<std::byte*>(view.data) + view.offset(0, kRow, 0) * 4, &ones, 4);  // column 0
      DeviceCase device(c);
      const Attention attention(c.pattern, options);
      device.forward(attention, device.call());
      device.backward(attention, device.call());
      const Results& got = device.download();
      const auto expect_nan = [&](const char* name, const Tensor& tensor, bool all_rows, bool all_columns) {
        tensor.for_each([&](auto entry, auto row, auto head, auto column) {
          const bool sees = all_rows ? row / kSegment == kRow / kSegment : row == kRow;
          ASSERT_EQ(std::isnan(tensor.at(entry, row, head, column)), sees && (all_columns || column == 0))
              << name << " row " << row << " column " << column << " input " << which << " tf32 " << allow_tf32;
        });
      };
      const bool in_q = which == 0, in_v = which == 2, in_dout = which == 3;
      if (in_dout) {
        expect_nan("dq", got.dq, false, true);
        expect_nan("dk", got.dk, true, true);
        expect_nan("dv", got.dv, true, false);
      } else if (in_v) {
        expect_nan("out", got.out, true, false);
        expect_nan("dq", got.dq, true, true);
        expect_nan("dk", got.dk, true, true);
      } else {
        expect_nan("out", got.out, !in_q, true);
        expect_nan("dq", got.dq, !in_q, true);
        expect_nan("dk", got.dk, true, true);
        expect_nan("dv", got.dv, true, true);
      }
    }
  }
}

TEST_P(GpuOption, QueryRanges) {
  LONGSPAN_NEEDS_GPU();
  for (const bool is_causal : {false, true}) {
    expect_gpu_matches(make(causal(is_causal), {{249, 1}}));
    expect_gpu_matches(make(causal(is_causal), {{3, 140}, {143, 2}, {200, 50}}));
    expect_gpu_matches(make(causal(is_causal), {{60, 10}, {5, 1}, {0, 0}, {60, 10}}));
    expect_gpu_matches(make(causal(is_causal), {{125, 125}, {0, 125}}));  // as many rows as tokens, in another order
    Case one = make(causal(is_causal), {{100, 150}});
    one.pattern = Pattern::dilated({100, 250}, {1, 2});
    expect_gpu_matches(one);
  }
}

TEST_P(GpuOption, ManyQueryRanges) {
  LONGSPAN_NEEDS_GPU();
  std::vector<RowRange> ranges;
  for (std::int64_t i = 0; i < 20; ++i) ranges.push_back({i * 12, 5});
  Case c = make({}, ranges);
  const reference::Expectation want = c.expected(false);
  for (const std::string& kernel : gpu_kernels_for(c, false)) {
    Options options = c.options;
    options.kernel = kernel;
    DeviceCase device(c);
    device.forward(Attention(c.pattern, options), device.call());
    const auto comparison = reference::compare(std::as_const(device.download().out).view(), want.out);
    EXPECT_TRUE(comparison.ok()) << kernel << " " << comparison.worst;
  }
}

TEST_P(GpuOption, Pieces) {
  LONGSPAN_NEEDS_GPU();
  for (const bool is_causal : {false, true}) {
    Case c = make(causal(is_causal));
    const auto rows = [&](Tensor& tensor, std::int64_t first, std::int64_t count) {
      ConstTensorView view = std::as_const(tensor).view();
      view.data = static_cast<const std::byte*>(view.data) + view.offset(0, first, 0) * size_of(view.dtype);
      view.sizes[1] = count;
      return view;
    };
    c.pieces = {{0, 1, rows(c.k, 0, 90), rows(c.v, 0, 90)}, {90, 1, rows(c.k, 90, 160), rows(c.v, 90, 160)}};
    expect_gpu_matches(c);
  }
}

TEST_P(GpuOption, GradientOfLse) {
  LONGSPAN_NEEDS_GPU();
  Case c = make();
  c.dlse = Tensor::lse(dtype(), 2, 250, 4);
  c.dlse->fill_random(9);
  expect_gpu_matches(c);
}

TEST_P(GpuOption, DetachedMix) {
  LONGSPAN_NEEDS_GPU();
  for (const double dropout : {0.0, 0.2}) {
    Options options;
    options.detached_mix = true;
    options.dropout = dropout;
    options.output_scale = 0.5;
    Case c = make(options);
    expect_gpu_matches(c);
    c.pattern = Pattern::longnet({60, 157, 300}, {1, 2, 4}, PhaseRule::torchscale).with_pad_keys();
    expect_gpu_matches(c);
  }
}

TEST_P(GpuOption, Deterministic) {
  LONGSPAN_NEEDS_GPU();
  for (const bool is_causal : {false, true}) {
    Options options = causal(is_causal);
    options.deterministic = true;
    expect_gpu_matches(make(options));
    expect_gpu_matches(make(options, {{3, 140}, {143, 2}, {200, 50}}));
    options.detached_mix = true;
    options.dropout = 0.2;
    Case c = make(options);
    expect_gpu_matches(c);
    c.pattern = Pattern::dilated({100, 250}, {1, 2});
    expect_gpu_matches(c);
  }
}

TEST_P(GpuOption, Everything) {
  LONGSPAN_NEEDS_GPU();
  Options options = causal(true);
  options.dropout = 0.1;
  options.output_scale = 0.5;
  Case c = make(options, {{10, 160}, {190, 60}});
  c.lengths = {240, 199};
  c.key_mask.assign(500, 1);
  for (std::size_t i = 0; i < 500; i += 5) c.key_mask[i] = 0;
  c.alibi_slopes = {0.1f, 0.2f, 0.3f, 0.4f};
  c.dlse = Tensor::lse(dtype(), 2, 220, 4);
  c.dlse->fill_random(9);
  c.seed = 77;
  expect_gpu_matches(c);
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, GpuOption,
                         ::testing::Combine(::testing::Values(DType::f32, DType::bf16, DType::f16),
                                            ::testing::Values(40, 64, 128, 256)),
                         [](const auto& parameters) {
                           return std::string(name_of(std::get<0>(parameters.param))) + "_d" +
                                  std::to_string(std::get<1>(parameters.param));
                         });

}  // namespace
}  // namespace longspan::testing
