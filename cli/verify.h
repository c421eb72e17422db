// Compares chosen rows of a large run with the float64 reference.
#pragma once

#include <string>
#include <vector>

#include "longspan/attention.h"
#include "tensor.h"

namespace longspan::cli {

/// One compared quantity (out, lse, dq, dk, dv).
struct RowCheck {
  std::string name;
  double rows = 0;            ///< (entry, position, head) rows compared
  double largest_error = 0;   ///< absolute
  double over_tolerance = 0;  ///< largest error / allowed error
  double rms_over_model = 0;  ///< 16-bit types: error relative to a computation rounded at the same places; up to 2
  std::string worst;
  bool ok = false;
};

/// Positions from every branch, from its first and last segment: ends and middle of a strand and a few at random.
std::vector<std::int64_t> sample_positions(const Plan& plan, std::uint64_t seed);

/// Checks out, lse and dq of the sampled rows as queries, and dk and dv of the same rows as keys.
std::vector<RowCheck> verify(const Plan& plan, const Call& call, const Workload& work);

}  // namespace longspan::cli
