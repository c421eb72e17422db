// Making block patterns, and turning them into masks: work and memory follow the active blocks, row by row.
#include "longspan/block_pattern.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <span>
#include <tuple>

#include "longspan/error.h"
#include "longspan/threads.h"
#include "pattern/block_size.h"
#include "pattern/kept_columns.h"
#include "pattern/random_columns.h"
#include "util/hash.h"
#include "util/parallel.h"

namespace longspan {
namespace {

using Kind = BlockTerm::Kind;

constexpr std::int64_t kMostActive = std::int64_t{1} << 32;  // 16 GiB of lists: beyond that a mask saves nothing

void check_density(double density) {
  if (!(density > 0 && density <= 1)) {
    throw InvalidArgument("density",
                          fmt::format("density is {}: give the fraction of blocks to keep, in (0, 1]", density));
  }
}

void check_at_least(std::string_view name, std::int64_t value, std::int64_t least) {
  if (value < least)
    throw InvalidArgument(std::string(name), fmt::format("{} is {}: give {} or more tokens", name, value, least));
}

void check_term(const BlockTerm& term) {
  const auto number = [&](std::size_t index) { return term.numbers[index]; };
  switch (term.kind) {
    case Kind::local_window:
      return check_at_least("window", number(0), 0);
    case Kind::strided:
      return check_at_least("stride", number(0), 1);
    case Kind::global_local:
      return check_at_least("window", number(1), 0);
    case Kind::dilated_sparse:
      if (term.numbers.empty())
        throw InvalidArgument("rates", "rates is empty: give distances in blocks, such as 1, 2, 4");
      for (const std::int64_t rate : term.numbers) {
        if (rate < 1) throw InvalidArgument("rates", fmt::format("rates has {}: distances are at least 1 block", rate));
      }
      return;
    case Kind::hierarchical:
      if (term.numbers.empty())
        throw InvalidArgument("levels", "levels is empty: give pairs of stride and window, such as 64:256");
      for (std::size_t i = 0; i < term.numbers.size(); i += 2) {
        if (number(i) < 1)
          throw InvalidArgument("levels",
                                fmt::format("level {} has stride {}: give 1 or more tokens", i / 2, number(i)));
        if (number(i + 1) < -1) {
          throw InvalidArgument(
              "levels", fmt::format("level {} has window {}: give tokens, or -1 for all", i / 2, number(i + 1)));
        }
      }
      return;
    case Kind::random:
    case Kind::adaptive:
      return check_density(term.density);
  }
}

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
          add_range(columns, row - rate, row - rate, blocks);
          add_range(columns, row + rate, row + rate, blocks);
        }
        std::sort(columns.begin(), columns.end());
        columns.erase(std::unique(columns.begin(), columns.end()), columns.end());
        return;
      case Kind::global_local: {
        const std::int64_t global = (std::abs(term.numbers[0]) + b - 1) / b, reach = term.numbers[1] / b / 2;
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

BlockTerm make_term(Kind kind, std::vector<std::int64_t> numbers, double density = 0, std::uint64_t seed = 0) {
  return {kind, std::move(numbers), density, seed};
}

}  // namespace

BlockPattern::BlockPattern(int block_size, std::vector<BlockTerm> terms)
    : block_size_(block_size), terms_(std::move(terms)) {
  check();
}
BlockPattern::BlockPattern(BlockMask mask) : block_size_(mask.block_size()), custom_(std::move(mask)) {}

BlockPattern BlockPattern::local_window(std::int64_t window, int block_size) {
  return {block_size, {make_term(Kind::local_window, {window})}};
}
BlockPattern BlockPattern::strided(std::int64_t stride, int block_size) {
  return {block_size, {make_term(Kind::strided, {stride})}};
}
BlockPattern BlockPattern::dilated_sparse(const std::vector<std::int64_t>& rates, int block_size) {
  return {block_size, {make_term(Kind::dilated_sparse, rates)}};
}
BlockPattern BlockPattern::global_local(std::int64_t global_tokens, std::int64_t window, int block_size) {
  check_at_least("global_tokens", global_tokens, 0);
  return {block_size, {make_term(Kind::global_local, {global_tokens, window})}};
}
BlockPattern BlockPattern::hierarchical(const std::vector<std::pair<std::int64_t, std::int64_t>>& levels,
                                        int block_size) {
  std::vector<std::int64_t> numbers;
  for (const auto& [stride, window] : levels) numbers.insert(numbers.end(), {stride, window});
  return {block_size, {make_term(Kind::hierarchical, std::move(numbers))}};
}
BlockPattern BlockPattern::random(double density, std::uint64_t seed, int block_size) {
  return {block_size, {make_term(Kind::random, {}, density, seed)}};
}
BlockPattern BlockPattern::adaptive(double density, int block_size) {
  return {block_size, {make_term(Kind::adaptive, {}, density)}};
}
BlockPattern BlockPattern::bigbird(std::int64_t global_tokens, std::int64_t window, double density, std::uint64_t seed,
                                   int block_size) {
  if (window < 0) window = 3 * block_size;
  const BlockPattern first =
      global_tokens < 0 ? parse(fmt::format("block={} global_local(<={},{})", block_size, 2 * block_size, window))
                        : global_local(global_tokens, window, block_size);
  return first | random(density, seed, block_size);
}
BlockPattern BlockPattern::longformer(std::int64_t window, std::int64_t global_tokens, int block_size) {
  return global_local(global_tokens, window, block_size);
}

BlockPattern BlockPattern::operator|(const BlockPattern& other) const {
  if (block_size_ != other.block_size_) {
    throw InvalidArgument("block_size", fmt::format("block sizes {} and {}: patterns unite where they agree",
                                                    block_size_, other.block_size_));
  }
  BlockPattern both = *this;
  for (const BlockTerm& term : other.terms_) {
    if (std::find(both.terms_.begin(), both.terms_.end(), term) == both.terms_.end()) both.terms_.push_back(term);
  }
  if (other.custom_) both.custom_ = both.custom_ ? *both.custom_ | *other.custom_ : *other.custom_;
  both.check();
  return both;
}

void BlockPattern::check() const {
  check_block_size(block_size_);
  if (terms_.empty() && !custom_)
    throw InvalidArgument("pattern", "the block pattern is empty: give at least one term or a mask");
  for (const BlockTerm& term : terms_) {
    check_term(term);
    if (term.kind == Kind::adaptive && (terms_.size() > 1 || custom_)) {
      throw InvalidArgument("pattern", "adaptive stands alone: it cannot be united with other block patterns");
    }
  }
}

double BlockPattern::adaptive_density() const {
  return !terms_.empty() && terms_.front().kind == Kind::adaptive ? terms_.front().density : 0.0;
}

bool BlockPattern::depends_on_length(bool causal) const {
  return !causal &&
         std::any_of(terms_.begin(), terms_.end(), [](const BlockTerm& term) { return term.kind == Kind::random; });
}

BlockMask BlockPattern::mask(std::int64_t rows, std::int64_t heads, bool causal) const {
  const std::int64_t blocks = rows / block_size_ + (rows % block_size_ != 0);
  if (blocks > std::numeric_limits<std::int32_t>::max()) {
    throw InvalidArgument(
        "block_size",
        fmt::format("{} rows in blocks of {} are too many blocks for a mask: use larger blocks", rows, block_size_));
  }
  if (custom_ && custom_->blocks() != blocks) {
    throw InvalidArgument(
        "mask", fmt::format("the block mask has {} block rows: strands of up to {} rows in blocks of {} need {}",
                            custom_->blocks(), rows, block_size_, blocks));
  }
  for (const BlockTerm& term : terms_) {
    if (rows > 0 && term.kind == Kind::global_local && term.numbers[0] > rows) {
      throw InvalidArgument(
          "global_tokens",
          fmt::format("global_tokens is {}: the sequence has {}; give at most so many", term.numbers[0], rows));
    }
  }
  return terms_.empty() ? *custom_ : make(custom_, rows, heads, causal);
}

BlockMask BlockPattern::entry_mask(std::int64_t rows, std::int64_t heads, bool causal) const {
  return make({}, rows, heads, causal);
}

BlockMask BlockPattern::make(const std::optional<BlockMask>& custom, std::int64_t rows, std::int64_t heads,
                             bool causal) const {
  const std::int64_t blocks = rows / block_size_ + (rows % block_size_ != 0);
  const bool random =
      std::any_of(terms_.begin(), terms_.end(), [](const BlockTerm& term) { return term.kind == Kind::random; });
  const std::int64_t mask_heads = custom && custom->heads() > 1 ? custom->heads() : random ? heads : 1;

  // Chunks of rows are made in parallel, each with lists of its own, and joined in their order.
  constexpr std::int64_t kRowsPerChunk = 64;
  const std::int64_t all_rows = mask_heads * blocks, chunks = (all_rows + kRowsPerChunk - 1) / kRowsPerChunk;
  std::vector<std::vector<std::int32_t>> parts(static_cast<std::size_t>(chunks));
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(all_rows + 1));
  const int threads = static_cast<int>(std::clamp<std::int64_t>(chunks / 4, 1, num_threads()));
  std::vector<RowMaker> makers(static_cast<std::size_t>(threads), RowMaker{block_size_, blocks, causal, heads});
  std::atomic<std::int64_t> active = 0;
  parallel_for(threads, chunks, {}, [&](int worker, std::int64_t chunk) {
    auto& part = parts[static_cast<std::size_t>(chunk)];
    const std::int64_t end = std::min((chunk + 1) * kRowsPerChunk, all_rows);
    for (std::int64_t row = chunk * kRowsPerChunk; row < end; ++row) {
      if (row % kRowsPerChunk == 1 && part.size() < 4096)
        part.reserve(part.size() * (kRowsPerChunk + 4));  // rows are mostly alike
      makers[static_cast<std::size_t>(worker)].append(terms_, custom, row / blocks, row % blocks, part);
      offsets[static_cast<std::size_t>(row + 1)] = static_cast<std::int64_t>(part.size());
    }
    if (active += static_cast<std::int64_t>(part.size()); active > kMostActive) {
      throw InvalidArgument(
          "pattern", fmt::format("the block pattern keeps more than {} blocks of {} rows: use larger blocks, a lower "
                                 "density, or dense attention",
                                 kMostActive, rows));
    }
  });
  std::vector<std::int64_t> begins(parts.size() + 1);
  for (std::size_t chunk = 0; chunk < parts.size(); ++chunk)
    begins[chunk + 1] = begins[chunk] + static_cast<std::int64_t>(parts[chunk].size());
  std::vector<std::int32_t> columns(static_cast<std::size_t>(begins.back()));
  parallel_for(threads, chunks, {}, [&](int, std::int64_t chunk) {
    const auto& part = parts[static_cast<std::size_t>(chunk)];
    const std::int64_t first = begins[static_cast<std::size_t>(chunk)];
    std::copy(part.begin(), part.end(), columns.begin() + first);
    const std::int64_t end = std::min((chunk + 1) * kRowsPerChunk, all_rows);
    for (std::int64_t row = chunk * kRowsPerChunk; row < end; ++row)
      offsets[static_cast<std::size_t>(row + 1)] += first;
  });
  return BlockMask::trusted(block_size_, mask_heads, blocks, std::move(offsets), std::move(columns));
}

std::uint64_t BlockPattern::hash() const {
  Hasher hasher;
  hasher.add(static_cast<std::uint64_t>(block_size_));
  for (const BlockTerm& term : terms_) {
    hasher.add(static_cast<std::uint64_t>(term.kind) << 32 | term.numbers.size());
    for (const std::int64_t number : term.numbers) hasher.add(static_cast<std::uint64_t>(number));
    hasher.add(term.density);
    hasher.add(term.seed);
  }
  if (custom_) hasher.add(custom_->hash());
  return hasher.value();
}

}  // namespace longspan
