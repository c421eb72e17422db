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
struct RowMaker {
  int block_size;
  std::int64_t blocks;
  bool causal;
  std::int64_t heads;  // of the problem; a mask of one's own may have as many for each batch entry
  std::vector<std::int32_t> term_columns = {}, merged = {};
  ColumnDrawer drawer = {};

  /// The columns of a term in `term_columns`, ascending.
  void make(const BlockTerm& term, std::int64_t head, std::int64_t row) {
    const std::int64_t b = block_size;
    auto& columns = term_columns;
    columns.clear();
    switch (term.kind) {
      case Kind::local_window: {
        const std::int64_t reach = term.numbers[0] / b / 2;
        return add_range(columns, row - reach, row + reach, blocks);
      }
      case Kind::strided: {
        const std::int64_t step = std::max<std::int64_t>(1, term.numbers[0] / b);
        for (std::int64_t column = row % step; column < blocks; column += step)
          columns.push_back(static_cast<std::int32_t>(column));
        return;
      }
      case Kind::dilated_sparse:
        columns.push_back(static_cast<std::int32_t>(row));
        for (const std::int64_t rate : term.numbers) {
          if (rate >= blocks) continue;  // also where row + rate would overflow
          add_range(columns, row - rate, row - rate, blocks);
          add_range(columns, row + rate, row + rate, blocks);
        }
        std::sort(columns.begin(), columns.end());
        columns.erase(std::unique(columns.begin(), columns.end()), columns.end());
        return;
      case Kind::global_local: {
        const std::int64_t global = blocks_of(std::abs(term.numbers[0]), b), reach = term.numbers[1] / b / 2;
        if (row < global) return add_range(columns, 0, blocks - 1, blocks);
        add_range(columns, 0, global - 1, blocks);
        return add_range(columns, std::max(global, row - reach), row + reach, blocks);
      }
      case Kind::hierarchical: {
        std::int64_t reach = 0;
        for (std::size_t i = 0; i < term.numbers.size(); i += 2) {
          if (row % std::max<std::int64_t>(1, term.numbers[i] / b) != 0) continue;
          reach = std::max(reach, term.numbers[i + 1] == -1 ? blocks : term.numbers[i + 1] / b / 2);
        }
        return add_range(columns, row - reach, row + reach, blocks);
      }
      case Kind::random: {
        const std::int64_t candidates = causal ? row + 1 : blocks;
        return drawer.draw(term.seed, row, head % heads, candidates, kept_columns(term.density, candidates), columns);
      }
      case Kind::adaptive:
        return;  // each call chooses
    }
  }

  /// The union of all terms (and a custom mask's row), appended to `target`.
  void append(const std::vector<BlockTerm>& terms, const std::optional<BlockMask>& custom, std::int64_t head,
              std::int64_t row, std::vector<std::int32_t>& target) {
    const std::size_t begin = target.size();
    if (custom) {
      const auto own = custom->row(head, row);
      target.insert(target.end(), own.begin(), own.end());
    }
    for (const BlockTerm& term : terms) {
      make(term, head, row);
      merged.assign(target.begin() + static_cast<std::ptrdiff_t>(begin), target.end());
      target.resize(begin);
      append_union(merged, term_columns, target);
    }
  }
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

std::vector<std::int32_t> make_row(const BlockRecipe& recipe, std::int64_t head, std::int64_t block_row) {
  if (const std::string why = too_long(recipe); !why.empty()) throw InvalidArgument("pattern", why);
  std::vector<std::int32_t> row;
  RowMaker{recipe.block_size, recipe.blocks(), recipe.causal, recipe.heads}.append(recipe.terms, recipe.custom, head,
                                                                                   block_row, row);
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
  std::vector<RowMaker> makers(static_cast<std::size_t>(threads),
                               RowMaker{recipe.block_size, blocks, recipe.causal, recipe.heads});
  std::atomic<std::int64_t> active = 0;
  parallel_for(threads, chunks, {.cancel = cancel}, [&](int worker, std::int64_t chunk) {
    auto& own = chunk_columns[static_cast<std::size_t>(chunk)];
    const std::int64_t end = std::min((chunk + 1) * kRowsPerChunk, all_rows);
    for (std::int64_t row = chunk * kRowsPerChunk; row < end; ++row) {
      if (row % kRowsPerChunk == 1 && own.size() < 4096)
        own.reserve(own.size() * (kRowsPerChunk + 4));  // rows are mostly alike
      makers[static_cast<std::size_t>(worker)].append(recipe.terms, recipe.custom, row / blocks, row % blocks, own);
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
