// Backward of the oracle: dq by queries, dk and dv by keys, each straight from docs/definition.md, section 6.
//   P = exp(s - lse)   dP = c dO . v   dS = P (M dP - delta + dlse)   dq = scale dS k   dk = scale dS q   dv = P M c dO
#include <vector>

#include "kernels/reference/definition.h"
#include "kernels/reference/reference.h"

namespace longspan {
namespace reference {
namespace {

/// delta of every query: rowsum(dO . out), or one per branch from that branch's own softmax (detached_mix).
class Deltas {
 public:
  Deltas(const Definition& definition, const BackwardArguments& a)
      : branches_(a.plan.options().detached_mix ? a.plan.branches().size() : 1),
        rows_(a.plan.problem().query_rows),
        heads_(a.plan.problem().heads),
        values_(branches_ * static_cast<std::size_t>(a.plan.problem().batch * heads_ * rows_)) {
    const std::int64_t columns = definition.head_dim();
    definition.for_each_query(a.threads, 0, 0.1,
                              [&](std::int64_t entry, std::int64_t head, std::int64_t row, std::int64_t position) {
                                const Row dout(a.dout, entry, row, head);
                                for (std::size_t b = 0; b < branches_; ++b) {
                                  double delta = 0;
                                  if (a.plan.options().detached_mix) {
                                    const RowResult own = attend(definition, b, b + 1, entry, head, row, position);
                                    for (std::int64_t column = 0; column < columns; ++column)
                                      delta += dout[column] * own.out[static_cast<std::size_t>(column)];
                                    delta *= a.plan.output_scale();
                                  } else {
                                    delta = dot(dout, Row(a.out, entry, row, head), columns);
                                  }
                                  values_[index(b, entry, head, row)] = delta;
                                }
                              });
  }

  double operator()(std::int64_t branch, std::int64_t entry, std::int64_t head, std::int64_t row) const {
    return values_[index(branches_ == 1 ? 0 : static_cast<std::size_t>(branch), entry, head, row)];
  }

 private:
  std::size_t index(std::size_t branch, std::int64_t entry, std::int64_t head, std::int64_t row) const {
    return branch + branches_ * static_cast<std::size_t>((entry * heads_ + head) * rows_ + row);
  }
  std::size_t branches_;
  std::int64_t rows_, heads_;
  std::vector<double> values_;
};

/// P M and dS of one pair: docs/definition.md, section 6.
struct PairGradient {
  double weight = 0;
  double dscore = 0;
};

PairGradient pair_gradient(const Definition& definition, const BackwardArguments& a, const Deltas& deltas,
                           std::int64_t entry, std::int64_t head, std::int64_t row, std::int64_t position,
                           const Pair& pair) {
  const double lse = Row(a.lse, entry, row, head)[0];
  if (lse == -INFINITY) return {};
  const double probability = std::exp(definition.score(entry, head, row, position, pair.key) - lse);
  const double factor = definition.dropout_factor(entry, head, position, pair);
  const double dweight =
      a.plan.output_scale() *
      dot(Row(a.dout, entry, row, head), definition.value_row(entry, head, pair.key), definition.head_dim());
  const double dlse = a.call.dlse.given() ? Row(a.call.dlse, entry, row, head)[0] : 0.0;
  return {probability * factor, probability * (factor * dweight - deltas(pair.branch, entry, head, row) + dlse)};
}

void store_row(const TensorView& view, std::int64_t entry, std::int64_t row, std::int64_t head,
               const std::vector<double>& values) {
  for (std::size_t column = 0; column < values.size(); ++column) {
    store(view, entry, row, head, static_cast<std::int64_t>(column), values[column]);
  }
}

void query_gradients(const Definition& definition, const BackwardArguments& a, const Deltas& deltas) {
  const std::size_t columns = static_cast<std::size_t>(definition.head_dim());
  definition.for_each_query(
      a.threads, 0.1, 0.5, [&](std::int64_t entry, std::int64_t head, std::int64_t row, std::int64_t position) {
        std::vector<double> dq(columns, 0.0);
        for (std::size_t b = 0; b < a.plan.branches().size(); ++b) {
          definition.for_each_key(b, entry, head, position, [&](const Pair& pair) {
            const PairGradient gradient = pair_gradient(definition, a, deltas, entry, head, row, position, pair);
            const Row key = definition.key_row(entry, head, pair.key);
            for (std::size_t column = 0; column < columns; ++column) {
              dq[column] += a.plan.scale() * gradient.dscore * key[static_cast<std::int64_t>(column)];
            }
          });
        }
        store_row(a.dq, entry, row, head, dq);
      });
}

/// Calls write(entry, row, head, dk, dv) for rows 0 .. count - 1 of heads first_head .. first_head + heads - 1, where
/// row i is position position_of(i).
template <class Position, class Write>
void key_gradients(const Definition& definition, const BackwardArguments& a, const Deltas& deltas, std::int64_t count,
                   std::int64_t first_head, std::int64_t kv_heads, Position&& position_of, Write&& write) {
  const std::size_t columns = static_cast<std::size_t>(definition.head_dim());
  const std::int64_t group = definition.heads() / a.plan.problem().kv_heads;
  const LoopControl control{a.call.cancel, &a.call.progress, 0.5, 1.0};
  parallel_for(a.threads, a.plan.problem().batch * kv_heads * count, control, [&](int, std::int64_t item) {
    const std::int64_t target = item % count, kv_head = first_head + item / count % kv_heads,
                       entry = item / count / kv_heads;
    const std::int64_t key = position_of(target);
    std::vector<double> dk(columns, 0.0), dv(columns, 0.0);
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
              const PairGradient gradient = pair_gradient(definition, a, deltas, entry, head, row, query,
                                                          {static_cast<std::int64_t>(b), key_index, key});
              const Row query_row(a.q, entry, row, head), dout(a.dout, entry, row, head);
              for (std::size_t column = 0; column < columns; ++column) {
                const auto c = static_cast<std::int64_t>(column);
                dk[column] += a.plan.scale() * gradient.dscore * query_row[c];
                dv[column] += gradient.weight * a.plan.output_scale() * dout[c];
              }
            }
            first_row += range.count;
          }
        });
      }
    }
    write(entry, target, kv_head - first_head, dk, dv);
  });
}

