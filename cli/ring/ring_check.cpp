// Bits and differences of every row; float64 for the one row of each quantity that differs most.
#include "ring/ring_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "interrupt.h"
#include "longspan/reference.h"
#include "ring/rows.h"
#include "util/half.h"

namespace longspan::cli {
namespace {

double number(const std::byte* row, DType dtype, std::int64_t column) {
  switch (dtype) {
    case DType::f64:
      return reinterpret_cast<const double*>(row)[column];
    case DType::bf16:
      return to_float(reinterpret_cast<const BFloat16*>(row)[column]);
    case DType::f16:
      return to_float(reinterpret_cast<const Float16*>(row)[column]);
    default:
      return reinterpret_cast<const float*>(row)[column];
  }
}

/// Infinite where only one of the two is a number, or both are infinite with different signs.
double difference(double left, double right) {
  if (left == right || (std::isnan(left) && std::isnan(right))) return 0;
  const double found = std::abs(left - right);
  return std::isfinite(found) ? found : std::numeric_limits<double>::infinity();
}

/// A row of the rank and its position.
struct Place {
  std::int64_t row = -1, position = -1;
};

/// Compares all rows; returns where the difference is largest.
Place find_difference(RingCheck& check, const ConstTensorView& mine, const ConstTensorView& whole,
                      std::span<const RowRange> ranges) {
  Place worst;
  for_each_position(ranges, [&](std::int64_t row, std::int64_t position) {
    if (row % 1024 == 0) stop_if_interrupted();
    for (std::int64_t entry = 0; entry < mine.batch(); ++entry) {
      for (std::int64_t head = 0; head < mine.heads(); ++head) {
        const std::byte *left = row_at(mine, entry, row, head), *right = row_at(whole, entry, position, head);
        if (std::memcmp(left, right, row_bytes(mine)) == 0) continue;
        check.same_bits = false;
        for (std::int64_t column = 0; column < mine.columns(); ++column) {
          const double found = difference(number(left, mine.dtype, column), number(right, mine.dtype, column));
          if (found <= check.largest_difference) continue;
          check.largest_difference = found;
          worst = {row, position};
        }
      }
    }
  });
  return worst;
}

/// Relative error that mixing adds. Each round multiplies what was summed by exp(lse - new lse), where both logarithms
/// err by an ulp of their size, and rounds three times more; rounds err independently, in the mean square by
/// u / sqrt(3) each, and 4 standard deviations are allowed, as in the reference's tolerances.
double mixing_error(const WholeResults& whole, std::int64_t rounds) {
  double largest = 0;
  const ConstTensorView& lse = whole.lse;
  for (std::int64_t entry = 0; entry < lse.batch(); ++entry) {
    for (std::int64_t head = 0; head < lse.heads(); ++head) {
      for (std::int64_t row = 0; row < lse.rows(); ++row) {
        const double value = std::abs(number(row_at(lse, entry, row, head), lse.dtype, 0));
        if (std::isfinite(value)) largest = std::max(largest, value);
      }
    }
  }
  const double unit = lse.dtype == DType::f64 ? 0x1p-53 : 0x1p-24;
  return 4 * unit / std::sqrt(3.0) * std::sqrt(static_cast<double>(rounds)) * (2 * largest + 3);
}

/// The row at one position by the definition; gradients only if there are any.
reference::Expectation expected_at(const Attention& attention, const Call& call, const WholeResults& whole,
                                   std::int64_t position) {
  if (whole.dout.given()) {
    return reference::expected_rows(attention, whole.q, whole.k, whole.v, whole.out, whole.lse, whole.dout, call,
                                    {&position, 1});
  }
  const reference::GatheredRows q(whole.q, {&position, 1});
  const RowRange range{position, 1};
  Call one = call;
  one.query_ranges = {&range, 1};
  return reference::expected(attention, q.view(), whole.k, whole.v, {}, one, false);
}

/// Holds the rank's row at one place against what it should be. (The tensors: one row of every entry and head.)
void judge(RingCheck& check, const ConstTensorView& mine, const ConstTensorView& whole, Place place,
           const reference::ExpectedTensor& expected, double more_relative) {
  std::size_t element = 0;
  check.over_tolerance = -1;
  for (std::int64_t entry = 0; entry < mine.batch(); ++entry) {
    for (std::int64_t head = 0; head < mine.heads(); ++head) {
      const std::byte* const row = row_at(mine, entry, place.row, head);
      const std::byte* const other = row_at(whole, entry, place.position, head);
      for (std::int64_t column = 0; column < mine.columns(); ++column, ++element) {
        const double got = number(row, mine.dtype, column), want = expected.value[element];
        const double error = difference(got, want);
        const double allowed = (expected.relative + more_relative) * expected.magnitude[element] + expected.absolute;
        double over = error == 0 ? 0 : error / allowed;
        if (std::isnan(over)) over = std::numeric_limits<double>::infinity();  // a NaN, or neither can be bounded
        if (over <= check.over_tolerance) continue;
        check.over_tolerance = over;
        check.largest_error = error;
        check.worst = fmt::format(
            "{} at position {} (entry {}, head {}, column {}) is {}, one device has {}, the float64 definition {}: an "
            "error of {:.3g}, allowed {:.3g}",
            check.name, place.position, entry, head, column, got, number(other, mine.dtype, column), want, error,
            allowed);
      }
    }
  }
}

}  // namespace

std::vector<RingCheck> check_ring(const Attention& attention, const Call& call, const WholeResults& whole,
                                  const WholeResults& mine, std::span<const RowRange> ranges, std::int64_t rounds) {
  struct Quantity {
    const char* name;
    ConstTensorView WholeResults::*tensor;
    reference::ExpectedTensor reference::Expectation::*expected;
  };
  constexpr Quantity kQuantities[] = {{"out", &WholeResults::out, &reference::Expectation::out},
                                      {"lse", &WholeResults::lse, &reference::Expectation::lse},
                                      {"dq", &WholeResults::dq, &reference::Expectation::dq},
                                      {"dk", &WholeResults::dk, &reference::Expectation::dk},
                                      {"dv", &WholeResults::dv, &reference::Expectation::dv}};
  const double more = rounds > 0 ? mixing_error(whole, rounds) : 0;
  std::vector<RingCheck> checks;
  for (const Quantity& quantity : kQuantities) {
    const ConstTensorView &own = mine.*quantity.tensor, &all = whole.*quantity.tensor;
    if (!own.given()) continue;
    RingCheck& check = checks.emplace_back();
    check.name = quantity.name;
    const Place place = find_difference(check, own, all, ranges);
    if (place.row < 0) continue;
    judge(check, own, all, place, expected_at(attention, call, whole, place.position).*quantity.expected, more);
  }
  return checks;
}

Json describe(const RingCheck& check) {
  // JSON has no infinity: it would become null on the way to rank 0.
  const auto finite = [](double value) { return std::min(value, std::numeric_limits<double>::max()); };
  return {{"name", check.name},
          {"same_bits", check.same_bits},
          {"largest_difference", finite(check.largest_difference)},
          {"largest_error", finite(check.largest_error)},
          {"over_tolerance", finite(check.over_tolerance)},
          {"worst", check.worst}};
}

}  // namespace longspan::cli
