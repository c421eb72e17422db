// Forward of the oracle (docs/definition.md, section 4): for each row, all scores, their largest, the denominator, the
// weighted sum.
#include "kernels/reference/definition.h"
#include "kernels/reference/reference.h"

namespace longspan {
namespace reference {

RowResult attend(const Definition& definition, std::size_t first_branch, std::size_t last_branch, std::int64_t entry,
                 std::int64_t head, std::int64_t q_row, std::int64_t position) {
  std::vector<Pair> pairs;
  std::vector<double> scores;
  double largest = -INFINITY, padding = 0;
  for (std::size_t b = first_branch; b < last_branch; ++b) {
    definition.for_each_key(b, entry, head, position, [&](const Pair& pair) {
      pairs.push_back(pair);
      scores.push_back(definition.score(entry, head, q_row, position, pair.key));
      if (scores.back() > largest) largest = scores.back();
    });
    padding += definition.padding(b, entry, head, position);
  }
  RowResult result;
  result.out.assign(static_cast<std::size_t>(definition.head_dim()), 0.0);
  if (pairs.empty() && padding == 0) return result;
  if (padding > 0 && largest < 0) largest = 0;
  // Scores that are all NaN (or -inf) leave no largest; NaN must still come out as NaN.
  if (largest == -INFINITY) largest = 0;

  double denominator = padding > 0 ? padding * std::exp(-largest) : 0;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const double weight = std::exp(scores[i] - largest);
    denominator += weight;
    const double kept = weight * definition.dropout_factor(entry, head, position, pairs[i]);
    const Row value = definition.value_row(entry, head, pairs[i].key);
    for (std::int64_t column = 0; column < definition.head_dim(); ++column) {
      result.out[static_cast<std::size_t>(column)] += kept * value[column];
    }
  }
  if (denominator == 0) {
    result.out.assign(result.out.size(), 0.0);
    return result;
  }
  for (double& value : result.out) value /= denominator;
  result.lse = largest + std::log(denominator);
  return result;
}

}  // namespace reference

void reference_forward(const ForwardArguments& a) {
  const reference::Definition definition(a);
  definition.for_each_query(
      a.threads, 0, 1, [&](std::int64_t entry, std::int64_t head, std::int64_t row, std::int64_t position) {
        const auto result = reference::attend(definition, 0, a.plan.branches().size(), entry, head, row, position);
        for (std::int64_t column = 0; column < definition.head_dim(); ++column) {
          reference::store(a.out, entry, row, head, column,
                           a.plan.output_scale() * result.out[static_cast<std::size_t>(column)]);
        }
        if (a.lse.given()) reference::store(a.lse, entry, row, head, 0, result.lse);
      });
}

namespace {

Verdict can_run(const Plan& plan, Pass) {
  if (plan.problem().device.type != DeviceType::cpu)
    return no("runs on the CPU, tensors are on {}", to_string(plan.problem().device));
  return yes();
}

// Row statistics of the backward live in vectors of its own: the oracle is not held to the workspace rules.
std::size_t workspace_bytes(const Plan&, Pass, int) { return 0; }

}  // namespace

const Kernel kReferenceKernel = {"reference", can_run, workspace_bytes, reference_forward, reference_backward};

}  // namespace longspan
