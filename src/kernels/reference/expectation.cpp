// Exact values, magnitudes and the rounded model, by the loops of the definition.
#include "kernels/reference/expectation.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "kernels/reference/definition.h"

namespace longspan::reference {
namespace {

constexpr double kLambda = 4;
constexpr double kTf32Roundoff = 0x1p-11;
constexpr std::size_t kEnoughForMeans = 512;
// Rounded weights give a query one delta, and that one error reaches every column of dq, dk and dv.
constexpr int kQueriesForMeans = 64;

double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return 0x1p-8;
    case DType::f16:
      return 0x1p-11;
    case DType::f32:
      return 0x1p-24;
    default:
      return 0x1p-53;
  }
}

double round_to(DType dtype, double value) {
  switch (dtype) {
    case DType::bf16:
      return to_float(from_float<BFloat16>(static_cast<float>(value)));
    case DType::f16:
      return to_float(from_float<Float16>(static_cast<float>(value)));
    default:
      return value;
  }
}

/// Keeps the largest of what threads report.
class Largest {
 public:
  void raise(double value) {
    double seen = value_.load(std::memory_order_relaxed);
    while (value > seen && !value_.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {}
  }
  double get() const { return value_.load(); }

 private:
  std::atomic<double> value_{0};
};

enum class Scope { forward, queries, keys, everything };

class Expecter {
 public:
  Expecter(const BackwardArguments& arguments, Scope chosen, std::span<const std::int64_t> chosen_keys = {})
      : a(arguments),
        scope(chosen),
        positions(chosen_keys),
        definition(arguments),
        problem(a.plan.problem()),
        columns(problem.head_dim),
        output_scale(a.plan.output_scale()),
        model(problem.dtype == DType::bf16 || problem.dtype == DType::f16) {
    resize(result.lse, problem.query_rows, problem.heads, 1);
    deltas_per_row = a.plan.options().detached_mix ? a.plan.branches().size() : 1;
    if (scope != Scope::forward) deltas.resize(result.lse.value.size() * deltas_per_row);
    if (scope != Scope::keys) resize(result.out, problem.query_rows, problem.heads, columns);
    if (scope == Scope::queries || scope == Scope::everything)
      resize(result.dq, problem.query_rows, problem.heads, columns);
    if (scope == Scope::keys || scope == Scope::everything) {
      resize(result.dk, key_count(), problem.kv_heads, columns);
      resize(result.dv, key_count(), problem.kv_heads, columns);
    }
  }

  Expectation run() {
    definition.for_each_query(a.threads, 0, 0.3,
                              [&](std::int64_t entry, std::int64_t head, std::int64_t row, std::int64_t position) {
                                if (scope == Scope::keys) given_row(entry, head, row, position);
                                else forward_row(entry, head, row, position);
                              });
    if (!result.dq.value.empty()) {
      definition.for_each_query(a.threads, 0.3, 0.6,
                                [&](std::int64_t entry, std::int64_t head, std::int64_t row, std::int64_t position) {
                                  query_row(entry, head, row, position);
                                });
    }
    if (!result.dk.value.empty()) {
      const std::int64_t count = key_count();
      parallel_for(a.threads, problem.batch * problem.kv_heads * count, LoopControl{a.call.cancel},
                   [&](int, std::int64_t item) {
                     key_row(item / count / problem.kv_heads, item / count % problem.kv_heads, item % count);
                   });
    }
    set_tolerances();
    return std::move(result);
  }

 private:
  struct Terms {  // of one pair
    double probability = 0, factor = 1, dscore = 0, dscore_magnitude = 0, dscore_model = 0;
  };

  void resize(ExpectedTensor& tensor, std::int64_t rows, std::int64_t heads, std::int64_t width) {
    const std::size_t size = static_cast<std::size_t>(problem.batch * rows * heads * width);
    tensor.value.assign(size, 0);
    tensor.magnitude.assign(size, 0);
    if (model) tensor.rounded.assign(size, 0);
  }

  std::int64_t key_count() const {
    return scope == Scope::keys ? static_cast<std::int64_t>(positions.size()) : problem.tokens;
  }

  std::size_t query_index(std::int64_t entry, std::int64_t row, std::int64_t head) const {
    return static_cast<std::size_t>((entry * problem.query_rows + row) * problem.heads + head);
  }

