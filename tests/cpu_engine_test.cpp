// The CPU engine beyond agreement with the reference: bits that depend on nothing but a row's own keys, tasks that wait
// for each other, memory bounds, and kernels that only run bfloat16.
#include <array>
#include <cmath>
#include <cstring>

#include "kernels/cpu/cpu_kernels.h"
#include "longspan/threads.h"
#include "support/case.h"

namespace longspan::testing {
namespace {

/// Kernels of the CPU engine that can run a dtype here.
std::vector<std::string> engine_kernels(DType dtype) {
  Problem problem;
  problem.dtype = dtype;
  problem.tokens = problem.query_rows = 64;
  const Plan plan(Pattern::dense(), {}, problem);
  std::vector<std::string> names;
  for (const Kernel* kernel : cpu_kernels()) {
    if (kernel->can_run(plan, Pass::forward).ok) names.emplace_back(kernel->name);
  }
  return names;
}

std::vector<std::byte> bits(const Tensor& tensor) {
  std::vector<std::byte> all;
  const std::size_t size = static_cast<std::size_t>(size_of(tensor.view().dtype));
  const ConstTensorView view = tensor.view();
  tensor.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t column) {
    const std::byte* const at = static_cast<const std::byte*>(view.data) +
                                (view.offset(b, row, head) + column) * static_cast<std::int64_t>(size);
    all.insert(all.end(), at, at + size);
  });
  return all;
}

struct ThreadCount {
  explicit ThreadCount(int threads) { set_num_threads(threads); }
  ~ThreadCount() { set_num_threads(0); }
};

class CpuEngine : public ::testing::TestWithParam<DType> {};

// Strands longer than a task's keys, so that several tasks add to one row of dq, and more threads than cores; short
// ones, several to a task; and both.
TEST_P(CpuEngine, SameBitsForAnyNumberOfThreads) {
  const std::pair<Pattern, Shape> problems[] = {{Pattern::dense(), {1, 1900, 2, 1, 32}},
                                                {Pattern::longnet({500, 2000}, {1, 2}), {1, 1900, 2, 1, 32}},
                                                {Pattern::dilated({64, 128}, {1, 2}), {1, 1000, 6, 3, 32}},
                                                {Pattern::longnet({200}, {1}), {1, 800, 12, 6, 256}}};
  for (const bool causal : {false, true}) {
    Options options;
    options.causal = causal;
    for (const auto& [pattern, shape] : problems) {
      const Case c(pattern, options, shape, GetParam());
      for (const std::string& kernel : engine_kernels(GetParam())) {
        std::vector<std::vector<std::byte>> first;
        for (const int threads : {1, 2, 3, 8, 16}) {
          const ThreadCount scope(threads);
          const Results r = c.run(kernel);
          std::vector<std::vector<std::byte>> now = {bits(r.out), bits(r.lse), bits(r.dq), bits(r.dk), bits(r.dv)};
          if (first.empty()) first = std::move(now);
          else EXPECT_EQ(first, now) << kernel << " " << threads << " threads " << (causal ? "causal" : "full");
        }
      }
    }
  }
}

TEST_P(CpuEngine, RowsHaveTheSameBitsWhoeverIsComputedWithThem) {
  for (const bool causal : {false, true}) {
    Options options;
    options.causal = causal;
    const std::int64_t tokens = 1300;
    const Pattern pattern = Pattern::longnet({400, 1300}, {1, 3});
    const Case whole(pattern, options, {1, tokens, 4, 2, 24}, GetParam());
    for (const std::string& kernel : engine_kernels(GetParam())) {
      const Results all = whole.run(kernel, false);
      for (const RowRange range : {RowRange{0, 1}, RowRange{1299, 1}, RowRange{517, 200}, RowRange{3, 1000}}) {
        Tensor q(GetParam(), 1, range.count, 4, 24), out = q, lse = Tensor::lse(DType::f32, 1, range.count, 4);
        for (std::int64_t row = 0; row < range.count; ++row) {
          for (std::int64_t head = 0; head < 4; ++head) {
            for (std::int64_t d = 0; d < 24; ++d) q.set(0, row, head, d, whole.q.at(0, range.start + row, head, d));
          }
        }
        Options chosen = options;
        chosen.kernel = kernel;
        Call call;
        call.query_ranges = std::span<const RowRange>(&range, 1);
        Attention(pattern, chosen)
            .forward(std::as_const(q).view(), whole.k.view(), whole.v.view(), out.view(), lse.view(), call);
        for (std::int64_t row = 0; row < range.count; ++row) {
          for (std::int64_t head = 0; head < 4; ++head) {
            ASSERT_EQ(lse.at(0, row, head, 0), all.lse.at(0, range.start + row, head, 0))
                << kernel << " row " << range.start + row;
            for (std::int64_t d = 0; d < 24; ++d) {
              ASSERT_EQ(out.at(0, row, head, d), all.out.at(0, range.start + row, head, d))
                  << kernel << " row " << range.start + row;
            }
          }
        }
      }
    }
  }
}

