// Row arithmetic and the streaming softmax of one query row, shared by forward and backward.
//   A key tile is up to 64 consecutive rows of a strand, counted from the strand's start, so that a row's bits do not
//   depend on which other rows are computed with it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "kernels/kernel.h"
#include "plan/key_rows.h"
#include "plan/query_rows.h"
#include "util/half.h"
#include "util/philox.h"

namespace longspan::plain {

inline constexpr std::int64_t kMaxHeadDim = 256;
inline constexpr std::int64_t kKeyTile = 64;
inline constexpr std::int64_t kLanes = 16;  // independent sums, so that the compiler may vectorise without reordering

/// The error of a float32 sum grows with the number of its terms, so sums close after this many.
inline constexpr std::int64_t kTermsPerSum = 2048;

using FloatRow = std::array<float, kMaxHeadDim>;

template <class Storage>
void load(float* target, const std::byte* source, std::int64_t columns) {
  const Storage* const typed = reinterpret_cast<const Storage*>(source);
  for (std::int64_t column = 0; column < columns; ++column) target[column] = to_float(typed[column]);
}

template <class Storage>
void store(Storage* target, const float* source, float factor, std::int64_t columns) {
  for (std::int64_t column = 0; column < columns; ++column)
    target[column] = from_float<Storage>(factor * source[column]);
}

template <class Storage>
float dot(const float* a, const std::byte* b, std::int64_t columns) {
  const Storage* const typed = reinterpret_cast<const Storage*>(b);
  float lanes[kLanes] = {};
  std::int64_t column = 0;
  for (; column + kLanes <= columns; column += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[column + lane] * to_float(typed[column + lane]);
  }
  for (std::int64_t lane = 0; column < columns; ++column, ++lane) lanes[lane] += a[column] * to_float(typed[column]);
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

template <class Storage>
void add_scaled(float* target, float factor, const std::byte* source, std::int64_t columns) {
  const Storage* const typed = reinterpret_cast<const Storage*>(source);
  for (std::int64_t column = 0; column < columns; ++column) target[column] += factor * to_float(typed[column]);
}

/// exp(x), at most 1, since large scores may exceed a stored lse by rounding; 0 where it would be denormal. NaN stays.
inline float weight_of(float x) {
  const float weight = std::exp(x > 0 ? 0.0f : x);
  return weight < std::numeric_limits<float>::min() ? 0.0f : weight;
}

/// A row of sums over many terms.
class LongSum {
 public:
  explicit LongSum(std::int64_t columns) : columns_(columns) { clear(open_); }

  template <class Storage>
  void add(float factor, const std::byte* source) {
    if (terms_ == kTermsPerSum) close();
    add_scaled<Storage>(open_.data(), factor, source, columns_);
    ++terms_;
  }
  const float* total() {
    if (any_closed_) close();
    return any_closed_ ? closed_.data() : open_.data();
  }

 private:
  void clear(FloatRow& row) { std::fill_n(row.begin(), columns_, 0.0f); }
  void close() {
    if (!any_closed_) clear(closed_);
    any_closed_ = true;
    add_scaled<float>(closed_.data(), 1.0f, reinterpret_cast<const std::byte*>(open_.data()), columns_);
    clear(open_);
    terms_ = 0;
  }

  FloatRow open_, closed_;
  const std::int64_t columns_;
  std::int64_t terms_ = 0;
  bool any_closed_ = false;
};

/// A query row's strand in one branch, and what narrows its keys.
struct RowInBranch {
  const BranchPlan* branch = nullptr;
  Strand strand;
  std::int64_t branch_index = 0;
  std::int64_t own_index = 0;  // the query's row in the strand
  std::int64_t end = 0;        // keys are rows [0, end) of the strand
  std::int64_t padding = 0;
};

/// The loops over branches and keys that forward and backward share.
template <class Storage>
class Rows {
 public:
  /// Arguments of forward or backward: both have these.
  template <class Arguments>
  explicit Rows(const Arguments& a)
      : plan(a.plan),
        call(a.call),
        keys(a.k, a.v, call.pieces),
        columns(plan.problem().head_dim),
        scale(static_cast<float>(plan.scale())),
        dropout(plan.options().dropout, call.dropout_seed_pointer ? *call.dropout_seed_pointer : call.dropout_seed) {}

  std::int64_t kv_head(std::int64_t head) const { return head / (plan.problem().heads / plan.problem().kv_heads); }
  std::int64_t length(std::int64_t entry) const { return rows_of_entry(call.lengths, entry, plan.problem().tokens); }

  /// Fills `found` if branch `index` covers the position.
  bool find(std::size_t index, std::int64_t entry, std::int64_t head, std::int64_t position, RowInBranch& found) const {
    const BranchPlan& branch = plan.branches()[index];
    const std::int64_t rows = length(entry);
    if (position >= rows || !branch.owns(head) || !branch.active(rows) || !branch.covers(head, position)) return false;
    found.branch = &branch;
    found.branch_index = static_cast<std::int64_t>(index);
    found.strand = branch.strand(head, position / branch.segment, rows);
    found.own_index = (position - found.strand.start) / branch.dilation;
    found.end = plan.options().causal ? found.own_index + 1 : found.strand.count;
    found.padding = branch.padding(found.strand, rows, plan.options().causal);
    return true;
  }

  bool attends(const RowInBranch& row, std::int64_t entry, std::int64_t head, std::int64_t key_index) const {
    if (row.branch->mask) {
      const std::int64_t size = row.branch->mask->block_size();
      if (!row.branch->mask->active(row.branch->mask_head(entry, head), row.own_index / size, key_index / size))
        return false;
    }
    return key_allowed(call.key_mask, entry, row.strand.start + key_index * row.strand.stride);
  }

  float bias(std::int64_t head, std::int64_t position, std::int64_t key) const {
    if (!call.alibi_slopes.given()) return 0;
    return *call.alibi_slopes.at<float>(0, 0, head) * static_cast<float>(std::abs(position - key));
  }

  /// 1 without dropout, else 0 or 1 / (1 - P / 65536).
  float factor(const RowInBranch& row, std::int64_t entry, std::int64_t head, std::int64_t position,
               std::int64_t key_index) const {
    if (!dropout.drops()) return 1;
    const std::int64_t branch_head = row.branch_index * plan.problem().heads + head;
    return dropout.keeps(position, key_index, branch_head, entry) ? static_cast<float>(dropout.keep_factor()) : 0.0f;
  }

  /// Calls body(key_index, key_row, value_row) for each key of rows [begin, end) that the query attends to.
  template <class Body>
  void for_each_key(const RowInBranch& row, std::int64_t entry, std::int64_t head, std::int64_t begin, std::int64_t end,
                    Body&& body) const {
    keys.for_each_run(entry, kv_head(head), row.strand, begin, end, [&](std::int64_t first, const RowRun& run) {
      for (std::int64_t i = 0; i < run.count; ++i) {
        if (attends(row, entry, head, first + i)) body(first + i, run.k + i * run.k_stride, run.v + i * run.v_stride);
      }
    });
  }

  float score(const float* q, const std::byte* key_row, std::int64_t head, std::int64_t position,
              const RowInBranch& row, std::int64_t key_index) const {
    return scale * dot<Storage>(q, key_row, columns) -
           bias(head, position, row.strand.start + key_index * row.strand.stride);
  }

  const Plan& plan;
  const Call& call;
  const KeyRows keys;
  const std::int64_t columns;
  const float scale;
  const DropoutRule dropout;
};

/// Streaming softmax: out is not divided by sum until the end.
struct SoftmaxState {
  float largest = -std::numeric_limits<float>::infinity();
  float sum = 0, closed_sum = 0;
  FloatRow out{}, closed_out{};

  /// Adds all keys (and padding) of one branch.
  template <class Storage>
  void add(const Rows<Storage>& rows, const RowInBranch& row, const float* q, std::int64_t entry, std::int64_t head,
           std::int64_t position) {
    for (std::int64_t tile = 0; tile < row.end; tile += kKeyTile) {
      if (tile > 0 && tile % kTermsPerSum == 0) close(rows.columns);
      std::array<float, kKeyTile> scores;
      std::array<const std::byte*, kKeyTile> values;
      std::array<std::int64_t, kKeyTile> indices;
      std::size_t count = 0;
      float tile_largest = largest;
      rows.for_each_key(row, entry, head, tile, std::min(tile + kKeyTile, row.end),
                        [&](std::int64_t index, const std::byte* key_row, const std::byte* value_row) {
                          scores[count] = rows.score(q, key_row, head, position, row, index);
                          tile_largest = std::max(tile_largest, scores[count]);
                          values[count] = value_row;
                          indices[count++] = index;
                        });
      if (count == 0) continue;
      raise(tile_largest, rows.columns);
      for (std::size_t i = 0; i < count; ++i) {
        const float weight = weight_of(scores[i] - base());
        sum += weight;
        add_scaled<Storage>(out.data(), weight * rows.factor(row, entry, head, position, indices[i]), values[i],
                            rows.columns);
      }
    }
    if (row.padding > 0) {
      raise(std::max(largest, 0.0f), rows.columns);
      sum += static_cast<float>(row.padding) * std::exp(-base());
    }
    close(rows.columns);
    std::swap(sum, closed_sum);
    std::swap(out, closed_out);
  }

  float lse() const { return sum == 0 ? -std::numeric_limits<float>::infinity() : base() + std::log(sum); }
  float inverse() const { return sum == 0 ? 0.0f : 1.0f / sum; }

 private:
  /// What is subtracted from scores: 0 while there is no finite largest, so that NaN stays NaN and -inf stays -inf.
  float base() const { return largest == -std::numeric_limits<float>::infinity() ? 0.0f : largest; }

  void raise(float to, std::int64_t columns) {
    if (!(to > largest)) return;
    const float correction = std::exp(largest - to);
    largest = to;
    // Nothing summed yet: there is nothing to correct, and 0 * NaN must not appear from nowhere.
    if (sum != 0) correct(sum, out, correction, columns);
    if (closed_sum != 0) correct(closed_sum, closed_out, correction, columns);
  }
  static void correct(float& sum, FloatRow& out, float correction, std::int64_t columns) {
    sum *= correction;
    for (std::int64_t column = 0; column < columns; ++column) out[static_cast<std::size_t>(column)] *= correction;
  }
  void close(std::int64_t columns) {
    closed_sum += sum;
    add_scaled<float>(closed_out.data(), 1.0f, reinterpret_cast<const std::byte*>(out.data()), columns);
    sum = 0;
    out.fill(0.0f);
  }
};

}  // namespace longspan::plain
