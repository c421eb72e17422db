// Tensor maps for TMA, and what the Hopper kernels ask of a plan and of the machine.
#pragma once

#include "kernels/hopper/launch.h"
#include "kernels/kernel.h"

namespace longspan::hopper {

/// Of tensors whose rows or heads repeat or run backwards in memory, or lie too far apart.
inline constexpr const char* kNoMap =
    "loads rows by TMA, which takes strides over 0 and below 2^40 bytes: pass contiguous tensors";

/// What forward and backward need alike.
Verdict fits(const Plan& plan);

/// Rows of a tensor as the grid of one dilation (launch.h), phases of one kind; false if TMA cannot address it.
bool encode(CUtensorMap& map, const ConstTensorView& view, std::int64_t dilation, std::int64_t rows, int box_rows);

/// Sums of dq that branches share (backward_launch.h), of `heads` heads of all entries.
struct MergedSums {
  const float* data;
  std::int64_t rows, columns, heads;
  int box_columns;
};
/// Their rows as the grid of one dilation; false if the driver refuses.
bool encode(CUtensorMap& map, const MergedSums& sums, std::int64_t dilation, std::int64_t rows);

/// Calls make(map, dilation, rows of queries, rows of keys) for each map of each branch: one, or two where phases
/// differ in length, and fills in where a branch's maps begin. False as soon as make is.
template <class Launch, class Make>
bool for_each_map(Launch& launch, const Plan& plan, Make&& make);

bool has_masks(const Plan& plan);
/// Rows of the smallest block of any branch's mask.
int smallest_block(const Plan& plan);

std::int64_t dilation_of(const BranchPlan& branch);
/// Maps of a branch: one, or two where phases differ in length.
int maps_of(const BranchPlan& branch, const Problem& problem);
int multiprocessors(const Problem& problem);

/// Rows of phases of one kind: the longer ones first.
inline std::int64_t phase_rows(std::int64_t rows, std::int64_t dilation, int kind) {
  return rows / dilation + (kind == 0 && rows % dilation != 0);
}

/// Rows of k and v: a rank of a ring has its own.
inline std::int64_t key_rows(const Problem& problem) { return problem.is_share ? problem.query_rows : problem.tokens; }

/// Tells a launch where a rank's strands are; its ranges are the call's, or parts of them.
template <class Arguments>
PackedPlaces packed_places(const Arguments& a, const cuda::Launch& launch) {
  PackedPlaces places{};
  places.key_rows = launch.tensors.tokens;
  if (!a.packed) return places;
  places.sums = a.k.batch() * a.k.heads() * a.k.rows();
  places.key_rows = static_cast<int>(a.k.rows());
  places.rows = static_cast<int>(a.packed->k.rows());
  for (int r = 0; r < launch.schedule.range_count; ++r) {
    std::int64_t first_row = launch.schedule.ranges[r].first_row;
    std::size_t i = 0;
    for (; first_row >= a.ranges[i].count; ++i) first_row -= a.ranges[i].count;
    places.ranges[r] = a.packed->places + i * a.packed->range_places;
  }
  return places;
}

template <class Launch, class Make>
bool for_each_map(Launch& launch, const Plan& plan, Make&& make) {
  const Problem& problem = plan.problem();
  const std::int64_t keys = key_rows(problem);
  int count = 0, index = 0;
  for (const BranchPlan& branch : plan.branches()) {
    const std::int64_t dilation = dilation_of(branch);
    launch.first_map[index] = count;
    launch.longer_queries[index] = static_cast<int>(problem.query_rows % dilation);
    launch.longer_keys[index++] = static_cast<int>(keys % dilation);
    for (int kind = 0; kind < maps_of(branch, problem); ++kind, ++count) {
      if (!make(count, dilation, phase_rows(problem.query_rows, dilation, kind), phase_rows(keys, dilation, kind)))
        return false;
    }
  }
  return true;
}

}  // namespace longspan::hopper