  /// Remembers the largest sum of absolute products behind a score.
  void note_score(std::int64_t entry, std::int64_t head, std::int64_t row, std::int64_t position,
                  std::int64_t key_position) {
    double products = 0, squares = 0;
    const Row q(a.q, entry, row, head), key = definition.key_row(entry, head, key_position);
    for (std::int64_t column = 0; column < columns; ++column) {
      products += std::abs(q[column] * key[column]);
      squares += q[column] * key[column] * q[column] * key[column];
    }
    products *= std::abs(a.plan.scale());
    largest_spread.raise(std::sqrt(squares) * std::abs(a.plan.scale()));
    if (a.call.alibi_slopes.given()) {
      products += std::abs(static_cast<double>(*a.call.alibi_slopes.at<float>(0, 0, head)) *
                           static_cast<double>(position - key_position));
    }
    largest_score.raise(products);
  }

  /// lse and delta of a row as the arguments give them, which is what a backward call sees.
  void given_row(std::int64_t entry, std::int64_t head, std::int64_t row, std::int64_t position) {
    const std::size_t index = query_index(entry, row, head);
    result.lse.value[index] = Row(a.lse, entry, row, head)[0];
    row_deltas(entry, head, row, position, index);
  }

  void forward_row(std::int64_t entry, std::int64_t head, std::int64_t row, std::int64_t position) {
    const RowResult exact = attend(definition, 0, a.plan.branches().size(), entry, head, row, position);
    const std::size_t index = query_index(entry, row, head);
    result.lse.value[index] = exact.lse;
    result.lse.magnitude[index] = exact.lse == -INFINITY ? 1 : 1 + std::abs(exact.lse);
    if (model) result.lse.rounded[index] = exact.lse;
    std::size_t keys = 0;
    for (std::size_t b = 0; b < a.plan.branches().size(); ++b) {
      definition.for_each_key(b, entry, head, position, [&](const Pair& pair) {
        ++keys;
        note_score(entry, head, row, position, pair.key);
        const Row value = definition.value_row(entry, head, pair.key);
        const double weight = std::exp(definition.score(entry, head, row, position, pair.key) - exact.lse);
        const double kept = weight * definition.dropout_factor(entry, head, position, pair) * output_scale;
        const double kept_model =
            round_to(problem.dtype, weight) * definition.dropout_factor(entry, head, position, pair) * output_scale;
        for (std::int64_t column = 0; column < columns; ++column) {
          const std::size_t element = index * static_cast<std::size_t>(columns) + static_cast<std::size_t>(column);
          result.out.value[element] += kept * value[column];
          result.out.magnitude[element] += std::abs(kept * value[column]);
          if (model) result.out.rounded[element] += kept_model * value[column];
        }
      });
    }
    most_terms.raise(static_cast<double>(keys));
    for (std::size_t element = index * static_cast<std::size_t>(columns);
         model && element < (index + 1) * static_cast<std::size_t>(columns); ++element) {
      result.out.rounded[element] = round_to(problem.dtype, result.out.rounded[element]);
    }
    if (!deltas.empty()) row_deltas(entry, head, row, position, index);
  }

  void row_deltas(std::int64_t entry, std::int64_t head, std::int64_t row, std::int64_t position, std::size_t index) {
    const Row dout(a.dout, entry, row, head), returned(scope == Scope::keys ? a.out : a.dout, entry, row, head);
    for (std::size_t b = 0; b < deltas_per_row; ++b) {
      std::vector<double> own;
      if (a.plan.options().detached_mix) own = attend(definition, b, b + 1, entry, head, row, position).out;
      Delta& delta = deltas[index * deltas_per_row + b];
      for (std::int64_t column = 0; column < columns; ++column) {
        const std::size_t element = index * static_cast<std::size_t>(columns) + static_cast<std::size_t>(column);
        const double exact = !own.empty()           ? output_scale * own[static_cast<std::size_t>(column)]
                             : scope == Scope::keys ? returned[column]
                                                    : result.out.value[element];
        delta.value += dout[column] * exact;
        delta.magnitude += std::abs(dout[column] * exact);
        delta.model += dout[column] * (own.empty() && scope != Scope::keys && model ? result.out.rounded[element]
                                                                                    : round_to(problem.dtype, exact));
      }
    }
  }

