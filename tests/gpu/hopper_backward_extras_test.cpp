// Options of a call in the Hopper backward, each alone and together, on every tile shape that has them: against the
// reference, with the same bits again where deterministic, and with NaN in what key_mask excludes. The forward is
// whichever kernel is fastest.
#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "gpu/hopper_case.h"

namespace longspan::testing {
namespace {

/// Each shape of tiles; ragged ends, two kinds of phases, branches that share rows, grouped queries, lists.
std::vector<Setting> settings() {
  const auto [groups, ragged, slide] = several_strands();
  return {{"dense", Pattern::dense(), {1, 768, 2, 2, 64}, {}, {}},
          {"dense_ragged", Pattern::dense(), {2, 701, 2, 1, 64}, {}, {}},
          {"dense_wide", Pattern::dense(), {1, 650, 2, 2, 128}, {}, {}},
          {"dense_d72", Pattern::dense(), {1, 450, 2, 2, 72}, {}, {}},
          {"dense_d256", Pattern::dense(), {1, 450, 2, 1, 256}, {}, {}},
          {"short_strands", Pattern::dilated({100, 512}, {1, 4}), {2, 1111, 4, 4, 64}, {}, {}},
          // So many items that those of padded keys run apart.
          {"many", Pattern::dense(), {26, 130, 8, 8, 64}, {}, {}},
          {"many_wide", Pattern::dense(), {26, 130, 8, 4, 128}, {}, {}},
          {"groups", groups, {1, 2048, 3, 3, 64}, {}, {}},
          {"groups_ragged", ragged, {2, 1999, 4, 2, 40}, {}, {}},
          {"groups_wide", ragged, {1, 1999, 2, 2, 128}, {}, {}},
          {"groups_d192", ragged, {1, 1500, 2, 2, 192}, {}, {}},
          {"lengths", groups, {3, 2048, 3, 3, 64}, {1777, 0, 300}, {}},
          {"ranges", ragged, {1, 2999, 2, 2, 64}, {}, {{700, 900}, {2900, 99}}},
          {"slide", slide, {1, 1201, 4, 4, 48}, {}, {}},
          {"slide_lengths", slide, {2, 1201, 4, 2, 64}, {1200, 77}, {}},
          {"slide_wide", slide, {1, 1201, 4, 2, 128}, {}, {}},
          {"slide_d256", slide, {1, 801, 4, 2, 256}, {}, {}},
          {"blocks64", local_blocks(64), {2, 1101, 2, 2, 64}, {}, {}},
          {"blocks128", local_blocks(128), {1, 1401, 2, 1, 64}, {}, {}},
          {"blocks64_wide", local_blocks(64), {1, 1101, 2, 2, 128}, {}, {}},
          {"blocks_lengths", local_blocks(64), {2, 1299, 2, 2, 64}, {1299, 650}, {}}};
}

enum class Extra { none, scattered, middle, nothing, padding, alibi, negative, zero, detached, dropout, both, all };
constexpr const char* kNames[] = {"plain",        "scattered_keys", "keys_in_the_middle", "no_keys",
                                  "padding",      "alibi",          "negative_scale",     "scale_zero",
                                  "detached_mix", "dropout",        "detached_dropout",   "all"};

void add(Case& c, Extra extra) {
  const std::size_t tokens = static_cast<std::size_t>(c.shape.tokens),
                    keys = tokens * static_cast<std::size_t>(c.shape.batch);
  const bool all = extra == Extra::all;
  if (all || extra == Extra::scattered || extra == Extra::middle || extra == Extra::nothing ||
      extra == Extra::padding) {
    c.key_mask.assign(keys, extra == Extra::scattered || all ? 1 : 0);
    for (std::size_t i = 0; i < keys; ++i) {
      const std::size_t row = i % tokens;
      if (extra == Extra::padding) c.key_mask[i] = row < (i / tokens + 1) * 53 % (tokens + 1);
      else if (extra == Extra::middle) c.key_mask[i] = row >= tokens / 3 && row < tokens / 2;
      else if (extra != Extra::nothing && (row * 2654435761u >> 5) % 7 == 0) c.key_mask[i] = 0;
    }
  }
  if (all || extra == Extra::alibi) {
    for (std::int64_t head = 0; head < c.shape.heads; ++head)
      c.alibi_slopes.push_back(head % 3 == 2 ? -0.002f : 0.05f / static_cast<float>(1 + head));
  }
  if (all || extra == Extra::negative) c.options.scale = -0.11;
  if (extra == Extra::zero) c.options.scale = 0.0;
  if (extra == Extra::detached || extra == Extra::both) c.options.detached_mix = true;
  if (all || extra == Extra::dropout || extra == Extra::both) {
    c.options.dropout = 0.3;
    c.seed = 0x1234567890abcdefu;
  }
}

using Parameters = std::tuple<Setting, Extra, bool>;
class HopperBackwardExtras : public ::testing::TestWithParam<Parameters> {
 protected:
  Case make() const {
    const auto& [setting, extra, causal] = GetParam();
    const bool half = static_cast<int>(extra) % 2 == (causal ? 0 : 1);
    Case c(setting.pattern, with(causal), setting.shape, half ? DType::f16 : DType::bf16,
           causal ? Layout::bhnd : Layout::bnhd, setting.ranges);
    c.lengths = setting.lengths;
    add(c, extra);
    return c;
  }
  bool is_deterministic(const Case& c) const {
    Problem problem = Attention::problem(c.q.view(), c.k.view(), c.call());
    problem.device = kGpu;
    Options options = c.options;
    options.deterministic = true;
    options.kernel.clear();
    return hopper::kKernel.can_run(Plan(c.pattern, options, problem), Pass::backward).ok;
  }
  /// The fastest forward, and the Hopper backward.
  static const Results& run(const Case& c, DeviceCase& device) {
    Options any = c.options;
    any.kernel.clear();
    device.forward(Attention(c.pattern, any), device.call());
    for (const DeviceTensor* gradient : {&device.dq, &device.dk, &device.dv}) gradient->poison();
    device.backward(Attention(c.pattern, c.options), device.call());
    return device.download();
  }
};

TEST_P(HopperBackwardExtras, MatchesTheReference) {
  LONGSPAN_NEEDS_HOPPER(Pass::backward);
  Case c = make();
  const reference::Expectation want = c.expected(true);
  for (const bool deterministic : {false, true}) {
    c.options.deterministic = deterministic;
    if (deterministic && !is_deterministic(c)) continue;
    DeviceCase device(c);
    const Results& got = run(c, device);
    const auto check = [&](const char* name, const Tensor& actual, const reference::ExpectedTensor& expected) {
      const auto comparison = reference::compare(actual.view(), expected);
      EXPECT_LE(comparison.over_tolerance, 1) << name << " " << comparison.worst;
      EXPECT_LE(comparison.rms_over_model, 2) << name;
    };
    check("dq", got.dq, want.dq);
    check("dk", got.dk, want.dk);
    check("dv", got.dv, want.dv);
    if (!deterministic) continue;
    const Results first = got;
    for (int i = 0; i < 10; ++i) run(c, device);
    EXPECT_EQ(device.results.dq, first.dq);
    EXPECT_EQ(device.results.dk, first.dk);
    EXPECT_EQ(device.results.dv, first.dv);
  }
}

/// Rows of K and V that key_mask excludes, NaN included, leave all gradients as they are; their own are zeros, even
/// where a query has NaN.
TEST_P(HopperBackwardExtras, ExcludedKeysNeverLeak) {
  LONGSPAN_NEEDS_HOPPER(Pass::backward);
  const auto& [setting, extra, causal] = GetParam();
  if (extra != Extra::scattered && extra != Extra::middle && extra != Extra::padding && extra != Extra::all) return;
  Case c = make();
  const auto excluded = [&](std::int64_t entry, std::int64_t row) {
    return c.key_mask[static_cast<std::size_t>(entry * c.shape.tokens + row)] == 0;
  };
  c.k.for_each([&](auto entry, auto row, auto head, auto column) {
    if (!excluded(entry, row)) return;
    c.k.set(entry, row, head, column, std::nan(""));
    c.v.set(entry, row, head, column, std::nan(""));
  });
  DeviceCase device(c);
  const Results& got = run(c, device);
  for (const Tensor* tensor : {&got.dq, &got.dk, &got.dv}) {
    tensor->for_each([&](auto entry, auto row, auto head, auto column) {
      ASSERT_TRUE(std::isfinite(tensor->at(entry, row, head, column))) << entry << " " << row << " " << head;
      if (tensor != &got.dq && excluded(entry, row)) {
        ASSERT_EQ(tensor->at(entry, row, head, column), 0.0) << entry << " " << row << " " << head;
      }
    });
  }
}

std::string name_of_case(const ::testing::TestParamInfo<Parameters>& parameters) {
  const auto& [setting, extra, causal] = parameters.param;
  return std::string(setting.name) + "_" + kNames[static_cast<int>(extra)] + (causal ? "_causal" : "");
}
INSTANTIATE_TEST_SUITE_P(Hopper, HopperBackwardExtras,
                         ::testing::Combine(::testing::ValuesIn(settings()),
                                            ::testing::Values(Extra::none, Extra::scattered, Extra::middle,
                                                              Extra::nothing, Extra::padding, Extra::alibi,
                                                              Extra::negative, Extra::zero, Extra::detached,
                                                              Extra::dropout, Extra::both, Extra::all),
                                            ::testing::Bool()),
                         name_of_case);

/// A call of options that no longer fit a kernel's loop would silently take many times as long.
TEST(HopperBackwardOptions, OptionsRunOnTheHopperKernel) {
  LONGSPAN_NEEDS_HOPPER(Pass::backward);
  for (const std::int64_t head_dim : {64, 128, 256}) {
    for (int options = 0; options < 16; ++options) {
      Problem problem = problem_of(1000, 4, head_dim);
      problem.has_key_mask = options & 1;
      problem.has_alibi = options & 2;
      Options chosen;
      if (options & 4) chosen.dropout = 0.1;
      if (options & 8) chosen.scale = -1.0;
      for (const Pattern& pattern : {Pattern::dense(), Pattern::longnet({64, 1000}, {1, 2})})
        EXPECT_EQ(Attention(pattern, chosen).plan(problem)->kernel_name(Pass::backward), kHopper)
            << head_dim << " " << options;
    }
  }
}

}  // namespace
}  // namespace longspan::testing
