// What the tests of the Hopper kernels share.
#pragma once

#include <tuple>

#include "gpu/device_case.h"
#include "kernels/hopper/hopper.h"

namespace longspan::testing {

inline constexpr const char* kHopper = "hopper-wgmma";

/// A problem that a test repeats for every type, mask and option.
struct Setting {
  const char* name;
  Pattern pattern;
  Shape shape;
  std::vector<std::int64_t> lengths;
  std::vector<RowRange> ranges;
  bool shares_keys = false;  // several items add to a row of dk and dv
};

/// Head groups, the same with ragged ends and two kinds of phases, and branches that share rows.
inline std::tuple<Pattern, Pattern, Pattern> several_strands() {
  return {Pattern::dilated({512, 1024, 2048}, {1, 2, 4}), Pattern::dilated({700, 1500}, {3, 4}),
          Pattern::longnet({300, 900, 4000}, {1, 2, 5}, PhaseRule::torchscale).with_pad_keys()};
}
inline Pattern local_blocks(int block) {
  return Pattern::block_sparse(BlockPattern::local_window(4 * block, block) |
                               BlockPattern::dilated_sparse({5, 9}, block));
}
/// Branches with masks, of two block sizes and one without, that share rows.
inline Pattern merging_blocks(int block) {
  const std::string size = std::to_string(block);
  return Pattern::parse("longnet 400/1{block=" + size + " local_window(128)} 900/2{block=64 strided(128)} 2000/3");
}

inline Options with(bool causal, bool deterministic = false, const char* kernel = kHopper) {
  Options options;
  options.causal = causal;
  options.deterministic = deterministic;
  options.kernel = kernel;
  return options;
}

inline Problem problem_of(std::int64_t tokens, std::int64_t heads, std::int64_t head_dim) {
  Problem problem;
  problem.device = kGpu;
  problem.dtype = DType::bf16;
  problem.tokens = problem.query_rows = tokens;
  problem.heads = problem.kv_heads = heads;
  problem.head_dim = head_dim;
  return problem;
}

inline bool has_hopper(Pass pass) {
  const Plan plan(Pattern::dense(), {}, problem_of(64, 1, 64));
  return hopper::kKernel.can_run(plan, pass).ok;
}
#define LONGSPAN_NEEDS_HOPPER(pass) \
  if (!has_hopper(pass)) GTEST_SKIP() << "no Hopper GPU"

/// A forward whose errors are those that rounding causes.
inline void expect_forward_matches_reference(const Case& c) {
  const reference::Expectation want = c.expected(false);
  DeviceCase device(c);
  device.forward(Attention(c.pattern, c.options), device.call());
  const Results& got = device.download();
  const auto out = reference::compare(got.out.view(), want.out), lse = reference::compare(got.lse.view(), want.lse);
  EXPECT_LE(out.over_tolerance, 1) << out.worst;
  EXPECT_LE(out.rms_over_model, 2);
  EXPECT_LE(lse.over_tolerance, 1) << lse.worst;
}

/// Forwards of the same inputs onto poisoned outputs, each with the bits of the first.
inline void expect_same_bits(const Case& c, int repeats) {
  const Attention attention(c.pattern, c.options);
  DeviceCase device(c);
  device.forward(attention, device.call());
  const Results first = device.download();
  for (int i = 0; i < repeats; ++i) {
    device.out.poison();
    device.lse.poison();
    device.forward(attention, device.call());
    expect_success(cudaDeviceSynchronize());
    device.out.download(device.results.out);
    device.lse.download(device.results.lse);
    ASSERT_EQ(device.results.out, first.out) << "repeat " << i;
    ASSERT_EQ(device.results.lse, first.lse) << "repeat " << i;
  }
}

/// Rows of a call's ranges have the bits that they have in a call of all rows.
inline void expect_bits_of_all_rows(const Case& part) {
  if (part.ranges.empty()) return;
  Case whole(part.pattern, part.options, part.shape, part.dtype, part.layout);
  whole.k = part.k, whole.v = part.v;
  whole.key_mask = part.key_mask, whole.alibi_slopes = part.alibi_slopes;
  whole.seed = part.seed;
  const auto for_each = [&](const auto& visit) {
    std::int64_t row = 0;
    for (const RowRange& range : part.ranges) {
      for (std::int64_t i = 0; i < range.count; ++i, ++row) {
        for (std::int64_t head = 0; head < part.shape.heads; ++head) {
          for (std::int64_t column = 0; column < part.shape.head_dim; ++column)
            visit(row, range.start + i, head, column);
        }
      }
    }
  };
  for_each([&](auto row, auto position, auto head, auto column) {
    whole.q.set(0, position, head, column, part.q.at(0, row, head, column));
  });
  const Attention attention(part.pattern, part.options);
  DeviceCase device(part), all(whole);
  device.forward(attention, device.call());
  all.forward(attention, all.call());
  const Results &got = device.download(), &want = all.download();
  for_each([&](auto row, auto position, auto head, auto column) {
    ASSERT_EQ(got.out.at(0, row, head, column), want.out.at(0, position, head, column)) << "row " << row;
  });
}

}  // namespace longspan::testing
