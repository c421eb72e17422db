// Options of a call in the Hopper forward, each alone and all together, on every tile shape that has them: against the
// reference, with the same bits again, and with whatever lies where key_mask excludes.
#include <gtest/gtest.h>

#include <tuple>

#include "gpu/hopper_case.h"

namespace longspan::testing {
namespace {

/// Each shape of tiles; strands that share a tile, ragged ends, two kinds of phases, branches that merge, lists.
std::vector<Setting> settings() {
  const auto [groups, ragged, slide] = several_strands();
  const Pattern short_strands = Pattern::dilated({64, 500}, {1, 9});
  const Pattern strands =
      Pattern::parse("dilated 1000/1{block=64 local_window(256)} 2100/3{block=64 random(0.4,3)} 700/2");
  return {{"dense", Pattern::dense(), {2, 601, 2, 1, 64}, {}, {}},
          {"dense_wide", Pattern::dense(), {1, 501, 2, 2, 128}, {}, {}},
          {"dense_d72", Pattern::dense(), {1, 300, 2, 2, 72}, {}, {}},
          {"dense_d192", Pattern::dense(), {1, 301, 2, 2, 192}, {}, {}},
          {"dense_d256", Pattern::dense(), {2, 401, 2, 1, 256}, {}, {}},
          {"packed", short_strands, {2, 611, 4, 2, 64}, {}, {}},
          {"packed_wide", Pattern::dilated({61, 122}, {1, 2}), {1, 511, 4, 4, 128}, {}, {}},
          {"groups", groups, {1, 1500, 3, 3, 64}, {}, {}},
          {"groups_ragged", ragged, {2, 1599, 4, 2, 40}, {}, {}},
          {"lengths", groups, {2, 1024, 3, 3, 64}, {777, 300}, {}},
          {"ranges", ragged, {1, 1599, 2, 2, 64}, {}, {{400, 500}, {1500, 99}}},
          {"ranges_d256", ragged, {1, 1500, 2, 2, 256}, {}, {{700, 300}, {1400, 99}}},
          {"dense_ranges", Pattern::dense(), {1, 901, 2, 2, 64}, {}, {{30, 333}, {700, 100}}},
          {"slide", slide, {1, 801, 4, 4, 48}, {}, {}},
          {"slide_lengths", slide, {2, 701, 4, 4, 64}, {700, 77}, {}},
          {"slide_wide", slide, {1, 501, 4, 2, 128}, {}, {}},
          {"slide_d256", slide, {1, 401, 4, 2, 256}, {}, {}},
          {"blocks64", local_blocks(64), {2, 801, 2, 1, 64}, {}, {}},
          {"blocks128", local_blocks(128), {1, 1001, 2, 2, 64}, {}, {}},
          {"blocks64_wide", local_blocks(64), {1, 601, 2, 2, 128}, {}, {}},
          {"blocks128_wide", local_blocks(128), {1, 1001, 2, 2, 96}, {}, {}},
          {"blocks_lengths", local_blocks(64), {2, 799, 2, 2, 64}, {799, 450}, {}},
          {"blocks_ranges", local_blocks(64), {1, 901, 2, 2, 64}, {}, {{100, 333}, {700, 64}, {890, 11}}},
          {"blocks_strands", strands, {1, 2100, 3, 3, 64}, {}, {}},
          {"blocks16", local_blocks(16), {2, 501, 2, 1, 64}, {}, {}},
          {"blocks32_wide", local_blocks(32), {1, 601, 2, 2, 128}, {}, {}},
          {"blocks16_d256", local_blocks(16), {1, 401, 2, 2, 256}, {}, {}},
          {"blocks64_d192", local_blocks(64), {1, 601, 2, 2, 192}, {}, {}},
          {"blocks_merging", merging_blocks(32), {2, 901, 2, 2, 64}, {901, 333}, {}},
          {"blocks_merging_ranges", merging_blocks(64), {1, 901, 2, 2, 128}, {}, {{100, 333}, {700, 64}}}};
}

enum class Extra { scattered, ends, nothing, alibi, negative, dropout, all };
constexpr const char* kNames[] = {
    "scattered_keys", "keys_in_the_middle", "no_keys", "alibi", "negative_scale", "dropout", "all"};

/// Gives a case one option, or all of them.
void add(Case& c, Extra extra) {
  const bool all = extra == Extra::all;
  const std::int64_t tokens = c.shape.tokens, total = c.shape.batch * tokens;
  const auto allow = [&](const auto& allowed) {
    for (std::int64_t i = 0; i < total; ++i) c.key_mask.push_back(allowed(i / tokens, i % tokens));
  };
  if (extra == Extra::scattered || all) allow([](auto entry, auto row) { return (row * 7 + entry) % 10 != 3; });
  // Whole tiles at both ends, and one in the middle, of which an entry has less.
  if (extra == Extra::ends) {
    allow([&](auto entry, auto row) {
      return row >= 140 - 100 * entry && row < tokens - 140 && (row / 128 != 2 || entry > 0);
    });
  }
  if (extra == Extra::nothing) allow([](auto entry, auto) { return entry > 0; });
  if (extra == Extra::alibi || all) {
    const float slopes[] = {0.5f, 0.0f, -0.003f, 0.01f};
    for (std::int64_t head = 0; head < c.shape.heads; ++head) c.alibi_slopes.push_back(slopes[head % 4]);
  }
  if (extra == Extra::negative) c.options.scale = -0.2;
  if (extra == Extra::dropout || all) {
    c.options.dropout = all ? 0.5 : 0.1;
    c.seed = 0x1234567890abcdefu;
  }
}

using Parameters = std::tuple<int, Extra>;
/// Both kinds of masks and both dtypes meet every option and every shape, if not each other.
bool is_causal(const Parameters& parameters) {
  return (std::get<0>(parameters) + static_cast<int>(std::get<1>(parameters))) % 2 != 0;
}
class HopperOptions : public ::testing::TestWithParam<Parameters> {
 protected:
  Case make() const {
    const Setting setting = settings()[static_cast<std::size_t>(std::get<0>(GetParam()))];
    const Extra extra = std::get<1>(GetParam());
    const bool causal = is_causal(GetParam());
    Case c(setting.pattern, with(causal), setting.shape, causal ? DType::f16 : DType::bf16,
           causal ? Layout::bhnd : Layout::bnhd, setting.ranges);
    c.lengths = setting.lengths;
    add(c, extra);
    return c;
  }
};

TEST_P(HopperOptions, MatchTheReference) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  expect_forward_matches_reference(make());
}

TEST_P(HopperOptions, RepeatBitForBit) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  expect_same_bits(make(), 20);
}

