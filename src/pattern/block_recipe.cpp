// Making the lists of a block mask: work and memory follow the active blocks, row by row.
#include "pattern/block_recipe.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <span>
#include <tuple>

#include "longspan/error.h"
#include "longspan/threads.h"
#include "pattern/block_counts.h"
#include "pattern/kept_columns.h"
#include "pattern/random_columns.h"
#include "util/parallel.h"

namespace longspan {
namespace {

using Kind = BlockTerm::Kind;

constexpr std::int64_t kMostActive = std::int64_t{1} << 32;  // 16 GiB of lists: beyond that a mask saves nothing

/// Columns first .. last, as far as they are blocks.
void add_range(std::vector<std::int32_t>& columns, std::int64_t first, std::int64_t last, std::int64_t blocks) {
  for (std::int64_t column = std::max<std::int64_t>(first, 0); column <= std::min(last, blocks - 1); ++column) {
    columns.push_back(static_cast<std::int32_t>(column));
  }
}

/// The union of ascending lists, appended to `target`: runs of the longer list between entries of the shorter one,
/// which is often a few blocks only, are found in growing strides and copied whole.
void append_union(std::span<const std::int32_t> a, std::span<const std::int32_t> b, std::vector<std::int32_t>& target) {
  auto [longer, shorter] = a.size() < b.size() ? std::tie(b, a) : std::tie(a, b);
  for (const std::int32_t column : shorter) {
    std::size_t stride = 1;
    while (stride < longer.size() && longer[stride] < column) stride *= 2;
    const auto end = longer.begin() + static_cast<std::ptrdiff_t>(std::min(stride + 1, longer.size()));
    const auto next = std::lower_bound(longer.begin(), end, column);
    target.insert(target.end(), longer.begin(), next);
    target.push_back(column);
    longer =
        longer.subspan(static_cast<std::size_t>(next - longer.begin()) + (next != longer.end() && *next == column));
  }
  target.insert(target.end(), longer.begin(), longer.end());
}

/// What one thread needs to make rows.
class RowMaker {
 public:
  explicit RowMaker(const BlockRecipe& recipe) : recipe_(recipe), regular_(recipe) {}

  /// The columns of all terms and of a custom mask, appended to `target`.
  void append(std::int64_t head, std::int64_t row, std::vector<std::int32_t>& target) {
    if (recipe_.adaptive()) return;
    const std::int64_t blocks = regular_.blocks, global = regular_.global;
    if (row < global) return add_range(target, 0, blocks - 1, blocks);
    const std::size_t begin = target.size();
    const std::int64_t reach = regular_.reach_of(row);
    add_range(target, 0, global - 1, blocks);
    add_range(target, std::max(global, row - reach), row + reach, blocks);
    columns_.clear();
    for (const std::int64_t step : regular_.steps) {
      for (std::int64_t column = row % step; column < blocks; column += step)
        columns_.push_back(static_cast<std::int32_t>(column));
    }
    for (const std::int64_t rate : regular_.rates) {
      add_range(columns_, row - rate, row - rate, blocks);
      add_range(columns_, row + rate, row + rate, blocks);
    }
    if (regular_.steps.size() > 1 || !regular_.rates.empty()) {
      std::sort(columns_.begin(), columns_.end());
      columns_.erase(std::unique(columns_.begin(), columns_.end()), columns_.end());
    }
    unite(columns_, begin, target);
    for (const BlockTerm& term : recipe_.terms) {
      if (term.kind != Kind::random) continue;
      const std::int64_t candidates = recipe_.causal ? row + 1 : blocks;
      drawer_.draw(term.seed, row, head % recipe_.heads, candidates, kept_columns(term.density, candidates), columns_);
      unite(columns_, begin, target);
    }
    if (recipe_.custom) unite(recipe_.custom->row(head, row), begin, target);
  }

