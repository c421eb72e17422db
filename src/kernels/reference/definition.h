// Which keys a query attends to, and the score of a pair: docs/definition.md, written as loops over positions. Sections
// in comments are that page's. Deliberately independent of the strand arithmetic that the other kernels use.
#pragma once

#include <cmath>
#include <cstdlib>
#include <vector>

#include "kernels/kernel.h"
#include "plan/key_rows.h"
#include "util/dispatch.h"
#include "util/parallel.h"
#include "util/philox.h"

namespace longspan::reference {

/// A row of any floating-point dtype, read as double.
class Row {
 public:
  Row(const ConstTensorView& view, std::int64_t entry, std::int64_t row, std::int64_t head)
      : Row(static_cast<const std::byte*>(view.data) + view.offset(entry, row, head) * size_of(view.dtype), view.dtype,
            view.columns()) {}
  Row(const void* data, DType dtype, std::int64_t columns) {
    if (dtype == DType::f64) {
      values_ = static_cast<const double*>(data);
      return;
    }
    dispatch_storage(dtype, [&]<class Storage>() {
      for (std::int64_t column = 0; column < columns; ++column)
        converted_[column] = to_float(static_cast<const Storage*>(data)[column]);
    });
    values_ = converted_;
  }
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;
  double operator[](std::int64_t column) const { return values_[column]; }

 private:
  const double* values_;
  double converted_[256];
};

inline double dot(const Row& a, const Row& b, std::int64_t columns) {
  double sum = 0;
  for (std::int64_t column = 0; column < columns; ++column) sum += a[column] * b[column];
  return sum;
}

/// Writes one value in the tensor's own dtype.
inline void store(const TensorView& view, std::int64_t entry, std::int64_t row, std::int64_t head, std::int64_t column,
                  double value) {
  dispatch_storage(view.dtype, [&]<class Storage>() {
    Storage* const target = view.at<Storage>(entry, row, head) + column;
    if constexpr (std::is_same_v<Storage, double>) *target = value;
    else *target = from_float<Storage>(static_cast<float>(value));
  });
}

/// One attended pair: key position `key` is the `index`-th row of the query's strand in branch `branch`.
struct Pair {
  std::int64_t branch = 0;
  std::int64_t index = 0;
  std::int64_t key = 0;
};

/// What forward and backward share: the problem, and the loops of the definition.
class Definition {
 public:
  /// Arguments of forward or backward: both have these.
  template <class Arguments>
  explicit Definition(const Arguments& a)
      : plan(a.plan),
        call(a.call),
        ranges(a.ranges),
        q(a.q),
        k(a.k),
        v(a.v),
        keys(k, v, call.pieces),
        dropout(plan.options().dropout, call.dropout_seed_pointer ? *call.dropout_seed_pointer : call.dropout_seed) {}

  std::int64_t heads() const { return plan.problem().heads; }
  std::int64_t head_dim() const { return plan.problem().head_dim; }
  /// Section 1: grouped queries.
  std::int64_t kv_head(std::int64_t head) const { return head / (heads() / plan.problem().kv_heads); }
  /// Section 5.1.
  std::int64_t length(std::int64_t entry) const { return rows_of_entry(call.lengths, entry, plan.problem().tokens); }

  /// Calls body(entry, head, q_row, position) for every query, in parallel over rows.
  template <class Body>
  void for_each_query(int threads, double progress_begin, double progress_end, Body&& body) const {
    const std::int64_t rows = plan.problem().query_rows;
    const LoopControl control{call.cancel, &call.progress, progress_begin, progress_end};
    parallel_for(threads, plan.problem().batch * heads() * rows, control, [&](int, std::int64_t item) {
      const std::int64_t row = item % rows, head = item / rows % heads(), entry = item / rows / heads();
      body(entry, head, row, position_of(row));
    });
  }

  /// Section 1: rows of q are the positions of the query ranges.
  std::int64_t position_of(std::int64_t q_row) const {
    for (const RowRange& range : ranges) {
      if (q_row < range.count) return range.start + q_row;
      q_row -= range.count;
    }
    return -1;
  }

  /// Section 3.2: whether the branch covers the position.
  bool takes_part(const BranchPlan& branch, std::int64_t entry, std::int64_t head, std::int64_t position) const {
    const std::int64_t rows = length(entry);
    return position < rows && branch.owns(head) && branch.active(rows) && branch.covers(head, position);
  }