TEST_P(HopperOptions, RangesDoNotChangeBits) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  expect_bits_of_all_rows(make());
}

/// What lies in excluded rows is never in a result, even if it is no number.
TEST_P(HopperOptions, ExcludedKeysAreNotSeen) {
  LONGSPAN_NEEDS_HOPPER(Pass::forward);
  Case c = make();
  if (c.key_mask.empty()) return;
  const Attention attention(c.pattern, c.options);
  DeviceCase device(c);
  device.forward(attention, device.call());
  const Results first = device.download();
  for (Tensor* tensor : {&c.k, &c.v}) {
    const Tensor before = *tensor;
    before.for_each([&](auto entry, auto row, auto head, auto column) {
      if (!c.key_mask[static_cast<std::size_t>(entry * c.shape.tokens + row)])
        tensor->set(entry, row, head, column, std::nan(""));
    });
  }
  DeviceCase poisoned(c);
  poisoned.forward(attention, poisoned.call());
  const Results& got = poisoned.download();
  EXPECT_EQ(got.out, first.out);
  EXPECT_EQ(got.lse, first.lse);
}

std::string name_of_case(const ::testing::TestParamInfo<Parameters>& parameters) {
  const auto& [setting, extra] = parameters.param;
  return std::string(settings()[static_cast<std::size_t>(setting)].name) + "_" + kNames[static_cast<int>(extra)] +
         (is_causal(parameters.param) ? "_f16_causal" : "_bf16");
}

INSTANTIATE_TEST_SUITE_P(Hopper, HopperOptions,
                         ::testing::Combine(::testing::Range(0, static_cast<int>(settings().size())),
                                            ::testing::Values(Extra::scattered, Extra::ends, Extra::nothing,
                                                              Extra::alibi, Extra::negative, Extra::dropout,
                                                              Extra::all)),
                         name_of_case);

}  // namespace
}  // namespace longspan::testing