TEST_P(CpuEngine, LongCutStrandsMatchTheReference) {
  Options options;
  options.causal = true;
  Case(Pattern::dense(), options, {1, 1100, 1, 1, 48}, GetParam()).expect_matches();
  Case(Pattern::dense(), {}, {1, 1030, 2, 1, 16}, GetParam(), Layout::bnhd, {{700, 330}, {0, 90}}).expect_matches();
}

// float32 results of this size are written past the cache, where nobody adds to them and places are aligned.
TEST_P(CpuEngine, ResultsLargerThanACacheMatchTheReference) {
  for (const Layout layout : {Layout::bnhd, Layout::bhnd}) {
    Case(Pattern::dilated({64, 128}, {1, 2}), {}, {1, 8192, 6, 6, 48}, GetParam(), layout).expect_matches();
  }
  Case(Pattern::longnet({32, 64}, {1, 2}), {}, {1, 8300, 8, 4, 36}, GetParam()).expect_matches();
}

/// ALiBi, dropout and a key mask, by name.
void add_option(Case& c, const std::string& name) {
  if (name == "alibi" || name == "all") c.alibi_slopes.assign(static_cast<std::size_t>(c.shape.heads), 0.03f);
  if (name == "dropout" || name == "all") c.options.dropout = 0.3;
  c.seed = 77;
  if (name != "key_mask" && name != "all") return;
  c.key_mask.resize(static_cast<std::size_t>(c.shape.tokens));
  for (std::size_t i = 0; i < c.key_mask.size(); ++i) c.key_mask[i] = (i * 7919 % 13 > 3) && (i < 200 || i > 290);
}

// Several windows of keys and tasks of a backward, with and without a block mask; keys that a mask leaves out move the
// places of the others.
TEST_P(CpuEngine, EveryOptionOverSeveralWindows) {
  for (const bool causal : {false, true}) {
    Options options;
    options.causal = causal;
    for (const std::string name : {"key_mask", "dropout", "all"}) {
      Case c(Pattern::dense(), options, {1, 560, 1, 1, 8}, GetParam());
      add_option(c, name);
      c.expect_matches();
      if (name != "all") continue;
      c.pattern = Pattern::block_sparse(BlockPattern::random(0.3, 5, 16));
      c.expect_matches();
    }
  }
}

TEST_P(CpuEngine, SameBitsForAnyNumberOfThreadsWithEveryOption) {
  Case c(Pattern::longnet({500, 2000}, {1, 2}), {}, {1, 1900, 2, 1, 32}, GetParam());
  add_option(c, "all");
  for (const std::string& kernel : engine_kernels(GetParam())) {
    std::vector<std::vector<std::byte>> first;
    for (const int threads : {1, 3, 8}) {
      const ThreadCount scope(threads);
      const Results r = c.run(kernel);
      std::vector<std::vector<std::byte>> now = {bits(r.out), bits(r.lse), bits(r.dq), bits(r.dk), bits(r.dv)};
      if (first.empty()) first = std::move(now);
      else EXPECT_EQ(first, now) << kernel << " " << threads << " threads";
    }
  }
}

// What a key mask excludes is not packed: stretches cost nothing, and windows may be empty.
TEST_P(CpuEngine, StretchesOfMaskedKeys) {
  const std::vector<std::vector<RowRange>> left = {{},          {{700, 5}},  {{1095, 5}},           {{0, 3}},
                                                   {{509, 60}}, {{512, 90}}, {{40, 1}, {1000, 100}}};
  for (const bool causal : {false, true}) {
    Options options;
    options.causal = causal;
    for (const auto& ranges : left) {
      Case c(Pattern::dilated({1100, 1100}, {1, 2}), options, {1, 1100, 2, 1, 16}, GetParam());
      c.key_mask.assign(1100, 0);
      for (const RowRange& range : ranges) std::fill_n(c.key_mask.begin() + range.start, range.count, std::uint8_t{1});
      c.expect_matches();
    }
  }
}