/// What a piece holds, plus values.
void add_row(const TensorView& view, std::int64_t entry, std::int64_t row, std::int64_t head,
             std::vector<double> values) {
  const Row before(view, entry, row, head);
  for (std::size_t column = 0; column < values.size(); ++column)
    values[column] += before[static_cast<std::int64_t>(column)];
  store_row(view, entry, row, head, values);
}

}  // namespace
}  // namespace reference

void reference_backward(const BackwardArguments& a) {
  const reference::Definition definition(a);
  const reference::Deltas deltas(definition, a);
  reference::query_gradients(definition, a, deltas);
  if (!a.plan.problem().has_piece_gradients) {
    reference::key_gradients(
        definition, a, deltas, a.plan.problem().tokens, 0, a.plan.problem().kv_heads,
        [](std::int64_t row) { return row; },
        [&](std::int64_t entry, std::int64_t row, std::int64_t head, const std::vector<double>& dk,
            const std::vector<double>& dv) {
          reference::store_row(a.dk, entry, row, head, dk);
          reference::store_row(a.dv, entry, row, head, dv);
        });
    return;
  }
  for (const KeyPiece& piece : a.call.pieces) {
    reference::key_gradients(
        definition, a, deltas, piece.k.rows(), piece.kv_head, piece.k.heads(),
        [&](std::int64_t row) { return piece.first + row * piece.step; },
        [&](std::int64_t entry, std::int64_t row, std::int64_t head, const std::vector<double>& dk,
            const std::vector<double>& dv) {
          reference::add_row(piece.dk, entry, row, head, dk);
          reference::add_row(piece.dv, entry, row, head, dv);
        });
  }
}

void reference_backward_keys(const BackwardArguments& a, std::span<const std::int64_t> positions) {
  const reference::Definition definition(a);
  const reference::Deltas deltas(definition, a);
  reference::key_gradients(
      definition, a, deltas, static_cast<std::int64_t>(positions.size()), 0, a.plan.problem().kv_heads,
      [&](std::int64_t row) { return positions[static_cast<std::size_t>(row)]; },
      [&](std::int64_t entry, std::int64_t row, std::int64_t head, const std::vector<double>& dk,
          const std::vector<double>& dv) {
        reference::store_row(a.dk, entry, row, head, dk);
        reference::store_row(a.dv, entry, row, head, dv);
      });
}

}  // namespace longspan
