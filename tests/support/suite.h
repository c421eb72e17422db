// The patterns and names of the suite that every engine runs: pattern x dtype x causal x shape. Engines differ in how
// long their tiles are, so segments and shapes are parameters.
#pragma once

#include <tuple>

#include "support/case.h"

namespace longspan::testing {

struct NamedPattern {
  const char* name;
  Pattern pattern;
};

struct NamedShape {
  const char* name;
  Shape shape;
};

/// Segments of each pattern.
struct SuiteSegments {
  std::vector<std::int64_t> groups, ragged, paper, torchscale;
  std::int64_t skip;
};

inline std::vector<NamedPattern> suite_patterns(const SuiteSegments& segments) {
  return {{"dense", Pattern::dense()},
          {"groups", Pattern::dilated(segments.groups, {1, 2, 4})},
          {"groups_ragged", Pattern::dilated(segments.ragged, {3, 7}).with_output_scale(0.5)},
          {"dilation_beyond_segment", Pattern::dilated({4, 1}, {9, 3})},
          {"longnet_paper", Pattern::longnet(segments.paper, {1, 3, 6})},
          {"longnet_torchscale_padded",
           Pattern::longnet(segments.torchscale, {1, 2, 4}, PhaseRule::torchscale).with_pad_keys()},
          {"skip", Pattern::longnet({segments.skip, 4096}, {1, 2}).with_long_segments(LongSegments::skip)}};
}

using SuiteParameters = std::tuple<NamedPattern, DType, bool, NamedShape>;  // the flag: causal

inline std::string suite_name(const ::testing::TestParamInfo<SuiteParameters>& info) {
  const auto& [pattern, dtype, causal, shape] = info.param;
  return std::string(pattern.name) + "_" + std::string(name_of(dtype)) + (causal ? "_causal_" : "_full_") + shape.name;
}

}  // namespace longspan::testing