// With the usual scale and a negative one, whose sign packed queries carry.
TEST_P(CpuEngine, EveryHeadDimension) {
  Options negative;
  negative.scale = -0.2;
  for (const Options& options : {Options{}, negative}) {
    for (const std::int64_t head_dim : {1, 2, 7, 8, 15, 16, 17, 31, 33, 40, 63, 64, 65, 96, 127, 200, 255, 256})
      Case(Pattern::dilated({32, 64}, {1, 2}), options, {1, 70, 2, 2, head_dim}, GetParam()).expect_matches();
  }
}

// Not bitwise: without NaN in it, a strand of another row may not change by one bit.
TEST_P(CpuEngine, NaNAndInfinityStayInTheirStrand) {
  const Case clean(Pattern::dilated({64}, {2}), {}, {1, 256, 2, 2, 32}, GetParam());
  Case dirty(Pattern::dilated({64}, {2}), {}, {1, 256, 2, 2, 32}, GetParam());
  dirty.k.set(0, 66, 0, 3, std::numeric_limits<float>::quiet_NaN());
  dirty.v.set(0, 130, 0, 3, std::numeric_limits<float>::infinity());
  for (const std::string& kernel : engine_kernels(GetParam())) {
    const Results want = clean.run(kernel), got = dirty.run(kernel);
    for (std::int64_t row = 0; row < 256; ++row) {
      for (std::int64_t head = 0; head < 2; ++head) {
        if (head == 0 && row >= 64 && row < 192) continue;
        ASSERT_EQ(want.lse.at(0, row, head), got.lse.at(0, row, head)) << kernel << " row " << row;
        for (std::int64_t d = 0; d < 32; ++d) {
          ASSERT_EQ(want.out.at(0, row, head, d), got.out.at(0, row, head, d)) << kernel << " row " << row;
          ASSERT_EQ(want.dq.at(0, row, head, d), got.dq.at(0, row, head, d)) << kernel << " row " << row;
          ASSERT_EQ(want.dk.at(0, row, head, d), got.dk.at(0, row, head, d)) << kernel << " row " << row;
          ASSERT_EQ(want.dv.at(0, row, head, d), got.dv.at(0, row, head, d)) << kernel << " row " << row;
        }
      }
    }
    EXPECT_TRUE(std::isnan(got.out.at(0, 64, 0, 0))) << kernel;
    EXPECT_TRUE(std::isnan(got.lse.at(0, 64, 0))) << kernel;
  }
}

// Scores of 1e10 and more are known to hundreds only, and exceed the stored lse by as much.
TEST_P(CpuEngine, LargeInputsGiveFiniteGradients) {
  if (GetParam() == DType::f16) return;  // cannot store them
  Options causal;
  causal.causal = true;
  std::vector<std::string> kernels = engine_kernels(GetParam());
  kernels.push_back("plain");
  for (const double size : {1e4, 1e5, 1e7, 1e12}) {
    for (const Options& options : {Options{}, causal}) {
      Case c(Pattern::longnet({64, 200}, {1, 2}), options, {1, 200, 2, 1, 40}, GetParam(), Layout::bnhd, {}, size);
      c.key_mask.assign(200, 1);
      c.key_mask[3] = 0;
      for (const std::string& kernel : kernels) {
        const Results r = c.run(kernel);
        for (const Tensor* tensor : {&r.out, &r.lse, &r.dq, &r.dk, &r.dv}) {
          tensor->for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t d) {
            ASSERT_TRUE(std::isfinite(tensor->at(b, row, head, d))) << kernel << " " << size << " row " << row;
          });
        }
      }
    }
  }
}

TEST_P(CpuEngine, NaNReachesTheGradientsOfItsStrand) {
  Case c(Pattern::dense(), {}, {1, 70, 1, 1, 16}, GetParam());
  c.q.set(0, 66, 0, 3, std::numeric_limits<float>::quiet_NaN());
  std::vector<std::string> kernels = engine_kernels(GetParam());
  kernels.push_back("plain");
  for (const std::string& kernel : kernels) {
    const Results r = c.run(kernel);
    EXPECT_TRUE(std::isnan(r.dq.at(0, 66, 0, 0))) << kernel;
    EXPECT_TRUE(std::isnan(r.dk.at(0, 5, 0, 0))) << kernel;
    EXPECT_TRUE(std::isnan(r.dv.at(0, 5, 0, 0))) << kernel;
    EXPECT_FALSE(std::isnan(r.dq.at(0, 65, 0, 0))) << kernel;
  }
}