  /// Section 3.2: positions of the strand that `position` belongs to in a branch, in order: body(index, position).
  template <class Body>
  void for_each_strand_row(const BranchPlan& branch, std::int64_t entry, std::int64_t head, std::int64_t position,
                           Body&& body) const {
    const std::int64_t begin = position / branch.segment * branch.segment;
    std::int64_t index = 0;
    for (std::int64_t other = begin + branch.phase(head); other < length(entry) && other - begin < branch.segment;
         other += branch.dilation) {
      body(index++, other);
    }
  }

  /// Sections 3.1 (causal), 3.5 and 5.2: whether the query (row `query_index` of its strand) attends to the key (row
  /// `key_index`), both positions given.
  bool attends(const BranchPlan& branch, std::int64_t entry, std::int64_t head, std::int64_t query_index,
               std::int64_t query, std::int64_t key_index, std::int64_t key) const {
    if (plan.options().causal && key > query) return false;
    if (branch.mask && !branch.mask->active(branch.mask_head(entry, head), query_index / branch.mask->block_size(),
                                            key_index / branch.mask->block_size()))
      return false;
    return key_allowed(call.key_mask, entry, key);
  }

  /// Section 4, K_b(i): calls body(pair) for every key that branch `b` gives the query.
  template <class Body>
  void for_each_key(std::size_t b, std::int64_t entry, std::int64_t head, std::int64_t position, Body&& body) const {
    const BranchPlan& branch = plan.branches()[b];
    if (!takes_part(branch, entry, head, position)) return;
    const std::int64_t own_index = position % branch.segment / branch.dilation;
    for_each_strand_row(branch, entry, head, position, [&](std::int64_t index, std::int64_t key) {
      if (attends(branch, entry, head, own_index, position, index, key))
        body(Pair{static_cast<std::int64_t>(b), index, key});
    });
  }

  /// Section 3.4, pad_b: zero keys with score 0 and value 0.
  double padding(std::size_t b, std::int64_t entry, std::int64_t head, std::int64_t position) const {
    const BranchPlan& branch = plan.branches()[b];
    if (!branch.pad_keys || plan.options().causal || !takes_part(branch, entry, head, position)) return 0;
    std::int64_t count = 0;
    for_each_strand_row(branch, entry, head, position, [&](std::int64_t, std::int64_t) { ++count; });
    const std::int64_t longest = std::min(branch.segment, length(entry));
    return static_cast<double>((longest + branch.dilation - 1) / branch.dilation - count);
  }

  Row key_row(std::int64_t entry, std::int64_t head, std::int64_t position) const {
    return Row(run(entry, head, position).k, k.dtype, head_dim());
  }
  Row value_row(std::int64_t entry, std::int64_t head, std::int64_t position) const {
    return Row(run(entry, head, position).v, v.dtype, head_dim());
  }

  /// Section 2, with the bias of 5.3.
  double score(std::int64_t entry, std::int64_t head, std::int64_t q_row, std::int64_t position,
               std::int64_t key) const {
    double value = plan.scale() * dot(Row(q, entry, q_row, head), key_row(entry, head, key), head_dim());
    if (call.alibi_slopes.given()) {
      value -=
          static_cast<double>(*call.alibi_slopes.at<float>(0, 0, head)) * static_cast<double>(std::abs(position - key));
    }
    return value;
  }

  /// Sections 5.4 and 6, M: 1 without dropout, else 0 or 1 / (1 - P / 65536).
  double dropout_factor(std::int64_t entry, std::int64_t head, std::int64_t position, const Pair& pair) const {
    if (!dropout.drops()) return 1;
    return dropout.keeps(position, pair.index, pair.branch * heads() + head, entry) ? dropout.keep_factor() : 0;
  }

  const Plan& plan;
  const Call& call;
  const std::span<const RowRange> ranges;
  const ConstTensorView& q;
  const ConstTensorView& k;
  const ConstTensorView& v;
  const KeyRows keys;
  const DropoutRule dropout;

 private:
  RowRun run(std::int64_t entry, std::int64_t head, std::int64_t position) const {
    return keys.run(entry, kv_head(head), Strand{position, 1, 1}, 0, 1);
  }
};

/// Section 4: softmax over some branches' keys of one query, as log of the denominator and the weighted sum of values
/// (without output_scale).
struct RowResult {
  double lse = -INFINITY;
  std::vector<double> out;
};

RowResult attend(const Definition& definition, std::size_t first_branch, std::size_t last_branch, std::int64_t entry,
                 std::int64_t head, std::int64_t q_row, std::int64_t position);

}  // namespace longspan::reference
