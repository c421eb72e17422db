// Backward of the fallback kernel: dq row by row, then dk and dv key by key. Scores are computed again in both passes
// (7 products instead of 5), which needs no accumulators and gives one fixed order of sums.
#include "kernels/plain/plain.h"
#include "kernels/plain/rows.h"
#include "util/dispatch.h"
#include "util/parallel.h"

namespace longspan::plain {
namespace {

constexpr std::int64_t kRowsPerItem = 16;

/// One delta per query row, or one per query row and branch with detached_mix.
std::int64_t deltas_per_row(const Plan& plan) {
  return plan.options().detached_mix ? static_cast<std::int64_t>(plan.branches().size()) : 1;
}

template <class Storage>
class Backward {
 public:
  explicit Backward(const BackwardArguments& arguments)
      : a(arguments),
        problem(a.plan.problem()),
        rows(a),
        columns(problem.head_dim),
        output_scale(static_cast<float>(a.plan.output_scale())),
        deltas_(reinterpret_cast<float*>(a.workspace)),
        per_row_(deltas_per_row(a.plan)) {}

  void run() {
    for_each_query_block(0, 0.5, [&](std::int64_t entry, std::int64_t head, std::int64_t row, std::int64_t position) {
      query_gradient(entry, head, row, position);
    });
    const LoopControl control{a.call.cancel, &a.call.progress, 0.5, 1};
    if (!problem.has_piece_gradients)
      return for_each_key_block(problem.tokens, problem.kv_heads, control,
                                [&](std::int64_t entry, std::int64_t kv_head, std::int64_t key) {
                                  LongSum dk(columns), dv(columns);
                                  key_gradient(entry, kv_head, key, dk, dv);
                                  store(a.dk.template at<Storage>(entry, key, kv_head), dk.total(), 1.0f, columns);
                                  store(a.dv.template at<Storage>(entry, key, kv_head), dv.total(), 1.0f, columns);
                                });
    for (const KeyPiece& piece : a.call.pieces) {
      for_each_key_block(piece.k.rows(), piece.k.heads(), control,
                         [&](std::int64_t entry, std::int64_t head, std::int64_t row) {
                           LongSum dk(columns), dv(columns);
                           key_gradient(entry, piece.kv_head + head, piece.first + row * piece.step, dk, dv);
                           const auto add = [&](const TensorView& view, LongSum& sums) {
                             add_scaled<float>(view.template at<float>(entry, row, head), 1.0f,
                                               reinterpret_cast<const std::byte*>(sums.total()), columns);
                           };
                           add(piece.dk, dk);
                           add(piece.dv, dv);
                         });
    }
  }

 private:
  template <class Body>
  void for_each_key_block(std::int64_t count, std::int64_t heads, const LoopControl& control, Body&& body) {
    const std::int64_t blocks = (count + kRowsPerItem - 1) / kRowsPerItem;
    parallel_for(a.threads, problem.batch * heads * blocks, control, [&](int, std::int64_t item) {
      const std::int64_t block = item % blocks, head = item / blocks % heads, entry = item / blocks / heads;
      const std::int64_t last = std::min((block + 1) * kRowsPerItem, count);
      for (std::int64_t row = block * kRowsPerItem; row < last; ++row) body(entry, head, row);
    });
  }

  template <class Body>
  void for_each_query_block(double begin, double end, Body&& body) {
    const std::int64_t blocks = (problem.query_rows + kRowsPerItem - 1) / kRowsPerItem;
    const LoopControl control{a.call.cancel, &a.call.progress, begin, end};
    parallel_for(a.threads, problem.batch * problem.heads * blocks, control, [&](int, std::int64_t item) {
      const std::int64_t block = item % blocks, head = item / blocks % problem.heads,
                         entry = item / blocks / problem.heads;
      const std::int64_t last = std::min((block + 1) * kRowsPerItem, problem.query_rows);
      PositionCursor cursor(a.ranges, block * kRowsPerItem);
      for (std::int64_t row = block * kRowsPerItem; row < last; ++row) body(entry, head, row, cursor.next());
    });
  }

  static const std::byte* bytes(const ConstTensorView& view, std::int64_t entry, std::int64_t row, std::int64_t head) {
    return reinterpret_cast<const std::byte*>(view.at<Storage>(entry, row, head));
  }

  float* deltas(std::int64_t entry, std::int64_t head, std::int64_t row) const {
    return deltas_ + ((entry * problem.heads + head) * problem.query_rows + row) * per_row_;
  }
  float delta(std::int64_t entry, std::int64_t head, std::int64_t row, std::int64_t branch) const {
    return deltas(entry, head, row)[per_row_ == 1 ? 0 : branch];
  }