// Key 1 has a weight of exp(score) beside 69 keys of score 0 whose values are 0; its own value is 2^116.
TEST_P(CpuEngine, WeightsBelowNormalNumbersCountAsZero) {
  if (GetParam() == DType::f16) return;  // has no such values
  Options options;
  options.scale = 1;
  for (const auto& [score, counts] : {std::pair{-90.0, false}, std::pair{-80.0, true}}) {
    Case c(Pattern::dense(), options, {1, 70, 1, 1, 8}, GetParam());
    for (Tensor* tensor : {&c.q, &c.k, &c.v, &c.dout}) {
      tensor->for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t d) {
        tensor->set(b, row, head, d, tensor == &c.q || tensor == &c.dout ? 1 : 0);
      });
    }
    c.k.set(0, 1, 0, 0, score);
    for (std::int64_t d = 0; d < 8; ++d) c.v.set(0, 1, 0, d, std::ldexp(1, 116));
    std::vector<std::string> kernels = engine_kernels(GetParam());
    kernels.push_back("plain");
    for (const std::string& kernel : kernels) {
      const Results r = c.run(kernel);
      EXPECT_EQ(r.out.at(0, 0, 0, 0) != 0, counts) << kernel;
      EXPECT_EQ(r.dq.at(0, 0, 0, 0) != 0, counts) << kernel;
      EXPECT_EQ(r.dk.at(0, 1, 0, 0) != 0, counts) << kernel;
      EXPECT_EQ(r.dv.at(0, 1, 0, 0) != 0, counts) << kernel;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Storage, CpuEngine, ::testing::Values(DType::f32, DType::bf16, DType::f16),
                         [](const auto& parameter) { return std::string(name_of(parameter.param)); });

/// Norm of got - want over norm of want.
double relative_error(const Tensor& got, const Tensor& want) {
  double difference = 0, size = 0;
  want.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t d) {
    const double expected = want.at(b, row, head, d), error = got.at(b, row, head, d) - expected;
    difference += error * error;
    size += expected * expected;
  });
  return std::sqrt(difference / size);
}

/// One head of two columns. Terms do not cancel: v grows with k, and q, v and dout have means apart from 0.
Case long_sums(std::int64_t tokens, std::vector<RowRange> ranges) {
  Case c(Pattern::dense(), {}, {1, tokens, 1, 1, 2}, DType::f32, Layout::bnhd, std::move(ranges), 0.8);
  const auto change = [&](Tensor& tensor, double mean, double of_k) {
    tensor.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t d) {
      const double key = of_k == 0 ? 0 : of_k * c.k.at(b, row, head, d);
      tensor.set(b, row, head, d, tensor.at(b, row, head, d) + mean + key);
    });
  };
  change(c.q, 1, 0);
  change(c.dout, 1, 0);
  change(c.v, 1, 1);
  return c;
}

/// The results of such a case in float64.
Results expected_sums(const Case& c) {
  constexpr int kColumns = 2;
  const std::int64_t tokens = c.shape.tokens;
  const double scale = 1 / std::sqrt(static_cast<double>(kColumns));
  using Row = std::array<double, kColumns>;
  const auto rows_of = [&](const Tensor& tensor, std::int64_t count) {
    std::vector<Row> rows(static_cast<std::size_t>(count));
    for (std::int64_t row = 0; row < count; ++row)
      rows[static_cast<std::size_t>(row)] = {tensor.at(0, row, 0, 0), tensor.at(0, row, 0, 1)};
    return rows;
  };
  const auto q = rows_of(c.q, c.rows), dout = rows_of(c.dout, c.rows), k = rows_of(c.k, tokens),
             v = rows_of(c.v, tokens);
  const auto dot = [](const Row& a, const Row& b) { return a[0] * b[0] + a[1] * b[1]; };
  std::vector<Row> out(q.size()), dq(q.size()), dk(k.size()), dv(k.size());
  std::vector<double> weights(k.size()), dweights(k.size());
  const auto add = [](Row& sum, double factor, const Row& row) {
    for (std::size_t d = 0; d < kColumns; ++d) sum[d] += factor * row[d];
  };
  Results r;
  r.lse = Tensor::lse(DType::f32, 1, c.rows, 1);
  for (std::size_t row = 0; row < q.size(); ++row) {
    double sum = 0, delta = 0;
    for (std::size_t key = 0; key < k.size(); ++key) {
      sum += weights[key] = std::exp(scale * dot(q[row], k[key]));
      delta += weights[key] * (dweights[key] = dot(dout[row], v[key]));
    }
    for (std::size_t key = 0; key < k.size(); ++key) {
      const double weight = weights[key] / sum, dscore = scale * weight * (dweights[key] - delta / sum);
      add(out[row], weight, v[key]);
      add(dq[row], dscore, k[key]);
      add(dk[key], dscore, q[row]);
      add(dv[key], weight, dout[row]);
    }
    r.lse.set(0, static_cast<std::int64_t>(row), 0, 0, std::log(sum));
  }
  const auto tensor_of = [](const std::vector<Row>& rows) {
    const std::int64_t count = static_cast<std::int64_t>(rows.size());
    Tensor tensor(DType::f64, 1, count, 1, kColumns);
    for (std::int64_t row = 0; row < count; ++row)
      for (std::int64_t d = 0; d < kColumns; ++d)
        tensor.set(0, row, 0, d, rows[static_cast<std::size_t>(row)][static_cast<std::size_t>(d)]);
    return tensor;
  };
  r.out = tensor_of(out);
  r.dq = tensor_of(dq);
  r.dk = tensor_of(dk);
  r.dv = tensor_of(dv);
  return r;
}

