// adaptive(density): means of blocks of q and k, their products, the best columns of each row. O(N) memory: scores live
// one block row at a time.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "attention/call_masks.h"
#include "kernels/plain/rows.h"
#include "pattern/kept_columns.h"
#include "plan/key_rows.h"
#include "plan/query_rows.h"
#include "util/dispatch.h"
#include "util/parallel.h"

namespace longspan {
namespace {

/// Means of blocks of rows, [B][heads][blocks][columns]; NaN where a block has no rows.
class BlockMeans {
 public:
  BlockMeans(const Problem& problem, std::int64_t heads, std::int64_t blocks)
      : heads_(heads),
        blocks_(blocks),
        columns_(problem.head_dim),
        sums_(static_cast<std::size_t>(problem.batch * heads * blocks * columns_)),
        counts_(static_cast<std::size_t>(problem.batch * heads * blocks)) {}

  float* at(std::int64_t entry, std::int64_t head, std::int64_t block) {
    return sums_.data() + index(entry, head, block) * columns_;
  }
  void add(std::int64_t entry, std::int64_t head, std::int64_t block, const std::byte* row, DType dtype) {
    float* const target = at(entry, head, block);
    dispatch_storage(dtype, [&]<class Storage>() {
      const Storage* const values = reinterpret_cast<const Storage*>(row);
      for (std::int64_t column = 0; column < columns_; ++column)
        target[column] += static_cast<float>(to_float(values[column]));
    });
    ++counts_[static_cast<std::size_t>(index(entry, head, block))];
  }
  void divide(std::int64_t entry, std::int64_t head) {
    for (std::int64_t block = 0; block < blocks_; ++block) {
      const auto count = static_cast<float>(counts_[static_cast<std::size_t>(index(entry, head, block))]);
      float* const mean = at(entry, head, block);
      for (std::int64_t column = 0; column < columns_; ++column) mean[column] /= count;
    }
  }

 private:
  std::int64_t index(std::int64_t entry, std::int64_t head, std::int64_t block) const {
    return (entry * heads_ + head) * blocks_ + block;
  }
  std::int64_t heads_, blocks_, columns_;
  std::vector<float> sums_;
  std::vector<std::int32_t> counts_;
};

/// A better than B: larger scores first, NaN last, ties to the lower column.
bool better(const float* scores, std::int32_t a, std::int32_t b) {
  const bool a_is_nan = std::isnan(scores[a]), b_is_nan = std::isnan(scores[b]);
  if (a_is_nan != b_is_nan) return b_is_nan;
  if (!a_is_nan && scores[a] != scores[b]) return scores[a] > scores[b];
  return a < b;
}

}  // namespace

BlockMask choose_blocks(const Plan& plan, std::size_t branch, const ConstTensorView& q, const ConstTensorView& k,
                        const Call& call, std::span<const RowRange> ranges, int threads) {
  const Problem& problem = plan.problem();
  const BranchPlan& own = plan.branches()[branch];
  const std::int64_t size = own.mask->block_size(), blocks = own.mask->blocks(), heads = problem.heads;
  const KeyRows keys(k, k, call.pieces);
  const LoopControl control{call.cancel};
  const auto length = [&](std::int64_t entry) { return rows_of_entry(call.lengths, entry, problem.tokens); };

  BlockMeans key_means(problem, problem.kv_heads, blocks), query_means(problem, heads, blocks);
  parallel_for(threads, problem.batch * problem.kv_heads, control, [&](int, std::int64_t item) {
    const std::int64_t entry = item / problem.kv_heads, head = item % problem.kv_heads;
    const Strand strand{0, 1, length(entry)};
    keys.for_each_run(entry, head, strand, 0, strand.count, [&](std::int64_t position, const RowRun& run) {
      for (std::int64_t i = 0; i < run.count; ++i) {
        if (key_allowed(call.key_mask, entry, position + i))
          key_means.add(entry, head, (position + i) / size, run.k + i * run.k_stride, k.dtype);
      }
    });
    key_means.divide(entry, head);
  });
  parallel_for(threads, problem.batch * heads, control, [&](int, std::int64_t item) {
    const std::int64_t entry = item / heads, head = item % heads;
    PositionCursor cursor(ranges, 0);
    for (std::int64_t row = 0; row < problem.query_rows; ++row) {
      const std::int64_t position = cursor.next();
      if (position >= length(entry) || !key_allowed(call.key_mask, entry, position)) continue;
      query_means.add(entry, head, position / size, q.bytes_at(entry, row, head), q.dtype);
    }
    query_means.divide(entry, head);
  });

  // How many columns a row keeps is known before they are chosen, so every row has its place in the list. Entries
  // shorter than the batch have fewer blocks, and choose among those.
  const auto candidates = [&](std::int64_t entry, std::int64_t row) {
    const std::int64_t present = (length(entry) + size - 1) / size;
    return row >= present ? 0 : plan.options().causal ? row + 1 : present;
  };
  const std::int64_t rows = problem.batch * heads * blocks;
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(rows + 1));
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t count = candidates(row / blocks / heads, row % blocks);
    offsets[static_cast<std::size_t>(row + 1)] =
        offsets[static_cast<std::size_t>(row)] + (count > 0 ? kept_columns(own.adaptive_density, count) : 0);
  }
  std::vector<std::int32_t> columns(static_cast<std::size_t>(offsets.back()));
  std::vector<std::vector<float>> all_scores(static_cast<std::size_t>(threads));
  std::vector<std::vector<std::int32_t>> all_orders(all_scores.size());
  parallel_for(threads, rows, control, [&](int worker, std::int64_t row) {
    const std::int64_t block_row = row % blocks, head = row / blocks % heads, entry = row / blocks / heads;
    const std::int64_t count = candidates(entry, block_row);
    if (count == 0) return;
    std::vector<float>& scores = all_scores[static_cast<std::size_t>(worker)];
    std::vector<std::int32_t>& order = all_orders[static_cast<std::size_t>(worker)];
    scores.resize(static_cast<std::size_t>(count));
    const float* const query = query_means.at(entry, head, block_row);
    for (std::int64_t column = 0; column < count; ++column) {
      scores[static_cast<std::size_t>(column)] = plain::dot<float>(
          query, reinterpret_cast<const std::byte*>(key_means.at(entry, head / (heads / problem.kv_heads), column)),
          problem.head_dim);
    }
    order.resize(static_cast<std::size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    std::swap(order[0], order[static_cast<std::size_t>(block_row)]);  // the diagonal is in, whatever its score
    const std::int64_t kept = offsets[static_cast<std::size_t>(row + 1)] - offsets[static_cast<std::size_t>(row)];
    if (kept < count) {
      std::nth_element(order.begin() + 1, order.begin() + kept, order.end(),
                       [&](std::int32_t a, std::int32_t b) { return better(scores.data(), a, b); });
    }
    std::sort(order.begin(), order.begin() + kept);
    std::copy(order.begin(), order.begin() + kept, columns.begin() + offsets[static_cast<std::size_t>(row)]);
  });
  if (problem.batch == 0) return *plan.branches()[branch].mask;  // what keeps nothing
  return BlockMask::from_lists(static_cast<int>(size), problem.batch * heads, blocks, std::move(offsets),
                               std::move(columns));
}

}  // namespace longspan
