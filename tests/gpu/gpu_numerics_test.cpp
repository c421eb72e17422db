// Numbers at the edge of what float32 holds, on every GPU kernel.
#include <gtest/gtest.h>

#include <cmath>

#include "gpu/device_case.h"
#include "gpu/gpu_place.h"

namespace longspan::testing {
namespace {

std::int64_t not_finite(const Tensor& tensor) {
  std::int64_t count = 0;
  tensor.for_each([&](auto entry, auto row, auto head, auto column) {
    count += !std::isfinite(tensor.at(entry, row, head, column));
  });
  return count;
}

/// Large scores come out above lse by rounding, which must not become a weight that overflows. Here lse is far too
/// small, so that they do in every kernel: all weights are then 1.
TEST(GpuNumerics, ScoresAboveLseHaveFiniteGradients) {
  LONGSPAN_NEEDS_GPU();
  const Pattern masked = Pattern::block_sparse(BlockPattern::local_window(128, 64));
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t head_dim : {48, 64, 128, 192}) {
      for (const bool deterministic : {false, true}) {
        for (const Pattern& pattern : {Pattern::dense(), Pattern::longnet({100, 300}, {1, 2}), masked}) {
          Case c(pattern, {}, {1, 300, 2, 2, head_dim}, dtype);
          c.options.deterministic = deterministic;
          for (const std::string& kernel : gpu_kernels_for(c)) {
            c.options.kernel = kernel;
            const Attention attention(c.pattern, c.options);
            DeviceCase device(c);
            device.forward(attention, device.call());
            Tensor lse = device.download().lse;
            lse.for_each([&](auto entry, auto row, auto head, auto column) {
              lse.set(entry, row, head, column, lse.at(entry, row, head, column) - 200);
            });
            device.lse.upload(lse);
            device.backward(attention, device.call());
            const Results& got = device.download();
            EXPECT_EQ(not_finite(got.dq) + not_finite(got.dk) + not_finite(got.dv), 0)
                << kernel << " " << name_of(dtype) << " d" << head_dim << " " << pattern.to_string();
          }
        }
      }
    }
  }
}

/// Scores of 1e10 and more: a score and the maximum of its row must be rounded alike, or a weight is 2^512. With
/// options scores are scaled elsewhere, and a decoded row has its own kernel.
TEST(GpuNumerics, HugeScoresHaveFiniteResults) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const double size : {1e5, 1e6}) {
      for (const std::int64_t head_dim : {48, 64, 128, 192}) {
        for (const Pattern& pattern : {Pattern::dense(), Pattern::longnet({100, 300}, {1, 2})}) {
          for (const bool alibi : {false, true}) {
            for (const bool causal : {false, true}) {
              Case c(pattern, {}, {1, 300, 2, 2, head_dim}, dtype, Layout::bnhd, {}, size);
              c.options.causal = causal;
              if (alibi) c.alibi_slopes = {0.5f, 0.1f};
              for (const std::string& kernel : gpu_kernels_for(c)) {
                const Results got = run_on_gpu(c, kernel);
                EXPECT_EQ(not_finite(got.out) + not_finite(got.lse), 0)
                    << kernel << " " << name_of(dtype) << " d" << head_dim << " " << pattern.to_string() << " " << size;
                EXPECT_EQ(not_finite(got.dq) + not_finite(got.dk) + not_finite(got.dv), 0)
                    << kernel << " " << name_of(dtype) << " d" << head_dim << " " << pattern.to_string() << " " << size;
              }
            }
          }
        }
      }
    }
  }
}

/// NaN still reaches what it must: a minimum that loses it would hide a bad row.
TEST(GpuNumerics, NaNOfAKeyReachesTheGradientsOfItsQueries) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t head_dim : {64, 192}) {
      Case c(Pattern::dense(), {}, {1, 100, 1, 1, head_dim}, dtype);
      c.k.set(0, 37, 0, 5, std::nan(""));
      for (const std::string& kernel : gpu_kernels_for(c)) {
        const Results got = run_on_gpu(c, kernel);
        for (std::int64_t row = 0; row < 100; ++row)
          ASSERT_TRUE(std::isnan(got.dq.at(0, row, 0, 0))) << kernel << " " << name_of(dtype) << " row " << row;
      }
    }
  }
}

/// PyTorch's own float32 errs by 6e-6 here. Kernels for wide heads take lse from a forward on tensor cores, and scores
/// again on CUDA cores: both must be as exact.
TEST(GpuNumerics, Float32GradientsOfPeakedScoresAreExact) {
  LONGSPAN_NEEDS_GPU();
  for (const std::int64_t head_dim : {64, 128, 136, 192, 256}) {
    const Case c(Pattern::dense(), {}, {1, 512, 2, 2, head_dim}, DType::f32, Layout::bnhd, {}, 4.0);
    const reference::Expectation want = c.expected(true);
    DeviceCase device(c);
    const Attention attention(c.pattern, c.options);
    device.forward(attention, device.call());
    device.backward(attention, device.call());
    const Results& got = device.download();
    const auto relative = [](const Tensor& actual, const reference::ExpectedTensor& expected) {
      double error = 0, norm = 0;
      std::size_t i = 0;
      actual.for_each([&](auto entry, auto row, auto head, auto column) {
        const double value = expected.value[i++], difference = actual.at(entry, row, head, column) - value;
        error += difference * difference;
        norm += value * value;
      });
      return std::sqrt(error / norm);
    };
    const double out = relative(got.out, want.out), dq = relative(got.dq, want.dq), dk = relative(got.dk, want.dk),
                 dv = relative(got.dv, want.dv);
    std::printf("  d%d: out %.2e dq %.2e dk %.2e dv %.2e\n", static_cast<int>(head_dim), out, dq, dk, dv);
    EXPECT_LE(std::max({out, dq, dk, dv}), 1.2e-5) << "head_dim " << head_dim;
  }
}

}  // namespace
}  // namespace longspan::testing