  void query_gradient(std::int64_t entry, std::int64_t head, std::int64_t row, std::int64_t position) {
    FloatRow q, dout;
    LongSum dq(columns);
    load<Storage>(q.data(), bytes(a.q, entry, row, head), columns);
    load<Storage>(dout.data(), bytes(a.dout, entry, row, head), columns);
    float* const own_deltas = deltas(entry, head, row);
    if (!a.plan.options().detached_mix)
      own_deltas[0] = dot<Storage>(dout.data(), bytes(a.out, entry, row, head), columns);
    const float lse = *a.lse.at<float>(entry, row, head);
    const float dlse = a.call.dlse.given() ? *a.call.dlse.at<float>(entry, row, head) : 0.0f;
    RowInBranch found;
    for (std::size_t b = 0; b < a.plan.branches().size(); ++b) {
      if (!rows.find(b, entry, head, position, found)) continue;
      if (a.plan.options().detached_mix) {
        SoftmaxState own;
        own.add(rows, found, q.data(), entry, head, position);
        own_deltas[b] = output_scale * own.inverse() *
                        dot<float>(dout.data(), reinterpret_cast<const std::byte*>(own.out.data()), columns);
      }
      // A row that saw no key passes no gradient on, whatever dout holds.
      if (lse == -std::numeric_limits<float>::infinity()) continue;
      rows.for_each_key(
          found, entry, head, 0, found.end,
          [&](std::int64_t index, const std::byte* key_row, const std::byte* value_row) {
            const float probability = weight_of(rows.score(q.data(), key_row, head, position, found, index) - lse);
            const float dweight = output_scale * dot<Storage>(dout.data(), value_row, columns);
            const float dscore = probability * (rows.factor(found, entry, head, position, index) * dweight -
                                                own_deltas[per_row_ == 1 ? 0 : b] + dlse);
            dq.add<Storage>(rows.scale * dscore, key_row);
          });
    }
    store(a.dq.template at<Storage>(entry, row, head), dq.total(), 1.0f, columns);
  }

  void key_gradient(std::int64_t entry, std::int64_t kv_head, std::int64_t key, LongSum& dk, LongSum& dv) {
    FloatRow key_row, value_row;
    const std::int64_t group = problem.heads / problem.kv_heads;
    bool loaded = false;
    for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      RowInBranch of_key;
      for (std::size_t b = 0; b < a.plan.branches().size(); ++b) {
        if (!rows.find(b, entry, head, key, of_key) || !key_allowed(a.call.key_mask, entry, key)) continue;
        if (!loaded) {
          const RowRun run = rows.keys.run(entry, kv_head, of_key.strand, of_key.own_index, 1);
          if (run.count == 0) continue;  // in no piece: no query of this call attends to it
          load<Storage>(key_row.data(), run.k, columns);
          load<Storage>(value_row.data(), run.v, columns);
          loaded = true;
        }
        std::int64_t first_row = 0;
        for (const RowRange& range : a.ranges) {
          const QueryRun queries = query_run(of_key.strand, range, first_row);
          first_row += range.count;
          for (std::int64_t i = 0; i < queries.count; ++i) {
            const std::int64_t index = queries.begin + i;
            if (a.plan.options().causal && index < of_key.own_index) continue;
            add_query(entry, head, queries.q_row + i * of_key.strand.stride, index, key, of_key, key_row, value_row, dk,
                      dv);
          }
        }
      }
    }
  }

  /// Adds what one query, row `index` of the key's strand, contributes to the key's gradients.
  void add_query(std::int64_t entry, std::int64_t head, std::int64_t row, std::int64_t index, std::int64_t key,
                 const RowInBranch& of_key, const FloatRow& key_row, const FloatRow& value_row, LongSum& dk,
                 LongSum& dv) {
    if (of_key.branch->mask) {
      const std::int64_t size = of_key.branch->mask->block_size();
      if (!of_key.branch->mask->active(of_key.branch->mask_head(entry, head), index / size, of_key.own_index / size))
        return;
    }
    const float lse = *a.lse.at<float>(entry, row, head);
    if (lse == -std::numeric_limits<float>::infinity()) return;
    const std::int64_t position = of_key.strand.start + index * of_key.strand.stride;
    const std::byte* const q = bytes(a.q, entry, row, head);
    const std::byte* const dout = bytes(a.dout, entry, row, head);
    const float score = rows.scale * dot<Storage>(key_row.data(), q, columns) - rows.bias(head, position, key);
    const float probability = weight_of(score - lse);
    const float factor = rows.factor(of_key, entry, head, position, of_key.own_index);
    const float dweight = output_scale * dot<Storage>(value_row.data(), dout, columns);
    const float dlse = a.call.dlse.given() ? *a.call.dlse.at<float>(entry, row, head) : 0.0f;
    const float dscore = probability * (factor * dweight - delta(entry, head, row, of_key.branch_index) + dlse);
    dk.add<Storage>(rows.scale * dscore, q);
    dv.add<Storage>(probability * factor * output_scale, dout);
  }

  const BackwardArguments& a;
  const Problem& problem;
  const Rows<Storage> rows;
  const std::int64_t columns;
  const float output_scale;
  float* const deltas_;
  const std::int64_t per_row_;
};

}  // namespace

std::size_t backward_workspace(const Plan& plan) {
  const Problem& problem = plan.problem();
  return static_cast<std::size_t>(problem.batch * problem.heads * problem.query_rows * deltas_per_row(plan)) *
         sizeof(float);
}

void backward(const BackwardArguments& arguments) {
  dispatch_storage(arguments.q.dtype, [&]<class Storage>() {
    if constexpr (!std::is_same_v<Storage, double>) Backward<Storage>(arguments).run();
  });
}

}  // namespace longspan::plain
