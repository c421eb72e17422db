// One attention problem with all its data, run through any kernel and compared with what the reference expects.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "kernels/kernel.h"
#include "kernels/reference/expectation.h"
#include "support/tensor.h"

namespace longspan::testing {

struct Shape {
  std::int64_t batch = 1, tokens = 64, heads = 2, kv_heads = 2, head_dim = 16;
};

struct Results {
  Tensor out, lse, dq, dk, dv;
};

/// Inputs are made by the constructor; change anything before run().
struct Case {
  Case(Pattern attention_pattern, Options attention_options, Shape problem_shape, DType type = DType::f32,
       Layout tensor_layout = Layout::bnhd, std::vector<RowRange> query_ranges = {}, double deviation = 1.0)
      : pattern(std::move(attention_pattern)),
        options(std::move(attention_options)),
        shape(problem_shape),
        dtype(type),
        layout(tensor_layout),
        ranges(std::move(query_ranges)) {
    rows = 0;
    for (const RowRange& range : ranges) rows += range.count;
    if (ranges.empty()) rows = shape.tokens;
    q = Tensor(dtype, shape.batch, rows, shape.heads, shape.head_dim, layout).fill_random(1, deviation);
    k = Tensor(dtype, shape.batch, shape.tokens, shape.kv_heads, shape.head_dim, layout).fill_random(2, deviation);
    v = Tensor(dtype, shape.batch, shape.tokens, shape.kv_heads, shape.head_dim, layout).fill_random(3);
    dout = Tensor(dtype, shape.batch, rows, shape.heads, shape.head_dim, layout).fill_random(4);
  }

  /// Call data that points at the members below, so make it right before use.
  Call call() const {
    Call call;
    call.query_ranges = ranges;
    if (!lengths.empty()) call.lengths = ConstTensorView::per_batch(lengths.data(), DType::i64, shape.batch);
    if (!key_mask.empty()) call.key_mask = ConstTensorView::mask(key_mask.data(), shape.batch, shape.tokens);
    if (!alibi_slopes.empty()) call.alibi_slopes = ConstTensorView::per_head(alibi_slopes.data(), shape.heads);
    if (dlse) call.dlse = dlse->view();
    call.dropout_seed = seed;
    call.pieces = pieces;
    return call;
  }

  Results run(const std::string& kernel = "", bool gradients = true) const {
    Options chosen = options;
    if (!kernel.empty()) chosen.kernel = kernel;
    const Attention attention(pattern, chosen);
    // The kernel that is asked for is the kernel that runs.
    CallReport ran;
    Call reported = call();
    reported.report = &ran;
    const auto expect_kernel = [&] {
      if (!kernel.empty() && !ran.kernel.empty()) {
        EXPECT_EQ(ran.kernel, kernel);
      }
    };
    Results r;
    r.out = Tensor(dtype, shape.batch, rows, shape.heads, shape.head_dim, layout);
    r.lse = Tensor::lse(dtype, shape.batch, rows, shape.heads);
    attention.forward(q.view(), k.view(), v.view(), r.out.view(), r.lse.view(), reported);
    expect_kernel();
    if (!gradients) return r;
    r.dq = Tensor(dtype, shape.batch, rows, shape.heads, shape.head_dim, layout);
    r.dk = Tensor(dtype, shape.batch, shape.tokens, shape.kv_heads, shape.head_dim, layout);
    r.dv = Tensor(dtype, shape.batch, shape.tokens, shape.kv_heads, shape.head_dim, layout);
    attention.backward(q.view(), k.view(), v.view(), std::as_const(r.out).view(), std::as_const(r.lse).view(),
                       dout.view(), r.dq.view(), r.dk.view(), r.dv.view(), reported);
    expect_kernel();
    return r;
  }

  reference::Expectation expected(bool gradients = true) const {
    const Call data = call();
    const Plan plan(pattern, options, Attention::problem(q.view(), k.view(), data));
    const RowRange whole{0, shape.tokens};
    const auto used = ranges.empty() ? std::span<const RowRange>(&whole, 1) : std::span<const RowRange>(ranges);
    return reference::expect(
        {plan, data, used, q.view(), k.view(), v.view(), {}, {}, dout.view(), {}, {}, {}, num_threads(), nullptr},
        gradients);
  }

  /// Every output of every kernel that can run this within tolerance of the reference. The reference itself is checked
  /// too: what it is compared with is computed apart from it.
  void expect_matches(bool gradients = true) const {
    const reference::Expectation want = expected(gradients);
    const Plan plan(pattern, options, Attention::problem(q.view(), k.view(), call()));
    for (const Kernel* kernel : all_kernels()) {
      if (!kernel->can_run(plan, Pass::forward).ok || (gradients && !kernel->can_run(plan, Pass::backward).ok))
        continue;
      const Results got = run(std::string(kernel->name), gradients);
      const auto check = [&](const char* name, const Tensor& actual, const reference::ExpectedTensor& tensor) {
        const auto comparison = reference::compare(actual.view(), tensor);
        EXPECT_LE(comparison.over_tolerance, 1) << kernel->name << " " << name << " " << comparison.worst << "\n"
                                                << pattern.to_string();
        EXPECT_LE(comparison.rms_over_model, 2) << kernel->name << " " << name << "\n" << pattern.to_string();
      };
      check("out", got.out, want.out);
      check("lse", got.lse, want.lse);
      if (!gradients) continue;
      check("dq", got.dq, want.dq);
      check("dk", got.dk, want.dk);
      check("dv", got.dv, want.dv);
    }
  }

  Pattern pattern;
  Options options;
  Shape shape;
  DType dtype;
  Layout layout;
  std::vector<RowRange> ranges;
  std::int64_t rows = 0;
  Tensor q, k, v, dout;
  std::vector<std::int64_t> lengths;
  std::vector<std::uint8_t> key_mask;
  std::vector<float> alibi_slopes;
  std::optional<Tensor> dlse;
  std::vector<KeyPiece> pieces;
  std::uint64_t seed = 0;
};

/// Names of all kernels that can run float32 on this machine.
inline std::vector<std::string> kernels_here() {
  std::vector<std::string> names;
  Problem problem;
  problem.tokens = problem.query_rows = 64;
  const Plan plan(Pattern::dense(), {}, problem);
  for (const Kernel* kernel : all_kernels()) {
    if (kernel->can_run(plan, Pass::forward).ok) names.emplace_back(kernel->name);
  }
  return names;
}

}  // namespace longspan::testing
