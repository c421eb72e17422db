// Problems for `longspan check`: a fixed grid, and random ones that reach every option of the operator.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "longspan/attention.h"
#include "problem_options.h"

namespace longspan::cli {

/// A problem and its call data, without tensors.
struct CheckCase {
  Pattern pattern = Pattern::dense();
  Options options;  ///< kernel is left empty
  DType dtype = DType::f32;
  std::int64_t batch = 1, tokens = 0, heads = 1, kv_heads = 1, head_dim = 64;
  Layout layout = Layout::bnhd;
  std::vector<RowRange> query_ranges;  ///< empty: all positions
  std::vector<std::int64_t> lengths;   ///< empty: not given
  std::vector<std::int64_t> cuts;      ///< k and v come as pieces, cut at these positions
  bool key_mask = false;
  bool alibi = false;
  bool dlse = false;
  std::uint64_t seed = 0;

  std::int64_t query_rows() const;
  /// One line for people.
  std::string to_string() const;
};

std::vector<CheckCase> check_grid();
/// The `index`-th random case of a seed; independent of every other case.
CheckCase random_case(std::uint64_t seed, std::uint64_t index);

}  // namespace longspan::cli
