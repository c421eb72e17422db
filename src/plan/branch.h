// Branches of a plan as the arithmetic of strands.h sees them, and which keys some queries of a strand attend to.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "longspan/plan.h"
#include "plan/strands.h"

namespace longspan {

/// A branch for indices of type Index; what is longer than those reach is as long as they reach.
template <class Index = std::int64_t>
strands::BranchOf<Index> branch_of(const BranchPlan& branch) {
  const auto narrow = [](std::int64_t value) {
    return static_cast<Index>(std::min<std::int64_t>(value, std::numeric_limits<Index>::max()));
  };
  return {narrow(branch.segment),
          narrow(branch.dilation),
          narrow(branch.head_begin),
          narrow(branch.head_count),
          narrow(branch.fixed_phase.value_or(-1)),
          narrow(branch.heads_per_phase.value_or(0)),
          branch.skip_if_longer,
          branch.pad_keys};
}

/// Rows [begin, begin + count) of a strand are rows q_row, q_row + stride, ... of q.
using QueryRun = strands::QueryRunOf<std::int64_t>;

/// The part of a strand that lies in one range whose first row is row `q_first` of q.
inline QueryRun query_run(const Strand& strand, const RowRange& range, std::int64_t q_first = 0) {
  return strands::query_run<std::int64_t>({strand.start, strand.stride, strand.count}, range.start, range.count,
                                          q_first);
}

/// Rows of the strand whose position lies below `position`.
inline std::int64_t rows_below(const Strand& strand, std::int64_t position) {
  return query_run(strand, {0, position}).count;
}

/// The positions that a branch covers for one head, as a list that is never written out.
class CoveredRows {
 public:
  CoveredRows(const BranchPlan& branch, std::int64_t head, std::int64_t tokens)
      : branch_(branch), head_(head), tokens_(tokens), per_segment_(strand(0).count) {}

  Strand strand(std::int64_t segment) const { return branch_.strand(head_, segment, tokens_); }
  /// How many lie below `position`.
  std::int64_t below(std::int64_t position) const {
    const std::int64_t segment = position / branch_.segment;
    return segment * per_segment_ + rows_below(strand(segment), position);
  }
  /// Segment and row in its strand of the covered row with this index.
  std::pair<std::int64_t, std::int64_t> at(std::int64_t index) const {
    const std::int64_t segment =
        std::min(index / std::max<std::int64_t>(per_segment_, 1), branch_.segments(tokens_) - 1);
    return {segment, index - segment * per_segment_};
  }

 private:
  const BranchPlan& branch_;
  std::int64_t head_, tokens_, per_segment_;
};

/// Calls body(first, last) for runs of rows of a strand, ascending, that some of its queries `rows` attend to in some
/// of the batch entries [first_entry, last_entry), as block mask and causality leave them.
template <class Body>
void for_each_attended(const BranchPlan& branch, std::int64_t first_entry, std::int64_t last_entry, std::int64_t head,
                       const Strand& strand, const QueryRun& rows, bool causal, Body&& body) {
  const std::int64_t rows_end = rows.begin + rows.count;
  if (!branch.mask) return body(std::int64_t{0}, causal ? rows_end : strand.count);
  const std::int64_t size = branch.mask->block_size();
  // Where the keys seen in each key block end; 0: none is.
  std::vector<std::int64_t> ends(static_cast<std::size_t>(strands::ceil_divide(strand.count, size)), 0);
  if (branch.mask_entry_stride == 0) last_entry = std::min(last_entry, first_entry + 1);
  for (std::int64_t entry = first_entry; entry < last_entry; ++entry) {
    for (std::int64_t block_row = rows.begin / size; block_row * size < rows_end; ++block_row) {
      const std::int64_t last_query = std::min((block_row + 1) * size, rows_end);
      for (const std::int64_t column : branch.mask->row(branch.mask_head(entry, head), block_row)) {
        if (column * size >= strand.count || (causal && column > block_row)) break;
        std::int64_t& end = ends[static_cast<std::size_t>(column)];
        end = std::max(end, std::min({(column + 1) * size, strand.count, causal ? last_query : strand.count}));
      }
    }
  }
  for (std::size_t column = 0; column < ends.size(); ++column) {
    if (ends[column] > 0) body(static_cast<std::int64_t>(column) * size, ends[column]);
  }
}

}  // namespace longspan