 private:
  /// Ascending columns join those of the row that begins at `begin`.
  void unite(std::span<const std::int32_t> columns, std::size_t begin, std::vector<std::int32_t>& target) {
    if (columns.empty()) return;
    merged_.assign(target.begin() + static_cast<std::ptrdiff_t>(begin), target.end());
    target.resize(begin);
    append_union(merged_, columns, target);
  }

  const BlockRecipe& recipe_;
  RegularTerms regular_;
  std::vector<std::int32_t> columns_, merged_;
  ColumnDrawer drawer_;
};

std::string too_many(const BlockRecipe& recipe) {
  return fmt::format(
      "the block pattern keeps more than {} blocks of {} rows: use larger blocks, a lower density, or dense attention",
      kMostActive, recipe.rows);
}

/// Columns are int32.
std::string too_long(const BlockRecipe& recipe) {
  if (recipe.blocks() <= std::numeric_limits<std::int32_t>::max()) return "";
  return fmt::format("{} rows in blocks of {} are too many blocks for a mask: use larger blocks", recipe.rows,
                     recipe.block_size);
}

}  // namespace

std::int64_t BlockRecipe::mask_heads() const {
  if (custom && custom->heads() > 1) return custom->heads();
  const bool random =
      std::any_of(terms.begin(), terms.end(), [](const BlockTerm& term) { return term.kind == Kind::random; });
  return random ? heads : 1;
}

RegularTerms::RegularTerms(const BlockRecipe& recipe) : blocks(recipe.blocks()) {
  const std::int64_t size = recipe.block_size;
  std::vector<std::int64_t> all_steps;
  std::vector<std::pair<std::int64_t, std::int64_t>> all_levels;
  const auto step_of = [&](std::int64_t tokens) { return std::max<std::int64_t>(1, tokens / size); };
  for (const BlockTerm& term : recipe.terms) {
    const auto& numbers = term.numbers;
    switch (term.kind) {
      case Kind::local_window:
        reach = std::max(reach, numbers[0] / size / 2);
        break;
      case Kind::strided:
        all_steps.push_back(step_of(numbers[0]));
        break;
      case Kind::dilated_sparse:
        rates.insert(rates.end(), numbers.begin(), numbers.end());
        break;
      case Kind::global_local:
        global = std::max(global, blocks_of(std::abs(numbers[0]), size));
        reach = std::max(reach, numbers[1] / size / 2);
        break;
      case Kind::hierarchical:
        for (std::size_t i = 0; i < numbers.size(); i += 2)
          all_levels.emplace_back(step_of(numbers[i]), numbers[i + 1] == -1 ? blocks : numbers[i + 1] / size / 2);
        break;
      case Kind::random:
      case Kind::adaptive:
        break;
    }
  }
  global = std::min(global, blocks);
  reach = std::min(reach, blocks);
  std::sort(all_steps.begin(), all_steps.end());
  const auto seen = [&](std::int64_t distance) {
    return distance >= blocks ||
           std::any_of(steps.begin(), steps.end(), [&](std::int64_t step) { return distance % step == 0; });
  };
  for (const std::int64_t step : all_steps) {
    if (!seen(step)) steps.push_back(step);
  }
  std::sort(rates.begin(), rates.end());
  rates.erase(std::unique(rates.begin(), rates.end()), rates.end());
  std::erase_if(rates, seen);
  std::sort(all_levels.begin(), all_levels.end(), [](const auto& a, const auto& b) {
    return a.second > b.second || (a.second == b.second && a.first < b.first);
  });
  for (const auto& [step, far] : all_levels) {
    const std::int64_t rows = std::min(step, std::max<std::int64_t>(1, blocks));  // the latter: row 0 alone
    if (std::min(far, blocks) > reach && reach_of(rows) == reach) levels.emplace_back(rows, std::min(far, blocks));
  }
}

std::int64_t RegularTerms::reach_of(std::int64_t row) const {
  const auto level = std::find_if(levels.begin(), levels.end(), [&](const auto& one) { return row % one.first == 0; });
  return level == levels.end() ? reach : level->second;
}

std::vector<std::int32_t> make_row(const BlockRecipe& recipe, std::int64_t head, std::int64_t block_row) {
  if (const std::string why = too_long(recipe); !why.empty()) throw InvalidArgument("pattern", why);
  std::vector<std::int32_t> row;
  RowMaker(recipe).append(head, block_row, row);
  return row;
}

std::string why_no_lists(const BlockRecipe& recipe) {
  if (const std::string why = too_long(recipe); !why.empty()) return why;
  const auto heads = static_cast<double>(recipe.mask_heads());
  const auto counts = BlockCounts::of(recipe);
  const double active = counts ? counts->blocks().value : BlockCounts::at_least(recipe);
  // Every row has an offset, whatever it keeps.
  const double entries = heads * std::max(active, static_cast<double>(recipe.blocks()));
  return entries > static_cast<double>(kMostActive) ? too_many(recipe) : "";
}

BlockLists make_lists(const BlockRecipe& recipe, const std::atomic<bool>* cancel) {
  if (const std::string why = why_no_lists(recipe); !why.empty()) throw InvalidArgument("pattern", why);
  const std::int64_t blocks = recipe.blocks();
  // Chunks of rows are made in parallel, each with lists of its own, and joined in their order.
  constexpr std::int64_t kRowsPerChunk = 64;
  const std::int64_t all_rows = recipe.mask_heads() * blocks, chunks = (all_rows + kRowsPerChunk - 1) / kRowsPerChunk;
  std::vector<std::vector<std::int32_t>> chunk_columns(static_cast<std::size_t>(chunks));
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(all_rows + 1));
  const int threads = static_cast<int>(std::clamp<std::int64_t>(chunks / 4, 1, num_threads()));
  std::vector<RowMaker> makers(static_cast<std::size_t>(threads), RowMaker(recipe));
  std::atomic<std::int64_t> active = 0;
  parallel_for(threads, chunks, {.cancel = cancel}, [&](int worker, std::int64_t chunk) {
    auto& own = chunk_columns[static_cast<std::size_t>(chunk)];
    const std::int64_t end = std::min((chunk + 1) * kRowsPerChunk, all_rows);
    for (std::int64_t row = chunk * kRowsPerChunk; row < end; ++row) {
      if (row % kRowsPerChunk == 1 && own.size() < 4096)
        own.reserve(own.size() * (kRowsPerChunk + 4));  // rows are mostly alike
      makers[static_cast<std::size_t>(worker)].append(row / blocks, row % blocks, own);
      offsets[static_cast<std::size_t>(row + 1)] = static_cast<std::int64_t>(own.size());
    }
    if ((active += static_cast<std::int64_t>(own.size())) > kMostActive)
      throw InvalidArgument("pattern", too_many(recipe));
  });
  std::vector<std::int64_t> begins(chunk_columns.size() + 1);
  for (std::size_t chunk = 0; chunk < chunk_columns.size(); ++chunk)
    begins[chunk + 1] = begins[chunk] + static_cast<std::int64_t>(chunk_columns[chunk].size());
  std::vector<std::int32_t> columns(static_cast<std::size_t>(begins.back()));
  parallel_for(threads, chunks, {.cancel = cancel}, [&](int, std::int64_t chunk) {
    const auto& own = chunk_columns[static_cast<std::size_t>(chunk)];
    const std::int64_t first = begins[static_cast<std::size_t>(chunk)];
    std::copy(own.begin(), own.end(), columns.begin() + first);
    const std::int64_t end = std::min((chunk + 1) * kRowsPerChunk, all_rows);
    for (std::int64_t row = chunk * kRowsPerChunk; row < end; ++row)
      offsets[static_cast<std::size_t>(row + 1)] += first;
  });
  return {std::move(offsets), std::move(columns)};
}

}  // namespace longspan