  Terms terms(std::int64_t entry, std::int64_t head, std::int64_t row, std::int64_t position, const Pair& pair) const {
    Terms t;
    const std::size_t index = query_index(entry, row, head);
    const double lse = result.lse.value[index];
    if (lse == -INFINITY) return t;
    t.probability = std::exp(definition.score(entry, head, row, position, pair.key) - lse);
    t.factor = definition.dropout_factor(entry, head, position, pair);
    double dweight = 0, dweight_magnitude = 0;
    const Row dout(a.dout, entry, row, head), value = definition.value_row(entry, head, pair.key);
    for (std::int64_t column = 0; column < columns; ++column) {
      dweight += output_scale * dout[column] * value[column];
      dweight_magnitude += std::abs(output_scale * dout[column] * value[column]);
    }
    const double dlse = a.call.dlse.given() ? Row(a.call.dlse, entry, row, head)[0] : 0;
    const Delta& delta =
        deltas[index * deltas_per_row + (deltas_per_row == 1 ? 0 : static_cast<std::size_t>(pair.branch))];
    t.dscore = a.plan.scale() * t.probability * (t.factor * dweight - delta.value + dlse);
    t.dscore_magnitude =
        std::abs(a.plan.scale()) * t.probability * (t.factor * dweight_magnitude + delta.magnitude + std::abs(dlse));
    t.dscore_model =
        round_to(problem.dtype, a.plan.scale() * t.probability * (t.factor * dweight - delta.model + dlse));
    return t;
  }

  /// target += factor * row, with its magnitude and its model.
  void add(ExpectedTensor& target, std::size_t first, double factor, double magnitude, double rounded, const Row& row) {
    for (std::int64_t column = 0; column < columns; ++column) {
      const std::size_t element = first + static_cast<std::size_t>(column);
      target.value[element] += factor * row[column];
      target.magnitude[element] += magnitude * std::abs(row[column]);
      if (model) target.rounded[element] += rounded * row[column];
    }
  }

  void round_row(ExpectedTensor& tensor, std::size_t first) {
    for (std::size_t element = first; model && element < first + static_cast<std::size_t>(columns); ++element) {
      tensor.rounded[element] = round_to(problem.dtype, tensor.rounded[element]);
    }
  }

  void query_row(std::int64_t entry, std::int64_t head, std::int64_t row, std::int64_t position) {
    const std::size_t first = query_index(entry, row, head) * static_cast<std::size_t>(columns);
    for (std::size_t b = 0; b < a.plan.branches().size(); ++b) {
      definition.for_each_key(b, entry, head, position, [&](const Pair& pair) {
        const Terms t = terms(entry, head, row, position, pair);
        add(result.dq, first, t.dscore, t.dscore_magnitude, t.dscore_model, definition.key_row(entry, head, pair.key));
      });
    }
    round_row(result.dq, first);
  }

  void key_row(std::int64_t entry, std::int64_t kv_head, std::int64_t target) {
    const std::int64_t key = scope == Scope::keys ? positions[static_cast<std::size_t>(target)] : target;
    const std::size_t first =
        static_cast<std::size_t>(((entry * key_count() + target) * problem.kv_heads + kv_head) * columns);
    const std::int64_t group = problem.heads / problem.kv_heads;
    std::size_t queries = 0;
    for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (std::size_t b = 0; b < a.plan.branches().size(); ++b) {
        const BranchPlan& branch = a.plan.branches()[b];
        if (!definition.takes_part(branch, entry, head, key)) continue;
        const std::int64_t key_index = key % branch.segment / branch.dilation;
        definition.for_each_strand_row(branch, entry, head, key, [&](std::int64_t index, std::int64_t query) {
          if (!definition.attends(branch, entry, head, index, query, key_index, key)) return;
          std::int64_t first_row = 0;
          for (const RowRange& range : a.ranges) {
            if (query >= range.start && query < range.start + range.count) {
              const std::int64_t row = first_row + query - range.start;
              const Terms t = terms(entry, head, row, query, {static_cast<std::int64_t>(b), key_index, key});
              const double weight = t.probability * t.factor * output_scale;
              if (scope == Scope::keys) note_score(entry, head, row, query, key);
              add(result.dk, first, t.dscore, t.dscore_magnitude, t.dscore_model, Row(a.q, entry, row, head));
              add(result.dv, first, weight, std::abs(weight),
                  round_to(problem.dtype, t.probability * t.factor) * output_scale, Row(a.dout, entry, row, head));
              ++queries;
            }
            first_row += range.count;
          }
        });
      }
    }
    round_row(result.dk, first);
    round_row(result.dv, first);
    most_terms.raise(static_cast<double>(queries));
  }