void expect_small_errors(const Case& c) {
  const Results want = expected_sums(c);
  std::vector<std::string> kernels = engine_kernels(DType::f32);
  kernels.push_back("plain");
  for (const std::string& kernel : kernels) {
    const Results got = c.run(kernel);
    // What is left of rounding when no float32 sum is over millions of terms.
    EXPECT_LE(relative_error(got.out, want.out), 5e-6) << kernel;
    EXPECT_LE(relative_error(got.lse, want.lse), 1e-6) << kernel;
    EXPECT_LE(relative_error(got.dq, want.dq), 5e-6) << kernel;
    EXPECT_LE(relative_error(got.dk, want.dk), 5e-6) << kernel;
    EXPECT_LE(relative_error(got.dv, want.dv), 5e-6) << kernel;
  }
}

TEST(LongStrands, RowsOverMillionsOfKeysKeepTheirPrecision) { expect_small_errors(long_sums(4 << 20, {{17, 2}})); }

TEST(LongStrands, KeysUnderAMillionQueriesKeepTheirPrecision) {
  expect_small_errors(long_sums(32, std::vector<RowRange>(1 << 15, RowRange{0, 32})));
}

// A forward takes lse and at most 8 MiB per thread; a backward one accumulator per gradient and 16 MiB per thread.
TEST(CpuEngineMemory, StaysWithinItsBounds) {
  constexpr std::size_t kMebibyte = 1024 * 1024;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const std::int64_t head_dim : {8, 64, 128, 256}) {
      for (const Pattern& pattern : {Pattern::dense(), Pattern::dilated({2048, 4096, 8192}, {1, 2, 4}),
                                     Pattern::longnet({1024, 32768}, {1, 8})}) {
        for (const std::int64_t kv_heads : {8, 1}) {
          Problem problem;
          problem.dtype = dtype;
          problem.tokens = problem.query_rows = 131072;
          problem.heads = 8;
          problem.kv_heads = kv_heads;
          problem.head_dim = head_dim;
          const Plan plan(pattern, {}, problem);
          const std::size_t lse = 8 * 131072 * 4, accumulator = lse * static_cast<std::size_t>(head_dim);
          const bool mixed = plan.branches().size() > 1 && plan.branches()[0].head_count == 8;
          for (const Kernel* kernel : cpu_kernels()) {
            if (!kernel->can_run(plan, Pass::forward).ok) continue;
            for (const int threads : {1, 4, 16}) {
              const std::size_t own = static_cast<std::size_t>(threads) * kMebibyte;
              const std::size_t forward = lse + (mixed && dtype != DType::f32 ? accumulator : 0) + 8 * own;
              EXPECT_LE(kernel->workspace_bytes(plan, Pass::forward, threads), forward)
                  << kernel->name << " " << head_dim;
              const std::size_t backward = (dtype != DType::f32 ? 3 * accumulator : 0) + 16 * own;
              EXPECT_LE(kernel->workspace_bytes(plan, Pass::backward, threads), backward)
                  << kernel->name << " " << head_dim;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace longspan::testing
