// The oracle itself: against hand-written attention, and its gradients against central differences, option by option.
#include <cmath>

#include "support/case.h"

namespace longspan::testing {
namespace {

TEST(Reference, DenseEqualsSoftmaxByHand) {
  Case c(Pattern::dense(), {}, {1, 5, 1, 1, 3}, DType::f64);
  const Results r = c.run("reference", false);
  for (std::int64_t i = 0; i < 5; ++i) {
    double sum = 0, out[3] = {};
    for (std::int64_t j = 0; j < 5; ++j) {
      double score = 0;
      for (std::int64_t d = 0; d < 3; ++d) score += c.q.at(0, i, 0, d) * c.k.at(0, j, 0, d);
      const double weight = std::exp(score / std::sqrt(3.0));
      sum += weight;
      for (std::int64_t d = 0; d < 3; ++d) out[d] += weight * c.v.at(0, j, 0, d);
    }
    EXPECT_NEAR(r.lse.at(0, i, 0), std::log(sum), 1e-12);
    for (std::int64_t d = 0; d < 3; ++d) EXPECT_NEAR(r.out.at(0, i, 0, d), out[d] / sum, 1e-12);
  }
}

/// Mixing per-branch results by their softmax denominators (LongNet, equation 10) is the one joint softmax.
TEST(Reference, BranchesMixByTheirDenominators) {
  const std::vector<std::int64_t> segments = {8, 20, 40}, dilations = {1, 2, 4};
  Case joint(Pattern::longnet(segments, dilations), {}, {1, 40, 4, 4, 8}, DType::f64);
  const Results all = joint.run("reference", false);
  std::vector<Results> each;
  for (std::size_t b = 0; b < 3; ++b) {
    Case one = joint;
    one.pattern = Pattern::longnet({segments[b]}, {dilations[b]});
    each.push_back(one.run("reference", false));
  }
  for (std::int64_t row = 0; row < 40; ++row) {
    for (std::int64_t head = 0; head < 4; ++head) {
      double denominator = 0, mixed = 0;
      for (const Results& branch : each) {
        denominator += std::exp(branch.lse.at(0, row, head));
        mixed += std::exp(branch.lse.at(0, row, head)) * branch.out.at(0, row, head, 3);
      }
      EXPECT_NEAR(all.lse.at(0, row, head), std::log(denominator), 1e-12);
      EXPECT_NEAR(all.out.at(0, row, head, 3), mixed / denominator, 1e-12);
    }
  }
}

// Rounded weights move a query's delta, and with it every column of its gradients at once: few queries have no mean.
TEST(Reference, GradientsOfFewQueriesAreNotComparedByTheirMean) {
  const auto expected = [](std::int64_t queries) {
    return Case(Pattern::dense(), {}, {1, 200, 1, 1, 128}, DType::bf16, Layout::bnhd, {{0, queries}}).expected();
  };
  EXPECT_TRUE(expected(5).dq.rounded.empty());
  EXPECT_TRUE(expected(5).dk.rounded.empty());
  EXPECT_FALSE(expected(5).out.rounded.empty());
  EXPECT_FALSE(expected(100).dk.rounded.empty());
}

struct Variant {
  const char* name;
  Pattern pattern;
  Options options;
  bool lengths = false, key_mask = false, alibi = false, dlse = false, ranges = false;
};

Options make_options(bool causal, double dropout = 0) {
  Options options;
  options.causal = causal;
  options.dropout = dropout;
  options.output_scale = 0.7;
  return options;
}

std::vector<Variant> variants() {
  const Pattern mixed = Pattern::longnet({6, 11, 40}, {1, 2, 3});
  return {{"dense", Pattern::dense(), {}},
          {"causal", Pattern::dense(), make_options(true)},
          {"groups", Pattern::dilated({5, 9}, {1, 3}), make_options(false)},
          {"mixed", mixed, make_options(false)},
          {"mixed_causal", mixed, make_options(true)},
          {"pad_keys", Pattern::longnet({6, 11, 40}, {1, 2, 3}, PhaseRule::torchscale).with_pad_keys(),
           make_options(false)},
          {"dropout", mixed, make_options(false, 0.4)},
          {"lengths", mixed, make_options(false), true},
          {"key_mask", mixed, make_options(true), false, true},
          {"alibi", mixed, make_options(false), false, false, true},
          {"dlse", mixed, make_options(false), false, false, false, true},
          {"ranges", mixed, make_options(true), false, false, false, true, true},
          {"block_mask", Pattern::block_sparse(BlockMask::from_rows(16, 1, 2, {{0}, {0, 1}})), make_options(false)},
          {"everything", mixed, make_options(true, 0.3), true, true, true, true, true}};
}

class CentralDifferences : public ::testing::TestWithParam<Variant> {};

/// loss = <out, dout> + <lse, dlse>; its numerical derivative in every input element against backward.
TEST_P(CentralDifferences, EqualGradients) {
  const Variant& variant = GetParam();
  std::vector<RowRange> ranges;
  if (variant.ranges) ranges = {{2, 7}, {12, 6}};
  Case c(variant.pattern, variant.options, {2, 18, 4, 2, 4}, DType::f64, Layout::bnhd, ranges);
  c.seed = 99;
  if (variant.lengths) c.lengths = {18, 13};
  if (variant.key_mask) {
    c.key_mask.assign(36, 1);
    for (std::size_t i = 1; i < 36; i += 4) c.key_mask[i] = 0;
  }
  if (variant.alibi) c.alibi_slopes = {0.3f, 0.1f, 0.0f, 0.2f};
  if (variant.dlse) {
    c.dlse = Tensor::lse(DType::f64, 2, c.rows, 4);
    c.dlse->fill_random(8);
  }
  const Results analytic = c.run("reference");
  const auto loss = [&] {
    const Results r = c.run("reference", false);
    double sum = 0;
    r.out.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t d) {
      sum += r.out.at(b, row, head, d) * c.dout.at(b, row, head, d);
    });
    if (c.dlse) {
      r.lse.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t) {
        if (std::isfinite(r.lse.at(b, row, head))) sum += r.lse.at(b, row, head) * c.dlse->at(b, row, head);
      });
    }
    return sum;
  };
  const auto check = [&](const char* name, Tensor& input, const Tensor& gradient) {
    int element = 0;
    input.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t d) {
      if (element++ % 5 != 0) return;  // every fifth element: all rows, heads and columns take turns
      const double step = 1e-5, value = input.at(b, row, head, d);
      input.set(b, row, head, d, value + step);
      const double above = loss();
      input.set(b, row, head, d, value - step);
      const double below = loss();
      input.set(b, row, head, d, value);
      EXPECT_NEAR(gradient.at(b, row, head, d), (above - below) / (2 * step), 1e-7)
          << name << " " << b << " " << row << " " << head << " " << d;
    });
  };
  check("dq", c.q, analytic.dq);
  check("dk", c.k, analytic.dk);
  check("dv", c.v, analytic.dv);
}