  void set_tolerances() {
    const double sums = problem.dtype == DType::f64 ? 0x1p-53 : 0x1p-24;
    const double head_dim = static_cast<double>(columns);
    const double computed =
        kLambda * sums * (2.0 / 3 * std::sqrt(head_dim) * largest_score.get() + std::sqrt(most_terms.get() / 3) + 8);
    const double storage = model ? unit_roundoff(problem.dtype) : 0.0;
    result.out.relative = 4 * storage + computed;
    result.lse.relative = storage / 16 + computed;
    for (ExpectedTensor* gradient : {&result.dq, &result.dk, &result.dv}) gradient->relative = 6 * storage + computed;
    if (problem.dtype == DType::f32 && a.plan.options().allow_tf32) {
      const double score = kLambda * std::sqrt(2.0 / 3) * kTf32Roundoff * largest_spread.get();
      result.out.relative += score + 4 * kTf32Roundoff;
      result.lse.relative += score;
      for (ExpectedTensor* gradient : {&result.dq, &result.dk, &result.dv})
        gradient->relative += 2 * score + 8 * kTf32Roundoff;
    }
    for (ExpectedTensor* tensor : {&result.out, &result.lse, &result.dq, &result.dk, &result.dv})
      tensor->relative32 = computed;
    // Below the smallest normal number a type rounds to multiples of its last bit, and bfloat16 products flush to zero:
    // each term of a sum may lose that much, times what it is multiplied with (a query or key times scale: at most 1 +
    // A; and P, before that, times a dP of head_dim products of order 1).
    const double terms = most_terms.get();
    const double lost = problem.dtype == DType::f64   ? 0.0
                        : problem.dtype == DType::f16 ? 0x1p-24 * (1 + 4 * std::sqrt(terms))
                                                      : 0x1p-126 * (1 + terms) * (1 + largest_score.get()) * head_dim;
    for (ExpectedTensor* tensor : {&result.out, &result.dq, &result.dk, &result.dv}) tensor->absolute = lost;
    const auto queries = std::ranges::count_if(result.lse.value, [](double lse) { return lse != -INFINITY; });
    if (queries >= kQueriesForMeans) return;
    for (ExpectedTensor* gradient : {&result.dq, &result.dk, &result.dv}) gradient->rounded.clear();
  }

  struct Delta {
    double value = 0, magnitude = 0, model = 0;
  };

  const BackwardArguments& a;
  const Scope scope;
  const std::span<const std::int64_t> positions;  // rows of dk and dv, for Scope::keys
  const Definition definition;
  const Problem& problem;
  const std::int64_t columns;
  const double output_scale;
  const bool model;
  std::size_t deltas_per_row = 1;
  std::vector<Delta> deltas;
  Largest largest_score, largest_spread, most_terms;
  Expectation result;
};

}  // namespace

Expectation expect(const BackwardArguments& arguments, bool gradients) {
  return Expecter(arguments, gradients ? Scope::everything : Scope::forward).run();
}

Expectation expect_queries(const BackwardArguments& arguments) { return Expecter(arguments, Scope::queries).run(); }

Expectation expect_keys(const BackwardArguments& arguments, std::span<const std::int64_t> positions) {
  return Expecter(arguments, Scope::keys, positions).run();
}

Comparison compare(const ConstTensorView& actual, const ExpectedTensor& expected) {
  Comparison comparison;
  double squared_error = 0, squared_model = 0;
  std::size_t element = 0, summed = 0;  // the latter: of those that are sums of anything
  for (std::int64_t entry = 0; entry < actual.batch(); ++entry) {
    for (std::int64_t row = 0; row < actual.rows(); ++row) {
      for (std::int64_t head = 0; head < actual.heads(); ++head) {
        const Row values(actual, entry, row, head);
        for (std::int64_t column = 0; column < actual.columns(); ++column, ++element) {
          const double want = expected.value[element], got = values[column];
          double error = std::abs(got - want);
          if (want == got) error = 0;  // infinities
          else if (!(error <= std::numeric_limits<double>::max()))
            error = std::numeric_limits<double>::infinity();  // NaN
          const double allowed = expected.relative * expected.magnitude[element] + expected.absolute;
          const double over = error == 0 ? 0 : error / allowed;
          comparison.largest_error = std::max(comparison.largest_error, error);
          if (!(over <= comparison.over_tolerance)) {
            comparison.over_tolerance = over;
            comparison.worst = fmt::format("entry {} row {} head {} column {}: {} instead of {}, allowed error {:.3g}",
                                           entry, row, head, column, got, want, allowed);
          }
          squared_error += error * error;
          summed += expected.magnitude[element] > 0;
          if (!expected.rounded.empty()) {
            squared_model += std::pow(expected.rounded[element] - want, 2) +
                             std::pow(expected.relative32 * expected.magnitude[element], 2);
          }
        }
      }
    }
  }
  if (!expected.rounded.empty() && actual.columns() > 1 && summed >= kEnoughForMeans && squared_model > 0) {
    comparison.rms_over_model = std::sqrt(squared_error / squared_model);
  }
  return comparison;
}

}  // namespace longspan::reference
