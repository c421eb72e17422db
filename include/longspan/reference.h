// The float64 reference: what a call should return, and how far from it rounding may take a correct kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "longspan/attention.h"
#include "longspan/export.h"

namespace longspan::reference {

/// Values in the order (entry, row, head, column).
struct ExpectedTensor {
  std::vector<double> value{};
  std::vector<double> magnitude{};  ///< sum of absolute values of the terms
  std::vector<double> rounded{};  ///< intermediate values and the result rounded as in 16-bit storage, where it is that
  double relative = 0;            ///< allowed error over magnitude
  double relative32 = 0;          ///< the part of it that float32 arithmetic alone may cause
  double absolute = 0;            ///< allowed besides: where the storage type runs out of exponents
};

struct Expectation {
  ExpectedTensor out{}, lse{}, dq{}, dk{}, dv{};
};

/// What forward returns and, with `gradients`, backward. All tensors are on the CPU.
LONGSPAN_API Expectation expected(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k,
                                  const ConstTensorView& v, const ConstTensorView& dout, const Call& call = {},
                                  bool gradients = true);

/// Rows `positions` of a large problem, whose queries are all positions: out, lse and dq as queries, dk and dv as keys.
/// out and lse are what forward returned.
LONGSPAN_API Expectation expected_rows(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k,
                                       const ConstTensorView& v, const ConstTensorView& out, const ConstTensorView& lse,
                                       const ConstTensorView& dout, const Call& call,
                                       std::span<const std::int64_t> positions);

struct Comparison {
  double largest_error = 0;
  double over_tolerance = 0;  ///< largest error / allowed error: good up to 1
  double rms_over_model = 0;  ///< root mean square error / the rounded model's: good up to 2; 0 if not compared
  std::string worst{};        ///< where and what, for people
  bool ok() const { return over_tolerance <= 1 && rms_over_model <= 2; }
};
LONGSPAN_API Comparison compare(const ConstTensorView& actual, const ExpectedTensor& expected);

/// Rows of a tensor on the CPU, one behind the other: what compare() takes beside expected_rows().
class LONGSPAN_API GatheredRows {
 public:
  GatheredRows(const ConstTensorView& tensor, std::span<const std::int64_t> rows);
  const ConstTensorView& view() const { return view_; }

 private:
  std::vector<std::byte> memory_;
  ConstTensorView view_;
};

}  // namespace longspan::reference