INSTANTIATE_TEST_SUITE_P(EveryOption, CentralDifferences, ::testing::ValuesIn(variants()),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

/// torchscale's gradients: mixing weights are constants, so each branch is differentiated by itself and scaled.
TEST(Reference, DetachedMixHoldsWeightsConstant) {
  const std::vector<std::int64_t> segments = {6, 16}, dilations = {1, 2};
  Options options;
  options.detached_mix = true;
  Case c(Pattern::longnet(segments, dilations), options, {1, 16, 2, 2, 4}, DType::f64);
  const Results joint = c.run("reference");
  Tensor dq(DType::f64, 1, 16, 2, 4);
  dq.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t d) { dq.set(b, row, head, d, 0); });
  for (std::size_t branch = 0; branch < 2; ++branch) {
    Case one = c;
    one.options.detached_mix = false;
    one.pattern = Pattern::longnet({segments[branch]}, {dilations[branch]});
    const Results own = one.run("reference", false);
    one.dout.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t d) {
      const double weight = std::exp(own.lse.at(b, row, head) - joint.lse.at(b, row, head));
      one.dout.set(b, row, head, d, weight * c.dout.at(b, row, head, d));
    });
    const Results gradient = one.run("reference");
    dq.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t d) {
      dq.set(b, row, head, d, dq.at(b, row, head, d) + gradient.dq.at(b, row, head, d));
    });
  }
  dq.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t d) {
    EXPECT_NEAR(joint.dq.at(b, row, head, d), dq.at(b, row, head, d), 1e-12);
  });
}

}  // namespace
}  // namespace longspan::testing
