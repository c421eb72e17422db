// Compares a rank's results with one device's, and judges what differs by the float64 definition.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "json.h"
#include "longspan/attention.h"
#include "tensor.h"

namespace longspan::cli {

/// One compared quantity (out, lse, dq, dk, dv) of one rank.
struct RingCheck {
  std::string name;
  bool same_bits = true;
  double largest_difference = 0;  ///< absolute, from one device
  double largest_error = 0;       ///< absolute, from the definition, where the difference is largest
  double over_tolerance = 0;      ///< that error / the allowed one
  std::string worst;              ///< where, and all numbers, for people; empty where nothing differs
  bool ok() const { return over_tolerance <= 1; }
};

/// What one device has computed, in the host's memory: every row. Gradients may be absent.
struct WholeResults {
  ConstTensorView q, k, v, dout, out, lse, dq, dk, dv;
};

/// `mine` holds the rank's rows, which lie at the positions `ranges`, of the same names. Two computations in different
/// orders may differ by rounding, so the row that differs most from one device's is computed in float64: it may err as
/// much as the reference allows a kernel, and by what `rounds` partial results that are mixed one after the other add.
std::vector<RingCheck> check_ring(const Attention& attention, const Call& call, const WholeResults& whole,
                                  const WholeResults& mine, std::span<const RowRange> ranges, std::int64_t rounds);

Json describe(const RingCheck& check);

}  // namespace longspan::cli
