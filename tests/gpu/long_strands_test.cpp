// Strands of half a million rows and more on every GPU kernel: errors are those of short ones. Tensor cores truncate
// what they add, so sums of one sign shrink with every product unless they are closed now and then; inputs here have
// results of one sign, known or cheap to compute for a few rows.
#include <gtest/gtest.h>

#include <cmath>

#include "gpu/device_case.h"

namespace longspan::testing {
namespace {

constexpr std::int64_t kMillion = 1 << 20, kHalfMillion = 1 << 19, kRows = 64;

/// Numbers around `center`, made in a fraction of the time that normal ones take.
Tensor uniform(DType dtype, std::int64_t rows, std::int64_t columns, std::uint32_t seed, double center, double spread) {
  Tensor tensor(dtype, 1, rows, 1, columns);
  std::uint32_t state = seed * 2654435761u + 1;
  tensor.for_each([&](auto b, auto row, auto head, auto column) {
    state = state * 1664525u + 1013904223u;
    tensor.set(b, row, head, column, center + spread * (static_cast<double>(state >> 8) / 8388608.0 - 1.0));
  });
  return tensor;
}

struct OnGpu {
  explicit OnGpu(const Tensor& host) : device(host.view()) { device_view = device.view(); }
  DeviceTensor device;
  ConstTensorView device_view;
};

/// The kernels of this GPU that take a problem, for both passes or the forward alone.
std::vector<std::string> kernels_for(const Pattern& pattern, Options options, const Problem& problem, bool gradients) {
  const Plan plan(pattern, options, problem);
  std::vector<std::string> names;
  for (const Kernel* kernel : cuda::kernels()) {
    if (kernel->can_run(plan, Pass::forward).ok && (!gradients || kernel->can_run(plan, Pass::backward).ok))
      names.emplace_back(kernel->name);
  }
  return names;
}

/// What rounding may leave of a result of 1. Tensor cores truncate what they add: up to 2^-23 for each of the 4,096
/// products of 16 keys in a sum, 4.9e-4. Rounding the result to float16 adds half a unit of its last place, 4.9e-4.
double tolerance_of(DType dtype) { return dtype == DType::f32 ? 1e-5 : dtype == DType::f16 ? 1e-3 : 2e-3; }

struct Sequence {
  const char* name;
  Pattern pattern;
  bool causal;
  std::int64_t head_dim;
  bool masked;  // by blocks, whose last row sees everything
};

Pattern full_last_row(int block_size) {
  const std::int64_t blocks = kMillion / block_size;
  std::vector<std::vector<std::int32_t>> rows(static_cast<std::size_t>(blocks));
  for (std::int64_t row = 0; row < blocks; ++row)
    rows[static_cast<std::size_t>(row)] = {static_cast<std::int32_t>(row)};
  for (std::int64_t row = 0; row + 1 < blocks; ++row) rows.back().push_back(static_cast<std::int32_t>(row));
  std::sort(rows.back().begin(), rows.back().end());
  return Pattern::block_sparse(BlockMask::from_rows(block_size, 1, blocks, rows));
}

std::vector<Sequence> sequences() {
  const Pattern merged = Pattern::longnet({kMillion, kMillion}, {1, 2});
  return {{"full_d64", Pattern::dense(), false, 64, false},
          {"causal_d64", Pattern::dense(), true, 64, false},
          {"full_d128", Pattern::dense(), false, 128, false},
          {"causal_d96", Pattern::dense(), true, 96, false},
          {"full_d192", Pattern::dense(), false, 192, false},
          {"causal_d256", Pattern::dense(), true, 256, false},
          {"merged_d64", merged, false, 64, false},
          {"merged_causal_d128", merged, true, 128, false},
          {"blocks64_d64", full_last_row(64), false, 64, true},
          {"blocks128_d128", full_last_row(128), true, 128, true},
          {"blocks64_d128", full_last_row(64), true, 128, true}};
}

class LongStrands : public ::testing::TestWithParam<std::tuple<Sequence, DType>> {};

/// Values are all 1, so every row's result is 1: what is missing was lost in sums.
TEST_P(LongStrands, ForwardLosesNothingInSumsOverAMillionKeys) {
  LONGSPAN_NEEDS_GPU();
  const auto& [sequence, dtype] = GetParam();
  const Tensor q = uniform(dtype, kRows, sequence.head_dim, 1, 0, 1),
               k = uniform(dtype, kMillion, sequence.head_dim, 2, 0, 1);
  Tensor v(dtype, 1, kMillion, 1, sequence.head_dim);
  v.for_each([&](auto b, auto row, auto head, auto column) { v.set(b, row, head, column, 1.0); });
  const DeviceTensor on_q(q.view()), on_k(k.view()), on_v(std::as_const(v).view());
  const RowRange last{kMillion - kRows, kRows};
  Call call;
  call.query_ranges = {&last, 1};
  Options options;
  options.causal = sequence.causal;
  const Problem problem = Attention::problem(on_q.view(), on_k.view(), call);
  const auto names = kernels_for(sequence.pattern, options, problem, false);
  ASSERT_FALSE(names.empty());
  for (const std::string& kernel : names) {
    options.kernel = kernel;
    Tensor out(dtype, 1, kRows, 1, sequence.head_dim);
    const DeviceTensor on_out(std::as_const(out).view());
    Attention(sequence.pattern, options).forward(on_q.view(), on_k.view(), on_v.view(), on_out.output(), {}, call);
    expect_success(cudaDeviceSynchronize());
    on_out.download(out);
    double worst = 0;
    out.for_each([&](auto b, auto row, auto head, auto column) {
      const double error = std::abs(out.at(b, row, head, column) - 1.0);
      if (!(error <= worst)) worst = error;
    });
    EXPECT_LE(worst, tolerance_of(dtype)) << kernel;
    RecordProperty(kernel, std::to_string(worst));
    std::printf("  %s: %.2e\n", kernel.c_str(), worst);
  }
}

std::string name_of_sequence(const ::testing::TestParamInfo<std::tuple<Sequence, DType>>& parameters) {
  const auto& [sequence, dtype] = parameters.param;
  return std::string(sequence.name) + "_" + std::string(name_of(dtype));
}
INSTANTIATE_TEST_SUITE_P(Gpu, LongStrands,
                         ::testing::Combine(::testing::ValuesIn(sequences()),
                                            ::testing::Values(DType::bf16, DType::f16, DType::f32)),
                         name_of_sequence);

/// Keys 0 to 15 share nearly all weight of half a million queries, so that gradients there are long sums of one sign.
class ManyQueries : public ::testing::TestWithParam<std::tuple<std::int64_t, bool, bool>> {};

TEST_P(ManyQueries, GradientsOfKeysLoseNothingInSums) {
  LONGSPAN_NEEDS_GPU();
  const auto& [head_dim, causal, merged] = GetParam();
  constexpr std::int64_t kHeavy = 16, kPositions[] = {0, 3, 15};
  const DType dtype = DType::f16;
  Tensor q = uniform(dtype, kHalfMillion, head_dim, 1, 0, 0.1), k = uniform(dtype, kHalfMillion, head_dim, 2, 0, 0.1),
         v = uniform(dtype, kHalfMillion, head_dim, 3, 0, 1),
         dout = uniform(dtype, kHalfMillion, head_dim, 4, 1.0 / 128, 1.0 / 512);
  const double scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
  for (std::int64_t row = 0; row < kHalfMillion; ++row) {
    q.set(0, row, 0, 0, 4.0);
    k.set(0, row, 0, 0, row < kHeavy ? 6.0 / scale : 0.0);
  }
  for (std::int64_t row = 0; row < kHeavy; ++row) {
    for (std::int64_t column = 0; column < head_dim; ++column) v.set(0, row, 0, column, row % 2 ? 1.0 : -1.0);
  }
  Options options;
  options.causal = causal;
  const Pattern pattern = merged ? Pattern::longnet({kHalfMillion, kHalfMillion}, {1, 4}) : Pattern::dense();
  const DeviceTensor on_q(std::as_const(q).view()), on_k(std::as_const(k).view()), on_v(std::as_const(v).view()),
      on_dout(std::as_const(dout).view());
  Tensor out(dtype, 1, kHalfMillion, 1, head_dim), lse = Tensor::lse(dtype, 1, kHalfMillion, 1), dk = out, dv = out;
  const DeviceTensor on_out(std::as_const(out).view()), on_lse(std::as_const(lse).view()),
      on_dq(std::as_const(out).view()), on_dk(std::as_const(out).view()), on_dv(std::as_const(out).view());
  std::vector<std::uint8_t> heavy(kHalfMillion, 0);
  std::fill_n(heavy.begin(), kHeavy, 1);
  const DeviceTensor on_heavy(ConstTensorView::mask(heavy.data(), 1, kHalfMillion));
  const Problem problem = Attention::problem(on_q.view(), on_k.view(), {});
  for (const std::string& kernel : kernels_for(pattern, options, problem, true)) {
    options.kernel = kernel;
    Call call;
    Call host_call;
    if (kernel == "cuda-simt") {  // all pairs would take it minutes
      call.key_mask = on_heavy.view();
      host_call.key_mask = ConstTensorView::mask(heavy.data(), 1, kHalfMillion);
    }
    const Attention attention(pattern, options);
    attention.forward(on_q.view(), on_k.view(), on_v.view(), on_out.output(), on_lse.output(), call);
    attention.backward(on_q.view(), on_k.view(), on_v.view(), on_out.view(), on_lse.view(), on_dout.view(),
                       on_dq.output(), on_dk.output(), on_dv.output(), call);
    expect_success(cudaDeviceSynchronize());
    on_out.download(out);
    on_lse.download(lse);
    on_dk.download(dk);
    on_dv.download(dv);
    Options of_reference = options;
    of_reference.kernel.clear();
    Problem on_host = Attention::problem(std::as_const(q).view(), std::as_const(k).view(), host_call);
    const Plan plan(pattern, of_reference, on_host);
    const RowRange whole{0, kHalfMillion};
    const reference::Expectation want = reference::expect_keys({plan,
                                                                host_call,
                                                                {&whole, 1},
                                                                std::as_const(q).view(),
                                                                std::as_const(k).view(),
                                                                std::as_const(v).view(),
                                                                std::as_const(out).view(),
                                                                std::as_const(lse).view(),
                                                                std::as_const(dout).view(),
                                                                {},
                                                                {},
                                                                {},
                                                                num_threads(),
                                                                nullptr},
                                                               kPositions);
    double worst[2] = {};
    for (std::size_t i = 0; i < std::size(kPositions); ++i) {
      const auto compare = [&](const Tensor& got, const reference::ExpectedTensor& expected, std::int64_t column) {
        const double value = expected.value[i * static_cast<std::size_t>(head_dim) + static_cast<std::size_t>(column)];
        return std::abs(got.at(0, kPositions[i], 0, column) - value) / std::abs(value);
      };
      for (std::int64_t column = 0; column < head_dim; ++column)
        worst[0] = std::max(worst[0], compare(dv, want.dv, column));
      worst[1] = std::max(worst[1], compare(dk, want.dk, 0));  // in other columns queries have both signs
    }
    // Weights are rounded to float16 (2^-11, for all queries alike), then as tolerance_of says.
    EXPECT_LE(worst[0], 1e-3) << kernel << " dv";
    EXPECT_LE(worst[1], 1e-3) << kernel << " dk";
    std::printf("  %s: dv %.2e dk %.2e\n", kernel.c_str(), worst[0], worst[1]);
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, ManyQueries,
                         ::testing::Values(std::tuple{64, false, false}, std::tuple{128, true, false},
                                           std::tuple{256, false, false}, std::tuple{64, true, true}));

/// dq in a pass of its own, as deterministic calls of some kernels have it: dS and keys have the same sign everywhere.
TEST(LongStrandsOrder, DeterministicGradientsOfQueriesLoseNothingInSums) {
  LONGSPAN_NEEDS_GPU();
  for (const std::int64_t head_dim : {64, 128}) {
    const DType dtype = DType::f16;
    const Tensor q = uniform(dtype, kRows, head_dim, 1, 0, 1), dout = uniform(dtype, kRows, head_dim, 2, 1, 0.25);
    Tensor k = uniform(dtype, kMillion, head_dim, 3, 0, 0.5), v(dtype, 1, kMillion, 1, head_dim);
    v.for_each([&](auto b, auto row, auto head, auto column) {
      v.set(b, row, head, column, row % 2 ? 30.0 : -30.0);
      if (column == 0) k.set(b, row, head, 0, row % 2 ? 1.0 : -1.0);
    });
    const DeviceTensor on_q(q.view()), on_k(std::as_const(k).view()), on_v(std::as_const(v).view()),
        on_dout(dout.view());
    Tensor out(dtype, 1, kRows, 1, head_dim), lse = Tensor::lse(dtype, 1, kRows, 1), dq = out;
    const DeviceTensor on_out(std::as_const(out).view()), on_lse(std::as_const(lse).view()),
        on_dq(std::as_const(out).view()), on_dk(std::as_const(k).view()), on_dv(std::as_const(k).view());
    const RowRange last{kMillion - kRows, kRows};
    Call call;
    call.query_ranges = {&last, 1};
    Options options;
    options.deterministic = true;
    for (const std::string& kernel :
         kernels_for(Pattern::dense(), options, Attention::problem(on_q.view(), on_k.view(), call), true)) {
      options.kernel = kernel;
      const Attention attention(Pattern::dense(), options);
      attention.forward(on_q.view(), on_k.view(), on_v.view(), on_out.output(), on_lse.output(), call);
      attention.backward(on_q.view(), on_k.view(), on_v.view(), on_out.view(), on_lse.view(), on_dout.view(),
                         on_dq.output(), on_dk.output(), on_dv.output(), call);
      expect_success(cudaDeviceSynchronize());
      on_out.download(out);
      on_lse.download(lse);
      on_dq.download(dq);
      double worst = 0;
      for (const std::int64_t row : {0, 40}) {  // the definition, with out and lse as they were given
        double delta = 0, sum = 0;
        for (std::int64_t column = 0; column < head_dim; ++column)
          delta += dout.at(0, row, 0, column) * out.at(0, row, 0, column);
        const double scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
        for (std::int64_t key = 0; key < kMillion; ++key) {
          double score = 0, dp = 0;
          for (std::int64_t column = 0; column < head_dim; ++column) {
            score += q.at(0, row, 0, column) * k.at(0, key, 0, column);
            dp += dout.at(0, row, 0, column) * v.at(0, key, 0, column);
          }
          sum += std::exp(score * scale - lse.at(0, row, 0)) * (dp - delta) * k.at(0, key, 0, 0);
        }
        worst = std::max(worst, std::abs(dq.at(0, row, 0, 0) / (sum * scale) - 1.0));
      }
      EXPECT_LE(worst, 1e-3) << kernel;
      std::printf("  %s: dq %.2e\n", kernel.c_str(), worst);
    }
  }
}

/// Sums are closed where the strand says, not where a call does: rows have the bits that they have alone, and those
/// whose keys are in the first block have the bits that they have in a short strand.
TEST(LongStrandsOrder, BitsOfARowAreItsOwn) {
  LONGSPAN_NEEDS_GPU();
  constexpr std::int64_t kTokens = 131072, kShort = 65536;
  for (const std::int64_t head_dim : {64, 128}) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      const Tensor k = uniform(dtype, kTokens, head_dim, 2, 0, 1), v = uniform(dtype, kTokens, head_dim, 3, 0, 1),
                   q = uniform(dtype, kTokens, head_dim, 1, 0, 1);
      const DeviceTensor on_q(q.view()), on_k(k.view()), on_v(v.view());
      Options options;
      options.causal = true;
      for (const std::string& kernel :
           kernels_for(Pattern::dense(), options, Attention::problem(on_q.view(), on_k.view(), {}), false)) {
        options.kernel = kernel;
        const Attention attention(Pattern::dense(), options);
        const auto rows = [&](std::int64_t tokens, std::int64_t first, std::int64_t count) {
          ConstTensorView of_q = on_q.view(), of_k = on_k.view(), of_v = on_v.view();
          of_k.sizes[1] = of_v.sizes[1] = tokens;
          of_q.sizes[1] = count;
          of_q.data = static_cast<const std::byte*>(of_q.data) + first * of_q.strides[1] * size_of(dtype);
          Tensor out(dtype, 1, count, 1, head_dim);
          const DeviceTensor on_out(std::as_const(out).view());
          const RowRange range{first, count};
          Call call;
          call.query_ranges = {&range, 1};
          attention.forward(of_q, of_k, of_v, on_out.output(), {}, call);
          expect_success(cudaDeviceSynchronize());
          on_out.download(out);
          return out;
        };
        const Tensor around = rows(kTokens, kShort - 400, 800);
        for (const std::int64_t first : {kShort - 100, kShort + 200}) {
          const Tensor alone = rows(kTokens, first, 100);
          alone.for_each([&](auto b, auto row, auto head, auto column) {
            ASSERT_EQ(alone.at(b, row, head, column), around.at(b, row + first - (kShort - 400), head, column))
                << kernel << " d" << head_dim << " " << name_of(dtype) << " row " << row + first;
          });
        }
        const Tensor within = rows(kShort, kShort - 400, 300);  // tiles of 80 keys end 16 rows before the block
        within.for_each([&](auto b, auto row, auto head, auto column) {
          ASSERT_EQ(within.at(b, row, head, column), around.at(b, row, head, column))
              << kernel << " d" << head_dim << " " << name_of(dtype) << " row " << row + kShort - 400;
        });
      }
    }
  }
}

/// Totals of closed sums are kept for blocks that run at once, not for rows.
TEST(LongStrandsOrder, WorkspaceDoesNotGrowWithRows) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const auto bytes = [&](std::int64_t tokens) {
      Problem problem;
      problem.device = kGpu;
      problem.dtype = dtype;
      problem.tokens = problem.query_rows = tokens;
      problem.heads = problem.kv_heads = 4;
      problem.head_dim = 64;
      Options options;
      options.causal = true;
      return Plan(Pattern::dense(), options, problem).workspace_bytes(Pass::forward);
    };
    EXPECT_LT(bytes(65536), 1024u);
    EXPECT_EQ(bytes(kMillion), bytes(2 * kMillion));
    EXPECT_LT(bytes(kMillion), std::size_t{128} << 20);
  }
}

}  // namespace
}  // namespace longspan::testing
